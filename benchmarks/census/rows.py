"""Compare what `find_batch_axis` says about rows with other pictures in another order."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from benchmarks.census.gradients import agree
from benchmarks.census.values import names_of
from extract import Taps
from extract.errors import InputError
from extract.taps.batch_axis import BatchAxis, Trial
from extract.taps.record import Record, Site

if TYPE_CHECKING:
    from benchmarks.census.comparison import Report

MOST_LAYERS = 60
# Largest difference, relative to the largest value: batches of other sizes are rounded otherwise, layer after layer.
# Where that is exceeded, the rows are compared in double precision.
TOLERANCE, TOLERANCE_OF_DOUBLE = 2e-3, 1e-6


def compare_rows(model: nn.Module, pictures: Tensor, report: Report) -> None:
    """Find the rows of up to 60 layers with three pictures; check them with five others, permuted."""
    names = [name for texts in names_of(model).values() for name in texts[:1] if name]
    step = max(1, -(-len(names) // MOST_LAYERS))
    layers = names[step - 1 :: step]
    generator = torch.Generator().manual_seed(2)
    trial = Trial(
        model, torch.randn(3, *pictures.shape[1:], generator=generator), [(name, "output") for name in layers]
    )
    accepted: dict[Site, BatchAxis] = {}
    refused: list[Site] = []
    for site in trial.record.sites.values():
        try:
            accepted[site] = trial.rows(site)
        except InputError as error:
            report.refused[f"rows: {_reason(error)}"] += 1
            refused.append(site)
    others = torch.randn(5, *pictures.shape[1:], generator=generator)
    order = torch.randperm(5, generator=generator)
    batches = [others[order], *(others[i : i + 1] for i in order)]
    wrong = _wrong_rows(model, batches, accepted, TOLERANCE)
    if wrong:
        with contextlib.suppress(RuntimeError):  # a model may contain float32 constants
            double = copy.deepcopy(model).double()
            wrong = _wrong_rows(double, [batch.double() for batch in batches], wrong, TOLERANCE_OF_DOUBLE)
    report.compare("rows", wrong, len(accepted))
    report.compare("refusals of rows", _needlessly_refused(model, batches, refused), len(refused))


def _reason(error: InputError) -> str:
    text = re.sub(r"\(\d[\d, ]*\)|\(\)", "(...)", str(error))
    text = re.sub(r"\d+ rows", "N rows", text)
    return text.replace("(...) for 3 images and (...) for 1", "of shapes that do not follow the number of images")


def _wrong_rows(
    model: nn.Module, batches: list[Tensor], accepted: dict[Site, BatchAxis], tolerance: float
) -> dict[Site, BatchAxis]:
    """Return the sites whose rows in the first batch differ from what the pictures in the others give alone."""
    if not accepted:
        return {}
    together, *alone = _records(model, batches, accepted)
    return {site: rows for site, rows in accepted.items() if not _are_rows(site, rows, together, alone, tolerance)}


def _needlessly_refused(model: nn.Module, batches: list[Tensor], refused: list[Site]) -> list[Site]:
    """Return the sites whose outputs for the pictures alone, put together on some axis, are that for the batch.

    Where that is so in another order, too, the pictures cannot be told apart.
    """
    if not refused:
        return []
    together, *alone = _records(model, batches, refused)
    return [
        site
        for site in refused
        if all(site in record.sites.values() for record in (together, *alone))
        and _are_put_together(together[site], [record[site] for record in alone])
    ]


def _are_put_together(together: Tensor, alone: list[Tensor]) -> bool:
    if not together.is_floating_point() or len({tensor.shape for tensor in alone}) > 1:
        return False
    return any(
        agree(together, torch.cat(alone, axis), TOLERANCE)
        and not agree(together, torch.cat([*alone[1:], alone[0]], axis), TOLERANCE)
        for axis in range(alone[0].ndim)
    )


def _records(model: nn.Module, batches: list[Tensor], sites: Iterable[Site]) -> list[Record]:
    """Return what the layers of the sites return for each batch."""
    records = []
    with torch.no_grad(), Taps(model).keep(sorted({site.layer for site in sites})) as taps:
        for batch in batches:
            taps(batch.clone())
            records.append(taps.record)
    return records


def _are_rows(site: Site, rows: BatchAxis, together: Record, alone: list[Record], tolerance: float) -> bool:
    """Whether each row of the batch is what its picture gives alone; the index is written out, without layertap."""
    values = together[site]
    for position, record in enumerate(alone):
        own = values.narrow(rows.axis, position * rows.per_image, rows.per_image)
        if not agree(own, record[site], tolerance):
            return False
    return values.shape[rows.axis] == len(alone) * rows.per_image
