"""Six tasks with hooks, in five libraries; each answer is compared with that of plain torch code.

    python -m benchmarks.taps_compared [LIBRARY ...]

The libraries are Taps, baukit, nnsight, torchvision (`create_feature_extractor`, a torch.fx graph) and TorchLens. Each
runs in its own process, because nnsight and TorchLens patch torch. A library that is not installed is skipped, and the
command that installs it is printed. docs/taps-compared.md holds the printed table and explains it.

A method of a library's class is its code for one task. Blank lines, the signature and imports do not count as lines of
code. `TASK__NAME` is other code for the same task: often the first attempt of a user, which may be wrong.
"""

# ruff: noqa: RET504, N805  nnsight takes the code of its `with` blocks apart, and a `return` there ends the method

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import models
from torchvision.models.feature_extraction import create_feature_extractor

from layertap import Taps
from layertap.edits import scale

TOLERANCE = 1e-5  # of the largest value of the reference; libraries compute in the same float32


class WithTaps:
    """Taps."""

    module, package, install = "layertap", "layertap", "pip install -e ."

    def one_layer(model, images, layer):
        with Taps(model, layer) as taps:
            taps(images)
        return taps.record[layer]

    def by_pattern(model, images, pattern):
        with Taps(model, pattern) as taps:
            taps(images)
        return dict(taps.record)

    def gradient(model, images):
        with Taps(model).keep("layer1.0.bn1", "grad") as taps:
            taps(images)[:, 0].sum().backward()
        return taps.record["layer1.0.bn1"]

    def edit(model, images):
        with Taps(model, "layer4").edit("layer2", scale(0.5)) as taps:
            output = taps(images)
        return taps.record["layer4"], output

    def attention_timm(model, images):
        with Taps(model).keep("blocks.1.attn", "attention") as taps:
            taps(images)
        return taps.record["blocks.1.attn"]

    def attention_torchvision(model, images):
        with Taps(model).keep("encoder.layers.encoder_layer_1.self_attention", "attention") as taps:
            taps(images)
        return taps.record["encoder.layers.encoder_layer_1.self_attention"]

    def live_loss(model, images, target, layer):
        with Taps(model, stop=True).keep(layer, live=True) as taps:
            taps(images)
        (taps.record[layer] - target).square().mean().backward()
        return images.grad

    def live_loss__copy(model, images, target, layer):
        with Taps(model, stop=True).keep(layer, live=True, reduce=torch.clone) as taps:
            taps(images)
        (taps.record[layer] - target).square().mean().backward()
        return images.grad


class WithBaukit:
    """baukit."""

    module, package = "baukit", "baukit"
    install = "pip install git+https://github.com/davidbau/baukit (it is not in the package index)"

    def one_layer(model, images, layer):
        from baukit import Trace

        with Trace(model, layer, clone=True) as trace:
            model(images)
        return trace.output

    def one_layer__without_clone(model, images, layer):
        from baukit import Trace

        with Trace(model, layer) as trace:
            model(images)
        return trace.output

    def by_pattern(model, images, pattern):
        from baukit import TraceDict, module_names

        names = [name for name in module_names(model) if fnmatch(name, pattern)]
        with TraceDict(model, names, clone=True) as traces:
            model(images)
        return {name: trace.output for name, trace in traces.items()}

    def by_pattern__without_clone(model, images, pattern):
        from baukit import TraceDict, module_names

        with TraceDict(model, [name for name in module_names(model) if fnmatch(name, pattern)]) as traces:
            model(images)
        return {name: trace.output for name, trace in traces.items()}

    def gradient(model, images):
        from baukit import Trace

        with Trace(model, "layer1.0.bn1", retain_grad=True) as trace:
            model(images)[:, 0].sum().backward()
        return trace.output.grad

    def edit(model, images):
        from baukit import TraceDict

        with TraceDict(model, ["layer2", "layer4"], edit_output={"layer2": lambda output: output * 0.5}) as traces:
            output = model(images)
        return traces["layer4"].output, output

    def attention_timm(model, images):
        from baukit import Trace

        model.blocks[1].attn.fused_attn = False
        with Trace(model, "blocks.1.attn.attn_drop") as trace:
            model(images)
        return trace.output

    def attention_timm__fused(model, images):
        from baukit import Trace

        with Trace(model, "blocks.1.attn.attn_drop") as trace:
            model(images)
        return trace.output

    def attention_torchvision(model, images):
        from baukit import Trace

        with Trace(model, "encoder.layers.encoder_layer_1.self_attention", retain_input=True) as trace:
            model(images)
        return model.encoder.layers[1].self_attention(*trace.input, average_attn_weights=False)[1]

    def live_loss(model, images, target, layer):
        from baukit import Trace

        with Trace(model, layer, clone=True, stop=True) as trace:
            model(images)
        (trace.output - target).square().mean().backward()
        return images.grad

    def live_loss__without_clone(model, images, target, layer):
        from baukit import Trace

        with Trace(model, layer) as trace:
            model(images)
        (trace.output - target).square().mean().backward()
        return images.grad

    def live_loss__without_clone_stop(model, images, target, layer):
        from baukit import Trace

        with Trace(model, layer, stop=True) as trace:
            model(images)
        (trace.output - target).square().mean().backward()
        return images.grad


class WithNnsight:
    """nnsight."""

    module, package, install = "nnsight", "nnsight", "pip install nnsight"

    def one_layer(model, images, layer):
        from nnsight import NNsight

        traced = NNsight(model)
        with traced.trace(images):
            output = traced.get(layer).output.clone().save()
        return output

    def one_layer__without_clone(model, images, layer):
        from nnsight import NNsight

        traced = NNsight(model)
        with traced.trace(images):
            output = traced.get(layer).output.save()
        return output

    def by_pattern(model, images, pattern):
        from nnsight import NNsight, save

        traced = NNsight(model)
        names = [name for name, _ in model.named_modules() if fnmatch(name, pattern)]
        with traced.trace(images):
            outputs = save({name: traced.get(name).output.clone() for name in names})
        return outputs

    def by_pattern__cache(model, images, pattern):
        from nnsight import NNsight

        names = [name for name, _ in model.named_modules() if fnmatch(name, pattern)]
        with NNsight(model).trace(images) as tracer:
            cache = tracer.cache(modules=[f"model.{name}" for name in names])
        return {name: cache[f"model.{name}"].output for name in names}

    def gradient(model, images):
        from nnsight import NNsight

        traced = NNsight(model)
        with traced.trace(images):
            normed = traced.layer1[0].bn1.output
            traced.layer1[0].bn1.output = normed.clone()
            with traced.output[:, 0].sum().backward():
                gradient = normed.grad.save()
        return gradient

    def gradient__without_clone(model, images):
        from nnsight import NNsight

        traced = NNsight(model)
        with traced.trace(images):
            normed = traced.layer1[0].bn1.output
            with traced.output[:, 0].sum().backward():
                gradient = normed.grad.save()
        return gradient

    def edit(model, images):
        from nnsight import NNsight, save

        traced = NNsight(model)
        with traced.trace(images):
            traced.layer2.output = traced.layer2.output * 0.5
            outputs = save((traced.layer4.output, traced.output))
        return outputs

    def attention_timm(model, images):
        from nnsight import NNsight

        traced = NNsight(model)
        model.blocks[1].attn.fused_attn = False
        with traced.trace(images):
            weights = traced.blocks[1].attn.attn_drop.output.save()
        return weights

    def attention_timm__fused(model, images):
        from nnsight import NNsight

        traced = NNsight(model)
        with traced.trace(images):
            weights = traced.blocks[1].attn.attn_drop.output.save()
        return weights

    def attention_torchvision(model, images):
        from nnsight import NNsight

        net = NNsight(model)
        with net.trace(images):
            x = net.encoder.layers.encoder_layer_1.ln_1.output
            weights = net.encoder.layers.encoder_layer_1.self_attention(x, x, x, average_attn_weights=False)[1].save()
        return weights

    def live_loss(model, images, target, layer):
        from nnsight import NNsight

        traced = NNsight(model)
        with traced.trace(images):
            features = traced.get(layer).output.clone().save()
        (features - target).square().mean().backward()
        return images.grad

    def live_loss__without_clone(model, images, target, layer):
        from nnsight import NNsight

        traced = NNsight(model)
        with traced.trace(images):
            features = traced.get(layer).output.save()
        (features - target).square().mean().backward()
        return images.grad


class WithTorchvision:
    """torchvision's create_feature_extractor."""

    module, package, install = "torchvision", "torchvision", "pip install torchvision"

    def one_layer(model, images, layer):
        return create_feature_extractor(model, [layer])(images)[layer]

    def by_pattern(model, images, pattern):
        for module in model.modules():
            if isinstance(module, nn.ReLU):
                module.inplace = False
        names = [name for name, _ in model.named_modules() if fnmatch(name, pattern)]
        return create_feature_extractor(model, names)(images)

    def by_pattern__in_place(model, images, pattern):
        names = [name for name, _ in model.named_modules() if fnmatch(name, pattern)]
        return create_feature_extractor(model, names)(images)

    def gradient(model, images):
        for module in model.modules():
            if isinstance(module, nn.ReLU):
                module.inplace = False
        outputs = create_feature_extractor(model, ["layer1.0.bn1", "fc"])(images)
        return torch.autograd.grad(outputs["fc"][:, 0].sum(), outputs["layer1.0.bn1"])[0]

    def gradient__in_place(model, images):
        outputs = create_feature_extractor(model, ["layer1.0.bn1", "fc"])(images)
        return torch.autograd.grad(outputs["fc"][:, 0].sum(), outputs["layer1.0.bn1"])[0]

    def edit(model, images):
        extractor = create_feature_extractor(model, ["layer2", "layer4", "fc"])
        layer2 = extractor.graph.output_node().args[0]["layer2"]
        with extractor.graph.inserting_after(layer2):
            scaled = extractor.graph.call_function(torch.mul, (layer2, 0.5))
        layer2.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
        extractor.recompile()
        outputs = extractor(images)
        return outputs["layer4"], outputs["fc"]

    def attention_timm(model, images):
        model.blocks[1].attn.fused_attn = False
        return create_feature_extractor(model, ["blocks.1.attn.softmax"])(images)["blocks.1.attn.softmax"]

    def attention_timm__fused(model, images):
        return create_feature_extractor(model, ["blocks.1.attn.softmax"])(images)["blocks.1.attn.softmax"]

    def attention_torchvision(model, images):
        x = create_feature_extractor(model, {"encoder.layers.encoder_layer_1.ln": "x"})(images)["x"]
        return model.encoder.layers[1].self_attention(x, x, x, average_attn_weights=False)[1]

    def attention_torchvision__module_name(model, images):
        x = create_feature_extractor(model, {"encoder.layers.encoder_layer_1.ln_1": "x"})(images)["x"]
        return model.encoder.layers[1].self_attention(x, x, x, average_attn_weights=False)[1]

    def live_loss(model, images, target, layer):
        features = create_feature_extractor(model, [layer])(images)[layer]
        (features - target).square().mean().backward()
        return images.grad


class WithTorchLens:
    """TorchLens."""

    module, package, install = "torchlens", "torchlens", "pip install torchlens"

    def one_layer(model, images, layer):
        import torchlens as tl

        return tl.pluck(model, images, layer)

    def by_pattern(model, images, pattern):
        import torchlens as tl

        names = {name: name for name, _ in model.named_modules() if fnmatch(name, pattern)}
        return tl.extract(model, images, names)

    def gradient(model, images):
        import torchlens as tl

        trace = tl.trace(model, images, capture=tl.options.CaptureOptions(save_grads=True))
        trace.log_backward(trace[trace.output_layers[0]].out[:, 0].sum())
        return trace["layer1.0.bn1"].grad

    def edit(model, images):
        import torchlens as tl

        trace = tl.trace(model, images, intervene=tl.when(tl.module("layer2"), tl.scale(0.5)))
        return trace["layer4"].out, trace[trace.output_layers[0]].out

    def attention_timm(model, images):
        import torchlens as tl

        model.blocks[1].attn.fused_attn = False
        return tl.pluck(model, images, "blocks.1.attn.attn_drop")

    def attention_timm__fused(model, images):
        import torchlens as tl

        trace = tl.trace(model, images, reconstruction_ready=True)
        return trace.modules["blocks.1.attn"].facets["pattern"].value

    def attention_timm__own_recipe(model, images):
        import torchlens as tl
        from torchlens.semantic.recipes._helpers import fused_sdpa_pattern

        @tl.facets.register(class_name="Attention", target_scope="module")
        def attention(module):
            return {"pattern": fused_sdpa_pattern(module)}

        trace = tl.trace(model, images, reconstruction_ready=True)
        return trace.modules["blocks.1.attn"].facets["pattern"].value

    def attention_torchvision(model, images):
        import torchlens as tl

        x = tl.pluck(model, images, "encoder.layers.encoder_layer_1.ln_1")
        return model.encoder.layers[1].self_attention(x, x, x, average_attn_weights=False)[1]

    def attention_torchvision__fused(model, images):
        import torchlens as tl

        trace = tl.trace(model, images, reconstruction_ready=True)
        return trace.modules["encoder.layers.encoder_layer_1.self_attention"].facets["pattern"].value

    def live_loss(model, images, target, layer):
        import torchlens as tl

        trace = tl.trace(model, images, save=tl.module(layer), halt=tl.module(layer))
        features = trace.modules[layer].out
        (features - target).square().mean().backward()
        return images.grad


LIBRARIES = {
    "Taps": WithTaps,
    "baukit": WithBaukit,
    "nnsight": WithNnsight,
    "torchvision": WithTorchvision,
    "TorchLens": WithTorchLens,
}

# A tensor, several in an order, or several by name.
Answer = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


def resnet18_values(model: Any, images: Tensor, layer2_factor: float = 1.0) -> dict[str, Tensor]:
    """The values of a ResNet-18, computed without hooks and without in-place functions.

    Args:
        model: a ResNet-18 in evaluation mode.
        images: (B, 3, H, W).
        layer2_factor: what the output of `layer2` is multiplied by.

    Returns:
        Of each batch norm of a block, each block, each stage and `fc`: its output.
    """
    values: dict[str, Tensor] = {}
    h = F.max_pool2d(F.relu(model.bn1(model.conv1(images))), 3, 2, 1)
    for stage in ("layer1", "layer2", "layer3", "layer4"):
        for number, block in enumerate(model.get_submodule(stage)):
            name = f"{stage}.{number}"
            identity = h if block.downsample is None else block.downsample(h)
            values[f"{name}.bn1"] = block.bn1(block.conv1(h))
            values[f"{name}.bn2"] = block.bn2(block.conv2(F.relu(values[f"{name}.bn1"])))
            h = values[name] = F.relu(values[f"{name}.bn2"] + identity)
        if stage == "layer2":
            h = h * layer2_factor
        values[stage] = h
    values["fc"] = model.fc(h.mean((2, 3)))
    return values


def attention_weights(x: Tensor, weight: Tensor, bias: Tensor, heads: int) -> Tensor:
    """Softmax of Q K^T / sqrt(d): (B, heads, T, T) of tokens (B, T, C), for the weight (3 C, C) of Q, K and V."""
    queries, keys, _ = F.linear(x, weight, bias).unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return (queries @ keys.transpose(2, 3) / queries.shape[-1] ** 0.5).softmax(-1)


def reference_one_layer(model: Any, images: Tensor, layer: str) -> Answer:
    return resnet18_values(model, images)[layer]


def reference_by_pattern(model: Any, images: Tensor, pattern: str) -> Answer:
    expression = re.compile(pattern.replace(".", r"\.").replace("?", "."))
    return {name: value for name, value in resnet18_values(model, images).items() if expression.fullmatch(name)}


def reference_gradient(model: Any, images: Tensor) -> Answer:
    values = resnet18_values(model, images)
    return torch.autograd.grad(values["fc"][:, 0].sum(), values["layer1.0.bn1"])[0]


def reference_edit(model: Any, images: Tensor) -> Answer:
    values = resnet18_values(model, images, layer2_factor=0.5)
    return values["layer4"], values["fc"]


def reference_attention_timm(model: Any, images: Tensor) -> Answer:
    x = model.blocks[0](model._pos_embed(model.patch_embed(images)))
    layer = model.blocks[1].attn
    return attention_weights(model.blocks[1].norm1(x), layer.qkv.weight, layer.qkv.bias, layer.num_heads)


def reference_attention_torchvision(model: Any, images: Tensor) -> Answer:
    patches = model.conv_proj(images).flatten(2).transpose(1, 2)
    tokens = torch.cat([model.class_token.expand(len(images), -1, -1), patches], 1)
    block = model.encoder.layers[1]
    x = block.ln_1(model.encoder.layers[0](tokens + model.encoder.pos_embedding))
    layer = block.self_attention
    return attention_weights(x, layer.in_proj_weight, layer.in_proj_bias, layer.num_heads)


def reference_live_loss(model: Any, images: Tensor, target: Tensor, layer: str) -> Answer:
    difference = resnet18_values(model, images)[layer] - target
    return torch.autograd.grad(difference.square().mean(), images)[0]


@dataclasses.dataclass(frozen=True)
class Task:
    """A task: the method that does it, and what it is called with.

    Attributes:
        title: what is to be computed.
        method: the name of the libraries' methods.
        model: the model; each attempt gets a copy.
        arguments: what the method is called with, after the model.
        with_gradients: whether autograd is on.
    """

    title: str
    method: str
    model: nn.Module
    arguments: tuple[Any, ...]
    with_gradients: bool = False

    def fresh_arguments(self) -> list[Any]:
        """Copies of model and arguments, so that no attempt sees what another one left."""
        tensors_copied = [
            argument.detach().clone().requires_grad_(argument.requires_grad)
            if isinstance(argument, Tensor)
            else argument
            for argument in self.arguments
        ]
        return [copy.deepcopy(self.model), *tensors_copied]

    def run(self, code: Callable[..., Any]) -> Answer:
        """The answer of code."""
        with torch.set_grad_enabled(self.with_gradients):
            answer: Answer = code(*self.fresh_arguments())
        return answer

    def reference(self) -> Answer:
        """The answer of plain torch code."""
        return self.run(globals()[f"reference_{self.method}"])


def tasks() -> list[Task]:
    """All tasks, on models with random weights."""
    torch.manual_seed(0)
    resnet = models.resnet18().eval()
    sizes: dict[str, Any] = {"img_size": 32, "depth": 3, "embed_dim": 48, "num_heads": 3}
    timm_vit = timm.create_model("vit_tiny_patch16_224", **sizes).eval()
    torchvision_vit = models.VisionTransformer(32, 16, num_layers=2, num_heads=3, hidden_dim=48, mlp_dim=64).eval()
    images, small = torch.randn(2, 3, 64, 64), torch.randn(2, 3, 32, 32)
    stimulus = images.clone().requires_grad_()
    third, first = torch.randn(2, 256, 4, 4), torch.randn(2, 64, 16, 16)
    return [
        Task("1 output of `layer3`", "one_layer", resnet, (images, "layer3")),
        Task("1b of `layer1.0.bn1`, before an in-place ReLU", "one_layer", resnet, (images, "layer1.0.bn1")),
        Task("2 all blocks: `layer?.?`", "by_pattern", resnet, (images, "layer?.?")),
        Task("2b all batch norms of blocks: `layer?.?.bn?`", "by_pattern", resnet, (images, "layer?.?.bn?")),
        Task("3 gradient at `layer1.0.bn1`", "gradient", resnet, (images,), True),
        Task("4 half of `layer2`: `layer4` and the output", "edit", resnet, (images,)),
        Task("5 attention weights, timm", "attention_timm", timm_vit, (small,)),
        Task("5b attention weights, torchvision", "attention_torchvision", torchvision_vit, (small,)),
        Task("6 gradient of a loss on `layer3` to the image", "live_loss", resnet, (stimulus, third, "layer3"), True),
        Task("6b of a loss on `layer1.0.bn1`", "live_loss", resnet, (stimulus, first, "layer1.0.bn1"), True),
    ]


def largest_difference(answer: Any, reference: Answer) -> float:
    """The largest difference of two answers, relative to the largest value of each tensor of the reference.

    Raises:
        ValueError: the answers are not of the same kind, or hold other names or shapes.
    """
    if isinstance(reference, Tensor):
        answers, references = [answer], [reference]
    elif isinstance(reference, dict):
        if set(answer) != set(reference):
            raise ValueError(f"other names: {sorted(set(answer) ^ set(reference))}")
        answers, references = [answer[name] for name in reference], [*reference.values()]
    else:
        answers, references = [*answer], [*reference]
    if [value.shape for value in answers] != [value.shape for value in references]:
        raise ValueError(f"other shapes: {[tuple(value.shape) for value in answers]}")
    pairs = zip(answers, references, strict=True)
    return max(
        float((value.detach() - right.detach()).abs().max() / right.detach().abs().max()) for value, right in pairs
    )


def source(code: Callable[..., Any]) -> str:
    """The source of a method as a function: without indentation."""
    return textwrap.dedent(inspect.getsource(code))


def count_lines(code: Callable[..., Any]) -> int:
    """The number of lines of a method, without blank lines, signature and imports."""
    lines = [line.strip() for line in source(code).splitlines()[1:]]
    return sum(bool(line) and not line.startswith(("from ", "import ")) for line in lines)


@dataclasses.dataclass(frozen=True)
class Attempt:
    """What came of one method on one task.

    Attributes:
        variant: what stands behind `__` in the name of the method; empty for the method itself.
        lines: lines of code.
        outcome: "right", "wrong" or "error".
        detail: the largest difference, relative to the largest value, or the first line of the error.
    """

    variant: str
    lines: int
    outcome: str
    detail: str


def attempts(library: type, task: Task) -> list[Attempt]:
    """Run all methods of a library for a task."""
    reference = task.reference()
    results = []
    for name in vars(library):
        method, _, variant = name.partition("__")
        if method != task.method or name.startswith("__"):
            continue
        code = getattr(library, name)
        try:
            difference = largest_difference(task.run(code), reference)
        except Exception as error:
            message = str(error.args[0]) if isinstance(error, KeyError) else str(error)
            first_line = next((line for line in message.splitlines() if line.strip()), "")
            outcome, detail = "error", f"{type(error).__name__}: {first_line.strip()}"
        else:
            outcome, detail = "right" if difference <= TOLERANCE else "wrong", f"{difference:.1g}"
        results.append(Attempt(variant.replace("_", " "), count_lines(code), outcome, detail))
    return results


def cell(results: list[Attempt]) -> str:
    """The lines of the shortest right code, as the table shows them; or what came instead."""
    right = [result for result in results if result.outcome == "right"]
    if not right:
        return results[0].outcome if results else "not offered"
    best = min(right, key=lambda result: result.lines)
    return str(best.lines) + ("" if len(right) == len(results) else " *")


def run_in_process(library: str) -> dict[str, list[Attempt]]:
    """Run one library in a process of its own; title of the task -> attempts."""
    command = [sys.executable, "-m", "benchmarks.taps_compared", "--json", library]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    results = json.loads(printed.splitlines()[-1])
    return {title: [Attempt(**fields) for fields in of_task] for title, of_task in results.items()}


def version(library: type) -> str:
    """The version that is installed."""
    try:
        return importlib.metadata.version(library.package)
    except importlib.metadata.PackageNotFoundError:  # on the path only
        return "without a version"


def main(names: list[str]) -> None:
    """Run the libraries, and print the table and each attempt that was not right."""
    titles = [task.title for task in tasks()]
    results: dict[str, dict[str, list[Attempt]]] = {}
    for name in names:
        library = LIBRARIES[name]
        if importlib.util.find_spec(library.module) is None:
            print(f"{name} is skipped: it is not installed. Install it: {library.install}")
            continue
        results[name] = run_in_process(name)
    versions = [f"{name} {version(LIBRARIES[name])}" for name in results]
    print(", ".join(dict.fromkeys(["torch " + torch.__version__, "timm " + timm.__version__, *versions])))
    print()
    print("| " + " | ".join(["task: lines of code", *results]) + " |")
    print("|---" * (1 + len(results)) + "|")
    for title in titles:
        print("| " + " | ".join([title, *(cell(results[name][title]) for name in results)]) + " |")
    print()
    print("*: other code for the task is not right:")
    for title in titles:
        for name in results:
            for result in results[name][title]:
                if result.outcome != "right":
                    code = f"{title.split()[0]} {name}, {result.variant or 'first code'}"
                    print(f"{code}: {result.outcome}, {result.detail}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--json"]:
        warnings.simplefilter("ignore")
        by_task = {task.title: attempts(LIBRARIES[sys.argv[2]], task) for task in tasks()}
        print(json.dumps({title: [dataclasses.asdict(result) for result in done] for title, done in by_task.items()}))
    else:
        main(sys.argv[1:] or [*LIBRARIES])
