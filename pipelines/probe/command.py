"""Commands for linear probes: `layertap probe` and `predict`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from extract.system.optional_libraries import library
from pipelines.probe.config import ProbeConfig
from pipelines.terminal.commands import command
from pipelines.terminal.completion import complete_paths
from pipelines.terminal.config import load_config
from pipelines.terminal.options import BACKBONE_HELP, config_file, given, json_flag, option, options, print_result
from pipelines.terminal.text_output import print_line

__all__ = ["predict", "probe"]

_PATH = click.Path(path_type=Path)


@command(short_help="Measure how good features are, layer by layer.")
@click.argument("out", nargs=-1, metavar="OUT...", shell_complete=complete_paths)
@options(
    ProbeConfig,
    {
        "protocol": ("-p",), "layers": ("-l",), "drop_leaks": ("--drop-leaks/--keep-leaks",),
        "results": ("-o", "--out", "results"),
    },
    {
        "layers": "LAYER", "labels": "FILE[:COLUMN]", "group": "COLUMN", "masks": "FOLDER|FILE[:COLUMN]",
        "class_names": "FILE.csv",
        "depth": "FOLDER|FILE[:COLUMN]", "without": "FILE", "results": "FOLDER", "save": "FILE.safetensors",
        "rdm": "FILE", "triplets": "FILE", "stimuli": "FILE.csv[:COLUMN]", "targets": "FILE[:NAME]",
    },
    leave_out=("out", "ignore_label"),
)  # fmt: skip
@option("--ignore-label", model=ProbeConfig, type=int, multiple=True)
@config_file
@json_flag
def probe(config: Path | None, as_json: bool, **flags: Any) -> None:
    """Measure how good the features of the data sets OUT are, layer by layer, with a published protocol.

    Hyperparameters are chosen on validation images; test images have no part in the choice. Writes results.json,
    results.csv, predictions.csv and figures.

    \b
    layertap probe outputs/photos                                # every stored layer
    layertap probe outputs/photos -p knn -l 'blocks.*' -l blocks.5+blocks.6
    layertap probe outputs/photos -p ridge --labels ages.csv:age
    layertap probe outputs/photos -l embedding --save probe.safetensors
    layertap probe outputs/photos --similarity                   # layers against each other; needs no labels
    layertap probe outputs/tokens -p segmentation --masks masks
    layertap probe outputs/tokens -p depth --depth depth-maps
    layertap probe outputs/stimuli -p rsa --rdm subjects.npz     # layers against brains or behaviour
    layertap probe outputs/stimuli -p encoding --targets voxels.npy --stimuli trials.csv
    """
    library("matplotlib", "figures", "layertap probe")
    from pipelines.probe import report

    say = functools.partial(print_line, err=True)
    resolved = load_config(ProbeConfig, config, given(flags))
    if resolved.similarity:
        from pipelines.probe.layer_similarity import LayerSimilarity, compare_layers

        similarity, files = compare_layers(resolved, say)
        print_result(similarity, as_json, LayerSimilarity.as_json, LayerSimilarity.print_text)
        _print_written(files, as_json)
        return
    if resolved.protocol in ("rsa", "encoding"):
        from pipelines.probe import encoding, rsa
        from pipelines.probe.layer_table import LayerTable

        compare = rsa.compare_with_rdms if resolved.protocol == "rsa" else encoding.encode
        run, files = compare(resolved, say)
        print_result(run, as_json, LayerTable.as_json, LayerTable.print_text)
        _print_written(files, as_json)
        return
    outcome, files = report.probe_and_write(resolved, say)
    print_result(outcome, as_json, report.as_json, report.print_outcome)
    _print_written(files, as_json)


def _print_written(files: Sequence[Path], as_json: bool) -> None:
    if not as_json:
        print_line("written: " + ", ".join(map(str, files)), err=True)


@command(short_help="Predict classes or masks of images with a stored probe.")
@click.argument("probe", type=_PATH)
@click.argument("images", metavar="IMAGES|OUT", shell_complete=complete_paths)
@click.option(
    "-o", "--out", "output", type=_PATH, required=True, help="CSV file to write; for masks and depths, a folder."
)
@click.option("-b", "--backbone", help=BACKBONE_HELP)
@click.option("--weights", help="Name or file of the backbone's weights, if the file was moved.")
@click.option(
    "--images",
    "pictures",
    help="Location of the images of OUT, if they were moved or are behind a URL; for masks and depths.",
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:N or mps.")
def predict(probe: Path, images: str, output: Path, **settings: Any) -> None:
    """Predict classes, masks or depths of images with a PROBE that `layertap probe --save` has written.

    Features of IMAGES are computed with the recorded settings of the probe. Features of a data set OUT must have been
    computed with the same settings.

    \b
    layertap predict probe.safetensors new-photos -o predictions.csv
    layertap predict masks.safetensors new-photos -o predicted-masks
    """
    from pipelines.probe.predict import run_predict

    print_line(run_predict(probe, images, output, **settings))
