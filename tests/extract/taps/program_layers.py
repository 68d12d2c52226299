"""Small layers that random programs are made of: each does one thing that is hard to look at without a change."""

from __future__ import annotations

# Name and arguments -> the statements of the forward. `self.last` is None before the first call.
STATEMENTS: dict[str, tuple[str, ...]] = {
    "Pass(x)": ("return x",),
    "DropPath(x)": ("return x * 2 if self.training else x",),
    "View(x)": ("return x.view(x.shape)",),
    "Transpose(x)": ("return x.transpose(0, 1)",),
    "Slice(x)": ("return x[:]",),
    "Expand(x)": ("return x[:1].expand(4, 4)",),
    "Frames(x)": ("return x.reshape(16)[:10].unfold(0, 4, 2)",),
    "Halves(x)": ("return x.chunk(2)",),
    "SplitAndRelu(x)": ("a, b = x.split(2)", "return a, b.relu()"),
    "AddOne(x)": ("return x.add_(1)",),
    "DoubleInPlace(x)": ("x *= 2", "return x"),
    "ZeroSome(x)": ("x[1:2].zero_()", "return x"),
    "ReluInPlaceGivesOther(x)": ("x.clamp_(min=0)", "return x + 1"),
    "NegateGivesView(x)": ("return x.neg_().view(x.shape)",),
    "WritesThroughView(x)": ("x[0].mul_(2)", "return x * 1"),
    "WritesOnly(x)": ("x.mul_(2)",),
    "WritesData(x)": ("x.data.mul_(2)", "return x"),
    "WritesDataGivesOther(x)": ("x.data.add_(1)", "return x + x"),
    "WritesNumpy(x)": ("x.detach().numpy()[0] = 1", "return x * 2"),
    "Add(a, b)": ("return a + b",),
    "AddInto(a, b)": ("a += b", "return a"),
    "WritesSecond(a, b)": ("b.add_(1)", "return a * 2 + b"),
    "WritesFirstGivesSecond(a, b)": ("a.mul_(2)", "return b"),
    "Swap(a, b)": ("return b, a",),
    "Twice(x)": ("y = x * 2", "return y, y"),
    "Cell(x)": ("c = x * 2", "return c.relu(), c"),
    "InputAndOther(x)": ("return x, x + 1, 3",),
    "ToDict(x)": ("return {'a': x, 'b': [x.relu(), (x.view(x.shape),)]}",),
    "FromDict(d)": ("d['a'].add_(1)", "return d['a'] + d['b']"),
    "FromList(values)": ("values[0].mul_(2)", "return values"),
    "Order(x)": ("return x.detach().flatten(1).sum(1).argsort(stable=True)",),
    "Merge(x)": ("return x + x.orig",),
    "Marked(x)": ("return x * getattr(x, 'mark', 1)",),
    "KeepsInput(x)": ("self.held = x", "return x * 2"),
    "KeepsOutput(x)": ("self.held = x * 2", "return self.held"),
    "AddsLastInput(x)": ("y = x * 2 if self.last is None else x + self.last.sum()", "self.last = x", "return y"),
    "IsLast(x)": ("y = x * 3 if x is self.last else x * 2", "self.last = x", "return y"),
    "Total(x)": ("self.buffer += x.detach().sum()", "return x + self.buffer.clone()"),
    "Cache(x, cache)": ("with torch.no_grad(): cache[1:3].add_(x[1:3])", "return x + self.cache.sum()"),
    "GivesCache(x)": ("with torch.no_grad(): self.cache.add_(x)", "return self.cache"),
}
BUFFERS = {"Total": ("buffer", "()"), "Cache": ("cache", "(4, 4)"), "GivesCache": ("cache", "(4, 4)")}  # name, shape


def _source(head: str, statements: tuple[str, ...]) -> str:
    name, _, arguments = head.removesuffix(")").partition("(")
    lines = [f"class {name}(nn.Module):"]
    if any("self.last" in statement for statement in statements):
        lines += ["    last = None", ""]
    if name in BUFFERS:
        buffer, shape = BUFFERS[name]
        lines += ["    def __init__(self):", "        super().__init__()"]
        lines += [f"        self.register_buffer({buffer!r}, torch.zeros({shape}, dtype=torch.float64))", ""]
    lines += [f"    def forward(self, {arguments}):", *(f"        {statement}" for statement in statements), ""]
    return "\n".join(lines)


# Name -> the class, as text.
LIBRARY = {head.partition("(")[0]: _source(head, statements) for head, statements in STATEMENTS.items()}
