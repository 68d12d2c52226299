"""Are these the features of this model and these images? If not, why: `layertap.check`.

Rows are computed again and compared, by the code of `verify --sample`. Where they differ, causes are tried in a fixed
order (`causes.py`), and named only if the rows agree with them, never by likeness alone:

    1. length   rows scaled to length 1
    2. order    each computed row is searched among all stored rows; the places tell a shift or another order
    3. files    images that have changed since
    4. weights  those that the data set records, or a second file
    5. the rest a change at a time (`_mistakes`): BGR, normalisation, precision, interpolation, resize and crop, mirror,
                EXIF, ICC. Up to three are combined, each the one that brings the rows nearest; then training mode.

Changes are tried on two rows, and confirmed on all.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from extract import defaults
from extract.backbones.backbone import LoadedBackbone, LoadRequest
from extract.backbones.output_as_embedding import WithEmbedding, with_embedding
from extract.backbones.preprocessing import described
from extract.backbones.weights import Weights, build_with_weights, weights_sha256
from extract.compute.backbone import Backbone, load_backbone
from extract.errors import InputError, LayertapError, first_line
from extract.extraction import reproduce
from extract.extraction.causes import Cause, Models, Search, stored_rows
from extract.extraction.plan import Existing, Plan, resolve
from extract.extraction.settings import ExtractionSettings
from extract.images import Images, list_images
from extract.images.arrays import SUFFIXES, open_array, split_name
from extract.images.csv_lists import TABLES, list_rows
from extract.images.sources import Files
from extract.row_status import Status
from extract.store.format.dataset import DataSet
from extract.store.format.value_types import ROUNDING
from extract.store.reader import FeatureReader
from extract.system.optional_libraries import library
from extract.system.similar_paths import did_you_mean

__all__ = ["Cause", "Check", "check"]

_AS_HALF = "that is more than rounding, and as much as half precision (float16) or TF32 changes"


@dataclass(frozen=True)
class Check:
    """Result of `check`; it is true if the rows are those of the model and the images.

    Attributes:
        agrees: whether all sampled rows agree, as the model, transform and images were given. A row that cannot be
            compared does not.
        n_rows: number of rows compared.
        deviation: largest deviation of a row as given, relative to the largest value of the stored row.
        causes: what explains the difference: with all of them, the rows agree, unless `nearest` says that nothing fits.
            Then they are facts: another number of rows, weights that cannot be loaded.
        remaining: largest deviation with all causes.
        nearest: what comes nearest, if nothing explains the difference, or a note on rows that agree; may be empty.
        unreadable: rows that could not be compared, with the reason.
    """

    agrees: bool
    n_rows: int
    deviation: float
    causes: tuple[Cause, ...] = ()
    remaining: float = 0.0
    nearest: str = ""
    unreadable: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.agrees

    def __str__(self) -> str:
        rows, by, near = f"{self.n_rows:,} rows", f"{self.deviation:.1e} of their largest value", self.nearest
        lines = [f"{rows} do not all agree; they differ by up to {by}"]
        lines += [f"cause: {cause.kind}: {cause.what}" for cause in self.causes]
        if self.agrees or not (self.causes or near):
            lines = [f"{rows} agree; they differ by at most {by}" + (f"; {near}" if near else "")]
        elif near:
            lines.append("no preprocessing, order, precision or mode that was tried fits; the nearest: " + near)
        else:
            lines.append(f"with this, they differ by at most {self.remaining:.1e}")
        return "\n".join([*lines, *(f"not compared: {text}" for text in self.unreadable)])


def check(
    features: Any, *, model: nn.Module | LoadedBackbone | str | None = None, transform: Any = None, images: Any = None,
    layer: str | None = None, sample: int = 32, weights: str | None = None, other_weights: str | None = None,
    seed: int = defaults.SEED, device: str = defaults.DEVICE,
) -> Check:  # fmt: skip
    """Compute some rows again with a model and a transform, compare them with the stored rows, and say why they differ.

        check("outputs/photos", model=net, transform=transform)
        check("features.npy", model="timm/resnet50", images="list.csv")
        check(array, model=net, transform=transform, images=paths, layer="layer4")

    Args:
        features: a data set; a `.npy` file, `FILE.h5:NAME` or `FILE.parquet:COLUMN`; or an array (N, *shape).
        model: a module, a backbone or its spec; None: the recorded backbone of the data set.
        transform: picture -> (3, H, W) float32; None: the preprocessing of the backbone. A module needs one.
        images: images of the rows, in their order: a folder, a list (`.csv`, `.parquet`, or text with a path a line) or
            a sequence of paths; None: those of the data set.
        layer: `LAYER[:POOLING]`; None: `embedding`, or the only layer of the data set. Of a module, `output` is its
            output, and `embedding` the input of its last linear layer; None: the one of them with the stored width.
        sample: number of rows to compute, chosen at random.
        weights: name or file of the weights, if `model` is a spec.
        other_weights: a second file of weights, which may be those of the stored rows.
        seed: seed of the choice of rows.
        device: device to compute on, unless the model is loaded.

    Raises:
        InputError: features, images or the model are missing or do not fit, or no image can be read.
        LayertapError: see `load_backbone` and `FeatureReader`.
    """
    if sample < 1:
        raise InputError(f"sample is {sample}; it must be at least 1")
    with contextlib.ExitStack() as opened:
        stored = _stored(features, layer, opened)
        every, count = _images(stored, images), len(stored.values)
        if not len(every) / 2 <= count <= 2 * len(every):  # a search of an order would take long, and mean nothing
            raise InputError(f"{stored.name} has {count:,} rows, but there are {len(every):,} images")
        good = np.arange(count) if stored.reader is None else np.flatnonzero(stored.reader.status == Status.OK)
        rows = reproduce.some_rows(stored.name, good[good < len(every)], sample, seed)
        plan, name = _plan(stored, every.select(rows.tolist()), _backbones(stored, model, transform, weights, device))
        return _compared(stored, plan, name, rows, every, other_weights)


@dataclass(frozen=True)
class _Stored:
    """Stored rows of one feature: of an array, of a file, or of a data set with its reader."""

    name: str
    values: Any
    layer: str | None
    written_ns: float = np.inf
    reader: FeatureReader | None = None

    @functools.cached_property
    def dataset(self) -> DataSet:
        """The data set."""
        return DataSet.open(Path(self.name))


def _stored(features: Any, layer: str | None, opened: contextlib.ExitStack) -> _Stored:
    if isinstance(features, str | os.PathLike) and Path(features).is_dir():
        reader = opened.enter_context(FeatureReader(features, partial=True))
        layer = layer or ("embedding" if len(reader.layers) != 1 else reader.layers[0])
        return _Stored(str(features), reader[layer], layer, reader=reader)
    if isinstance(features, torch.Tensor):  # NumPy takes no gradients, and has no bfloat16
        features = features.detach().cpu()
        features = features.float() if features.dtype == torch.bfloat16 else features
    name, values, written_ns = "the array", np.asarray(features), np.inf
    if isinstance(features, str | os.PathLike):
        name, (path, array) = os.fspath(features), split_name(os.fspath(features), (*SUFFIXES, ".parquet"))
        if not Path(path).is_file():
            raise InputError(f"{path}: no such file or data set", hint=did_you_mean(path))
        if not path.lower().endswith((".npy", ".parquet", *SUFFIXES)):
            raise InputError(f"{path}: expected a data set, .npy, .h5 or .parquet", hint="in Python, pass the array")
        opening = _parquet_column if path.lower().endswith(".parquet") else open_array
        values, written_ns = opening(path, array), Path(path).stat().st_mtime_ns
    if values.ndim < 2 or values.dtype.kind not in "fiu" or not values.size:
        raise InputError(f"{name} is {values.dtype} {values.shape}; expected numbers (N, ...), a row for each image")
    return _Stored(name, values, layer, written_ns)


def _parquet_column(path: str, name: str) -> NDArray[Any]:
    """Return the lists of numbers of a column, (N, D), read into memory.

    Raises:
        InputError: the file cannot be read or has no such column, or its lists have several lengths or empty values.
    """
    pa, parquet, compute = (
        library(f"pyarrow{module}", "parquet", f"{path}: Parquet") for module in ("", ".parquet", ".compute")
    )
    try:
        file = parquet.ParquetFile(path)
        if name not in file.schema_arrow.names:
            raise InputError(f"{path} has no column {name!r}; it has {', '.join(file.schema_arrow.names)}",
                             hint=f"name it: {path}:COLUMN")  # fmt: skip
        rows = file.read(columns=[name])[name].combine_chunks()
        lengths = compute.list_value_length(rows)
        is_regular = len(rows) and len(lengths.unique()) == 1 and not rows.null_count + rows.flatten().null_count
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} cannot be read: {first_line(error)}") from error
    if not is_regular:
        raise InputError(f"{path}: the rows of {name} are not all of one length, without empty values")
    values: NDArray[Any] = rows.flatten().to_numpy(zero_copy_only=False).reshape(len(rows), -1)
    return values


def _images(stored: _Stored, images: Any) -> Images:
    """Return the images in the order of the rows."""
    if stored.reader is not None:
        return reproduce.images_of(stored.dataset, stored.reader.paths[:], images)
    if images is None:
        raise InputError(f"{stored.name} does not name its images", hint="name them: images=PATHS, or --paths LIST")
    folder, paths = Path.cwd(), images
    if isinstance(images, str | os.PathLike):
        folder, suffix = Path(images).parent, Path(images).suffix.lower()
        if suffix in TABLES:
            paths = [os.fsdecode(row.path) for row in list_rows(os.fspath(images))]
        elif suffix == ".txt" and Path(images).is_file():
            paths = os.fsdecode(Path(images).read_bytes()).splitlines()
        else:
            return list_images(images)
    names = [os.fspath(path) for path in paths]
    source = Files(str(folder.resolve()), names, anywhere=True)
    return Images(str(folder), names, np.full(len(names), -1, np.int64), [], [""] * len(names), source)


def _backbones(stored: _Stored, model: Any, transform: Any, weights: str | None, device: str) -> Iterator[Backbone]:
    """Yield the model as a backbone; a module first with its output as the embedding, then the last linear's input."""
    recorded = stored.reader.provenance if stored.reader is not None else {}
    if recorded and model in (None, recorded.get("backbone")):
        model, _ = reproduce.recorded_backbone(stored.dataset, recorded, model, weights, device)
    if model is None:
        raise InputError(f"{stored.name} does not name its model", hint="name it: model=MODEL, or -b BACKBONE")
    given: dict[str, Any] = {} if transform is None else {"preprocessing": described(transform)}
    if not isinstance(model, nn.Module):
        loaded = load_backbone(model, weights=weights, device=device) if isinstance(model, str) else model
        yield Backbone(**{**vars(loaded), **given})
        return
    if transform is None:
        raise InputError("a module needs its transform", hint="add transform=FUNCTION, of a picture")
    name, linear = type(model).__name__, [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    given["device"] = home = next(model.parameters(), torch.zeros(())).device
    network = model if home.type == "cpu" else copy.deepcopy(model).cpu()
    network, reason = with_embedding(network, given["preprocessing"].crop_px, nn.Module.__call__)
    if stored.layer == "output" or not linear or (stored.layer is None and not reason):
        yield Backbone(name, name, network.to(home), Weights("as given", ""), no_embedding=reason, **given)
    if stored.layer != "output" and linear:
        yield Backbone(name, name, model, Weights("as given", ""), classifier=linear[-1], **given)


def _plan(stored: _Stored, images: Images, backbones: Iterator[Backbone]) -> tuple[Plan, str]:
    """Return a plan that computes a feature of the stored width, and the name of the feature."""
    width, widths = math.prod(stored.values.shape[1:]), list[str]()
    layer = "embedding" if stored.layer in (None, "output") else str(stored.layer)
    for backbone in backbones:
        if stored.reader is not None:
            pooling = stored.values.attributes.get("pooling", "auto")
            text = f"{layer.removesuffix(f':{pooling}')}:{pooling}"
            plan = reproduce.recorded_plan(stored.dataset, stored.reader.provenance, images, backbone, layer=text)
        else:
            settings = ExtractionSettings(layers=[layer], compile="off", workers=0, distortion=None, fit_on=None)
            plan = resolve(settings, images, backbone, Existing(""))
        for feature in plan.choice.features:
            if math.prod(feature.shape) == width:
                return plan, feature.name
            widths.append(f"{math.prod(feature.shape):,}")
    raise InputError(
        f"{stored.name} has {width:,} values in a row, but {layer} of the model gives {' or '.join(widths)}",
        hint="name the layer (-l LAYER, layer=LAYER) or another model; `layertap list BACKBONE` lists layers",
    )


def _compared(
    stored: _Stored, plan: Plan, name: str, rows: NDArray[np.int64], images: Images, other_weights: str | None
) -> Check:
    """Compute the rows, and look for causes if they differ."""
    good, unreadable = list[reproduce.ComparedRow](), list[str]()
    for each in reproduce.compared(plan, {name: stored.values}, rows):
        is_stored = np.isfinite(stored_rows(stored.values, np.array([each.row]))).all()
        if each.is_read and is_stored:
            good.append(each)
        elif each.is_read or is_stored:  # else it is the row of an image that failed, as it should be
            reason = each.reason if is_stored else "its stored features are not finite"
            unreadable.append(f"row {each.row} ({each.path}): {reason}")
    if not good:
        why = unreadable[0] if unreadable else f"the sampled rows of {stored.name} have no features and no images"
        raise InputError(f"no row can be compared: {why}", hint="name the place of the images: --paths LIST")
    apart, at = np.nan_to_num([each.deviation for each in good], nan=np.inf), np.array([each.row for each in good])
    precision, dtype = plan.settings.precision, str(getattr(stored.values, "stored_dtype", stored.values.dtype))
    tolerance, worst = reproduce.TOLERANCE[precision] + ROUNDING.get(dtype, 0.0), float(apart.max())
    result = Check(False, len(good), worst, (), worst, "", (*unreadable,))
    if worst <= tolerance and len(stored.values) == len(images):
        is_half = worst > tolerance - 8e-4 and precision == "float32"  # 2e-4 more than the rounding of the stored type
        return replace(result, agrees=not unreadable, nearest=_AS_HALF if is_half and not unreadable else "")
    values = np.stack([each.features[name].reshape(-1).astype(np.float64) for each in good])
    plan = replace(plan, images=plan.images.select(np.searchsorted(rows, at).tolist()), engine="eager")
    search = Search(plan, name, stored.values, at, values, _changed(stored, good, apart > tolerance), images, tolerance)
    causes, remaining, nearest = search.explain(_other_models(plan.backbone, stored, other_weights))
    return replace(result, causes=(*causes,), remaining=worst if nearest else remaining, nearest=nearest)


def _changed(stored: _Stored, rows: Sequence[reproduce.ComparedRow], wrong: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return whether the image of each row has changed since: by its hash, or by the time of the file of features."""
    if stored.reader is not None:
        hashes = stored.reader.column("source_hash")
        return np.array([(each.source_hash != hashes[each.row]).any() for each in rows])
    newer = np.array([each.mtime_ns > stored.written_ns for each in rows])
    # A copy of all images is newer than the file, too: only wrong rows may be.
    return newer & (wrong.mean() <= 0.5 and not (newer & ~wrong).any())


def _other_models(backbone: Backbone, stored: _Stored, file: str | None) -> Models:
    """Yield the model with weights of a file, and with those that the data set records, if they are others."""
    own = _inside(backbone.model)
    if file is not None:
        request = LoadRequest(backbone.spec, "", file, 0, False, {})
        other, *_ = build_with_weights(request, lambda: copy.deepcopy(own))
        yield _with_weights(f"those of {file}", backbone.model, other)
    sha256 = backbone.weights.sha256 or weights_sha256(own)
    if stored.reader is None or stored.dataset.depends_on.get("weights_sha256") == sha256:
        return
    words = f"{stored.name} records {stored.reader.provenance.get('weights')}"
    try:
        device, recorded = str(backbone.device), stored.reader.provenance
        named, _ = reproduce.recorded_backbone(stored.dataset, recorded, None, None, device)
        yield _with_weights(words, backbone.model, _inside(named.model))
    except LayertapError as error:
        yield Cause("weights", f"{words}, which the model lacks and which cannot be loaded: {first_line(error)}"), None


def _with_weights(words: str, model: nn.Module, other: nn.Module) -> tuple[Cause, nn.Module | None]:
    """Return a copy of the model with the weights of another, and the first that differs."""
    before, state, twin = _inside(model).state_dict(), other.state_dict(), copy.deepcopy(model)
    if before.keys() != state.keys():
        return Cause("weights", f"{words}: the parameters have other names"), None
    _inside(twin).load_state_dict(state)
    differs = [name for name, value in before.items() if not torch.equal(value, state[name])]
    what = f"{words}: {len(differs)} of {len(state)} tensors differ, the first is {', '.join(differs[:1])}"
    return Cause("weights", what), twin


def _inside(model: nn.Module) -> nn.Module:
    """Return the network without the wrapper that makes its output an embedding."""
    return next(model.children()) if isinstance(model, WithEmbedding) else model
