"""The forward, compiled by inductor or OpenVINO.

Backbone, taps and poolings become one graph. `torch.export` runs the model once, on tensors without values, under the
same `Taps` as an eager forward, and records the operations. One implementation therefore decides which tensors are
kept. The graph run node by node gives the features of the eager forward to the last bit; compilers change the order of
sums (1e-7 to 5e-6 of the largest value). The graph has no in-place operations. Its outputs are the features; operations
that no output depends on are removed, so later layers cost nothing.

Some poolings are not compiled (`Pooling.compiles`). PyTorch computes them from what the compiled graph returns, by the
code of an eager forward.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.export import ExportedProgram

from extract import defaults
from extract.backbones import LoadedBackbone
from extract.compute.feature_choice import Choice
from extract.compute.forward import DeviceForward, Forward, Values, joined
from extract.compute.sparse_projection import compute_alone
from extract.compute.transfers import Pinned
from extract.errors import LayertapError, first_line
from extract.system.optional_libraries import library
from extract.system.torch_state import lower_precision
from extract.taps.record import Reduce, Site
from extract.taps.taps import taps_of

__all__ = ["ByInductor", "ByOpenVino", "graph_of", "openvino", "openvino_computes_in", "sharing_graphs"]

_FIRST_CALLS = {"cpu": 1, "cuda": 2}  # inductor compiles in the first call; the second may record a CUDA graph
# Images per inference request; few, so that activations stay in a core's cache, and no core waits for one that decodes.
# Images/s on two cores, against all threads on a batch of 64: efficientnet_lite0 162 -> 203, ViT-S 18.4 -> 19.9,
# resnet50 24.3 -> 23.8; beside two decoding workers, efficientnet_lite0 108 to 117 -> 141 to 167.
_CHUNK = 2
# The same where PyTorch pools what requests return: fewer would be slower to project, and joining them takes as long.
_CHUNK_TO_POOL = 16


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
        self._dtype, self._graph_dtype = getattr(torch, dtype), "float32" if self._following.is_needed else dtype
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
            names = [feature.name for feature in self._choice.features]
            features = self._following(dict(zip(names, outputs, strict=True)), self._dtype)
        return {name: self._to_host(values).numpy() for name, values in features.items()}

    def _compile(self, batch: Tensor) -> Callable[[Tensor], tuple[Tensor, ...]]:
        before, device = time.perf_counter(), self._backbone.device.type
        # With frozen weights, inductor chooses their layout and folds batch norm into convolutions. CUDA graphs avoid
        # kernel launches.
        options: dict[str, Any] = {"triton.cudagraphs": True} if device == "cuda" else {"freezing": True}
        function: Callable[[Tensor], tuple[Tensor, ...]]
        try:
            graph = graph_of(self._backbone, self._choice, self._graph_dtype, self._precision, batch).module()
            function = torch.compile(graph, fullgraph=True, dynamic=False, options=options)
            with torch.no_grad():
                for _ in range(_FIRST_CALLS.get(device, 1)):
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
        self._dtype, self._graph_dtype = getattr(torch, dtype), "float32" if self._following.is_needed else dtype
        self._threads = torch.get_num_threads()
        in_work = 2 * batch_size  # largest number of images: of a batch and the next one
        chunk = _CHUNK_TO_POOL if self._following.is_needed else _CHUNK
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
        outputs = {
            feature.name: torch.from_numpy(results[output][: len(images)])
            for output, feature in enumerate(self._choice.features)
        }
        features = self._following(outputs, self._dtype)
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
        if program.get_property("INFERENCE_PRECISION_HINT").get_type_name() != _PRECISION_HINTS[self._precision]:
            raise LayertapError(
                f"OpenVINO cannot compute in {self._precision} on this CPU", hint="use --precision float32"
            )
        self.compiling_s += time.perf_counter() - began
        return program

    def _converted(self, chunk: NDArray[Any]) -> Any:
        """Return the computation as a graph of OpenVINO."""
        features = tuple(f"{feature.site} {feature.pooling}" for feature in self._choice.features)
        key = self._backbone.model, features, self._graph_dtype, chunk.shape
        shared = {} if _CONVERTED is None else _CONVERTED
        if key not in shared:
            graph = graph_of(self._backbone, self._choice, self._graph_dtype, "float32", torch.from_numpy(chunk))
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
    before = _CONVERTED
    _CONVERTED = {} if before is None else before
    try:
        yield _CONVERTED
    finally:
        _CONVERTED = before


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
        del sys.modules[telemetry]
        if before is not None:
            sys.modules[telemetry] = before


@functools.cache
def openvino_computes_in(precision: str) -> bool:
    """Return whether the installed OpenVINO computes in this precision on this CPU."""
    if precision == "float32":
        return True
    return precision == "bfloat16" and "BF16" in openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def graph_of(backbone: LoadedBackbone, choice: Choice, dtype: str, precision: str, images: Tensor) -> ExportedProgram:
    """Export the computation from a batch of `Preprocessing.cpu_transform` to a tuple of features in order.

    Args:
        backbone: backbone in eval mode.
        choice: features to compute.
        dtype: dtype of the features.
        precision: "float32", "tf32" (with which the graph is run), or the dtype of PyTorch's autocast.
        images: batch on the backbone's device; the graph accepts only batches of this shape.

    Raises:
        Exception: of any type, if the code of the model cannot be exported.
    """
    backbone.preprocessing.to_input(images[:1])  # creates its cached constants, as tensors with values
    with torch.no_grad():
        return torch.export.export(_Features(backbone, choice, dtype, precision), (images,), strict=False)


class _Features(nn.Module):
    """Module that returns the features."""

    def __init__(self, backbone: LoadedBackbone, choice: Choice, dtype: str, precision: str):
        super().__init__()
        self.model = backbone.model
        self._to_input: Callable[[Tensor], Tensor] = backbone.preprocessing.to_input
        self._choice, self._dtype = choice, getattr(torch, dtype)
        self._lower = lower_precision(precision, backbone.device)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return the features of a batch."""
        # The export itself is the call of the model.
        traced = taps_of(self.model, copy_out=_traced_copy, has_other_callers=False)
        with self._lower, self._choice.kept_by(traced, self._dtype) as taps:
            taps(self._to_input(images))
            return tuple(taps.record[feature.site][feature.name] for feature in self._choice.features)


def _traced_copy(tensor: Tensor, reduce: Reduce | None, site: Site) -> dict[str, Tensor]:
    """Reduce a tensor, and copy the results on their device."""
    assert reduce is not None
    # Two layers may return one tensor, and OpenVINO refuses a graph with one tensor as two outputs: `movedim` makes
    # another of the same values. Copies, because the model may write into the tensor later.
    return {name: part.clone() for name, part in reduce(tensor.detach().movedim(0, 0)).items()}
