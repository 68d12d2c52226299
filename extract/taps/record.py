"""Names of the tensors of a forward pass, and the record of their values: copies on the CPU."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import Tensor

from extract.errors import InputError, UnknownNameError, unknown_name
from extract.taps.layer_names import is_glob, match_layers
from extract.taps.live import Versions, check_unchanged
from extract.taps.nested import Path

__all__ = ["Record", "Reduce", "Requested", "Site", "What", "split_text"]

Reduce = Callable[[Tensor], Any]
What = Literal["output", "input", "grad", "grad_input", "attention"]


@dataclasses.dataclass(frozen=True)
class Site:
    """The name of one tensor of a forward pass: layer, call of the layer, path inside the value, and kind of value.

    Text form: `layer1.0.relu#1` is the second call, `lstm:1.0` the first item of the second item of a tuple,
    `fc:0@input` the first positional argument, `conv@grad` the gradient of the output. The call, the path and the kind
    may be omitted if exactly one tensor matches. A function without a module is named as `LAYER/FUNCTION`, where the
    layer calls it: `layer1.0/add`. `layertap embed` takes the names of outputs in the same form, with a pooling at the
    end: `lstm:0:none`.
    """

    layer: str
    call: int = 0
    path: Path = ()
    what: What = "output"

    def __str__(self) -> str:
        return self.text()

    def text(self, with_call: bool = False) -> str:
        """Return the text form, with the call number if it is not 0 or `with_call` is set."""
        call = f"#{self.call}" if self.call or with_call else ""
        path = ":" + ".".join(map(str, self.path)) if self.path else ""
        return f"{self.layer}{call}{path}" + ("" if self.what == "output" else f"@{self.what}")

    def is_meant_by(self, text: str) -> bool:
        """Whether the text is this site's text form, possibly without call number, kind, path or end of the path."""
        layer, call, path, what = split_text(text, (self.layer,))
        return layer == self.layer and self._matches(call, path, what)

    def _matches(self, call: int | None, path: tuple[str, ...], what: str | None) -> bool:
        """Whether a site is of this call and kind, None meaning any, and its path starts so, keys taken as text."""
        return call in (None, self.call) and what in (None, self.what) and has_prefix(self.path, path)


@dataclasses.dataclass(frozen=True)
class Requested:
    """Values of one layer that are to be edited, or kept if `edit` is None.

    A `call` of None means every call. `path` is the path of a tensor or the start of one. If `operation` is not empty,
    functions called in the layer's own forward whose names match this glob are meant.
    """

    layer: str
    operation: str
    what: What
    call: int | None = None
    path: tuple[str, ...] = ()
    pattern: str = ""  # the glob or type that named the layer; empty if it was named itself
    reduce: Reduce | None = None
    edit: Callable[[Tensor], Tensor] | None = None
    live: bool = False  # the tensor itself is kept, not a copy

    @property
    def name(self) -> str:
        """The layer, parameter or function, for messages."""
        return f"{self.layer}/{self.operation}" if self.operation else self.layer

    def text(self) -> str:
        """Return the text form of the sites that are meant."""
        return Site(self.name, self.call or 0, self.path, self.what).text(with_call=self.call is not None)

    def is_met_by(self, site: Site) -> bool:
        """Whether a site is one of those meant."""
        layer, _, operation = site.layer.partition("/")
        same = layer == self.layer and fnmatchcase(operation, self.operation)
        return same and site._matches(self.call, self.path, self.what)


def has_prefix(path: Path, start: tuple[str, ...]) -> bool:
    """Whether a path starts so; keys are compared as text."""
    return tuple(map(str, path[: len(start)])) == start


_TEXT = re.compile(r"(?P<layer>[^#:@]*)(?:#(?P<call>\d+))?(?::(?P<path>[^@]+))?(?:@(?P<what>\w+))?")


def split_text(text: str, names: Container[str]) -> tuple[str, int | None, tuple[str, ...], str | None]:
    """Split a site's text form into layer (or pattern), call, path and what; omitted parts are None or empty.

    Args:
        text: `LAYER[#CALL][:PATH][@WHAT]`; a text that equals a layer's name is that layer.
        names: all layer names.
    """
    match = None if text in names else _TEXT.fullmatch(text)
    if match is None:
        return text, None, (), None
    path = tuple(match["path"].split(".")) if match["path"] else ()
    return match["layer"], int(match["call"]) if match["call"] else None, path, match["what"]


@dataclasses.dataclass(eq=False, repr=False)
class Record(Mapping[str, Any]):
    """Kept values of one forward of the model: text form of a site -> tensor on the CPU, or a dict of tensors.

    A value is a dict where `reduce` returned a dict. `record[key]` takes a `Site` or any text that names exactly
    one tensor. Iteration follows the order of computation; the backward pass adds gradients.

    Attributes:
        why_absent: returns why a text names no value; None if it was never requested.
        requested: what was to be kept.
        by_site: the values by their sites. The hooks store them here.
        live: site of each value that is kept with its graph -> see `versions_of`.
    """

    why_absent: Callable[[str], str | None]
    requested: Sequence[Requested] = ()
    by_site: dict[Site, Any] = dataclasses.field(default_factory=dict, init=False)
    _sites: dict[str, Site] = dataclasses.field(default_factory=dict, init=False)  # see `sites`
    _sites_of: dict[str, list[Site]] = dataclasses.field(default_factory=dict, init=False)  # by layer, made with it
    live: dict[Site, Versions] = dataclasses.field(default_factory=dict, init=False)

    @property
    def sites(self) -> dict[str, Site]:
        """Name -> site, in the order of computation; names of layers that ran more than once contain the call."""
        if len(self._sites) != len(self.by_site):  # values were added since the names were made
            repeated = {(site.layer, site.what) for site in self.by_site if site.call}
            self._sites = {site.text((site.layer, site.what) in repeated): site for site in self.by_site}
            self._sites_of = {}
            for site in self.by_site:
                self._sites_of.setdefault(site.layer, []).append(site)
            if len(self._sites) < len(self.by_site):
                same = Counter(map(str, self.by_site)).most_common(1)[0][0]
                raise InputError(
                    f"two tensors have the name {same!r}: keys such as 0 and '0' or 'a.b' are not told apart in names",
                    hint="look them up by their sites: record.by_site",
                )
        return self._sites

    @property
    def missing(self) -> dict[str, str]:
        """What was requested by name and has no value -> the reason: a layer that did not run, for example."""
        sites: dict[tuple[str, What], list[Site]] = {}
        for site in self.by_site:
            sites.setdefault((site.layer.partition("/")[0], site.what), []).append(site)
        absent = [
            request.text()
            for request in self.requested
            if not request.pattern and not any(map(request.is_met_by, sites.get((request.layer, request.what), ())))
        ]
        return {text: self.why_absent(text) or "no value was recorded" for text in absent}

    def find(self, text: str) -> list[Site]:
        """Return the sites that a text can mean; it may omit the call, path or kind.

        A text that omits the kind means the output, if there is one, or if the output of the layer was requested.
        """
        if text in self.sites:
            return [self.sites[text]]
        layer, _, _, what = split_text(text, self._sites_of)
        sites = [site for site in self._sites_of.get(layer, ()) if site.is_meant_by(text)]
        if what is not None:
            return sites
        outputs = [site for site in sites if site.what == "output"]
        whole = {r.layer for r in self.requested if (r.what, r.operation, r.call, r.path) == ("output", "", None, ())}
        return outputs or [site for site in sites if site.layer not in whole]

    def select(self, pattern: str) -> dict[str, Any]:
        """Return name -> value of all sites whose layer matches a glob, in the order of computation.

        Args:
            pattern: text form of a site whose layer may be a glob, as for `Taps.keep`: `blocks.*`, `blocks.*/softmax`.
                Call, path and kind may be omitted: `**#0@grad` means the gradients of all first calls.

        Raises:
            UnknownNameError: no kept value matches.
        """
        known = {site.layer: None for site in self.by_site}
        layers, call, path, what = split_text(pattern, known)
        sites = {name: site for name, site in self.sites.items() if site._matches(call, path, what)}
        base, slash, operation = layers.partition("/")
        if layers in known:
            matches = {layers}
        else:  # a glob of layers matches neither functions nor the model itself
            names = {site.layer: site.layer.partition("/") for site in sites.values()}
            same = {n: parts[0] for n, parts in names.items() if parts[1] == slash and fnmatchcase(parts[2], operation)}
            bases = match_layers(filter(None, same.values()), base, "this record") if base else [""]
            matches = {name for name, layer in same.items() if layer in bases}
        selected = {name: self._value(site) for name, site in sites.items() if site.layer in matches}
        if not selected:
            raise unknown_name("kept tensor", pattern, self, "this record")
        return selected

    def __reduce__(self) -> tuple[Any, ...]:
        return _loaded, (self.by_site, self.requested, self.missing)

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.by_site)

    def __contains__(self, key: object) -> bool:
        return key in self.by_site or (isinstance(key, str) and len(self.find(key)) == 1)

    def get(self, key: str | Site, default: Any = None) -> Any:
        """Return `record[key]`, or the default where `key in record` is false."""
        return self[key] if key in self else default  # noqa: SIM401  this is `get`

    def __getitem__(self, key: str | Site) -> Any:
        if isinstance(key, Site) and key in self.by_site:
            return self._value(key)
        text = str(key)
        matches = self.find(text)
        if len(matches) == 1:
            return self._value(matches[0])
        if matches:
            names = ", ".join(repr(name) for name, site in self.sites.items() if site in matches)
            raise UnknownNameError(f"{text!r} names more than one tensor: {names}")
        if reason := self.why_absent(text):
            raise UnknownNameError(reason)
        hint = f"for all that match: record.select({text!r})" if is_glob(text) else ""
        raise unknown_name("kept tensor", text, self, "this record", hint)

    def _value(self, site: Site) -> Any:
        if site in self.live:
            check_unchanged(self.live[site], site)
        return self.by_site[site]

    def __repr__(self) -> str:
        values = ((name, self.by_site[site]) for name, site in self.sites.items())
        rows = [f"  {name}: {tuple(v.shape) if isinstance(v, Tensor) else v!r}" for name, v in values]
        rows += [f"  {text}: none, {reason}" for text, reason in self.missing.items()]
        return "Record(\n" + "\n".join(rows) + "\n)"


def _loaded(by_site: dict[Site, Any], requested: Sequence[Requested], missing: Mapping[str, str]) -> Record:
    """Return a pickled record; of values that are absent, it knows why those named are."""
    record = Record(missing.get, requested)
    record.by_site.update(by_site)
    return record
