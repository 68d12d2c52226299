"""The folder of a data set: its description, its finished and unfinished shards, and its lock.

`dataset.json` is written once, before the first shard, and not changed afterwards, unless layers are added:

    format, format_version
    fingerprint      sha256 of `depends_on`
    depends_on       what the features depend on: weights, architecture, layers, preprocessing, precision, decoder
    features         name, shape, dtype, attributes of each
    images           root, count, paths_xxh3: xxh3-128 of the sorted paths, labels_xxh3: of labels, splits, classes and
                     ids; merged_from: of a merged data set, root, count and paths_xxh3 of its sources
    shard_rows       rows in every shard but the last
    version          only in a data set of `layertap sync`, which has no shards of its own; see `version.py`. Each new
                     version replaces the file

A run that adds layers writes whole shards, with the old features and the new, to a folder `shards-` with the first 16
digits of the new fingerprint. When all are there, `dataset.json` is replaced, which publishes them; then the old shards
are removed, and the folder is renamed to `shards`. At each moment, the shards of a fingerprint are those in the folder
with its name, or in `shards` if there is none, so a run may be killed at any time.

Readers ignore unknown keys. `runs.jsonl` has a line "started" for each run that wrote to the data set, with versions
and machine, a line "computing" when its first batch has been compared, and a line "ended" if the run ended normally.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import reprlib
from collections.abc import Container, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from extract.credentials import without_credentials
from extract.errors import InputError, LayertapError, LockedError, OtherFeaturesError, system_errors_as
from extract.row_status import Status
from extract.store.format.differences import changes, differences
from extract.store.format.layout import (
    AXES_FOLDER,
    AXES_NAMES,
    CHANGES_VERSION,
    FORMAT,
    FORMAT_VERSION,
    READABLE_VERSIONS,
    VERSIONS_TEXT,
    Identity,
    StoredFeature,
    feature_types,
    row_bytes,
)
from extract.store.format.schemas import DESCRIPTION, FORMAT_NAMES
from extract.store.format.shard import Shard
from extract.store.format.value_types import STORED_TYPES
from extract.store.format.version import RowTable, Version, pass_folder, read_rows
from extract.system.atomic_files import TOKEN, append_line, discard, locked, own_folder, sync_folder, write_json
from extract.system.json_files import check_shape, read_json
from extract.system.similar_paths import did_you_mean, folders_with

__all__ = [
    "BUILDING",
    "UNFINISHED_HINT",
    "DataSet",
    "ShardFiles",
    "check_usable",
    "fingerprint_of",
    "remove_strays",
    "shard_rows_for",
    "stem_of",
]

# A shard is the unit that a crash can damage, that is copied, and that one machine works on at a time.
_SHARD_BYTES = 1_000_000_000
_SHARD_ROWS = 1 << 22  # limit for small features: more paths would make opening a shard slow
_SHARDS = 1_000_000  # shard names have six digits
_DESCRIPTION_BYTES = 1 << 24  # limit of `dataset.json`; one with a hundred features has 50 kB
UNFINISHED_HINT = (
    "run the command that created the data set again to finish it; in Python, FeatureReader(..., partial=True) reads "
    "the rows that are stored"
)
BUILDING = ".building"  # folder in which several processes of one machine build shards before publishing them


def fingerprint_of(depends_on: dict[str, Any]) -> str:
    """Return the sha256 of the JSON text with sorted keys."""
    return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()


def stem_of(shard: int, revision: int) -> str:
    """Return the stem of the names of a shard's files: 000000, or 000000-r1 for revision 1."""
    return f"{shard:06d}-r{revision}" if revision else f"{shard:06d}"


def shard_rows_for(features: Sequence[StoredFeature]) -> int:
    """Return the rows of a shard of at most 1 GB and 2**22 rows, at least 1."""
    return min(_SHARD_ROWS, max(1, _SHARD_BYTES // max(1, row_bytes(features))))


def check_usable(out: Path) -> None:
    """Check that a folder holds a data set, or that one can be created there; nothing is written.

    Raises:
        InputError: the path is a file, or the folder holds other files.
    """
    if out.is_file():
        raise InputError(f"{out} is a file", hint="name a folder for the output")
    if out.is_dir() and not (out / "dataset.json").exists() and any(_is_foreign(entry) for entry in out.iterdir()):
        raise InputError(f"{out} is not empty and not a layertap data set", hint="choose another output folder")


@dataclass(frozen=True)
class ShardFiles:
    """Files of a shard, by revision: the number of times it was rewritten to fill failed or damaged rows.

    Attributes:
        published: revision of the finished file; None if there is none.
        part: revision of the unfinished file, which will replace the finished file; None if there is none.
    """

    published: int | None = None
    part: int | None = None


@dataclass(frozen=True)
class DataSet:
    """Content of `dataset.json` in the folder `out`."""

    out: Path
    depends_on: dict[str, Any]
    features: list[StoredFeature]
    images: dict[str, Any]
    shard_rows: int
    version: Version | None = None

    @cached_property
    def fingerprint(self) -> str:
        """Hash of `depends_on`, stored in each shard; rows with different fingerprints are never mixed."""
        return fingerprint_of(self.depends_on)

    @property
    def shards(self) -> Path:
        """Folder of the shards; it has another name while layers are added."""
        return self._shards_with_layers if self._shards_with_layers.is_dir() else self.out / "shards"

    @cached_property
    def _shards_with_layers(self) -> Path:
        return self.out / f"shards-{self.fingerprint[:16]}"

    @property
    def n_rows(self) -> int:
        """Rows of the data set."""
        return int(self.images["count"])

    @property
    def n_shards(self) -> int:
        """Number of shards when complete; 0 for a data set with a version, whose passes have the shards."""
        return 0 if self.version else -(-self.n_rows // self.shard_rows)

    @property
    def has_rows(self) -> bool:
        """Whether there is a file of a shard, finished, unfinished or set aside as damaged, or a published version."""
        damaged = self.shards.glob("*.damaged*")
        return self.version is not None or any(self.files()) or any(damaged)

    def data_sets_with_shards(self) -> list[DataSet]:
        """Return the data sets that have the shards: this data set, or the passes of its version.

        Raises:
            InputError: a pass is missing, or has other features.
        """
        if self.version is None:
            return [self]
        passes = [DataSet.open(pass_folder(self.out, number)) for number in self.version.passes]
        for dataset in passes:
            same = feature_types(dataset.features) == feature_types(self.features)
            if not same or dataset.depends_on != self.depends_on or dataset.version:
                raise InputError(f"{dataset.out} is not a pass of {self.out}: it holds other features")
        return passes

    def version_rows(self) -> RowTable:
        """Read the table of the published version; raises the errors of `read_rows`."""
        assert self.version is not None
        return read_rows(self.out, self.version, self.n_rows)

    def path(self, shard: int, revision: int = 0, *, part: bool = False) -> Path:
        """Return the path of a shard's file: 000000.h5, or 000000-r1.h5 for revision 1; a part ends in .part."""
        # A new name, because file and receipt of the old one must match at every moment, also for readers of the old.
        return self.shards / f"{stem_of(shard, revision)}.h5{'.part' if part else ''}"

    def shard_files(self) -> list[ShardFiles]:
        """Return the files of each shard; of several revisions, which a killed run may leave, the last one."""
        published: dict[int, int] = {}
        parts: dict[int, int] = {}
        for shard, revision, part, _ in self.files():
            revisions = parts if part else published
            revisions[shard] = max(revision, revisions.get(shard, 0))
        # A part of the published revision, or of an earlier one, is what a killed run left.
        writing = {shard: part for shard, part in parts.items() if part > published.get(shard, -1)}
        return [ShardFiles(published.get(shard), writing.get(shard)) for shard in range(self.n_shards)]

    def current(self, shard: int, files: ShardFiles) -> Path | None:
        """Return the file with the rows of a shard: the finished file, otherwise the part; None if there is neither."""
        if files.published is not None:
            return self.path(shard, files.published)
        return None if files.part is None else self.path(shard, files.part, part=True)

    def published(self) -> list[Path | None]:
        """Return the finished file of each shard; None for a shard without one."""
        return [
            None if files.published is None else self.path(shard, files.published)
            for shard, files in enumerate(self.shard_files())
        ]

    def files(self) -> Iterator[tuple[int, int, bool, Path]]:
        """Yield (shard, revision, whether it is a part, path) of each file of a shard.

        Raises:
            LayertapError: the folder of the shards cannot be read.
        """
        yield from _files(self.shards)

    def shard_range(self, shard: int) -> range:
        """Return the rows of a shard."""
        return range(shard * self.shard_rows, min((shard + 1) * self.shard_rows, self.n_rows))

    def identity(self, shard: int) -> Identity:
        """Return the attributes of a shard's file."""
        rows = self.shard_range(shard)
        return Identity(shard, rows.start, len(rows), self.fingerprint, self.images["paths_xxh3"])

    def open_shard(self, shard: int, path: Path) -> Shard:
        """Open a file as a shard of this data set.

        Raises:
            InputError: the file is another shard; or see `Shard`.
            LayertapError: see `Shard`.
        """
        opened = Shard(path)
        self.check_shard(shard, opened)
        return opened

    def check_shard(self, shard: int, opened: Shard) -> None:
        """Check that an open file is this shard of this data set.

        Raises:
            InputError: the file is another shard, or has other features.
        """
        actual = {**vars(opened.identity), "features": feature_types(opened.features)}
        expected = {**vars(self.identity(shard)), "features": feature_types(self.features)}
        for name, is_now, must_be in changes(actual, expected):
            raise InputError(
                f"{opened.name} is not shard {shard} of this data set: its {name!r} is {is_now}, expected {must_be}"
            )

    @classmethod
    def open(cls, out: Path) -> DataSet:
        """Read `dataset.json`.

        Raises:
            InputError: there is no data set, or its description is damaged or of a later format.
            LayertapError: the file cannot be read.
        """
        path = out / "dataset.json"
        try:
            content = read_json(path, most_bytes=_DESCRIPTION_BYTES)
        except (FileNotFoundError, NotADirectoryError) as error:
            missing = "is not a layertap data set: it has no dataset.json" if out.exists() else "does not exist"
            elsewhere = (out.parent if out.name == path.name else out, "outputs" / Path(out.name))
            near = [folder for folder in elsewhere if folder != out and (folder / path.name).is_file()]
            hint = f"did you mean {near[0]}?" if near else did_you_mean(out) or folders_with(out, path.name)
            raise InputError(f"{out} {missing}", hint=hint) from error
        return cls.from_content(content, out, path)

    @classmethod
    def from_content(cls, content: dict[str, Any], out: Path, path: Path | str) -> DataSet:
        """Return the data set for the content of a `dataset.json`; `path` is its name for errors.

        Raises:
            InputError: the content is damaged, or of a later format.
        """
        check_shape(content, path, FORMAT_NAMES)
        if content["format"] != FORMAT or content["format_version"] not in (*READABLE_VERSIONS, CHANGES_VERSION):
            stored = reprlib.repr(content["format"]), reprlib.repr(content["format_version"])
            raise InputError(
                f"{path} has format {stored[0]}, format_version {stored[1]}; this version of layertap reads "
                f"format {FORMAT!r}, format_version {VERSIONS_TEXT} or {CHANGES_VERSION}"
            )
        check_shape(content, path, DESCRIPTION)
        try:
            features = [_feature(feature) for feature in content["features"]]
            images, shard_rows = dict(content["images"]), content["shard_rows"]
            images["root"] = without_credentials(images["root"])  # earlier versions stored URLs as they were given
            version = Version.of(content["version"]) if "version" in content else None
            if len({feature.name for feature in features}) < max(1, len(features)):
                raise ValueError("it has no features, or two features with the same name")
            if images["count"] < (0 if version else 1) or shard_rows < 1:
                raise ValueError(f"{images['count']:,} rows in shards of {shard_rows:,}")
            dataset = cls(out, content["depends_on"], features, images, shard_rows, version)
            if dataset.n_shards > _SHARDS:
                raise ValueError(f"{dataset.n_shards:,} shards; at most {_SHARDS:,} are supported")
            if content["fingerprint"] != dataset.fingerprint:
                raise ValueError("the fingerprint does not match the content")
            return dataset
        except ValueError as error:
            raise InputError(f"{path} is damaged: {error}") from error

    def check(self) -> DataSet | None:
        """Return the existing data set, if rows of this data set can be added to it; nothing is written.

        The result is None if the folder has no data set, or a different data set without shards, which may be replaced.

        Raises:
            InputError: the folder holds another data set (the error lists the differences), or other files; or there
                would be more shards than six digits can number.
        """
        self.check_size()
        check_usable(self.out)
        if (self.out / "dataset.json").exists():
            existing = DataSet.open(self.out)
            return existing if self.check_compatible(existing, self.out, replaceable=not existing.has_rows) else None
        return None

    def check_size(self) -> None:
        """Check that six digits can number the shards.

        Raises:
            InputError: there are too many shards.
        """
        if self.n_shards > _SHARDS:
            raise InputError(
                f"{self.n_shards:,} shards are too many; shard_rows must be at least {-(-self.n_rows // _SHARDS):,}"
            )

    def check_compatible(self, existing: DataSet, location: Path | str, *, replaceable: bool) -> bool:
        """Return whether rows of this data set can be added to `existing`; False if it may be replaced instead.

        Args:
            existing: the existing data set.
            location: its folder or URL, for errors.
            replaceable: whether it may be replaced if it differs, because it has no rows to lose.

        Raises:
            InputError: it differs and may not be replaced (the error lists the differences), or it is a data set of
                `layertap sync`.
        """
        if existing.version:
            raise InputError(
                f"{location} is kept in sync with {existing.images['root']} by `layertap sync`",
                hint="choose another output folder",
            )
        # `embed` would assign classes by the folders of the merged data set; the sources may have named them otherwise.
        if ("merged_from" in existing.images) != ("merged_from" in self.images) and not replaceable:
            raise InputError(
                f"{location} {'is' if 'merged_from' in existing.images else 'is not'} a merged data set",
                hint="run the command that created it, or choose another output folder",
            )
        changed = existing._differences(self)
        if changed and not replaceable:
            raise OtherFeaturesError(
                f"{location} holds other features; rows with these differences cannot be mixed:\n  "
                + "\n  ".join(changed),
                hint="choose another output folder, or delete this one",
                only_layers=self._differs_in_layers(existing),
            )
        return not changed

    def _differs_in_layers(self, existing: DataSet) -> bool:
        """Whether a data set is complete, and differs in features only, which have other names and no axes to fit."""
        of_both = {feature.name for feature in self.features} & {feature.name for feature in existing.features}
        parts = [dataset.with_features(of_both) for dataset in (self, existing)]
        is_complete = all(files.published is not None and files.part is None for files in existing.shard_files())
        needs_axes = any("axes not fitted" in text for text in self.depends_on.get("features", {}).values())
        return is_complete and not needs_axes and not parts[0]._differences(parts[1])

    def with_features(self, names: Container[str]) -> DataSet:
        """Return a description without the features that have other names."""
        kept = {name: text for name, text in self.depends_on.get("features", {}).items() if name in names}
        return replace(
            self,
            depends_on={**self.depends_on, "features": kept},
            features=[feature for feature in self.features if feature.name in names],
        )

    def open_or_create(self, *, has_added: bool = False) -> DataSet | None:
        """Create the data set in the folder unless it exists, and remove leftovers; return the result of `check`.

        The caller holds the lock. With `has_added`, this data set is complete, and replaces the one without its layers.

        Raises:
            InputError: see `check`; or a folder in it is a link to elsewhere.
            LayertapError: the folder cannot be written to.
        """
        existing = None if has_added else self.check()
        with system_errors_as(f"cannot write to {self.out}"):
            self.out.mkdir(parents=True, exist_ok=True)
            own_folder(self.shards)
            if existing is None:
                self.write()
                sync_folder(self.out.parent)
            self._clean()
        return existing

    def begin_to_add(self, existing: DataSet) -> None:
        """Create the folder of the shards of this data set, which has more features than the existing one in its place.

        The caller holds the lock.

        Raises:
            LockedError: the existing data set was replaced meanwhile.
            InputError: see `open_or_create`.
            LayertapError: the folder cannot be written to.
        """
        if DataSet.open(self.out) != existing:
            raise LockedError(f"another process has changed {self.out}", hint="run again")
        with system_errors_as(f"cannot write to {self.out}"):
            own_folder(self._shards_with_layers)

    def _move_shards(self) -> None:
        """Remove the shards that lack the layers of `dataset.json`, and give the others their place."""
        old, new = self.out / "shards", self._shards_with_layers
        # A copy of the folder may have it from a time at which layers were being added, beside shards with all of them.
        has_all = None in self.published() and any(self._is_complete(shard, path) for shard, _, _, path in _files(old))
        if has_all:
            _remove_shards(new, old)
        else:
            if old.exists():  # or a run was killed after it removed it
                _remove_shards(old, new)
            new.rename(old)
        for left in self.out.glob("shards-" + "[0-9a-f]" * 16):  # layers that were not added to the end
            if left.is_dir():
                _remove_shards(left, old)
        sync_folder(self.out)

    def write(self, path: Path | None = None) -> None:
        """Write `dataset.json` (at `path` if given); for a data set with a version, this publishes the version."""
        write_json(path or self.out / "dataset.json", self.content())

    def content(self) -> dict[str, Any]:
        """Return the content of `dataset.json`."""
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "fingerprint": self.fingerprint,
            "depends_on": self.depends_on,
            "features": [asdict(feature) for feature in self.features],
            "images": self.images,
            "shard_rows": self.shard_rows,
            **({"version": asdict(self.version)} if self.version else {}),
        }

    def _differences(self, other: DataSet) -> list[str]:
        def compared(dataset: DataSet) -> dict[str, Any]:
            # The image folder may move: whether the images are the same is checked on their bytes.
            left_out = {"root"}
            if not all("labels_xxh3" in images for images in (self.images, other.images)):  # older data sets have none
                left_out.add("labels_xxh3")
            images = {name: value for name, value in dataset.images.items() if name not in left_out}
            # With different row counts, shard_rows may differ only because of the count.
            row_cut = {"shard_rows": dataset.shard_rows} if self.n_rows == other.n_rows else {}
            return {**dataset.depends_on, "images": images, **row_cut}

        return differences(compared(self), compared(other))

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Context manager: lock the data set for writing; see `extract.system.atomic_files.locked`."""
        return locked(self.out)

    def _clean(self) -> None:
        """Remove unfinished temporary files of interrupted runs, and files that a later revision has replaced."""
        remove_strays(self.out)
        if self._shards_with_layers.is_dir():
            self._move_shards()
        remove_strays(self.shards)
        published = [files.published for files in self.shard_files()]
        complete: dict[int, bool] = {}
        for shard, revision, part, path in self.files():
            last = published[shard] if shard < len(published) else None
            # A part of the published revision is a second name of it: a run was killed between link and unlink.
            if last is None or revision > last or (revision == last and not part):
                continue
            if shard not in complete:  # the name alone is not enough to remove a file
                complete[shard] = self._is_complete(shard, self.path(shard, last))
            if complete[shard]:
                path.unlink() if part else self.withdraw(path)
        for receipt in self.shards.glob("*-r*.json"):  # the shard was removed by hand
            if not receipt.with_suffix(".h5").exists() and not receipt.with_suffix(".h5.part").exists():
                receipt.unlink()

    def _is_complete(self, shard: int, path: Path) -> bool:
        try:
            with self.open_shard(shard, path) as opened:
                return bool((opened.column("status") != Status.PENDING).all())
        except LayertapError:
            return False

    @staticmethod
    def withdraw(path: Path) -> None:
        """Remove a replaced shard and its receipt."""
        path.with_suffix(".json").unlink(missing_ok=True)
        path.unlink(missing_ok=True)  # last: if this run is killed before, the next run finds the file and removes it

    def add_run(self, run: dict[str, Any]) -> None:
        """Append a line to `runs.jsonl`."""
        path = self.out / "runs.jsonl"
        with system_errors_as(f"cannot write to {path}"):
            append_line(path, json.dumps(run))


def _files(shards: Path) -> Iterator[tuple[int, int, bool, Path]]:
    try:
        entries = list(shards.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise LayertapError(f"cannot read {shards}: {error.strerror}") from error
    for entry in entries:
        if name := re.fullmatch(r"(\d{6})(?:-r([1-9]\d{0,5}))?\.h5(\.part)?", entry.name, re.ASCII):
            yield int(name[1]), int(name[2] or 0), bool(name[3]), entry


def _remove_shards(folder: Path, other: Path) -> None:
    """Remove a folder with its shards and receipts; all else, such as a damaged shard, moves to another folder."""
    for entry in folder.iterdir():
        is_of_shard = re.fullmatch(r"\d{6}(-r\d+)?\.(h5|h5\.part|json)", entry.name, re.ASCII)
        if is_of_shard or _is_stray(entry):
            entry.unlink()
        else:
            entry.rename(other / entry.name)
    folder.rmdir()


def remove_strays(folder: Path) -> None:
    """Remove temporary files of killed runs from a locked data set, or from its folder `shards`."""
    for entry in folder.iterdir():
        if _is_stray(entry):
            discard(entry)


def _feature(content: dict[str, Any]) -> StoredFeature:
    name, shape, dtype, attributes = (content[key] for key in ("name", "shape", "dtype", "attributes"))
    sides = all(0 < side < 1 << 40 for side in shape)
    if not sides or dtype not in STORED_TYPES or not name or "/" in name:
        raise ValueError(f"invalid description of feature {name[:80]!r}")
    return StoredFeature(name, tuple(shape), dtype, attributes)


def _is_foreign(entry: Path) -> bool:
    """Return whether a file in an output folder was not left by a layertap run that was killed early."""
    if entry.name == "shards" and entry.is_dir():
        return any(not _is_stray(inner) for inner in entry.iterdir())
    if entry.name == AXES_FOLDER and entry.is_dir():
        return any(not AXES_NAMES.match(inner.name) for inner in entry.iterdir())
    being_begun = re.fullmatch(r"dataset\.json(\..*\.new)?", entry.name)  # another worker is writing it
    return entry.name not in (".lock", BUILDING) and not being_begun and not _is_stray(entry)


def _is_stray(entry: Path) -> bool:
    """Return whether a file is a temporary file of a run that was killed."""
    return entry.is_file() and bool(
        re.fullmatch(rf"(dataset\.json|\d{{6}}[-.].*)\.(\d+|packed|{TOKEN})\.new", entry.name, re.ASCII)
    )
