"""Shapes of the JSON in a data set; see `extract.system.json_files` for how a shape is written.

    FORMAT_NAMES   dataset.json: which format it has; checked first, because a later format may have another shape
    DESCRIPTION    dataset.json of this format
    RECEIPT        shards/000000.json
    PROVENANCE     /provenance of a shard
    RUN            a line of runs.jsonl of `layertap embed`

Readers ignore names that a shape does not list.
"""

from __future__ import annotations

from extract.system.json_files import TIME, Text

__all__ = ["DESCRIPTION", "FORMAT_NAMES", "PROVENANCE", "RECEIPT", "RUN"]

FORMAT_NAMES = {"format": str, "format_version": int}

DESCRIPTION = {
    "fingerprint": str,
    "depends_on": {
        "architecture?": str,
        "weights_sha256?": str,
        "features?": {str: str},
        "preprocessing?": dict,
        "decoder?": str,
        "precision?": str,
        "stored_as?": str,
    },
    "features": [{"name": str, "shape": [int], "dtype": str, "attributes": {str: str}}],
    "images": {"root": str, "count": int, "paths_xxh3": str, "labels_xxh3?": str, "parts?": dict},
    "shard_rows": int,
    "version?": {"number": int, "rows_xxh3": str, "passes": [int]},
}

RECEIPT = {
    "shard": int,
    "first_row": int,
    "n_rows": int,
    "fingerprint": str,
    "images": str,
    "status": {str: int},
    "labels?": {Text(r"-1|\d{1,18}", "the number of a class, or -1"): int},
    "splits?": {str: int},
    "reasons": {Text(r"\d{1,18}", "a row number"): str},
    "size": int,
    "sha256": Text("[0-9a-f]{64}", "64 hexadecimal digits"),
    "made?": {
        "host": str,
        "device": str,
        "ended": TIME,
        "computed": int,
        "seconds": float,
        "stages": {str: float},
    },
    "compression?": {"filter": str, "ratio": float, "bytes?": {str: int}},
}

PROVENANCE = {
    "backbone?": str,
    "weights?": (str, None),
    "configuration?": {"preprocessing?": (dict, None), "layers?": [str]},
    "versions?": {str: str},
    "started?": str,
    "device?": str,
    "machine?": dict,
}

RUN = {"event": str, "started": str, "machine?": (dict, None), "computation?": (dict, None)}
