"""Probe tokens with masks: the classes, sizes and crops of the masks, the probe of a layer, and examples of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from extract.analysis.dense.segmentation import segmentation_probe
from extract.analysis.probe.probing import ProbeResult
from extract.errors import InputError
from extract.store.reader import FeatureReader
from extract.store.tokens.token_array import TokenArray
from pipelines.probe.config import ProbeConfig
from pipelines.probe.labelling import Labelling
from pipelines.probe.masks import MaskFiles, class_names
from pipelines.terminal.pictures import Pictures

__all__ = ["Example", "Segmentation", "layers_with_tokens"]

_EXAMPLES = 8  # test images that are drawn, evenly spread
_EXAMPLE_PX = 512  # longer side of their pictures


class Example(NamedTuple):
    """A test image with its mask and its predicted mask.

    Attributes:
        row: row of the data set.
        picture: RGB picture, made smaller; None if it is not available.
        truth: (H, W) numbers of classes; -1 for no label.
        predicted: (H, W) numbers of classes; -1 outside the crop.
    """

    row: int
    picture: Image.Image | None
    truth: NDArray[np.int64]
    predicted: NDArray[np.int64]


def layers_with_tokens(reader: FeatureReader, where: str) -> list[str]:
    """Return the features of a data set that have tokens.

    Raises:
        InputError: there are none.
    """
    found = []
    for name in reader.layers:
        try:
            reader.tokens(name)
        except InputError:
            continue
        found.append(name)
    if not found:
        raise InputError(
            f"{where} has no feature with tokens", hint="store them: layertap embed IMAGES -l LAYER:tokens"
        )
    return found


@dataclass(frozen=True)
class Segmentation:
    """The masks of a data set.

    Attributes:
        masks: classes of the pixels of each labelled row.
        pictures: pictures of these rows.
    """

    masks: MaskFiles
    pictures: Pictures

    @staticmethod
    def of(
        config: ProbeConfig, reader: FeatureReader, root: str, labelling: Labelling, tokens: TokenArray
    ) -> tuple[Segmentation, Labelling]:
        """Read the masks, and return them with the labelling, which then has the names of the classes.

        Args:
            config: configuration of the run.
            reader: reader of the data set.
            root: location of its images.
            labelling: splits, and the mask of each row.
            tokens: tokens of any feature.

        Raises:
            InputError: see `MaskFiles.examine`.
        """
        assert config.masks is not None
        rows = np.sort(np.concatenate([labelling.train, labelling.val, labelling.test])).tolist()
        orientation = str(reader.provenance.get("configuration", {}).get("orientation", "exif"))
        pictures = Pictures(reader, root, rows, orientation=orientation)
        masks = MaskFiles(
            config.masks,
            {row: str(labelling.targets[row]) for row in rows},
            config.ignore_label,
            None if config.class_names is None else class_names(config.class_names),
        )
        notes = masks.examine(tokens, pictures)
        classes = np.array(masks.classes)
        return Segmentation(masks, pictures), replace(labelling, classes=classes, notes=[*labelling.notes, *notes])

    def probe(
        self, config: ProbeConfig, labelling: Labelling, tokens: Sequence[TokenArray], memory_bytes: int | None
    ) -> tuple[ProbeResult, Callable[[], list[Example]]]:
        """Probe one feature, or several concatenated ones; return the result, and a function that returns examples.

        Raises:
            InputError: see `segmentation_probe`.
        """
        rows = tokens[0].rows
        train, val, test = (np.searchsorted(rows, part) for part in (labelling.train, labelling.val, labelling.test))
        shown = set(test[np.linspace(0, len(test) - 1, min(_EXAMPLES, len(test))).round().astype(int)].tolist())
        kept: dict[int, NDArray[np.int64]] = {}

        def keep(image: int, predicted: NDArray[np.int64]) -> None:
            if image in shown:
                kept[int(rows[image])] = predicted

        result = segmentation_probe(
            tokens, _OfImages(self.masks, rows), train, test, val=val if len(val) else None,
            classes=labelling.classes.tolist(), protocol=config.protocol, iterations=config.iterations,
            seed=config.seed, device=config.device, memory_bytes=memory_bytes, on_prediction=keep,
        )  # fmt: skip
        return result, lambda: [self._example(row, predicted) for row, predicted in kept.items()]

    def _example(self, row: int, predicted: NDArray[np.int64]) -> Example:
        picture, _ = self.pictures.picture(row)
        if picture is not None:
            picture.thumbnail((_EXAMPLE_PX, _EXAMPLE_PX))
        return Example(row, picture, self.masks[row], predicted)

    def about(self, result: ProbeResult) -> Mapping[str, Any]:
        """Return what a saved probe needs to write masks: the labels of its classes."""
        assert result.model is not None
        label_of = dict(zip(self.masks.classes, self.masks.ids.tolist(), strict=True))
        return {"labels": [label_of[str(name)] for name in result.model.classes_.tolist()]}


class _OfImages:
    """Masks by the numbers of images of tokens, in place of rows."""

    def __init__(self, masks: MaskFiles, rows: NDArray[np.int64]):
        self._masks, self._rows = masks, rows

    def __getitem__(self, image: int) -> NDArray[np.int64]:
        return self._masks[int(self._rows[image])]
