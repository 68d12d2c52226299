"""Are these the features of this model and these images? If not, why: `layertap.check`.

Rows are computed again, and compared with the tolerance of `verify --sample`. Where they differ, causes are tried in a
fixed order, and named only if the rows agree with it, never by likeness alone:

    1. length   rows scaled to length 1
    2. order    each computed row is searched among all stored rows; the places tell a shift or another order
    3. files    images that have changed since
    4. weights  those that the data set records, or a second file
    5. the rest a change at a time: BGR, normalisation, precision, interpolation, resize and crop, mirror, EXIF, ICC,
                training mode. Up to three changes are combined, each the one that brings the rows nearest.

Changes are tried on `_TRIED` rows, and confirmed on all.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from extract import defaults
from extract.backbones.backbone import LoadedBackbone, LoadRequest
from extract.backbones.output_as_embedding import WithEmbedding, with_embedding
from extract.backbones.preprocessing import described
from extract.backbones.weights import Weights, build_with_weights, weights_sha256
from extract.compute.agreement import deviation
from extract.compute.backbone import Backbone, load_backbone
from extract.compute.backends import open_forward
from extract.compute.feature_choice import Choice, choose_features
from extract.errors import InputError, LayertapError, first_line
from extract.extraction.feature_file import checked_values, feature_file
from extract.extraction.plan import how_decoded, how_made
from extract.extraction.reproduce import TOLERANCE, recorded_backbone
from extract.extraction.ways import Way, changes, orders
from extract.images import Images, list_images, listed_again
from extract.images.csv_lists import TABLES, list_rows
from extract.images.sources import Files
from extract.row_status import Status
from extract.store.format.dataset import DataSet
from extract.store.format.value_types import ROUNDING
from extract.store.reader import FeatureReader
from extract.system.torch_state import evaluating, full_float32

__all__ = ["Cause", "Check", "check"]

_TRIED = 2  # rows that a change is tried on
_CHANGES = 3  # that are combined
_BATCHES = (32, 64, 16, 128, 8)  # sizes that a loop in training mode is likely to have
_FLOAT32 = 2e-4  # more than this is seldom the rounding of float32
_AS_HALF = "it is more than float32 is rounded by, and as much as half precision (float16) or TF32 changes"
_BLOCK = 4096  # stored rows that are compared at once
_MOST = 0.8  # part of the sampled rows that an order must explain

Rows = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True)
class Cause:
    """Why stored rows differ from computed ones.

    Attributes:
        kind: length, order, files, weights, BGR, normalisation, precision, interpolation, crop, mirror, EXIF, ICC,
            training mode, preprocessing.
        what: the cause in words.
    """

    kind: str
    what: str


@dataclass(frozen=True)
class Check:
    """Result of `check`; it is true if the rows are those of the model and the images.

    Attributes:
        agrees: whether all compared rows agree, as the model, transform and images were given.
        n_rows: number of rows compared.
        deviation: largest deviation of a row as given, relative to the largest value of the stored row.
        causes: what explains the difference: with all of them, the rows agree, unless `nearest` says that nothing fits.
            Then they are facts: another number of rows, weights that cannot be loaded.
        remaining: largest deviation with all causes.
        nearest: what comes nearest, if nothing explains the difference, or a note on rows that agree; may be empty.
        unreadable: rows that were not compared, with the reason.
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
        causes = [f"cause: {cause.kind}: {cause.what}" for cause in self.causes]
        lines = [f"{rows} do not all agree; they differ by up to {by}", *causes]
        if self.agrees:
            lines = [f"{rows} agree; they differ by at most {by}" + (f"; {near}" if near else "")]
        elif self.remaining < self.deviation or not near:
            lines.append(f"with this, they differ by at most {self.remaining:.1e}")
        else:
            lines.append("no preprocessing, order, precision or mode that was tried fits; the nearest: " + near)
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
        features: a data set; a `.npy`, `.h5` or `.parquet` file; or an array (N, *shape).
        model: a module, a backbone or its spec; None: the recorded backbone of the data set.
        transform: picture -> (3, H, W) float32; None: the preprocessing of the backbone. A module needs one.
        images: images of the rows, in their order: a folder, a list (`.csv`, `.parquet`, or text with a path a line) or
            a sequence of paths; None: those that the data set, or the column `path` of the file, names.
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
        backbone, choice, way = _model(stored, model, transform, layer, weights, device)
        comparison = _Comparison(stored, _images(stored, images), backbone, choice, way, device)
        return comparison.result(sample, seed, other_weights)


@dataclass(frozen=True)
class _Stored:
    """Stored rows of an array, of a file, or of a data set with its reader."""

    name: str
    values: Any
    paths: Sequence[str] | None = None
    written_ns: int | None = None
    dataset: DataSet | None = None
    reader: FeatureReader | None = None
    layer: str | None = None

    def rows(self, rows: Sequence[int] | Places) -> Rows:
        """Return rows (R, D)."""
        unique, back = np.unique(np.asarray(rows), return_inverse=True)  # HDF5 takes ascending numbers alone
        values: Rows = np.asarray(self.values[unique])[back].reshape(len(rows), -1).astype(np.float64)
        return values


def _stored(features: Any, layer: str | None, opened: contextlib.ExitStack) -> _Stored:
    if not isinstance(features, str | os.PathLike):
        return _Stored("the array", checked_values(np.asarray(features), "the array"))
    path = Path(features)
    if not path.is_dir():
        values, paths = feature_file(path, layer)
        return _Stored(str(path), values, paths, path.stat().st_mtime_ns)
    dataset, reader = DataSet.open(path), opened.enter_context(FeatureReader(path, partial=True))
    name = layer or ("embedding" if len(reader.layers) != 1 else reader.layers[0])
    return _Stored(str(path), reader[name], reader.paths[:], None, dataset, reader, name)


def _images(stored: _Stored, images: Any) -> Images:
    """Return the images in the order of the rows."""
    folder = Path.cwd()
    if stored.dataset is not None and stored.paths is not None:
        return listed_again(stored.dataset.images["root"], stored.paths, None if images is None else os.fspath(images))
    if images is None and stored.paths is None:
        raise InputError(f"{stored.name} does not name its images", hint="name them: images=PATHS, or --paths LIST")
    paths = stored.paths if images is None else images
    if images is None:
        folder = Path(stored.name).parent
    elif isinstance(images, str | os.PathLike):
        folder, suffix = Path(images).parent, Path(images).suffix.lower()
        if suffix in TABLES:
            paths = [os.fsdecode(row.path) for row in list_rows(os.fspath(images))]
        elif suffix == ".txt" and Path(images).is_file():
            paths = os.fsdecode(Path(images).read_bytes()).splitlines()
        else:
            return list_images(images)
    names = [os.fspath(path) for path in paths or ()]
    source = Files(str(folder.resolve()), names, anywhere=True)
    return Images(str(folder), names, np.full(len(names), -1, np.int64), [], [""] * len(names), source)


def _model(
    stored: _Stored, model: Any, transform: Any, layer: str | None, weights: str | None, device: str
) -> tuple[Backbone, Choice, Way]:
    """Return the model with the layer that has the stored width, and the way to compute."""
    precision, fast, read = defaults.PRECISION, False, {"orientation": defaults.ORIENTATION, "icc": defaults.ICC}
    layer = stored.layer or layer
    name = "embedding" if layer in (None, "output") else str(layer)
    if stored.dataset is not None and stored.reader is not None:
        made, read = how_made(stored.dataset.depends_on), how_decoded(stored.dataset.depends_on)
        precision, fast = made["precision"], made["decode"] != "exact" and transform is None
        if model is None or model == stored.reader.provenance.get("backbone"):
            model, _ = recorded_backbone(stored.dataset, stored.reader.provenance, model, weights, device)
    if model is None:
        raise InputError(f"{stored.name} does not name its model", hint="name it: model=MODEL, or -b BACKBONE")
    if isinstance(model, nn.Module):
        candidates = _of_module(model, transform, layer)
    else:
        loaded = load_backbone(model, weights=weights, device=device) if isinstance(model, str) else model
        given = {"preprocessing": described(transform)} if transform is not None else {}
        candidates = iter([Backbone(**{**vars(loaded), **given})])
    width, widths = int(np.prod(stored.values.shape[1:])), []
    for backbone in candidates:
        with evaluating(backbone.model), full_float32():
            choice = choose_features(backbone, [name])
        feature = choice.features[0]
        if feature.principal_axes is not None:
            raise InputError(f"{feature.name} has axes fitted to images", hint="use `layertap verify --sample`")
        if int(np.prod(feature.shape)) == width:
            preprocessing = replace(backbone.preprocessing.faster() if fast else backbone.preprocessing)
            preprocessing = replace(preprocessing, orientation=read["orientation"], icc=read["icc"])
            return backbone, choice, Way(preprocessing, precision=precision)
        widths.append(f"{int(np.prod(feature.shape)):,}")
    raise InputError(
        f"{stored.name} has {width:,} values in a row, but {layer or name} of the model gives {' or '.join(widths)}",
        hint="name the layer (-l LAYER, layer=LAYER) or another model; `layertap list BACKBONE` lists layers",
    )


def _of_module(module: nn.Module, transform: Any, layer: str | None) -> Iterator[Backbone]:
    """Yield backbones of a module whose embedding is its output, or the input of its last linear layer."""
    if transform is None:
        raise InputError("a module needs its transform", hint="add transform=FUNCTION, of a picture")
    home, preprocessing = next(module.parameters(), torch.zeros(())).device, described(transform)
    linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear) and name]
    name, given = type(module).__name__, Weights("as given", "")
    as_output = layer in (None, "output") or (layer == "embedding" and not linear)
    if as_output:
        network = module if home.type == "cpu" else copy.deepcopy(module).cpu()
        wrapped, reason = with_embedding(network, preprocessing.crop_px, lambda model, images: model(images))
        if not reason:
            yield Backbone(name, name, wrapped.to(home), given, preprocessing, device=home)
        elif layer is not None or not linear:
            raise InputError(f"{name}: {reason}", hint="name a layer: layer=LAYER")
    if layer != "output" and (linear or not as_output):
        yield Backbone(name, name, module, given, preprocessing, linear[-1] if linear else None, device=home)


def _unit(rows: Rows) -> Rows:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    scaled: Rows = rows / np.where(lengths > 0, lengths, 1)
    return scaled


@dataclass(eq=False)
class _Comparison:
    """The comparison of computed rows with stored ones; `at` is the place of each row among the stored ones."""

    stored: _Stored
    images: Images
    backbone: Backbone
    choice: Choice
    way: Way
    device: str
    unreadable: list[str] = field(default_factory=list)

    def result(self, sample: int, seed: int, other_weights: str | None) -> Check:
        """Compare, and look for causes."""
        n_stored, n_images, way = len(self.stored.values), len(self.images), self.way
        if not n_images / 2 <= n_stored <= 2 * n_images:  # a search of an order would take long, and mean nothing
            raise InputError(f"{self.stored.name} has {n_stored:,} rows, but there are {n_images:,} images")
        rows = self._readable(sample, seed)
        dtype = str(getattr(self.stored.values, "stored_dtype", self.stored.values.dtype))
        tolerance = TOLERANCE[way.precision] + ROUNDING.get(dtype, 0.0)
        reference = self.computed(way, rows)
        given, causes = self._apart(reference, rows), list[Cause]()
        if n_stored != n_images:
            causes.append(Cause("order", f"{self.stored.name} has {n_stored:,} rows for {n_images:,} images"))
        elif (given <= tolerance).all():
            worst = float(given.max())
            note = _AS_HALF if worst > _FLOAT32 + ROUNDING.get(dtype, 0.0) and way.precision == "float32" else ""
            return Check(True, len(rows), worst, (), worst, note, tuple(self.unreadable))
        lengths = np.linalg.norm(self.stored.rows(rows), axis=1)
        if np.allclose(lengths, 1, atol=2e-3) and not np.allclose(np.linalg.norm(reference, axis=1), 1, atol=2e-2):
            causes.append(Cause("length", "the stored rows are scaled to length 1 (L2)"))
            way, reference = replace(way, unit=True), _unit(reference)
        at, order = self._order(reference, rows, tolerance)
        # An order that was inferred from likeness may be wrong, and then nothing agrees with it.
        explained = self._with_order(rows, reference, at, order, way, tolerance, other_weights)
        if order and explained[0] is None:
            explained = self._with_order(rows, reference, rows, "", way, tolerance, other_weights)
        more, apart, nearest = explained
        if more is None:
            causes, apart = causes if n_stored != n_images else [], given
        return Check(
            False, len(rows), float(given.max()), (*causes, *(more or ())), float(apart.max(initial=0)), nearest,
            tuple(self.unreadable),
        )  # fmt: skip

    def _with_order(
        self,
        rows: Places,
        reference: Rows,
        at: Places,
        order: str,
        way: Way,
        tolerance: float,
        other_weights: str | None,
    ) -> tuple[list[Cause] | None, Rows, str]:
        """Return the causes with which all rows agree in one order, the deviations, and what comes nearest."""
        rows, reference, at = rows[at >= 0], reference[at >= 0], at[at >= 0]  # -1: an image without a row
        apart, causes = self._apart(reference, at), [Cause("order", order)] if order else []
        stale = self._stale(rows, apart > tolerance)
        if stale.any():
            names = ", ".join(self._row(row) for row in rows[stale][:3])
            causes.append(Cause("files", f"{stale.sum()} of {len(rows)} images have changed since: {names}"))
        rows, at, apart = rows[~stale], at[~stale], apart[~stale]
        if not (apart > tolerance).any():
            return causes, apart, ""
        more, apart, nearest = self._explained(rows, at, apart, way, tolerance, other_weights)
        return [*causes, *more] if more else None, apart, nearest

    def _row(self, row: int) -> str:
        return f"row {row} ({self.images.paths[row]})"

    def _readable(self, sample: int, seed: int) -> Places:
        """Choose rows with finite features whose images can be read."""
        good = np.arange(min(len(self.stored.values), len(self.images)))
        good = good if self.stored.reader is None else np.flatnonzero(self.stored.reader.status == Status.OK)
        rows = []
        for row in np.sort(np.random.default_rng(seed).permutation(good)[:sample]).tolist():
            try:
                self.picture(row, self.way.preprocessing.orientation, self.way.preprocessing.icc)
                if not np.isfinite(self.stored.rows([row])).all():
                    raise ValueError("its stored features are not finite")
                rows.append(row)
            except (ValueError, OSError) as error:
                reason = getattr(error, "strerror", None) or first_line(error)
                self.unreadable.append(f"{self._row(row)}: {reason}")
        if not rows:
            why = self.unreadable[0] if self.unreadable else f"{self.stored.name} has no row with features and an image"
            raise InputError(f"no row can be compared: {why}", hint="name the place of the images: --paths LIST")
        return np.array(rows)

    @functools.lru_cache(maxsize=4 * _TRIED)  # noqa: B019
    def picture(self, row: int, orientation: str, icc: str) -> Image.Image:
        """Decode the image of a row."""
        data = self.images.source.read(row)[0]
        return self.images.source.decode(data, defaults.MAX_PIXELS, orientation=orientation, icc=icc)

    def _input(self, way: Way, row: int) -> Tensor:
        pre = way.preprocessing
        picture = self.picture(row, pre.orientation, pre.icc)
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if way.mirrored else picture
        if pre.library_transform is not None:
            swapped = Image.fromarray(np.ascontiguousarray(np.asarray(picture)[:, :, ::-1])) if way.bgr else picture
            return pre.cpu_transform(swapped).float()
        if way.antialias:
            pixels = pre.cpu_transform(picture)
        else:  # as torchvision does with tensors, and OpenCV but for rounding
            pixels = pre.transform_pixels(torch.from_numpy(np.array(picture)).permute(2, 0, 1), antialias=False)
        return pre.to_input((pixels.flip(-1) if way.bgr else pixels)[None])[0]

    def computed(self, way: Way, rows: Places, model: nn.Module | None = None, training: bool = False) -> Rows:
        """Compute rows (R, D) in one way."""
        backbone, parts = replace(self.backbone, model=model or self.backbone.model), []
        at_once = len(rows) if training else defaults.BATCH_SIZE
        with open_forward(backbone, self.choice, "float32", way.precision) as forward:
            backbone.model.train(training)
            for start in range(0, len(rows), at_once):
                batch = torch.stack([self._input(way, int(row)) for row in rows[start : start + at_once]])
                (values,) = forward(batch).values()
                parts.append(values.reshape(len(batch), -1).astype(np.float64))
        values = np.concatenate(parts)
        return _unit(values) if way.unit else values

    def _apart(self, computed: Rows, at: Places) -> Rows:
        """Return the deviation of each computed row from the stored row of its place."""
        pairs = zip(computed, self.stored.rows(at), strict=True)
        deviations: Rows = np.nan_to_num(np.array([deviation(now, then) for now, then in pairs]), nan=np.inf)
        return deviations

    def _order(self, reference: Rows, rows: Places, tolerance: float) -> tuple[Places, str]:
        """Return the place of each row among the stored ones, and the order in words; "" if it is the given one."""
        place, likeness = self._places(reference, rows)
        same, n_stored, off = place == rows, len(self.stored.values), len(self.stored.values) - len(self.images)
        usual = Counter((place - rows).tolist()).most_common(1)[0][0]
        named = [(f"the rows are shifted by {usual:+d}", rows + usual)]
        if off:
            scores = [(np.where(rows < first, rows, rows + off) == place).sum() for first in rows]
            first = rows[int(np.argmax(scores))]
            expected = np.where(rows < first, rows, rows + off)
            words = f"the rows are shifted by {off:+d} from {self._row(first)} on: an image there is left out or twice"
            named.append((words, np.where((rows == first) & (expected != place), -1, expected)))
        else:
            named += [(words, places[rows]) for words, places in orders(self.images.paths)]
        for words, expected in named:
            if (expected == place).mean() >= max(_MOST, same.mean() + 1e-9):
                return np.where((expected >= -1) & (expected < n_stored), expected, place), words
        exact = self._apart(reference, place) <= tolerance
        many = len(np.unique(place)) >= 0.9 * len(place) and np.median(likeness) >= 0.7
        if same.mean() < _MOST and (exact.mean() >= _MOST or many) and len(rows) > 1:
            i, words = int(np.argmin(same)), "the rows are in another order, which no sorting of the paths gives"
            return place, f"{words}: the features of {self._row(rows[i])} are in row {place[i]}"
        if (moved := exact & ~same).any():
            i, words = int(np.argmax(moved)), f"{moved.sum()} of the rows are in other places"
            return np.where(moved, place, rows), f"{words}: the features of {self._row(rows[i])} are in row {place[i]}"
        return rows, ""

    def _places(self, reference: Rows, rows: Places) -> tuple[Places, Rows]:
        """Return the stored row most like each computed one, by the cosine from the mean; the row itself if as like."""
        count = len(self.stored.values)
        some = self.stored.rows(np.unique(np.linspace(0, count - 1, min(count, 512)).astype(np.int64)))
        mean = some[np.isfinite(some).all(1)].mean(0)
        queries = _unit(reference - (reference.mean(0) if len(reference) > 4 else mean))
        own = np.einsum("rd,rd->r", queries, _unit(self.stored.rows(rows) - mean))
        best, place = own + 1e-6, rows.copy()
        for start in range(0, count, _BLOCK):
            block = np.nan_to_num(self.stored.rows(np.arange(start, min(start + _BLOCK, count))) - mean)
            cosines = queries @ _unit(block).T
            better = cosines.max(1) > best
            best[better], place[better] = cosines.max(1)[better], start + cosines.argmax(1)[better]
        return place, best

    def _stale(self, rows: Places, wrong: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which of the wrong rows have another image now than when they were stored."""
        if self.stored.reader is not None:
            hashes = self.stored.reader.column("source_hash")[rows]
            now = [xxhash.xxh3_128_digest(self.images.source.read(int(row))[0]) for row in rows]
            changed: NDArray[np.bool_] = np.array([a != b.tobytes() for a, b in zip(now, hashes, strict=True)], bool)
            return changed & wrong
        written = self.stored.written_ns
        newer = np.array([written is not None and self.images.source.read(int(row))[1] > written for row in rows], bool)
        # A copy of all images is newer than the file, too: only wrong rows may be.
        return newer & wrong if not (newer & ~wrong).any() and wrong.mean() <= 0.5 else np.zeros(len(rows), bool)

    def _explained(
        self, rows: Places, at: Places, apart: Rows, way: Way, tolerance: float, other_weights: str | None
    ) -> tuple[list[Cause], Rows, str]:
        """Return the causes with which all rows agree, the deviations with them, and what comes nearest."""
        wrong = np.flatnonzero(apart > tolerance)[:_TRIED]
        causes, model, unconfirmed = list[Cause](), self.backbone.model, list[Cause]()

        def tried(way: Way, model: nn.Module) -> tuple[float, float]:
            """Return the mean error of some rows, and their largest deviation."""
            values, expected = self.computed(way, rows[wrong], model), self.stored.rows(at[wrong])
            lengths = np.maximum(np.linalg.norm(expected, axis=1), 1e-30)
            error = float((np.linalg.norm(values - expected, axis=1) / lengths).mean())
            return error if np.isfinite(error) else np.inf, float(self._apart(values, at[wrong]).max())

        error, off = tried(way, model)
        for words, other in self._other_weights(other_weights):
            outcome = tried(way, other) if other is not None else (np.inf, np.inf)
            if other is None:
                unconfirmed = [Cause("weights", words)]
            elif outcome[1] <= tolerance or outcome[0] < 0.5 * error:
                causes, model, (error, off) = [Cause("weights", words)], other, outcome
        while off > tolerance and len(causes) < _CHANGES:
            done, best = {cause.kind for cause in causes}, (error * 0.9, off)
            chosen: tuple[Cause, Way] | None = None
            for kind, words, changed in changes(way, is_near=off < 0.1):
                try:
                    outcome = tried(changed, model) if kind not in done else (np.inf, np.inf)
                except Exception:  # the model takes no input of this size, or the precision is not supported
                    continue
                if outcome[0] < best[0]:
                    best, chosen = outcome, (Cause(kind, words), changed)
                if outcome[1] <= tolerance:
                    break
            if best[1] > tolerance and not causes and (trained := self._in_training_mode(way, tolerance)):
                return [Cause("training mode", trained)], apart * 0, ""
            if chosen is None:
                break
            (error, off), way = best, chosen[1]
            causes.append(chosen[0])
        now = self._apart(self.computed(way, rows, model), at)
        worst, words = float(now.max()), "; ".join(f"{cause.kind}: {cause.what}" for cause in causes) or "as given"
        if worst <= tolerance:
            return causes, now, ""
        if worst <= TOLERANCE["bfloat16"] and (not causes or worst < 0.5 * float(apart.max())):
            small = f"what remains, {worst:.1e}, is as much as half precision or another decoder changes"
            has_one = any(cause.kind == "precision" for cause in causes)
            return causes if has_one else [*causes, Cause("precision", small)], now, ""
        return unconfirmed, apart, f"{words}, with which they differ by up to {worst:.1e}"

    def _other_weights(self, file: str | None) -> Iterator[tuple[str, nn.Module | None]]:
        """Yield the model with other weights, and their first difference; None if they cannot be loaded."""
        own = _inside(self.backbone.model)
        others: list[tuple[str, nn.Module]] = []
        if file is not None:
            request = LoadRequest(self.backbone.spec, "", file, 0, False, {})
            others.append((f"those of {file}", build_with_weights(request, lambda: copy.deepcopy(own))[0]))
        if self.stored.dataset is not None and self.stored.reader is not None:
            recorded, provenance = self.stored.dataset.depends_on.get("weights_sha256"), self.stored.reader.provenance
            words = f"{self.stored.name} records {provenance.get('weights')}"
            if recorded != (self.backbone.weights.sha256 or weights_sha256(own)):
                try:
                    other, _ = recorded_backbone(self.stored.dataset, provenance, None, None, self.device)
                    others.append((words, _inside(other.model)))
                except LayertapError as error:
                    yield f"{words}, which the model does not have; they cannot be loaded: {first_line(error)}", None
        for words, module in others:
            state, twin = module.state_dict(), copy.deepcopy(self.backbone.model)
            if own.state_dict().keys() != state.keys():
                yield f"{words}: the parameters have other names", None
            elif differs := [name for name, value in own.state_dict().items() if not torch.equal(value, state[name])]:
                _inside(twin).load_state_dict(state)
                yield f"{words}: {len(differs)} of {len(state)} tensors differ, the first is {differs[0]}", twin

    def _in_training_mode(self, way: Way, tolerance: float) -> str:
        """Return in which batches the model ran in training mode, if rows agree with that; else ""."""
        kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
        if self.stored.reader is None and any(isinstance(layer, kinds) for layer in self.backbone.model.modules()):
            count = min(len(self.stored.values), len(self.images))
            for size in dict.fromkeys(min(size, count) for size in _BATCHES):
                with contextlib.suppress(ValueError, OSError):  # an image cannot be read, so batches are unknown
                    rows = np.arange(size)
                    # Batches change the statistics that a model keeps.
                    values = self.computed(way, rows, copy.deepcopy(self.backbone.model), training=True)
                    if (self._apart(values, rows) <= tolerance).all():
                        return f"the model ran in training mode (no model.eval()), in batches of {size}"
        return ""


def _inside(model: nn.Module) -> nn.Module:
    """Return the network without the wrapper that makes its output an embedding."""
    return next(model.children()) if isinstance(model, WithEmbedding) else model
