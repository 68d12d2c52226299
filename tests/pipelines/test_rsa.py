"""`layertap probe -p rsa`: which image of an RDM or triplet is which row, files of every form, and what is refused."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat
from scipy.spatial.distance import pdist, squareform
from scipy.stats import spearmanr

from extract import FeatureReader, FeatureWriter
from extract.store.export import export
from tests.pipelines.test_cli import fails, succeeds

PATHS = [f"{'ab'[i % 2]}/{i}.png" for i in range(7)]
FAILED = 5
KEPT = [0, 1, 2, 3, 4, 6]
VALUES = {"conv": np.random.default_rng(0).normal(size=(7, 6)), "head": np.random.default_rng(1).normal(size=(7, 5))}
ORDER = np.random.default_rng(2).permutation(7)
SUBJECTS = np.stack([squareform(np.random.default_rng(3 + s).random(21)) for s in range(3)])
CONDENSED = SUBJECTS[:, *np.triu_indices(7, 1)]
IN_ORDER = SUBJECTS[:, ORDER][:, :, ORDER]  # of the images in another order


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven rows with two layers, of which one failed."""
    out = tmp_path_factory.mktemp("rsa") / "out"
    layers = {name: (values.shape[1:], "float32") for name, values in VALUES.items()}
    with FeatureWriter(out, ids=PATHS, layers=layers, identity={"model": "random"}) as writer:
        writer.fail([PATHS[FAILED]], "no picture")
        writer.write([PATHS[i] for i in KEPT], {name: values[KEPT] for name, values in VALUES.items()})
    return out


def expected(layer: str, given: np.ndarray = SUBJECTS) -> float:
    rows = pdist(VALUES[layer][KEPT], "correlation")
    each = [spearmanr(rows, squareform(one[np.ix_(KEPT, KEPT)], checks=False)).statistic for one in given]
    return float(np.mean(each))


def result(out: Path, *options: object) -> dict[str, Any]:
    return json.loads(succeeds("probe", out, "-p", "rsa", *options, "--json").stdout)


def h5(path: Path) -> str:
    with h5py.File(path.with_suffix(".h5"), "w") as file:
        file["g/dissimilarities"], file["g/stimuli"] = IN_ORDER, [PATHS[i] for i in ORDER]
    return f"{path.with_suffix('.h5')}:g/dissimilarities"


def npz(path: Path) -> str:
    np.savez(path, rdm=IN_ORDER.astype(np.float32), names=np.array([PATHS[i].rpartition("/")[2] for i in ORDER]))
    return f"{path}.npz"


def mat(path: Path) -> str:
    cells = np.array([Path(PATHS[i]).stem for i in ORDER], object)
    savemat(path.with_suffix(".mat"), {"rdm": np.moveaxis(IN_ORDER, 0, 2), "images": cells})
    return str(path.with_suffix(".mat"))


def table(path: Path) -> str:
    with path.with_suffix(".csv").open("w", newline="") as file:
        names = [PATHS[i] for i in ORDER]
        csv.writer(file).writerows(
            [["", *names], *([name, *row] for name, row in zip(names, IN_ORDER[0], strict=True))]
        )
    return str(path.with_suffix(".csv"))


def bare(path: Path) -> str:
    np.savetxt(path.with_suffix(".txt"), CONDENSED)
    return str(path.with_suffix(".txt"))


@pytest.fixture(autouse=True)
def _figures_are_made_but_not_drawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "figures" not in request.fixturenames:
        monkeypatch.setattr("pipelines.probe.layer_table.save_figure", lambda figure, path: path)


@pytest.mark.parametrize("form", [h5, npz, mat, table, bare])
def test_files_of_every_form_give_the_correlation_of_the_same_images(
    form: Callable[[Path], str], out: Path, tmp_path: Path
) -> None:
    found = result(out, "--rdm", form(tmp_path / "given"), "-o", tmp_path / "results")
    given = SUBJECTS[:1] if form is table else SUBJECTS
    for line in found["layers"]:
        assert line["spearman"] == pytest.approx(expected(line["layer"], given), abs=1e-6)
    assert np.shape(found["subjects"]) == (2, len(given))
    assert (found["noise_ceiling"][0] is None) == (form is table)


def test_an_export_of_a_layer_is_as_similar_to_it_as_can_be_in_npy_and_in_mat(out: Path, tmp_path: Path) -> None:
    with FeatureReader(out) as reader:
        export(reader, tmp_path / "rdm", "rdm")
        np.testing.assert_array_equal(reader.rdm("conv", condensed=True), condensed_of(reader.rdm("conv")))
    stimuli = ("--stimuli", tmp_path / "rdm" / "rows.csv")
    for options in (("conv.mat",), ("conv.npy",), ("conv.npy", *stimuli)):
        found = result(out, "--rdm", tmp_path / "rdm" / options[0], *options[1:], "-o", tmp_path / "results")
        assert found["layers"][0]["spearman"] == pytest.approx(1)


def test_results_are_a_table_json_and_two_figures(out: Path, tmp_path: Path, figures: None) -> None:
    np.save(tmp_path / "t.npy", [[0, 1, 2], [2, 3, 6]])
    result(out, "--rdm", npz(tmp_path / "given"), "--triplets", tmp_path / "t.npy", "-o", tmp_path / "results")
    names = ["layers.png", "rdms.png", "results.csv", "results.json"]
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == names
    for name in names[:2]:
        assert np.ptp(np.asarray(Image.open(tmp_path / "results" / name).convert("L"))) > 200


def test_paths_of_stimuli_are_not_taken_for_the_ids_of_other_images(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FeatureReader, "ids", property(lambda reader: [Path(path).stem for path in PATHS[::-1]]))
    np.save(tmp_path / "t.npy", SUBJECTS[0])
    for column, paths in (("path", PATHS), ("id", PATHS[::-1])):
        (tmp_path / "s.csv").write_text("\n".join([column, *(Path(path).stem for path in paths)]))
        stimuli = f"{tmp_path / 's.csv'}:{column}"
        found = result(out, "--rdm", tmp_path / "t.npy", "--stimuli", stimuli, "-o", tmp_path / "results")
        assert found["layers"][0]["spearman"] == pytest.approx(expected("conv", SUBJECTS[:1]), abs=1e-6)


def condensed_of(matrix: np.ndarray) -> np.ndarray:
    return matrix[np.triu_indices(len(matrix), 1)]


def test_two_data_sets_are_compared_on_the_images_of_both(out: Path, tmp_path: Path) -> None:
    paths = [PATHS[i] for i in (6, 0, 1, 2, 3)]
    with FeatureWriter(
        tmp_path / "other", ids=paths, layers={"conv": (6, "float32")}, identity={"model": "random"}
    ) as writer:
        writer.write(paths, {"conv": VALUES["conv"][[6, 0, 1, 2, 3]]})
    given = npz(tmp_path / "given")
    printed = succeeds(
        "probe", out, tmp_path / "other", "-p", "rsa", "--rdm", given, "-l", "conv", "-o", tmp_path / "r"
    )
    assert "3 subjects, 5 images, 10 of 10 pairs known" in printed.stdout
    assert "5 of 7 images matched by the file name with the 5 of other" in printed.stdout
    assert "of which 1 failed" in printed.stdout
    assert "its value is descriptive" in printed.stdout
    first, second = csv.DictReader((tmp_path / "r" / "results.csv").open())
    assert first["spearman"] == second["spearman"]
    assert float(second["low"]) < float(second["spearman"]) < float(second["high"])


def test_triplets_of_numbers_and_of_names_are_the_same_choices(out: Path, tmp_path: Path) -> None:
    generator = np.random.default_rng(5)
    triplets = np.array([generator.permutation(7)[:3] for _ in range(60)])
    np.save(tmp_path / "t.npy", triplets)
    np.savetxt(tmp_path / "t.txt", triplets, "%d")
    with (tmp_path / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["one", "two", "odd"], *([PATHS[i] for i in triplet] for triplet in triplets)])
    with (tmp_path / "order.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["path"], *([PATHS[i]] for i in ORDER)])
    np.save(tmp_path / "ordered.npy", np.argsort(ORDER)[triplets])
    used = [triplet for triplet in triplets if FAILED not in triplet]
    near = 1 - squareform(pdist(VALUES["head"].astype(np.float32).astype(float), "cosine"))
    right = np.mean([near[a, b] > max(near[a, odd], near[b, odd]) for a, b, odd in used])
    for name, *more in (["t.npy"], ["t.txt"], ["t.csv"], ["ordered.npy", "--stimuli", tmp_path / "order.csv"]):
        found = result(out, "--triplets", tmp_path / name, *more, "-l", "head", "-o", tmp_path / "results")
        assert found["layers"][0]["odd_one_out"] == pytest.approx(right)
        assert f"{len(used)} of 60 triplets have all images" in found["notes"][-1]
    assert found["layers"][0]["standard_error"] == pytest.approx(np.sqrt(right * (1 - right) / len(used)))


def test_results_of_other_settings_have_another_folder(out: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "given.npy", CONDENSED)
    for by in ("spearman", "cosine", "spearman"):
        succeeds("probe", out, "-p", "rsa", "--rdm", tmp_path / "given.npy", "--compare", by, "-l", "conv")
    assert sorted(path.name for path in (out / "probe").iterdir()) == ["rsa", "rsa-2"]


def save(path: Path, **arrays: Any) -> Path:
    np.savez(path, **{name: np.array(value) for name, value in arrays.items()})
    return path.with_suffix(".npz")


REFUSED: dict[str, tuple[Callable[[Path], list[object]], str]] = {
    "another number of images": (
        lambda path: ["--rdm", save(path, rdm=SUBJECTS[:, :5, :5])],
        "has 5 images, and out 7; name them in their order: --stimuli FILE.csv",
    ),
    "names of no image": (
        lambda path: ["--rdm", save(path, rdm=SUBJECTS, names=[f"other{i}.png" for i in range(7)])],
        "none of its 7 values of 'path' names an image",
    ),
    "a name of two images": (
        lambda path: ["--rdm", save(path, rdm=SUBJECTS, names=["a/0.png", "./a/0.png", *PATHS[2:]])],
        "'a/0.png' and './a/0.png' name the same image",
    ),
    "two images left": (
        lambda path: ["--rdm", save(path, rdm=SUBJECTS, names=[*PATHS[:2], *"vwxyz"])],
        "2 of its images have features; expected 3 to 4,000",
    ),
    "asymmetric": (lambda path: ["--rdm", save(path, rdm=np.triu(SUBJECTS[0]))], "not symmetric: matrix 0, row 0"),
    "constant": (lambda path: ["--rdm", save(path, rdm=1 - np.eye(7))], "the RDM of subject 0 is constant"),
    "several arrays": (lambda path: ["--rdm", save(path, one=SUBJECTS, two=SUBJECTS)], "has one, two; name one: "),
    "two lists of names": (
        lambda path: ["--rdm", save(path, rdm=SUBJECTS, a=PATHS, b=list("abcdefg"))], "2 lists may name its images",
    ),
    "a damaged file": (lambda path: ["--rdm", damaged(path)], "given.npz cannot be read as arrays: "),
    "no such file": (lambda path: ["--rdm", path.with_suffix(".npy")], "given.npy: no such file"),
    "a triplet with an image twice": (
        lambda path: ["--triplets", written(path, "0 1 2\n3 4 3\n")], "triplet 1, from 0, has an image twice: 3, 4, 3",
    ),
    "a number beyond": (lambda path: ["--triplets", written(path, "1 2 7\n")], "images 1 to 7; expected 0 to 6"),
    "two images in a line": (lambda path: ["--triplets", written(path, "0 1\n")], "(1, 2); expected numbers or names"),
    "uneven lines": (lambda path: ["--triplets", written(path, "0 1 2\n0 1\n")], "is not a table: "),
    "nothing to compare with": (lambda path: [], "rsa needs --rdm FILE or --triplets FILE"),
    "labels": (lambda path: ["--rdm", "x.npy", "--labels", "x.csv"], "--labels is not for rsa"),
}  # fmt: skip


def damaged(path: Path) -> Path:
    file = save(path, rdm=SUBJECTS)
    file.write_bytes(file.read_bytes()[:300])
    return file


def written(path: Path, text: str) -> Path:
    path.with_suffix(".txt").write_text(text)
    return path.with_suffix(".txt")


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compared_is_refused_by_name(case: str, out: Path, tmp_path: Path) -> None:
    options, message = REFUSED[case]
    assert message in fails("probe", out, "-p", "rsa", "-o", tmp_path / "r", *options(tmp_path / "given"))
    assert not (tmp_path / "r").exists()


def test_an_image_without_a_direction_in_a_layer_is_named(out: Path, tmp_path: Path) -> None:
    about = {"model": "random"}
    with FeatureWriter(tmp_path / "flat", ids=PATHS, layers={"relu": (4, "float32")}, identity=about) as writer:
        writer.write(PATHS, {"relu": np.vstack([np.zeros((1, 4)), VALUES["head"][1:, :4]])})
    np.save(tmp_path / "given.npy", SUBJECTS)
    np.save(tmp_path / "t.npy", [[0, 1, 2]])
    for metric, options in (("correlation", ("--rdm", "given.npy")), ("cosine", ("--triplets", "t.npy"))):
        message = fails("probe", tmp_path / "flat", "-p", "rsa", options[0], tmp_path / options[1])
        assert f"relu of flat: a/0.png has no {metric} with others: its values are all equal" in message


def test_numbers_of_rows_and_columns_in_a_table_are_not_dissimilarities(out: Path, tmp_path: Path) -> None:
    with (tmp_path / "numbered.csv").open("w", newline="") as file:  # as pandas writes it
        csv.writer(file).writerows([["", *range(7)], *([i, *row] for i, row in enumerate(SUBJECTS[0]))])
    found = result(out, "--rdm", tmp_path / "numbered.csv", "-l", "conv", "-o", tmp_path / "r")
    assert found["layers"][0]["spearman"] == pytest.approx(expected("conv", SUBJECTS[:1]))
