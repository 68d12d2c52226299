"""Copies of a shard: compressed, or with some rows reset to pending."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from extract.errors import unknown_name
from extract.store.format.layout import COLUMNS, ROW_DATA, RowNames, chunk_rows, new_shard_file, preallocated
from extract.store.format.shard import Shard
from extract.store.format.untrusted import FILTERS, need_libraries

__all__ = ["COMPRESSIONS", "copy_shard"]

COMPRESSIONS = tuple(FILTERS.values())


def copy_shard(
    shard: Shard, path: Path, *, compress: str | None = None, pending: NDArray[np.int64] | None = None
) -> None:
    """Write a copy of a shard, complete or not at all.

    Args:
        shard: the shard to copy.
        path: path of the copy; a file of that name is replaced.
        compress: "gzip", "lzf" or "blosc2"; None writes a plain copy, whose rows can be changed.
        pending: rows, relative to the shard, that are pending in the copy. Rows that cannot be read are pending, too.

    Raises:
        UnknownNameError: no such compression.
        LayertapError: the disk is full or cannot be written to, or a library for the compression is missing.
    """
    n_rows = len(shard)
    layouts = [
        _packed((chunk_rows(feature, n_rows), *feature.kept_shape), compress)
        if compress
        else preallocated((chunk_rows(feature, n_rows), *feature.kept_shape))
        for feature in shard.features
    ]
    keep = np.ones(n_rows, bool)
    keep[[] if pending is None else pending] = False
    with new_shard_file(path, shard.features, layouts, shard.identity, _names_of(shard), shard.provenance) as file:
        for start, stop, block in shard.blocks(np.flatnonzero(keep)):
            if block is None:
                keep[start:stop] = False
                continue
            for name, values in block.items():
                file["features"][name][start:stop] = values
        for name, *_ in ROW_DATA:
            values = shard.column(name)
            values[~keep] = 0  # a status of 0 is pending
            file[name][...] = values


def _names_of(shard: Shard) -> RowNames:
    """Return what is known of all rows before their features are computed."""
    ids = shard.text("id") if shard.has_ids else None
    columns = {
        name.removeprefix(f"/{COLUMNS}/"): shard.text(name) if dtype.kind == "S" else shard.column(name)
        for name, dtype in shard.kept_columns.items()
    }
    return RowNames(shard.text("path"), shard.column("label"), shard.text("split"), shard.text("classes"), ids, columns)


def _packed(chunks: tuple[int, ...], compress: str) -> Any:
    """Return creation properties: shuffle, compression, and a checksum that is verified before decompression."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk(chunks)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    if compress == "blosc2":
        need_libraries(compress)
        import hdf5plugin

        options = hdf5plugin.Blosc2(cname="zstd", clevel=5, filters=hdf5plugin.Blosc2.SHUFFLE)
        properties.set_filter(options.filter_id, h5py.h5z.FLAG_MANDATORY, options.filter_options)
    elif compress in COMPRESSIONS:
        properties.set_shuffle()
        if compress == "gzip":
            properties.set_deflate(4)
        else:
            properties.set_filter(h5py.h5z.FILTER_LZF, h5py.h5z.FLAG_OPTIONAL)
    else:
        raise unknown_name("compression", compress, COMPRESSIONS)
    properties.set_fletcher32()
    return properties
