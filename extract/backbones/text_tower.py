"""The text tower of a model that has one beside its image tower: texts and images become vectors of one space."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from extract import defaults
from extract.errors import InputError
from extract.system.torch_state import full_float32

__all__ = ["TextTower", "too_long"]


@dataclass(frozen=True)
class TextTower:
    """A text tower, ready to run: in eval mode, on its device.

    Attributes:
        spec: as it was asked for.
        architecture: of the backbone whose image tower it stands beside.
        weights_sha256: of that backbone: its embeddings are of the same space, those of other weights are not.
        model: that has the tower.
        tokens_of: one text -> its tokens, as `embed` takes them, (1, T) each; raises what `too_long` gives.
        embed: the model and tokens, each (B, T) -> (B, D).
        device: where it runs.
    """

    spec: str
    architecture: str
    weights_sha256: str
    model: nn.Module
    tokens_of: Callable[[str], dict[str, Tensor]]
    embed: Callable[[Any, dict[str, Tensor]], Tensor]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def features(self, texts: str | Sequence[str]) -> NDArray[np.float32]:
        """(T, D) features of texts, to be compared with embeddings of images by cosine; not normalised.

        Args:
            texts: one or several.

        Raises:
            InputError: there are none, or one is empty, or longer than what the tower reads.
        """
        given = [texts] if isinstance(texts, str) else list(texts)
        if not given or not all(text.strip() for text in given):
            raise InputError("a text is empty" if given else "no texts were given")
        tokens = [self.tokens_of(text) for text in given]
        found = []
        with torch.inference_mode(), full_float32():
            for first in range(0, len(tokens), defaults.BATCH_SIZE):
                some = tokens[first : first + defaults.BATCH_SIZE]
                batch = {name: torch.cat([one[name] for one in some]).to(self.device) for name in some[0]}
                found.append(self.embed(self.model, batch).float().cpu().numpy())
        return np.concatenate(found)


def too_long(text: str, most: int) -> InputError:
    """The error for a text of which the tower would read the beginning only."""
    shown = text if len(text) <= 60 else text[:57] + "..."
    return InputError(f"the text {shown!r} has more tokens than the {most} that the model reads; shorten it")
