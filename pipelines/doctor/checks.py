"""The checks of `layertap doctor`, and its report."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from extract import defaults
from extract.errors import LayertapError, first_line
from extract.system.optional_libraries import installed_version, own_version, pip_install, requirements
from extract.system.urls import is_url
from pipelines.terminal.config import name_of
from pipelines.terminal.text_output import counted, printable

__all__ = ["Line", "Section", "as_json", "examine", "print_report", "problems_of"]

_MARKS = {"ok": "  ", "note": "--", "wrong": "!!"}
_COLOURS = {"ok": None, "note": "yellow", "wrong": "red"}
_LEAST_FREE = 100_000_000  # bytes on the disk
_OTHER_PLACE = "choose another output folder with -o"


@dataclass(frozen=True)
class Line:
    """A line of the report.

    Attributes:
        text: what was seen.
        state: "ok"; "note" if nothing is wrong but something could be better; "wrong" if something needed is missing
            or broken.
        hint: what to do; may be empty.
    """

    text: str
    state: Literal["ok", "note", "wrong"] = "ok"
    hint: str = ""


@dataclass
class Section:
    """The results of checks of one thing.

    Attributes:
        title: what was checked.
        lines: lines of the report.
        facts: name -> value, JSON-compatible.
    """

    title: str
    lines: list[Line] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def examine(images: str | None, backbone: str | None, out: str | None) -> list[Section]:
    """Run all checks; a check that fails is a line of its section. If there are no such images, no more is checked.

    Args:
        images: folder, list, archive, array or URL of images; None: they are not checked.
        backbone: SOURCE/NAME; None: the default backbone.
        out: output folder; None: that of `layertap embed`.
    """
    listed = []
    if images is not None:
        listed = [_run("images", check_images, images)]
        if "count" not in listed[0].facts and not is_url(images) and not Path(images).exists():
            return listed  # a misspelt path; the default output would be named after it
    out = out or str(Path("outputs") / (name_of(images) if images is not None else "NAME"))
    return [
        _run("versions", check_versions),
        _run("devices", check_devices),
        *listed,
        _run("backbone", check_backbone, backbone or defaults.BACKBONE),
        _run("output", check_output, out),
    ]


def _run(title: str, check: Callable[..., Iterator[Line]], *what: str) -> Section:
    section = Section(title)
    try:
        section.lines.extend(check(*what, section.facts))
    except LayertapError as error:
        section.lines.append(Line(error.message, "wrong", error.hint))
    except OSError as error:
        reason = f"{error.filename or title}: {error.strerror or first_line(error)}"
        section.lines.append(Line(reason, "wrong", _OTHER_PLACE if title == "output" else ""))
    except ImportError as error:  # a library that layertap needs
        section.lines.append(Line(first_line(error), "wrong", f"to install it: {pip_install('')}"))
    return section


def problems_of(sections: list[Section]) -> list[Line]:
    """Return the lines about something needed that is missing or broken."""
    return [line for section in sections for line in section.lines if line.state == "wrong"]


def as_json(sections: list[Section]) -> dict[str, Any]:
    """Return the report as JSON-compatible data."""
    problems = [asdict(line) for line in problems_of(sections)]
    content = {
        section.title: {**section.facts, "lines": [asdict(line) for line in section.lines]} for section in sections
    }
    return {"ok": not problems, "problems": problems, **content}


def print_report(sections: list[Section], echo: Callable[..., None]) -> None:
    """Print the report, section by section."""
    for section in sections:
        echo(section.title)
        for line in section.lines:
            echo(f"{_MARKS[line.state]} {line.text}", fg=_COLOURS[line.state])
            if line.hint:
                echo(f"   hint: {line.hint}")
    count = len(problems_of(sections))
    echo(f"{counted(count, 'problem')}, marked with !!" if count else "no problems")


def check_versions(facts: dict[str, Any]) -> Iterator[Line]:
    """Check that each library that layertap needs is installed, in a version that it supports."""
    facts["python"] = platform.python_version()
    facts["layertap"] = installed_version("layertap") or f"{own_version()} (not installed)"
    for requirement in requirements():
        name, fault = _installed(requirement, facts)
        if fault:
            yield Line(f"{name} {fault}", "wrong", f"to install it: {pip_install('')}")
    import h5py

    facts["HDF5"] = h5py.version.hdf5_version
    shown = ("python", "layertap", "torch", "torchvision", "timm", "h5py", "HDF5")
    yield Line(", ".join(f"{name} {facts[name]}" for name in shown if facts.get(name)))


def _installed(requirement: str, versions: dict[str, Any]) -> tuple[str, str]:
    """Return the name of a required package, and its fault or an empty text; add its version to `versions`."""
    from packaging.requirements import Requirement

    needed = Requirement(requirement)
    version = versions[needed.name] = installed_version(needed.name)
    if version is None:
        return needed.name, "is missing"
    fits = needed.specifier.contains(version, prereleases=True)
    return needed.name, "" if fits else f"{version} is installed, expected {needed.specifier}"


def check_devices(facts: dict[str, Any]) -> Iterator[Line]:
    """Report the CPU cores, memory and GPUs that this process may use."""
    import torch

    from extract.system.free_memory import free_bytes

    free = free_bytes()
    gpus: list[dict[str, Any]] = []
    facts.update(usable_cores=defaults.CORES, free_bytes=free, gpus=gpus)
    yield Line(f"{defaults.CORES} of {os.cpu_count()} CPU cores, {free / 1e9:,.1f} GB of memory free")
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        name = torch.cuda.get_device_name(number)
        try:
            free, total = torch.cuda.mem_get_info(number)
        except RuntimeError as error:  # another process may have taken the GPU for itself, or all of its memory
            hint = "use another GPU: `layertap embed --device cuda:N`"
            yield Line(f"cuda:{number} {name} cannot be used: {first_line(error)}", "wrong", hint)
            continue
        gpus.append({"device": f"cuda:{number}", "name": name, "memory_bytes": total, "free_bytes": free})
        yield Line(f"cuda:{number} {name}, {free / 1e9:,.1f} of {total / 1e9:,.1f} GB free")
    if torch.backends.mps.is_available():
        gpus.append({"device": "mps", "name": "Apple"})
        yield Line("mps, the GPU of this computer")
    if not torch.cuda.is_available() and Path("/dev/nvidiactl").exists():
        hint = "install a build of PyTorch for the CUDA version of the driver (nvidia-smi prints it)"
        built = f"PyTorch, built for CUDA {torch.version.cuda}"
        yield Line(f"{built}, cannot use the NVIDIA GPU of this machine", "wrong", hint)


def check_images(where: str, facts: dict[str, Any]) -> Iterator[Line]:
    """List the images, and decode the first one.

    Raises:
        LayertapError: they cannot be listed, or no image can be decoded on this machine.
    """
    from extract.images.decoding import check_decoders
    from extract.images.listing import list_images

    check_decoders()
    images = list_images(where)
    facts.update(root=images.root, count=len(images))
    yield Line(f"{counted(len(images), 'image')} in {printable(images.root)}")
    path = printable(images.slice(0, 1).paths[0])
    try:
        facts["size"] = images.source.picture(0, images.source.read(0)[0]).size
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        hint = "replace such files; `layertap embed` stores an error status for each, and continues"
        yield Line(f"{path} cannot be decoded: {reason}", "wrong", hint)
    else:
        width, height = facts["size"]
        yield Line(f"{path} is decoded: {width}x{height} pixels")


def check_backbone(spec: str, facts: dict[str, Any]) -> Iterator[Line]:
    """Check whether the weights of a backbone are on this machine, or where they would be downloaded from.

    Raises:
        LayertapError: the backbone does not exist, or its library is missing.
    """
    from huggingface_hub import constants

    from extract.backbones.backbone import why_unreachable
    from extract.backbones.loading import locate_weights

    facts["spec"] = spec
    weights = locate_weights(spec)
    if weights is None:
        yield Line(f"{spec}: its own code loads the weights, and is not run here", "note")
        return
    facts.update(weights=weights.name, path=str(weights.path) if weights.path else None, url=weights.url)
    absent = f"weights of {spec} are not on this machine"
    if weights.path is not None:
        yield Line(f"weights of {spec} are on this machine: {weights.path}")
    elif not weights.url:
        yield Line(f"{absent}, and are not published", "wrong", "give a file: `layertap embed --weights FILE`")
    elif weights.from_hub and constants.HF_HUB_OFFLINE:
        hint = "unset HF_HUB_OFFLINE, or give a file: `layertap embed --weights FILE`"
        yield Line(f"{absent}, and HF_HUB_OFFLINE forbids a download from {weights.url}", "wrong", hint)
    elif reason := why_unreachable(weights.url):
        hint = f"download {weights.url} on another machine, and give the file: `layertap embed --weights FILE`"
        yield Line(f"{absent}, and {reason}", "wrong", hint)
    else:
        yield Line(f"{absent}; the first run downloads them from {weights.url}", "note")


def check_output(out: str, facts: dict[str, Any]) -> Iterator[Line]:
    """Check an output folder; it is not created, and nothing that is written stays.

    Raises:
        LayertapError: the folder cannot hold a data set, or another process has locked it.
        OSError: the folder cannot be written.
    """
    from extract.store.format.dataset import DataSet, check_usable
    from extract.system.atomic_files import holder, locked, temporary_folder
    from extract.system.urls import file_system

    facts["out"] = out
    if is_url(out):
        file_system(out)  # its library must be installed
        yield Line(f"{out} is a bucket; only the library for it is checked")
        return
    folder = Path(out)
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    facts["free_bytes"] = free = shutil.disk_usage(place).free
    if free < _LEAST_FREE:
        yield Line(f"only {free / 1e6:,.1f} MB free on the disk of {place}", "wrong", "free disk space")
    check_usable(folder)
    facts["data_set"] = facts["locked_by"] = None
    if (folder / "dataset.json").exists():
        dataset = DataSet.open(folder)
        facts["data_set"] = {"rows": dataset.n_rows, "images": dataset.images["root"]}
        rows = counted(dataset.n_rows, "row")
        yield Line(f"{folder} holds a data set of {rows}; a run with the same settings resumes it")
    if folder.is_dir() and (held_by := holder(folder)):
        facts["locked_by"] = held_by
        yield Line(f"{out} is locked by {held_by}", "wrong", f"wait until that process ends, or {_OTHER_PLACE}")
    # Permissions do not tell whether a file system is full or has locks: a run's lock is taken in a temporary folder.
    with temporary_folder(place / "doctor") as trial, locked(trial):
        (trial / "file").write_bytes(bytes(65536))
    yield Line(f"{folder} can be written and locked; {free / 1e9:,.1f} GB free")
