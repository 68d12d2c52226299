"""A sample of images with the backbone's own preprocessing, and which outputs of the network their classes are."""

from __future__ import annotations

import contextlib
import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from extract.compute.backbone import Backbone
from extract.credentials import text_without_credentials
from extract.errors import InputError
from extract.images import Decoding, Images, list_images, load_batches
from extract.images.csv_lists import file_and_column
from extract.images.image_list import label_text
from extract.row_status import Status
from extract.taps.layer_names import named_layers
from pipelines.network.config import LookConfig
from pipelines.terminal.image_tables import read_image_table, without_fractions
from pipelines.terminal.text_output import SHOWN, print_line, printable

__all__ = ["Sample", "SampleBatch", "Targets", "class_name", "evenly", "n_outputs", "sample_of", "targets_of"]

_NUMBERS = "output numbers, counted from 0"
_IDS = "WordNet ids"
_LABELS = "label names of the network"


class SampleBatch(NamedTuple):
    """A batch of images that could be decoded.

    Attributes:
        inputs: (B, 3, H, W) on the device.
        rows: (B,) row numbers.
        pixels: (B, H, W, 3) uint8, the images as the backbone sees them.
    """

    inputs: Tensor
    rows: NDArray[np.int64]
    pixels: NDArray[np.uint8]


@dataclass
class Sample:
    """Selected rows of a list of images.

    Attributes:
        images: all images; only the selected images if the list is a plan.
        n_listed: number of images in the list.
        backbone: backbone whose preprocessing is applied.
        rows: selected rows of `images`.
        config: batch size, processes and limit of pixels; see `embed`.
        decoded: rows decoded so far, in order.
        failed: row -> why it could not be decoded.
    """

    images: Images
    n_listed: int
    backbone: Backbone
    rows: list[int]
    config: LookConfig
    decoded: list[int] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)

    def batches(self) -> Iterator[SampleBatch]:
        """Yield the batches; the next batch is decoded while the current batch is in use.

        Raises:
            InputError: no image can be decoded.
        """
        preprocessing = self.backbone.preprocessing
        size = self.config.batch_size
        batches = [self.rows[start : start + size] for start in range(0, len(self.rows), size)]
        workers = self.config.workers if len(batches) > 1 else 0
        decoding = Decoding.for_preprocessing(preprocessing, self.config.max_pixels, workers, size)
        loaded = load_batches(self.images, batches, decoding)
        self.decoded.clear()
        with contextlib.closing(loaded):
            for batch in loaded:
                decoded_rows = batch.rows[batch.status == Status.OK]
                self.decoded += decoded_rows.tolist()
                self.failed |= batch.reasons
                if len(decoded_rows):
                    inputs = preprocessing.to_input(batch.images.to(self.backbone.device))
                    yield SampleBatch(inputs, decoded_rows, _pixels(batch.images))
        if not self.decoded:
            row, reason = next(iter(self.failed.items()))
            first = f"{printable(self.images.paths[row])}: {printable(reason)}"
            raise InputError(f"none of the images can be decoded; {first}")

    def with_targets(self, targets: NDArray[np.int64] | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the inputs of each batch and their targets (B,), from the targets of all `images`; None: -1 for all."""
        for batch in self.batches():
            numbers = np.full(len(batch.rows), -1) if targets is None else targets[batch.rows]
            yield batch.inputs, torch.from_numpy(numbers).to(batch.inputs.device)

    def name(self, position: int) -> str:
        """Return the path of an image by its position among the decoded images."""
        return printable(self.images.paths[self.decoded[position]])

    def print_failures(self) -> None:
        """Print the images that could not be decoded on stderr."""
        for row, reason in list(self.failed.items())[:SHOWN]:
            print_line(f"left out: {printable(self.images.paths[row])}: {printable(reason)}", err=True)
        if len(self.failed) > SHOWN:
            print_line(f"          ... and {len(self.failed) - SHOWN:,} more", err=True)


def sample_of(config: LookConfig, backbone: Backbone) -> Sample:
    """Return the sample that a configuration selects."""
    images = list_images(config.images)
    for note in images.notes:
        print_line(f"note: {note}", fg="yellow", err=True)
    count = len(images) if config.sample is None else min(config.sample, len(images))
    sampled, rows = images.select(evenly(len(images), count)), list(range(count))
    return Sample(sampled, len(images), backbone, rows, config)


def _pixels(prepared: Tensor) -> NDArray[np.uint8]:
    """Return (B, H, W, 3) uint8 pixels of prepared images.

    Outputs of a library's transform are scaled from the minimum and maximum of each image.
    """
    if prepared.dtype == torch.uint8:
        return prepared.numpy()
    low, high = prepared.amin((1, 2, 3), keepdim=True), prepared.amax((1, 2, 3), keepdim=True)
    scaled = (prepared - low) / (high - low).clamp(min=1e-12)
    pixels: NDArray[np.uint8] = (scaled * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return pixels


def evenly(total: int, count: int) -> list[int]:
    """Return `count` evenly spaced integers from 0 to `total` - 1."""
    return [int(number) for number in np.linspace(0, total - 1, count).round()]


@dataclass(frozen=True)
class Targets:
    """True outputs of images.

    Attributes:
        numbers: (N,) int64 output of each image; -1 if unknown.
        source: where they come from and what was taken for the outputs, in words.
    """

    numbers: NDArray[np.int64]
    source: str


def n_outputs(backbone: Backbone) -> int:
    """Return the number of classes of a backbone; 0 if it has no classifier."""
    if backbone.classifier is None:
        return 0
    head = named_layers(backbone.model)[backbone.classifier]
    return int(getattr(head, "out_features", 0) or getattr(head, "out_channels", 0))


def targets_of(backbone: Backbone, images: Images, labels: str | None = None) -> Targets | None:
    """Return the true output of each image; None if the classes of the images are no outputs, which a note says.

    The output is found by what a class is called, never by its position: all classes are WordNet ids (n01440764, the
    names of ImageNet's folders) of a network with ImageNet's 1,000 classes, or label names of the network, or whole
    numbers, which are output numbers. The outputs of a network without a known classifier are numbers.

    Args:
        backbone: backbone.
        images: images with their classes.
        labels: FILE.csv[:COLUMN], see `read_image_table`; replaces the classes of the images. Whole numbers in it are
            output numbers, also if the network has labels that are numbers.

    Raises:
        InputError: the file does not fit the images, or its labels do not fit the backbone; or a class of the images
            fits no output while others do (but for names), or several outputs, or the same output as another class.
    """
    # Folders named by number are sorted as text, 10 before 2: matched by position, a network that was right about all
    # of 1,000 such images had an accuracy of 3.1 %. One class that does not fit is more likely a mistake than another
    # notation, so numbers, WordNet ids and labels are not mixed.
    if labels is None:
        names = [images.classes[label] if label >= 0 else None for label in images.labels.tolist()]
        classes, where, remedy = set(images.classes), "the classes of the images", "give --labels FILE.csv"
    else:
        names, where = _of_file(images, labels), text_without_credentials(labels)
        remedy = "expected output numbers alone, WordNet ids alone, or label names of the network alone"
        classes = {name for name in names if name is not None}
    notations = {notation: found for notation, found in _notations(backbone, classes).items() if found}
    if labels is not None and _NUMBERS in notations:
        notations = {_NUMBERS: notations[_NUMBERS]}
    if labels is None and len(notations.get(_LABELS, classes)) < len(classes):
        del notations[_LABELS]  # names of folders may be labels by chance, such as `crane` beside `digger`
    if labels is None and not notations:
        if classes and n_outputs(backbone):
            shown = ", ".join(map(repr, sorted(classes)[:SHOWN])) + (", ..." if len(classes) > SHOWN else "")
            note = f"note: the classes of the images ({shown}) are not outputs of {backbone.spec}; these are unknown"
            print_line(f"{note}: {remedy}", fg="yellow", err=True)
        return None
    notation, found = max(notations.items(), key=lambda item: len(item[1]), default=(_NUMBERS, {}))
    if fault := _fault(classes, notation, notations, backbone.spec):
        last = n_outputs(backbone) - 1
        counted = f"the outputs are 0 to {last:,}; " if notation == _NUMBERS and last >= 0 else ""
        raise InputError(f"{where}: {fault}", hint=counted + remedy)
    numbers = [-1 if name is None else found[name][0] for name in names]
    return Targets(np.array(numbers, np.int64), f"{where}, which are {notation}")


def _notations(backbone: Backbone, classes: Set[str]) -> dict[str, dict[str, list[int]]]:
    """Return what classes may be, in words -> class -> its possible outputs; classes without any are left out."""
    width, labels = n_outputs(backbone), _output_labels(backbone)
    outputs_of = defaultdict[str, list[int]](list)
    for number, label in enumerate(labels):
        for spelling in {_folded(label), _folded(_short(label))}:
            outputs_of[spelling].append(number)
    are_numbers = all(re.fullmatch(r"\d{1,18}", name, re.ASCII) for name in classes)
    ids = {name: number for number, name in enumerate(_imagenet())} if _is_imagenet(labels) else {}
    return {
        _NUMBERS: {name: [int(name)] for name in classes if are_numbers and (not width or int(name) < width)},
        _IDS: {name: [ids[name]] for name in classes if name in ids},
        _LABELS: {name: outputs_of[_folded(name)] for name in classes if _folded(name) in outputs_of},
    }


def _fault(classes: Set[str], notation: str, notations: dict[str, dict[str, list[int]]], spec: str) -> str:
    """Return why the outputs of classes read in one notation are not certain; empty if they are."""
    found, class_of = notations.get(notation, {}), dict[int, str]()
    complete = [outputs for outputs in notations.values() if len(outputs) == len(classes)]
    for name in sorted(classes):
        if name not in found:
            more = f", while {len(found):,} of {len(classes):,} are {notation}" if found else ""
            return f"{name!r} is not an output of {spec}{more}"
        if len(found[name]) > 1:
            return f"{name!r} is the label of several outputs of {spec}: {', '.join(map(str, found[name]))}"
        output = found[name][0]
        if any(outputs[name] != [output] for outputs in complete):
            return f"{name!r} may be the output of this number or of this label of {spec}, which differ"
        if output in class_of:
            return f"{class_of[output]!r} and {name!r} are the same output of {spec}, {output}"
        class_of[output] = name
    return ""


def _folded(name: str) -> str:
    """Return a name without differences of case, and between spaces, `_` and `-`."""
    return " ".join(re.sub("[_-]", " ", name.casefold()).split())


def _short(label: str) -> str:
    """Return a label up to its first comma: `tench` of `tench, Tinca tinca`, as those of ImageNet are written."""
    return label.partition(",")[0]


def _of_file(images: Images, labels: str) -> list[str | None]:
    where, column = file_and_column(labels)
    table = read_image_table(where, column, "labels", images.paths, images.ids, images.root)
    for note in table.notes:
        print_line(f"note: {note}", fg="yellow", err=True)
    return [label_text(text) for text in without_fractions(table.texts)]


def class_name(backbone: Backbone, number: int) -> str:
    """Return the label of an output, if it is known, with its number: `tench (class 0)`, or `class 0`."""
    labels = _output_labels(backbone)
    return f"{_short(labels[number])} (class {number})" if labels else f"class {number}"


def _output_labels(backbone: Backbone) -> Sequence[str]:
    """Return the label of each output; empty if they are unknown.

    They are those that transformers and torchvision have for a model; any other network with 1,000 outputs is taken
    for one of ImageNet.
    """
    width = n_outputs(backbone)
    given = getattr(getattr(backbone.model, "config", None), "id2label", None)  # of transformers
    if isinstance(given, dict) and set(given) == set(range(width)):
        labels = [str(given[number]) for number in range(width)]
        if labels != [f"LABEL_{number}" for number in range(width)]:  # stands for labels that nobody has given
            return labels
    if width != len(_imagenet()):
        return []
    source, _, name = backbone.architecture.partition("/")
    if source == "torchvision":
        from torchvision import models

        categories: list[str] = models.get_model_weights(name).DEFAULT.meta["categories"]
        return categories
    return list(_imagenet().values())


def _is_imagenet(labels: Sequence[str]) -> bool:
    """Whether most labels are those of ImageNet's 1,000 classes; those of libraries differ in a few."""
    pairs = zip(labels, _imagenet().values(), strict=False)
    return len(labels) == len(_imagenet()) and sum(_short(a) == _short(b) for a, b in pairs) > len(labels) / 2


@functools.cache
def _imagenet() -> dict[str, str]:
    """Return WordNet id -> label of ImageNet's 1,000 classes, in the order of the outputs of its networks."""
    from timm.data import ImageNetInfo  # type: ignore[attr-defined]

    info = ImageNetInfo()
    names: list[str] = info.label_names()  # type: ignore[no-untyped-call]
    return dict(zip(names, map(info.index_to_description, range(len(names))), strict=True))
