"""Programs compiled by OpenVINO, kept in the user's cache folder: a second start takes a tenth of the first.

The key of a program covers all that it depends on: the digest of the computation with its weights, the shapes, the
compiler's settings, the versions of OpenVINO and torch, and the CPU. A program is checked by its sha256 before it is
loaded, and one that OpenVINO refuses is compiled again. `rm -r ~/.cache/layertap/programs` deletes all of them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import re
from pathlib import Path
from typing import Any

from extract.backbones import LoadedBackbone
from extract.system.optional_libraries import installed_version
from extract.system.user_cache import cache_file, keep_newest, read_cached, write_cached

__all__ = [
    "a_program_is_kept",
    "cpu_features",
    "keep_program",
    "library_versions",
    "load_program",
    "program_is_kept",
    "program_name",
]

_FOLDER = "programs"
_DIGEST_BYTES = hashlib.sha256().digest_size  # of the content, before it
_FORMAT = 1  # raise it when other code makes another program from the same computation
_MOST_BYTES = 4 << 30  # of all kept programs; the ones that were not used for the longest time are deleted
_LIBRARIES = ("layertap", "torch", "torchvision", "timm", "transformers", "open_clip_torch", "openvino")


def program_name(digest: bytes, backbone: LoadedBackbone, settings: dict[str, Any]) -> str:
    """Return the name of the program of a computation in the cache folder.

    Args:
        digest: digest of the computation.
        backbone: its backbone.
        settings: settings of the compiler, with the precision.
    """
    return f"{_FOLDER}/{_prefix(backbone, settings)}-{digest.hex()}"


def a_program_is_kept(backbone: LoadedBackbone, settings: dict[str, Any]) -> bool:
    """Return whether there is a program of any computation of a backbone; the digest of one takes half a second."""
    try:
        return any(cache_file(_FOLDER).glob(f"{_prefix(backbone, settings)}-*"))
    except OSError:
        return False


def _prefix(backbone: LoadedBackbone, settings: dict[str, Any]) -> str:
    """Return what the names of all programs of a backbone with these settings of the compiler begin with."""
    depends_on = [
        _FORMAT, backbone.spec, backbone.architecture, backbone.weights.sha256, settings, library_versions(),
        cpu_features(),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()[:32]


def program_is_kept(name: str) -> bool:
    """Return whether there is a program of this name. It is not checked before it is loaded."""
    try:
        return cache_file(name).is_file()
    except OSError:
        return False


def load_program(core: Any, name: str, settings: dict[str, Any]) -> Any:
    """Return the kept program of a name, loaded; None if there is none, or it cannot be loaded.

    Args:
        core: OpenVINO's `Core`.
        name: from `program_name`.
        settings: settings of the compiler.
    """
    stored = read_cached(name) or b""
    content = stored[_DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != stored[:_DIGEST_BYTES]:
        return None
    try:
        return core.import_model(content, "CPU", settings)
    except Exception:  # of any type; the program is then compiled
        return None


def keep_program(program: Any, name: str) -> bool:
    """Keep a compiled program under a name; return False if that fails: it is then compiled again next time."""
    try:
        content = program.export_model().getvalue()
    except Exception:  # not every program can be exported
        return False
    if len(content) > _MOST_BYTES or not write_cached(name, hashlib.sha256(content).digest() + content):
        return False
    keep_newest(_FOLDER, _MOST_BYTES)
    return True


@functools.cache
def library_versions() -> dict[str, str]:
    """Return the versions of the installed libraries on which a program depends."""
    versions = {"python": platform.python_version()}
    versions |= {library: version for library in _LIBRARIES if (version := installed_version(library))}
    return versions


@functools.cache
def cpu_features() -> str:
    """Return the model and the instruction sets of the CPU, as the kernel names them."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:  # not Linux
        text = ""
    # x86 and ARM name them differently.
    lines = re.findall(r"^(?:vendor_id|model name|cpu family|model|stepping|CPU \w+|flags|Features)\s*:.*$", text, re.M)
    return "\n".join([platform.machine(), platform.processor(), *sorted(set(lines))])
