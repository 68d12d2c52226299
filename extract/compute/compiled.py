"""The forward, compiled by inductor or OpenVINO."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from extract import defaults
from extract.backbones import LoadedBackbone
from extract.compute.exported_graph import graph_of
from extract.compute.feature_choice import Choice
from extract.compute.forward import Forward, Values, joined
from extract.compute.transfers import Transfers
from extract.errors import LayertapError, first_line
from extract.system.optional_libraries import library

__all__ = ["compiled", "openvino", "openvino_computes_in"]

_FIRST_CALLS = {"cpu": 1, "cuda": 2}  # inductor compiles in the first; the second may record a CUDA graph
_CHUNK = 2  # images that a core computes at once: so that much of what is between two layers stays in its cache


@contextlib.contextmanager
def compiled(
    engine: str,
    backbone: LoadedBackbone,
    choice: Choice,
    dtype: str,
    precision: str,
    batch_size: int,
    transfers: Transfers,
) -> Iterator[Forward]:
    """A forward, compiled when it is called first.

    Args:
        engine: "inductor" or "openvino".
        backbone: in eval mode.
        choice: of features.
        dtype: of what is returned.
        precision: of the computation.
        batch_size: images of a batch.
        transfers: by which images come to the device, and features from it.

    Raises:
        LayertapError: from the calls: the backbone cannot be compiled, or the memory does not suffice.
    """
    if engine == "inductor":
        yield _ByInductor(backbone, choice, dtype, precision, batch_size, transfers)
        return
    forward = _ByOpenVino(backbone, choice, dtype, precision, batch_size)
    try:
        yield forward
    finally:
        forward.close()


def _cannot(backbone: LoadedBackbone, engine: str, error: Exception) -> LayertapError:
    return LayertapError(f"{backbone.spec} cannot be compiled by {engine}: {first_line(error)}")


class _ByInductor(Forward):
    """Computes batches of one size; a shorter one is filled up with zeros, whose rows are dropped."""

    def __init__(
        self,
        backbone: LoadedBackbone,
        choice: Choice,
        dtype: str,
        precision: str,
        batch_size: int,
        transfers: Transfers,
    ):
        self._backbone, self._choice, self._dtype, self._precision = backbone, choice, dtype, precision
        self._batch_size, self._transfers = batch_size, transfers
        self._function: Callable[[Tensor], tuple[Tensor, ...]] | None = None
        self.ahead = int(transfers.ahead)

    @property
    def copying_s(self) -> float:
        return self._transfers.seconds

    def start(self, images: Tensor) -> Callable[[], Values]:
        try:
            parts = [self._part(part) for part in torch.split(images, self._batch_size)]
        except torch.OutOfMemoryError as error:
            text = f"the memory of the device does not suffice for {self._batch_size} images in compiled code: {error}"
            raise LayertapError(f"{text}. Take a smaller --batch-size") from error
        last = self._transfers.begun()

        def values() -> Values:
            self._transfers.wait(last)
            return joined(parts)

        return values

    def _part(self, images: Tensor) -> Values:
        batch = self._transfers.up(_filled(images, self._batch_size))
        if self._function is None:
            self._function = self._compile(batch)
        with torch.no_grad():
            found = self._function(batch)
        kept = (self._transfers.down(values[: len(images)]).numpy() for values in found)
        return {feature.name: values for feature, values in zip(self._choice.features, kept, strict=True)}

    def _compile(self, batch: Tensor) -> Callable[[Tensor], tuple[Tensor, ...]]:
        before, device = time.perf_counter(), self._backbone.device.type
        # Frozen weights let inductor lay them out, and fold batch norm into convolutions; CUDA graphs spare launches.
        options: dict[str, Any] = {"triton.cudagraphs": True} if device == "cuda" else {"freezing": True}
        function: Callable[[Tensor], tuple[Tensor, ...]]
        try:
            graph = graph_of(self._backbone, self._choice, self._dtype, self._precision, batch).module()
            function = torch.compile(graph, fullgraph=True, dynamic=False, options=options)
            with torch.no_grad():
                for _ in range(_FIRST_CALLS.get(device, 1)):
                    function(batch)
        except Exception as error:  # a compiler may fail in any way
            raise _cannot(self._backbone, "inductor", error) from error
        self.compiling_s += time.perf_counter() - before
        return function


_Begun = list[tuple[Any, NDArray[Any]]]  # requests of a batch, and the images that they read


class _ByOpenVino(Forward):
    """Computes a few images on each core by itself, so that none waits for one that has to decode meanwhile."""

    ahead = 1

    def __init__(self, backbone: LoadedBackbone, choice: Choice, dtype: str, precision: str, batch_size: int):
        self._backbone, self._choice, self._dtype, self._precision = backbone, choice, dtype, precision
        in_work = 2 * batch_size  # images at most: of a batch, and of the next one
        self._chunk = max(1, min(_CHUNK, in_work // torch.get_num_threads()))
        self._streams = min(torch.get_num_threads(), -(-in_work // self._chunk))
        self._program: Any = None
        self._free: list[Any] = []  # requests
        self._running: list[_Begun] = []  # batches

    def start(self, images: Tensor) -> Callable[[], Values]:
        if self._program is None:
            self._program = self._compile(images)
        begun: _Begun = []
        self._running.append(begun)
        for part in torch.split(images, self._chunk):
            request = self._free.pop() if self._free else self._program.create_infer_request()
            chunk = self._as_chunk(part)
            request.start_async({0: chunk}, share_inputs=True)
            begun.append((request, chunk))
        return partial(self._values, begun, len(images))

    def _values(self, begun: _Begun, count: int) -> Values:
        """Features of a batch of so many images."""
        if not begun:
            raise AssertionError("features are given once")
        found: Values = {}
        for number, (request, _) in enumerate(begun):
            try:
                request.wait()
            except RuntimeError as error:
                raise LayertapError(f"{self._backbone.spec} by openvino: {first_line(error)}") from error
            start = number * self._chunk
            for output, feature in enumerate(self._choice.features):
                some = request.get_output_tensor(output).data[: count - start]
                if feature.name not in found:
                    found[feature.name] = np.empty((count, *some.shape[1:]), some.dtype)
                found[feature.name][start : start + len(some)] = some
        self._running = [one for one in self._running if one is not begun]
        self._free += [request for request, _ in begun]
        begun.clear()  # who keeps this function, in the frames of an exception perhaps, does not keep the requests
        return found

    def _as_chunk(self, images: Tensor) -> NDArray[Any]:
        return _filled(images, self._chunk).contiguous().numpy()

    def close(self) -> None:
        """Wait for what is running, which reads memory of this process, and end all threads.

        They would otherwise be ended when the garbage is collected, perhaps in a process that was forked and has none.
        """
        for begun in self._running:
            for request, _ in begun:
                with contextlib.suppress(RuntimeError):  # who waited for its features was told
                    request.wait()
            begun.clear()
        self._running.clear()
        self._free.clear()
        self._program = None

    def _compile(self, images: Tensor) -> Any:
        before, ov = time.perf_counter(), openvino()
        wanted = {"float32": "f32", "bfloat16": "bf16"}[self._precision]
        settings = {
            "INFERENCE_PRECISION_HINT": wanted,
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "NUM_STREAMS": self._streams,
            # Not where others are to have the rest of the cores: each process would bind its threads to the first ones.
            "ENABLE_CPU_PINNING": torch.get_num_threads() >= defaults.CORES,
        }
        chunk = self._as_chunk(images[: self._chunk])
        try:
            graph = graph_of(self._backbone, self._choice, self._dtype, "float32", torch.from_numpy(chunk))
            program = ov.Core().compile_model(ov.convert_model(graph), "CPU", settings)
            program.create_infer_request().infer({0: chunk})
        except Exception as error:  # a compiler may fail in any way
            raise _cannot(self._backbone, "openvino", error) from error
        given = program.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        if given != wanted:
            raise LayertapError(f"OpenVINO cannot compute in {self._precision} on this CPU; take --precision float32")
        self.compiling_s += time.perf_counter() - before
        return program


def _filled(images: Tensor, count: int) -> Tensor:
    if len(images) == count:
        return images
    return torch.cat([images, images.new_zeros(count - len(images), *images.shape[1:])])


def openvino() -> Any:
    """OpenVINO without its telemetry, which would report to its makers, from a process that it forks in mid-run.

    Raises:
        InputError: it is not installed.
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
    """Whether OpenVINO, which is installed, computes in this precision on this CPU."""
    if precision == "float32":
        return True
    return precision == "bfloat16" and "BF16" in openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
