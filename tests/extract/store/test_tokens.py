from __future__ import annotations

import itertools
import pickle
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.stats import chi2
from torch.utils.data import DataLoader

from extract import FeatureReader, InputError, UnknownNameError
from extract.store.format.layout import StoredFeature
from extract.store.tokens import token_stream
from extract.store.tokens.token_layout import token_boxes
from tests.extract.store.rows import filled

ROWS, CHANNELS, GRID = 200, 40, (3, 4)
CELLS = GRID[0] * GRID[1]
FAILED = [0, 7, 130]
PREPROCESSING = {"resize_px": 256, "crop_px": [224, 224]}
FEATURES = [
    StoredFeature("vit", (2 + CELLS, CHANNELS), "float32", {"axes": "TC", "grid": "3,4", "prefix": "class,other"}),
    StoredFeature("plain", (CELLS, CHANNELS), "float32", {"axes": "TC", "grid": "3,4"}),
    StoredFeature("last", (*GRID, CHANNELS), "float32", {"axes": "HWC", "grid": "3,4"}),
    StoredFeature("first", (CHANNELS, *GRID), "float32", {"axes": "CHW"}),  # as of earlier versions
    StoredFeature("bytes", (CELLS, CHANNELS), "int8", {"axes": "TC", "grid": "3,4"}),
    StoredFeature("vector", (CHANNELS,), "float32", {"axes": "C"}),
    StoredFeature("old", (2 + CELLS, CHANNELS), "float32", {"axes": "TC"}),
    StoredFeature("wrong", (CELLS, CHANNELS), "float32", {"axes": "TC", "grid": "3,5"}),
]
LAYERS = ["vit", "plain", "last", "first", "bytes"]


def values_of(rows: np.ndarray) -> dict[str, np.ndarray]:
    """Row r, cell c holds 100 r + c in each channel; prefix tokens hold -1."""
    plain = 100 * rows[:, None, None] + np.arange(CELLS)[:, None] + np.zeros(CHANNELS, np.float32)
    plain = plain.astype(np.float32)
    prefixed = np.concatenate([np.full((len(rows), 2, CHANNELS), -1, np.float32), plain], 1)
    last = plain.reshape(-1, *GRID, CHANNELS)
    return {
        "vit": prefixed, "plain": plain, "last": last, "first": np.moveaxis(last, -1, 1), "bytes": plain,
        "vector": plain[:, 0], "old": prefixed, "wrong": plain,
    }  # fmt: skip


def made(folder: Path, compress: str | None = None) -> FeatureReader:
    provenance = {"depends_on": {"preprocessing": PREPROCESSING}}
    how: dict[str, Any] = {"compress": compress, "failed": FAILED, "provenance": provenance}
    return FeatureReader(filled(folder / "out", FEATURES, ROWS, values_of, 70, **how).out)


@pytest.fixture(scope="module", params=[None, "gzip"])
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FeatureReader:
    return made(tmp_path_factory.mktemp("tokens"), request.param)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> FeatureReader:
    """Not compressed, for what does not depend on it."""
    return made(tmp_path_factory.mktemp("plain"))


def numbers(batches: Any, layer: str = "plain") -> list[int]:
    """100 row + cell of each token of some batches, after a look at the values."""
    seen: list[int] = []
    for values, rows, cells in batches:
        expected = 100 * np.asarray(rows) + np.asarray(cells)
        tolerance = 0.5 * 19_911 / 127 if layer == "bytes" else 0
        assert np.abs(np.asarray(values) - expected[:, None]).max() <= tolerance
        seen += expected.tolist()
    return seen


def every(rows: Any = None) -> list[int]:
    rows = [row for row in (range(ROWS) if rows is None else rows) if row not in FAILED]
    return [100 * row + cell for row in rows for cell in range(CELLS)]


@pytest.mark.parametrize("layer", LAYERS)
def test_tokens_are_read_by_number_and_know_their_image_and_cell(reader: FeatureReader, layer: str) -> None:
    tokens = reader.tokens(layer)
    good = np.setdiff1d(np.arange(ROWS), FAILED)
    assert tokens.shape == (len(good) * CELLS, CHANNELS)
    assert (len(tokens), tokens.grid, tokens.per_image) == (len(good) * CELLS, GRID, CELLS)
    assert tokens.prefix == (("class", "other") if layer == "vit" else ())
    chosen = np.array([len(tokens) - 1, 0, 5, 5, 700, -1])
    expected = 100 * tokens.row(chosen % len(tokens)) + tokens.cell(chosen % len(tokens))
    assert expected.tolist() == [19_911, 100, 105, 105, 100 * good[58] + 4, 19_911]
    tolerance = 0.5 * 19_911 / 127 if layer == "bytes" else 0
    assert np.abs(tokens[chosen] - expected[:, None]).max() <= tolerance
    assert np.abs(tokens[3:2000:7][:, 0] - np.array(every())[3:2000:7]).max() <= tolerance
    assert abs(tokens[13][0] - 201) <= tolerance
    assert reader.tokens(layer, split="val").rows.tolist() == [row for row in good if row % 3 == 0]


@pytest.mark.parametrize("layer", LAYERS)
def test_a_pass_gives_each_token_once_in_stored_order_or_mixed(reader: FeatureReader, layer: str) -> None:
    tokens = reader.tokens(layer)
    batches = list(tokens.batches(100))
    assert [len(batch.rows) for batch in batches] == [100] * 23 + [64]
    assert numbers(batches, layer) == every()
    mixed = numbers(tokens.batches(100, shuffle=True), layer)
    assert mixed != every()
    assert sorted(mixed) == every()
    assert mixed == numbers(tokens.batches(64, shuffle=True), layer)
    assert mixed != numbers(tokens.batches(100, shuffle=True, seed=1), layer)


def test_a_pass_resumes_at_every_batch_with_little_and_much_memory(reader: FeatureReader) -> None:
    tokens = reader.tokens("vit")
    for shuffle, memory_bytes in itertools.product([False, True], [790_000, 32 << 20]):
        how: dict[str, Any] = {"shuffle": shuffle, "seed": 3, "memory_bytes": memory_bytes}
        whole = [batch.rows.tolist() for batch in tokens.batches(90, **how)]
        for start in range(0, len(whole) + 2, 3):
            assert [batch.rows.tolist() for batch in tokens.batches(90, start=start, **how)] == whole[start:]


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_processes_share_the_images_evenly(plain: FeatureReader, world_size: int) -> None:
    tokens = plain.tokens("plain")
    passes = [list(tokens.batches(50, shuffle=True, rank=rank, world_size=world_size)) for rank in range(world_size)]
    assert len({len(batches) for batches in passes}) == 1
    seen = Counter(number for batches in passes for number in numbers(batches))
    assert max(seen.values()) == 1
    assert len(seen) == len(tokens.rows) // world_size * world_size * CELLS


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_in_workers_gives_each_token_once_and_resumes(reader: FeatureReader, workers: int) -> None:
    tokens = reader.tokens("vit")

    def batches(**how: Any) -> list[Any]:
        return list(DataLoader(tokens.stream(70, shuffle=True, seed=2, **how), batch_size=None, num_workers=workers))

    whole = batches()
    assert sorted(numbers(whole)) == every()
    for start in (7, len(whole)):
        assert [batch[1].tolist() for batch in batches(start=start)] == [batch[1].tolist() for batch in whole[start:]]


def test_a_stream_can_be_sent_to_another_process(plain: FeatureReader) -> None:
    stream = pickle.loads(pickle.dumps(plain.tokens("vit").stream(100, shuffle=True, seed=1)))
    assert numbers(stream) == numbers(plain.tokens("vit").batches(100, shuffle=True, seed=1))


def test_mixed_tokens_of_a_window_are_in_uniform_order(plain: FeatureReader) -> None:
    # Where the tokens of each eighth of the images stand, over many seeds: chi-squared of an 8 x 8 table.
    tokens, table, parts = plain.tokens("plain"), np.zeros((8, 8)), 8
    for seed in range(40):
        rows = np.concatenate([batch.rows for batch in tokens.batches(500, shuffle=True, seed=seed)])
        np.add.at(table, (rows * parts // ROWS, np.arange(len(rows)) * parts // len(rows)), 1)
    expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
    # Tokens of an image are mixed with all others: each counts by itself, and without replacement the sum is smaller.
    assert ((table - expected) ** 2 / expected).sum() < chi2.ppf(0.9999, (parts - 1) ** 2)


@pytest.mark.parametrize("layer", ["vit", "first", "bytes"])
def test_memory_stays_below_the_limit_that_was_given(reader: FeatureReader, layer: str) -> None:
    tokens = reader.tokens(layer)
    for shuffle in (False, True):
        with pytest.raises(ValueError, match="at least") as error:
            tokens.batches(20, shuffle=shuffle, memory_bytes=0)
        least = int(str(error.value).split("at least ")[1].split(",")[0])
        next(iter(tokens.batches(20, shuffle=shuffle, memory_bytes=least)))  # imports modules
        tracemalloc.start()
        for _ in tokens.batches(20, shuffle=shuffle, memory_bytes=least):
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1.1 * least + 200_000  # objects of Python; of compressed tokens, up to 160,000 bytes


def test_too_little_memory_for_the_workers_is_reported_in_the_numbers_of_the_caller(
    plain: FeatureReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = plain.tokens("vit").stream(70, memory_bytes=900_000)
    monkeypatch.setattr(token_stream, "get_worker_info", lambda: SimpleNamespace(id=0, num_workers=2))
    with pytest.raises(ValueError, match=r"memory_bytes is 900000; it must be at least \d+ with 2 workers"):
        next(iter(stream))


def test_processes_mix_in_different_orders_and_leave_out_other_images_in_each_epoch(plain: FeatureReader) -> None:
    tokens = plain.tokens("plain")
    left_out = set()
    for seed in range(8):
        passes = [list(tokens.batches(65 * CELLS, shuffle=True, seed=seed, rank=r, world_size=3)) for r in range(3)]
        assert (passes[0][0].cells == passes[1][0].cells).mean() < 0.3
        seen = {row for batches in passes for batch in batches for row in batch.rows.tolist()}
        left_out |= set(tokens.rows.tolist()) - seen
    assert len(left_out) > 8  # of 197 images, two an epoch


def test_statistics_are_those_of_numpy(plain: FeatureReader) -> None:
    tokens = plain.tokens("vit")
    values = tokens[:].astype(np.float64)
    found = tokens.statistics()
    assert found.tokens == len(tokens)
    assert np.allclose(found.mean, values.mean(0), rtol=1e-12)
    assert np.allclose(found.std, values.std(0), rtol=1e-10)
    assert np.isclose(found.mean_norm, np.linalg.norm(values, axis=1).mean(), rtol=1e-12)
    assert tokens.statistics(100).tokens == 9 * CELLS  # whole images


REFUSED: list[tuple[Callable[[FeatureReader], object], type[Exception], str]] = [
    (lambda r: r.tokens("vector"), InputError, "vector has no tokens: a row has shape .40. and axes C"),
    (lambda r: r.tokens("old"), InputError, "the grid of the 14 tokens of old is not recorded"),
    (lambda r: r.tokens("wrong"), InputError, "the grid of the 12 tokens of wrong"),
    (lambda r: r.tokens("none"), UnknownNameError, "none"),
    (lambda r: r.tokens("vit", split="test"), UnknownNameError, "test"),
    (lambda r: r.tokens("vit")[3000], IndexError, "out of range for 2364 tokens"),
    (lambda r: r.tokens("vit")[1.5], IndexError, "got 1.5"),
    (lambda r: r.tokens("vit")[1, 2], IndexError, "expected an int"),
    (lambda r: r.tokens("vit").batches(0), ValueError, "batch_size is 0"),
    (lambda r: r.tokens("vit").batches(9, seed=-1), ValueError, "seed is -1"),
    (lambda r: r.tokens("vit").batches(9, start=-1), ValueError, "start is -1"),
    (lambda r: r.tokens("vit").batches(9, rank=2, world_size=2), ValueError, "rank is 2; it must be 0 to 1"),
    (lambda r: r.tokens("vit").batches(9, memory_bytes=1000), ValueError, r"at least \d+, as 6\d images are read"),
    (lambda r: r.tokens("vit").stream(9, memory_bytes=1000), ValueError, r"is 1000; it must be at least \d+, as"),
    (lambda r: r.tokens("vit").statistics(0), InputError, "at_most is 0"),
    (lambda r: r.tokens("vit").batches(9.0), TypeError, "batch_size is 9.0; it must be an int"),
    (lambda r: r.tokens("vit").batches(9, memory_bytes="64MB"), TypeError, "memory_bytes is '64MB'"),
    (lambda r: r.tokens("vit").batches(9, shuffle="rows"), ValueError, "shuffle is 'rows'; it must be True or False"),
    (lambda r: r.tokens("vit").row(10**6), IndexError, "out of range for 2364 tokens"),
    (lambda r: r.tokens("vit").cell(1.5), IndexError, "got 1.5"),
    (lambda r: r.tokens("vit")[np.ones(3, bool)], IndexError, "the mask has shape .3,., expected .2364,."),
    (lambda r: r.tokens("vit").boxes(640), InputError, "the picture is 640; expected two sides"),
    (lambda r: r.tokens("vit").labels(np.zeros((5, 5), int), ignore=[1, 2]), InputError, "ignore is .1, 2."),
    (lambda r: r.tokens("vit").labels(np.full((5, 5), 2**64 - 1)), InputError, "has the label 18446744073709551615"),
    (lambda r: r.tokens("vit").labels(np.zeros((5, 5, 3), int)), InputError, "int64 with shape .5, 5, 3.; expected"),
    (lambda r: r.tokens("vit").labels(np.zeros((5, 5))), InputError, "float64 with shape .5, 5."),
    (lambda r: r.tokens("vit").labels(np.full((5, 5), -1)), InputError, "the label -1; .* as ignore"),
    (lambda r: r.tokens("vit").labels(np.zeros((5, 5), int), min_share=50), InputError, "min_share is 50"),
    (lambda r: r.tokens("vit").boxes((0, 5)), InputError, "0 x 5 pixels"),
]


def test_wrong_arguments_are_refused(plain: FeatureReader) -> None:
    for ask, error, message in REFUSED:
        with pytest.raises(error, match=message):
            ask(plain)


def test_places_of_tokens_are_not_known_with_a_transform_of_the_library() -> None:
    with pytest.raises(InputError, match="by its own transform"):
        token_boxes(GRID, {"library_transform": "x"}, (10, 10))


def test_the_cells_of_a_grid_are_places_in_the_picture(plain: FeatureReader) -> None:
    # 640 x 480 is resized to 341 x 256; the crop of 224 begins at (58, 16).
    boxes = plain.tokens("vit").boxes((640, 480))
    assert boxes.shape == (CELLS, 4)
    assert np.allclose(boxes[0], np.array([58, 16, 58 + 56, 16 + 224 / 3]) * np.array([640 / 341, 480 / 256] * 2))
    assert np.allclose(boxes[-1, 2:], [(58 + 224) * 640 / 341, (16 + 224) * 480 / 256])


def labels_by_pixel(boxes: np.ndarray, mask: np.ndarray, ignore: int | None, min_share: float) -> list[int]:
    """Labels of cells, by a loop over the pixels of each."""
    labels = []
    for left, top, right, bottom in boxes:
        pixels = [
            int(mask[y, x])
            for y, x in itertools.product(*map(range, mask.shape))
            if left <= x + 0.5 < right and top <= y + 0.5 < bottom
        ]
        counts = Counter(label for label in pixels if label != ignore)
        best = max(counts.values(), default=0)
        chosen = min((label for label, count in counts.items() if count == best), default=-1)
        labels.append(chosen if best and best >= min_share * len(pixels) else -1)
    return labels


@pytest.mark.parametrize("size", [(31, 40), (64, 33), (7, 9), (1, 5), (40, 40)])
def test_labels_of_tokens_are_the_majority_of_the_pixels_of_a_mask(plain: FeatureReader, size: tuple[int, int]) -> None:
    tokens, random = plain.tokens("vit"), np.random.default_rng(0)
    for dtype, high, ignore, share in ((np.uint8, 3, None, 0), (np.uint16, 300, 7, 0.2), (np.int32, 2, 0, 0.6),
                                      (np.int64, 1 << 62, None, 0.1)):  # fmt: skip
        blocks = random.integers(0, high, (size[0] // 4 + 1, size[1] // 4 + 1))
        mask = np.kron(blocks, np.ones((4, 4), int))[: size[0], : size[1]].astype(dtype)
        expected = labels_by_pixel(tokens.boxes((size[1], size[0])), mask, ignore, share)
        assert tokens.labels(mask, ignore=ignore, min_share=share).tolist() == expected
    assert tokens.labels(np.full(size, 255, np.uint8), ignore=255).tolist() == [-1] * CELLS


def test_masks_of_pillow_and_numbers_of_numpy_are_taken(plain: FeatureReader) -> None:
    tokens = plain.tokens("vit")
    mask = np.random.default_rng(0).integers(0, 3, (40, 31)).astype(np.uint8)
    palette = Image.fromarray(mask)
    palette.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0])
    assert tokens.labels(palette, min_share=0).tolist() == tokens.labels(mask, min_share=0).tolist()
    void = np.where(mask == 2, -1, mask.astype(np.int32))
    assert tokens.labels(void, ignore=-1).tolist() == tokens.labels(mask, ignore=2).tolist()
    size: Any = np.array([640, 480], np.uint16)
    assert np.array_equal(tokens.boxes(size), tokens.boxes((640, 480)))
    large: Any = np.int32(65536)
    assert list(tokens.batches(large, start=large)) == []
    chosen = np.zeros(len(tokens), bool)
    chosen[[5, 900]] = True
    assert np.array_equal(tokens[chosen], tokens[[5, 900]])
    assert np.array_equal(np.asarray(tokens), tokens[:])


def test_damaged_descriptions_are_refused_where_places_are_asked_for(
    plain: FeatureReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged: list[Any] = [
        None, {"resize_px": 0, "crop_px": [1, 1]}, {"resize_px": "a", "crop_px": [1, 1]}, {"resize_px": 256},
        {"resize_px": 10**400, "crop_px": [1, 1]}, {"resize_px": [1, 2, 3], "crop_px": 5},
    ]  # fmt: skip
    for recorded in (None, [], *({"preprocessing": one} for one in damaged)):
        monkeypatch.setattr(FeatureReader, "provenance", {"depends_on": recorded})
        tokens = plain.tokens("vit")
        assert tokens[0][0] == 100
        with pytest.raises(InputError, match="expected two sides|not known|at least 1 x 1"):
            tokens.boxes((640, 480))


def test_an_empty_choice_has_no_tokens(tmp_path: Path, plain: FeatureReader) -> None:
    assert list(plain.tokens("vit").batches(5, rank=250, world_size=300)) == []
    assert plain.tokens("vit")[[]].shape == (0, CHANNELS)
