"""Configuration of `layertap probe`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, field_validator, model_validator

from extract import defaults
from extract.extraction.settings import RARE
from pipelines.terminal.config import FROZEN

__all__ = ["OF_TASKS", "LinearIsClip", "ProbeConfig"]

T = TypeVar("T")
_OF_SIMILARITY = {"out", "layers", "without", "seed", "similarity", "format", "results", "device", "max_memory_mb"}
# Options of some tasks alone; "rsa" and "encoding" take no labels, and have the options of `_OF_SIMILARITY`.
OF_TASKS = {
    "segmentation": ("masks", "class_names", "ignore_label"),
    "depth": ("depth", "max_depth"),
    "rsa": ("rdm", "triplets", "stimuli", "compare"),
    "encoding": ("targets", "stimuli", "fit", "folds", "partition", "draws", "group"),
}
# Results name the protocol of the literature.
LinearIsClip = Annotated[T, BeforeValidator(lambda name: "clip" if name == "linear" else name)]


class ProbeConfig(BaseModel):
    """Configuration of `layertap probe`."""

    model_config = FROZEN

    out: list[str] = Field(min_length=1, description="Data sets of `layertap embed`.")
    layers: list[str] | None = Field(
        None,
        min_length=1,
        description="May be repeated; globs allowed; a+b concatenates two layers. [default: all stored layers]",
    )
    protocol: LinearIsClip[Literal[
        "linear", "clip", "simclr", "dinov2-logreg", "knn", "centroid", "fewshot", "ridge", "segmentation",
        "segmentation-knn", "depth", "rsa", "encoding",
    ]] = Field(
        "clip", description="Classifier or regression, and how its hyperparameter is chosen; linear, the usual one, is "
        "clip.",
    )  # fmt: skip
    labels: str | None = Field(
        None,
        description="FILE.csv[:COLUMN], a table of images; column `label` if omitted. [default: the data set's own]",
    )
    masks: str | None = Field(
        None,
        description="For segmentation: folder of masks with the names of the images, or FILE.csv[:COLUMN] of mask "
        "files (column `mask` if omitted).",
    )
    class_names: Annotated[Path | None, RARE] = Field(
        None, description="FILE.csv with columns `id` and `name` of the classes in masks. [default: their numbers]"
    )
    ignore_label: Annotated[list[Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]] | None, RARE] = Field(
        None, description="Another label of pixels without a class in masks than 255. May be repeated."
    )
    depth: str | None = Field(
        None,
        description="For depth: folder of depth maps with the names of the images, or FILE.csv[:COLUMN] of their files "
        "(column `depth` if omitted).",
    )
    max_depth: float | None = Field(
        None, gt=0, description="Larger depths are left out, in the unit of the files. [default: none]"
    )
    rdm: str | None = Field(
        None,
        description="For rsa: .npy, .npz, .h5:NAME, .mat or .csv of dissimilarities of images, (N, N) or condensed, or "
        "of subjects x either.",
    )
    triplets: str | None = Field(
        None, description="For rsa: .npy, .csv or .txt of odd-one-out choices, three images each, the odd one last."
    )
    stimuli: str | None = Field(
        None,
        description="FILE.csv[:COLUMN] of images in the order of --rdm or --targets, and of numbers in --triplets; "
        "column `path` if omitted. [default: the names in these files, or the rows of the data set]",
    )
    compare: Literal["spearman", "kendall", "cosine", "whitened"] = Field(
        "spearman", description="For rsa: how dissimilarities are compared."
    )
    targets: str | None = Field(
        None, description="For encoding: responses, as .npy, .npz, .h5:NAME, .mat or FILE.csv[:COLUMN,COLUMN]."
    )
    fit: Literal["ridge", "banded", "pls"] = Field(
        "ridge", description="For encoding; banded: the parts of a+b have weights; pls: 25 components."
    )
    folds: int = Field(5, strict=True, ge=3, description="For encoding: number of folds.")
    partition: bool = Field(False, description="For encoding: unique and shared variance of two layers.")
    draws: Annotated[int, RARE] = Field(
        1000, strict=True, ge=0, le=10_000, description="For encoding: draws of bootstrap and permutations."
    )
    multilabel: bool = Field(False, description="Images have any number of labels, separated by |.")
    group: str | None = Field(
        None,
        description="Column of the data set, `id`, or FILE.csv[:COLUMN], such as of patients: images with the same "
        "value are never both trained and tested on, as parts of one file never are.",
    )
    test_fraction: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Fraction to draw for testing. [default: the data set's splits, or 0.2 if it has none]",
    )
    without: str | None = Field(
        None, description="Leave out the images that this file names, such as a table of `layertap findings -o`."
    )
    drop_leaks: bool = Field(
        False, description="Drop training images whose bytes, file or group are also in val or test."
    )
    scaling: Literal["none", "l2", "standardise"] | None = Field(
        None, description="Scaling of the features. [default: the protocol's own]"
    )
    class_weight: Literal["balanced"] | None = Field(None, description="Weigh each class the same.")
    seed: int = Field(defaults.SEED, strict=True, ge=0, lt=1 << 32, description="Seed of random choices.")
    similarity: bool = Field(
        False, description="Instead, compare the layers with each other, without labels: linear CKA and RSA."
    )
    format: Literal["png", "pdf", "svg"] = Field("png", description="Format of the figures.")
    results: Path | None = Field(
        None, description="Folder of the results. [default: OUT/probe/PROTOCOL, or PROTOCOL-2 for other settings]"
    )
    save: Path | None = Field(None, description="Save the probe of a single layer, for `layertap predict`.")
    device: str = Field(defaults.DEVICE, description="auto, cpu, cuda, cuda:N or mps.")
    max_memory_mb: Annotated[int | None, RARE] = Field(
        None,
        strict=True,
        ge=64,
        description="Limit in MB; larger features are streamed. [default: half of the free memory]",
    )

    @model_validator(mode="after")
    def _check_task(self) -> Self:
        if self.similarity and (unused := sorted(self.model_fields_set - _OF_SIMILARITY)):
            option = unused[0].replace("_", "-")
            raise ValueError(f"--{option} is for probes, and --similarity compares layers in place of probing them")
        if self.multilabel and self.protocol == "ridge":
            raise ValueError("--multilabel: ridge predicts numbers, not labels")
        for name in sorted(self.model_fields_set):
            tasks = [task for task, names in OF_TASKS.items() if name in names and name != "group"]
            if tasks and self.task not in tasks and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"--{name.replace('_', '-')} is for -p {' and '.join(tasks)}, not for {self.protocol}")
        if self.task in ("rsa", "encoding"):
            self._check_brains()
        if not self.is_dense:
            return self
        if self.files is None:
            raise ValueError(f"{self.protocol} needs " + ("--masks" if self.task == "segmentation" else "--depth"))
        for name in ("labels", "multilabel", "scaling", "class_weight"):
            if getattr(self, name):
                raise ValueError(f"--{name.replace('_', '-')} is not for {self.protocol}")
        return self

    def _check_brains(self) -> None:
        known = {*_OF_SIMILARITY, "protocol", *OF_TASKS[self.task]} - {"similarity"}
        if unused := sorted(self.model_fields_set - known):
            raise ValueError(f"--{unused[0].replace('_', '-')} is not for {self.task}")
        is_compared = "compare" in self.model_fields_set
        if self.task == "rsa" and self.rdm is None and (self.triplets is None or is_compared):
            raise ValueError("rsa needs --rdm FILE" + ("" if is_compared else " or --triplets FILE"))
        if self.task == "encoding" and self.targets is None:
            raise ValueError("encoding needs --targets FILE")

    @property
    def task(self) -> str:
        """What is predicted: see `Labelling`."""
        if self.is_dense or self.protocol in ("rsa", "encoding"):
            return self.protocol.partition("-")[0]
        return "regression" if self.protocol == "ridge" else "multilabel" if self.multilabel else "classification"

    @property
    def is_dense(self) -> bool:
        """Whether pixels are predicted from tokens."""
        return self.protocol.partition("-")[0] in ("segmentation", "depth")

    @property
    def files(self) -> str | None:
        """Where the masks or depth maps are."""
        return self.masks if self.task == "segmentation" else self.depth

    @property
    def memory_bytes(self) -> int | None:
        """Limit for the features; None: half of the free memory."""
        return None if self.max_memory_mb is None else self.max_memory_mb << 20

    @field_validator("out", "layers", "ignore_label", mode="before")
    @classmethod
    def _to_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str | int) else value
