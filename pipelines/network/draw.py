"""Draw what a backbone sees in images: `layertap draw KIND BACKBONE IMAGES [-l LAYER]`."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from extract.analysis.network import attribution
from extract.analysis.network.activation_statistics import are_constant
from extract.analysis.network.plain_modules import scores_of, whole_layers
from extract.compute.backbone import Backbone
from extract.compute.feature_choice import Choice, Feature
from extract.compute.pooling import recognise
from extract.errors import InputError, LayertapError
from extract.system.torch_state import evaluating, full_float32
from extract.taps.layer_names import match_layers, named_layers
from extract.taps.taps import Taps
from pipelines.network import figures
from pipelines.network.config import DrawConfig
from pipelines.network.image_sample import Sample, class_name, n_outputs, sample_of
from pipelines.terminal.backbone import backbone_of
from pipelines.terminal.figures import drawable, save_figure
from pipelines.terminal.output_paths import check_folder
from pipelines.terminal.text_output import print_line

__all__ = ["KINDS", "draw"]

_SAMPLED = 256  # default number of images of `top`
_TOP_COUNT = 8  # images per channel, and channels
_MOST_IMAGES = 64  # in a figure that shows every image
_MOST_TILES = 600


def draw(kind: str, config: DrawConfig) -> list[Path]:
    """Draw one figure per layer and return the files."""
    if kind == "rollout" and config.layers is not None:
        raise InputError("rollout covers all layers", hint="leave out -l")
    if config.channels is not None and kind not in _CHANNEL_KINDS:
        raise InputError(f"--channels is for {', '.join(_CHANNEL_KINDS)}, not for {kind}", hint="leave it out")
    if config.target is not None and kind != "gradcam":
        raise InputError(f"--target is for gradcam, not for {kind}", hint="leave it out")
    check_folder(config.out)
    backbone = backbone_of(config)
    last = n_outputs(backbone) - 1
    if config.target is not None and config.target > last >= 0:
        raise InputError(f"--target {config.target}: expected a class from 0 to {last}")
    if kind == "top" and "sample" not in config.model_fields_set:
        config = config.model_copy(update={"sample": _SAMPLED})
    sample = sample_of(config, backbone)
    if kind != "top" and len(sample.rows) > _MOST_IMAGES:
        raise InputError(
            f"{len(sample.rows)} images do not fit into one figure", hint=f"use --sample {_MOST_IMAGES} or less"
        )
    written = []
    for name, figure in KINDS[kind](config, backbone, sample):
        file = re.sub(r"[^\w.-]+", "_", f"{kind}-{name}" if name else kind)
        written.append(save_figure(figure, config.out / f"{file}.{config.format}"))
    sample.print_failures()
    return written


Figures = Iterator[tuple[str, Figure]]  # layer, figure


def _title(backbone: Backbone, layer: str) -> str:
    return f"{drawable(backbone.spec, 60)}, {figures.drawable_layer(layer, 60)}"


def _layers(config: DrawConfig, backbone: Backbone, *, last: bool) -> list[Feature]:
    """Return each tensor of the requested layers, or that of the first or last layer that gives maps or patches.

    Raises:
        InputError: a requested layer does not, or no layer does.
    """
    if config.layers is not None:
        features = _features_of(backbone, config.layers)
        for feature in features:
            if not _has_positions(feature):
                shape = "x".join(map(str, feature.shape))
                raise InputError(f"layer {feature.name!r} gives {shape} per image; expected a map or patches")
        return features
    for name in _suitable_layers(backbone, last=last):
        with contextlib.suppress(LayertapError):  # for example, its rows are not the images
            features = _features_of(backbone, [name])
            if _has_positions(features[-1]):
                return features[-1:]
    raise InputError(f"no layer of {backbone.spec} gives maps or patches")


def _features_of(backbone: Backbone, layers: Sequence[str]) -> list[Feature]:
    with evaluating(backbone.model), full_float32():
        return whole_layers(backbone, layers).features


def _suitable_layers(backbone: Backbone, *, last: bool) -> list[str]:
    """Return the layers that seem to give maps or patches, in the order of computation; reversed if `last`."""
    size = backbone.preprocessing.crop_px
    taps = Taps(backbone.model, list(named_layers(backbone.model)))
    with torch.no_grad(), evaluating(backbone.model), full_float32(), taps:
        taps(torch.zeros(1, 3, *size, device=backbone.device))
        names = []
        for site in taps.record.sites.values():
            shape = taps.record[site].shape[1:]
            layout = recognise(shape, size, backbone.prefix_tokens, backbone.patches, backbone.class_token)
            if layout.kind in ("map", "tokens") or layout.is_ambiguous:
                names.append(site.layer)
    return list(dict.fromkeys(reversed(names) if last else names))


def _has_positions(feature: Feature) -> bool:
    if feature.layout.kind not in ("map", "tokens"):
        return False
    return math.prod(n for n, axis in zip(feature.shape, feature.layout.axes, strict=True) if axis != "C") > 1


def _map(backbone: Backbone, feature: Feature, inputs: Tensor) -> Tensor:
    """Return the maps (B, h, w, C) of a layer."""
    values = attribution.activations_of(backbone, inputs, Choice([feature], []))[feature.name]
    layout = feature.layout
    return attribution.map_of(values, layout.axes, layout.prefix_tokens, backbone.preprocessing.crop_px)


def _over_batches(sample: Sample, values_of: Callable[[Tensor], Tensor]) -> tuple[Tensor, NDArray[np.uint8], list[str]]:
    """Return what a function of the inputs gives for all images, their pixels, and their names; for few images."""
    values, pixels = [], []
    for batch in sample.batches():
        values.append(values_of(batch.inputs))
        pixels.append(batch.pixels)
    return torch.cat(values), np.concatenate(pixels), [sample.name(i) for i in range(len(sample.decoded))]


def _checked_channels(config: DrawConfig, count: int) -> list[int] | None:
    if config.channels is not None and (wrong := [c for c in config.channels if not 0 <= c < count]):
        raise InputError(f"channel {wrong[0]}: expected channels 0 to {count - 1}")
    return config.channels


def _feature_maps(config: DrawConfig, backbone: Backbone, sample: Sample) -> Figures:
    for feature in _layers(config, backbone, last=False):
        maps, pixels, names = _over_batches(sample, partial(_map, backbone, feature))
        chosen = _checked_channels(config, maps.shape[-1])
        values = maps.double().flatten(0, 2)
        spread = values.std(0, correction=0)
        constant = are_constant(values.amin(0).numpy(), values.amax(0).numpy(), spread.numpy())
        if chosen is None:
            count = figures.MOST_CHANNELS if len(maps) == 1 else figures.CHANNELS_IN_A_ROW
            chosen = sorted(spread.nan_to_num(0).argsort(descending=True, stable=True)[:count].tolist())
        if len(maps) * len(chosen) > _MOST_TILES:
            raise InputError(f"{len(chosen)} channels of {len(maps)} images: a figure has at most {_MOST_TILES} tiles")
        channels = {channel: bool(constant[channel]) for channel in chosen}
        shown, title = maps[..., list(channels)].float().numpy(), _title(backbone, feature.name)
        yield feature.name, figures.feature_maps(shown, channels, pixels, names, title)


def _tokens(config: DrawConfig, backbone: Backbone, sample: Sample) -> Figures:
    for feature in _layers(config, backbone, last=True):
        maps, pixels, names = _over_batches(sample, partial(_map, backbone, feature))
        title = f"{_title(backbone, feature.name)}: main directions of all positions as red, green and blue"
        yield feature.name, figures.side_by_side(pixels, attribution.principal_colours(maps), names, title)


def _top(config: DrawConfig, backbone: Backbone, sample: Sample) -> Figures:
    for feature in _layers(config, backbone, last=True):
        peaks, rows = [], []
        for batch in sample.batches():
            peaks.append(_map(backbone, feature, batch.inputs).float().amax((1, 2)).numpy())
            rows += batch.rows.tolist()
        peak_values = np.concatenate(peaks)
        chosen = _checked_channels(config, peak_values.shape[1])
        if chosen is None:
            spread = (peak_values.max(0) - peak_values.mean(0)) / (peak_values.std(0) + 1e-12)
            constant = are_constant(peak_values.min(0), peak_values.max(0), peak_values.std(0))
            most_varied = np.argsort(-np.where(constant, 0, spread), kind="stable")[:_TOP_COUNT]
            chosen = sorted(most_varied.tolist())
        best = {c: [rows[i] for i in np.argsort(-peak_values[:, c], kind="stable")[:_TOP_COUNT]] for c in chosen}
        shown_rows = sorted({row for images in best.values() for row in images})
        shown_sample = dataclasses.replace(sample, rows=shown_rows, decoded=[])
        shown: dict[int, tuple[NDArray[np.float32], NDArray[np.uint8]]] = {}
        for batch in shown_sample.batches():
            part = _map(backbone, feature, batch.inputs)[..., chosen].float().numpy()
            shown |= {row: (part[i], batch.pixels[i]) for i, row in enumerate(batch.rows.tolist())}
        yield feature.name, figures.top_images(best, shown, _title(backbone, feature.name), len(rows))


def _attention_maps(weights: Tensor, backbone: Backbone) -> Tensor:
    """Return (B, heads, h, w): attention of the class token or, without a class token, the mean over all patches.

    Raises:
        InputError: the tokens are not the patches of whole images.
    """
    prefix = backbone.prefix_tokens
    if backbone.patches is not None and weights.shape[-1] != backbone.patches + prefix:
        raise InputError(f"attention over {weights.shape[-1]} tokens; expected the patches of whole images")
    rows = weights[..., 0, :] if backbone.class_token else weights[..., prefix:, :].mean(-2)
    maps = attribution.map_of(rows.transpose(1, 2), "TC", prefix, backbone.preprocessing.crop_px)
    return maps.permute(0, 3, 1, 2)


def _attention(config: DrawConfig, backbone: Backbone, sample: Sample) -> Figures:
    named = named_layers(backbone.model)
    layers = [None] if config.layers is None else match_layers(named, config.layers, backbone.spec)
    source = "the class token" if backbone.class_token else "all patches"
    for layer in layers:

        def heads_of(inputs: Tensor, layer: str | None = layer) -> Tensor:
            return _attention_maps(attribution.attentions(backbone, inputs, layer)[-1], backbone)

        heads, pixels, names = _over_batches(sample, heads_of)
        title = f"{_title(backbone, layer or 'last attention')}: attention of {source}"
        yield layer or "", figures.attention(heads.numpy(), pixels, names, title)


def _rollout(config: DrawConfig, backbone: Backbone, sample: Sample) -> Figures:
    def rolled_out(inputs: Tensor) -> Tensor:
        rolled = torch.from_numpy(attribution.rollout(attribution.attentions(backbone, inputs)))[:, None]
        maps = _attention_maps(rolled, backbone)[:, 0]
        return maps - maps.amin((1, 2), keepdim=True)  # remove the share that every patch gets

    maps, pixels, names = _over_batches(sample, rolled_out)
    title = f"{_title(backbone, 'all layers')}: attention rollout, each map from its least to its largest value"
    yield "", figures.overlays(maps.numpy(), pixels, names, title)


def _gradcam(config: DrawConfig, backbone: Backbone, sample: Sample) -> Figures:
    maps = defaultdict[str, list[NDArray[np.float32]]](list)
    pixels, names, captions = [], [], []
    layers = _gradcam_layers(config, backbone)
    for batch in sample.batches():
        targets = None if config.target is None else [config.target] * len(batch.rows)
        cams, classes = attribution.grad_cam(backbone, batch.inputs, layers, targets)
        for layer, cam in cams.items():
            maps[layer].append(cam)
        pixels.append(batch.pixels)
        with torch.no_grad(), evaluating(backbone.model), full_float32():
            scores = scores_of(backbone.model(batch.inputs))
            shares = scores.softmax(1).cpu().numpy()[np.arange(len(classes)), classes]
        for row, number, share in zip(batch.rows.tolist(), classes.tolist(), shares, strict=True):
            names.append(sample.images.paths[row])
            percent = "under 1" if share < 0.005 else f"{100 * share:.0f}"
            captions.append(f"{class_name(backbone, number)}, {percent}\u00a0%")
    of = "the predicted class of each image" if config.target is None else class_name(backbone, config.target)
    for layer, parts in maps.items():
        title = f"{_title(backbone, layer)}: Grad-CAM of {of}; each map is scaled to its own maximum"
        yield layer, figures.overlays(np.concatenate(parts), np.concatenate(pixels), names, title, captions)


def _gradcam_layers(config: DrawConfig, backbone: Backbone) -> Sequence[str]:
    if config.layers is not None:
        return match_layers(named_layers(backbone.model), config.layers, backbone.spec)
    grey = torch.zeros(1, 3, *backbone.preprocessing.crop_px, device=backbone.device)
    suitable = _suitable_layers(backbone, last=True)
    # Behind the last attention of a transformer, the scores read the class token alone.
    candidates = [*suitable[:1], *attribution.normalisations(backbone.model), *suitable]
    usual = attribution.first_with_grad_cam(backbone, grey, candidates)
    if usual is None:
        raise InputError(f"no layer of {backbone.spec} gives maps or patches on which class scores depend")
    if not backbone.prefix_tokens and _features_of(backbone, [usual])[-1].layout.kind == "map":
        # Perhaps an own transformer that does not state its class token: then only its first convolution gives a map.
        stated = dataclasses.replace(backbone, prefix_tokens=1, class_token=True)
        norm = attribution.first_with_grad_cam(stated, grey, attribution.normalisations(backbone.model))
        if norm is not None and _features_of(stated, [norm])[-1].layout.kind == "tokens":
            note = f"note: {usual} is drawn; {norm} is better, if your model says: self.num_prefix_tokens = 1"
            print_line(note, fg="yellow", err=True)
    return [usual]


KINDS: dict[str, Callable[[DrawConfig, Backbone, Sample], Figures]] = {
    "maps": _feature_maps,
    "top": _top,
    "attention": _attention,
    "rollout": _rollout,
    "gradcam": _gradcam,
    "tokens": _tokens,
}
_CHANNEL_KINDS = ("maps", "top")
