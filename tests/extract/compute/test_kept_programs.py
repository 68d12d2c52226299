"""Compiled programs in the cache folder: the same bits as without it, and never an error."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from extract import load_backbone
from extract.compute import compiled, kept_programs
from extract.compute.backends import open_forward
from extract.compute.computation_digest import computation_digest
from extract.compute.feature_choice import choose_features
from extract.system.torch_state import evaluating
from extract.system.user_cache import cache_file

pytest.importorskip("openvino")


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_file("programs")


@pytest.fixture(scope="module")
def backbone() -> Any:
    return load_backbone("timm/test_resnet", weights="random", device="cpu")


def _digested(content: bytes) -> bytes:
    return hashlib.sha256(content).digest() + content


def _pictures(backbone: Any, count: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, *backbone.preprocessing.crop_px, 3), dtype=torch.uint8, generator=generator)


def _computed(backbone: Any, layers: tuple[str, ...] = ("layer2", "embedding"), **settings: Any) -> dict[str, Any]:
    with evaluating(backbone.model):
        choice = choose_features(backbone, list(layers))
    with open_forward(backbone, choice, "float32", engine="openvino", batch_size=6, **settings) as forward:
        return forward(_pictures(backbone))


def _same(features: dict[str, Any], others: dict[str, Any]) -> bool:
    return features.keys() == others.keys() and all(np.array_equal(features[name], others[name]) for name in features)


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with each graph that is exported."""
    real, done = compiled.graph_of, []

    def counted(*args: Any) -> Any:
        done.append(1)
        return real(*args)

    monkeypatch.setattr(compiled, "graph_of", counted)
    return done


def test_a_kept_program_gives_the_same_bits_without_exporting(
    backbone: Any, programs: Path, exports: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again = _computed(backbone), _computed(backbone)
    assert len(exports) == len(list(programs.iterdir())) == 1
    monkeypatch.setattr(compiled, "computation_digest", lambda *_: None)
    without = _computed(backbone)
    assert len(exports) == 2
    assert _same(first, again)
    assert _same(first, without)


@pytest.mark.slow
def test_other_layers_weights_and_batches_have_programs_of_their_own(
    backbone: Any, programs: Path, exports: list[int]
) -> None:
    kept = _computed(backbone)
    _computed(backbone, ("layer1",))
    other = load_backbone("timm/test_resnet", weights="random", device="cpu", seed=1)
    assert not _same(_computed(other), kept)
    changed = load_backbone("timm/test_resnet", weights="random", device="cpu")
    with torch.no_grad():  # the weights in memory count, not those that were loaded
        next(changed.model.parameters()).mul_(1.5)
    assert not _same(_computed(changed), kept)
    assert len(exports) == len(list(programs.iterdir())) == 4
    assert _same(_computed(backbone), kept)
    assert len(exports) == 4


@pytest.mark.slow
def test_code_that_computes_something_else_has_another_program(
    backbone: Any, exports: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = _computed(backbone, ("layer2",))
    real = backbone.model.layer2.forward
    monkeypatch.setattr(backbone.model.layer2, "forward", lambda images: real(images) * 2)
    assert np.allclose(_computed(backbone, ("layer2",))["layer2"], 2 * kept["layer2"], rtol=1e-4)
    assert len(exports) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
        lambda path: path.write_bytes(_digested(b"a whole file that is no program" * 100)),
        lambda path: (path.unlink(), path.mkdir()),
    ],
)
def test_a_damaged_or_foreign_program_is_compiled_again(
    backbone: Any, programs: Path, exports: list[int], damage: Any
) -> None:
    kept = _computed(backbone)
    damage(next(programs.iterdir()))
    assert _same(_computed(backbone), kept)
    assert len(exports) == 2


@pytest.mark.slow
def test_a_program_of_another_library_or_cpu_is_not_taken(
    backbone: Any, exports: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _computed(backbone)
    with monkeypatch.context() as patch:
        patch.setattr(kept_programs, "library_versions", lambda: {"openvino": "another"})
        _computed(backbone)
    with monkeypatch.context() as patch:
        patch.setattr(kept_programs, "cpu_features", lambda: "another")
        _computed(backbone)
    assert len(exports) == 3


@pytest.mark.slow
def test_where_nothing_can_be_written_programs_are_compiled(backbone: Any, programs: Path, exports: list[int]) -> None:
    programs.parent.parent.mkdir(parents=True)
    programs.parent.write_text("a file in place of the folder")
    assert _same(_computed(backbone), _computed(backbone))
    assert len(exports) == 2


@pytest.mark.slow
def test_programs_that_were_not_used_make_room(
    backbone: Any, programs: Path, exports: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _computed(backbone)
    size = next(programs.iterdir()).stat().st_size
    monkeypatch.setattr(kept_programs, "_MOST_BYTES", size * 3 // 2)
    _computed(load_backbone("timm/test_resnet", weights="random", device="cpu", seed=1))
    assert len(list(programs.iterdir())) == 1
    _computed(backbone)
    assert len(exports) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("openvino_in_bfloat16")
def test_precisions_have_programs_of_their_own(backbone: Any, programs: Path, exports: list[int]) -> None:
    full, lower = _computed(backbone), _computed(backbone, precision="bfloat16")
    assert not _same(full, lower)
    assert _same(_computed(backbone, precision="bfloat16"), lower)
    assert len(list(programs.iterdir())) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("openvino_in_bfloat16")
def test_a_shared_graph_gives_the_same_bits(backbone: Any, exports: list[int], programs: Path) -> None:
    full, lower = _computed(backbone), _computed(backbone, precision="bfloat16")
    shutil.rmtree(programs)
    with compiled.sharing_graphs():
        assert _same(_computed(backbone), full)
        assert _same(_computed(backbone, precision="bfloat16"), lower)
    assert len(exports) == 3


def test_a_digest_depends_on_the_computation_and_not_on_the_pictures(backbone: Any) -> None:
    with evaluating(backbone.model):
        choice = choose_features(backbone, ["embedding"])
        pictures = _pictures(backbone)
        digests = [
            computation_digest(backbone, choice, "float32", "float32", images)
            for images in (pictures, 255 - pictures, pictures[:2])
        ]
        halves = computation_digest(backbone, choice, "float16", "float32", pictures)
    assert digests[0] == digests[1] is not None
    assert len({*digests[1:], halves}) == 3


def test_a_model_that_cannot_be_recorded_has_no_digest(backbone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with evaluating(backbone.model):
        choice = choose_features(backbone, ["embedding"])

        def broken(images: Any) -> Any:
            raise RuntimeError("no")

        monkeypatch.setattr(backbone.model.layer1, "forward", broken)
        assert computation_digest(backbone, choice, "float32", "float32", _pictures(backbone)) is None
