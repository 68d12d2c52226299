"""Ablation: the effect of editing a layer or a channel on features, predictions and later layers.

effects = ablation(backbone, batches, ["blocks.*"], edits.scale(0))
for effect in effects: print(effect.layer, effect.cosine, effect.accuracy)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from extract.analysis.network.plain_modules import as_backbone, pairs_of, scores_of, whole_layers
from extract.compute.agreement import cosines
from extract.compute.backbone import Backbone
from extract.compute.feature_choice import EMBEDDING, Choice, Feature, choose_features
from extract.errors import InputError
from extract.system.torch_state import evaluating, full_float32, keeping_freed_memory
from extract.taps.edits import Edit
from extract.taps.record import Site
from extract.taps.taps import Taps

__all__ = ["Ablation", "Effect", "ablation", "mean_activations"]


@dataclass
class Effect:
    """Effect of editing one layer, or one channel of it; values are means over images.

    Attributes:
        layer: name of the edited layer.
        channel: edited channel; None: all channels.
        cosine: cosine of the edited and the unedited network's embedding, or output if the backbone has no embedding.
        same_class: share of the images whose predicted class does not change; NaN without a classifier.
        accuracy: top-1 of the edited network on images with a target; NaN without targets or a classifier.
        later: tensor -> cosine of its edited and unedited activation, for the tensors of the requested layers that are
            computed after this layer.
    """

    layer: str
    channel: int | None = None
    cosine: float = math.nan
    same_class: float = math.nan
    accuracy: float = math.nan
    later: dict[str, float] = field(default_factory=dict)

    @property
    def target(self) -> str:
        """Text form of the edited part: `layer`, or `layer channel N`."""
        return self.layer if self.channel is None else f"{self.layer} channel {self.channel}"


@dataclass
class Ablation:
    """All effects, and the accuracy of the unedited network.

    Attributes:
        effects: in the order of computation of the layers, then in the order of the channels.
        accuracy: top-1 of the unedited network on images with a target; NaN without targets or a classifier.
        images: number of images.
        targets: number of images with a target; 0 without a classifier.
    """

    effects: list[Effect]
    accuracy: float
    images: int
    targets: int


def ablation(
    backbone: Backbone | nn.Module,
    batches: Iterable[Any],
    layers: str | Sequence[str],
    edit: Edit | Mapping[str, Edit],
    *,
    channels: Sequence[int] | None = None,
    on_forward: Callable[[int], None] = lambda images: None,
) -> Ablation:
    """Edit layers one by one, and compare each with the unedited network.

    Args:
        backbone: loaded backbone, or any module that takes a tensor (B, C, H, W). Of a module, the output counts as the
            embedding; if it is (B, K), as class scores too.
        batches: inputs (B, C, H, W), or pairs of inputs and target classes (B,), -1 for images without a target.
        layers: names or globs. If a layer runs several times, all calls are edited.
        edit: function of one tensor with images on axis 0, as for `Taps.edit`; or a mapping of layer or tensor names
            (`relu#1`) to such functions. It draws the same random numbers for each layer.
        channels: channels to edit one by one, without changing the others; None: edit the whole layer.
        on_forward: called after each forward with its number of images.

    Raises:
        UnknownNameError: a pattern matches no layer.
        InputError: the rows of a layer are not the images, a channel does not exist, or there are no batches.
    """
    gives_classes = not isinstance(backbone, Backbone) or backbone.classifier is not None
    backbone, pairs = _with_pairs(backbone, batches)
    with torch.no_grad(), evaluating(backbone.model), full_float32(), keeping_freed_memory():
        choice = _in_computation_order(backbone, whole_layers(backbone, layers))
        edited_parts = list(_edited_parts(choice.features, channels))
        totals = [_Totals() for _ in edited_parts]
        unedited_total = _Totals()
        embedding = _embedding(backbone)
        for number, (inputs, targets) in enumerate(pairs):
            unedited = _forward(backbone, inputs, choice.features, embedding, gives_classes)
            unedited_total.add(unedited, unedited, targets)
            on_forward(len(inputs))
            for (layer, channel), total in zip(edited_parts, totals, strict=True):
                parts = [feature for feature in choice.features if feature.site.layer == layer]
                changes = [(part.site, _adapt(edit, part, channel, number)) for part in parts]
                edited = _forward(backbone, inputs, choice.features, embedding, gives_classes, changes)
                total.add(edited, unedited, targets)
                on_forward(len(inputs))
    effects = []
    for (layer, channel), total in zip(edited_parts, totals, strict=True):
        last = max(i for i, feature in enumerate(choice.features) if feature.site.layer == layer)
        later = [feature.name for feature in choice.features[last + 1 :]]
        effects.append(Effect(
            layer, channel, total.mean(total.cosines.get(EMBEDDING)), total.mean(total.same), total.accuracy,
            {name: total.cosines[name] / unedited_total.images for name in later},
        ))  # fmt: skip
    return Ablation(effects, unedited_total.accuracy, unedited_total.images, unedited_total.targets)


def _with_pairs(
    model: Backbone | nn.Module, batches: Iterable[Any]
) -> tuple[Backbone, Iterator[tuple[Tensor, Tensor | None]]]:
    """Return a model as a backbone, and the inputs and targets of its batches."""
    pairs = pairs_of(batches)
    first = next(pairs)
    return as_backbone(model, first[0]), itertools.chain([first], pairs)


def _in_computation_order(backbone: Backbone, choice: Choice) -> Choice:
    """Return the same features in the order of computation."""
    with choice.kept_by(Taps(backbone.model, stop=True), torch.float32) as taps:
        black = torch.zeros(1, *backbone.preprocessing.crop_px, 3, dtype=torch.uint8, device=backbone.device)
        taps(backbone.preprocessing.to_input(black))
        order = list(taps.record.sites.values())
    return replace(choice, features=sorted(choice.features, key=lambda feature: order.index(feature.site)))


def mean_activations(
    backbone: Backbone | nn.Module, batches: Iterable[Any], layers: str | Sequence[str]
) -> dict[str, Tensor]:
    """Compute the mean activations over images, at each position: tensor name -> (1, *shape).

    The arguments are those of `ablation`.
    """
    # Not of the batch of an image, which says little about the usual output of the layer.
    sums: dict[str, Tensor] = {}
    count = 0
    backbone, pairs = _with_pairs(backbone, batches)
    with torch.no_grad(), evaluating(backbone.model), full_float32():
        choice = whole_layers(backbone, layers)
        for inputs, _ in pairs:
            with choice.kept_by(Taps(backbone.model, stop=True), torch.float64) as taps:
                taps(inputs.clone())
                for feature in choice.features:
                    total = taps.record[feature.site][feature.name].sum(0, keepdim=True)
                    sums[feature.name] = sums[feature.name] + total if feature.name in sums else total
            count += len(inputs)
    return {name: (total / count).float().to(backbone.device) for name, total in sums.items()}


def _edited_parts(features: Sequence[Feature], channels: Sequence[int] | None) -> Iterator[tuple[str, int | None]]:
    """Yield each layer, in the order of the first tensors, with each channel, or None if `channels` is None."""
    for layer in dict.fromkeys(feature.site.layer for feature in features):
        if channels is None:
            yield layer, None
            continue
        for feature in features:
            if feature.site.layer != layer:
                continue
            if "C" not in feature.layout.axes:
                raise InputError(f"layer {feature.name!r} has no known channel axis", hint="ablate the whole layer")
            count = feature.activation_shape[feature.layout.axes.index("C")]
            if wrong := [channel for channel in channels if not 0 <= channel < count]:
                raise InputError(f"layer {feature.name!r} has no channel {wrong[0]}; expected 0 to {count - 1}")
        yield from ((layer, channel) for channel in dict.fromkeys(channels))


def _adapt(edits: Edit | Mapping[str, Edit], feature: Feature, channel: int | None, seed: int) -> Edit:
    """Adapt an edit to a layer's output: move the images to axis 0, and change only the given channel."""
    edit = edits.get(feature.name) or edits[feature.site.layer] if isinstance(edits, Mapping) else edits

    def apply(value: Tensor) -> Tensor:
        images = feature.rows.by_image(value)
        with torch.random.fork_rng(devices=[] if value.device.type == "cpu" else [value.device]):
            torch.manual_seed(seed)
            result = edit(images)
        if channel is not None:
            axis = 1 + feature.layout.axes.index("C")
            shape = [-1 if a == axis else 1 for a in range(images.ndim)]
            selected = torch.arange(images.shape[axis], device=images.device).view(shape) == channel
            result = torch.where(selected, result, images)
        axis_of_rows = feature.rows.axis  # undo `by_image`
        return result.reshape(value.movedim(axis_of_rows, 0).shape).movedim(0, axis_of_rows)

    return apply


def _embedding(backbone: Backbone) -> Feature | None:
    """Return the embedding, or None if the backbone has neither an embedding nor a classifier."""
    try:
        return choose_features(backbone, [EMBEDDING]).features[0]
    except InputError:
        if backbone.classifier is not None:
            raise
        return None


_ForwardResult = tuple[dict[str, Tensor], Tensor | None]  # values by name, and predicted classes


def _forward(
    backbone: Backbone, inputs: Tensor, features: Sequence[Feature], embedding: Feature | None,
    gives_classes: bool, changes: Sequence[tuple[Site, Edit]] = (),
) -> _ForwardResult:  # fmt: skip
    """Run one forward with edits."""
    wanted = {feature.name: feature for feature in features}
    if embedding is not None:
        wanted[EMBEDDING] = embedding
    taps = Choice(list(wanted.values()), []).kept_by(Taps(backbone.model), torch.float32)
    for site, change in changes:
        taps.edit(site, change)
    with taps:
        output = taps(inputs.clone())  # a model may write to its input
        values = {name: taps.record[feature.site][feature.name] for name, feature in wanted.items()}
    scores = scores_of(output)
    if embedding is None and isinstance(scores, Tensor):
        values[EMBEDDING] = scores.float().cpu()
    has_classes = gives_classes and isinstance(scores, Tensor) and scores.ndim == 2
    return values, scores.argmax(1).cpu() if has_classes else None


@dataclass
class _Totals:
    images: int = 0
    targets: int = 0
    right: int = 0
    same: float | None = None
    cosines: dict[str, float] = field(default_factory=dict)

    def add(self, result: _ForwardResult, unedited: _ForwardResult, targets: Tensor | None) -> None:
        (values, classes), (unedited_values, unedited_classes) = result, unedited
        self.images += len(next(iter(values.values())))
        for name, value in values.items():
            total = float(cosines(value.numpy(), unedited_values[name].numpy()).sum())
            self.cosines[name] = self.cosines.get(name, 0.0) + total
        if classes is not None and unedited_classes is not None:
            self.same = (self.same or 0.0) + int((classes == unedited_classes).sum())
            if targets is not None:
                targets = torch.as_tensor(targets).cpu()
                if targets.shape != classes.shape:
                    expected = f"expected a class, or -1, for each of {len(classes)} images"
                    raise InputError(f"a batch has targets of shape {tuple(targets.shape)}; {expected}")
                self.targets += int((targets >= 0).sum())
                self.right += int((classes == targets)[targets >= 0].sum())

    def mean(self, total: float | None) -> float:
        return math.nan if total is None else total / self.images

    @property
    def accuracy(self) -> float:
        return self.right / self.targets if self.targets else math.nan
