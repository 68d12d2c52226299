"""Where the published weights of a backbone are, or would be downloaded from; nothing is loaded or downloaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["WeightsFile", "in_cache_of_hub", "in_cache_of_torch"]


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
    import torch

    path = Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
    return path if path.is_file() else None
