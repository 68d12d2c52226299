"""Layer names: list the layers of a model and match patterns against their names.

A layer is named as in `torch.nn.Module.named_modules()`. A pattern is a name or a glob (`*`, `?`, `[...]`) that is
matched part by part, so that `blocks.*` matches the blocks but not the layers inside them. `**` matches any number of
parts: `**` all layers, `blocks.**` all layers inside the blocks, `**.norm1` each `norm1`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from extract.errors import InputError, LayertapError, separated_by_commas, unknown_name

__all__ = ["INSIDE", "is_glob", "match_layers", "named_layers", "named_parameters", "unwrap"]


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside `nn.DataParallel`, `DistributedDataParallel` and `torch.compile` wrappers."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif "_orig_mod" in model._modules and (inner := model._modules["_orig_mod"]) is not None:
            model = inner  # of torch.compile. The attribute `_orig_mod` could be that of a module inside.
        else:
            return model


INSIDE = "_inside"  # attribute of layertap's own wrapper that holds the model
_WRAPPERS = frozenset({INSIDE, "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def named_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return name -> layer in the order of definition, without wrapper prefixes.

    A module used in two places is listed under both names. The model itself, whose name is empty, is not listed.
    """
    layers: dict[str, nn.Module] = {}
    for name, module in unwrap(model).named_modules(remove_duplicate=False):
        if plain := _plain(name):
            layers[plain] = module  # the wrapped module replaces its wrapper
    return layers


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return name -> parameter without wrapper prefixes; a shared parameter is listed under each of its names."""
    return {_plain(name): value for name, value in unwrap(model).named_parameters(remove_duplicate=False)}


def _plain(name: str) -> str:
    parts = name.split(".")
    return name if _WRAPPERS.isdisjoint(parts) else ".".join([part for part in parts if part not in _WRAPPERS])


def is_glob(pattern: str) -> bool:
    """Whether the pattern contains a wildcard and can match several layers."""
    return any(character in pattern for character in "*?[")


def match_layers(names: Iterable[str], patterns: str | Sequence[str], where: str = "the model") -> list[str]:
    """Return the names that match the patterns, without duplicates, in the order of the patterns, then of the names.

    A pattern that equals a name matches only that name. `*` does not match a dot: `layer1.*` matches `layer1.0` but not
    `layer1.0.conv1`, which `layer1.**` matches.

    Args:
        names: all layer names.
        patterns: names or globs.
        where: the model that has these layers, for the error.

    Raises:
        UnknownNameError: a pattern matches no layer; the message lists the nearest names.
        InputError: a pattern is empty, or has several names separated by commas.
    """
    names = list(names)
    known = set(names)
    names_matched: dict[str, None] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if pattern in known:
            matches = [pattern]
        else:
            parts = pattern.split(".")
            matches = [name for name in names if _parts_match(name.split("."), parts)] if is_glob(pattern) else []
        if not matches:
            raise _unknown_layer(pattern, names, where)
        names_matched.update(dict.fromkeys(matches))
    return list(names_matched)


def _unknown_layer(pattern: str, names: Sequence[str], where: str) -> LayertapError:
    listed = f"list them: layertap list {where}" if "/" in where else ""
    if not pattern.strip():
        return InputError(f"a layer name is empty; expected a layer of {where}, or a pattern such as '*'", hint=listed)
    return separated_by_commas(pattern, where) or unknown_name("layer", pattern, names, where, listed)


def _parts_match(name: list[str], pattern: list[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        least = 1 if len(pattern) == 1 else 0  # `layer1.**` does not match `layer1`
        return any(_parts_match(name[skipped:], pattern[1:]) for skipped in range(least, len(name) + 1))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _parts_match(name[1:], pattern[1:])
