"""Features as a PyTorch `Dataset`, for `torch.utils.data.DataLoader`; on disk, or read once into memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from extract.errors import InputError, LayertapError, first_line, unknown_name
from extract.store.batches import Epoch, batches
from extract.store.feature_array import FeatureArray, numbers_of
from extract.system.free_memory import free_bytes
from extract.system.torch_state import device_named

__all__ = ["FeatureDataset", "Residency"]

Residency = Literal["auto", "gpu", "memory", "disk"]
_SHARE_OF_AUTO = 0.5  # of the free memory; a program that trains needs memory, too
_SHARE = 0.9  # free memory is an estimate, and Linux ends a process that takes too much
_READ_BYTES, _BUFFER_BYTES = 4 << 20, 1 << 30  # at once, and at most, while a layer is read into memory
_CHOOSING = ("sampler", "batch_sampler", "drop_last")  # options of `DataLoader`
_CPU = torch.device("cpu")


class FeatureDataset(Dataset[tuple[Any, Any]]):
    """Pairs of features and label, or other target, as returned by `reader.dataset(...)`.

        dataset = reader.dataset(["layer2", "layer4"], split="train", residency="auto")
        for x, y in dataset.batches(256, shuffle=True, seed=epoch): ...     # x["layer4"]: (256, ...)

        loader = DataLoader(dataset, 256, shuffle=True, num_workers=2)      # the same sample by sample

    Rows without a class are left out with a warning if others have one: a loss does not accept their label, -1, and
    fails in the middle of an epoch. If no row has a class, all are there, with the label -1: nobody trains on labels
    then. With `targets`, classes do not matter: all rows are there.

    Positions are not rows of the reader, since failed rows are left out, too. Choose and weigh samples by `labels`:

        dogs = Subset(dataset, np.flatnonzero(dataset.labels == reader.classes.index("dog")))
        dataset.rows[5]                  # row of the reader of sample 5, for reader.paths and other columns

    `dataset[5]` is a sample, `dataset[[5, 3]]` a batch of tensors, read in one pass, as are the samples that a
    `DataLoader` joins (`__getitems__`). Any sampler gives whole batches:

        DataLoader(dataset, None, sampler=BatchSampler(DistributedSampler(dataset), 256, False), num_workers=2)

    Workers may be forked or spawned; rows that lie in memory are shared with forked ones.

    Args:
        arrays: a feature, for samples with a tensor (*shape); or layer -> feature, for samples with a dict of tensors.
        labels: (N,) int64, label of each row of the reader.
        rows: rows of the reader to take, int64.
        transform: applied to the features of each sample.
        unlabelled: whether also to take rows without a class beside rows with one.
        targets: (N, ...) a target for each row of the reader, in place of its label; or row -> target, called whenever
            the row is read. None: labels.
        residency: "disk" reads each batch from the files. "memory" and "gpu" read the rows once, verified as other
            reads are; batches are then copies of rows that lie there, and the reader may be closed. "auto" takes the
            device, if one is given, or memory, if the rows take at most half of what is free there, else "disk".
        device: device of "gpu", such as "cuda:1" (default: "cuda"), and of "auto".

    Attributes:
        rows: (R,) int64, row of the reader for each sample.
        labels: (R,) int64, label of each sample.
        residency: "gpu", "memory" or "disk": where the rows lie.
        device: device of the tensors of a batch: the CPU, except for "gpu".

    Raises:
        UnknownNameError: there is no such residency.
        InputError: `targets` does not have N items, or no numbers; `device` does not fit `residency`.
        LayertapError: the device cannot be used, or the rows do not fit in its memory.
    """

    def __init__(
        self,
        arrays: FeatureArray | Mapping[str, FeatureArray],
        labels: NDArray[np.int64],
        rows: NDArray[np.int64],
        transform: Callable[[Any], Any] | None = None,
        unlabelled: bool = False,
        targets: Any = None,
        residency: Residency = "disk",
        device: str | torch.device | None = None,
    ):
        self._is_single = isinstance(arrays, FeatureArray)
        self._arrays = {arrays.name: arrays} if isinstance(arrays, FeatureArray) else dict(arrays)
        self._transform, self._gives_labels = transform, targets is None
        has_class = labels[rows] >= 0
        if targets is None and not unlabelled and has_class.any() and not has_class.all():
            message = (
                f"{np.count_nonzero(~has_class):,} of {len(rows):,} rows have no class and are left out; "
                "unlabelled=True takes them with the label -1"
            )
            warnings.warn(message, stacklevel=3)  # at the call of `reader.dataset`
            rows = rows[has_class]
        self.rows = rows
        self.labels: NDArray[np.int64] = labels[rows]
        targets = labels if targets is None else targets
        self._targets = targets if callable(targets) else _one_per_row(targets, len(labels))
        what = ", ".join(self._arrays) + (" and targets" if not self._gives_labels else "")
        self.residency, self.device = _place(residency, device, self._nbytes(), f"{len(rows):,} rows of {what}")
        self._held: dict[str, Tensor] = {}
        if self.residency != "disk":
            self._held = {layer: _read_once(array, rows, self.device) for layer, array in self._arrays.items()}
            self._arrays = {}
            if not callable(self._targets):
                self._targets = self._targets[torch.from_numpy(rows)].to(self.device)

    def _nbytes(self) -> int:
        """Bytes of the samples in memory; targets that a function returns do not count."""
        row_bytes = sum(array.row_bytes for array in self._arrays.values())
        if not callable(self._targets):
            row_bytes += self._targets.nbytes // max(1, len(self._targets))
        return row_bytes * len(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> tuple[Any, Any]:
        """Return a sample; or, for a list or array of positions, a batch: tensors (B, ...), read in one pass."""
        if np.ndim(index) == 0:
            return self.__getitems__([index])[0]
        if self._transform is not None:  # it takes one sample
            batch: tuple[Any, Any] = tuple(default_collate(self.__getitems__(index)))
            return batch
        features, targets = self._read(index)
        if callable(self._targets):
            targets = self._stacked(targets, index)
        return (next(iter(features.values())) if self._is_single else features), targets

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        """Return the samples at these positions, read in one batch."""
        features, targets = self._read(indices)
        values: Any = zip(*features.values(), strict=True)
        samples: Any = (each[0] if self._is_single else dict(zip(features, each, strict=True)) for each in values)
        if self._transform is not None:
            samples = map(self._transform, samples)
        return list(zip(samples, targets.tolist() if self._gives_labels else targets, strict=True))

    def _read(self, indices: Any) -> tuple[dict[str, Tensor], Any]:
        """Return layer -> (B, *shape), and the targets (B, ...), or a list of those that a function returned."""
        positions = self._positions(indices)
        rows = self.rows[positions]
        if self._held:
            index = torch.from_numpy(positions).to(self.device)
            features = {layer: held.index_select(0, index) for layer, held in self._held.items()}
        else:
            index = torch.from_numpy(rows)
            features = {layer: torch.from_numpy(array[rows]) for layer, array in self._arrays.items()}
        if callable(self._targets):
            return features, [_target_of(row, self._targets(row)).to(self.device) for row in rows.tolist()]
        return features, self._targets[index]

    def _positions(self, indices: Any) -> NDArray[np.int64]:
        positions = np.asarray(indices)  # of a tuple, too: batch samplers may give them
        if positions.dtype == bool:
            raise IndexError("samples are chosen by positions, got a mask; np.flatnonzero gives its positions")
        try:
            return numbers_of(positions, len(self), "samples")
        except IndexError as error:
            raise IndexError(
                f"{error}; rows of the reader are no positions: choose by dataset.rows and .labels"
            ) from None

    def _stacked(self, targets: list[Tensor], indices: Any) -> Tensor:
        for row, target in zip(self.rows[np.asarray(indices)], targets, strict=True):
            if target.shape != targets[0].shape:
                expected, found = tuple(targets[0].shape), tuple(target.shape)
                raise InputError(f"the target of row {row} has the shape {found}; expected {expected}, as in its batch")
        return torch.stack(targets)

    def batches(
        self,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        start: int = 0,
        rank: int = 0,
        world_size: int = 1,
        **options: Any,
    ) -> DataLoader[tuple[Any, Any]]:
        """Return a `DataLoader` of one epoch, whose batches are read whole.

            for step, (x, y) in enumerate(dataset.batches(256, shuffle=True, seed=epoch, start=done), done): ...

        The same arguments give the same batches on any machine, whatever the residency and the number of workers. The
        number of the epoch as `seed` and of used batches as `start` are the whole state to resume with. Without a
        transform and a function of targets, no Python runs for each sample.

        With a slow disk, `FeatureReader.batches` with `shuffle="chunks"` reads one layer in blocks.

        Args:
            batch_size: samples in each batch; the last may have fewer.
            shuffle: whether every order of the samples is equally likely; otherwise they come in the stored order.
            seed: seed of the order.
            start: batches to leave out, without reading them: resumes after this number of batches.
            rank: number of this process, of `world_size` that share the samples evenly. Up to `world_size - 1` samples
                come twice, so that all have the same number of batches.
            world_size: number of processes.
            options: further options of `DataLoader`, such as `num_workers` and `pin_memory`.

        Raises:
            TypeError: an argument is not an int.
            ValueError: an argument is out of range.
            InputError: `num_workers` is given, and the rows lie on a GPU; or an option that chooses samples is given.
        """
        if choosing := [name for name in _CHOOSING if options.get(name, False) is not False]:
            hint = "DataLoader(dataset, 256, sampler=...) takes them, and joins single samples"
            raise InputError(f"batches() chooses the samples itself, and takes no {' or '.join(choosing)}", hint=hint)
        if self.residency == "gpu" and options.get("num_workers"):
            raise InputError(f"num_workers is {options['num_workers']}; rows on {self.device} are read without workers")
        epoch = Epoch(batch_size, shuffle, seed, start, rank, world_size)
        chosen = _positions_of(epoch, len(self))
        # A list of positions is a sampler: workers, pinning and the order of batches are PyTorch's. Its generator is
        # its own: otherwise each epoch, and each that is resumed, would draw from that of dropout.
        options = {"generator": torch.Generator().manual_seed(epoch.seed % 2**63), **options}
        return DataLoader(self, batch_size=None, sampler=chosen, **options)


def _positions_of(epoch: Epoch, samples: int) -> list[NDArray[np.int64]]:
    """Return the positions of each batch of a process that remains."""
    order = np.random.default_rng(epoch.seed).permutation(samples) if epoch.shuffle else np.arange(samples)
    each = -(-samples // epoch.world_size)
    # As PyTorch's DistributedSampler: repeated from the beginning, and every `world_size`-th.
    own = np.resize(order, each * epoch.world_size)[epoch.rank :: epoch.world_size]
    starts = range(0, each, epoch.batch_size)
    if epoch.start > len(starts):
        raise ValueError(f"start is {epoch.start}; it must be at most {len(starts)}, the number of batches")
    return [own[first : first + epoch.batch_size] for first in starts[epoch.start :]]


def _target_of(row: int, target: Any) -> Tensor:
    try:  # `torch.as_tensor` warns of an array that cannot be written, such as that of a picture
        return target if isinstance(target, Tensor) else torch.tensor(target)
    except (TypeError, ValueError, RuntimeError) as error:
        message = f"the target of row {row} cannot be converted to a tensor: {first_line(error)}"
        raise InputError(message, hint="return a number, a tensor, or a contiguous array of numbers") from error


def _one_per_row(targets: Any, count: int) -> Tensor:
    """Return targets as a tensor, of which nothing is copied if they are an array or a tensor in memory."""
    if isinstance(targets, np.ma.MaskedArray) and np.ma.is_masked(targets):
        raise InputError("targets have masked values, of which a tensor has none", hint="fill them: targets.filled(-1)")
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # of arrays that cannot be written
            values = torch.as_tensor(targets if isinstance(targets, Tensor) else np.asarray(targets)).detach().cpu()
    except (TypeError, ValueError) as error:
        raise InputError(
            f"targets cannot be converted to a tensor: {first_line(error)}",
            hint="give an array of numbers (N, ...), or a function that returns the target of a row",
        ) from error
    if values.ndim == 0 or len(values) != count:
        raise InputError(
            f"targets have the shape {tuple(values.shape)}; expected ({count}, ...), one for each row of the reader",
            hint="rows that failed need one too; it is not read",
        )
    return values


def _place(
    residency: Residency, device: str | torch.device | None, needed: int, what: str
) -> tuple[Residency, torch.device]:
    """Return where to keep so many bytes, and the device of tensors."""
    if residency not in get_args(Residency):
        raise unknown_name("residency", residency, get_args(Residency))
    if residency in ("memory", "disk") and device is not None:
        raise InputError(f"residency={residency!r} takes no device, got {str(device)!r}", hint='"gpu" and "auto" do')
    places = [_CPU] if residency in ("memory", "auto") else []
    if residency == "gpu" or device is not None:
        places.insert(0, _gpu("cuda" if device is None else str(device), residency))
    share = _SHARE_OF_AUTO if residency == "auto" else _SHARE
    for place in places:
        free = _free_bytes(place)
        if needed <= share * free:
            return "memory" if place.type == "cpu" else "gpu", place
    if residency in ("auto", "disk"):
        return "disk", _CPU
    raise LayertapError(
        f"{what} take {needed / 1e6:,.1f} MB, more than {share:.0%} of the {free / 1e6:,.1f} MB free on {place}",
        hint='residency="auto" reads them from the disk then; or take fewer layers or rows',
    )


def _gpu(name: str, residency: Residency) -> torch.device:
    try:
        device = device_named(name)
    except LayertapError as error:
        raise LayertapError(f"residency={residency!r}: {error.message}", hint='use residency="memory"') from error
    if residency == "gpu" and device.type == "cpu":
        raise InputError("residency='gpu' got the device 'cpu'", hint='use residency="memory"')
    return device


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_bytes()


def _read_once(array: FeatureArray, rows: NDArray[np.int64], device: torch.device) -> Tensor:
    """Return (len(rows), *shape), rows of a feature on a device, read in the order of the files."""
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    held = torch.empty((len(rows), *array.shape[1:]), dtype=dtype, device=device)
    at_once, start = max(1, _READ_BYTES // max(1, array.row_bytes)), 0
    for values, _ in batches(array, rows, at_once, shuffle=None, seed=0, memory_bytes=_BUFFER_BYTES):
        held[start : start + len(values)] = torch.from_numpy(values)
        start += len(values)
    return held
