"""Measure the effect of editing a layer: `layertap inspect BACKBONE IMAGES -l PATTERN --edit EDIT`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from extract.analysis.network.ablation import Ablation, ablation, mean_activations
from extract.compute.backbone import Backbone
from extract.compute.feature_choice import choose_features
from extract.errors import InputError
from extract.system.atomic_files import link_target
from extract.system.json_files import without_nan
from extract.taps import edits
from extract.taps.edits import Edit
from extract.taps.layer_names import match_layers, named_layers
from pipelines.network.config import AblateConfig
from pipelines.network.image_sample import sample_of
from pipelines.network.imagenet_targets import n_outputs, targets_of
from pipelines.terminal.backbone import backbone_of
from pipelines.terminal.output_paths import PICTURES, check_file, check_folder
from pipelines.terminal.progress import Progress
from pipelines.terminal.tables import print_aligned, table_file
from pipelines.terminal.text_output import counted

__all__ = ["AblationResult", "ablate", "as_json", "edit_named", "print_ablated"]

_EDITS: dict[str, Callable[[float], Edit]] = {"noise": edits.noise, "scale": edits.scale, "prune": edits.prune}


@dataclass(frozen=True)
class AblationResult:
    """Result of the job.

    Attributes:
        ablation: all effects.
        backbone: spec of the backbone.
        edit: the edit, as given.
        labels: source of the true classes; empty if they are unknown.
        written: files.
    """

    ablation: Ablation
    backbone: str
    edit: str
    labels: str
    written: list[Path]


def ablate(config: AblateConfig) -> AblationResult:
    """Run the job and print progress on stderr."""
    if config.layers is None:
        raise InputError("no layer named", hint="expected -l LAYER, or a glob such as -l 'blocks.*'")
    picture = config.pictures
    if picture is not None and (picture.is_dir() or not picture.suffix):
        check_folder(picture)
        picture /= f"ablation.{config.format}"
    if picture is not None:
        check_file(picture, PICTURES)
        if "format" in config.model_fields_set and picture.suffix.lower() != f".{config.format}":
            raise InputError(f"--format {config.format}: the file is {picture}", hint="leave out --format")
    if config.csv is not None:
        check_file(config.csv)
    edit_named(config.edit)  # raise for a wrong edit before anything is loaded
    backbone = backbone_of(config)
    layers = match_layers(named_layers(backbone.model), config.layers, backbone.spec)
    channels = _channels(config, backbone, layers)
    sample = sample_of(config, backbone)
    if config.labels is not None and not n_outputs(backbone):
        raise InputError(f"{backbone.spec} gives no classes, which --labels needs", hint="leave out --labels")
    targets = targets_of(backbone, sample.images, config.labels) if n_outputs(backbone) else None
    numbers = None if targets is None else targets.numbers
    if config.edit == "mean":
        means = mean_activations(backbone, sample.with_targets(numbers), layers)
        edit: Edit | Mapping[str, Edit] = {name: edits.replace(mean) for name, mean in means.items()}
    else:
        edit = edit_named(config.edit)
    trials = len(layers) * (1 if channels is None else len(channels))
    with Progress(len(sample.rows) * (trials + 1), "forwards") as progress:
        result = ablation(
            backbone, sample.with_targets(numbers), layers, edit, channels=channels,
            on_forward=lambda images: progress.advance(images, False),
        )  # fmt: skip
    sample.print_failures()
    ablated = AblationResult(result, backbone.spec, config.edit, targets.source if targets else "", [])
    if config.csv is not None:
        _write_csv(link_target(config.csv), result)
        ablated.written.append(config.csv)
    if picture is not None:
        from pipelines.network.figures import draw_ablation
        from pipelines.terminal.figures import drawable, save_figure

        parts = "layer" if channels is None else f"channel of {drawable(', '.join(layers), 60)}"
        source = f"{drawable(backbone.spec, 60)} on {counted(result.images, 'image')}"
        title = f"{source}: effect of the edit {config.edit} of each {parts}"
        save_figure(draw_ablation(result, title), link_target(picture))
        ablated.written.append(picture)
    return ablated


def edit_named(text: str) -> Edit:
    """Return the edit that a flag names.

    Raises:
        InputError: the name is unknown, or its number is wrong.
    """
    name, colon, number = text.partition(":")
    if name in ("zero", "mean") and not colon:
        return edits.ablate(name)  # type: ignore[arg-type]
    if name not in _EDITS or not colon:
        raise InputError(f"edit {text!r}: expected zero, mean, noise:STD, scale:FACTOR or prune:FRACTION")
    try:
        value = float(number)
    except ValueError:
        raise InputError(f"edit {text!r}: {number!r} is not a number") from None
    if not math.isfinite(value) or (name == "noise" and value < 0):
        expected = "a finite number of at least 0" if name == "noise" else "a finite number"
        raise InputError(f"edit {text!r}: expected {expected}, got {number}")
    return _EDITS[name](value)


def _channels(config: AblateConfig, backbone: Backbone, layers: Sequence[str]) -> list[int] | None:
    if config.channels is None:
        return None
    if config.channels == "all":
        if len(layers) > 1:
            raise InputError(f"--channels all needs exactly one layer; {len(layers)} layers match -l")
        [feature, *_] = choose_features(backbone, [f"{layers[0]}:none"]).features
        if "C" not in feature.layout.axes:
            raise InputError(f"layer {layers[0]!r} has no axis that is known to hold channels")
        return list(range(feature.activation_shape[feature.layout.axes.index("C")]))
    try:
        return [int(number) for number in config.channels.split(",")]
    except ValueError:
        raise InputError(f"channels {config.channels!r}: expected numbers such as 0,3,17, or all") from None


def as_json(ablated: AblationResult) -> dict[str, Any]:
    """Return the result as JSON-compatible data; missing numbers become None."""
    result = ablated.ablation
    content: dict[str, Any] = without_nan(
        {
            "backbone": ablated.backbone,
            "edit": ablated.edit,
            "images": result.images,
            "labels": ablated.labels or None,
            "labelled": result.targets,
            "accuracy": result.accuracy,
            "effects": [asdict(effect) for effect in result.effects],
        }
    )
    return content


def _write_csv(path: Path, result: Ablation) -> None:
    later = list(dict.fromkeys(name for effect in result.effects for name in effect.later))
    with table_file(path) as write:
        write(["layer", "channel", "cosine", "same_class", "accuracy", *(f"cosine of {name}" for name in later)])
        for effect in result.effects:
            numbers = [effect.cosine, effect.same_class, effect.accuracy]
            numbers += [effect.later.get(name, math.nan) for name in later]
            channel = "" if effect.channel is None else effect.channel
            write([effect.layer, channel, *("" if math.isnan(number) else f"{number:.6g}" for number in numbers)])


def print_ablated(ablated: AblationResult, echo: Callable[[str], None]) -> None:
    """Print the result as a table."""
    result = ablated.ablation
    echo(f"{ablated.backbone} on {counted(result.images, 'image')}, edit {ablated.edit}")
    if result.targets:
        labelled = f" of {result.targets:,} labelled images" if result.targets < result.images else ""
        echo(f"unedited: top-1 {result.accuracy:.1%}{labelled}, labels from {ablated.labels}")
    rows = [["edited", "cosine", "same class", "top-1", "next layer"]]
    for effect in result.effects:
        following = next(iter(effect.later.items()), None)
        rows.append([
            effect.target, _text(effect.cosine), _text(effect.same_class, ".1%"), _text(effect.accuracy, ".1%"),
            f"{following[0]} {_text(following[1])}" if following else "-",
        ])  # fmt: skip
    shown = [column for column in range(5) if any(row[column] != "-" for row in rows[1:])]
    print_aligned([[row[column] for column in shown] for row in rows], "".join("<>>><"[c] for c in shown), echo)
    if ablated.written:
        echo("written: " + ", ".join(map(str, ablated.written)))


def _text(value: float, format_spec: str = ".4f") -> str:
    return format(value, format_spec) if math.isfinite(value) else "-"
