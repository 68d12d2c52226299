"""Images stored as uint8 arrays: `.npy` files and HDF5 data sets."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from extract.errors import InputError, LayertapError, first_line
from extract.images.decoding import AS_DEFAULT, DecodeOptions, conversion, from_pixels
from extract.images.image_list import Images, labels_from_values
from extract.images.sources import ImageSource
from extract.system.similar_paths import did_you_mean

__all__ = ["SUFFIXES", "arrays_in", "list_array", "open_array", "split_name"]

SUFFIXES = (".h5", ".hdf5")
_PICTURE_BYTES = 1 << 31
_SCANNED = 1 << 26  # bytes at once
_MOST_PACKED = 1100  # largest compression ratio accepted; deflate reaches at most 1,032
_LABELS = ("label", "labels")  # names of an array beside the pictures with their classes, integers or text


class PixelRows(ImageSource):
    """ImageSource whose bytes are pixels, after a line with height, width and channels."""

    @staticmethod
    def encode(pixels: NDArray[np.uint8]) -> bytes:
        """Return the bytes of a picture (H, W) or (H, W, C)."""
        height, width, channels = (*pixels.shape, 1)[:3]
        return f"{height} {width} {channels}\n".encode() + pixels.tobytes()

    def picture(self, row: int, data: bytes, options: DecodeOptions = AS_DEFAULT) -> Image.Image:
        """See `ImageSource`."""
        shape, _, pixels = data.partition(b"\n")
        return from_pixels(np.frombuffer(pixels, np.uint8).reshape(*map(int, shape.split())), options.max_pixels)


class ArrayRows(PixelRows):
    """Rows of an array of pictures, (N, H, W, C), (N, C, H, W) or (N, H, W); each process opens the file itself."""

    def __init__(self, path: str, name: str, axes: str):
        self._path, self._name, self._axes = path, name, axes
        self._opened: tuple[int, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": None}

    def _array(self) -> Any:
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), open_array(self._path, self._name)
        return self._opened[1]

    def read(self, row: int) -> tuple[bytes, int]:
        """See `ImageSource`."""
        mtime_ns = os.stat(self._path).st_mtime_ns  # noqa: PTH116
        pixels: NDArray[np.uint8] = np.asarray(self._array()[row])
        if self._axes == "CHW":
            pixels = pixels.transpose(1, 2, 0)
        return self.encode(pixels), mtime_ns

    def check_there(self) -> None:
        """See `ImageSource`."""
        if not Path(self._path).is_file():
            raise LayertapError(f"{self._path} is missing. Stored rows are safe", hint="run again when it is available")


def split_name(where: str, suffixes: Sequence[str] = SUFFIXES) -> tuple[str, str]:
    """Split `FILE.h5:NAME` into file and data set; the name is "" if not given."""
    for suffix in suffixes:
        head, separator, name = where.rpartition(f"{suffix}:")
        if separator and not Path(where).exists():
            return head + suffix, name
    return where, ""


def list_array(where: str) -> Images:
    """List the rows of an array; paths are zero-padded row numbers.

    An HDF5 file without a data set name must have exactly one data set of pictures.
    """
    path, name = split_name(where)
    if not Path(path).is_file():
        raise InputError(f"{path}: {'not a file' if Path(path).exists() else 'no such file'}", hint=did_you_mean(path))
    labels: Any = None
    if path.lower().endswith(SUFFIXES):
        name = name or _only_pictures(path)
        labels = _labels_beside(path, name)
    pictures = open_array(path, name)
    shape = tuple(pictures.shape or ())  # the shape of an empty data set is None
    axes = _axes(shape)
    if len(shape) == 3 and (shape[0] in (1, 3, 4) or shape[2] in (1, 3, 4)):
        raise InputError(
            f"{where} has shape {shape}: one colour picture or several grey pictures? Reshape to (1, H, W, 3) or "
            "(N, H, W, 1)"
        )
    if pictures.dtype != np.uint8 or not axes or 0 in shape[1:]:
        raise InputError(
            f"{where} is {pictures.dtype} {shape}; expected uint8 pictures, (N, H, W, 3), (N, 3, H, W) or (N, H, W)",
            hint=_conversion(path, name, pictures) if axes and pictures.dtype.kind in "fiu" else "",
        )
    if math.prod(shape[1:]) > _PICTURE_BYTES or _stored(pictures) * _MOST_PACKED + (1 << 20) < math.prod(shape):
        raise InputError(f"{where} declares shape {shape}, but has only {_stored(pictures):,} bytes of data")
    count = len(pictures)
    digits = len(str(max(0, count - 1)))
    numbers = labels_from_values(labels.tolist()) if labels is not None else (np.full(count, -1, np.int64), [])
    root = str(Path(path).resolve())
    return Images(
        root + (f":{name}" if name else ""), [f"{row:0{digits}d}" for row in range(count)], *numbers, [""] * count,
        ArrayRows(root, name, axes),
    )  # fmt: skip


def _conversion(path: str, name: str, pictures: Any) -> str:
    """Return the line of Python that writes pictures of another type as uint8, or what else to do."""
    if not math.prod(pictures.shape):
        return ""
    low, high = np.inf, -np.inf
    rows = max(1, _SCANNED // (math.prod(pictures.shape[1:]) * pictures.dtype.itemsize))
    for start in range(0, len(pictures), rows):
        block = np.asarray(pictures[start : start + rows])
        low, high = np.minimum(low, block.min()), np.maximum(high, block.max())  # keeps NaN
    array, save = f"np.load({path!r})", f"np.save({path.removesuffix('.npy') + '_uint8.npy'!r}, {{}})"
    if path.lower().endswith(SUFFIXES):
        array, save = f"file[{name!r}][:]", f"file = h5py.File({path!r}, 'a'); file[{name + '_uint8'!r}] = {{}}"
    return conversion(array, save, float(low), float(high))


def _stored(array: Any) -> int:
    return int(array.nbytes if isinstance(array, np.ndarray) else array.id.get_storage_size())


def open_array(path: str, name: str) -> Any:
    """Open an array without reading it.

    Args:
        path: an `.npy` file, or HDF5.
        name: name of the data set; of `.npy`, it is not used.

    Raises:
        InputError: the file cannot be read, has no data set of this name, or stores it in other files.
    """
    try:
        if path.lower().endswith(".npy"):
            # Not `np.load`, which advises to unpickle files of other kinds.
            return np.lib.format.open_memmap(path, mode="r")
        import h5py

        file = h5py.File(path, "r", locking=False)
        data = file.get(name)
    except (OSError, ValueError, RuntimeError, KeyError, EOFError) as error:
        is_npy = isinstance(error, ValueError) and path.lower().endswith(".npy")
        hint = "an .npy file has one array, as np.save writes it" if is_npy else ""
        raise InputError(f"{path} cannot be read as an array: {first_line(error)}", hint=hint) from error
    if not isinstance(data, h5py.Dataset):
        known = [f"{path}:{known_name}" for known_name in arrays_in(path)]
        raise InputError(f"{path} has no data set {name!r}; it has {', '.join(known) or 'none'}")
    if data.external or data.is_virtual or data.file.filename != file.filename:
        raise InputError(f"{path}: data set {name!r} stores its data in other files")
    return data


def arrays_in(path: str) -> list[str]:
    """Return the names of the arrays of an HDF5 file, without those behind links.

    Raises:
        InputError: it cannot be read.
    """
    import h5py

    names: list[str] = []

    def note(name: str, member: object) -> None:
        if isinstance(member, h5py.Dataset):
            names.append(name)

    try:
        with h5py.File(path, "r", locking=False) as file:
            file.visititems(note)  # does not follow soft or external links
    except (OSError, RuntimeError) as error:
        raise InputError(f"{path} cannot be opened as HDF5: {first_line(error)}") from error
    return names


def _only_pictures(path: str) -> str:
    arrays = {name: open_array(path, name) for name in arrays_in(path)}
    pictures = [name for name, data in arrays.items() if data.ndim == 4 and _axes(tuple(data.shape))]
    # Pictures of other types are refused, with the line that converts them.
    fitting = [name for name in pictures if arrays[name].dtype == np.uint8] or pictures
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        choices = ", ".join(f"{path}:{name}" for name in fitting[:8])
        raise InputError(f"{path} has several data sets of pictures", hint=f"give one by name: {choices}")
    seen = ", ".join(f"{name} {data.dtype} {data.shape}" for name, data in list(arrays.items())[:8])
    raise InputError(
        f"{path} has no data set of pictures, uint8 (N, H, W, 3) or (N, 3, H, W); it has {seen or 'no data sets'}"
    )


def _labels_beside(path: str, name: str) -> NDArray[Any] | None:
    import h5py

    group = name.rpartition("/")[0]
    count = (open_array(path, name).shape or (0,))[0]
    for label in _LABELS:
        beside = f"{group}/{label}".lstrip("/")
        if beside in arrays_in(path):
            values = open_array(path, beside)
            names = h5py.check_string_dtype(values.dtype) is not None
            if not (names or values.dtype.kind in "iu") or values.shape not in ((count,), (count, 1)):
                raise InputError(
                    f"{path}:{beside} is {values.dtype} {values.shape}; expected an integer or a name for each of the "
                    f"{count:,} pictures"
                )
            return np.asarray(values.asstr()[()] if names else values).reshape(-1)
    return None


def _axes(shape: tuple[int, ...]) -> str:
    """Return the axes of one picture, "HWC", "CHW" or "HW"; "" if the shape does not fit."""
    if len(shape) == 3:
        return "HW"
    if len(shape) == 4 and shape[3] in (1, 3, 4):
        return "HWC"
    return "CHW" if len(shape) == 4 and shape[1] in (1, 3) else ""
