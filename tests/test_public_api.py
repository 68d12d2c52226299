"""The public names and their signatures: a change of the API is a change of the table below (see CONTRIBUTING.md)."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import extract

MODULES = (
    "extract", "extract.ablation", "extract.attribution", "extract.edits", "extract.probe", "extract.search",
    "extract.sklearn", "layertap",
)  # fmt: skip

# `python -m tests.test_public_api` prints it. `...` stands for defaults that are functions or depend on the machine.
API = """\
class extract.ActivationMonitor(model: nn.Module, layers: str | Sequence[str] | None = None, **how: Any)
class extract.Backbone(spec: str, architecture: str, model: nn.Module, weights: Weights, preprocessing: Preprocessing,
        classifier: str | None = None, no_embedding: str = '', prefix_tokens: int = 0, patches: int | None =
        None, class_token: bool = False, reads_class_token: bool = False, notes: tuple[str, ...] = (), device:
        torch.device = ..., asked: dict[str, Any] = ...)
extract.Backbone.features(self, pictures: Picture | Iterable[Picture], layers: str | Sequence[str] =
        ('embedding',), *, batch_size: int = 64, axes: str | os.PathLike[str] | None = None) -> dict[str,
        NDArray[np.float32]]
class extract.DisagreementError(LayertapError)
class extract.FeatureReader(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, partial: bool = False,
        cache_bytes: int = 10000000000, check: bool = False)
extract.FeatureReader.batches(self, layer: str, batch_size: int, *, shuffle: Shuffle = None, seed: int = 0,
        split: str | None = None, memory_bytes: int = 268435456) -> Iterator[tuple[NDArray[Any],
        NDArray[np.int64]]]
extract.FeatureReader.checked(self, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]
extract.FeatureReader.close(self) -> None
extract.FeatureReader.column(self, name: str, rows: slice | None = None) -> NDArray[Any]
extract.FeatureReader.compression: dict[str, tuple[str, float]]
extract.FeatureReader.dataset(self, layers: str | Sequence[str], *, split: str | None = None, transform: Any =
        None, unlabelled: bool = False) -> FeatureDataset
extract.FeatureReader.failures: list[tuple[int, str, str, str]]
extract.FeatureReader.fingerprint: str
extract.FeatureReader.ids: Sequence[str] | None
extract.FeatureReader.layers: list[str]
extract.FeatureReader.layers_with_tokens(self) -> list[str]
extract.FeatureReader.paths: Sequence[str]
extract.FeatureReader.place_of(self, row: int) -> tuple[Path, int, int]
extract.FeatureReader.provenance: dict[str, Any]
extract.FeatureReader.rdm(self, layer: str, metric: str = 'correlation') -> NDArray[np.float64]
extract.FeatureReader.splits: Sequence[str]
extract.FeatureReader.status: NDArray[np.uint8]
extract.FeatureReader.to_arrow(self, layers: str | Sequence[str] | None = None) -> Any
extract.FeatureReader.to_pandas(self, layers: str | Sequence[str] | None = None) -> Any
extract.FeatureReader.to_polars(self, layers: str | Sequence[str] | None = None) -> Any
extract.FeatureReader.tokens(self, layer: str, *, split: str | None = None) -> TokenArray
extract.FeatureReader.without(self, table: Any, on_note: Callable[[str], None] = ...) -> FeatureReader
class extract.Finding(kind: str, row: int, path: str, other_path: str = '', score: float | None = None, meaning: str =
        '', group: int | None = None, keep: bool | None = None, label: str = '', suggested: str = '')
class extract.GradientMonitor(model: nn.Module, layers: str | Sequence[str] | None = None, *, every: int = 100, to:
        Target = None, on_alarm: Callable[[Alarm], None] | None = None)
class extract.InputError(LayertapError, ValueError)
class extract.LayertapError(Exception)
class extract.LockedError(LayertapError)
class extract.Record(why_absent: Callable[[str], str | None], requested: Sequence[Requested] = ())
extract.Record.find(self, text: str) -> list[Site]
extract.Record.get(self, key: str | Site, default: Any = None) -> Any
extract.Record.missing: dict[str, str]
extract.Record.select(self, pattern: str) -> dict[str, Any]
extract.Record.sites: dict[str, Site]
class extract.Site(layer: str, call: int = 0, path: Path = (), what: What = 'output')
extract.Site.is_meant_by(self, text: str) -> bool
extract.Site.text(self, with_call: bool = False) -> str
class extract.Status: PENDING OK DECODE_ERROR NOT_FINITE MISSING IO_ERROR
class extract.Taps(model: nn.Module, layers: Layers = (), *, reduce: Reduce | None = None, stop: bool = False,
        on_record: Callable[[Record], None] | None = None)
extract.Taps.edit(self, layers: Layers, fn: Edit, what: Literal['output', 'input', 'grad', 'grad_input'] =
        'output', *, call: int | None = None) -> Self
extract.Taps.keep(self, layers: Layers, what: What = 'output', *, reduce: Reduce | None = None, call: int | None
        = None, live: bool = False) -> Self
extract.Taps.record: Record
class extract.UnknownNameError(LayertapError, KeyError)
extract.extract_features(images: str | os.PathLike[str] | extract.images.datasets.MapDataset, *, out: str |
        os.PathLike[str], backbone: str | extract.compute.backbone.Backbone = 'bundled/efficientnet_lite0',
        preprocessing: collections.abc.Mapping[str, typing.Any] | None = None, retry_failed: bool = False,
        add_layers: bool = False, progress: bool = True, layers: str | collections.abc.Sequence[str] =
        ('embedding',), batch_size: int | None = None, decode: Literal['exact', 'fast', 'gpu'] = 'exact', dtype:
        Literal['float32', 'float16', 'bfloat16', 'int8'] = 'float32', precision: Literal['float32', 'tf32',
        'bfloat16', 'float16', 'bfloat16-weights'] = 'float32', compile: Literal['auto', 'on', 'off',
        'inductor', 'openvino'] = 'auto', workers: int = ..., max_pixels: int = 178956970, orientation:
        Literal['exif', 'ignore'] = 'exif', icc: Literal['ignore', 'srgb'] = 'ignore', min_cosine: float =
        0.999, axes: str | os.PathLike[str] | None = None, without: str | os.PathLike[str] |
        collections.abc.Iterable[typing.Any] | None = None, shard_rows: int | None = None, compress:
        Optional[Literal['gzip', 'lzf', 'blosc2']] = None, sync_s: float = 30.0, limit: int | None = None, keep:
        str | collections.abc.Sequence[str] = (), distortion: float | None = 0.1, fit_on: int | None = 2000,
        weights: str | None = None, allow_missing_head: bool = False, device: str = 'auto', seed: int = 0) ->
        FeatureReader
extract.findings(reader: FeatureReader, layer: str | None = None, *, kinds: Collection[str] = ('failed', 'copy
        across splits', 'copy', 'near-duplicate', 'suspect label', 'outlier'), seed: int = 0, picture_size:
        Callable[[int], tuple[int, int] | None] | None = None, neighbours: SimilarImages | None = None) ->
        list[Finding]
extract.inspect_model(model: Backbone | nn.Module, batches: Iterable[Any], layers: str | Sequence[str] | None =
        None, *, loss: Loss | None = None, on_batch: Callable[[int], None] = ..., name_of: Callable[[int], str]
        = ...) -> Inspection
extract.load_backbone(spec: str, *, weights: str | None = None, device: str = 'auto', seed: int = 0,
        allow_missing_head: bool = False, preprocessing: Mapping[str, Any] | None = None) -> Backbone
extract.load_text_tower(spec: str, *, weights: str | None = None, device: str = 'auto', seed: int = 0) ->
        TextTower
class extract.ablation.Ablation(effects: list[Effect], accuracy: float, images: int, targets: int)
class extract.ablation.Effect(layer: str, channel: int | None = None, cosine: float = nan, same_class: float = nan,
        accuracy: float = nan, later: dict[str, float] = ...)
extract.ablation.Effect.target: str
extract.ablation.ablation(backbone: Backbone | nn.Module, batches: Iterable[Any], layers: str | Sequence[str],
        edit: Edit | Mapping[str, Edit], *, channels: Sequence[int] | None = None, on_forward: Callable[[int],
        None] = ...) -> Ablation
extract.ablation.mean_activations(backbone: Backbone | nn.Module, batches: Iterable[Any], layers: str |
        Sequence[str]) -> dict[str, Tensor]
extract.attribution.activations_of(backbone: Backbone | nn.Module, inputs: Tensor, choice: Choice | str |
        Sequence[str]) -> dict[str, Tensor]
extract.attribution.attentions(backbone: Backbone | nn.Module, inputs: Tensor, layers: str | Sequence[str] |
        None = None) -> list[Tensor]
extract.attribution.grad_cam(backbone: Backbone | nn.Module, inputs: Tensor, layer: str | Sequence[str],
        targets: Sequence[int] | Tensor | None = None) -> tuple[Any, NDArray[np.int64]]
extract.attribution.map_of(activation: Tensor, axes: str, prefix_tokens: int, input_px: Sequence[int]) -> Tensor
extract.attribution.principal_colours(maps: Tensor) -> NDArray[np.float32]
extract.attribution.rollout(weights: Sequence[Tensor]) -> NDArray[np.float32]
extract.edits.Edit = collections.abc.Callable[[torch.Tensor], torch.Tensor]
extract.edits.ablate(by: Literal['zero', 'mean'] = 'zero', channels: Sequence[int] | None = None, axis: int = 1)
        -> Edit
extract.edits.apply_edit(tensor: Tensor, edit: Edit, site: Site) -> Tensor
extract.edits.clamp(low: float | None = None, high: float | None = None) -> Edit
extract.edits.clip(limit: float, by: Literal['value', 'norm'] = 'value') -> Edit
extract.edits.freeze(model: nn.Module, layers: str | Sequence[str]) -> Iterator[None]
extract.edits.mix(permutation: Tensor, lam: float) -> Edit
extract.edits.noise(std: float) -> Edit
extract.edits.prune(fraction: float) -> Edit
extract.edits.replace(value: Tensor | float) -> Edit
extract.edits.scale(factor: float) -> Edit
class extract.edits.smooth(beta: float)
extract.edits.smooth.at(self, site: Any) -> Edit
class extract.probe.Alikeness(cka: Matrix, procrustes: Matrix, mutual_knn: Matrix, rsa: Matrix, effective_rank:
        NDArray[np.float64], k: int, knn_rows: int, rsa_rows: int)
extract.probe.DEPTH = depth
class extract.probe.FeatureSimilarity(cka: Matrix, procrustes: Matrix, mutual_knn: Matrix, rsa: Matrix,
        effective_rank: NDArray[np.float64], k: int, knn_rows: int, rsa_rows: int)
class extract.probe.LinearProbe(coef_: NDArray[Any], intercept_: NDArray[Any], classes_: NDArray[Any], task: str =
        'classification', scaling: Scaling = ..., has_probabilities: bool = True, about: Mapping[str, Any] =
        ...)
extract.probe.LinearProbe.decision_function(self, x: Source | FeatureRows) -> NDArray[Any]
extract.probe.LinearProbe.load(path: str | os.PathLike[str]) -> LinearProbe
extract.probe.LinearProbe.n_features_in_: int
extract.probe.LinearProbe.predict(self, x: Source | FeatureRows) -> NDArray[Any]
extract.probe.LinearProbe.predict_proba(self, x: Source | FeatureRows) -> NDArray[np.float32]
extract.probe.LinearProbe.probabilities(self, scores: NDArray[np.float32]) -> NDArray[np.float32] | None
extract.probe.LinearProbe.save(self, path: str | os.PathLike[str]) -> None
extract.probe.LinearProbe.scores(self, x: Source | FeatureRows) -> NDArray[Any]
extract.probe.MOST_COLUMNS = 16384
extract.probe.PROTOCOLS = clip simclr dinov2-logreg knn centroid fewshot ridge
class extract.probe.ProbeResult(protocol: str, task: str, scaling: str, metrics: dict[str, Estimate], classes:
        NDArray[Any], n_train: int, n_val: int, n_test: int, truth: NDArray[Any], swept: str = '', chosen: float
        = nan, curve: Sequence[tuple[float, float]] = (), per_class: Mapping[str, NDArray[Any]] = ...,
        per_image: Mapping[str, NDArray[Any]] = ..., confusion: NDArray[np.int64] | None = None, shots:
        Mapping[int, list[float]] = ..., predictions: NDArray[Any] | None = None, probabilities:
        NDArray[np.float32] | None = None, objective: float | None = None, model: LinearProbe | None = None,
        notes: Sequence[str] = (), seconds: float = 0.0, chosen_on: str = '', validation: float = nan)
extract.probe.ProbeResult.primary: str
extract.probe.ProbeResult.right: NDArray[np.bool_] | None
extract.probe.ProbeResult.value: float
extract.probe.SEGMENTATION = segmentation segmentation-knn
extract.probe.alikeness(features: Sequence[Source | FeatureRows], *, k: int = 10, seed: int = 0, memory_bytes:
        int = 536870912) -> FeatureSimilarity
extract.probe.depth_probe(tokens: TokenArray | Sequence[TokenArray], depths: DepthMaps, train: ArrayLike, test:
        ArrayLike, *, val: ArrayLike | None = None, max_depth: float | None = None, protocol: str = 'depth',
        iterations: int | None = None, seed: int = 0, device: str = 'auto', memory_bytes: int | None = None,
        on_prediction: Callable[[int, NDArray[np.float32]], None] | None = None) -> ProbeResult
extract.probe.feature_similarity(features: Sequence[Source | FeatureRows], *, k: int = 10, seed: int = 0,
        memory_bytes: int = 536870912) -> FeatureSimilarity
extract.probe.linear_cka(x: Source | FeatureRows, y: Source | FeatureRows) -> float
extract.probe.linear_probe(x_train: Source, y_train: ArrayLike, x_test: Source, y_test: ArrayLike, *, protocol:
        str = 'clip', x_val: Source | None = None, y_val: ArrayLike | None = None, scaling: str | None = None,
        class_weight: str | None = None, seed: int = 0, device: str = 'auto', memory_bytes: int | None = None)
        -> ProbeResult
extract.probe.rsa(x: Source | FeatureRows, y: Source | FeatureRows) -> float
extract.probe.segmentation_probe(tokens: TokenArray | Sequence[TokenArray], masks: Masks, train: ArrayLike,
        test: ArrayLike, *, val: ArrayLike | None = None, classes: Sequence[str] | None = None, protocol: str =
        'segmentation', iterations: int | None = None, seed: int = 0, device: str = 'auto', memory_bytes: int |
        None = None, on_prediction: Callable[[int, NDArray[np.int64]], None] | None = None) -> ProbeResult
extract.search.MEMORY_BYTES = 268435456
class extract.search.NearestPatches(images: NDArray[np.int64], cosines: NDArray[np.float64], cells: NDArray[np.int64])
class extract.search.Neighbours(rows: NDArray[np.int64], cosines: NDArray[np.float64])
extract.search.layer_to_search(layers: Sequence[str], asked: str | None, where: str) -> str
extract.search.nearest(bank: Source, queries: NDArray[np.floating], k: int, *, among: NDArray[np.int64] | None =
        None, without: NDArray[np.int64] | None = None, device: str | torch.device = 'cpu', memory_bytes: int =
        268435456) -> Neighbours
extract.search.nearest_patches(tokens: TokenArray, query: NDArray[np.floating], k: int, *, without: int | None =
        None) -> NearestPatches
extract.search.overlap(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.float64]
extract.search.patch_similarity(tokens: NDArray[np.floating], query: NDArray[np.floating]) ->
        NDArray[np.float64]
class extract.sklearn.LayerFeatures(backbone: str = 'bundled/efficientnet_lite0', layers: str | Sequence[str] =
        ('embedding',), *, weights: str | None = None, batch_size: int = 64, device: str = 'auto', seed: int =
        0)
extract.sklearn.LayerFeatures.fit(self, X: Any, y: Any = None) -> Self
extract.sklearn.LayerFeatures.get_feature_names_out(self, input_features: Any = None) -> NDArray[Any]
extract.sklearn.LayerFeatures.transform(self, X: Any) -> NDArray[np.float32]
layertap.compare(images: str | os.PathLike[str], backbones: str | collections.abc.Sequence[str] = (), *, table:
        str | os.PathLike[str] | None = None, protocol: str = 'clip', labels: str | os.PathLike[str] | None =
        None, tasks: collections.abc.Mapping[str, str | os.PathLike[str]] | None = None, out: str |
        os.PathLike[str] | None = None, limit: int | None = None, test_fraction: float | None = None, workers:
        int = ..., device: str = 'auto', seed: int = 0, progress: bool = True, layers: str |
        collections.abc.Sequence[str] = ('embedding',), batch_size: int | None = None, decode: Literal['exact',
        'fast', 'gpu'] = 'exact', dtype: Literal['float32', 'float16', 'bfloat16', 'int8'] = 'float32',
        precision: Literal['float32', 'tf32', 'bfloat16', 'float16', 'bfloat16-weights'] = 'float32', compile:
        Literal['auto', 'on', 'off', 'inductor', 'openvino'] = 'auto') -> Comparison
"""


class Plain(str):
    """Text that is its own repr, for annotations without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def signature(name: str, function: Any) -> str:
    """Name and signature; continued lines are indented."""
    found = inspect.signature(function)
    parameters = [parameter.replace(**plain(parameter)) for parameter in found.parameters.values()]
    returned = found.return_annotation
    if isinstance(returned, str):
        returned = Plain(returned)
    if inspect.isclass(function):
        returned = inspect.Signature.empty
    text = f"{name}{found.replace(parameters=parameters, return_annotation=returned)}"
    return textwrap.fill(text, 112, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False)


def plain(parameter: inspect.Parameter) -> dict[str, Any]:
    """What of a parameter is written in another way."""
    changes: dict[str, Any] = {}
    if isinstance(parameter.annotation, str):
        changes["annotation"] = Plain(parameter.annotation)
    default = parameter.default
    depends = parameter.name == "workers" or repr(default).startswith("<")
    if default is not inspect.Parameter.empty and depends:
        changes["default"] = Plain("...")
    return changes


def class_entries(name: str, cls: type) -> Iterator[str]:
    """Constructor, methods and properties; inherited ones too, but those of other libraries."""
    yield f"class {signature(name, cls)}"
    ours = [base for base in reversed(cls.__mro__) if base.__module__.startswith("extract.")]
    for key, value in sorted({key: value for base in ours for key, value in vars(base).items()}.items()):
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if not key.startswith("_") and inspect.isfunction(function):
            yield signature(f"{name}.{key}", function)
        elif not key.startswith("_") and isinstance(value, property):
            assert value.fget is not None
            yield f"{name}.{key}: {inspect.signature(value.fget).return_annotation}"


def entries(module: str) -> Iterator[str]:
    """The entries of the table for a module."""
    names = importlib.import_module(module).__all__
    for key in sorted(set(names) - set(extract.__all__) if module == "layertap" else names):
        name, value = f"{module}.{key}", getattr(importlib.import_module(module), key)
        if inspect.isclass(value) and issubclass(value, Exception):
            yield f"class {name}({', '.join(base.__name__ for base in value.__bases__)})"
        elif inspect.isclass(value) and issubclass(value, enum.Enum):
            yield f"class {name}: " + " ".join(value.__members__)
        elif inspect.isclass(value):
            yield from class_entries(name, value)
        elif inspect.isfunction(value):
            yield signature(name, value)
        else:
            yield f"{name} = {' '.join(value) if isinstance(value, dict) else value}"


def module_of(entry: str) -> str:
    """The module of an entry of the table."""
    name = entry.removeprefix("class ")
    return max((module for module in MODULES if name.startswith(f"{module}.")), key=len)


@pytest.mark.parametrize("module", MODULES)
def test_public_names_and_signatures_are_those_of_the_table(module: str) -> None:
    table = re.split(r"\n(?! )", API.strip("\n"))
    assert [entry for entry in table if module_of(entry) == module] == list(entries(module))


def test_the_table_covers_the_package_and_all_its_aliases() -> None:
    modules = {path.stem for path in Path(extract.__path__[0]).glob("*.py")}
    aliases = modules - {"__init__", "credentials", "errors", "defaults", "row_status"}
    assert set(MODULES) == {"extract", "layertap", *(f"extract.{alias}" for alias in aliases)}


def test_errors_can_be_imported_from_a_module_of_their_own() -> None:
    errors = importlib.import_module("layertap.errors")
    assert {name: getattr(errors, name) for name in errors.__all__} == {
        name: getattr(extract, name) for name in extract.__all__ if name.endswith("Error")
    }


def test_the_lists_of_names_in_the_package_agree() -> None:
    tree = ast.parse(Path(extract.__path__[0], "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    for_type_checkers = {alias.name: node.module for node in imports for alias in node.names}
    assert for_type_checkers == extract._HOMES
    assert sorted(for_type_checkers) == extract.__all__


@pytest.mark.parametrize("module", MODULES)
def test_public_functions_and_classes_have_docstrings(module: str) -> None:
    values = {name: getattr(importlib.import_module(module), name) for name in importlib.import_module(module).__all__}
    described = {name: value for name, value in values.items() if inspect.isclass(value) or inspect.isfunction(value)}
    assert [name for name, value in described.items() if not value.__doc__] == []


@pytest.mark.slow
def test_type_checkers_know_the_arguments_that_are_made_from_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mypy import api

    monkeypatch.setenv("MYPYPATH", str(Path(__file__).parents[1]))

    lines = {
        'extract_features("photos", out="out", precision="bfloat16", batch_size=8)': "",
        'extract_features(images="photos", out="out", keep="caption")': "",
        'extract_features("photos", out="out", precision="float8")': "[arg-type]",
        'extract_features("photos", out="out", batch_size="8")': "[arg-type]",
        'extract_features("photos", out="out", bath_size=8)': "[call-arg]",
        'extract_features("photos")': "[call-arg]",
        'compare("photos", ["a"], decode="fast")': "",
        'compare("photos", decode="quick")': "[arg-type]",
        'reader: int = extract_features("photos", out="out")': "[assignment]",
    }
    imports = "from extract import extract_features\nfrom layertap import compare\n"
    (tmp_path / "user.py").write_text(imports + "\n".join(lines))
    # Without the settings of this project, and so without the plugin of pydantic, as a user has it.
    how = ["--strict", "--config-file=", f"--cache-dir={tmp_path}", "--follow-imports=silent"]
    stdout, stderr, _ = api.run([*how, "--ignore-missing-imports", str(tmp_path / "user.py")])
    refused = {
        int(number): code for number, code in re.findall(r"user\.py:(\d+): error: .*(\[[\w-]+\])$", stdout, re.M)
    }
    assert refused == {number: code for number, code in enumerate(lines.values(), 3) if code}, stdout + stderr


if __name__ == "__main__":
    print("\n".join(entry for module in MODULES for entry in entries(module)))
