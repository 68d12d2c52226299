"""Writes random small models as Python programs, and drops parts of them.

A case is a number. Its program is text: the class `Model`, and the blocks in it. All values are integers in float64, so
that sums are exact and have the same bits in any order.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.extract.taps.program_layers import LIBRARY

SHAPES = "fhu"  # 4x4, 2x4, and 4x2x2
_LIBRARY: dict[str, Any] = {"nn": nn, "torch": torch, "F": F}
exec("\n".join(LIBRARY.values()), _LIBRARY)


@dataclass(frozen=True)
class Template:
    """A kind of statement.

    Attributes:
        text: the statement. `{a}` is a tensor of any shape, `{b}` another of its shape, `{f}`, `{h}` and `{u}` are of
            one shape, `{n}` and `{m}` new variables, `{L}` a layer.
        gives: a letter for the shape of each new variable; `a` is that of `{a}`.
        make: how the layer is made.
        also: another value that there is afterwards, of the shape of the first argument.
        weight: how often the statement is chosen, relative to others.
    """

    text: str
    gives: str = "a"
    make: str = ""
    also: str = ""
    weight: float = 1


def _layers(make: str, text: str = "{n} = {L}({a})", gives: str = "a", **options: Any) -> list[Template]:
    return [Template(text, gives, one, **options) for one in make.split("; ")]


_ELEMENTWISE = (
    "nn.Identity(); nn.Dropout(0.5); nn.Dropout(0.5, inplace=True); nn.ReLU(); nn.ReLU(inplace=True); "
    "nn.ReLU6(inplace=True); nn.LeakyReLU(2.0, inplace=True); nn.Hardtanh(-2, 2, inplace=True); Pass(); DropPath(); "
    "View(); Slice(); AddOne(); DoubleInPlace(); ZeroSome(); ReluInPlaceGivesOther(); NegateGivesView(); "
    "WritesThroughView(); WritesData(); WritesDataGivesOther()"
)
TEMPLATES = [
    *_layers(_ELEMENTWISE, weight=2),
    *_layers("nn.Linear(4, 4)", "{n} = {L}({f})", "f", weight=12),
    *_layers("nn.Linear(4, 4)", "{n} = {L}({h})", "h", weight=3),
    *_layers("nn.Flatten(); Transpose(); Expand(); Frames()", "{n} = {L}({f})", "f", weight=2),
    *_layers("nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Flatten())", "{n} = {L}({f})", "f", weight=2),
    *_layers("nn.Unflatten(1, (2, 2))", "{n} = {L}({f})", "u", weight=2),
    *_layers("nn.Flatten()", "{n} = {L}({u})", "f", weight=2),
    *_layers("Halves(); SplitAndRelu()", "{n}, {m} = {L}({f})", "hh", weight=2),
    *_layers("WritesOnly()", "{L}({a})", "", weight=2),
    *_layers("Add(); AddInto(); WritesSecond(); WritesFirstGivesSecond()", "{n} = {L}({a}, {b})", weight=2),
    *_layers("AddInto(); WritesSecond(); WritesFirstGivesSecond()", "{n} = {L}(a={a}, b={a})"),
    *_layers("AddInto(); WritesSecond(); Add()", "{n} = {L}({f}, b={f}.t())", "f"),
    *_layers("Swap()", "{n}, {m} = {L}({a}, b={b})", "aa"),
    *_layers("Twice(); Cell()", "{n}, {m} = {L}({a})", "aa", weight=2),
    *_layers("InputAndOther()", "{n}, {m}, _ = {L}({a})", "aa"),
    *_layers("ToDict()", "{n} = {L}({a})['a']"),
    *_layers("ToDict()", "{n} = {L}({a})['b'][1][0]"),
    *_layers("FromDict()", "{n} = {L}({{'a': {a}, 'b': {b}}})"),
    *_layers("FromList()", "{n}, {m} = {L}([{a}, {b}])", "aa"),
    *_layers("Order()", "{n} = {f}[{L}({f})]", "f"),
    *_layers("KeepsInput(); KeepsOutput()", also="{L}.held", weight=3),
    *_layers("AddsLastInput(); Total()"),
    *_layers("Cache()", "{n} = {L}({f}, {L}.cache)", "f", weight=2),
    *_layers("GivesCache()", "{n} = {L}({f})", "f", also="{L}.cache", weight=2),
    *_layers("Merge(); nn.Sequential(nn.Identity(), Merge())", "{a}.orig = {b}\n{n} = {L}({a})", also="{a}.orig"),
    *_layers("Marked()", "{a}.mark = 3\n{n} = {L}({a})"),
    *_layers("nn.Sequential(nn.ReLU(), nn.Identity()); nn.Sequential(Pass(), nn.ReLU(inplace=True))"),
    *_layers("nn.Sequential(nn.Sequential(AddOne()), Slice())"),
    *_layers("nn.ModuleList([nn.Identity(), AddOne()])", "for layer in {L}: {a} = layer({a})", ""),
    *_layers("IsLast()", "{n} = {L}({a}) + {L}({a})", weight=0.7),
    *_layers("nn.Identity(); nn.Dropout(0.5); Twice()", "{n} = {a} * (3 if {L}({a}) is {a} else 2)", weight=0.2),
    *_layers("WritesNumpy()", weight=0.3),
    *[Template(text, weight=2) for text in ("{n} = {a} + {b}", "{n} = {a} + 1", "{n} = {a} * 2", "{n} = {a}.relu()")],
    *[
        Template(text)
        for text in (
            "{n} = {a} * {b}", "{n} = torch.where({a} > 0, {a}, {b})", "{n} = {a}.clone()", "{n} = {a}.contiguous()",
            "{n} = {a}[:]", "{n} = {a}.view({a}.shape)", "{n} = {a}.detach()", "{n} = {a}.unsqueeze(0).squeeze(0)",
            "{n} = {a}.data",
        )
    ],
    *[
        Template(text, "", weight=1.5)
        for text in (
            "{a}.add_(1)", "{a}.add_({b})", "{a} += {b}", "{a} *= 2", "{a}.relu_()", "F.relu({a}, inplace=True)",
            "{a}[1:3].zero_()", "{a}[0] = 1", "{a}[1:3] += 1", "{a}.mul_(2)", "{a}.transpose(0, 1).mul_(2)",
            "{a}.copy_({b})", "{a}.data.mul_(2)", "{a}.detach().add_(1)", "{a}.masked_fill_({a} > 0, 0)",
            "{a}[1] = {b}[0]", "{a}.unsqueeze_(0).squeeze_(0)", "{a}.index_fill_(0, torch.tensor([1]), 2)",
            "torch._foreach_add_([{a}], 1)", "torch.ops.aten.mul_({a}, 2)",
            "torch.add({a}.detach(), 1, out={a}.detach())",
        )
    ],
    *[
        Template(text, "f")
        for text in (
            "{n} = {f}.t()", "{n} = {f}[[0, 2, 1, 3]]", "{n} = {f}[:1].expand(4, 4)", "{n} = {f}.reshape(4, 4)",
            "{n} = {f}.reshape(16)[:10].unfold(0, 4, 2)", "{n} = torch.cat([{h}, {h}])", "{n} = F.linear({f}, {f})",
        )
    ],
    Template("{n}, {m} = {f}.chunk(2)", "hh"),
    Template("{n} = {f}[1:3]", "h", weight=2),
    Template("{n}, {m} = {u}.flatten(1).split(2)", "hh"),
]  # fmt: skip

# How a model is called: with one tensor, two, one twice, and two that share memory.
INPUTS = {
    "x": ("x = leaf * 1",),
    "x, y": (
        "x, y = leaf * 1, leaf + 1",
        "x, y = leaf * 1, plain + 1",
        "x = leaf * 1; y = x",
        "x = leaf * 1; y = x.t()",
        "base = torch.cat([leaf, plain]); x, y = base[:4], base[2:6]",
    ),
}


@dataclass(frozen=True)
class Body:
    """A class of a program: its name, what `__init__` makes, the statements of `forward`, and what it returns."""

    name: str
    arguments: str
    made: tuple[tuple[str, str], ...]  # attribute, expression
    statements: tuple[str, ...]
    returned: str

    def text(self) -> str:
        used = "\n".join((*self.statements, self.returned))
        made: list[str] = []
        for name, how in reversed(self.made):
            if re.search(rf"self\.{name.partition('.')[0]}\b", used):
                made.insert(0, f"        self.{name} = {how}")
                used += "\n" + how
        lines = [
            f"class {self.name}(nn.Module):",
            *(["    def __init__(self):", "        super().__init__()", *made, ""] if made else []),
            f"    def forward(self, {self.arguments}):",
            *(f"        {statement}" for statement in self.statements),
            f"        return {self.returned}",
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Program:
    """A random model: its classes, the last of which is `Model`; how its inputs are made; and whether it trains."""

    number: int
    bodies: tuple[Body, ...]
    inputs: str
    training: bool

    @functools.cached_property
    def text(self) -> str:
        """The program, without the library of layers."""
        text, bodies = "", list(self.bodies)
        for body in reversed(bodies):
            if body is bodies[-1] or re.search(rf"\b{body.name}\(", text):
                text = body.text() + "\n\n" + text
        return text

    @property
    def listing(self) -> str:
        """The whole program, for a reader."""
        library = [text for name, text in LIBRARY.items() if re.search(rf"\b{name}\(", self.text)]
        return "\n".join([*library, f"{self.text}# {self.inputs}" + ("; model.train()" if self.training else "")])

    @property
    def tests_identity(self) -> bool:
        """Whether it does what nobody can notice who passes another tensor on: `is`, and writes through NumPy."""
        return " is " in self.text or "IsLast(" in self.text or "WritesNumpy(" in self.text

    @functools.cached_property
    def _namespace(self) -> dict[str, Any]:
        namespace = dict(_LIBRARY)
        exec(compile(self.text, f"<case {self.number}>", "exec"), namespace)
        return namespace

    def model(self, training: bool) -> nn.Module:
        """Return a new model; its parameters are small integers."""
        model: nn.Module = self._namespace["Model"]().double().train(training)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
        return model

    def make_inputs(self, leaf: Tensor, plain: Tensor) -> list[Tensor]:
        """Return the inputs of one call of the model, from a leaf of autograd and another tensor, both (4, 4)."""
        values: dict[str, Any] = {"leaf": leaf, "plain": plain, "torch": torch}
        exec(self.inputs, values)
        return [values[name] for name in self.bodies[-1].arguments.split(", ")]


class _Writer:
    """Writes one class."""

    def __init__(self, name: str, chance: random.Random, blocks: list[Body], *, length: int):
        self.chance, self.blocks = chance, blocks
        arguments = "x, y" if chance.random() < (0.5 if name == "Model" else 0.2) else "x"
        self.values = dict.fromkeys(arguments.split(", "), "f")
        self.made: list[tuple[str, str]] = []
        self.statements: list[str] = []
        self.count = 0
        choices = TEMPLATES + [self._call(block) for block in blocks for _ in range(6)]
        weights = [template.weight for template in choices]
        while len(self.statements) < length or not self.made:
            self._write(chance.choices(choices, weights)[0])
        self.body = Body(name, arguments, tuple(self.made), tuple(self.statements), self._returned(name))

    def _call(self, block: Body) -> Template:
        given = ", ".join("{f}" for _ in block.arguments.split(", "))
        several = block.returned.count(",")
        return Template(
            ("{n}, {m}" if several else "{n}") + f" = {{L}}({given})", "ff" if several else "f", f"{block.name}()"
        )

    def _value(self, shape: str, other_than: str = "") -> str | None:
        known = [name for name, kind in self.values.items() if shape in ("a", kind) and name != other_than]
        if not known:
            return None
        return self.chance.choice(known[-3:] if self.chance.random() < 0.6 else known)

    def _write(self, template: Template) -> None:
        named: dict[str, str] = {}
        first = ""
        text = template.text
        for letter in re.findall(r"(?<!{){([abfhu])}", text):
            if letter in named and (letter in "ab" or self.chance.random() < 0.5):
                continue
            value = self._value(
                self.values[named["a"]] if letter == "b" else letter, named.get("a", "") if letter == "b" else ""
            )
            if value is None or ("for layer in" in text and not value.isidentifier()):
                return
            named[letter] = value
            first = first or value
            if letter in "fhu":
                text = text.replace(f"{{{letter}}}", value, 1)
        if template.make:
            named["L"] = self._layer(template.make)
        for letter in "nm"[: len(template.gives)]:
            self.count += 1
            named[letter] = f"v{self.count}"
        self.statements += text.format(**named).split("\n")
        if template.also:
            self.values[template.also.format(**named)] = self.values[first]
        for letter, shape in zip("nm", template.gives, strict=False):
            self.values[named[letter]] = self.values[named["a"]] if shape == "a" else shape

    def _layer(self, make: str) -> str:
        known = [name for name, how in self.made if how == make]
        if known and self.chance.random() < 0.4:
            return f"self.{self.chance.choice(known)}"
        name = f"l{len(self.made)}"
        self.made.append((name, f"self.{known[0]}" if known and self.chance.random() < 0.15 else make))
        if known and make in ("Cache()", "GivesCache()") and self.chance.random() < 0.5:
            self.made[-1] = (name, make)
            self.made.append((f"{name}.cache", f"self.{known[0]}.cache"))
        return f"self.{name}"

    def _returned(self, name: str) -> str:
        wanted = SHAPES if name == "Model" else ["f"]
        known = [value for value, shape in self.values.items() if shape in wanted]
        picked = [known[-1], *self.chance.sample(known, min(len(known), self.chance.choice((0, 0, 1, 1, 2))))]
        if name != "Model":
            return ", ".join(picked[:2])
        form = self.chance.choice(("{}", "{}", "[{}]", "dict(enumerate([{}]))"))
        return form.format(", ".join(picked))


@functools.lru_cache(2_000)
def program(number: int) -> Program:
    """Return the program of a case."""
    chance = random.Random(number)
    blocks: list[Body] = []
    for index in range(chance.choice((0, 0, 1, 2))):
        blocks.append(_Writer(f"Block{index}", chance, list(blocks), length=chance.randint(1, 4)).body)
    model = _Writer("Model", chance, blocks, length=chance.randint(3, 9)).body
    inputs = chance.choice(INPUTS[model.arguments])
    return Program(number, (*blocks, model), inputs, chance.random() < 0.25)


def smaller(program: Program) -> Iterator[Program]:
    """Yield programs that lack a part of this one, the largest parts first."""

    def with_body(index: int, **parts: Any) -> Program:
        bodies = list(program.bodies)
        bodies[index] = replace(bodies[index], **parts)
        return replace(program, bodies=tuple(bodies))

    for index, body in reversed(list(enumerate(program.bodies))):
        statements, returned = body.statements, body.returned
        for place in reversed(range(len(statements))):
            before, after = statements[:place], statements[place + 1 :]
            yield with_body(index, statements=before + after)
            target, _, expression = statements[place].partition(" = ")
            if re.fullmatch(r"v\d+(, v\d+)?(, _)?", target) and expression:
                for value in dict.fromkeys(re.findall(r"\b(?:v\d+|[xy])\b", expression)):
                    renamed = dict.fromkeys(re.findall(r"v\d+", target), value)

                    def rename(text: str, renamed: dict[str, str] = renamed) -> str:
                        return re.sub(r"\bv\d+\b", lambda match: renamed.get(match[0], match[0]), text)

                    yield with_body(index, statements=before + tuple(map(rename, after)), returned=rename(returned))
            elif not statements[place].endswith(".add_(1)"):
                for value in dict.fromkeys(re.findall(r"\b(?:v\d+|[xy])\b", statements[place])):
                    yield with_body(index, statements=(*before, f"{value}.add_(1)", *after))
        for place, (name, how) in enumerate(body.made):
            for simpler in ("nn.Identity()", "AddOne()", "Slice()"):
                if simpler == how:
                    break
                yield with_body(index, made=(*body.made[:place], (name, simpler), *body.made[place + 1 :]))
        values = re.findall(r"[\w.]+(?=[,\])]|$)", returned)
        for value in values if len(values) > 1 else ():
            yield with_body(index, returned=value)
        if index == len(program.bodies) - 1 and values and "(" in returned:
            yield with_body(index, returned=", ".join(values))
    model = program.bodies[-1]
    if model.arguments == "x, y" and not re.search(r"\by\b", "\n".join((*model.statements, model.returned))):
        yield replace(with_body(len(program.bodies) - 1, arguments="x"), inputs=INPUTS["x"][0])
    if program.training:
        yield replace(program, training=False)
    for inputs in INPUTS[program.bodies[-1].arguments]:
        if len(inputs) < len(program.inputs):
            yield replace(program, inputs=inputs)


def shrink(program: Program, still_fails: Callable[[Program], bool], most: int = 400) -> Program:
    """Drop parts of a program as long as it fails; at most so many trials."""
    trials = 0
    while True:
        for candidate in smaller(program):
            trials += 1
            if trials > most:
                return program
            if still_fails(candidate):
                program = candidate
                break
        else:
            return program
