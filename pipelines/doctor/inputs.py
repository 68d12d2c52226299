"""Checks of what a run reads: images and a backbone."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import PurePosixPath

from extract import defaults
from extract.errors import first_line
from pipelines.doctor.check import Section
from pipelines.terminal.text_output import printable

__all__ = ["check_backbone", "check_images"]

_SAMPLED = 10  # images that are decoded


def check_images(section: Section, where: str) -> None:
    """List the images and decode ten of them, spread evenly over the list.

    Raises:
        LayertapError: they cannot be listed, or no image can be decoded on this machine.
    """
    from extract.images.decoding import check_decoders
    from extract.images.listing import list_images

    check_decoders()
    start = time.perf_counter()
    images = list_images(where)
    listed_s = time.perf_counter() - start
    section.facts.update(root=images.root, count=len(images), listed_s=round(listed_s, 3))
    section.ok(f"{len(images):,} images in {printable(images.root)}, listed in {listed_s:.1f} s")
    if images.left_out:
        kinds = ", ".join(f"{printable(kind)} {count:,}" for kind, count in images.left_out.most_common(5))
        section.note(f"{images.left_out.total():,} other files are left out ({kinds})")

    count = min(_SAMPLED, len(images))
    sizes, suffixes, failures, seconds = [], Counter[str](), [], 0.0
    for row in dict.fromkeys(len(images) * number // count for number in range(count)):
        path = images.slice(row, row + 1).paths[0]
        start = time.perf_counter()
        try:
            size = images.source.decode(images.source.read(row)[0], defaults.MAX_PIXELS).size
        except (OSError, ValueError) as error:
            failures.append({"path": path, "reason": getattr(error, "strerror", None) or first_line(error)})
            continue
        seconds += time.perf_counter() - start
        sizes.append(size)
        suffixes[PurePosixPath(path).suffix.lower() or "no suffix"] += 1
    section.facts.update(decoded=len(sizes), sizes=sizes, suffixes=dict(suffixes), seconds=round(seconds, 4))
    section.facts["failures"] = failures
    if sizes:
        kinds = ", ".join(f"{number} {suffix}" for suffix, number in suffixes.most_common())
        (narrow, low), (wide, high) = min(sizes), max(sizes)
        pixels = f"{narrow}x{low}" if min(sizes) == max(sizes) else f"{narrow}x{low} to {wide}x{high}"
        rate = f"{1000 * seconds / len(sizes):.1f} ms an image on one core"
        section.ok(f"{len(sizes)} of {count} sampled images are decoded ({kinds}), {pixels} pixels, {rate}")
    for failure in failures:
        section.wrong(f"{printable(failure['path'])} cannot be decoded: {failure['reason']}")
    if failures:
        last = section.lines.pop()
        section.wrong(last.text, "replace such files; `layertap embed` stores an error status for each, and continues")


def check_backbone(section: Section, spec: str) -> None:
    """Check whether the weights of a backbone are on this machine, or where they would be downloaded from.

    Raises:
        LayertapError: the backbone does not exist, or its library is missing.
    """
    from huggingface_hub import constants

    from extract.backbones.loading import locate_weights
    from extract.backbones.reachability import why_unreachable

    section.facts["spec"] = spec
    weights = locate_weights(spec)
    if weights is None:
        section.note(f"{spec}: its own code loads the weights, and is not run here")
        return
    section.facts.update(weights=weights.name, path=str(weights.path) if weights.path else None, url=weights.url)
    if weights.path is not None:
        section.ok(f"weights of {spec} are on this machine: {weights.path}")
    elif not weights.url:
        section.wrong(
            f"weights of {spec} are not on this machine, and are not published", "give a file: --weights FILE"
        )
    elif weights.from_hub and constants.HF_HUB_OFFLINE:
        section.wrong(
            f"weights of {spec} are not on this machine, and HF_HUB_OFFLINE forbids a download from {weights.url}",
            "unset HF_HUB_OFFLINE, or give a file: --weights FILE",
        )
    elif reason := why_unreachable(weights.url):
        section.wrong(
            f"weights of {spec} are not on this machine, and {reason}",
            f"download {weights.url} on another machine, and give the file: --weights FILE",
        )
    else:
        section.note(f"weights of {spec} are not on this machine; the first run downloads them from {weights.url}")
