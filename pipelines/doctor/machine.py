"""Checks of the machine and the installation: versions, devices, memory, optional libraries."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from pathlib import Path
from typing import Any

from extract import defaults
from extract.errors import first_line
from extract.system.optional_libraries import installed_version, own_version, pip_install, requirements
from pipelines.doctor.check import Section

__all__ = ["PURPOSES", "check_devices", "check_libraries", "check_memory", "check_versions"]

# What the optional libraries of each extra are for. `demo` and `test` only combine others.
PURPOSES = {
    "figures": "figures of probe, draw, ablate, inspect, search",
    "report": "report with a t-SNE map",
    "umap": "report --map umap",
    "open_clip": "-b open_clip/...",
    "hf": "-b hf/...",
    "openvino": "faster forwards on CPUs",
    "heic": "HEIC images",
    "http": "images behind http:// and https://",
    "s3": "images and data sets behind s3://",
    "gs": "images and data sets behind gs://",
    "ray": "embed --engine ray",
    "watch": "watch",
    "blosc2": "embed --compress blosc2",
    "coco": "probe --masks FILE.json",
    "parquet": "Parquet lists, export --to parquet",
    "pandas": "reader.to_pandas",
    "polars": "reader.to_polars",
    "datasets": "hfds://..., export --to hf",
    "sklearn": "layertap.sklearn",
}
_SHOWN = ("torch", "torchvision", "timm", "h5py")
_LEAST_MEMORY = 1 << 30  # PyTorch, a backbone and a batch of 64 pictures
_GROUPS = Path("/sys/fs/cgroup")


def check_versions(section: Section) -> None:
    """Check that each library that layertap needs is installed, in a version that it supports."""
    versions: dict[str, str] = {
        "python": platform.python_version(),
        "layertap": installed_version("layertap") or f"{own_version()} (not installed)",
    }
    for requirement in requirements():
        name, problem = _missing(requirement)
        if problem:
            section.wrong(f"{name}: {problem}", f"to install it: {pip_install('')}")
        versions[name] = installed_version(name) or ""
    import h5py

    versions["HDF5"] = h5py.version.hdf5_version
    shown = {name: versions.get(name, "") for name in ("python", "layertap", *_SHOWN, "HDF5")}
    section.ok(", ".join(f"{name} {version}" for name, version in shown.items() if version))
    section.facts.update(versions)


def check_devices(section: Section) -> None:
    """Report the CPU cores and GPUs that this process may use."""
    cores, quota = os.cpu_count() or 1, quota_in_cores()
    text = f"{defaults.CORES} of {cores} CPU cores"
    section.facts["cpu"] = {"cores": cores, "usable": defaults.CORES, "cgroup_cores": quota}
    if quota is not None and quota < defaults.CORES:
        fewer = max(1, int(quota))
        section.note(
            f"{text}, of which the control group grants {quota:g}",
            f"use --workers {fewer}; the default is {defaults.WORKERS}",
        )
    else:
        section.ok(text)
    import torch

    gpus: list[dict[str, Any]] = []
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            name = torch.cuda.get_device_name(number)
            try:
                free, total = torch.cuda.mem_get_info(number)
            except RuntimeError as error:  # another process may have taken the GPU for itself, or all of its memory
                section.wrong(f"cuda:{number} {name} cannot be used: {first_line(error)}", "use another --device")
                continue
            gpus.append({"device": f"cuda:{number}", "name": name, "memory_bytes": total, "free_bytes": free})
            section.ok(f"cuda:{number} {name}, {_gb(free)} of {_gb(total)} free")
    elif torch.backends.mps.is_available():
        gpus.append({"device": "mps", "name": "Apple"})
        section.ok("mps, the GPU of this computer")
    elif Path("/dev/nvidiactl").exists():
        built = "was installed without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
        section.wrong(
            f"this machine has an NVIDIA GPU, which PyTorch ({built}) cannot use",
            "install a build of PyTorch for the CUDA version of the driver (nvidia-smi prints it)",
        )
    else:
        section.ok("no GPU; backbones run on the CPU")
    section.facts["gpus"] = gpus


def check_memory(section: Section) -> None:
    """Report the memory that this process may still allocate, within the limits of its control groups."""
    from extract.analysis.probe.memory import free_bytes

    free = free_bytes()
    section.facts["free_bytes"] = free
    if free < _LEAST_MEMORY:
        section.wrong(f"only {_gb(free)} free", "free or add memory, or use --workers 0 and a small --batch-size")
    else:
        section.ok(f"{_gb(free)} free")


def check_libraries(section: Section) -> None:
    """Report which optional libraries are installed, and how to install the others; none is needed here."""
    for extra, purpose in PURPOSES.items():
        missing = [_missing(requirement) for requirement in requirements(extra)]
        problems = [f"{name} {problem}" for name, problem in missing if problem]
        versions = {name: installed_version(name) for name, _ in missing}
        section.facts[extra] = {"purpose": purpose, "versions": versions, "installed": not problems}
        if problems:
            section.facts[extra]["install"] = pip_install(extra)
            section.note(f"{purpose}: {', '.join(problems)}; {pip_install(extra)}")
        else:
            section.ok(f"{purpose}: " + ", ".join(f"{name} {version}" for name, version in versions.items()))


def quota_in_cores(groups: Path = _GROUPS, own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return the CPU time that control groups grant, in cores; None without a limit.

    Args:
        groups: where control groups are mounted.
        own: the file that names the groups of this process (cgroups(7)).
    """
    quotas: list[float] = []
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, kinds, name = line.split(":", 2)
            if kinds == "":
                quotas += _quotas(groups, name, ("cpu.max",))
            elif "cpu" in kinds.split(","):
                quotas += _quotas(groups / "cpu", name, ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    return min(quotas, default=None)


def _quotas(root: Path, name: str, files: tuple[str, ...]) -> list[float]:
    """Return the quota of each limited group among this control group and its ancestors."""
    quotas = []
    parts = Path(name.strip("/"))
    # In a container, the group's own folder may be the root.
    for folder in dict.fromkeys((*(root / part for part in (parts, *parts.parents)), root)):
        with contextlib.suppress(OSError, ValueError):
            quota, period = map(int, " ".join((folder / file).read_text() for file in files).split())  # "max": no limit
            if quota > 0:
                quotas.append(quota / period)
    return quotas


def _missing(requirement: str) -> tuple[str, str]:
    """Return the name of a required package, and what is wrong with it; empty if nothing is.

    >>> _missing("no-such-package>=3")
    ('no-such-package', 'is missing')
    """
    name = re.split(r"[\[<>=!~ ;]", requirement, maxsplit=1)[0]
    version = installed_version(name)
    if version is None:
        return name, "is missing"
    bound = re.search(r"(>=|==)([\w.]+)", requirement)
    if bound is None:
        return name, ""
    have, need = _numbers(version), _numbers(bound[2])
    fits = have >= need if bound[1] == ">=" else have == need
    return name, "" if fits else f"{version} is installed, expected {bound[1]}{bound[2]}"


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version without final zeros: 2.9.0 equals 2.9."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(number) for number in release[0].split(".")] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _gb(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"
