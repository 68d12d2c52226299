"""Output of `layertap probe`: a table on the terminal, results.json, results.csv, predictions.csv or images.csv."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from extract.analysis.dense import DEPTH, SEGMENTATION
from extract.analysis.probe.metrics import format_metric, metric_name
from extract.analysis.probe.model import LinearProbe
from extract.analysis.probe.protocols import PROTOCOLS
from extract.credentials import text_without_credentials
from extract.errors import InputError
from extract.system.atomic_files import write_json
from extract.system.json_files import read_json, without_nan
from extract.system.optional_libraries import own_version
from pipelines.probe.config import OF_TASKS, ProbeConfig
from pipelines.probe.job import ProbedFeature, ProbeRun, data_sets, folder_of_results, run_probe
from pipelines.probe.labelling import SEPARATOR
from pipelines.probe.probe_figures import PICTURES, draw
from pipelines.terminal.output_paths import check_folder
from pipelines.terminal.tables import print_aligned, table_file
from pipelines.terminal.text_output import SHOWN, counted, printable

__all__ = [
    "ARRAYS", "answer", "as_json", "clear", "print_outcome", "probe_and_write", "result_settings", "results_folder",
]  # fmt: skip

_CALIBRATED = "calibration_error_if_calibrated"  # stands beside the calibration error
_NEAREST = 3  # comparisons printed, those with the largest p; results.json has all
_MOST_IN_JSON = 200  # most classes of a confusion matrix in results.json
ARRAYS = ("r", "r2", "low", "high", "p", "q", "strengths", "ceiling", "best_layer")  # of encoding models
_TABLES = ("results.csv", "predictions.csv", "images.csv", "scores.csv", *(f"{name}.npy" for name in ARRAYS))
_SCALED = {"none": "features unscaled", "l2": "features scaled to length 1", "standardise": "features standardised"}


def probe_and_write(config: ProbeConfig, say: Callable[[str], None]) -> tuple[ProbeRun, list[Path]]:
    """Probe, write the results after each layer, so that an interruption loses one layer, and draw figures at the end.

    Returns:
        the results, and the written files.

    Raises:
        InputError: see `run_probe`; or a file cannot be written.
    """
    data_sets(config.out)
    if config.save is not None:
        _check_file(config.save)
    with results_folder(config) as folder:
        outcome = run_probe(config, say, lambda outcome: _write_results(outcome, folder))
    files = [folder / name for name in ("results.json", "results.csv")]
    if outcome.config.is_dense:
        _write_images(outcome, folder / "images.csv")
        files.append(folder / "images.csv")
    elif _write_predictions(outcome, folder / "predictions.csv"):
        files.append(folder / "predictions.csv")
    files += draw(outcome, folder)
    return outcome, files + ([config.save] if config.save else [])


@contextlib.contextmanager
def results_folder(config: ProbeConfig) -> Iterator[Path]:
    """Context manager: create the folder of the results; an error before there are results removes it again."""
    is_of_user = config.results is not None and config.results.exists()
    folder = _folder_for(config)
    check_folder(folder)
    try:
        yield folder
    except BaseException:
        if not is_of_user:
            with contextlib.suppress(OSError):  # there are results
                folder.rmdir()
        raise


def clear(folder: Path) -> None:
    """Delete predictions and figures of an earlier run."""
    for name in (*_TABLES[1:], *PICTURES):
        (folder / name).unlink(missing_ok=True)


def _check_file(path: Path) -> None:
    """Check that a probe can be saved to `path`, before anything is computed."""
    if path.is_dir() or path.suffix != ".safetensors":
        raise InputError(f"--save {path}: expected the name of a file that ends in .safetensors")
    if path.exists():
        LinearProbe.load(path)  # raises unless it is a probe: other files are not overwritten
    check_folder(path.parent)


def _folder_for(config: ProbeConfig) -> Path:
    """Return the folder of the results.

    Without `config.results`, it is OUT/probe/PROTOCOL, or PROTOCOL-2 and so on, skipping folders that have no results
    of these settings: those of other settings, and of other runs that have just begun.
    """
    folder = config.results
    if folder is not None:
        if "configuration" not in _read_results(folder):
            # Files of these names are replaced or deleted.
            names = ("results.json", *_TABLES, *PICTURES)
            if (other := next((folder / name for name in names if (folder / name).exists()), None)) is not None:
                raise InputError(f"{other} exists and is not of a probe", hint="name another folder with -o")
        return folder
    for number in itertools.count(1):
        folder = folder_of_results(config, f"{config.protocol}-{number}" if number > 1 else config.protocol)
        try:
            folder.mkdir()  # succeeds in only one of two concurrent runs
            return folder
        except FileExistsError:
            if _read_results(folder).get("configuration") == result_settings(config):
                return folder
    raise AssertionError("there is always a next number")


def _read_results(folder: Path) -> dict[str, Any]:
    """Return the content of results.json; empty if it cannot be read."""
    try:
        return read_json(folder / "results.json")
    except (InputError, FileNotFoundError, NotADirectoryError):
        return {}


def result_settings(config: ProbeConfig) -> dict[str, Any]:
    """Return the settings that the results depend on."""
    others = {name for names in OF_TASKS.values() for name in names} - {"group", *OF_TASKS.get(config.task, ())}
    without = {"results", "save", "device", "max_memory_mb", "format", *others}
    settings = config.model_dump(mode="json", exclude=without)
    places = {
        name: settings[name]
        for name in ("labels", "group", "masks", "depth", "without", "rdm", "triplets", "stimuli", "targets")
        if settings.get(name)
    }
    return settings | {name: text_without_credentials(place) for name, place in places.items()}


def print_outcome(outcome: ProbeRun, echo: Callable[[str], None]) -> None:
    """Print the table with its notes."""
    for name, labelling in outcome.labellings.items():
        counts = labelling.counts
        left_out = [f"{count:,} {reason}" for reason, count in counts.items() if reason != "rows" and count]
        sets = ", ".join(f"{len(rows):,} {subset}" for subset, rows in labelling.sets.items() if len(rows))
        noun = "labels" if labelling.task == "multilabel" else "classes"
        named = f"{len(labelling.classes):,} {noun}"
        targets = {"regression": "numbers", "depth": "depth maps"}.get(labelling.task, named)
        more = f"; left out: {', '.join(left_out)}" if left_out else ""
        echo(f"{printable(name)}: {counted(counts['rows'], 'row')}, {targets}; {sets}{more}")
        for note in labelling.notes:
            echo(f"  {printable(note)}")
        if labelling.leaks and not outcome.config.drop_leaks:
            leaks = ", ".join(f"{count:,} images of {overlap}" for overlap, count in labelling.leaks.items())
            leaks = leaks.replace(" in ", " are also in ")
            echo(f"  leakage: the same bytes, file or group in two sets: {leaks}; --drop-leaks leaves them out of "
                 "training")  # fmt: skip
    _print_probes(outcome, echo)


def _print_probes(outcome: ProbeRun, echo: Callable[[str], None]) -> None:
    first = outcome.probed[0].result
    dense = SEGMENTATION | DEPTH
    about = (dense if outcome.config.is_dense else PROTOCOLS)[first.protocol].about
    echo(f"{first.protocol}: {about}; {_SCALED[first.scaling]}")
    if first.swept:
        chosen_on = dict.fromkeys(feature.result.chosen_on for feature in outcome.probed)
        echo(f"  {first.swept} chosen on {' or '.join(chosen_on)}")
    rows = _table(outcome)
    print_aligned(rows, "<" * len(rows[0]), lambda line: echo(f"  {line}"))
    several = len(outcome.probed) > 1
    if several:
        best = outcome.best
        on_test = format_metric(best.result.primary, best.result.value)
        name = _full_name(outcome, best.data_set, best.layer)
        if outcome.by_validation:
            on_validation = format_metric(best.result.primary, best.result.validation)
            echo(f"best on {best.result.chosen_on} ({on_validation}): {name}, {on_test} on test")
        else:
            echo(f"no layer is called the best, since no rows were left to choose it on; the first: {name}")
        for pair in sorted(outcome.comparisons, key=lambda pair: -pair.p)[:_NEAREST]:
            echo(
                f"  against {_full_name(outcome, *pair.other)}: only the best is right on {pair.only_better:,} test "
                f"images, only the other on {pair.only_other:,}; p = {pair.p:.2g} (McNemar)"
            )
    notes = [(feature, note) for feature in outcome.probed for note in feature.result.notes]
    for feature, note in notes[:SHOWN]:
        echo((f"{_full_name(outcome, feature.data_set, feature.layer)}: " if several else "") + note)
    if len(notes) > SHOWN:
        echo(f"... and {len(notes) - SHOWN} more notes in results.json")


def _full_name(outcome: ProbeRun, data_set: str, layer: str) -> str:
    return printable(f"{data_set} {layer}" if len(outcome.fingerprints) > 1 else layer)


def _table(outcome: ProbeRun) -> list[list[str]]:
    """Return a row for each layer, and a column for each metric, with intervals of the primary metric."""
    first = outcome.probed[0].result
    metrics = [metric for metric in first.metrics if metric != _CALIBRATED]
    rows = [["layer", "width", *(metric_name(metric) for metric in metrics), *([first.swept] if first.swept else [])]]
    for feature in outcome.probed:
        result, cells = feature.result, []
        for metric in metrics:
            if metric not in result.metrics:  # fewer classes, or too few rows for these shots
                cells.append("")
                continue
            estimate = result.metrics[metric]
            text = format_metric(metric, estimate.value)
            ends = f"{format_metric(metric, estimate.low, False)} to {format_metric(metric, estimate.high, False)}"
            if metric == "calibration_error":
                text += f" ({format_metric(metric, result.metrics[_CALIBRATED].value)} if calibrated)"
            has_interval = (metric == result.primary or result.shots) and math.isfinite(estimate.low)
            cells.append(f"{text} ({ends})" if has_interval else text)
        cells += [f"{result.chosen:.3g}"] if result.swept else []
        rows.append([_full_name(outcome, feature.data_set, feature.layer), str(feature.width), *cells])
    return rows


def as_json(outcome: ProbeRun) -> dict[str, Any]:
    """Return the results as JSON-compatible data; numbers that are not finite become None."""
    content = {
        "layertap": own_version(),
        "complete": outcome.complete,
        "configuration": result_settings(outcome.config),
        "data_sets": {
            name: {
                "fingerprint": outcome.fingerprints[name],
                "task": labelling.task,
                "counts": labelling.counts,
                "rows": {name: len(rows) for name, rows in labelling.sets.items()},
                "leaks": labelling.leaks,
                "notes": labelling.notes,
            }
            for name, labelling in outcome.labellings.items()
        },
        "probes": [_probe_as_json(feature) for feature in outcome.probed],
        "why_not_probed": None,  # why similarities of earlier versions had no probes beside them
        "mcnemar": [asdict(feature) for feature in outcome.comparisons],
    }
    return without_nan(content)  # type: ignore[no-any-return]


def _probe_as_json(feature: ProbedFeature) -> dict[str, Any]:
    result = feature.result
    classes = [str(name) for name in result.classes.tolist()]
    return {
        "data_set": feature.data_set,
        "layer": feature.layer,
        "width": feature.width,
        "protocol": result.protocol,
        "scaling": result.scaling,
        "rows": {"train": result.n_train, "val": result.n_val, "test": result.n_test},
        "metrics": {name: asdict(metric) for name, metric in result.metrics.items()},
        "chosen": {result.swept: result.chosen} if result.swept else {},
        "chosen_on": result.chosen_on or None,
        "validation": result.validation,
        "curve": [list(point) for point in result.curve],
        "shots": result.shots,
        "objective": result.objective,
        "classes": classes,
        "per_class": {name: values.tolist() for name, values in result.per_class.items()},
        "confusion": None if result.confusion is None or len(classes) > _MOST_IN_JSON else result.confusion.tolist(),
        "notes": list(result.notes),
        "seconds": round(result.seconds, 3),
    }


def _write_results(outcome: ProbeRun, folder: Path) -> None:
    """Write results.json and results.csv atomically; delete predictions and figures of an earlier run."""
    if len(outcome.probed) == 1 and not outcome.complete:
        clear(folder)
    write_json(folder / "results.json", as_json(outcome))
    head = ["data_set", "layer", "width", "protocol", "scaling", "chosen", "value", "n_train", "n_val", "n_test"]
    with table_file(folder / "results.csv") as write:
        write([*head, "metric", "estimate", "low", "high"])
        for feature in outcome.probed:
            result = feature.result
            chosen = repr(float(result.chosen)) if result.swept else ""
            for name, metric in result.metrics.items():
                numbers = [repr(float(value)) for value in (metric.value, metric.low, metric.high)]
                write([feature.data_set, feature.layer, feature.width, result.protocol, result.scaling, result.swept,
                       chosen, result.n_train, result.n_val, result.n_test, name, *numbers])  # fmt: skip


def _write_predictions(outcome: ProbeRun, path: Path) -> bool:
    """Write a line for each test image and layer; return False if there are no predictions (few-shot).

    `probability` is that of the predicted class; empty if the probe has none.
    """
    if all(feature.result.predictions is None for feature in outcome.probed):
        return False
    with table_file(path) as write:
        write(["data_set", "layer", "path", "label", "predicted", "probability"])
        for feature in outcome.probed:
            result = feature.result
            if result.predictions is None:
                continue
            names = [str(name) for name in result.classes.tolist()]
            paths = outcome.test_paths[feature.data_set]
            confidences = [""] * len(paths)
            if feature.confidences is not None:
                confidences = [f"{probability:.6f}" for probability in feature.confidences.tolist()]
            rows = zip(paths, result.truth, result.predictions, confidences, strict=True)
            for name, truth, predicted, probability in rows:
                unseen = outcome.labellings[feature.data_set].unseen
                texts = [answer(value, names, result.task, unseen) for value in (truth, predicted)]
                write([feature.data_set, feature.layer, name, *texts, probability])
    return True


def _write_images(outcome: ProbeRun, path: Path) -> None:
    """Write the metrics of each test image and layer; they are empty for images without pixels that count."""
    with table_file(path) as write:
        for number, feature in enumerate(outcome.probed):
            columns = feature.result.per_image
            if not number:
                write(["data_set", "layer", "path", *columns])
            for name, *values in zip(outcome.test_paths[feature.data_set], *columns.values(), strict=True):
                texts = ["" if math.isnan(value) else repr(value.item()) for value in values]
                write([feature.data_set, feature.layer, name, *texts])


def answer(value: Any, names: list[str], task: str, unseen: Sequence[str] = ()) -> str:
    """Return a prediction or a label as text: a class, labels separated by |, or a number."""
    if task == "classification":
        return str(names[value] if value >= 0 else unseen[-1 - value])
    if task == "multilabel":
        return SEPARATOR.join(name for name, is_set in zip(names, value, strict=True) if is_set)
    return repr(float(value[0]))
