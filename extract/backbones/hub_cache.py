"""Models in the local cache of the Hugging Face hub, listed without importing PyTorch."""

from __future__ import annotations

import importlib.util

from extract.system.optional_libraries import library

__all__ = ["names"]


def names(pattern: str) -> list[str]:
    """Return the names of the models in the hub's cache; an exact name is returned as it is, cached or not.

    Raises:
        LayertapError: transformers is not installed.
    """
    if not set("*?[") & set(pattern):
        return [pattern]
    if importlib.util.find_spec("transformers") is None:
        library("transformers", "hf", "hf/")  # raises; importing it takes half a second
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return sorted(repo.repo_id for repo in scan_cache_dir().repos if repo.repo_type == "model")
    except (CacheNotFound, OSError):
        return []
