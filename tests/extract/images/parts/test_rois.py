"""The pooling `roi`: rows are boxes, and the whole picture passes the backbone once for all boxes of it in a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.ops import roi_align
from torchvision.transforms import v2

from extract import InputError, Status, load_backbone
from extract.compute.backbone import Backbone
from extract.extraction.plan import Plan
from extract.extraction.reproduce import recheck
from extract.extraction.run import extract
from extract.extraction.settings import ExtractionSettings
from extract.images import list_images
from tests.conftest import make_picture
from tests.extract.compute.small_network import Job, small_network
from tests.planning import plan

SIZES = {"a.png": (90, 70), "b.png": (64, 100), "c.png": (80, 80)}
# Inside; over the right border of the picture; over the border of the centre crop; of one pixel; all of it.
BOXES = [(30, 20, 25, 31), (50, 30, 70, 20), (2, 3, 40, 50), (37, 41, 1, 1), (0, 0, 64, 70)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three pictures, and a table with five boxes of each."""
    root = tmp_path_factory.mktemp("rois")
    (root / "pictures").mkdir()
    for seed, (name, size) in enumerate(SIZES.items()):
        make_picture(seed, *size).save(root / "pictures" / name)
    lines = [f"{name},{','.join(map(str, box))}" for name in SIZES for box in BOXES]
    (root / "boxes.csv").write_text("path,x,y,w,h\n" + "\n".join(lines) + "\n")
    return root


@pytest.fixture
def job(world: Path, tmp_path: Path) -> Job:
    """Runs of the small network, whose preprocessing crops 32 pixels of 40."""
    boxes = {"boxes": world / "boxes.csv", "box_shape": "exact"}
    return Job(world / "pictures", tmp_path, small_network(resize_px=40), boxes)


def planned(job: Job, out: str = "out", **settings: Any) -> Plan:
    given = {"workers": 0} | job.always | settings
    images = list_images(job.images, parts=ExtractionSettings(**given))
    return plan(images, out=job.root / out, backbone=job.backbone, **given)


def by_hand(backbone: Backbone, layer: str, pictures: Path, names: list[str]) -> list[tuple[Tensor, Tensor, float]]:
    """For each row: what a plain hook keeps of the whole picture, and the box that torchvision moves with it."""
    how, kept, rows = backbone.preprocessing, list[Tensor](), list[tuple[Tensor, Tensor, float]]()
    resize = [how.resize_px] if isinstance(how.resize_px, int) else how.resize_px
    interpolation = v2.InterpolationMode(how.interpolation)
    move = v2.Compose([v2.Resize(resize, interpolation), v2.CenterCrop(how.crop_px), v2.ClampBoundingBoxes()])
    hook = backbone.model.get_submodule(layer).register_forward_hook(lambda module, given, out: kept.append(out))
    for name in names:
        file, _, numbers = name.partition("#xywh=")
        picture = Image.open(pictures / file)
        box = torch.tensor([list(map(float, numbers.split(",")))], dtype=torch.float64)
        box[:, 2:] = (box[:, :2] + box[:, 2:]).minimum(torch.tensor(picture.size))
        given = tv_tensors.BoundingBoxes(box, format="XYXY", canvas_size=picture.size[::-1])
        picture, moved = move(picture, given)
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255
        scaled = (pixels - torch.tensor(how.mean)[:, None, None]) / torch.tensor(how.std)[:, None, None]
        with torch.no_grad():
            backbone.model(scaled[None])
        # torchvision's ratios are rounded, and 48.000002 pixels of a stride of 16 would take one more point than 48.
        rows.append((kept.pop(), moved.as_subclass(Tensor).round(decimals=4).float(), how.crop_px[1]))
    hook.remove()
    return rows


@pytest.mark.parametrize(
    ("spec", "layer", "preprocessing", "as_map"),
    [
        ("timm/test_resnet", "layer4", {"size": 72, "crop": 64}, lambda maps: maps),
        ("timm/test_vit", "blocks.1", {}, lambda x: x[:, 1:].transpose(1, 2).unflatten(2, (10, 10))),
        pytest.param("torchvision/resnet18", "layer4", {}, lambda maps: maps, marks=pytest.mark.slow),
        pytest.param("torchvision/swin_t", "features.3", {}, lambda x: x.movedim(3, 1), marks=pytest.mark.slow),
    ],
)
def test_a_row_is_roi_align_of_its_box_on_the_map_of_the_whole_picture(
    spec: str, layer: str, preprocessing: dict[str, Any], as_map: Any, job: Job
) -> None:
    backbone = load_backbone(spec, weights="random", device="cpu", preprocessing=preprocessing)
    with pytest.warns(UserWarning, match="the part inside is used"):
        reader = replace(job, backbone=backbone).run(layers=[f"{layer}:roi", f"{layer}:roi2"], batch_size=7)
    assert (len(reader), len(reader.failures)) == (15, 0)
    assert reader[f"{layer}:roi"].attributes["pooling"] == "roi"
    backbone.model.eval()
    kept = by_hand(backbone, layer, job.images, list(reader.paths))
    for pooling, size in (("roi", 1), ("roi2", 2)):
        expected = []
        for values, box, width in kept:
            maps = as_map(values)
            expected.append(roi_align(maps, [box], size, maps.shape[3] / width, aligned=True)[0])
        found = reader[f"{layer}:{pooling}"][:]
        assert np.ptp(found, axis=0).max() > 0.01
        np.testing.assert_allclose(found, torch.stack(expected).reshape(found.shape), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*the part inside is used")
class TestRuns:
    """Runs of the small network."""

    def test_a_picture_is_computed_once_for_all_of_its_boxes_in_a_batch(self, job: Job) -> None:
        seen: list[int] = []
        with job.backbone.model.register_forward_pre_hook(lambda module, given: seen.append(len(given[0]))):
            plan = planned(job, layers=["layer1:roi"], batch_size=10)
            seen.clear()
            assert extract(plan).computed == 15
        assert seen == [2, 1, 1, 1]  # two pictures; each alone, to compare it; the third picture

    def test_rows_do_not_depend_on_workers_interruptions_and_the_stored_type(self, job: Job) -> None:
        how: dict[str, Any] = {"layers": ["layer1:roi", "layer2:roi2"], "batch_size": 4}
        whole = job.run("whole", **how)
        assert extract(planned(job, "resumed", **how), stop=lambda: True).stopped
        others = [
            job.run("resumed", **how),
            job.run("workers", **how, workers=2),
            job.run("half", **how, dtype="float16"),
        ]
        for name in ("layer1", "layer2"):
            for other in others:
                np.testing.assert_array_equal(whole[name][:].astype(other[name].dtype), other[name][:])

    def test_verify_computes_the_same_rows_again(self, job: Job) -> None:
        job.run(layers=["layer1:roi"], batch_size=4)
        checked = recheck(job.root / "out", 15, backbone=job.backbone)
        assert (checked.n_rows, checked.faults) == (15, [])
        assert checked.largest < 1e-5

    def test_a_copy_of_a_picture_is_not_computed(self, job: Job, tmp_path: Path) -> None:
        boxes = tmp_path / "boxes.csv"
        boxes.write_text(
            "path,x,y,w,h\n" + "".join(f"{name},20,30,9,9\n{name},30,30,9,9\n" for name in ("a.png", "b.png"))
        )
        for name in ("a.png", "b.png"):
            make_picture(0).save(tmp_path / name)
        copies = replace(job, images=tmp_path, always={"boxes": boxes})
        summary = extract(planned(copies, "copies", layers=["layer1:roi"]))
        assert (summary.computed, summary.duplicates) == (4, 2)

    @pytest.mark.slow
    def test_compiled_code_gives_the_same_rows(self, job: Job) -> None:
        pytest.importorskip("openvino")
        eager, compiled = (job.run(how, layers=["layer2:roi"], compile=how) for how in ("off", "openvino"))
        np.testing.assert_allclose(compiled["layer2"][:], eager["layer2"][:], rtol=1e-4, atol=1e-5)


def test_a_box_that_the_centre_crop_cuts_off_fails_and_names_the_remedy(job: Job, tmp_path: Path) -> None:
    boxes = tmp_path / "boxes.csv"
    boxes.write_text("path,x,y,w,h\nb.png,10,0,20,10\nb.png,10,40,20,10\n")
    cropping = replace(job, always={"boxes": boxes})
    failed, good = cropping.run(layers=["layer1:roi"]), replace(cropping, backbone=small_network(resize_px=(32, 32)))
    assert failed.status.tolist() == [Status.DECODE_ERROR, Status.OK]
    assert "outside the centre crop of the picture; --size 32x32 squashes" in failed.failures[0][3]
    assert good.run("squashed", layers=["layer1:roi"]).status.tolist() == [Status.OK, Status.OK]


def test_what_has_no_boxes_or_no_known_place_is_refused(job: Job) -> None:
    refused: list[tuple[str, Callable[[], object]]] = [
        ("name boxes: --boxes TABLE", lambda: replace(job, always={}).run(layers=["layer1:roi"])),
        ("name boxes: --boxes TABLE", lambda: job.backbone.features(make_picture(0), "layer1:roi")),
        ("use roi for all layers", lambda: job.run(layers=["layer1:roi", "embedding"])),
        ("a pooling over boxes is the last one", lambda: job.run(layers=["layer1:roi:srp16"])),
        ("use roi1 to roi16", lambda: job.run(layers=["layer1:roi99"])),
        ("roi does not fit a vector", lambda: job.run(layers=["embedding:roi"])),
        ("--size, --crop", replace(job.backbone.preprocessing, library_transform=torch.tensor, name="mine").for_boxes),
        ("use --decode exact", replace(job.backbone.preprocessing, device="cuda:0").for_boxes),
    ]
    for hint, run in refused:
        with pytest.raises(InputError) as raised:
            run()
        assert hint in f"{raised.value.message} {raised.value.hint}"
    assert not (job.root / "out").exists()
