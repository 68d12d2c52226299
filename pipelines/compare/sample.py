"""The sample of the images that a comparison with `--budget` uses, the same one in each run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from extract.errors import InputError
from extract.extraction.several import Member, costs_of
from extract.images import Images

__all__ = ["Sample", "sample_for"]

_LEAST = 100  # images; fewer say little


@dataclass(frozen=True)
class Sample:
    """A random sample of images.

    Attributes:
        images: number of images in the sample.
        of: number of images that it was drawn from.
        seed: seed of the draw.
    """

    images: int
    of: int
    seed: int

    def drawn_from(self, images: Images) -> Images:
        """Return the sample of the images, in order.

        Raises:
            InputError: there are more or fewer images than when the sample was drawn.
        """
        if len(images) != self.of:
            raise InputError(
                f"the sample of this comparison was drawn from {self.of:,} images, and there are now {len(images):,}",
                hint="compare the same images, or name another folder with -o",
            )
        rows = np.random.default_rng(self.seed).choice(self.of, self.images, replace=False)
        return images.select(sorted(rows.tolist()))

    @classmethod
    def of_json(cls, content: Any) -> Sample | None:
        """Return the sample that was recorded in compare.json; None without a valid one."""
        try:
            sample = cls(**{name: int(content[name]) for name in asdict(cls(0, 0, 0))})
        except (KeyError, TypeError, ValueError):
            return None
        return sample if 0 < sample.images <= sample.of and sample.seed >= 0 else None


def sample_for(
    images: Images,
    members: Sequence[Member],
    budget_s: float,
    seed: int,
    say: Callable[[str], None],
    stop: Callable[[], bool],
) -> Sample | None:
    """Measure the backbones, and return a sample whose features take the given time; None if all images do.

    Args:
        images: listed images.
        members: the extractions.
        budget_s: seconds.
        seed: seed of the draw.
        say: receives the result in words.
        stop: see `costs_of`.

    Raises:
        InputError: the time is not enough for 100 images, or for all if there are fewer.
    """
    costs = costs_of(images, members, seed, stop)
    if stop() or costs.fixed_s + len(images) * costs.image_s <= budget_s:
        return None
    count, least = int((budget_s - costs.fixed_s) / costs.image_s), min(_LEAST, len(images))
    if count < least:
        raise InputError(
            f"--budget: {budget_s:g} s are not enough: loading the backbones takes about {costs.fixed_s:,.0f} s, "
            f"and {least} images take {least * costs.image_s:,.0f} s",
            hint="allow more time, or compare fewer backbones",
        )
    say(f"sample    {count:,} of {len(images):,} images, {1e3 * costs.image_s:,.1f} ms for each with all backbones")
    return Sample(count, len(images), seed)
