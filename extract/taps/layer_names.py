"""Names of layers: which a model has, and which of them a pattern means.

A layer is named as in `torch.nn.Module.named_modules()`. A pattern is a name or a glob (`*`, `?`, `[...]`) that is
compared part by part, so that `blocks.*` means the blocks and not everything inside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from extract.errors import unknown_name

__all__ = ["INSIDE", "is_glob", "match_layers", "named_layers", "named_parameters", "unwrap"]


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside `nn.DataParallel`, `DistributedDataParallel` and `torch.compile` wrappers."""
    while True:
        inner = getattr(model, "_orig_mod", None)  # torch.compile
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


INSIDE = "_inside"  # under which a wrapper of ours holds the model
_WRAPPERS = frozenset({INSIDE, "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def named_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every name a layer can be reached by, in the order of definition; wrapper prefixes are left out.

    A module that is used in two places has two names. The model itself, whose name is empty, is not listed.
    """
    found: dict[str, nn.Module] = {}
    for name, module in unwrap(model).named_modules(remove_duplicate=False):
        if plain := _plain(name):
            found[plain] = module  # of a wrapper and what is inside it, the inner
    return found


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every name a parameter can be reached by; wrapper prefixes are left out."""
    return {_plain(name): value for name, value in unwrap(model).named_parameters(remove_duplicate=False)}


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def is_glob(pattern: str) -> bool:
    """Whether the pattern can mean more than one layer."""
    return any(character in pattern for character in "*?[")


def match_layers(names: Iterable[str], patterns: str | Sequence[str], where: str = "the model") -> list[str]:
    """The names that the patterns mean, each once: in the order of the patterns, then of the names.

    An exact name comes before a glob reading of the same text. `*` does not reach over a dot: `layer1.*` means
    `layer1.0` and not `layer1.0.conv1`.

    Args:
        names: all layer names.
        patterns: names or globs.
        where: whose layers these are, for the error.

    Raises:
        UnknownNameError: a pattern means no layer; the nearest names are listed.
    """
    names = list(names)
    known = set(names)
    found: dict[str, None] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if pattern in known:
            matches = [pattern]
        else:
            parts = pattern.split(".")
            matches = [name for name in names if _parts_match(name.split("."), parts)] if is_glob(pattern) else []
        if not matches:
            hint = f"List them: layertap layers {where}" if "/" in where else ""
            raise unknown_name("layer", pattern, names, where, hint)
        found.update(dict.fromkeys(matches))
    return list(found)


def _parts_match(name: list[str], pattern: list[str]) -> bool:
    return len(name) == len(pattern) and all(fnmatchcase(part, glob) for part, glob in zip(name, pattern, strict=True))
