"""Features as a dataset folder of Hugging Face: Parquet files for each split, and a card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from extract.store.reader import ArrowRows, FeatureReader
from extract.system.optional_libraries import library

__all__ = ["SPLITS", "card_of", "schema_of"]

SPLITS = {"": "other", "train": "train", "val": "validation", "test": "test"}

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


def schema_of(reader: FeatureReader, rows: ArrowRows, has_pictures: bool) -> Any:
    """Return the schema of rows, with the types of Hugging Face in its metadata: labels are those of `classes`.

    With pictures, those are in the column `image`.

    Raises:
        LayertapError: the library is not installed.
    """
    datasets = library("datasets", "datasets", "a dataset folder of Hugging Face")
    features = datasets.Features.from_arrow_schema(rows.schema.remove_metadata())
    if reader.classes:
        features["label"] = datasets.ClassLabel(names=reader.classes)
    if has_pictures:
        features["image"] = datasets.Image()
    depends_on = reader.provenance.get("depends_on")
    if isinstance(depends_on, dict) and isinstance(depends_on.get("architecture"), str):
        depends_on = {**depends_on, "architecture": _name_of(depends_on["architecture"])}
    about = {"backbone": _name_of(reader.provenance.get("backbone", "")), "depends_on": depends_on}
    return rows.schema.with_metadata({**features.arrow_schema.metadata, "layertap": json.dumps(about)})


def card_of(reader: FeatureReader, names: Sequence[str], splits: Sequence[str]) -> str:
    """Return the text of README.md: what the features are, and how to read them; `splits` are those of the files."""
    provenance, arrays = reader.provenance, {name: reader[name] for name in names}
    depends_on, first = provenance.get("depends_on") or {}, arrays[names[0]]
    layers = [
        f"| {_code(name)} | {list(array.shape[1:])} | {_code(array.attributes.get('layer', ''))} |"
        for name, array in arrays.items()
    ]
    return _CARD.format(
        files="\n".join(f"  - {{split: {split}, path: 'data/{split}-*.parquet'}}" for split in splits),
        count=len(reader), version=_code((provenance.get("versions") or {}).get("layertap", "")),
        backbone=_code(_name_of(provenance.get("backbone", "unknown"))),
        weights=_code(_name_of(provenance.get("weights", "unknown"))),
        preprocessing=_code(json.dumps(depends_on.get("preprocessing", {}))),
        precision=_code(depends_on.get("precision", "")),
        stored_as=_code(depends_on.get("stored_as", first.dtype)),
        fingerprint=_code(reader.fingerprint),
        layers="\n".join(layers),
        split=splits[0], name=names[0], shape=", ".join(map(str, first.shape[1:])),
    )  # fmt: skip


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
