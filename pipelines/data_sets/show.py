"""Describe a data set, or compare it with another: `layertap show OUT [OTHER]`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from extract.credentials import text_without_credentials
from extract.store.format.dataset import DataSet
from extract.store.reader import FeatureReader
from pipelines.terminal.text_output import SHOWN, counted, print_failures, printable

__all__ = ["describe", "print_description", "print_diff"]

_UNKNOWN = "unknown"  # an entry that another writer has left out


def describe(out: Path) -> dict[str, Any]:
    """Return everything that `show` prints, as JSON-compatible data. The data set may be incomplete."""
    dataset = DataSet.open(out)
    parts = dataset.data_sets_with_shards()
    finished = [path for part in parts for path in part.published() if path is not None]
    sizes = []
    for *_, file in (file for part in parts for file in part.files()):
        with contextlib.suppress(FileNotFoundError):  # a run may be publishing it just now
            sizes.append(file.stat().st_size)
    content: dict[str, Any] = {
        "out": str(out),
        "complete": len(finished) == sum(part.n_shards for part in parts),
        "version": dataset.version.number if dataset.version else None,
        "rows": dataset.n_rows,
        "shards": sum(part.n_shards for part in parts),
        "shards_finished": len(finished),
        "bytes": sum(sizes),
        "put_aside": sorted(file.name for part in parts for file in part.out.glob("shards/*.h5*.damaged*")),
        "features": {
            feature.name: {
                "shape": [dataset.n_rows, *feature.shape],
                "dtype": feature.dtype,
                "bytes": feature.row_bytes * dataset.n_rows,
                **{name: text for name, text in feature.attributes.items() if name not in ("shape", "dtype", "bytes")},
            }
            for feature in dataset.features
        },
        "images": dataset.images,
        "fingerprint": dataset.fingerprint,
        "depends_on": dataset.depends_on,
    }
    with FeatureReader(out, partial=not content["complete"]) as reader:
        content["provenance"] = {k: v for k, v in reader.provenance.items() if k != "depends_on"}
        if isinstance(configuration := content["provenance"].get("configuration"), dict) and "images" in configuration:
            images = text_without_credentials(str(configuration["images"]))  # earlier versions stored all of a URL
            content["provenance"]["configuration"] = {**configuration, "images": images}
        content["rows_done"] = len(reader)
        content["columns"] = list(reader.columns)
        content["compression"] = {
            name: {"filter": filter_name, "ratio": round(ratio, 3)}
            for name, (filter_name, ratio) in reader.compression.items()
        }
        if content["complete"]:
            content |= asdict(reader.counts)
            content["failures"] = [
                {"row": row, "path": path, "status": text, "reason": reason}
                for row, path, text, reason in reader.failures
            ]
    return content


def print_description(content: dict[str, Any], echo: Callable[[str], None]) -> None:
    """Print the description, in which nearly every value comes from the data set: a line break in it is escaped too."""
    _print_lines(content, lambda line: echo(printable(line)))


def _print_lines(content: dict[str, Any], echo: Callable[[str], None]) -> None:
    state = "complete" if content["complete"] else f"unfinished: {content['rows_done']:,} rows done"
    shards = counted(content["shards"], "shard")
    if content["version"]:
        shards += f", version {content['version']}"
    echo(f"{content['out']}: {counted(content['rows'], 'row')} in {shards}, {content['bytes'] / 1e6:,.1f} MB, {state}")
    if content["put_aside"]:
        names = ", ".join(content["put_aside"][:SHOWN])
        echo(f"  damaged files that a repair put aside; delete them when they are not needed: {names}")
    echo("features")
    for name, feature in content["features"].items():
        shape = ", ".join(map(str, feature["shape"]))
        source = f"{feature.get('layer', _UNKNOWN)} {feature.get('pooling', '')}".rstrip()
        packed = content["compression"].get(name)
        ratio = f", {packed['filter']} compression ratio {packed['ratio']:.2f}" if packed else ""
        echo(f"  {name}  ({shape}) {feature['dtype']}, {feature['bytes'] / 1e6:,.1f} MB{ratio}, from {source}")
    depends_on, provenance = content["depends_on"], content.get("provenance", {})
    echo("images")
    echo(f"  from {content['images']['root']}")
    if "classes" in content:
        _print_counts("class", content["classes"], echo)
        _print_counts("split", content["splits"], echo)
        if content["unlabelled"]:
            echo(f"  {content['unlabelled']:,} without a class")
        if content["columns"]:
            echo(f"  columns {', '.join(content['columns'])}")
        echo("  " + ", ".join(f"{count:,} {status}" for status, count in content["status"].items()))
        failures = [(f["path"], f["status"], f["reason"]) for f in content["failures"]]
        print_failures(failures, Path(content["out"]), lambda line: echo(f"  {line}"))
    if "identity" in depends_on:
        echo("written by a program as")
        for line in json.dumps(depends_on["identity"], indent=1, ensure_ascii=False).splitlines()[1:-1]:
            echo(printable(f" {line}"))
    else:
        _print_backbone(depends_on, provenance, echo)
    if provenance:
        versions = ", ".join(f"{name} {number}" for name, number in provenance.get("versions", {}).items())
        started, device = provenance.get("started", _UNKNOWN), provenance.get("device")
        echo(f"computed {started}{f' on {device}' if device else ''} with {versions or _UNKNOWN}")
    echo(f"fingerprint {content['fingerprint']}")


def _print_backbone(depends_on: dict[str, Any], provenance: dict[str, Any], echo: Callable[[str], None]) -> None:
    echo("backbone")
    name, sha256, precision, stored_as, decoder = (
        depends_on.get(key, _UNKNOWN) for key in ("architecture", "weights_sha256", "precision", "stored_as", "decoder")
    )
    echo(f"  {provenance.get('backbone', name)}, weights {provenance.get('weights') or ''}")
    echo(f"  weights sha256 {sha256}")
    user_set = " ".join(provenance.get("configuration", {}).get("preprocessing") or {})
    preprocessing = ", ".join(f"{key} {value}" for key, value in depends_on.get("preprocessing", {}).items())
    echo(f"  preprocessing {preprocessing or _UNKNOWN}" + (f" (set by the user: {user_set})" if user_set else ""))
    echo(f"  {precision}, stored as {stored_as}, decoded by {decoder}")


def _print_counts(title: str, counts: dict[str, int], echo: Callable[[str], None]) -> None:
    if counts:
        shown = ", ".join(f"{name} {count:,}" for name, count in list(counts.items())[:SHOWN])
        echo(f"  {counted(len(counts), title)}: {shown}" + (", ..." if len(counts) > SHOWN else ""))


def print_diff(content: dict[str, Any], echo: Callable[[str], None], first: Path, second: Path) -> None:
    """Print the differences of two data sets."""
    if content["changes"]:
        echo(f"settings that the features depend on, in {first} and in {second}:")
        for setting, (before, after) in content["changes"].items():
            echo(printable(f"  {setting}: {before} | {after}"))
    else:
        echo(f"{first} and {second} have the same fingerprint")
    both, only_first, only_second = content["images"].values()
    echo(f"images: {both:,} in both, {only_first:,} only in {first}, {only_second:,} only in {second}")
    for name, found in content["features"].items():
        if "not_compared" in found:
            echo(f"  {name}: {found['not_compared']}")
            continue
        least = f"minimum cosine {found['least']:.6f} ({printable(found['path'])})"
        apart = f"rows differ by at most {found['deviation']:.1e} of their largest value"
        echo(f"  {name}: {least}, median {found['median']:.6f}; {apart}")
