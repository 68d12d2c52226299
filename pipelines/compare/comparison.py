"""What a comparison of backbones has found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from extract.analysis.probe.metrics import LEVEL
from extract.analysis.similarity import FeatureSimilarity

__all__ = ["Compared", "Comparison", "Disputed", "Score", "Task"]


@dataclass
class Score:
    """How good a backbone is in a task.

    Attributes:
        layer: its best layer on validation images, or on folds of the training images.
        value: metric of this layer on the test images.
        low, high: 95 % interval of it.
        chosen_by: metric on these images, by which the layer was chosen; None if there were too few for it.
        behind: metric of the best backbone minus this one; None for the best one.
        p: corrected p-value of the difference to the best backbone; None for the best one.
    """

    layer: str
    value: float
    low: float
    high: float
    chosen_by: float | None = None
    behind: float | None = None
    p: float | None = None


@dataclass(frozen=True)
class Disputed:
    """A test image on which backbones disagree.

    Attributes:
        row: row of the data sets.
        path: path of the image.
        label: its class.
        share: share of the pairs of backbones that predict different classes.
        predictions: (backbone, predicted class) of each backbone.
    """

    row: int
    path: str
    label: str
    share: float
    predictions: list[tuple[str, str]]


@dataclass(frozen=True)
class Task:
    """Labels that backbones are compared by.

    Attributes:
        name: name of the task; "labels" if it is the only one and has no name.
        metric: metric that the backbones are compared by.
        n_test: number of test images.
        chosen_on: images on which layers were chosen, in words; empty: there was no choice.
        scores: backbone -> its score, the best one first.
        layers: of each feature that was probed: backbone, layer, value, low, high, chosen_by, chosen.
        disputed: the test images on which backbones disagree most.
        notes: warnings.
    """

    name: str
    metric: str
    n_test: int
    chosen_on: str
    scores: dict[str, Score]
    layers: list[dict[str, Any]]
    disputed: list[Disputed]
    notes: list[str]


@dataclass
class Compared:
    """A backbone of a comparison. Numbers are None where they are not known.

    Attributes:
        name: name of the backbone and of its data set.
        backbone: spec.
        weights: source of the weights.
        layer: its best layer; with several tasks, the layer that is best in most of them.
        rank: average rank over several tasks, 1 for the best; None with one task or without labels.
        value, low, high, chosen_by, behind: see `Score`, of the only task; None with several.
        p: corrected p-value of the difference to the best backbone; None for the best one.
        images_per_s: rate of the forwards in this comparison, with images in memory.
        parameters: number of parameters.
        width: values of the layer for an image.
        row_bytes: bytes of the layer for an image.
        licence: licence of the weights, if their source states it.
        effective_rank: see `FeatureSimilarity`.
        alignment: mean of `FeatureSimilarity.mutual_knn` with the best layers of all other backbones.
        error: why the backbone could not be compared; empty: it was.
    """

    name: str
    backbone: str
    weights: str = ""
    layer: str = ""
    rank: float | None = None
    value: float | None = None
    low: float | None = None
    high: float | None = None
    chosen_by: float | None = None
    behind: float | None = None
    p: float | None = None
    images_per_s: float | None = None
    parameters: int | None = None
    width: int | None = None
    row_bytes: int | None = None
    licence: str = ""
    effective_rank: float | None = None
    alignment: float | None = None
    error: str = ""

    @property
    def is_distinguishable(self) -> bool | None:
        """Whether it differs from the best backbone; None for the best one, or without labels."""
        return None if self.p is None else self.p <= LEVEL


@dataclass
class Comparison:
    """Result of a comparison.

    Attributes:
        backbones: the best one first; those with errors last.
        protocol: protocol of the probe; empty without labels.
        n_images: number of images.
        tasks: one, several, or, without labels, none.
        critical_difference: difference of average ranks from which backbones are distinguishable; None without
            several tasks and backbones.
        features: (backbone, layer) of each row and column of `similarity`.
        similarity: how similar features are; None if fewer than two can be compared.
        no_similarity_reason: why it is None.
        notes: warnings.
        signal: number of the signal that stopped the run; 0: none.
    """

    backbones: list[Compared]
    protocol: str = ""
    n_images: int = 0
    tasks: list[Task] = field(default_factory=list)
    critical_difference: float | None = None
    features: list[tuple[str, str]] = field(default_factory=list)
    similarity: FeatureSimilarity | None = None
    no_similarity_reason: str = ""
    notes: list[str] = field(default_factory=list)
    signal: int = 0

    @property
    def best(self) -> Compared:
        """The best backbone; without labels, the first that could be compared."""
        return next(entry for entry in self.backbones if not entry.error)

    @property
    def table(self) -> list[dict[str, Any]]:
        """A line for each backbone, the best one first: the columns of backbones.csv. `pandas.DataFrame` takes it."""
        # A type that depends on whether pandas is installed would break code on another machine.
        metrics = {f"{task.name} {task.metric}": task for task in self.tasks} if len(self.tasks) > 1 else {}
        return [
            asdict(entry)
            | {
                column: task.scores[entry.name].value if entry.name in task.scores else None
                for column, task in metrics.items()
            }
            | {"distinguishable": entry.is_distinguishable}
            for entry in self.backbones
        ]

    @property
    def only_task(self) -> Task | None:
        """The task, if there is only one."""
        return self.tasks[0] if len(self.tasks) == 1 else None

    def __repr__(self) -> str:
        return f"<Comparison of {len(self.backbones)} backbones on {self.n_images:,} images>"
