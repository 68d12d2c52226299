"""Classes of new images by a probe that was kept: `layertap predict PROBE IMAGES|OUT -o FILE.csv`."""

from __future__ import annotations

import csv
import io
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from extract.backbones import load_backbone
from extract.errors import InputError
from extract.extraction import extract_features
from extract.planning import asked_of, how_made
from extract.pooling import POOLINGS
from extract.probe.model import LinearProbe
from extract.probe.rows import Rows
from extract.status import Status
from extract.store.dataset import DataSet, differences
from extract.store.files import write_whole
from extract.store.reader import FeatureReader
from pipelines.printing import printable
from pipelines.probe import features_described

__all__ = ["run_predict"]

_ROWS = 4096  # that are predicted at once


def run_predict(
    path: Path, images: str, output: Path, *, backbone: str | None = None, weights: str | None = None,
    device: str = "auto",
) -> str:  # fmt: skip
    """Predict, write the table, and say what was predicted.

    The table has a line for each image: path, status, predicted, and the probability of each class, where the probe has
    any; of several labels, those that are more probable than not, with | between them.

    Args:
        path: file of the probe.
        images: as of `embed`; or the folder of a data set.
        output: CSV file to write.
        backbone: its spec; to be given where it is code, which a stranger's probe could name any of.
        weights: name or file of its weights, if the file was moved.
        device: to compute on.

    Raises:
        InputError: no probe, no images, or features that were made otherwise than those the probe was fitted on.
    """
    probe = LinearProbe.load(path)
    try:
        layers, described = list(probe.about["layers"]), dict(probe.about["depends_on"])
        configuration = dict(probe.about["provenance"]["configuration"])
        named, poolings = str(probe.about["provenance"]["backbone"]), list(probe.about["poolings"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} does not say what features it is for: {error} is missing") from error
    if not output.parent.is_dir():
        raise InputError(f"{output.parent}: no such folder, to write {output.name} to")
    if (Path(images) / "dataset.json").is_file():
        return _predict(probe, path, Path(images), layers, described, output)
    if backbone is None and named.partition("/")[0] in ("python", "hub"):
        raise InputError(
            f"{path} wants to run the code of {named!r}; if you trust it, say so: --backbone {shlex.quote(named)}"
        )
    made: dict[str, Any] = how_made(described)
    loaded = load_backbone(backbone or named, device=device, **asked_of(configuration, weights))
    wanted = [name if name.rpartition(":")[2] in POOLINGS else f"{name}:{pooling}"
              for name, pooling in zip(layers, poolings, strict=True)]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix=".predict-", dir=output.parent) as folder:
        out = Path(folder) / "features"
        reader = extract_features(
            images, out=out, backbone=loaded, layers=wanted, dtype=described["stored_as"],
            max_pixels=configuration["max_pixels"], min_cosine=configuration["min_cosine"], **made,
        )  # fmt: skip
        reader.close()
        return _predict(probe, path, out, layers, described, output)


def _predict(
    probe: LinearProbe, path: Path, out: Path, layers: list[str], described: dict[str, Any], output: Path
) -> str:
    dataset = DataSet.open(out)
    missing = [name for name in layers if name not in dataset.depends_on["features"]]
    if missing:
        raise InputError(f"{path} is for {', '.join(layers)}, and {out} has no {', '.join(missing)}")
    if changed := differences(described, features_described(dataset, layers)):
        raise InputError(
            f"{path} was fitted on features that were made otherwise than those of {out}: " + "; ".join(changed)
        )
    with FeatureReader(out) as reader:
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        shown = probe.has_probabilities and probe.task != "regression"
        classes = [str(name) for name in probe.classes_.tolist()]
        writer.writerow(["path", "status", "predicted", *(f"p({name})" for name in classes if shown)])
        counts: Counter[str] = Counter()
        for line in _lines(probe, reader, layers, classes, shown):
            counts[line[2] if line[1] == Status.OK.text else ""] += 1
            writer.writerow(line)
    write_whole(output, text.getvalue().encode("utf-8", "surrogateescape"))
    failed = counts.pop("", 0)
    most = ", ".join(f"{printable(name)} {count:,}" for name, count in counts.most_common(5))
    summary = f"{sum(counts.values()):,} images predicted" + (f", {failed:,} without features" if failed else "")
    return f"{summary}; written: {output}" + (f"\n{most}" if probe.task == "classification" and most else "")


def _lines(
    probe: LinearProbe, reader: FeatureReader, layers: list[str], classes: list[str], shown: bool
) -> Iterator[list[str]]:
    good = reader.status == Status.OK
    for start in range(0, len(reader), _ROWS):
        rows = np.arange(start, min(start + _ROWS, len(reader)))
        there = rows[good[rows]]
        scores = probe.scores(Rows.of([reader[name] for name in layers], there)) if len(there) else None
        probabilities = probe.probabilities(scores) if shown and scores is not None else None
        place = {row: i for i, row in enumerate(there.tolist())}
        for row in rows.tolist():
            status = Status(reader.status[row]).text
            if row not in place or scores is None:
                yield [reader.paths[row], status, "", *("" for _ in classes if shown)]
                continue
            i = place[row]
            if probe.task == "classification":
                predicted = classes[int(scores[i].argmax())]
            elif probe.task == "multilabel":
                predicted = "|".join(name for name, score in zip(classes, scores[i], strict=True) if score > 0)
            else:
                predicted = repr(float(scores[i][0]))
            each = [] if probabilities is None else [f"{p:.6g}" for p in probabilities[i].tolist()]
            yield [reader.paths[row], status, predicted, *each]
