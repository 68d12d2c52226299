"""Commands about backbones: `layertap backbones`, `layers` and `bench`."""

from __future__ import annotations

from typing import Any

import click

from pipelines.terminal.options import given, json_flag, option, tell

__all__ = ["backbones", "bench", "layers"]


@click.command()
@click.argument("pattern", required=False, metavar="[GLOB]")
@json_flag
def backbones(pattern: str | None, as_json: bool) -> None:
    """List the backbones that can be named, or those that match GLOB.

    Their weights are not loaded. The licence is that of the default weights, where their source states it.

    \b
    layertap backbones                        # the sources
    layertap backbones 'timm/vit_small*'
    """
    from pipelines.network.backbones import as_json as entries_as_json
    from pipelines.network.backbones import entries, print_entries, print_sources, sources

    if pattern is None:
        tell(sources(), as_json, dict, print_sources)
    else:
        tell(entries(pattern), as_json, entries_as_json, print_entries)


@click.command()
@click.argument("backbone")
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@click.option("--ops", is_flag=True, help="Functions without a module too: layer1.0/add, /flatten.")
@json_flag
def layers(backbone: str, patterns: tuple[str, ...], ops: bool, as_json: bool) -> None:
    """List the layers of BACKBONE, or those that match a PATTERN, with what they give for one image.

    A note tells where a hook cannot be trusted, or not simply.

    \b
    layertap layers torchvision/resnet50 'layer?' 'layer4.*'
    layertap layers timm/vit_small_patch16_224 'blocks.*.attn' --ops
    """
    from pipelines.network.layers import as_json as table_as_json
    from pipelines.network.layers import list_layers, print_table

    rows = list_layers(backbone, patterns, operations=ops)
    tell(rows, as_json, table_as_json, print_table)


@click.command()
@click.argument("images", required=False)
@option("-b", "--backbone")
@option("-l", "--layers", multiple=True, metavar="LAYER[:POOLING]")
@option("--weights")
@option("--device")
@click.option("--thorough", is_flag=True, help="Also ways that are seldom the fastest and take long to compile.")
@json_flag
def bench(images: str | None, thorough: bool, as_json: bool, **flags: Any) -> None:
    """Measure what this machine can do for a backbone, and what the pipeline makes of it.

    Decoding on one core, the forward in each way there is, writing; then the whole pipeline against the bound that they
    give together. Without IMAGES, pictures of noise are taken. Recommends flags for `layertap embed`. Takes minutes.

    \b
    layertap bench photos -b torchvision/resnet50
    """
    from pipelines.embed.bench import as_json as bench_as_json
    from pipelines.embed.bench import bench as measure
    from pipelines.embed.bench import print_bench

    found = measure(
        images, thorough=thorough, say=lambda text: click.echo(f"measuring {text} ...", err=True), **given(flags)
    )
    tell(found, as_json, bench_as_json, print_bench)
