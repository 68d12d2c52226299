"""What `layertap findings` finds of duplicates and wrong labels that were planted, beside imagededup and cleanlab.

    python -m benchmarks.planted_findings duplicates|labels CIFAR_FOLDER RESULT.json

CIFAR_FOLDER has folders of classes, as `layertap embed` reads them. Duplicates: 100 pictures of each kind are planted
among 5,000. Found is a planted picture that is in one group with its original; false are pictures in groups without a
planted one. CIFAR has duplicates of its own, so not all of these are mistakes. Labels: 2, 5 and 10 % are exchanged for
another class. Each library is used if it is installed.
"""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from benchmarks.common import parser
from extract import extract_features
from extract.analysis.probe.feature_matrix import FeatureRows
from extract.analysis.row_findings import confident_classes, findings, left_out_probabilities

IMAGES, PLANTED = 5_000, 100


def _encoded(picture: Image.Image, quality: int) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def _cropped(picture: Image.Image, share: float) -> Image.Image:
    width, height = picture.size
    return picture.crop((0, 0, round(width * (1 - share)), round(height * (1 - share))))


CHANGES: dict[str, Callable[[Path], bytes]] = {
    "copied": lambda path: path.read_bytes(),
    "re-encoded, quality 75": lambda path: _encoded(Image.open(path), 75),
    "re-encoded, quality 30": lambda path: _encoded(Image.open(path), 30),
    "cropped by 5 %": lambda path: _encoded(_cropped(Image.open(path), 0.05), 95),
    "cropped by 15 %": lambda path: _encoded(_cropped(Image.open(path), 0.15), 95),
    "mirrored": lambda path: _encoded(ImageOps.mirror(Image.open(path)), 95),
    "twice as large": lambda path: _encoded(ImageOps.scale(Image.open(path), 2), 95),
    "half as large": lambda path: _encoded(ImageOps.scale(Image.open(path), 0.5), 95),
}


def plant(source: Path, folder: Path) -> dict[str, tuple[str, str]]:
    """Write the pictures; return name of each planted one -> (kind, name of its original)."""
    rng = np.random.default_rng(0)
    files = sorted(path for path in source.rglob("*") if path.is_file())
    chosen = [files[i] for i in sorted(rng.permutation(len(files))[:IMAGES])]
    folder.mkdir()
    names = [f"{number:05}.jpg" for number in range(len(chosen))]
    for path, name in zip(chosen, names, strict=True):
        shutil.copy(path, folder / name)
    originals, planted = iter(rng.permutation(len(chosen)).tolist()), dict[str, tuple[str, str]]()
    for number, (kind, change) in enumerate(CHANGES.items()):
        for i in range(PLANTED):
            original, name = names[next(originals)], f"{90_000 + 1_000 * number + i}.jpg"
            (folder / name).write_bytes(change(folder / original))
            planted[name] = kind, original
    return planted


def scored(groups: Iterable[set[str]], planted: dict[str, tuple[str, str]]) -> dict[str, int]:
    """Return kind -> number of planted pictures that are in a group with their original; and false pictures."""
    counts = dict.fromkeys([*CHANGES, "false"], 0)
    known = set(planted) | {original for _, original in planted.values()}
    for group in groups:
        counts["false"] += len(group - known)
        for name in group & set(planted):
            kind, original = planted[name]
            counts[kind] += original in group
    return counts


def duplicates(source: Path, folder: Path) -> dict[str, Any]:
    """Return what each program finds of the planted duplicates."""
    planted = plant(source, folder / "images")
    result: dict[str, Any] = {}
    with extract_features(folder / "images", out=folder / "out", progress=False) as reader:
        groups = defaultdict[tuple[str, int | None], set[str]](set)
        for found in findings(reader, kinds=("copy", "near-duplicate")):
            groups[found.kind[:4], found.group].add(found.path)
        result["layertap"] = scored(groups.values(), planted)
    if find_spec("imagededup"):
        from imagededup.methods import CNN, PHash

        methods = {"imagededup PHash, distance 10": (PHash, {}), "imagededup CNN, cosine 0.9": (CNN, {})}
        for name, (method, options) in methods.items():
            try:
                pairs = method().find_duplicates(image_dir=str(folder / "images"), **options)
            except OSError as error:  # the weights of its network are downloaded
                result[name] = f"not measured: {error}"
                continue
            result[name] = scored(({key, *others} for key, others in pairs.items() if others), planted)
            of_original = {n for n, (_, original) in planted.items() if n in pairs[original]}
            for kind in CHANGES:  # each has a list of its own
                result[name][kind] = sum(n in of_original for n, (its, _) in planted.items() if its == kind)
            lonely = {key for key, others in pairs.items() if others} - set(planted) - {o for _, o in planted.values()}
            result[name]["false"] = len(lonely)
    if find_spec("fastdup"):
        result["fastdup, similarity 0.9"] = scored(_groups_of_fastdup(folder), planted)
    return result


def _groups_of_fastdup(folder: Path) -> list[set[str]]:
    import fastdup

    fast = fastdup.create(work_dir=str(folder / "fastdup"), input_dir=str(folder / "images"))
    fast.run(ccthreshold=0.9, overwrite=True)
    by_number = fast.connected_components()[0].groupby("component_id")["filename"]
    groups = ({Path(name).name for name in names} for _, names in by_number)
    return [group for group in groups if len(group) > 1]


def average_precision(doubts: NDArray[Any], wrong: NDArray[np.bool_]) -> float:
    """Area under the curve of precision and recall, of a ranking."""
    ranked = wrong[np.argsort(-doubts, kind="stable")]
    return float((np.cumsum(ranked) / np.arange(1, len(ranked) + 1))[ranked].mean())


def wrong_labels(source: Path, folder: Path) -> list[dict[str, Any]]:
    """Return precision and recall at the number of planted labels, and average precision, for each share."""
    rows = []
    with extract_features(source, out=folder / "labelled", progress=False) as reader:
        features, truth = FeatureRows.of(reader["embedding"]), reader.labels.astype(np.int64)
        n_classes = len(reader.classes)
        for share in (0.02, 0.05, 0.10):
            rng = np.random.default_rng(int(1000 * share))
            labels, wrong = truth.copy(), np.zeros(len(truth), np.bool_)
            wrong[rng.permutation(len(truth))[: round(share * len(truth))]] = True
            labels[wrong] = (labels[wrong] + rng.integers(1, n_classes, wrong.sum())) % n_classes
            probabilities = left_out_probabilities(features, labels, np.arange(len(labels)))
            doubts = {"layertap": 1 - probabilities[np.arange(len(labels)), labels]}
            suspect = {"layertap": np.flatnonzero(confident_classes(probabilities, labels) != labels)}
            if find_spec("cleanlab"):
                from cleanlab.filter import find_label_issues
                from cleanlab.rank import get_label_quality_scores
                from sklearn.linear_model import LogisticRegression
                from sklearn.model_selection import cross_val_predict

                own = cross_val_predict(
                    LogisticRegression(max_iter=1000), reader["embedding"][:], labels, cv=5, method="predict_proba"
                )
                both = {"cleanlab, the same probabilities": probabilities, "cleanlab, scikit-learn's": own}
                for name, values in both.items():
                    doubts[name] = 1 - get_label_quality_scores(labels, values)
                    suspect[name] = np.flatnonzero(find_label_issues(labels, values))
            for name, values in doubts.items():
                first = np.argsort(-values, kind="stable")[: wrong.sum()]
                listed = suspect[name]
                rows.append({
                    "share": share, "program": name, "planted": int(wrong.sum()),
                    "average precision": round(average_precision(values, wrong), 4),
                    "precision and recall at the planted number": round(float(wrong[first].mean()), 4),
                    "listed": len(listed), "of them planted": int(wrong[listed].sum()),
                })  # fmt: skip
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure, print, and write the result."""
    arguments = parser(__doc__)
    arguments.add_argument("what", choices=("duplicates", "labels"))
    arguments.add_argument("cifar", type=Path)
    arguments.add_argument("result", type=Path)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as name:
        measure: Callable[[Path, Path], Any] = duplicates if given.what == "duplicates" else wrong_labels
        result = measure(given.cifar, Path(name))
    print(json.dumps(result, indent=1))
    given.result.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
