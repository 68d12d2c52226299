"""Report what layers do on real images, or what an edit of them changes: `layertap inspect BACKBONE IMAGES`.

layertap inspect BACKBONE IMAGES [-l PATTERN] [--grad]      # findings, and a table of the layers
layertap inspect BACKBONE IMAGES -l PATTERN --edit EDIT     # the effect of editing each layer
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from extract.analysis.network.ablation import Ablation, ablation, mean_activations
from extract.analysis.network.inspection import Inspection, Loss, inspect_model
from extract.analysis.network.plain_modules import scores_of
from extract.analysis.network.reports import Finding, TensorReport, layer_table
from extract.backbones.user_code import function_from, importing_from
from extract.compute.backbone import Backbone
from extract.compute.feature_choice import choose_features
from extract.errors import InputError
from extract.images import Images
from extract.system.atomic_files import link_target
from extract.system.json_files import without_nan
from extract.taps import edits
from extract.taps.edits import Edit
from extract.taps.layer_names import match_layers, named_layers
from pipelines.network.config import AblateConfig, InspectConfig
from pipelines.network.image_sample import Sample, n_outputs, sample_of, targets_of
from pipelines.terminal.backbone import backbone_of
from pipelines.terminal.output_paths import PICTURES, check_file, check_folder
from pipelines.terminal.progress import Progress
from pipelines.terminal.tables import numeral, print_aligned, table_file
from pipelines.terminal.text_output import SHOWN, counted, print_line

__all__ = [
    "AblationResult", "InspectionResult", "ablate", "ablation_as_json", "as_json", "edit_named", "inspect",
    "print_ablated", "print_inspection",
]  # fmt: skip

QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
_EDITS: dict[str, Callable[[float], Edit]] = {"noise": edits.noise, "scale": edits.scale, "prune": edits.prune}


@dataclass(frozen=True)
class InspectionResult:
    """Result of the job.

    Attributes:
        inspection: the numbers and findings.
        backbone: spec of the backbone.
        images: number of images inspected, and number of images in the list.
        failed: path -> why it could not be decoded.
        loss: description of the loss; empty without gradients.
        written: files.
    """

    inspection: Inspection
    backbone: str
    images: tuple[int, int]
    failed: dict[str, str]
    loss: str
    written: list[Path]


def inspect(config: InspectConfig) -> InspectionResult:
    """Run the job and print progress on stderr."""
    if config.csv is not None:
        check_file(config.csv)
    if config.pictures is not None:
        check_folder(config.pictures)
    backbone = backbone_of(config)
    names = None
    if config.layers is not None:
        names = match_layers(named_layers(backbone.model), config.layers, backbone.spec)
    sample = sample_of(config, backbone)
    described, loss, targets = _loss(config, backbone, sample) if config.grad else ("", None, None)
    with Progress(len(sample.rows)) as progress:
        inspection = inspect_model(
            backbone.model,
            sample.with_targets(targets),
            names,
            loss=loss,
            on_batch=lambda images: progress.advance(images, False),
            name_of=sample.name,
        )
    sample.print_failures()
    written = []
    if config.csv is not None:
        _write_csv(link_target(config.csv), inspection)
        written.append(config.csv)
    if config.pictures is not None:
        from pipelines.network.figures import draw_inspection

        written += draw_inspection(inspection, backbone.spec, config.pictures, config.format)
    failed = {sample.images.paths[row]: reason for row, reason in sample.failed.items()}
    return InspectionResult(inspection, backbone.spec, (inspection.images, sample.n_listed), failed, described, written)


def _loss(config: InspectConfig, backbone: Backbone, sample: Sample) -> tuple[str, Loss, NDArray[np.int64] | None]:
    """Return the loss in words, its function, and the targets of all images, if known.

    Raises:
        InputError: the loss needs classes and the backbone gives none, or `config.loss` is wrong.
    """
    if config.loss != "cross_entropy":
        file, _, name = config.loss.rpartition(":")
        if not file.endswith(".py"):
            raise InputError(f"loss {config.loss!r}: expected cross_entropy or FILE.py:FUNCTION")
        path = Path(file).resolve()
        with importing_from(path.parent):
            function = function_from(path, name)
        described = f"{path.name}:{name}"
        return described, function, _labels_of_loss(backbone, sample.images, config.labels, described)
    if not n_outputs(backbone):
        raise InputError(
            f"{backbone.spec} gives no classes, which cross_entropy needs", hint="use --loss FILE.py:FUNCTION"
        )

    def cross_entropy(output: Any, targets: Tensor) -> Tensor:
        output = scores_of(output)
        if not isinstance(output, Tensor) or output.ndim != 2:
            raise InputError(f"{backbone.spec} does not give (images, classes)", hint="use --loss FILE.py:FUNCTION")
        # The target of an unlabelled image is the class that the model predicts.
        return F.cross_entropy(output, torch.where(targets >= 0, targets, output.detach().argmax(1)))

    targets = targets_of(backbone, sample.images, config.labels)
    if targets is not None and (targets.numbers[sample.rows] >= 0).any():
        return f"cross-entropy of {targets.source}", cross_entropy, targets.numbers
    return "cross-entropy of the model's own predictions", cross_entropy, None


def _labels_of_loss(backbone: Backbone, images: Images, labels: str | None, loss: str) -> NDArray[np.int64] | None:
    """Return the labels (N,) for a loss of the user's code, and print what they are; None: -1 for all images."""
    targets = targets_of(backbone, images, labels)
    if targets is None and (not images.classes or n_outputs(backbone)):
        return None
    if targets is not None:
        print_line(f"labels of {loss}: {targets.source}", err=True)
        return targets.numbers
    # The outputs are unknown, and the loss may use the labels only to tell classes apart.
    print_line(f"labels of {loss}: numbers of the classes of the images, in the order of their names", err=True)
    return images.labels


def as_json(inspected: InspectionResult) -> dict[str, Any]:
    """Return the result as JSON-compatible data; numbers that are missing or not finite become None."""
    inspection = inspected.inspection
    columns = ("name", "layer", "trainable", "norm", "gradient_norm", "gradient_to_weight")
    return without_nan(  # type: ignore[no-any-return]
        {
            "backbone": inspected.backbone,
            "images": inspected.images[0],
            "images_in_all": inspected.images[1],
            "failed": inspected.failed,
            "loss": {"of": inspected.loss, "mean": inspection.loss} if inspected.loss else None,
            "findings": [asdict(finding) for finding in inspection.findings],
            "layers": [_table_row(report) for report in inspection.tensors],
            "parameters": [
                {column: getattr(parameter, column) for column in columns} for parameter in inspection.parameters
            ],
            "never_ran": inspection.never_ran,
        }
    )


def _table_row(report: TensorReport) -> dict[str, Any]:
    """Return a row of the table; numbers that are not finite become None."""
    numbers, gradients = report.activations, report.gradients
    line: dict[str, Any] = {
        "layer": report.name,
        "type": report.type,
        "shape": "x".join(map(str, report.shape)),
        "by_image": report.by_image,
        "channels": numbers.channels,
        "mean": numbers.mean,
        "std": numbers.std,
        "min": numbers.min,
        **{f"q{part * 100:02.0f}": numbers.quantile(part) for part in QUANTILES},
        "max": numbers.max,
        "zeros": numbers.zeros,
        "dead": len(numbers.dead) if report.by_image else None,
        "saturated": int((numbers.saturated >= 0.95).sum()) if report.bounded else None,
        "nan": numbers.nan,
        "infinite": numbers.infinite,
        "norm_ratio": report.norm_ratio,
    }
    if gradients is not None:
        line |= {
            "gradient_norm": report.gradient_norm,
            "gradient_std": gradients.std,
            "gradient_zeros": gradients.zeros,
        }
    return without_nan(line)  # type: ignore[no-any-return]


def _write_csv(path: Path, inspection: Inspection) -> None:
    lines = [_table_row(report) for report in inspection.tensors]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    with table_file(path) as write:
        write(columns)
        for line in lines:
            write([line.get(column) for column in columns])


def print_inspection(inspected: InspectionResult, echo: Callable[[str], None]) -> None:
    """Print the findings in words, then the table."""
    inspection = inspected.inspection
    of_all = f" of {inspected.images[1]:,}" if inspected.images[0] < inspected.images[1] else ""
    echo(f"{inspected.backbone}: {counted(len(inspection.tensors), 'layer')} on {inspected.images[0]:,}{of_all} images")
    if inspected.loss:
        echo(f"gradients of {inspected.loss}; mean loss {inspection.loss:.4g}")
    _print_findings(inspection.findings, echo)
    if inspection.never_ran:
        names = ", ".join(inspection.never_ran[:SHOWN]) + (", ..." if len(inspection.never_ran) > SHOWN else "")
        echo(f"{len(inspection.never_ran)} layers never ran, or returned no tensor: {names}")
    echo("")
    rows = layer_table(inspection.tensors)
    print_aligned(rows, "<<<" + ">" * (len(rows[0]) - 3), echo)
    if inspection.parameters:
        echo("")
        _print_parameters(inspection, echo)


def _print_findings(findings: Sequence[Finding], echo: Callable[[str], None]) -> None:
    grave = [finding for finding in findings if finding.grave]
    minor = [finding for finding in findings if not finding.grave]
    echo(f"findings: {len(grave)} serious, {len(minor)} minor" if findings else "findings: none")
    for finding in grave:
        echo(f"  ! {finding}")
    for finding in minor[:SHOWN]:
        echo(f"    {finding}")
    if len(minor) > SHOWN:
        echo(f"    ... and {len(minor) - SHOWN} more; print them with --json")


def _print_parameters(inspection: Inspection, echo: Callable[[str], None]) -> None:
    rows = [["parameter", "norm", "grad norm", "grad/weight"]]
    for parameter in inspection.parameters:
        numbers = (parameter.norm, parameter.gradient_norm, parameter.gradient_to_weight)
        rows.append([parameter.name, *(numeral(value, ".2e") for value in numbers)])
    print_aligned(rows, "<>>>", echo)


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
        _write_effects(link_target(config.csv), result)
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


def ablation_as_json(ablated: AblationResult) -> dict[str, Any]:
    """Return the result as JSON-compatible data; missing numbers become None."""
    result = ablated.ablation
    return without_nan(  # type: ignore[no-any-return]
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


def _write_effects(path: Path, result: Ablation) -> None:
    later = list(dict.fromkeys(name for effect in result.effects for name in effect.later))
    with table_file(path) as write:
        write(["layer", "channel", "cosine", "same_class", "accuracy", *(f"cosine of {name}" for name in later)])
        for effect in result.effects:
            numbers = [effect.cosine, effect.same_class, effect.accuracy]
            numbers += [effect.later.get(name, math.nan) for name in later]
            write([effect.layer, effect.channel, *("" if math.isnan(each) else f"{each:.6g}" for each in numbers)])


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
            effect.target, numeral(effect.cosine, ".4f"), numeral(effect.same_class, ".1%"),
            numeral(effect.accuracy, ".1%"), f"{following[0]} {numeral(following[1], '.4f')}" if following else "-",
        ])  # fmt: skip
    shown = [column for column in range(5) if any(row[column] != "-" for row in rows[1:])]
    print_aligned([[row[column] for column in shown] for row in rows], "".join("<>>><"[c] for c in shown), echo)
    if ablated.written:
        echo("written: " + ", ".join(map(str, ablated.written)))
