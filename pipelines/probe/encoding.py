"""Responses of brains or behaviour, predicted from stored layers: `layertap probe OUT -p encoding --targets FILE`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extract.analysis.encoding.encoding import Encoding, encoding
from extract.analysis.probe.feature_matrix import FeatureRows
from extract.analysis.row_groups import row_groups
from extract.errors import InputError
from pipelines.probe.brain_files import read_responses, read_stimuli
from pipelines.probe.config import ProbeConfig
from pipelines.probe.labelling import group_values
from pipelines.probe.layer_similarity import in_order
from pipelines.probe.layer_table import LayerTable, in_all, layer_figure, opened_layers
from pipelines.probe.report import ARRAYS
from pipelines.terminal.figures import COLOURS
from pipelines.terminal.image_tables import without_fractions
from pipelines.terminal.text_output import counted

__all__ = ["encode"]

_LEVEL = 0.05  # of q-values
_SHOWN = 8  # names of targets


def encode(config: ProbeConfig, say: Callable[[str], None]) -> tuple[LayerTable, list[Path]]:
    """Predict the targets from each layer of data sets, and write tables, arrays and figures.

    Args:
        config: configuration of the run.
        say: receives a line about each step.

    Returns:
        the results, and the written files.

    Raises:
        InputError: targets cannot be read or joined with images, or see `encoding`.
        UnknownNameError: a layer, array or column does not exist.
    """
    where = str(config.targets)
    values, targets, names, key = read_responses(where, (config.stimuli, config.group))
    if config.stimuli:
        names, key = read_stimuli(config.stimuli)
    with opened_layers(config, say) as (run, folder):
        (first, reader), *_ = run.readers.items()
        if names is not None and key == "row":
            path_of = dict(zip(map(str, reader.rows.tolist()), reader.paths, strict=True))
            names = [path_of.get(name or "", "") for name in without_fractions([name.strip() for name in names])]
            if not any(names):
                raise InputError(f"{where}: no number in the column 'row' is that of a row of {first}")
        may_be_ids = names is not None and key not in ("path", "row")
        # Rows with the same name are trials of one image.
        named = np.array(run.named(names, len(values), where), object)
        distinct, stimulus = np.unique(named, return_inverse=True)
        rows = run.rows_of(distinct.tolist(), where, may_be_ids)
        kept, place = np.flatnonzero(in_all(rows)), np.full(len(distinct), -1)
        kept = kept[np.argsort(rows[first][kept])]
        place[kept] = np.arange(len(kept))
        of_rows = None if config.group is None else group_values(reader, config.group, run.notes)
        features = [[_features(array, rows[name][kept]) for array in arrays]
                    for (name, _), arrays in run.features.items()]  # fmt: skip
        found = encoding(
            dict(zip(run.names, features, strict=True)), values, images=place[stimulus], names=targets,
            groups=row_groups(reader, of_rows)[rows[first][kept]], fit=config.fit, folds=config.folds,
            partition=config.partition, draws=config.draws, seed=config.seed, device=config.device,
            memory_bytes=config.memory_bytes, on_layer=lambda name: say(f"encoding from {name}"),
        )  # fmt: skip
        paths = [reader.paths[row] for row in rows[first][kept].tolist()]
        counts = {"images": len(kept), "trials": int((place[stimulus] >= 0).sum()), "targets": len(found.ceiling)}
        if left := len(named) - counts["trials"]:
            run.notes.append(f"{left:,} of the {len(named):,} rows of targets left out: no image with features")
        _fill(run, found, counts, targets or list(map(str, range(len(found.ceiling)))), paths)
        _draw(run, found)
        return run, run.write(folder)


def _features(array: Any, rows: NDArray[np.int64]) -> FeatureRows:
    return FeatureRows.of(array, rows) if (np.diff(rows) > 0).all() else in_order([array], rows)


def _median(values: NDArray[Any], summary: Callable[[Any], Any] = np.median) -> float:
    known = values[~np.isnan(values)]
    return float(summary(known)) if len(known) else float("nan")


def _fill(run: LayerTable, found: Encoding, counts: dict[str, int], targets: list[str], paths: list[str]) -> None:
    """Fill in medians over targets for each layer, a line for each target, the folds, and arrays."""
    layers = [*found.layers, *([found.joint] if found.joint else [])]
    constant = int(np.isnan(found.layers[0].r2).sum())
    sizes = ", ".join(counted(count, name.removesuffix("s")) for name, count in counts.items())
    shown = [*targets[:_SHOWN], "..."] if len(targets) > _SHOWN else targets
    run.notes.append(f"{sizes}{f' ({constant:,} constant)' if constant else ''}: {', '.join(shown)}")
    metrics = {name: [_median(getattr(layer, name)) for layer in layers] for name in ("r", "r2")}
    metrics["r_normalised"] = [_median(found.normalised(layer.r)) for layer in layers]
    metrics["predicted"] = [_median(layer.q, lambda q: (q <= _LEVEL).mean()) for layer in layers]
    metrics = {name: each for name, each in metrics.items() if not np.isnan(each).all()}
    both = [] if found.joint is None else [(run.table["data_set"][0], found.joint.name)]
    data_sets, names = zip(*run.features, *both, strict=True)
    run.table = {"data_set": data_sets, "layer": names, "width": [layer.width for layer in layers], **metrics}
    run.table["best_for"] = np.bincount(found.best[found.best >= 0], minlength=len(layers)).tolist()
    values = {name: getattr(found, name) for name in ("best_r", "ceiling", "ncsnr", "split_half")} | found.partition
    medians = {name: _median(each) for name, each in values.items() if not np.isnan(each).all()}
    run.remarks = ["medians over targets: " + ", ".join(f"{name} {each:.3f}" for name, each in medians.items())]
    best, columns = [*run.names, ""], [each.tolist() for each in values.values()]
    lines = zip(targets, [best[i] for i in found.best.tolist()], *columns, strict=True)
    cells = [["" if cell != cell else cell for cell in line] for line in lines]
    run.tables["scores"] = [["target", "best_layer", *values], *cells]
    run.tables["images"] = [["path", "fold"], *map(list, zip(paths, found.folds.tolist(), strict=True))]
    run.arrays = {name: np.stack([getattr(layer, name) for layer in layers]) for name in ARRAYS[:-2]}
    run.arrays |= {"ceiling": found.ceiling, "best_layer": found.best}
    about = {name: {"fingerprint": reader.fingerprint, "task": "encoding"} for name, reader in run.readers.items()}
    probes = [
        {"data_set": data_set, "layer": name, "width": width, "chosen": {},
         "rows": dict.fromkeys(("train", "test"), counts["images"]),
         "metrics": {name: {"value": each[i], "low": None, "high": None} for name, each in metrics.items()}}
        for i, (data_set, name, width, *_) in enumerate(run.lines)
    ]  # fmt: skip
    run.content = {"data_sets": about, **counts, "medians": medians, "probes": probes}


def _draw(run: LayerTable, found: Encoding) -> None:
    """Draw the distribution of r over targets for each layer, and the parts of the variance."""
    known, ceiling = [layer.r[~np.isnan(layer.r)] for layer in found.layers], _median(np.sqrt(found.ceiling))
    caption = "Over targets: median, half and 90 % of them." + " Grey: the median noise ceiling." * (ceiling >= 0)

    def boxes(axes: Any) -> None:
        axes.boxplot(known, positions=range(len(known)), whis=(5, 95), showfliers=False)

    profiles = ("Pearson's r", boxes, (ceiling, ceiling), caption)
    run.figures["layers"] = layer_figure(run.names, "Responses predicted by layer", [profiles])
    if found.joint is not None:
        names = (*(f"unique to {name}" for name in run.names), "shared")
        parts = [_median(values) for values in found.partition.values()]
        bars = ("R²", lambda axes: axes.bar(range(3), parts, color=COLOURS[:3]), (0.0, 0.0), "Medians over targets.")
        run.figures["partition"] = layer_figure(names, "Variance that two layers explain", [bars])
