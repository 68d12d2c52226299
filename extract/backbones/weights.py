"""Weights of a backbone: random, or read from files without running code from them; and where published ones are.

In a training checkpoint, the state dict is located, and the prefix that wrappers put before every name is removed. Both
steps are reported, and recorded with the features.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pathlib
import pickle
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from extract.errors import InputError, first_line
from extract.system.similar_paths import did_you_mean

__all__ = [
    "UNSAFE", "WEIGHTS_FILES", "LoadRequest", "Weights", "WeightsFile", "build_with_weights", "in_cache_of_hub",
    "in_cache_of_torch", "is_named", "load_state", "tag_of", "weights_sha256",
]  # fmt: skip

WEIGHTS_FILES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")

# Keys under which training scripts store the state dict, in order of preference: averaged weights before raw weights,
# as in timm; the teacher before the student, as in the evaluation of DINO.
_WRAPPERS = (
    "state_dict_ema", "model_ema", "ema_state_dict", "teacher", "state_dict", "model_state_dict", "model", "net",
    "module", "student",
)  # fmt: skip

# Of two copies of a network in a state dict, the copy that the authors evaluate: the query encoder in MoCo v1 and v2,
# the base encoder in MoCo v3, the online network in BYOL, the teacher in DINO.
_EVALUATED = ("teacher", "encoder_q", "base_encoder", "online_encoder", "online_network")

# Ends messages about files that `torch.load` with `weights_only` refuses.
UNSAFE = (
    "is damaged, or holds objects other than tensors, and loading them could run code; save only model.state_dict(), "
    "preferably as .safetensors"
)

# Harmless classes in checkpoints, besides tensors: settings of the training (DINO, MAE), without behaviour.
_HARMLESS: list[Any] = [argparse.Namespace, pathlib.PosixPath]


@dataclass(frozen=True)
class LoadRequest:
    """A request to load a backbone, passed to its source.

    Attributes:
        spec: SOURCE/NAME.
        name: NAME, the part of the spec after the source.
        weights: a name, a file, "random", or None for the source's default.
        seed: seed of random weights.
        allow_missing_head: whether a weights file may lack the classifier.
        preprocessing: values that replace the library's own; any of size, crop, interpolation, mean, std.
    """

    spec: str
    name: str
    weights: str | None
    seed: int
    allow_missing_head: bool
    preprocessing: Mapping[str, Any]


@dataclass(frozen=True)
class Weights:
    """Origin and hash of the weights.

    Attributes:
        source: a name, a file, or "random (seed 0)".
        sha256: sha256 over name, dtype, shape and bytes of every tensor of the state dict, sorted by name.
        random: whether the weights are random.
        notes: messages for the user about how a file was loaded.
    """

    source: str
    sha256: str
    random: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class WeightsFile:
    """The published weights of a backbone.

    Attributes:
        name: name of the weights.
        path: the file or folder on this machine; None if it is not there.
        url: where it would be downloaded from; empty if nothing is ever downloaded.
        from_hub: whether that is the Hugging Face hub.
    """

    name: str
    path: Path | None
    url: str = ""
    from_hub: bool = False


def in_cache_of_hub(repository: str, files: Iterable[str], revision: str | None = None) -> Path | None:
    """Return the first of these files of a repository that is in the cache of the Hugging Face hub."""
    from huggingface_hub import try_to_load_from_cache

    for file in files:
        found = try_to_load_from_cache(repository, file, revision=revision or None)
        if isinstance(found, str):  # otherwise None, or a mark that the repository has no such file
            return Path(found)
    return None


def in_cache_of_torch(url: str) -> Path | None:
    """Return the file that `torch.hub` has downloaded from a URL, if it is in its cache."""
    path = Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
    return path if path.is_file() else None


def tag_of(request: LoadRequest, tag: str) -> str:
    """Return the name of published weights: that of the request, or `tag`, which is part of the spec; "" for none.

    Raises:
        InputError: both name weights, and not the same.
    """
    if request.weights and tag and request.weights != tag:
        raise InputError(
            f"{request.spec} names the weights {tag!r}, but --weights names {request.weights!r}",
            hint="remove one of them",
        )
    return request.weights or tag


def is_named(weights: str) -> bool:
    """Return whether `weights` is a name of published weights, that is, neither a file nor "random"."""
    return not (weights == "random" or weights.endswith(WEIGHTS_FILES) or os.sep in weights or Path(weights).is_file())


def build_with_weights(
    request: LoadRequest,
    build: Callable[[], nn.Module],
    classifier_of: Callable[[nn.Module], str | None] = lambda model: None,
    unused: tuple[str, ...] = (),
    origin: str = "",
) -> tuple[nn.Module, Weights, str | None]:
    """Build a model with random weights, weights from a file, or those that `build` loads.

    Args:
        request: its weights are a file, "random" or None.
        build: builds the model.
        classifier_of: returns the name of the classifier layer, or None.
        unused: tensors of the file whose names start with one of these prefixes are left out.
        origin: what loads the weights, if the request names none.

    Returns:
        The model, its weights, and the name of the classifier layer or of the identity in its place.

    Raises:
        InputError: the file does not exist, holds more than tensors and settings, or does not fit.
    """
    weights = request.weights
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torchvision warns about its own initialisation
        torch.manual_seed(request.seed)
        model = build()
    classifier = classifier_of(model)
    if weights is None:
        return model, Weights(f"as loaded by {origin}", weights_sha256(model)), classifier
    if weights == "random":
        return model, Weights(f"random (seed {request.seed})", weights_sha256(model), random=True), classifier
    for name, value in model.state_dict().items():
        _check_has_values(name, value)
    state, notes = _read_state(Path(weights))
    state, prefix_notes = _without_prefix(state, model.state_dict(), weights)
    state = {name: value for name, value in state.items() if not (unused and name.startswith(unused))}
    head_notes = load_state(model, state, request.spec, weights, classifier, request.allow_missing_head)
    notes = (*notes, *prefix_notes, *head_notes)
    source = Path(weights).name + (f" ({'; '.join(notes)})" if notes else "")
    named_notes = tuple(f"{Path(weights).name}: {note}" for note in notes)
    return model, Weights(source, weights_sha256(model), notes=named_notes), classifier


def _read_state(path: Path) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the state dict in a file and notes on where it was; no code from the file is run."""
    if not path.is_file():
        raise InputError(f"weights file {path} does not exist", hint=did_you_mean(path))
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path), ()
        with torch.serialization.safe_globals(_HARMLESS):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # each format raises errors of its own
        raise InputError(f"weights file {path} {_why_unreadable(path, error)}") from error
    if _is_state(content):
        return dict(content), ()
    states = {key: content[key] for key in _WRAPPERS if key in content} if isinstance(content, Mapping) else {}
    states = {key: value for key, value in states.items() if _is_state(value)}
    if not states:
        content_text = (
            ", ".join(map(str, list(content)[:8])) if isinstance(content, Mapping) else type(content).__name__
        )
        raise InputError(
            f"weights file {path} holds no state dict (name -> tensor), neither at the top level nor under "
            f"{', '.join(_WRAPPERS)}; its content is: {content_text}"
        )
    key, *unused_keys = states
    unused = f", and not its {', '.join(map(repr, unused_keys))}" if unused_keys else ""
    return dict(states[key]), (f"its {key!r} was loaded{unused}",)


def _why_unreadable(path: Path, error: Exception) -> str:
    """Return why a weights file cannot be read: what it holds instead, if its first bytes show this."""
    with path.open("rb") as file:
        start = file.read(64)
    is_safetensors = path.suffix == ".safetensors"
    if not start:
        return "is empty"
    if start.startswith(b"version https://git-lfs"):
        return "is a pointer of Git LFS, not the weights; run: git lfs pull"
    if start.lstrip().startswith(b"<"):
        return "is a web page, not weights; download it again"
    if start[8:9] == b"{" and not is_safetensors:  # after 8 bytes with the length of the header
        return "is a safetensors file; rename it to .safetensors"
    if start.startswith((b"PK", b"\x80")) and is_safetensors:  # a zip file, or a pickle
        return "is not a safetensors file; if it was written by torch.save, rename it to .pth"
    # torch.load advises to turn `weights_only` off, which would run code of the file.
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):
        return UNSAFE
    return f"cannot be read: {first_line(error)}"


def _is_state(content: object) -> bool:
    return (
        isinstance(content, Mapping)
        and bool(content)
        and all(isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items())
    )


def _without_prefix(
    state: Mapping[str, Tensor], own: Mapping[str, Tensor], source: str
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the part of a state dict that belongs to a model, under the model's names, and notes on removed parts."""
    counts: Counter[str] = Counter()
    for name in state:
        parts = name.split(".")
        for i in range(len(parts)):
            if ".".join(parts[i:]) in own:
                counts["".join(f"{part}." for part in parts[:i])] += 1
    highest = max(counts.values(), default=0)
    prefixes = [prefix for prefix, count in counts.items() if count == highest]
    if not prefixes or "" in prefixes:
        return dict(state), ()
    preferred = [prefix for prefix in prefixes for part in _EVALUATED if part in prefix.split(".")][:1] or prefixes
    if len(preferred) > 1:
        raise InputError(
            f"weights {source} hold several networks that fit, under {', '.join(map(repr, sorted(prefixes)))}",
            hint="save only one network",
        )
    prefix = preferred[0]
    kept = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    n_outside = len(state) - len(kept)
    note = f", and {n_outside} tensors without this prefix were left out" if n_outside else ""
    return kept, (f"the prefix {prefix!r} was removed{note}",)


def _load_fitting(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load tensors that have the names and shapes of the model's own."""
    tensors = OrderedDict(state)
    tensors._metadata = model.state_dict()._metadata  # type: ignore[attr-defined]  # versions, which MNASNet needs
    model.load_state_dict(tensors)


def load_state(
    model: nn.Module,
    state: Mapping[str, Tensor],
    spec: str,
    source: str,
    classifier: str | None = None,
    allow_missing_head: bool = False,
) -> tuple[str, ...]:
    """Load a state dict into a model; return notes on what was left out.

    Args:
        model: the model, changed in place.
        state: name -> tensor.
        spec: spec of the backbone, named in errors.
        source: origin of the weights, named in errors.
        classifier: the layer that is replaced by an identity if its weights are missing and this is allowed.
        allow_missing_head: whether the weights of the classifier may be missing.

    Raises:
        InputError: keys are missing or unexpected, or tensors differ in shape or kind; the message lists them.
    """
    own = model.state_dict()
    # The number of batches that a normalisation has seen has no effect in evaluation; checkpoints written before
    # PyTorch 0.4.1 lack it.
    counters = [name for name in own if name.endswith("num_batches_tracked") and name not in state]
    state = {**{name: own[name] for name in counters}, **state}
    problems = _misfits(own, state)
    if not any(problems.values()):
        _load_fitting(model, state)
        return ()
    head_prefix = f"{classifier}." if classifier else None
    needed = [name for name in own if head_prefix is None or not name.startswith(head_prefix)]
    trunk_state = {name: state[name] for name in needed if name in state}
    complete = len(needed) < len(own) and not any(_misfits({name: own[name] for name in needed}, trunk_state).values())
    if complete and allow_missing_head:
        assert classifier is not None
        # Not random numbers: their output could be stored by mistake, and the fingerprint would depend on the seed.
        model.set_submodule(classifier, nn.Identity())
        _load_fitting(model, trunk_state)
        note = ""
        if unused := [name for name in state if name not in trunk_state]:
            more = ", ..." if len(unused) > 5 else ""
            note = f"; {len(unused)} tensors were left out: {', '.join(unused[:5])}{more}"
        return (f"without its classifier {classifier!r}, which is replaced by an identity{note}",)
    lines = [
        f"  {len(names)} {problem}: " + ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        for problem, names in problems.items()
        if names
    ]
    hint = f"all but the classifier {classifier!r} fits; --allow-missing-head loads the model without it"
    raise InputError(
        f"weights {source} do not fit {spec} ({len(own)} tensors):\n" + "\n".join(lines), hint=hint if complete else ""
    )


def _misfits(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Sequence[str]]:
    """Return the tensors that prevent a state dict from being loaded: kind of problem -> names."""
    return {
        "missing": [name for name in own if name not in state],
        "unexpected": [name for name in state if name not in own],
        "of another shape": [
            f"{name} {tuple(state[name].shape)} for {tuple(own[name].shape)}"
            for name in own
            if name in state and state[name].shape != own[name].shape
        ],
        "of another kind": [
            f"{name} {state[name].dtype} for {own[name].dtype}"
            for name in own
            if name in state and not _same_kind(state[name], own[name])
        ],
    }


def _same_kind(value: Tensor, own: Tensor) -> bool:
    """Return whether a tensor can replace another tensor with no loss but precision."""
    kinds = [(t.is_floating_point(), t.is_complex(), t.layout, t.device.type == "meta") for t in (value, own)]
    return kinds[0] == kinds[1]


def weights_sha256(model: nn.Module) -> str:
    """Return the sha256 over name, dtype, shape and bytes of every tensor of the state dict, sorted by name.

    Raises:
        InputError: an entry is not a dense tensor with values.
    """
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        _check_has_values(name, value)
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        resolved = value.detach().cpu().resolve_conj().resolve_neg()
        digest.update(resolved.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _check_has_values(name: str, value: object) -> None:
    """Check that an entry of a state dict is a dense tensor with values.

    Raises:
        InputError: it is not.
    """
    if isinstance(value, Tensor) and is_lazy(value):
        raise InputError(
            f"{name} of the model has no shape yet: lazy layers get theirs from the first batch",
            hint="run one batch through the model before it is returned, such as model(torch.zeros(1, 3, 224, 224))",
        )
    if not isinstance(value, Tensor) or value.is_meta or value.is_nested or value.layout is not torch.strided:
        found = f"{value.layout} on {value.device}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"{name} of the model is {found}; expected a dense tensor with values")
