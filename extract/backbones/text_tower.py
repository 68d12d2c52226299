"""The text tower of a model with an image tower; both map to vectors in the same space.

It takes a third to a half of the memory of a CLIP model, so only a search loads it, with the weights whose hash the
data set records: cosines between two checkpoints of one architecture look plausible, but mean nothing.
"""

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
        spec: the requested spec.
        architecture: architecture of the backbone that is the image tower.
        weights_sha256: hash of that backbone's weights; embeddings from other weights are not in the same space.
        model: the model that contains the tower.
        tokens_of: maps a text to the tokens that `embed` takes, (1, T) each; raises the error of `too_long`.
        embed: maps the model and tokens, (B, T) each, to features (B, D).
        device: device of the model.
    """

    spec: str
    architecture: str
    weights_sha256: str
    model: nn.Module
    tokens_of: Callable[[str], dict[str, Tensor]]
    embed: Callable[[Any, dict[str, Tensor]], Tensor]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def features(self, texts: str | Sequence[str]) -> NDArray[np.float32]:
        """Compute features of texts, not normalised; compare them with image embeddings by cosine similarity.

        Args:
            texts: a text or several texts.

        Returns:
            (number of texts, D) float32.

        Raises:
            InputError: there is no text, or a text is empty or longer than the model reads.
        """
        text_list = [texts] if isinstance(texts, str) else list(texts)
        if not text_list or not all(text.strip() for text in text_list):
            raise InputError("a text is empty" if text_list else "no texts were given")
        tokens = [self.tokens_of(text) for text in text_list]
        blocks = []
        with torch.inference_mode(), full_float32():
            for first in range(0, len(tokens), defaults.BATCH_SIZE):
                chunk = tokens[first : first + defaults.BATCH_SIZE]
                batch = {name: torch.cat([encoded[name] for encoded in chunk]).to(self.device) for name in chunk[0]}
                blocks.append(self.embed(self.model, batch).float().cpu().numpy())
        return np.concatenate(blocks)


def too_long(text: str, limit: int) -> InputError:
    """Return the error for a text of which the tower would read only the beginning."""
    shown = text if len(text) <= 60 else text[:57] + "..."
    return InputError(
        f"the text {shown!r} has more than {limit} tokens, the limit of the model", hint="shorten the text"
    )
