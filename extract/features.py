"""Which features a run stores: what `LAYER[:POOLING]` means for a backbone, found out by a trial forward.

The trial runs three made-up pictures together, then the first and the last of them alone. That shows which layers run,
what they give, and that row i of it belongs to picture i; a layer for which that does not hold is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from extract.backbones import Backbone
from extract.errors import InputError, LayertapError, UnknownNameError
from extract.hooks import Record, Site, Taps, What
from extract.layers import is_glob, match_layers, named_layers
from extract.pooling import POOLINGS, Layout, pool, recognise, resolve_pooling

__all__ = ["EMBEDDING", "Choice", "Feature", "choose_features"]

EMBEDDING = "embedding"  # reserved in place of a layer's name: the input of the backbone's classifier

_TRIAL_IMAGES = 3
# Rows computed in batches of another size or order differ by rounding only.
_TRIAL_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Feature:
    """One feature of each image.

    Attributes:
        name: in the store.
        site: the tensor it comes from.
        pooling: never `auto`.
        layout: of the activation.
        activation_shape: of one image, before pooling.
        shape: of one image, as stored.
        source_dtype: of the activation.
        automatic: whether `auto` chose the pooling.
    """

    name: str
    site: Site
    pooling: str
    layout: Layout
    activation_shape: tuple[int, ...]
    shape: tuple[int, ...]
    source_dtype: str
    automatic: bool


@dataclass(frozen=True)
class Choice:
    """The features of a run, and the layers that a glob matched but that never run."""

    features: list[Feature]
    never_run: list[str]


@dataclass(frozen=True)
class _Request:
    """One layer asked for by its own name; `part` is a call or a path behind it, as in `relu#1` or `lstm:0`."""

    layer: str
    part: str
    pooling: str
    what: What = "output"
    by_glob: bool = False


def choose_features(backbone: Backbone, layers: Sequence[str]) -> Choice:
    """Resolve layer arguments against a backbone.

    Args:
        backbone: in eval mode on its device.
        layers: `LAYER[:POOLING]` each; LAYER is a name, a glob, a name with a call (`relu#1`) or a path (`lstm:0`), or
            `embedding`. Without POOLING, `auto`.

    Raises:
        UnknownNameError: no such layer or pooling.
        InputError: a layer never runs, its rows are not the images, or the pooling does not fit.
    """
    requests = [request for text in layers for request in _parse(backbone, text)]
    record, alone = _trial(backbone, requests)
    names = {site: name for name, site in record.sites.items()}
    features: dict[tuple[Site, str], Feature] = {}
    never_run: dict[str, None] = {}
    for request in requests:
        sites = _sites_of(record, request)
        if not sites and not request.by_glob:
            raise _absent(backbone, record, request)
        if not sites:
            never_run[request.layer] = None
        for site in sites:
            name = EMBEDDING if request.what == "input" else names[site]
            feature = _feature(backbone, name, request.pooling, site, record[site], alone)
            features.setdefault((site, feature.pooling), feature)
    if not features:
        raise InputError(f"none of these layers of {backbone.spec} ever runs: {', '.join(never_run) or 'none given'}")
    poolings = Counter(site for site, _ in features)
    named = [
        replace(feature, name=f"{feature.name}:{feature.pooling}") if poolings[site] > 1 else feature
        for (site, _), feature in features.items()
    ]
    if len({feature.name for feature in named}) < len(named):
        raise InputError(f"{backbone.spec} has a layer called {EMBEDDING!r}; ask for it in a run of its own")
    return Choice(named, list(never_run))


def _parse(backbone: Backbone, text: str) -> list[_Request]:
    names = named_layers(backbone.model)
    layer, _, last = text.rpartition(":")
    text, pooling = (layer, last) if layer and last in POOLINGS else (text, "auto")
    if text == EMBEDDING:
        if backbone.classifier is None:
            raise InputError(f"{backbone.spec} has no single classifier whose input is the embedding; name layers")
        return [_Request(backbone.classifier, "", pooling, what="input")]
    cut = len(text) if text in names else min(at for at in (text.find("#"), text.find(":"), len(text)) if at >= 0)
    pattern, part = text[:cut], text[cut:]
    matches = match_layers(names, pattern, backbone.spec)
    return [_Request(name, part, pooling, by_glob=is_glob(pattern) and name != pattern) for name in matches]


def _trial(backbone: Backbone, requests: Sequence[_Request]) -> tuple[Record, dict[int, Record]]:
    """The record of a few pictures together, and those of the first and the last alone.

    A picture alone cannot be mistaken for another, whatever a layer does to the order of a batch.
    """
    height, width = backbone.preprocessing.crop_px
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(0, 256, (_TRIAL_IMAGES, height, width, 3), dtype=torch.uint8, generator=generator)
    images = backbone.preprocessing.to_input(pictures.to(backbone.device))
    taps = Taps(backbone.model)
    for layer, what in dict.fromkeys((request.layer, request.what) for request in requests):
        taps.keep(layer, what)
    with torch.inference_mode(), taps:
        taps(images)
        together, alone = taps.record, {}
        for picture in (0, _TRIAL_IMAGES - 1):
            taps(images[picture : picture + 1])
            alone[picture] = taps.record
        return together, alone


def _sites_of(record: Record, request: _Request) -> list[Site]:
    if request.what == "input":
        return [site for site in record.sites.values() if (site.layer, site.what) == (request.layer, "input")][:1]
    return [site for site in record.find(request.layer + request.part) if site.what == "output"]


def _absent(backbone: Backbone, record: Record, request: _Request) -> LayertapError:
    given = [name for name, site in record.sites.items() if site.layer == request.layer]
    if not given:
        return InputError(f"layer {request.layer!r} of {backbone.spec} never runs, or gives no tensor; name another")
    return UnknownNameError(
        f"{request.part!r} behind layer {request.layer!r} is neither a pooling ({', '.join(POOLINGS)}) "
        f"nor one of its tensors ({', '.join(given)})"
    )


def _feature(
    backbone: Backbone, name: str, pooling: str, site: Site, values: Tensor, alone: dict[int, Record]
) -> Feature:
    where = f"layer {site.text()!r} of {backbone.spec}"
    shape = tuple(values.shape)
    if not values.is_floating_point():
        raise InputError(f"{where} gives {values.dtype}; features are floating point")
    scale = float(values.abs().max()) if values.numel() else 0.0
    for picture, record in alone.items():
        single = tuple(record[site].shape)
        if shape[:1] != (_TRIAL_IMAGES,) or single != (1, *shape[1:]):
            raise InputError(
                f"{where} gives {shape} for {_TRIAL_IMAGES} images and {single} for 1: "
                "its rows are not the images, and cannot be stored as theirs"
            )
        if float((values[picture] - record[site][0]).abs().max()) > _TRIAL_TOLERANCE * scale:
            raise InputError(f"{where} gives an image other values in a batch than alone: its rows are not the images")
    layout = recognise(
        shape[1:], backbone.preprocessing.crop_px, backbone.prefix_tokens, backbone.patches, backbone.class_token
    )
    try:
        resolved = resolve_pooling(pooling, layout, shape[1:], backbone.reads_class_token)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return Feature(
        name=name,
        site=site,
        pooling=resolved,
        layout=layout,
        activation_shape=shape[1:],
        shape=tuple(pool(values, resolved, layout).shape[1:]),
        source_dtype=str(values.dtype).removeprefix("torch."),
        automatic=pooling == "auto",
    )
