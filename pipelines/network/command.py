"""Commands about backbones: `layertap backbones`, `layers`, `inspect`, `draw` and `ablate`."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import click

from extract import defaults
from extract.errors import InputError
from extract.system.optional_libraries import library
from pipelines.network.config import AblateConfig, DrawConfig, InspectConfig, LookConfig, StoredTokensConfig
from pipelines.terminal.completion import complete_paths
from pipelines.terminal.config import checked
from pipelines.terminal.options import given, is_data_set, json_flag, option, options, print_result
from pipelines.terminal.text_output import print_line

__all__ = ["ablate", "backbones", "draw", "inspect", "layers"]


# Keys that are arguments, have a form of their own, or belong to commands that store features.
_NOT_OPTIONS = (
    "backbone", "images", "sample", "size", "crop", "interpolation", "mean", "std", "max_pixels", "orientation", "icc",
)  # fmt: skip


def _look_options(
    model: type[LookConfig], metavars: dict[str, str], *, of_data_sets: bool = False
) -> Callable[[Any], Any]:
    """Return a decorator for BACKBONE, IMAGES and the options of a configuration; `of_data_sets`: IMAGES is optional.

    The placeholders of values in the help text are given by key.
    """
    decorators = (
        click.argument("backbone"),
        click.argument("images", shell_complete=complete_paths, required=not of_data_sets),
        options(model, {"layers": ("-l",), "out": ("-o",)}, {"layers": "LAYER"} | metavars, _NOT_OPTIONS),
        option("--sample", model=model, type=str, metavar="N|all"),
    )
    return lambda command: reduce(lambda decorated, add: add(decorated), reversed(decorators), command)


@click.command(short_help="Find dead channels, NaN and other faults of layers.")
@_look_options(
    InspectConfig,
    {"loss": "cross_entropy|FILE.py:FUNCTION", "labels": "FILE[:COLUMN]", "csv": "FILE", "pictures": "FOLDER"},
)
@json_flag
def inspect(as_json: bool, **flags: Any) -> None:
    """Inspect what the layers of BACKBONE do on IMAGES: print findings in words, then a table.

    Finds dead channels, saturated units, NaN and the first image that causes it, and exploding activations; with
    --grad, also vanishing and exploding gradients, and layers without gradients. Features are not stored.

    \b
    layertap inspect bundled/efficientnet_lite0 photos
    layertap inspect python/net.py:make photos --weights last.pth --grad
    layertap inspect torchvision/resnet50 photos -l 'layer?' --pictures outputs/inside
    """
    if flags["pictures"] is not None:
        library("matplotlib", "figures", "--pictures")
    from pipelines.network.inspect import as_json as inspected_as_json
    from pipelines.network.inspect import inspect as run_inspect
    from pipelines.network.inspect import print_inspection

    inspected = run_inspect(checked(InspectConfig, given(flags)))
    print_result(inspected, as_json, inspected_as_json, print_inspection)
    if inspected.written and not as_json:
        print_line("written: " + ", ".join(map(str, inspected.written)), err=True)


@click.command(short_help="Draw activations, attention, Grad-CAM and filters.")
@click.argument(
    "kind",
    type=click.Choice(["maps", "channels", "top", "filters", "attention", "rollout", "gradcam", "tokens"]),
)
@_look_options(DrawConfig, {"channels": "0,3,17", "target": "CLASS", "out": "FOLDER"}, of_data_sets=True)
def draw(kind: str, **flags: Any) -> None:
    """Draw what BACKBONE sees in IMAGES: one figure per layer.

    \b
    maps       channels of a layer, beside the image
    channels   the mean of each channel on each image, as a heat map
    top        the images with the largest values of a channel
    filters    filters of the first convolution
    attention  attention of the class token, head by head
    rollout    attention rollout through all layers
    gradcam    evidence for a class, over the image
    tokens     main directions of patches or positions, as colours

    `draw tokens` also takes a data set in place of BACKBONE, and draws the tokens that it has stored. IMAGES is then
    optional: where the images are now, if they were moved.

    \b
    layertap draw maps bundled/efficientnet_lite0 cat.jpg
    layertap draw gradcam torchvision/resnet50 photos --sample 4
    layertap draw top bundled/efficientnet_lite0 photos -l blocks.4 --channels 3,40
    layertap draw tokens outputs/photos-tokens
    """
    library("matplotlib", "figures", "layertap draw")
    from pipelines.network.draw import draw as run_draw
    from pipelines.network.draw_stored import draw_stored_tokens

    source = flags["backbone"]
    if kind == "tokens" and is_data_set(source):
        settings = {**given(flags), "data_set": source}
        del settings["backbone"]
        if refused := [name for name in settings if name not in StoredTokensConfig.model_fields]:
            option_name = f"--{refused[0].replace('_', '-')}"
            raise InputError(f"{option_name} is for a backbone; {source} is a data set", hint="leave it out")
        written = draw_stored_tokens(checked(StoredTokensConfig, settings))
    elif is_data_set(source):
        raise InputError(f"{source} is a data set; draw {kind} expects a backbone, such as {defaults.BACKBONE}")
    elif flags["images"] is None:
        not_found = ", since it is not a data set" if kind == "tokens" else ""
        raise click.UsageError(f"Missing argument 'IMAGES'; {source} was taken as BACKBONE{not_found}.")
    else:
        written = run_draw(kind, checked(DrawConfig, given(flags)))
    for path in written:
        print_line(path)


@click.command(short_help="Measure the effect of changing layers.")
@_look_options(
    AblateConfig,
    {"edit": "EDIT", "channels": "0,3,17|all", "labels": "FILE[:COLUMN]", "csv": "FILE", "picture": "FILE"},
)
@json_flag
def ablate(as_json: bool, **flags: Any) -> None:
    """Measure the effect of removing or changing a layer of BACKBONE on IMAGES, by layer or by channel.

    Prints the effect on the embedding and on later layers (cosine to their unedited values), on the predicted class,
    and on the accuracy if the true classes are known.

    \b
    layertap ablate bundled/efficientnet_lite0 photos -l 'blocks.*'
    layertap ablate bundled/efficientnet_lite0 photos -l blocks.2 --edit mean --channels all --picture channels.png
    layertap ablate torchvision/resnet50 photos -l 'layer?' --edit noise:0.1
    """
    if flags["picture"] is not None:
        library("matplotlib", "figures", "--picture")
    from pipelines.network.ablate import ablate as run_ablate
    from pipelines.network.ablate import as_json as ablated_as_json
    from pipelines.network.ablate import print_ablated

    print_result(run_ablate(checked(AblateConfig, given(flags))), as_json, ablated_as_json, print_ablated)


@click.command(short_help="List backbones.")
@click.argument("pattern", required=False, metavar="[GLOB]")
@json_flag
def backbones(pattern: str | None, as_json: bool) -> None:
    """List the sources of backbones, or the backbones that match GLOB.

    No weights are loaded. The licence applies to the default weights, and is listed if their source states it.

    \b
    layertap backbones                        # the sources
    layertap backbones 'timm/vit_small*'
    """
    from pipelines.network.backbones import as_json as entries_as_json
    from pipelines.network.backbones import entries, print_entries, print_sources, sources

    if pattern is None:
        print_result(sources(), as_json, dict, print_sources)
        if not as_json:
            print_line(
                "layertap backbones 'timm/vit_*' lists the matching backbones, with their width and licence", err=True
            )
    else:
        print_result(entries(pattern), as_json, entries_as_json, print_entries)


@click.command(short_help="List the layers of a backbone.")
@click.argument("backbone")
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@click.option("--ops", is_flag=True, help="Also list functions without a module: layer1.0/add, /flatten.")
@click.option(
    "--bytes",
    "images",
    metavar="IMAGES",
    help="Print what the layers of IMAGES, or of a number of images, take on disk: whole and pooled.",
)
@json_flag
def layers(backbone: str, patterns: tuple[str, ...], ops: bool, images: str | None, as_json: bool) -> None:
    """List the layers of BACKBONE, or the layers that match a PATTERN, with their output shapes for one image.

    Notes mark layers on which hooks do not work, or work only with care.

    \b
    layertap layers torchvision/resnet50 'layer?' 'layer4.*'
    layertap layers timm/vit_small_patch16_224 'blocks.*.attn' --ops
    layertap layers torchvision/resnet50 'layer?.*' --bytes 1000000
    """
    if images is not None:
        if ops:
            raise click.UsageError("--bytes lists layers only; functions cannot be stored: leave out --ops")
        from pipelines.network.layers import bytes_as_json, layer_bytes, print_bytes

        print_result(layer_bytes(backbone, patterns, images), as_json, bytes_as_json, print_bytes)
        return
    from pipelines.network.layers import as_json as table_as_json
    from pipelines.network.layers import list_layers, print_table

    rows = list_layers(backbone, patterns, operations=ops)
    print_result(rows, as_json, table_as_json, print_table)
