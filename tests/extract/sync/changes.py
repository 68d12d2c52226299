"""A version with a table of changes, as earlier versions of layertap have written it; see `docs/file-format.md`."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import xxhash

__all__ = ["write_as_changes"]

ORDER = ("pass", "row", "path")


def write_as_changes(out: Path, seed: int = 0) -> None:
    """Replace the table of the published version, from number 2 on, by one of changes to a base of an earlier number.

    A third of the rows are in the changes only, and the base has five rows that the version does not have.
    """
    random, description = np.random.default_rng(seed), json.loads((out / "dataset.json").read_text())
    version = description["version"]
    path = out / "versions" / f"{version['number']:06d}.h5"
    with h5py.File(path) as file:
        # Those versions had a manifest in place of the other columns.
        table = {name: file[name][:] for name in file if not name.startswith(("file_", "unused_", "settings"))}
    classes = table.pop("classes")
    added = random.permutation(len(table["path"])) < max(2, len(table["path"]) // 3)
    gone = {name: np.sort(values[:5]) if name == "row" else values[[0] * 5] for name, values in table.items()}
    gone["path"] = np.array([b"other/%d.png" % i for i in range(5)])
    gone["label"] = np.array([len(classes)] * 5)
    base = {name: np.concatenate([values[~added], gone[name]]) for name, values in table.items()}
    order = np.lexsort([base[name] for name in reversed(ORDER)])
    base = {name: values[order] for name, values in base.items()}
    base["classes"] = np.array([*classes, b"other"])
    used = np.unique(table["label"][added])
    used = used[used >= 0]
    labels = np.searchsorted(used, table["label"][added])
    changes = {name: values[added] for name, values in table.items()}
    changes["label"] = np.where(changes["label"] < 0, -1, labels)
    changes["classes"] = classes[used] if len(used) else np.array([b""])
    order = np.lexsort([gone[name] for name in reversed(ORDER)])
    changes |= {f"removed_{name}": gone[name][order] for name in ORDER}
    version["base"] = {"number": version["number"] - 1, "rows_xxh3": ""}
    for entry, columns in ((version["base"], base), (version, changes)):
        path = out / "versions" / f"{entry['number']:06d}.h5"
        with h5py.File(path, "w") as file:
            file.attrs.update(format="layertap version", version=entry["number"])
            for name, values in columns.items():
                dtype = h5py.string_dtype("utf-8", values.dtype.itemsize) if values.dtype.kind == "S" else values.dtype
                file.create_dataset(name, data=values.astype(dtype))
        entry["rows_xxh3"] = xxhash.xxh3_128_hexdigest(path.read_bytes())
    description["format_version"] = 2
    (out / "dataset.json").write_text(json.dumps(description))
