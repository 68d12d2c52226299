"""The commands that two checkouts are compared by, and the pictures and models that they run on.

Commands run one after the other in one folder, so a later one may read what an earlier one has written.
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from PIL import Image

__all__ = ["COMMANDS", "GOLDEN", "Command", "make_inputs"]

GOLDEN = Path(__file__).parents[3] / "shared" / "data" / "golden-v1"

# A backbone that takes a millisecond. It ends its own process when it sees a white picture and there is a file `stop`.
TINY = """
import os
import signal

import torch
from torch import nn
from torchvision import transforms


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.deep = nn.Conv2d(6, 8, 3, padding=1)
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        if os.path.exists("stop") and bool((x == 1).flatten(1).all(1).any()):
            with open("stop") as file:
                number = int(file.read())
            os.unlink("stop")
            os.kill(os.getpid(), number)
        return self.fc(self.relu(self.deep(self.relu(self.conv(x)))).mean((2, 3)))


def tiny():
    torch.manual_seed(0)
    return Net(), lambda picture: transforms.functional.to_tensor(picture.resize((16, 16)))


def nan():
    net, transform = tiny()
    with torch.no_grad():
        net.deep.bias[1] = float("nan")
    return net, transform


def broken():
    raise RuntimeError("no such luck")
"""

MTIME_NS = 1_600_000_000_000_000_000  # of every picture


@dataclass(frozen=True)
class Command:
    """A command line, and what is compared of it.

    Attributes:
        name: of this entry.
        arguments: of `layertap`; `{scratch}` stands for the scratch folder.
        before: changes files in the scratch folder first.
        locked: a data set that another process has locked meanwhile.
        shape_only: numbers in what is printed differ in each run, and files are not compared.
        files: whether contents of files are compared; else their names.
        masked: (pattern, word) that also vary in what is printed here.
        ignored: pattern of `FILE [PART]` that vary here.
        constants: name of a module's constant -> the value it has for this command.
        digits: how many of scikit-learn's pictures of digits there are; None: all.
        needs_golden: the golden data sets are needed.
    """

    name: str
    arguments: tuple[str, ...]
    before: Callable[[Path], None] | None = None
    locked: str | None = None
    shape_only: bool = False
    files: bool = True
    masked: tuple[tuple[str, str], ...] = ()
    ignored: str = ""
    constants: dict[str, Any] = field(default_factory=dict)
    digits: int | None = None
    needs_golden: bool = False


# Inputs


def picture(seed: int, width: int = 48, height: int = 40) -> Image.Image:
    """A smooth random picture, different for every seed."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 5, 3)).astype(np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def make_inputs(root: Path) -> None:
    """Write all pictures, lists, archives, models and configurations."""
    (root / "tiny.py").write_text(TINY)
    _photos(root / "photos")
    for split, count in (("train", 10), ("test", 6)):
        _classes(root / "splits" / split, count)
    _classes(root / "new", 2, seed=7)
    shutil.copytree(root / "photos", root / "live")
    _lists(root)
    _archives(root)
    pixels = np.stack([np.asarray(picture(i)) for i in range(9)])
    np.save(root / "array.npy", pixels)
    with h5py.File(root / "array.h5", "w") as file:
        file["pictures"], file["labels"] = pixels, np.arange(9) % 3
    if GOLDEN.is_dir():
        shutil.copytree(GOLDEN, root / "golden")
    _configurations(root)
    for path in root.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
        if path.is_file() and "golden" not in path.relative_to(root).parts:
            os.utime(path, ns=(MTIME_NS, MTIME_NS))


def _photos(root: Path) -> None:
    """Pictures of several formats, sizes and modes in three classes; some of them are damaged, equal or no pictures."""
    for name in ("ant", "bee", "cat"):
        (root / name).mkdir(parents=True)
    for i in range(9):
        picture(i, 40 + 5 * i, 70 - 3 * i).save(
            root / ["ant", "bee", "cat"][i % 3] / f"{i:02d}.{['png', 'jpg'][i % 2]}"
        )
    turned = Image.Exif()
    turned[274] = 6  # to be turned by 90 degrees
    picture(20, 60, 30).save(root / "ant" / "turned.jpg", exif=turned)
    picture(21).convert("L").save(root / "ant" / "grey.png")
    picture(22).convert("P").save(root / "bee" / "palette.png")
    clear = picture(23).convert("RGBA")
    clear.putalpha(Image.linear_gradient("L").resize(clear.size))
    clear.save(root / "bee" / "clear.png")
    picture(24).save(root / "bee" / "web.webp", lossless=True)
    picture(25).convert("CMYK").save(root / "cat" / "cmyk.jpg")
    Image.new("RGB", (32, 32), "white").save(root / "bee" / "03 white.png")
    shutil.copyfile(root / "ant" / "00.png", root / "cat" / "copy of ant 0.png")
    (root / "bee" / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 no picture")
    (root / "bee" / "empty.png").write_bytes(b"")
    whole = root / "cat" / "cut.jpg"
    picture(26, 90, 90).save(whole)
    whole.write_bytes(whole.read_bytes()[:900])
    (root / "cat" / "notes.txt").write_text("no picture")
    (root / "cat" / ".hidden.png").write_bytes(b"hidden")
    (root / "cat" / "Thumbs.db").write_bytes(b"thumbs")
    picture(27).save(root / "cat" / "names, with \u00e9.png")


def _classes(root: Path, count: int, seed: int = 0) -> None:
    """Pictures whose class is their colour, more or less."""
    generator = np.random.default_rng(seed + count)
    for name, colour in {"ant": (200, 60, 60), "bee": (60, 200, 60), "cat": (60, 60, 200)}.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            pixels = np.clip(generator.normal(colour, 70, (16, 16, 3)) + generator.normal(0, 70, 3), 0, 255)
            large = Image.fromarray(pixels.astype(np.uint8)).resize((40, 40), Image.Resampling.BICUBIC)
            large.save(root / name / f"{i:02d}.png")


def _lists(root: Path) -> None:
    lines = ["path,label,split,id"]
    for i, path in enumerate(sorted((root / "photos").rglob("0*"))):
        split, label = ("train", "val", "test")[i % 3], ("wing", "leg", "")[i % 3]
        lines.append(f"{path.relative_to(root)},{label},{split},id-{90 - i}")
    (root / "list.csv").write_text("\n".join([*lines, "photos/ant/missing.png,leg,train,id-0"]) + "\n")
    ages = [
        f"{path.relative_to(root / 'splits')},{i * 7 % 50}.5"
        for i, path in enumerate(sorted((root / "splits").rglob("*.png")))
    ]
    (root / "ages.csv").write_text("\n".join(["path,age", *ages]) + "\n")


def _archives(root: Path) -> None:
    files = sorted(path for path in (root / "photos").rglob("*") if path.is_file())
    with tarfile.open(root / "photos.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        for path in files:
            os.utime(path, ns=(MTIME_NS, MTIME_NS))
            archive.add(path, str(path.relative_to(root / "photos")))
    for name, members in (("part-0.zip", files[:12]), ("part-1.zip", files[12:])):
        with zipfile.ZipFile(root / name, "w", zipfile.ZIP_DEFLATED) as packed:
            for path in members:
                packed.write(path, str(path.relative_to(root / "photos")))


def _configurations(root: Path) -> None:
    tiny = "backbone: python/tiny.py:tiny\nlayers: [conv, fc]\nworkers: 0\ndevice: cpu\nbatch_size: 4\n"
    (root / "embed.yaml").write_text(f"images: photos\nout: out/config\n{tiny}dtype: float16\nlimit: 7\n")
    (root / "wrong.yaml").write_text(f"images: photos\nbatchsize: 3\n{tiny}")
    (root / "probe.yaml").write_text("out: [out/splits]\nprotocol: knn\nlayers: ['conv', 'conv+deep']\n")
    sync = f"images: live\nout: out/synced\n{tiny}settle: 0\n"
    (root / "sync.yaml").write_text(sync)
    schedule = "schedule: {cron: 30 2 * * 1-5, timezone: Europe/Berlin, on_failure: mail me}\n"
    (root / "nightly.yaml").write_text(sync + schedule)
    (root / "often.yaml").write_text(sync + "schedule: {every: 15m}\n")


# Changes between commands


def _write(name: str, content: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        (root / name).write_text(content)

    return change


def _damaged_copy(root: Path) -> None:
    """A data set with another byte in a stored row."""
    shutil.copytree(root / "out/shards", root / "out/damaged")
    path = sorted((root / "out/damaged/shards").glob("000001*.h5"))[-1]
    with h5py.File(path) as file:
        features = file["features/fc"]
        row_bytes = features.dtype.itemsize * int(np.prod(features.shape[1:]))
        offset = features.id.get_chunk_info(0).byte_offset + 2 * row_bytes
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def _golden_copy(root: Path) -> None:
    """A golden data set without one of its shards."""
    shutil.copytree(root / "golden" / "plain", root / "golden" / "resumed")
    for suffix in ("h5", "json"):
        (root / f"golden/resumed/shards/000001.{suffix}").unlink()


def _mend(root: Path) -> None:
    picture(40).save(root / "photos/bee/broken.jpg")
    os.utime(root / "photos/bee/broken.jpg", ns=(MTIME_NS, MTIME_NS))


def _unmend(root: Path) -> None:
    (root / "photos/bee/broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 no picture")
    os.utime(root / "photos/bee/broken.jpg", ns=(MTIME_NS, MTIME_NS))


def _change_live(root: Path) -> None:
    """A file is renamed, one deleted, one edited, one added, one copied."""
    live = root / "live"
    (live / "ant/00.png").rename(live / "bee/moved.png")
    (live / "ant/03.jpg").unlink()
    picture(50).save(live / "bee/04.png")
    picture(51).save(live / "ant/new.png")
    shutil.copyfile(live / "cat/05.jpg", live / "cat/05 again.jpg")
    for name in ("bee/04.png", "ant/new.png", "cat/05 again.jpg"):
        os.utime(live / name, ns=(MTIME_NS + 10**9, MTIME_NS + 10**9))
    time.sleep(2.5)  # a file that changed within the last two seconds is looked at once more


def _empty_live(root: Path) -> None:
    shutil.move(root / "live/bee", root / "bee elsewhere")


# Commands

HELP = (
    "ablate",
    "backbones",
    "bench",
    "compact",
    "demo",
    "diff",
    "draw",
    "embed",
    "export",
    "inspect",
    "layers",
    "merge",
    "plan",
    "predict",
    "probe",
    "report",
    "schedule",
    "search",
    "show",
    "slurm",
    "status",
    "sync",
    "verify",
    "watch",
)
TINY_ARGUMENTS = "-b python/tiny.py:tiny --workers 0 --device cpu --batch-size 4"
TWO_LAYERS = f"{TINY_ARGUMENTS} -l conv:none -l deep:max_map -l fc"
RESNET = "-b timm/test_resnet --weights random --workers 0 --device cpu"
WORKERS = ((r"worker \d+ on .*\n", ""),)
RESUMED = ((r"resuming: \d+", "resuming: N"), (r"\d+ of them from earlier runs", "N of them from earlier runs"))
CPU = "--device cpu --workers 0"
FASTEST = (
    (r"(?m)^  float.*decoding.*\n", ""),
    (r"(?m)^measuring the whole.*\n", ""),
    (r"recommended: .*", "recommended"),
)
GOLDEN_SYNC = "images: golden/live\nout: golden/synced\nsettle: 0s\nmax_vanish: 1.0\nworkers: 0\n"


def _commands() -> Iterator[Command]:
    def command(name: str, line: str, **settings: Any) -> Command:
        return Command(name, tuple(line.split()), **settings)

    yield command("help", "--help")
    yield command("version", "--version")
    for name in HELP:
        yield command(f"help of {name}", f"{name} --help")

    yield command("backbones", "backbones")
    yield command("backbones by a pattern", "backbones bundled/*")
    yield command("backbones by a pattern, as JSON", "backbones timm/test_* --json")
    yield command("backbones: nothing matches", "backbones timm/nothing*")
    yield command("layers", "layers timm/test_resnet layer?")
    yield command("layers with functions, as JSON", "layers python/tiny.py:tiny --ops --json")
    yield command("layers: an unknown one", "layers timm/test_resnet layer9")

    yield command("embed", f"embed photos -o out/plain {TWO_LAYERS}")
    yield command("embed again", f"embed photos -o out/plain {TWO_LAYERS}")
    yield command("embed: other layers in the same folder", f"embed photos -o out/plain {TINY_ARGUMENTS} -l conv")
    yield command("embed: another folder of pictures", f"embed new -o out/plain {TWO_LAYERS}")
    yield command("embed: locked", f"embed photos -o out/plain {TWO_LAYERS}", locked="out/plain")
    yield command("embed in shards, as JSON", f"embed photos -o out/shards {TWO_LAYERS} --shard-rows 6 --json")
    yield command("embed in float16, packed", f"embed photos -o out/gzip {TWO_LAYERS} --dtype float16 --compress gzip")
    yield command("embed with DataLoader workers", f"embed photos -o out/workers {TWO_LAYERS} --workers 2")
    yield command("embed the first images, strictly", f"embed photos -o out/limit {TWO_LAYERS} --limit 13 --strict")
    yield command("embed from a configuration", "embed --config embed.yaml --limit 5")
    yield command("embed: a configuration with an unknown key", "embed --config wrong.yaml")
    yield command("embed a list", f"embed list.csv -o out/list {TWO_LAYERS}")
    yield command("embed a tar", f"embed photos.tar -o out/tar {TWO_LAYERS}")
    yield command("embed zips", f"embed part-*.zip -o out/zip {TWO_LAYERS}")
    yield command("embed an array of NumPy", f"embed array.npy -o out/npy {TWO_LAYERS}")
    yield command("embed an array of HDF5", f"embed array.h5:pictures -o out/h5 {TWO_LAYERS}")
    yield command("plan", "plan photos -o out/photos-plan")
    yield command("plan again, as JSON", "plan photos -o out/photos-plan --json")
    yield command("embed a plan", f"embed out/photos-plan -o out/planned {TWO_LAYERS}")
    yield command(
        "embed with several poolings",
        f"embed splits -o out/resnet {RESNET} -l layer? -l layer4:max_map -l layer2:flatten -l embedding --limit 9",
    )
    yield command(
        "embed tokens",
        "embed splits -o out/vit -b timm/test_vit --weights random --workers 0 --device cpu "
        "-l blocks.0 -l blocks.0:cls_token -l blocks.1:mean_tokens -l embedding --limit 9",
    )
    yield command(
        "embed with other preprocessing",
        f"embed photos -o out/size {RESNET} --size 96 --crop 80x96 "
        "--interpolation bilinear --mean 0.5,0.5,0.5 --std 0.2,0.2,0.2 --limit 9",
    )
    yield command(
        "embed with fast decoding", f"embed photos -o out/fast {RESNET} --decode fast --min-cosine 0.5 --limit 9"
    )
    yield command(
        "embed in bfloat16", f"embed splits -o out/bfloat16 {RESNET} --precision bfloat16 --min-cosine 0.5 --limit 8"
    )
    yield command(
        "embed in bfloat16: too far off",
        f"embed splits -o out/b2 {RESNET} --precision bfloat16 --min-cosine 1 --limit 8",
    )
    yield command("embed: the default backbone", "embed splits --limit 6")
    yield command(
        "embed: rows that are not finite",
        "embed new -o out/nan -b python/tiny.py:nan --device cpu --workers 0 -l deep",
    )
    yield command(
        "embed: no image has features",
        f"embed nothing.csv -o out/nothing {TWO_LAYERS}",
        before=_write("nothing.csv", "path\nphotos/bee/empty.png\nphotos/nowhere.png\n"),
    )

    yield command(
        "embed, ended by SIGTERM",
        f"embed photos -o out/ended {TWO_LAYERS} --shard-rows 100",
        before=_write("stop", "15"),
        files=False,
    )
    yield command("status of what was ended", "status out/ended", files=False, masked=((r"\d+", "N"),))
    yield command(
        "embed what was ended to its end", f"embed photos -o out/ended {TWO_LAYERS} --shard-rows 100", masked=RESUMED
    )
    yield command("embed, killed", f"embed photos -o out/killed {TWO_LAYERS}", before=_write("stop", "9"), files=False)
    yield command(
        "embed what was killed to its end",
        f"embed photos -o out/killed {TWO_LAYERS}",
        masked=(*RESUMED, (r".*byte(?: for byte|-identical).*\n", "")),
        ignored=r"runs\.jsonl|\[made\]",
    )
    yield command(
        "embed by two processes",
        f"embed photos -o out/two {TWO_LAYERS} --shard-rows 6 --engine processes --cpus-per-worker 1 --compile off",
        masked=WORKERS,
        ignored=r"runs.*\.jsonl",
    )
    yield command(
        "embed a part of the shards",
        f"embed photos -o out/part {TWO_LAYERS} --shard-rows 6 --shards-of 0/2 --cpus-per-worker 1 --compile off",
        masked=WORKERS,
        ignored=r"runs.*\.jsonl",
    )
    yield command("embed: failed again", f"embed photos -o out/shards {TWO_LAYERS} --shard-rows 6 --retry-failed")
    yield command(
        "embed: a mended picture",
        f"embed photos -o out/shards {TWO_LAYERS} --shard-rows 6 --retry-failed",
        before=_mend,
    )

    yield command("embed: an unknown flag", "embed photos --nonsense", before=_unmend)
    yield command("embed: a wrong value", "embed photos --batch-size 0")
    yield command("embed: an unknown layer", f"embed photos -o out/x {RESNET} -l layer9")
    yield command("embed: an unknown backbone", "embed photos -o out/x -b timm/resnet5o")
    yield command("embed: an unknown source", "embed photos -o out/x -b tim/resnet50")
    yield command("embed: no such folder", f"embed photo -o out/x {TWO_LAYERS}")
    yield command("embed: no such weights", "embed photos -o out/x -b timm/test_resnet --weights nowhere.pth")
    yield command("embed: code that fails", "embed photos -o out/x -b python/tiny.py:broken")
    yield command("embed: pooling that does not suit", f"embed photos -o out/x {RESNET} -l layer4:cls_token")
    yield command("no such command", "embd photos")

    yield command("show", "show out/shards")
    yield command("show, as JSON", "show out/resnet --json")
    yield command("show: there is nothing", "show out/nowhere")
    yield command("status", "status out/shards")
    yield command("status of what two processes made", "status out/two", masked=((r"\d", "N"),))
    yield command("status, as JSON", "status out/part --json", masked=((r'"rows": \d+', '"rows": N'),))
    yield command("verify", "verify out/shards")
    yield command("verify a sample", "verify out/resnet --sample 4 --device cpu")
    yield command("verify a sample: the backbone is code", "verify out/plain --sample 4")
    yield command("verify what is damaged", "verify out/damaged", before=_damaged_copy)
    yield command("verify what is damaged, as JSON", "verify out/damaged --json")
    yield command("verify with repair", "verify out/damaged --repair")
    yield command("embed what was repaired", f"embed photos -o out/damaged {TWO_LAYERS} --shard-rows 6")
    yield command("verify what was repaired", "verify out/damaged")
    yield command("export to HDF5", "export out/shards --to h5")
    yield command("export to NumPy", "export out/list --to npy -o out/npy-files")
    yield command("export to Parquet", "export out/shards --to parquet -l fc -l deep")
    yield command("export to MATLAB", "export out/shards --to mat")
    yield command("export: an unknown layer", "export out/shards --to npy -l fd")
    yield command("embed one half", f"embed splits/train -o out/half-1 {TINY_ARGUMENTS} -l fc")
    yield command("embed the other half", f"embed new -o out/half-2 {TINY_ARGUMENTS} -l fc")
    yield command("merge: there is nothing", "merge out/nowhere out/half-2 -o out/merged")
    yield command("merge folders with the same names", "merge out/half-1 out/half-2 -o out/merged --shard-rows 7")
    yield command("show what is merged", "show out/merged")
    yield command("merge into another data set", "merge out/half-2 -o out/merged")
    yield command("merge: other features", "merge out/half-2 out/shards -o out/merged-2")
    yield command("diff", "diff out/shards out/gzip")
    yield command("diff, as JSON", "diff out/shards out/tar --json")
    yield command("search by row", "search out/shards 3 -l fc -k 5")
    yield command("search by path, as JSON", "search out/shards ant/00.png -l deep -k 3 --itself --json")
    yield command(
        "search by a file, with a picture",
        "search out/resnet new/ant/01.png -l embedding -k 4 -o out/gallery.png --device cpu",
    )
    yield command("search: the backbone is code", "search out/shards new/ant/01.png -l fc")
    yield command(
        "search by a file, the backbone named",
        "search out/shards new/ant/01.png -l fc -b python/{scratch}/tiny.py:tiny --device cpu",
    )
    yield command(
        "search by a file: the backbone under a relative name",
        "search out/shards new/ant/01.png -l fc -b python/tiny.py:tiny",
    )
    yield command("search: no such row", "search out/shards 99 -l fc")
    yield command("report", "report out/shards -l deep")
    yield command("embed for probes", f"embed splits -o out/splits {TINY_ARGUMENTS} -l conv -l deep -l fc")
    yield command("probe by CLIP's protocol", "probe out/splits -p clip --device cpu")
    yield command("probe from a configuration", "probe --config probe.yaml --device cpu")
    yield command("probe: ridge", "probe out/splits -p ridge --labels ages.csv:age -l deep -o out/ridge --device cpu")
    yield command(
        "probe: nearest centroids, as JSON", "probe out/splits -p centroid -l deep -o out/centroid --device cpu --json"
    )
    yield command(
        "probe and keep it",
        "probe out/splits -p simclr -l deep -o out/simclr --save out/probe.safetensors --device cpu",
    )
    yield command(
        "predict pictures", "predict out/probe.safetensors new -o out/new.csv -b python/tiny.py:tiny --device cpu"
    )
    yield command("predict a data set", "predict out/probe.safetensors out/splits -o out/splits.csv --device cpu")
    yield command("predict: other features", "predict out/probe.safetensors out/resnet -o out/x.csv --device cpu")

    yield command("sync, to be", "sync sync.yaml --dry-run")
    yield command("sync", "sync sync.yaml")
    yield command("sync changes, to be", "sync sync.yaml --dry-run --json", before=_change_live)
    yield command("sync changes", "sync sync.yaml")
    yield command("sync nothing", "sync sync.yaml --json")
    yield command("sync: most files are gone", "sync sync.yaml", before=_empty_live)
    yield command("sync: most files are gone indeed", "sync sync.yaml --force")
    yield command("status of what is synced", "status out/synced", masked=((r"[\d.,]+ (k|M)B", "BYTES"),))
    yield command("verify what is synced", "verify out/synced")
    yield command("show what is synced", "show out/synced")
    yield command("compact", "compact out/synced --max-dead 0.1", masked=((r"[\d.,]+ MB", "BYTES"),))
    yield command("embed into what is synced", f"embed live -o out/synced {TWO_LAYERS}")
    yield command("schedule for cron", "schedule nightly.yaml --print cron")
    yield command("schedule for systemd", "schedule nightly.yaml --print systemd")
    yield command("schedule often, for systemd", "schedule often.yaml --print systemd")
    yield command("slurm", "slurm embed.yaml --slurm 4 --gpus 1 --time 1:00:00 --partition gpu")

    yield command("inspect", "inspect python/tiny.py:tiny splits --device cpu --workers 0 --csv out/inspect.csv")
    yield command(
        "inspect gradients, with pictures",
        f"inspect timm/test_resnet splits --weights random --sample 12 {CPU} --grad -l layer? --pictures out/inside",
    )
    yield command("inspect, as JSON", "inspect python/tiny.py:nan splits --device cpu --workers 0 --json")
    for kind, backbone in (
        ("maps", "timm/test_resnet"),
        ("top", "timm/test_resnet"),
        ("gradcam", "timm/test_resnet"),
        ("attention", "timm/test_vit"),
        ("rollout", "timm/test_vit"),
        ("tokens", "timm/test_vit"),
    ):
        yield command(
            f"draw {kind}", f"draw {kind} {backbone} splits --weights random --sample 3 {CPU} -o out/drawn-{kind}"
        )
    yield command(
        "ablate",
        f"ablate timm/test_resnet splits --weights random --sample 6 -l layer? {CPU} "
        "--csv out/ablated.csv --pictures out/ablated.png",
    )
    yield command(
        "ablate channels, as JSON",
        f"ablate python/tiny.py:tiny splits --sample 6 -l conv --edit mean {CPU} --channels all --json",
    )
    yield command(
        "bench",
        "bench splits -b python/tiny.py:tiny -l fc --device cpu",
        shape_only=True,
        masked=FASTEST,
        constants={"_PIPELINE_S": 0.01, "_WRITTEN_BYTES": 8 << 20, "_DECODED": 20},
    )
    yield command(
        "demo",
        "demo -o out/demo",
        digits=120,
        masked=((r"[\d.]+ MB", "BYTES"),),
        ignored=r"shards/.*(record_hash|source_mtime_ns) values",  # it writes the pictures itself
    )

    golden: dict[str, Any] = {"needs_golden": True}
    arguments = "-l embedding -l blocks.2 -l conv_stem:max_map --shard-rows 10 --workers 0 --device cpu"
    for name in ("plain", "gzip", "ids", "synced"):
        yield command(f"golden: show {name}", f"show golden/{name}", **golden)
        yield command(f"golden: verify {name}", f"verify golden/{name}", **golden)
    yield command("golden: export", "export golden/plain --to npy -o out/golden-npy", **golden)
    yield command(
        "golden: verify a sample", "verify golden/plain --sample 3 --images golden/photos --device cpu", **golden
    )
    yield command("golden: embed", f"embed golden/photos -o golden/plain {arguments}", **golden)
    yield command("golden: resume", f"embed golden/photos -o golden/resumed {arguments}", before=_golden_copy, **golden)
    yield command("golden: diff", "diff golden/plain golden/resumed", **golden)
    yield command(
        "golden: sync, of a moved folder",
        "sync golden-sync.yaml",
        **golden,
        before=_write(
            "golden-sync.yaml", "images: golden/live\nout: golden/synced\nsettle: 0s\nmax_vanish: 1.0\nworkers: 0\n"
        ),
    )
    yield command("golden: sync", "sync golden-sync.yaml --force", **golden)


COMMANDS = tuple(_commands())
assert len({command.name for command in COMMANDS}) == len(COMMANDS), json.dumps([one.name for one in COMMANDS])
