"""Choose and open a forward: eager PyTorch, or its graph compiled by inductor or OpenVINO.

Compiled, backbone, taps and poolings become one graph. `torch.export` runs the model once, on tensors without values,
under the same `Taps` as an eager forward, and records the operations. One implementation therefore decides which
tensors are kept. The graph run node by node gives the features of the eager forward to the last bit; compilers change
the order of sums (1e-7 to 5e-6 of the largest value). The graph has no in-place operations. Its outputs are the
features; operations that no output depends on are removed, so later layers cost nothing.

Projections are not compiled (`PoolingChain.split`). PyTorch computes them from what the compiled graph returns, by the
code of an eager forward.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.export import ExportedProgram

from extract import defaults
from extract.backbones import LoadedBackbone
from extract.compute.feature_choice import Choice
from extract.compute.forward import DeviceForward, EagerForward, Forward, Values, joined
from extract.compute.pooling import PoolingChain
from extract.compute.sparse_projection import compute_alone
from extract.compute.transfers import Pinned, transfers_for
from extract.errors import InputError, LayertapError, first_line
from extract.system.foreign_code import exits_refused
from extract.system.optional_libraries import library
from extract.system.torch_state import (
    evaluating,
    full_float32,
    has_tensor_float32,
    keeping_freed_memory,
    lower_precision,
    tensor_float32,
)
from extract.taps.capture import copy_out
from extract.taps.graphs import copy_in_graph, export
from extract.taps.taps import taps_of

__all__ = [
    "WITH_WEIGHTS", "default_engine", "engine_for", "graph_of", "open_forward", "openvino_computes_in",
    "sharing_graphs",
]  # fmt: skip

# Weights and activations are in bfloat16; under autocast, norms and softmax are in float32, and weights are converted
# in each forward. Bare forwards on an H200: resnet50 15,545 against 15,371 images/s, vit_b_16 10,569 against 6,613.
WITH_WEIGHTS = "bfloat16-weights"

# No engine computes in 8-bit integers: by NNCF 3.4, ResNet-50 ran at 97 images/s (bfloat16: 54), but embeddings of
# efficientnet_lite0 had a least cosine of 0.920 to float32, below the limit of 0.999 that keeps features of several
# runs comparable.

# Images per inference request; few, so that activations stay in a core's cache, and no core waits for one that decodes.
# Images/s on two cores, against all threads on a batch of 64: efficientnet_lite0 162 -> 203, ViT-S 18.4 -> 19.9,
# resnet50 24.3 -> 23.8; beside two decoding workers, efficientnet_lite0 108 to 117 -> 141 to 167.
_CHUNK = 2
# The same where PyTorch pools what requests return: fewer would be slower to project, and joining them takes as long.
_CHUNK_TO_POOL = 16


def engine_for(compile: str, device: torch.device, precision: str) -> str:
    """Return the engine that `compile` means: "eager", "inductor" or "openvino".

    Args:
        compile: as of `extract_features`, except "auto".
        device: device of the backbone.
        precision: precision of the computation.

    Raises:
        InputError: OpenVINO does not support the device or the precision, or the device has no TF32.
        LayertapError: OpenVINO is not installed.
    """
    if precision == "tf32" and not has_tensor_float32(device):
        raise InputError(
            f"TF32 needs an NVIDIA GPU of compute capability 8.0 (Ampere) or later; the device is {device}",
            hint="use --precision float32",
        )
    if compile == "off":
        return "eager"
    if compile == "on":
        return default_engine(device, precision)
    if compile == "openvino":
        if device.type != "cpu":
            raise InputError(f"OpenVINO runs on the CPU only; the device is {device}", hint="use --device cpu")
        openvino()
        if not openvino_computes_in(precision):
            raise InputError(f"OpenVINO does not compute in {precision} on this CPU", hint="use --precision float32")
    return compile


def default_engine(device: torch.device, precision: str) -> str:
    """Return the faster compiler: OpenVINO on a CPU if installed and capable of the precision, otherwise inductor."""
    # Images/s on two Zen 4 cores, eager, inductor and OpenVINO: efficientnet_lite0 103, 127, 166; resnet50 22.9, 24.9,
    # 25.8; ViT-S 18.0, 17.5, 19.9. In bfloat16 179, 176, 311; 42.2, 46.5, 50.9; 29.8, 30.8, 37.2.
    there = device.type == "cpu" and importlib.util.find_spec("openvino") is not None
    return "openvino" if there and openvino_computes_in(precision) else "inductor"


@contextlib.contextmanager
def open_forward(
    backbone: LoadedBackbone,
    choice: Choice,
    dtype: str,
    precision: str = defaults.PRECISION,
    engine: str = "eager",
    batch_size: int = defaults.BATCH_SIZE,
) -> Iterator[Forward]:
    """Context manager: prepare the backbone and yield its forward.

    Args:
        backbone: loaded backbone.
        choice: features to compute. Of those over boxes, maps of the whole pictures are returned, in float32.
        dtype: dtype of the returned features.
        precision: "float32"; "tf32", on a GPU that has it; "bfloat16" or "float16", by autocast or OpenVINO; or
            `WITH_WEIGHTS`: a copy of the model has its weights in bfloat16, channels last.
        engine: "eager" (under taps), or compiled by "inductor" or "openvino".
        batch_size: largest batch that a compiled forward is given.

    Raises:
        InputError: inside; the code of the backbone called `sys.exit`.
        LayertapError: the model cannot be copied or converted.
    """
    if choice.is_of_boxes:
        choice, dtype = choice.before_boxes, "float32"  # the host pools, then rounds
    transfers = transfers_for(backbone.device)
    products = tensor_float32() if precision == "tf32" else full_float32()
    with exits_refused(), evaluating(backbone.model), products, keeping_freed_memory():
        if precision == WITH_WEIGHTS:
            backbone, precision = _with_weights_in_bfloat16(backbone), "float32"
        if engine == "openvino":
            with contextlib.closing(ByOpenVino(backbone, choice, dtype, precision, batch_size)) as forward:
                yield forward
        elif engine == "inductor":
            yield ByInductor(backbone, choice, dtype, precision, batch_size, transfers)
        else:
            # It leaves the model unchanged. efficientnet_lite0 in bfloat16: least cosine 0.9982, converted 0.9974.
            lower = lower_precision(precision, backbone.device)
            # With transfers, kept tensors are on their way to the CPU while the forward goes on. Compiled forwards of
            # other backbones, and code of the user, stay compiled: they do not call this model.
            keep = copy_out if transfers is None else functools.partial(copy_out, to_cpu=transfers.to_host)
            taps = taps_of(backbone.model, copy_out=keep, has_other_callers=False, stop=True)
            with torch.inference_mode(), lower, choice.kept_by(taps, getattr(torch, dtype)):
                yield EagerForward(backbone, choice, taps, transfers)


def _with_weights_in_bfloat16(backbone: LoadedBackbone) -> LoadedBackbone:
    try:
        model = copy.deepcopy(backbone.model).to(torch.bfloat16).to(memory_format=torch.channels_last)
    except Exception as error:  # of the model's own code, or insufficient memory
        raise LayertapError(f"the weights of {backbone.spec} cannot be in bfloat16: {first_line(error)}") from error
    preprocessing = replace(backbone.preprocessing, input_dtype=torch.bfloat16)
    return replace(backbone, model=model, preprocessing=preprocessing)


def _cannot(backbone: LoadedBackbone, engine: str, error: Exception) -> LayertapError:
    return LayertapError(f"{backbone.spec} cannot be compiled by {engine}: {first_line(error)}")


class ByInductor(DeviceForward):
    """Forward compiled by inductor for one batch size; shorter batches are padded with zeros, then cut."""

    def __init__(
        self,
        backbone: LoadedBackbone,
        choice: Choice,
        dtype: str,
        precision: str,
        batch_size: int,
        transfers: Pinned | None,
    ):
        super().__init__(backbone.device, transfers)
        self._to_host: Callable[[Tensor], Tensor] = Tensor.cpu if transfers is None else transfers.to_host
        self._backbone, self._precision, self._batch_size = backbone, precision, batch_size
        self._choice, self._following = choice.split()
        self._dtype = getattr(torch, dtype)
        self._function: Callable[[Tensor], tuple[Tensor, ...]] | None = None

    def _parts(self, images: Tensor) -> list[Values]:
        try:
            return [self._part(part) for part in torch.split(images, self._batch_size)]
        except torch.OutOfMemoryError as error:
            raise LayertapError(
                f"insufficient device memory for {self._batch_size} images in compiled code: {error}",
                hint="use a smaller --batch-size",
            ) from error

    def _part(self, images: Tensor) -> Values:
        batch = self._to_device(_filled(images, self._batch_size))
        if self._function is None:
            self._function = self._compile(batch)
        with torch.no_grad():
            outputs = [values[: len(images)] for values in self._function(batch)]
            features = _pooled(outputs, self._following, self._dtype)
        return {name: self._to_host(values).numpy() for name, values in features.items()}

    def _compile(self, batch: Tensor) -> Callable[[Tensor], tuple[Tensor, ...]]:
        before = time.perf_counter()
        # With frozen weights, inductor chooses their layout and folds batch norm into convolutions. CUDA graphs avoid
        # kernel launches.
        on_gpu = self._backbone.device.type == "cuda"
        options: dict[str, Any] = {"triton.cudagraphs": True} if on_gpu else {"freezing": True}
        function: Callable[[Tensor], tuple[Tensor, ...]]
        try:
            graph = graph_of(self._backbone, self._choice, self._precision, batch).module()
            function = torch.compile(graph, fullgraph=True, dynamic=False, options=options)
            with torch.no_grad():
                for _ in range(2):  # inductor compiles in the first call; the second may record a CUDA graph
                    function(batch)
        except Exception as error:  # a compiler may fail in any way
            raise _cannot(self._backbone, "inductor", error) from error
        self.compiling_s += time.perf_counter() - before
        return function


class ByOpenVino(Forward):
    """Forward compiled by OpenVINO; must be closed.

    Cores compute chunks of a few images independently, so none waits for a core that is decoding. Each thread of a pool
    has an infer request, waits for it, and pools what it returns: activations of few chunks are in memory at once.

    Args:
        backbone: backbone in eval mode.
        choice: features to compute.
        dtype: dtype of the returned features.
        precision: precision of the computation.
        batch_size: largest batch.
    """

    ahead = 1

    def __init__(self, backbone: LoadedBackbone, choice: Choice, dtype: str, precision: str, batch_size: int):
        self._backbone, self._precision = backbone, precision
        self._choice, self._following = choice.split()
        self._dtype = getattr(torch, dtype)
        self._threads = torch.get_num_threads()
        in_work = 2 * batch_size  # largest number of images: of a batch and the next one
        chunk = _CHUNK_TO_POOL if any(chain.steps for chain in self._following.values()) else _CHUNK
        self._chunk = max(1, min(chunk, in_work // self._threads))
        self._streams = min(self._threads, -(-in_work // self._chunk))
        self._program: Any = None
        # One more than streams, so that a request is ready when another ends.
        self._pool = ThreadPoolExecutor(self._streams + 1, "openvino", initializer=compute_alone)
        self._of_thread = threading.local()

    def start(self, images: Tensor) -> Callable[[], Values]:
        """See `Forward`."""
        if self._program is None:
            self._program = self._compile(images)
        chunks = [self._pool.submit(self._features, part) for part in torch.split(images, self._chunk)]
        return lambda: joined([chunk.result() for chunk in chunks])

    @torch.no_grad()  # in each thread
    def _features(self, images: Tensor) -> Values:
        """Compute the features of a chunk in a thread of the pool."""
        if not hasattr(self._of_thread, "request"):
            self._of_thread.request = self._program.create_infer_request()
        try:
            results = self._of_thread.request.infer({0: self._as_chunk(images)}, share_inputs=True, share_outputs=True)
        except RuntimeError as error:
            raise LayertapError(f"{self._backbone.spec} by openvino: {first_line(error)}") from error
        outputs = [torch.from_numpy(results[number][: len(images)]) for number in range(len(self._following))]
        features = _pooled(outputs, self._following, self._dtype)
        return {name: values.numpy().copy() for name, values in features.items()}  # the request is used again

    def _as_chunk(self, images: Tensor) -> NDArray[Any]:
        return _filled(images, self._chunk).contiguous().numpy()

    def close(self) -> None:
        """Wait for running requests, which read memory of this process, and end all threads.

        Garbage collection would end the threads later, perhaps in a forked process that does not have them.
        """
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._threads)  # the number that new threads begin with
        self._program = None

    def _compile(self, images: Tensor) -> Any:
        began, core = time.perf_counter(), openvino().Core()
        settings = {
            "INFERENCE_PRECISION_HINT": _PRECISION_HINTS[self._precision],
            "INFERENCE_NUM_THREADS": self._threads,
            "NUM_STREAMS": self._streams,
            # Off if other processes use the remaining cores: each process would pin its threads to the first cores.
            "ENABLE_CPU_PINNING": self._threads >= defaults.CORES,
        }
        chunk = self._as_chunk(images[: self._chunk])
        try:
            program = core.compile_model(self._converted(chunk), "CPU", settings)
            program.create_infer_request().infer({0: chunk})
        except Exception as error:  # a compiler may fail in any way
            raise _cannot(self._backbone, "openvino", error) from error
        self.compiling_s += time.perf_counter() - began
        return program

    def _converted(self, chunk: NDArray[Any]) -> Any:
        """Return the computation as a graph of OpenVINO."""
        features = tuple(f"{feature.site} {feature.pooling}" for feature in self._choice.features)
        key = self._backbone.model, features, chunk.shape
        shared = {} if _CONVERTED is None else _CONVERTED
        if key not in shared:
            graph = graph_of(self._backbone, self._choice, "float32", torch.from_numpy(chunk))
            shared[key] = openvino().convert_model(graph)
        return shared[key]


_PRECISION_HINTS = {"float32": "f32", "bfloat16": "bf16"}
_CONVERTED: dict[Any, Any] | None = None  # computation -> graph, inside `sharing_graphs`


@contextlib.contextmanager
def sharing_graphs() -> Iterator[dict[Any, Any]]:
    """Context manager: OpenVINO compiles a computation several times from one graph, converted once.

    Converting takes most of the time of a start. Each graph holds a copy of the weights; the yielded dict holds the
    graphs, and may be cleared earlier. The model may not change inside.
    """
    global _CONVERTED
    _CONVERTED = {}
    try:
        yield _CONVERTED
    finally:
        _CONVERTED = None


def _pooled(outputs: Sequence[Tensor], following: dict[str, PoolingChain], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the features of a dtype from the outputs of a graph, by the poolings that follow each."""
    return {name: chain(values).to(dtype) for (name, chain), values in zip(following.items(), outputs, strict=True)}


def _filled(images: Tensor, count: int) -> Tensor:
    # With one size, each row is computed by the same code, whatever its batch. Dynamic sizes are slower or recompiled.
    if len(images) == count:
        return images
    return torch.cat([images, images.new_zeros(count - len(images), *images.shape[1:])])


def openvino() -> Any:
    """Import OpenVINO without its telemetry, which would send reports from a process that it forks during the run.

    Raises:
        LayertapError: OpenVINO is not installed.
    """
    telemetry = "openvino_telemetry"
    before = sys.modules.get(telemetry)
    sys.modules[telemetry] = None  # type: ignore[assignment]  # as if it were not installed
    try:
        return library("openvino", "openvino", "compile=openvino")
    finally:
        del sys.modules[telemetry]  # another library may use it
        if before is not None:
            sys.modules[telemetry] = before


@functools.cache
def openvino_computes_in(precision: str) -> bool:
    """Return whether the installed OpenVINO computes in this precision on this CPU."""
    if precision == "float32":
        return True
    return precision == "bfloat16" and "BF16" in openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def graph_of(backbone: LoadedBackbone, choice: Choice, precision: str, images: Tensor) -> ExportedProgram:
    """Export the computation from a batch of `Preprocessing.cpu_transform` to a tuple of float32 features in order.

    Args:
        backbone: backbone in eval mode.
        choice: features to compute.
        precision: "float32", "tf32" (with which the graph is run), or the dtype of PyTorch's autocast.
        images: batch on the backbone's device; the graph accepts only batches of this shape.

    Raises:
        Exception: of any type, if the code of the model cannot be exported.
    """
    backbone.preprocessing.to_input(images[:1])  # creates its cached constants, as tensors with values
    lower = lower_precision(precision, backbone.device)

    def features(images: Tensor) -> tuple[Tensor, ...]:
        # The export itself is the call of the model.
        taps = taps_of(backbone.model, copy_out=copy_in_graph, has_other_callers=False)
        with lower, choice.kept_by(taps, torch.float32) as taps:
            taps(backbone.preprocessing.to_input(images))
            return tuple(taps.record[feature.site][feature.name] for feature in choice.features)

    with torch.no_grad():
        return export(backbone.model, features, (images,))
