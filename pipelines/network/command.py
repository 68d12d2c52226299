"""Commands about backbones: `layertap list`, `inspect` and `draw`."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from typing import Any

import click

from extract.errors import InputError
from extract.system.optional_libraries import library
from pipelines.network.config import AblateConfig, DrawConfig, InspectConfig, LookConfig
from pipelines.terminal.commands import command, mode_of
from pipelines.terminal.completion import complete_paths
from pipelines.terminal.config import checked
from pipelines.terminal.options import given, json_flag, option, options, print_result
from pipelines.terminal.text_output import print_line

__all__ = ["draw", "inspect", "list_"]


# Keys that are arguments, have a form of their own, or belong to commands that store features.
_NOT_OPTIONS = (
    "backbone", "images", "sample", "size", "crop", "interpolation", "mean", "std", "max_pixels", "orientation", "icc",
)  # fmt: skip
_OF_EDITS = "Effect of an edit"


def _look_options(model: type[LookConfig], metavars: dict[str, str]) -> Callable[[Any], Any]:
    """Return a decorator for BACKBONE, IMAGES and the options of a configuration.

    The placeholders of values in the help text are given by key.
    """
    decorators = (
        click.argument("backbone", callback=_not_images),
        click.argument("images", shell_complete=complete_paths),
        options(model, {"layers": ("-l",), "out": ("-o",)}, {"layers": "LAYER"} | metavars, _NOT_OPTIONS),
        option("--sample", model=model, type=str, metavar="N|all"),
    )
    return lambda command: reduce(lambda decorated, add: add(decorated), reversed(decorators), command)


def _not_images(ctx: click.Context, param: click.Parameter, text: str) -> str:
    if Path(text).is_dir():
        from extract.backbones.sources import SOURCES

        if text.partition("/")[0] not in SOURCES:
            names = [each.human_readable_name for each in ctx.command.params if isinstance(each, click.Argument)]
            expected = " ".join([ctx.command_path, *names])
            raise InputError(f"{text} is a folder; expected a backbone", hint=f"expected: {expected}")
    return text


@command(short_help="Find dead channels, NaN and other faults of layers, or the effect of editing them.")
@_look_options(
    InspectConfig,
    {"loss": "cross_entropy|FILE.py:FUNCTION", "labels": "FILE[:COLUMN]", "csv": "FILE", "pictures": "FOLDER|FILE"},
)
@option("--edit", model=AblateConfig, metavar="EDIT", heading=_OF_EDITS)
@option("--channels", model=AblateConfig, metavar="0,3,17|all", heading=_OF_EDITS)
@json_flag
@click.pass_context
def inspect(ctx: click.Context, /, as_json: bool, **flags: Any) -> None:
    """Inspect what the layers of BACKBONE do on IMAGES: print findings in words, then a table.

    Finds dead channels, saturated units, NaN and the first image that causes it, and exploding activations; with
    --grad, also vanishing and exploding gradients, and layers without gradients. Features are not stored.

    With --edit, instead measure the effect of removing or changing a layer, by layer or by channel, on 64 images unless
    --sample says otherwise: on the embedding and on later layers (cosine to their unedited values), on the predicted
    class, and on the accuracy if the true classes are known.

    \b
    layertap inspect bundled/efficientnet_lite0 photos
    layertap inspect python/net.py:make photos --weights last.pth --grad
    layertap inspect torchvision/resnet50 photos -l 'layer?' --pictures outputs/inside
    layertap inspect torchvision/resnet50 photos -l 'layer?' --edit zero
    layertap inspect bundled/efficientnet_lite0 photos -l blocks.2 --edit mean --channels all --pictures channels.png
    """
    if flags["pictures"] is not None:
        library("matplotlib", "figures", "--pictures")
    mode = mode_of(ctx, {"edit": (("channels",), (*AblateConfig.model_fields, "as_json"))})
    from pipelines.network import inspect as job

    if mode == "edit":
        ablated = job.ablate(checked(AblateConfig, given(flags)))
        print_result(ablated, as_json, job.ablation_as_json, job.print_ablated)
        return
    inspected = job.inspect(checked(InspectConfig, given(flags)))
    print_result(inspected, as_json, job.as_json, job.print_inspection)
    if inspected.written and not as_json:
        print_line("written: " + ", ".join(map(str, inspected.written)), err=True)


@command(short_help="Draw activations, attention and Grad-CAM.")
@click.argument(
    "kind",
    type=click.Choice(["maps", "top", "attention", "rollout", "gradcam", "tokens"]),
)
@_look_options(DrawConfig, {"channels": "0,3,17", "target": "CLASS", "out": "FOLDER"})
def draw(kind: str, **flags: Any) -> None:
    """Draw what BACKBONE sees in IMAGES: one figure per layer.

    \b
    maps       channels of a layer, beside the image
    top        the images with the largest values of a channel
    attention  attention of the class token, head by head
    rollout    attention rollout through all layers
    gradcam    evidence for a class, over the image
    tokens     main directions of patches or positions, as colours

    \b
    layertap draw maps bundled/efficientnet_lite0 cat.jpg
    layertap draw gradcam torchvision/resnet50 photos --sample 4
    layertap draw top bundled/efficientnet_lite0 photos -l blocks.4 --channels 3,40
    """
    library("matplotlib", "figures", "layertap draw")
    from pipelines.network.draw import draw as run_draw

    for path in run_draw(kind, checked(DrawConfig, given(flags))):
        print_line(path)


_GLOB = re.compile(r"[*?\[]")


@command("list", short_help="List backbones, or the layers of one.")
@click.argument("backbone", required=False, metavar="[BACKBONE|GLOB]")
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@click.option(
    "--what",
    type=click.Choice(["backbones", "layers"]),
    help="What to list. [default: layers of SOURCE/NAME; backbones if it is a source or a glob]",
)
@click.option("--ops", is_flag=True, help="Also list functions without a module: layer1.0/add, /flatten.")
@click.option(
    "--bytes",
    "images",
    metavar="IMAGES",
    help="Print the bytes of the layers of IMAGES, or of a number of images, in float32 and without pooling.",
)
@json_flag
def list_(
    backbone: str | None, patterns: tuple[str, ...], what: str | None, ops: bool, images: str | None, as_json: bool
) -> None:
    """List the sources of backbones, the backbones that match GLOB, or the layers of BACKBONE that match a PATTERN.

    Layers are listed with their output shapes for one image; notes mark layers on which hooks do not work, or work only
    with care. The licence of a backbone applies to its default weights, and is listed if their source states it.
    Listing backbones loads no weights.

    \b
    layertap list                        # the sources
    layertap list 'timm/vit_small*'
    layertap list torchvision/resnet50 'layer?' 'layer4.*'
    layertap list timm/vit_small_patch16_224 'blocks.*.attn' --ops
    layertap list torchvision/resnet50 'layer?.*' --bytes 1000000
    """
    if what is None:
        what = "backbones" if backbone is None or "/" not in backbone or _GLOB.search(backbone) else "layers"
    if what == "layers":
        if backbone is None:
            raise click.UsageError("Missing argument 'BACKBONE'.")
        _list_layers(backbone, patterns, ops, images, as_json)
        return
    if patterns or ops or images:
        raise InputError("layers are those of one backbone; expected SOURCE/NAME", hint="list them: layertap list")
    from pipelines.network import listing

    if backbone is not None:
        print_result(listing.entries(backbone), as_json, listing.as_json, listing.print_entries)
        return
    print_result(listing.sources(), as_json, dict, listing.print_sources)
    if not as_json:
        print_line("layertap list 'timm/vit_*' lists the matching backbones, with their width and licence", err=True)


def _list_layers(backbone: str, patterns: tuple[str, ...], ops: bool, images: str | None, as_json: bool) -> None:
    from pipelines.network import listing

    count = None if images is None else listing.count_of(images)
    rows = listing.list_layers(backbone, patterns, operations=ops)
    to_json = listing.as_json if count is None else partial(listing.bytes_as_json, count=count)
    print_result(rows, as_json, to_json, partial(listing.print_table, count=count))
