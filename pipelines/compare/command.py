"""The command `layertap compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from extract.system.optional_libraries import library
from pipelines.compare.config import CompareConfig
from pipelines.terminal.commands import command
from pipelines.terminal.completion import complete_paths
from pipelines.terminal.config import load_config
from pipelines.terminal.options import config_file, given, json_flag, options, print_result
from pipelines.terminal.text_output import print_line

__all__ = ["compare"]


@command(short_help="Compare backbones on your images.")
@click.argument("images", required=False, shell_complete=complete_paths)
@options(
    CompareConfig,
    {
        "backbones": ("-b", "--backbone", "backbones"), "table": ("--from", "table"), "layers": ("-l",),
        "protocol": ("-p",), "tasks": ("--task", "tasks"), "out": ("-o",),
    },
    {
        "backbones": "SPEC|GLOB", "table": "FILE.csv", "layers": "LAYER[:POOLING]", "labels": "FILE[:COLUMN]",
        "tasks": "NAME=FILE[:COLUMN]", "out": "FOLDER",
    },
)  # fmt: skip
@config_file
@json_flag
@click.pass_context
def compare(ctx: click.Context, /, config: Path | None, as_json: bool, **flags: Any) -> None:
    """Compare backbones, and their layers, on IMAGES: accuracy with labels, speed, size, and similarity.

    Each backbone gets a data set in FOLDER. Images are decoded once for all backbones with the same size, crop and
    interpolation. A repeated call resumes, and adds backbones.

    \b
    layertap compare photos -b bundled/efficientnet_lite0 -b torchvision/resnet50 -b timm/vit_small_patch16_224
    layertap compare photos -b 'timm/vit_small*' -p knn --labels labels.csv
    layertap compare photos --from backbones.csv --task kind=kinds.csv --task place=places.csv --limit 10000
    """
    library("matplotlib", "figures", "layertap compare")
    from pipelines.compare.files import as_json as comparison_as_json
    from pipelines.compare.files import print_comparison
    from pipelines.compare.job import compare as run_compare

    resolved = load_config(CompareConfig, config, given(flags))
    comparison, files = run_compare(resolved, lambda text: print_line(text, err=True))
    if comparison.signal:
        print_line("stopped; run the same command again to resume", err=True)
        ctx.exit(128 + comparison.signal)
    print_result(comparison, as_json, comparison_as_json, print_comparison)
    if not as_json:
        print_line(f"written: {files[0]}, and {len(files) - 1} other files in {resolved.folder}", err=True)
    if any(entry.error for entry in comparison.backbones):
        ctx.exit(1)
