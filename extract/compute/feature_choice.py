"""Choose the features of a run: resolve `LAYER[:POOLING]...` for a backbone by trial forwards.

The trial (`extract/taps/batch_axis.py`) shows which layers run, what they output, and which rows of the output belong
to which image. A layer whose rows cannot be assigned to images is refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from extract.backbones import LoadedBackbone
from extract.backbones.output_as_embedding import WithEmbedding
from extract.backbones.sources import SOURCES
from extract.compute.pooling import (
    Layout,
    PoolingChain,
    pooling_names,
    recognise,
    reduction,
    resolve_pooling,
    split_poolings,
)
from extract.compute.principal_axes import AxesProjection, AxesSource
from extract.compute.sparse_projection import values_for_distortion
from extract.errors import InputError, LayertapError, UnknownNameError, first_line, separated_by_commas, unknown_name
from extract.system.foreign_code import exits_refused
from extract.taps.batch_axis import BatchAxis, Trial
from extract.taps.layer_names import is_glob, match_layers, named_layers
from extract.taps.record import Record, Site, What, split_text
from extract.taps.taps import Taps

__all__ = [
    "EMBEDDING",
    "WHOLE_TYPES",
    "Choice",
    "Feature",
    "choose_features",
    "with_projection_sizes",
]

EMBEDDING = "embedding"  # reserved layer name: the input of the backbone's classifier

_TRIAL_IMAGES = 3
# A code has no mean, no cosine measures a code that rounding moves, and float32 holds none above 16,777,216: whole
# numbers fit `none`, `flatten` and the reference engine. They have two types, as `int8` already means rounded floats.
WHOLE_TYPES = {"int8": "int32", "uint8": "int32", "int16": "int32", "int32": "int32", "int64": "int64"}


@dataclass(frozen=True)
class Feature:
    """One feature of each image.

    Attributes:
        name: name in the store.
        site: tensor that the feature is computed from.
        rows: position of the images in that tensor.
        poolings: from the activation to the feature.
        layout: layout of the activation.
        activation_shape: shape of the activation of one image, before pooling.
        source_dtype: dtype of the activation.
        automatic: whether `auto` chose the pooling.
    """

    name: str
    site: Site
    rows: BatchAxis
    poolings: PoolingChain
    layout: Layout
    activation_shape: tuple[int, ...]
    source_dtype: str
    automatic: bool

    @property
    def pooling(self) -> str:
        """Names of the resolved poolings, never `auto`."""
        return self.poolings.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the feature of one image, as stored."""
        return self.poolings.shape

    @property
    def is_whole(self) -> bool:
        """Whether its values are whole numbers."""
        return self.source_dtype in WHOLE_TYPES

    def stored_as(self, dtype: str) -> str:
        """Return its type in a data set of a dtype: whole numbers are stored exactly, in all of them."""
        return WHOLE_TYPES.get(self.source_dtype, dtype)

    @property
    def principal_axes(self) -> AxesProjection | None:
        """The principal axes that it is projected on, which may not be loaded yet; None if it is on none."""
        return self.poolings.principal_axes

    def axes_source(self, backbone: LoadedBackbone, fit_on: int = 0, paths_xxh3: str = "") -> AxesSource:
        """Return what its principal axes are fitted on."""
        before = self.poolings.before_axes
        return AxesSource(
            architecture=backbone.architecture,
            weights_sha256=backbone.weights.sha256,
            layer=str(self.site),
            poolings=before.name or "none",
            shape=tuple(before.shape if before.steps else self.activation_shape),
            fit_on=fit_on,
            images=0,
            paths_xxh3=paths_xxh3,
        )


@dataclass(frozen=True)
class Choice:
    """The features of a run, and the layers that matched a glob but never run."""

    features: list[Feature]
    never_run: list[str]

    @property
    def axes_files(self) -> dict[str, Path]:
        """sha256 -> file of the principal axes that features are projected on, once they are loaded."""
        axes = [feature.principal_axes for feature in self.features if feature.principal_axes]
        return {each.sha256: each.path for each in axes if each.path}

    @property
    def is_of_boxes(self) -> bool:
        """Whether the features are pooled over boxes of pictures, by the host."""
        return any(step.of_boxes for feature in self.features for step in feature.poolings.steps)

    @property
    def before_boxes(self) -> Choice:
        """The part of the computation that a device does, once for each picture."""
        return replace(self, features=[replace(each, poolings=each.poolings.before_boxes) for each in self.features])

    def split(self) -> tuple[Choice, dict[str, PoolingChain]]:
        """Return the part of the computation that compilers take, and for each feature the poolings that follow."""
        parts = {feature.name: feature.poolings.split() for feature in self.features}
        compiled = [replace(feature, poolings=parts[feature.name][0]) for feature in self.features]
        return Choice(compiled, self.never_run), {name: following for name, (_, following) in parts.items()}

    def kept_by(self, taps: Taps, dtype: torch.dtype) -> Taps:
        """Add these features to `taps` and return it. Each site records a dict of features, pooled on the device."""
        for site in dict.fromkeys(feature.site for feature in self.features):
            features = {f.name: (f.rows, f.poolings) for f in self.features if f.site == site}
            taps.keep(site, reduce=reduction(features, dtype))
        return taps


@dataclass(frozen=True)
class _Request:
    """One requested layer by its exact name; `part` is the call or path after it, as in `relu#1` or `lstm:0`."""

    layer: str
    part: str
    pooling: str
    what: What = "output"
    by_glob: bool = False


def choose_features(
    backbone: LoadedBackbone, layers: Sequence[str], *, in_order: bool = False,
    has_boxes: Callable[[], bool] = lambda: False,
) -> Choice:  # fmt: skip
    """Resolve layer arguments against a backbone.

    Args:
        backbone: backbone in eval mode on its device.
        layers: `LAYER[:POOLING]...` each. LAYER is a name, a glob, a name with a call (`relu#1`) or a path (`lstm:0`),
            or `embedding`. Several poolings follow each other. The default is `auto`.
        in_order: give the features in the order of the network, in place of that of `layers`: figures show them so.
        has_boxes: whether rows are boxes of pictures, which the pooling `roi` needs.

    Raises:
        UnknownNameError: a layer or pooling does not exist.
        InputError: a layer never runs, its rows are not the images, or the pooling does not fit. Some are pooled over
            boxes and others not, or there are no boxes.
    """
    layer_names = named_layers(backbone.model)
    requests = [request for text in layers for request in _parse(backbone, layer_names, text)]
    trial, has_grids = _trial(backbone, requests), _has_grids(backbone)
    record = trial.record
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
            try:
                feature = _feature(backbone, name, request.pooling, site, trial, has_grids)
            except InputError as error:
                if not sites[1:] or request.by_glob:
                    raise
                others = f"choose among its tensors: {', '.join(other.text() for other in sites)}"
                hint = f"{error.hint}; or {others}" if error.hint else others
                raise InputError(error.message, hint=hint) from None
            features.setdefault((site, feature.pooling), feature)
    ran = {site.layer for site in record.sites.values()}
    if not features and (wrong := [request for request in requests if request.part and request.layer in ran]):
        raise _absent(backbone, record, wrong[0])
    if not features:
        raise InputError(f"none of these layers of {backbone.spec} ever runs: {', '.join(never_run) or 'none given'}")
    poolings = Counter(site for site, _ in features)
    named = [
        replace(feature, name=f"{feature.name}:{feature.pooling}") if poolings[site] > 1 else feature
        for (site, _), feature in features.items()
    ]
    if in_order:
        places = {name: place for place, name in enumerate(layer_names)}
        named.sort(key=lambda feature: places[feature.site.layer])
    if len({feature.name for feature in named}) < len(named):
        raise InputError(f"{backbone.spec} has a layer called {EMBEDDING!r}", hint="extract it in a separate run")
    choice = Choice(named, list(never_run))
    if choice.is_of_boxes:
        _check_boxes(choice, has_boxes())
    return choice


def _check_boxes(choice: Choice, has_boxes: bool) -> None:
    whole = {feature.poolings.steps[-1].of_boxes: f"{feature.site}:{feature.pooling}" for feature in choice.features}
    if not has_boxes:
        raise InputError(
            f"{whole[True]} pools over boxes, and these images have none", hint="name boxes: --boxes TABLE"
        )
    if False in whole:
        what = f"{whole[True]} is of whole pictures, and {whole[False]} of boxes that are cut out of them"
        raise InputError(what, hint="use roi for all layers, or compute two data sets")


def with_projection_sizes(layers: Sequence[str], images: int, distortion: float | None) -> list[str]:
    """Return the layers with the number of values of each `srp` that has none.

    Args:
        layers: `LAYER[:POOLING]...` each.
        images: number of images.
        distortion: see `values_for_distortion`; None returns the layers as they are.
    """
    sized = []
    for text in layers:
        layer, poolings = split_poolings(text)
        if distortion is not None and poolings:
            number = values_for_distortion(images, distortion)
            text = ":".join([layer, *(re.sub(r"^srp(?=s|$)", f"srp{number}", name) for name in poolings.split(":"))])
        sized.append(text)
    return sized


def _parse(backbone: LoadedBackbone, names: Collection[str], text: str) -> list[_Request]:
    known = [EMBEDDING, *names]
    if text not in known and (error := separated_by_commas(text, backbone.spec)):
        raise error
    text, pooling = split_poolings(text)
    pooling = pooling or "auto"
    if text == EMBEDDING:
        if isinstance(backbone.model, WithEmbedding):
            return [_Request(EMBEDDING, "", pooling)]
        if backbone.classifier is None:
            why = backbone.no_embedding or "it has no single classifier whose input could be the embedding"
            raise InputError(f"{backbone.spec} has no embedding: {why}", hint="choose layers, such as -l '*'")
        return [_Request(backbone.classifier, "", pooling, what="input")]
    pattern = split_text(text, names)[0]
    by_glob = is_glob(pattern) and pattern not in names
    if pattern.strip() and not by_glob and pattern not in names:
        listed = f"list them: layertap list {backbone.spec}"
        raise unknown_name("layer", pattern, known, backbone.spec, listed)
    matches = match_layers(names, pattern, backbone.spec)
    return [_Request(name, text[len(pattern) :], pooling, by_glob=by_glob) for name in matches]


def _trial(backbone: LoadedBackbone, requests: Sequence[_Request]) -> Trial:
    height, width = backbone.preprocessing.crop_px
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(0, 256, (_TRIAL_IMAGES, height, width, 3), dtype=torch.uint8, generator=generator)
    images = backbone.preprocessing.to_input(pictures.to(backbone.device))
    try:
        with exits_refused():
            return Trial(backbone.model, images, [(request.layer, request.what) for request in requests])
    except LayertapError:
        raise
    except Exception as error:
        if not backbone.asked.get("preprocessing"):  # not caused by the user's preprocessing
            raise
        raise InputError(
            f"{backbone.spec} does not accept pictures of {height}x{width}: {first_line(error)}"
        ) from error


def _sites_of(record: Record, request: _Request) -> list[Site]:
    if request.what == "input":
        return [site for site in record.sites.values() if (site.layer, site.what) == (request.layer, "input")][:1]
    return [site for site in record.find(request.layer + request.part) if site.what == "output"]


def _absent(backbone: LoadedBackbone, record: Record, request: _Request) -> LayertapError:
    given = [name for name, site in record.sites.items() if site.layer == request.layer]
    if not given and request.what == "input":
        return InputError(
            f"{backbone.spec} has no embedding: its classifier {request.layer!r} is not called as a whole, and so has "
            "no single input",
            hint="choose layers, such as -l '*'",
        )
    if not given:
        return InputError(
            f"layer {request.layer!r} of {backbone.spec} never runs, or returns no tensor", hint="choose another"
        )
    return UnknownNameError(
        f"{request.part!r} after layer {request.layer!r} is neither a pooling ({', '.join(pooling_names())}) "
        f"nor one of its tensors ({', '.join(given)})"
    )


def _hint(backbone: LoadedBackbone, layout: Layout | None, shape: tuple[int, ...], pooling: str) -> str:
    """Return how a user's own model says that tokens precede the patch tokens, if that may help."""
    source = SOURCES.get(backbone.spec.partition("/")[0])
    if layout is None or source is None or not source.runs_code or backbone.prefix_tokens:
        return ""
    has_no_class_token = layout.kind == "tokens" and pooling.startswith("cls_token")
    is_of_another_number = layout.kind == "unknown" and len(shape) == 2 and not layout.is_ambiguous
    if not has_no_class_token and not is_of_another_number:
        return ""
    return "if tokens precede the patch tokens, set their number as model.num_prefix_tokens"


def _has_grids(backbone: LoadedBackbone) -> bool:
    """Return whether tokens are in the order of the rows of the image; Hiera sorts them by its later windows."""
    return all(type(module).__name__ not in ("Hiera", "HieraEncoder") for module in backbone.model.modules())


def _recognised(shape: tuple[int, ...], backbone: LoadedBackbone, site: Site, has_grids: bool) -> Layout:
    """Return the layout of the activation of one image of a layer."""
    size, patches = backbone.preprocessing.crop_px, (backbone.prefix_tokens, backbone.patches, backbone.class_token)
    layout = recognise(shape, size, *patches)
    if layout.is_ambiguous:
        layout = recognise(shape, size, *patches, channels=_channels_of(backbone, site, shape))
    return layout if has_grids else replace(layout, grid=None)


def _channels_of(backbone: LoadedBackbone, site: Site, shape: tuple[int, ...]) -> Literal["first", "last", "unknown"]:
    """Return the axis of the channels: a higher input has more positions, and as many channels."""
    height, width = backbone.preprocessing.crop_px
    higher = torch.zeros(1, height + 32 * max(1, height // 64), width, 3, dtype=torch.uint8, device=backbone.device)
    try:
        with exits_refused(), torch.no_grad(), Taps(backbone.model, site) as taps:
            taps(backbone.preprocessing.to_input(higher))
            found = tuple(taps.record[site].shape[1:])
    except Exception:  # the model takes one size alone
        return "unknown"
    grown = [axis for axis, size in enumerate(shape) if len(found) == len(shape) and found[axis] != size]
    if grown == [1] and found[1] > shape[1]:  # (C, H, W), (C, T)
        return "first"
    return "last" if grown == [0] and found[0] > shape[0] else "unknown"


def _feature(backbone: LoadedBackbone, name: str, pooling: str, site: Site, trial: Trial, has_grids: bool) -> Feature:
    layout: Layout | None = None
    shape: tuple[int, ...] = ()
    try:
        rows = trial.rows(site)
        values = rows.by_image(trial.record[site])
        shape = tuple(values.shape[1:])
        layout = _recognised(shape, backbone, site, has_grids)
        poolings = resolve_pooling(pooling, values, layout, backbone.reads_class_token)
    except InputError as error:
        hint = _hint(backbone, layout, shape, pooling) or error.hint
        raise InputError(f"layer {site.text()!r} of {backbone.spec}: {error.message}", hint=hint) from None
    return Feature(
        name=name,
        site=site,
        rows=rows,
        poolings=poolings,
        layout=layout,
        activation_shape=shape,
        source_dtype=str(values.dtype).removeprefix("torch."),
        automatic=pooling == "auto",
    )
