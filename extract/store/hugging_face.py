"""Features as a dataset folder of Hugging Face: Parquet files for each split, and a card."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from extract.store.reader import ArrowRows, FeatureReader, RowPictures
from extract.system.optional_libraries import library

__all__ = ["HuggingFaceFolder"]

_SPLITS = {"": "other", "train": "train", "val": "validation", "test": "test"}

_CARD = """\
---
tags: [image-features, layertap]
configs:
- config_name: default
  data_files:
{files}
---

# Features of {backbone}

Features of {count:,} images, computed by layertap {version}.

| | |
|---|---|
| backbone | {backbone} |
| weights | {weights} |
| preprocessing | {preprocessing} |
| precision | {precision}, stored as {stored_as} |
| fingerprint | {fingerprint} |

| column | shape | layer |
|---|---|---|
{layers}

```python
import numpy as np
from datasets import load_dataset

rows = load_dataset("path/of/this/folder", split="{split}").filter(lambda row: row["status"] == "ok")
x = np.stack(rows.with_format("numpy")[{name!r}]).reshape(-1, {shape})
y = rows["label"]
```

`path` is the path of the image in its folder, `row` the number of the row in layertap's data set, and `status` says
whether the image could be decoded; otherwise the features are NaN. `label` is -1 without a class.
"""


class HuggingFaceFolder(contextlib.ExitStack):
    """Context manager that writes the folder.

    Args:
        reader: source of the rows.
        names: features.
        fingerprint: fingerprint of the data set.
        folder: new folder.
        pictures: see `ArrowRows`.

    Raises:
        InputError: a feature has the name of another column.
        LayertapError: a library is not installed.
    """

    def __init__(
        self, reader: FeatureReader, names: Sequence[str], fingerprint: str, folder: Path, pictures: RowPictures | None
    ):
        super().__init__()
        self._datasets = library("datasets", "datasets", "a dataset folder of Hugging Face")
        self._parquet = library("pyarrow.parquet", "datasets", "a dataset folder of Hugging Face")
        self._reader, self._names, self._fingerprint, self._folder = reader, names, fingerprint, folder
        self._rows, self._has_pictures = ArrowRows(reader, names, pictures), pictures is not None
        self._has_splits = any(reader.splits)
        self._files: dict[str, Any] = {}  # split -> writer
        self._schema = self._schema_with_types()
        (folder / "data").mkdir(parents=True)

    def _schema_with_types(self) -> Any:
        """Return the schema, with the types of Hugging Face in its metadata: labels are those of `classes`."""
        features = self._datasets.Features.from_arrow_schema(self._rows.schema.remove_metadata())
        if self._reader.classes:
            features["label"] = self._datasets.ClassLabel(names=self._reader.classes)
        if self._has_pictures:
            features["image"] = self._datasets.Image()
        metadata = features.arrow_schema.metadata
        provenance = self._reader.provenance
        depends_on = provenance.get("depends_on")
        if isinstance(depends_on, dict) and isinstance(depends_on.get("architecture"), str):
            depends_on = {**depends_on, "architecture": _name_of(depends_on["architecture"])}
        about = {"backbone": _name_of(provenance.get("backbone", "")), "depends_on": depends_on}
        return self._rows.schema.with_metadata({**metadata, "layertap": json.dumps(about)})

    def write(self, start: int, stop: int, features: Sequence[Any]) -> None:
        """Write the rows of a range; `features`: (stop - start, *shape) of each name."""
        batch = self._rows.batch(start, stop, features)
        given = self._reader.splits[start:stop]
        splits = np.array([_SPLITS[split] if self._has_splits else "train" for split in given])
        for split in np.unique(splits).tolist():
            chosen = batch.take(np.flatnonzero(splits == split))
            if split not in self._files:
                path = self._folder / "data" / f"{split}-00000.parquet"
                self._files[split] = self.enter_context(self._parquet.ParquetWriter(path, self._schema))
            self._files[split].write_batch(chosen)

    def write_card(self) -> None:
        """Write README.md: what the features are, and how to read them."""
        reader, provenance, first = self._reader, self._reader.provenance, self._reader[self._names[0]]
        depends_on = provenance.get("depends_on") or {}
        card = _CARD.format(
            files="\n".join(f"  - {{split: {split}, path: 'data/{split}-*.parquet'}}" for split in sorted(self._files)),
            count=len(reader), version=_code((provenance.get("versions") or {}).get("layertap", "")),
            backbone=_code(_name_of(provenance.get("backbone", "unknown"))),
            weights=_code(_name_of(provenance.get("weights", "unknown"))),
            preprocessing=_code(json.dumps(depends_on.get("preprocessing", {}))),
            precision=_code(depends_on.get("precision", "")),
            stored_as=_code(depends_on.get("stored_as", first.dtype)),
            fingerprint=_code(self._fingerprint),
            layers="\n".join(map(self._line, self._names)),
            split=min(self._files), name=self._names[0], shape=", ".join(map(str, first.shape[1:])),
        )  # fmt: skip
        (self._folder / "README.md").write_text(card, encoding="utf-8")

    def _line(self, name: str) -> str:
        array = self._reader[name]
        return f"| {_code(name)} | {list(array.shape[1:])} | {_code(array.attributes.get('layer', ''))} |"


def _code(text: object) -> str:
    """Return a text as code in Markdown, also in a table: whatever a stranger has put into it, it stays text."""
    escaped = repr(str(text))[1:-1].replace("`", "'").replace("|", "\\|")  # control characters: as in Python
    return escaped and f"`{escaped}`"


def _name_of(source: str) -> str:
    """Return a backbone, or a source of weights, without the folders of a file of this machine."""
    if source.startswith("python/"):
        return f"python/{Path(source.removeprefix('python/')).name}"
    is_file = Path(source).is_absolute() or Path(source).suffix in (".pth", ".pt", ".bin", ".safetensors", ".ckpt")
    return Path(source).name if is_file else source
