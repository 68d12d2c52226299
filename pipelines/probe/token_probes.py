"""Probe tokens with masks or depth maps: their sizes and crops, the probe of a layer, and examples of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from extract.analysis.dense import depth_probe, segmentation_probe, with_validation
from extract.analysis.probe.probing import ProbeResult
from extract.errors import InputError
from extract.store.reader import FeatureReader
from extract.store.tokens.token_array import TokenArray
from pipelines.probe.config import ProbeConfig
from pipelines.probe.labelling import Labelling
from pipelines.probe.pixel_files import DepthFiles, MaskFiles, class_names, examine
from pipelines.terminal.pictures import Pictures

__all__ = ["Example", "TokenProbes"]

_EXAMPLES = 8  # test images that are drawn, evenly spread
_EXAMPLE_PX = 512  # longer side of their pictures


class Example(NamedTuple):
    """A test image with its mask or depth map, and the predicted one.

    Attributes:
        row: row of the data set.
        picture: RGB picture, made smaller; None if it is not available.
        truth: (H, W) numbers of classes, -1 for no label; or depths.
        predicted: (H, W) numbers of classes, -1 outside the crop; or depths, NaN outside the crop.
    """

    row: int
    picture: Image.Image | None
    truth: NDArray[Any]
    predicted: NDArray[Any]


class TokenProbes:
    """The masks or depth maps of a data set, and the probes of its layers.

    Args:
        config: configuration of the run.
        reader: reader of the data set.
        root: location of its images.
        labelling: splits, and the file of each row.
        tokens: tokens of any feature.

    Attributes:
        labelling: the same, with the names of the classes of masks, and with notes.

    Raises:
        InputError: see `examine`.
    """

    def __init__(self, config: ProbeConfig, reader: FeatureReader, root: str, labelling: Labelling, tokens: TokenArray):
        self._config = config
        rows = np.sort(np.concatenate([labelling.train, labelling.val, labelling.test])).tolist()
        names = {row: str(labelling.targets[row]) for row in rows}
        self._pictures = Pictures(reader, root, rows)
        self._files: MaskFiles | DepthFiles = DepthFiles(names)
        if config.task == "segmentation":
            named = None if config.class_names is None else class_names(config.class_names)
            self._files = MaskFiles(names, config.ignore_label or (), named)
        notes = examine(self._files, names, tokens, self._pictures)
        classes = np.array(self._files.classes if isinstance(self._files, MaskFiles) else [])
        self.labelling = replace(labelling, classes=classes, notes=[*labelling.notes, *notes])

    def probe(
        self, tokens: Sequence[TokenArray], *, validated: bool = False
    ) -> tuple[ProbeResult, Callable[[], list[Example]]]:
        """Probe one feature, or several concatenated ones; return the result, and a function that returns examples.

        Args:
            tokens: tokens of each feature.
            validated: whether to also fit a probe that is tested on validation images, by which one of several
                features may be chosen. Their tokens do not serve: those of another grid have other labels.

        Raises:
            InputError: see `segmentation_probe`, `depth_probe`.
        """
        sets, rows = self.labelling, tokens[0].rows
        train, val, test = (np.searchsorted(rows, part) for part in (sets.train, sets.val, sets.test))
        shown = set(test[np.linspace(0, len(test) - 1, min(_EXAMPLES, len(test))).round().astype(int)].tolist())
        kept: dict[int, NDArray[Any]] = {}

        def keep(image: int, predicted: NDArray[Any]) -> None:
            if image in shown:
                kept[int(rows[image])] = predicted

        result = self._fitted(tokens, train, val, test, keep)
        if validated:
            with contextlib.suppress(InputError):  # too few images, or without labels
                fitted, left_out, chosen_on = with_validation(train, val, self._config.seed)
                validation = self._fitted(tokens, fitted, val[:0], left_out).value
                result = replace(result, validation=validation, chosen_on=chosen_on)
        return result, lambda: [self._example(row, predicted) for row, predicted in kept.items()]

    def _fitted(
        self, tokens: Sequence[TokenArray], train: NDArray[np.int64], val: NDArray[np.int64], test: NDArray[np.int64],
        on_prediction: Callable[[int, NDArray[Any]], None] | None = None,
    ) -> ProbeResult:  # fmt: skip
        config = self._config
        common: dict[str, Any] = {
            "val": val if len(val) else None, "protocol": config.protocol, "seed": config.seed,
            "device": config.device, "memory_bytes": config.memory_bytes, "on_prediction": on_prediction,
        }  # fmt: skip
        files = _OfImages(self._files, tokens[0].rows)
        if isinstance(self._files, MaskFiles):
            return segmentation_probe(tokens, files, train, test, classes=self.labelling.classes.tolist(), **common)
        return depth_probe(tokens, files, train, test, max_depth=config.max_depth, **common)

    def _example(self, row: int, predicted: NDArray[Any]) -> Example:
        picture, _ = self._pictures.picture(row)
        if picture is not None:
            picture.thumbnail((_EXAMPLE_PX, _EXAMPLE_PX))
        return Example(row, picture, self._files[row], predicted)

    def about(self, result: ProbeResult) -> Mapping[str, Any]:
        """Return what a saved probe needs to write masks or depths: labels of classes, or how bins give depths."""
        assert result.model is not None
        if isinstance(self._files, DepthFiles):
            return result.model.about
        label_of = dict(zip(self._files.classes, self._files.ids.tolist(), strict=True))
        return {"labels": [label_of[str(name)] for name in result.model.classes_.tolist()]}


class _OfImages:
    """Files by the numbers of images of tokens, in place of rows."""

    def __init__(self, files: MaskFiles | DepthFiles, rows: NDArray[np.int64]):
        self._files, self._rows = files, rows

    def __getitem__(self, image: int) -> NDArray[Any]:
        return self._files[int(self._rows[image])]
