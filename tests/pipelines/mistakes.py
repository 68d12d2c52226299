"""Frequent mistakes, with the message, the hint and the exit code that each gets.

`tests/pipelines/test_mistakes.py` makes each mistake, and those of `refused.py`, which have no hint.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SMALL = "-b timm/test_resnet --weights random"  # a network that needs no download


@dataclass(frozen=True)
class Mistake:
    """A command that fails.

    Attributes:
        what: the mistake in words.
        command: what is typed after `layertap`; SMALL stands for the options of that name.
        message: what is printed after "error: ", in which `...` stands for any text.
        hint: what is printed after "hint: "; empty if there is no hint. `...` as in the message.
        code: exit code.
        lines: most lines of the message.
        without: library that is not installed.
        offline: whether no server can be reached.
        no_gpu: whether the mistake is one only on a machine without a CUDA device.
    """

    what: str
    command: str
    message: str
    hint: str = ""
    code: int = 2
    lines: int = 3
    without: str = ""
    offline: bool = False
    no_gpu: bool = False

    @property
    def pattern(self) -> re.Pattern[str]:
        """Message and hint as a regular expression, which matches all that is printed after "error: "."""
        text = self.message + (f"\n\nhint: {self.hint}" if self.hint else "")
        return re.compile(".*".join(map(re.escape, text.split("..."))), re.DOTALL)


IMAGES = (
    Mistake("no images are named", "embed",
            "no images given",
            hint="name IMAGES, or set the key `images` in a config file (--config FILE)"),
    Mistake("a path with a space is not quoted", "embed my photos",
            "Got unexpected extra argument (photos)",
            hint="quote a path with spaces: 'my photos'"),
    Mistake("the shell has expanded a pattern", "embed photos/ant/0.png photos/ant/2.png",
            "Got unexpected extra argument (photos/ant/2.png)",
            hint="name their folder: photos/ant; or a list: (echo path; ls photos/ant/*.png) > list.csv"),
    Mistake("a pattern of images", "embed 'photos/ant/*.png'",
            "photos/ant/*.png: no such folder or file",
            hint="name their folder: photos/ant; or a list: (echo path; ls photos/ant/*.png) > list.csv"),
    Mistake("the folder has other files only", "embed notes SMALL",
            "notes: no images; none of its 2 files is an image (.txt 1, .docx 1)",
            hint="images end in .jpg, ..."),
    Mistake("a folder of archives is named, not the archives", "embed tars SMALL",
            "tars: no images; its only file is not an image (.tar 1)",
            hint="to read archives, give a pattern, such as 'tars/*.tar'"),
    Mistake("the archive is compressed", "embed photos.tar.gz SMALL",
            "photos.tar.gz: images cannot be read from the middle of a compressed tar",
            hint="decompress it to a .tar first"),
    Mistake("an HDF5 file has pixels as floats", "embed floats.h5 SMALL",
            "floats.h5 is float32 (4, 8, 8, 3); expected uint8 pictures, (N, H, W, 3), (N, 3, H, W) or (N, H, W)",
            hint="file = h5py.File('floats.h5', 'a'); file['x_uint8'] = (file['x'][:] * 255).round().astype('uint8')"),
)  # fmt: skip

BACKBONES = (
    Mistake("a source without a name", "embed photos -b timm/",
            "backbone 'timm/' has no name; expected timm/NAME (a tag may follow, such as timm/resnet50.a1_in1k)",
            hint="list them: layertap list timm"),
    Mistake("an empty name", "embed photos -b ''",
            "backbone '' not found",
            hint="a spec is SOURCE/NAME, such as bundled/efficientnet_lite0. List the sources: layertap list"),
    Mistake("a backbone that does not exist", "embed photos -b torchvision/resnet51",
            "backbone 'torchvision/resnet51' not found; nearest: 'torchvision/resnet50', ...",
            hint="list them: layertap list torchvision"),
    Mistake("a model of the Hugging Face hub without `hf/`", "embed photos -b facebook/dinov2-base",
            "backbone 'facebook/dinov2-base' not found",
            hint="the sources are bundled, ...; a model of the Hugging Face hub is hf/facebook/dinov2-base"),
    Mistake("weights in place of a backbone", "embed photos -b last.pth",
            "backbone 'last.pth' is a file of weights",
            hint="give it with --weights, and its network with -b SOURCE/NAME"),
    Mistake("the weights are of another network", "embed photos -b timm/test_resnet --weights last.pth",
            "weights last.pth do not fit timm/test_resnet (...)...1 missing: fc.weight...1 unexpected: "
            "head.weight",
            hint="all but the classifier 'fc' fits; --allow-missing-head loads the model without it",
            lines=4),
    Mistake("weights of open_clip are not named", "embed photos -b open_clip/ViT-B-32",
            "open_clip/ViT-B-32: no weights are named",
            hint="use open_clip/ViT-B-32:..., open_clip/ViT-B-32:..., open_clip/ViT-B-32:..., or one of ... others: "
                 "layertap list open_clip/ViT-B-32"),
    Mistake("the library of a source is not installed", "embed photos -b open_clip/ViT-B-32:openai",
            "open_clip/ needs open_clip",
            hint="to install it: ...pip install ...", code=1, without="open_clip"),
    Mistake("weights are not on this machine, and no server answers", "embed photos -b torchvision/resnet18",
            "weights of torchvision/resnet18 could not be downloaded: ...",
            hint="download https://download.pytorch.org/models/resnet18-....pth into ..., or "
                 "give the downloaded file: --weights FILE",
            code=1, offline=True),
    Mistake("`gpu` as a device", "embed photos SMALL --device gpu",
            "--device: expected auto, cpu, cuda, cuda:N or mps; got 'gpu'",
            hint="a GPU is cuda (NVIDIA) or mps (Apple)"),
    Mistake("CUDA on a machine without a GPU", "embed photos SMALL --device cuda",
            "device 'cuda' cannot be used: this machine has no CUDA device (...)",
            hint="use cpu, or leave out --device",
            code=1, no_gpu=True),
    Mistake("means of pixels from 0 to 255", "embed photos SMALL --mean 123,117,104",
            "mean [123.0, 117.0, 104.0]: expected three numbers from 0 to 1, since pixels are scaled to 0..1",
            hint="these look like values for pixels from 0 to 255; divide them by 255: 0.4824,0.4588,0.4078"),
)  # fmt: skip

LAYERS = (
    Mistake("layers separated by a comma", "embed photos SMALL -l layer1,layer2",
            "layer 'layer1,layer2': a name has no commas",
            hint="name each layer by itself (-l layer1 -l layer2; in a list, one item each)"),
    Mistake("a word in place of a layer", "embed photos SMALL -l last",
            "layer 'last' not found in timm/test_resnet; available: 'embedding', 'conv1', ...",
            hint="list them: layertap list timm/test_resnet"),
    Mistake("a layer that does not exist", "embed photos SMALL -l layr4",
            "layer 'layr4' not found in timm/test_resnet; nearest: 'layer4', ...",
            hint="list them: layertap list timm/test_resnet"),
    Mistake("an empty layer", "embed photos SMALL -l ''",
            "layer '' has no name; expected LAYER[:POOLING]...",
            hint="list them: layertap list timm/test_resnet"),
    Mistake("a pooling that does not fit", "embed photos SMALL -l layer4:cls_token",
            "layer 'layer4' of timm/test_resnet: cls_token does not fit a map of shape ...",
            hint="use mean_map, max_map, ..."),
)  # fmt: skip

OPTIONS = (
    Mistake("a path in place of a command", "photos", "photos is a path; expected a command",
            hint="layertap embed photos"),
    Mistake("several values of one option", "embed photos -l layer1 layer2", "Got unexpected extra argument (layer2)",
            hint="quote a path with spaces; for several values, repeat the option: -l layer1 -l layer2"),
    Mistake("an option that other programs have", "embed photos --overwrite", "No such option '--overwrite'",
            hint="to start again, delete the output, or name another one with -o"),
    Mistake("a backbone is left out", "inspect photos", "photos is a folder; expected a backbone",
            hint="expected: ... inspect BACKBONE IMAGES"),
    Mistake("backbone and images are swapped", "inspect photos timm/test_resnet",
            "photos is a folder; expected a backbone",
            hint="expected: ... inspect BACKBONE IMAGES"),
    Mistake("a folder in place of a config file", "sync photos",
            "config file photos: it is a folder; expected a YAML file, which names the folder",
            hint="to make one: printf '%s\\n' 'images: photos' 'out: outputs/photos-sync' > photos.yaml"),
    Mistake("an option without effect", "embed photos --address 10.0.0.1:6379",
            "--address is that of a Ray cluster", "add --engine ray"),
    Mistake("an option of several workers for one", "embed photos --cpus-per-worker 4",
            "--cpus-per-worker is for several workers, and this run has one", "add --engine processes"),
    Mistake("an option of another kind of figure", "draw maps timm/test_resnet photos --target 3",
            "--target is for gradcam, not for maps",
            hint="leave it out"),
    Mistake("two options that exclude each other", "embed photos --engine processes --fast",
            "--fast works in one process and on a folder only", "`layertap doctor --bench` prints the fastest flags"),
)  # fmt: skip

OUTPUTS = (
    Mistake("the output is the folder of the images", "embed photos SMALL -o photos",
            "photos is not empty and not a layertap data set",
            hint="choose another output folder"),
    Mistake("the output is a file", "embed photos SMALL -o names.csv", "names.csv is a file",
            hint="name a folder for the output"),
    Mistake("the output is in a place that cannot be written", "embed photos SMALL -o /proc/layertap",
            "/proc/layertap: the folder cannot be created in /proc: ...",
            hint="choose another output folder with -o"),
    Mistake("the output has other features", "embed photos SMALL -o outputs/photos -l layer1",
            "outputs/photos holds other features; rows with these differences cannot be "
            "mixed:...features.layer1: stored nothing, now layer1 mean_map [32]",
            hint="... --add-layers", lines=5),
    Mistake("a run is resumed with another backbone",
            "embed photos -b timm/test_vit --weights random -o outputs/photos",
            "outputs/photos holds other features; rows with these differences cannot be mixed:...architecture: "
            "stored timm/test_resnet, now timm/test_vit...",
            hint="... -o outputs/photos-2", lines=12),
)  # fmt: skip

DATA_SETS = (
    Mistake("a probe of images without classes", "probe outputs/flat",
            "none of the 3 rows has both features and a label: 3 unlabelled",
            hint="name a table of labels: --labels FILE.csv"),
    Mistake("a search without a query", "search outputs/photos",
            "expected exactly one query: a row number, a path, an image file, or --text TEXT",
            hint="for the images most similar to the first one: layertap search outputs/photos 0"),
    Mistake("a search for a file that does not exist", "search outputs/photos ant/7.png",
            "outputs/photos: ant/7.png is not a row number, a path in it, or a file",
            hint="name a row, or a path such as ant/0.png"),
    Mistake("a place of images that is not used", "search outputs/photos 1 --images photos",
            "--images is for drawing the results",
            hint="add --out FILE"),
    Mistake("an export that exists", "export outputs/photos --to npy -o exported",
            "exported already exists",
            hint="delete it, or choose another name, such as -o exported-2"),
    Mistake("rows are to be computed again, but not how many", "verify outputs/photos --images photos",
            "--images is for computing rows again",
            hint="add --sample N"),
)  # fmt: skip

SECTIONS = {
    "Images": IMAGES, "Backbones": BACKBONES, "Layers": LAYERS, "Options and config files": OPTIONS,
    "Outputs": OUTPUTS, "Finished data sets": DATA_SETS,
}  # fmt: skip
