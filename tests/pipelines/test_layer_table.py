from __future__ import annotations

import torch
from torch import Tensor, nn
from torchvision import models

from extract.taps.layer_names import named_layers
from pipelines.network.listing import LayerRow, layer_table


def table(model: nn.Module, *layers: str, size: int = 64, operations: bool = False) -> dict[str, LayerRow]:
    names = layers or list(named_layers(model))
    rows = layer_table(model.eval(), torch.randn(2, 3, size, size), names, operations=operations)
    return {row.name: row for row in rows}


def test_shapes_bytes_calls_and_parameters_of_resnet() -> None:
    model = models.resnet18()
    rows = table(model, operations=True)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert rows["layer2"].shapes == {"": (128, 8, 8)}
    assert rows["layer2"].bytes == 128 * 8 * 8 * 4
    assert rows["layer2"].parameters == sum(p.numel() for p in model.layer2.parameters())
    assert rows["layer2"].notes == []
    assert rows["layer1.0.relu"].calls == 2
    assert rows["layer1.0.relu"].bytes == 2 * 64 * 16 * 16 * 4
    assert rows["layer1.0.relu"].notes == ["runs 2 times: layer1.0.relu#0 to layer1.0.relu#1"]
    assert rows["layer1.0/add"].shapes == {"": (64, 16, 16)}
    assert rows["/flatten"].shapes == {"": (512,)}
    assert not any(name.startswith("conv1/") for name in rows)


def test_every_layer_of_the_model_is_listed_in_order_and_the_model_is_left_as_it_was() -> None:
    model = models.resnet18()
    assert list(table(model, size=32)) == [name for name, _ in model.named_modules() if name]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.never, self.flips, self.windows, self.first = (nn.Identity() for _ in range(4))
        self.lstm, self.attn = nn.LSTM(3, 5, batch_first=True), nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        self.flips(x.flip(0).mean((2, 3)))
        self.windows(x.reshape(-1, 3, 32, 32))
        self.first(x.mean(3).permute(2, 0, 1))
        self.lstm(x.mean(3).transpose(1, 2))
        tokens = x.mean((2, 3))[:, :, None].expand(-1, -1, 4)
        return self.attn(tokens, tokens, tokens)[0]


def test_notes_tell_where_a_hook_cannot_be_trusted() -> None:
    rows = table(Odd())
    notes = {name: row.notes for name, row in rows.items()}
    assert notes["never"] == ["never called, or returns no tensor"]
    assert notes["flips"] == ["its rows are not the images"]
    assert notes["windows"] == ["4 rows per image"]
    assert notes["first"] == ["the batch is on axis 1"]
    assert notes["lstm"] == ["1.0: the batch is on axis 1", "1.1: the batch is on axis 1"]
    assert notes["attn.out_proj"] == ["never called: nn.MultiheadAttention uses its weights directly"]
    assert rows["lstm"].shapes == {"0": (64, 5), "1.0": (1, 5), "1.1": (1, 5)}
    assert rows["windows"].shapes == {"": (4, 3, 32, 32)}
