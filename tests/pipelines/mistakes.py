"""Frequent mistakes: what is typed after `layertap` -> what is printed after "error: ".

`...` stands for any text; SMALL for a network that needs no download. `test_mistakes.py` makes each mistake.
"""

from __future__ import annotations

MISTAKES = {
    # Images
    "embed": "no images given\n\nhint: name IMAGES, or set the key `images` in a config file (--config FILE)",
    "embed my photos": "Got unexpected extra argument (photos)\n\nhint: quote a path with spaces: 'my photos'",
    "embed photos/ant/0.png photos/ant/2.png": "Got unexpected extra argument (photos/ant/2.png)\n\n"
        "hint: name their folder: photos/ant; or a list: (echo path; ls photos/ant/*.png) > list.csv",
    "embed 'photos/ant/*.png'": "photos/ant/*.png: no such folder or file\n\n"
        "hint: name their folder: photos/ant; or a list: (echo path; ls photos/ant/*.png) > list.csv",
    "embed notes SMALL": "notes: no images; none of its 2 files is an image (.txt 1, .docx 1)\n\n"
        "hint: images end in .jpg, ...",
    "embed tars SMALL": "tars: no images; its only file is not an image (.tar 1)\n\n"
        "hint: to read archives, give a pattern, such as 'tars/*.tar'",
    "embed floats.h5 SMALL": "floats.h5 is float32 (4, 8, 8, 3); expected uint8 pictures, (N, H, W, 3), (N, 3, H, W) "
        "or (N, H, W)\n\n"
        "hint: file = h5py.File('floats.h5', 'a'); file['x_uint8'] = (file['x'][:] * 255).round().astype('uint8')",
    "embed phtos SMALL": "phtos: no such folder or file\n\nhint: did you mean photos?",
    "embed phtos -o s3://bucket/photos": "phtos: no such folder or file\n\nhint: did you mean photos?",
    "embed phtos -o out --engine processes": "phtos: no such folder or file\n\nhint: did you mean photos?",
    "embed photos/atn SMALL": "photos/atn: no such folder or file\n\nhint: did you mean photos/ant?",
    # Backbones and layers
    "embed photos -b facebook/dinov2-base": "backbone 'facebook/dinov2-base' not found\n\n"
        "hint: the sources are bundled, ...; a model of the Hugging Face hub is hf/facebook/dinov2-base",
    "embed photos -b last.pth": "backbone 'last.pth' is a file of weights\n\n"
        "hint: give it with --weights, and its network with -b SOURCE/NAME",
    "embed photos -b timm/test_resnet --weights last.pth": "weights last.pth do not fit timm/test_resnet (...)...1 "
        "missing: fc.weight...1 unexpected: head.weight\n\n"
        "hint: all but the classifier 'fc' fits; --allow-missing-head loads the model without it",
    "embed photos -b open_clip/ViT-B-32:openai": "open_clip/ needs open_clip\n\n"
        "hint: to install it: ...pip install ...",
    "embed photos -b torchvision/resnet18": "weights of torchvision/resnet18 could not be downloaded: ...\n\nhint: "
        "download https://download.pytorch.org/models/resnet18-....pth into ..., or give the downloaded file: "
        "--weights FILE",
    "embed photos SMALL --device gpu": "--device: expected auto, cpu, cuda, cuda:N or mps; got 'gpu'\n\n"
        "hint: a GPU is cuda (NVIDIA) or mps (Apple)",
    "embed photos SMALL --device cuda": "device 'cuda' cannot be used: this machine has no CUDA device (...)\n\n"
        "hint: use cpu, or leave out --device",
    "embed photos SMALL -l layer1,layer2": "layer 'layer1,layer2' of timm/test_resnet: a name has no commas\n\n"
        "hint: name each layer by itself (-l layer1 -l layer2; in a list, one item each)",
    "embed photos SMALL -l last": "layer 'last' not found in timm/test_resnet; available: 'embedding', 'conv1', ...\n\n"
        "hint: list them: layertap list timm/test_resnet",
    "embed photos SMALL -l layr4": "layer 'layr4' not found in timm/test_resnet; nearest: 'layer4', ...\n\n"
        "hint: list them: layertap list timm/test_resnet",
    "embed photos SMALL -l ''": "layer '' has no name; expected LAYER[:POOLING]...\n\n"
        "hint: list them: layertap list timm/test_resnet",
    "embed photos -b timm/test_resnet --weights lost.pth": "weights file lost.pth does not exist\n\n"
        "hint: did you mean last.pth?",
    "embed photos -b timm/test_resnet --weights ''": "--weights: String should have at least 1 character; got ''",
    "embed photos -b timm/test_vit --weights random --size 200 --crop 200": "timm/test_vit does not accept pictures "
        "of 200x200: ...",
    "embed photos SMALL -l layer4:avg": "':avg' after layer 'layer4' is neither a pooling (auto, none, ...) nor one "
        "of its tensors (layer4)",
    "list timm/resnett": "backbone 'timm/resnett' not found; nearest: 'timm/resnet...\n\n"
        "hint: list them: layertap list timm",
    "list nosuch/*": "backbone 'nosuch/*' not found\n\nhint: the sources are bundled, ...",
    "list timm/test_resnet layr1": "layer 'layr1' not found in timm/test_resnet; nearest: 'layer1', ...\n\n"
        "hint: list them: layertap list timm/test_resnet",
    "list timm/test_resnet layer1 --bytes 0": "--bytes is 0; expected a number of images, or a folder or list of "
        "images",
    "list timm/test_resnet layer1 --bytes nowhere": "nowhere: no such folder or file",
    "list timm layer1": "layers are those of one backbone; expected SOURCE/NAME\n\nhint: list them: layertap list",
    "layers": "Missing argument 'BACKBONE'\n\nhint: ... list --help lists arguments and options",
    # Options and config files
    "photos": "photos is a path; expected a command\n\nhint: layertap embed photos",
    "embed photos -l layer1 layer2": "Got unexpected extra argument (layer2)\n\n"
        "hint: quote a path with spaces; for several values, repeat the option: -l layer1 -l layer2",
    "embed photos --overwrite": "No such option '--overwrite'\n\n"
        "hint: to start again, delete the output, or name another one with -o",
    "inspect photos": "photos is a folder; expected a backbone\n\nhint: expected: ... inspect BACKBONE IMAGES",
    "inspect photos timm/test_resnet": "photos is a folder; expected a backbone\n\n"
        "hint: expected: ... inspect BACKBONE IMAGES",
    "sync photos": "config file photos: it is a folder; expected a YAML file, which names the folder\n\n"
        "hint: to make one: printf '%s\\n' 'images: photos' 'out: outputs/photos-sync' > photos.yaml",
    "embed photos --address 10.0.0.1:6379": "--address is that of a Ray cluster\n\nhint: add --engine ray",
    "embed photos --cpus-per-worker 4": "--cpus-per-worker is for several workers, and this run has one\n\n"
        "hint: add --engine processes",
    "draw maps timm/test_resnet photos --target 3": "--target is for gradcam, not for maps\n\nhint: leave it out",
    "embed photos --engine processes --fast": "--fast works in one process and on a folder only\n\n"
        "hint: `layertap doctor --bench` prints the fastest flags",
    "embd photos": "No such command 'embd'\n\nhint: did you mean embed?",
    "outputs/photos": "outputs/photos is a path; expected a command\n\nhint: layertap show outputs/photos",
    "embed photos --bach-size 4": "No such option '--bach-size'\n\nhint: did you mean --batch-size or --size?",
    "embed photos --dtype int4": "Invalid value for '--dtype': 'int4' is not one of 'float32', 'float16', 'bfloat16', "
        "'int8'\n\nhint: did you mean int8?",
    "embed photos --dtype fp16": "Invalid value for '--dtype': 'fp16' is not one of 'float32', 'float16', 'bfloat16', "
        "'int8'\n\nhint: did you mean float16?",
    "findings outputs/photos --kind duplicates": "Invalid value for '--kind': 'duplicates' is not one of 'failed', "
        "'copy across splits', 'copy', 'near-duplicate', 'suspect label', 'outlier'\n\n"
        "hint: did you mean copy or near-duplicate?",
    "embed photos --limit -3": "--limit: expected at least 1; got -3",
    "embed photos --batch-size many": "Invalid value for '--batch-size': 'many' is not a valid integer\n\n"
        "hint: ... embed --help lists arguments and options",
    "embed photos --workers 100000": "--workers: expected at most ... processes on this machine; each takes some "
        "hundred MB; got 100000",
    "embed photos SMALL --seed 99999999999999999999": "--seed: expected less than 9223372036854775808; got "
        "99999999999999999999",
    "embed photos SMALL --size abc": "--size: expected pixels, such as 256 or 256x320; got 'abc'",
    "embed photos SMALL --std a,1,c": "--std: expected a valid number; got 'a'\n--std: expected a valid number; got "
        "'c'",
    "embed photos SMALL --max-pixels 0": "--max-pixels: expected at least 1; got 0",
    "embed photos SMALL --compress zip": "Invalid value for '--compress': 'zip' is not one of 'gzip', 'lzf', "
        "'blosc2'\n\nhint: did you mean gzip?",
    "embed photos SMALL -o names.csv/deeper": "names.csv/deeper: the folder cannot be created in ...names.csv: Not a "
        "directory\n\nhint: choose another output folder with -o",
    "embed --config photo.yaml": "config file photo.yaml: No such file or directory\n\nhint: did you mean photos.yaml?",
    "embed --config key.yaml": "key 'bacbone' not found in key.yaml; nearest: 'backbone'",
    # Several workers
    "embed photos --shards-of 2/2": "--shards-of: expected I/N with I from 0 to N - 1, such as 0/8; got '2/2'",
    "embed photos --shards-of 1": "--shards-of: expected I/N with I from 0 to N - 1, such as 0/8; got '1'",
    "embed photos --shards-of 0/2 --retry-failed": "--retry-failed works in one process and on a folder only\n\n"
        "hint: run it later in one process",
    "embed photos --shards-of 0/2 --cpus-per-worker 9999": "cpus_per_worker is 9999; this process may use ... cores",
    "embed photos --engine processes --cpus-per-worker 9999": "cpus_per_worker is 9999; this process may use ... cores",
    "embed photos --engine spark": "Invalid value for '--engine': 'spark' is not one of 'processes', 'ray'\n\n"
        "hint: ... embed --help lists arguments and options",
    "embed photos --device all,cpu": "--device: expected auto, cpu, cuda, cuda:N or mps; got 'all,cpu'\n\n"
        "hint: a GPU is cuda (NVIDIA) or mps (Apple)",
    "embed --config key.yaml --slurm 2": "key 'bacbone' not found in key.yaml; nearest: 'backbone'",
    "embed --slurm 2": "--slurm needs a config file, which each task reads\n\nhint: add --config FILE",
    "embed photos --config photos.yaml --slurm 2": "IMAGES has no effect with --slurm: CONFIG names the images\n\n"
        "hint: leave it out",
    # Options without effect
    "embed x --plan --fast": "--fast has no effect with --plan\n\nhint: leave it out",
    "embed x --gpus 2": "--gpus has no effect without --slurm\n\nhint: add --slurm, or leave it out",
    "sync x --watch --dry-run": "--dry-run has no effect with --watch\n\nhint: leave it out",
    "sync x --print cron": "--print has no effect without --schedule\n\nhint: add --schedule, or leave it out",
    "sync outputs/photos --compact --only x": "--only has no effect: outputs/photos is not a config file\n\n"
        "hint: leave it out",
    "sync x --compact --force": "--force has no effect with --compact\n\nhint: leave it out",
    "doctor --layers x": "--layers has no effect without --bench\n\nhint: add --bench, or leave it out",
    "doctor --bench -o x": "--out has no effect with --bench\n\nhint: leave it out",
    "inspect a b --edit zero --grad": "--grad has no effect with --edit\n\nhint: leave it out",
    "inspect a b --channels 3": "--channels has no effect without --edit\n\nhint: add --edit, or leave it out",
    "show outputs/photos outputs/photos --status": "--status is for one data set\n\nhint: leave it out",
    "draw gradcam timm/test_resnet photos --channels 3": "--channels is for maps, top, not for gradcam\n\n"
        "hint: leave it out",
    "verify outputs/photos --backbone x": "--backbone is for computing rows again\n\nhint: add --sample N",
    "verify outputs/photos --weights x": "--weights is for computing rows again\n\nhint: add --sample N",
    # Outputs and finished data sets
    "embed photos SMALL -o photos": "photos is not empty and not a layertap data set\n\n"
        "hint: choose another output folder",
    "embed photos SMALL -o names.csv": "names.csv is a file\n\nhint: name a folder for the output",
    "embed photos SMALL -o /proc/layertap": "/proc/layertap: the folder cannot be created in /proc: ...\n\n"
        "hint: choose another output folder with -o",
    "embed photos SMALL -o outputs/photos -l layer1": "outputs/photos holds other features; rows with these "
        "differences cannot be mixed:...features.layer1: stored nothing, now layer1 mean_map [32]\n\n"
        "hint: ... --add-layers",
    "embed photos -b timm/test_vit --weights random -o outputs/photos": "outputs/photos holds other features; rows "
        "with these differences cannot be mixed:...architecture: stored timm/test_resnet, now timm/test_vit...\n\n"
        "hint: ... -o outputs/photos-2",
    "probe outputs/flat": "none of the 3 rows has both features and a label: 3 unlabelled\n\n"
        "hint: name a table of labels: --labels FILE.csv",
    "search outputs/photos": "expected exactly one query: a row number, a path, an image file, or --text TEXT\n\n"
        "hint: for the images most similar to the first one: layertap search outputs/photos 0",
    "search outputs/photos ant/7.png": "outputs/photos: ant/7.png is not a row number, a path in it, or a file\n\n"
        "hint: name a row, or a path such as ant/0.png",
    "search outputs/photos 1 --images photos": "--images is for drawing the results\n\nhint: add --out FILE",
    "export outputs/photos --to npy -o exported": "exported already exists\n\n"
        "hint: delete it, or choose another name, such as -o exported-2",
    "verify outputs/photos --images photos": "--images is for computing rows again\n\nhint: add --sample N",
    "show": "Missing argument 'OUT'\n\nhint: ... show --help lists arguments and options",
    "show outputs/phtos": "outputs/phtos does not exist\n\nhint: did you mean outputs/photos?",
    "show photos": "photos is not a layertap data set: it has no dataset.json\n\nhint: did you mean outputs/photos?",
    "show outputs/photos/dataset.json": "outputs/photos/dataset.json is not a layertap data set: it has no "
        "dataset.json\n\nhint: did you mean outputs/photos?",
    "diff outputs/photos none": "none does not exist\n\nhint: did you mean notes?",
    "probe outputs/photos -l layer1": "layer 'layer1' not found in photos; available: 'embedding'",
    "search outputs/photos 99": "outputs/photos has no row 99: expected a row from 0 to 3",
    "search outputs/photos 1 -o found.jpg": "found.jpg: expected a file that ends in .png, .svg, .pdf",
    "export outputs/photos": "Missing option '--to'. Choose from: h5, npy, parquet, mat, hf, rdm\n\n"
        "hint: ... export --help lists arguments and options",
    "export outputs/photos --to csv": "Invalid value for '--to': 'csv' is not one of ...\n\n"
        "hint: ... export --help lists arguments and options",
    "export outputs/photos --to hdf5": "Invalid value for '--to': 'hdf5' is not one of ...\n\n"
        "hint: did you mean ...h5...?",
    "export outputs/photos --to npy -l layer9": "layer 'layer9' not found in outputs/photos; available: 'embedding'",
    "merge outputs/photos outputs/photos -o outputs/twice": "ant/0.png (below ...photos) is in outputs/photos and in "
        "outputs/photos; an image may be in only one of them",
    "merge outputs/photos -o photos": "photos is not empty and not a layertap data set\n\n"
        "hint: choose another output folder",
    "embed photos SMALL -o outputs/photos --seed 1": "outputs/photos holds other features; rows with these "
        "differences cannot be mixed:\n  weights_sha256: stored ..., now ...\n\n"
        "hint: choose another output folder: -o outputs/photos-2",
    "embed photos SMALL -o outputs/photos -l layer1:pca2": "outputs/photos holds other features; ...\n\n"
        "hint: choose another output folder: -o outputs/photos-2",
    # Options of looking into networks, of exports and of probes
    "inspect timm/test_resnet photos --format svg": "--format is that of figures\n\nhint: add --pictures FOLDER",
    "ablate timm/test_resnet photos": "no layer named\n\nhint: expected -l LAYER, or a glob such as -l 'blocks.*'",
    "ablate timm/test_resnet photos -l conv1 --edit nois:1": "edit 'nois:1': expected zero, mean, noise:STD, "
        "scale:FACTOR or prune:FRACTION",
    "ablate timm/test_resnet photos -l conv1 --edit scale:x": "edit 'scale:x': 'x' is not a number",
    "ablate timm/test_resnet photos -l conv1 --edit prune:2": "prune fraction 2.0; expected 0 to 1",
    "ablate timm/test_resnet photos -l conv1 --pictures a.jpg": "a.jpg: expected a file that ends in .png, .svg, .pdf",
    "ablate timm/test_resnet photos -l conv1 --pictures a.png --format pdf": "--format pdf: the file is a.png\n\n"
        "hint: leave out --format",
    "export outputs/photos --to npy --thumbnails 32": "the format npy has no pictures; formats with pictures: "
        "parquet, hf",
    "export outputs/photos --to parquet --images photos": "--images is for thumbnails\n\nhint: add --thumbnails PX",
    "probe outputs/photos -p svm": "Invalid value for '-p' / '--protocol': 'svm' is not one of ...\n\n"
        "hint: ... probe --help lists arguments and options",
    "probe outputs/photos --labels nonsense": "labels 'nonsense': expected FILE.csv, .tsv or .parquet, or "
        "FILE.csv:COLUMN",
    "probe outputs/photos --labels nowhere.csv": "nowhere.csv: no such file\n\nhint: did you mean twice.csv?",
    "probe outputs/photos --test-fraction 1.5": "--test-fraction: expected less than 1; got 1.5",
    "probe outputs/photos --save x.safetensors -p knn": "the protocol knn has no probe that can be saved\n\n"
        "hint: use another protocol",
    "probe outputs/photos -p ridge": "the data set: the label 'ant' is not a number; the protocol ridge predicts "
        "numbers",
    "probe outputs/photos -p ridge --multilabel": "--multilabel: ridge predicts numbers, not labels",
    "probe outputs/photos --similarity --save x.safetensors": "--save is for probes, and --similarity compares layers "
        "in place of probing them",
    "probe outputs/photos -p segmentation": "segmentation needs --masks",
    "probe outputs/photos -p segmentation --masks masks --labels a.csv": "--labels is not for segmentation",
    "probe outputs/photos -p segmentation-dinov3 --masks masks": "Invalid value for '-p' / '--protocol': ... is not "
        "one of ...\n\nhint: did you mean segmentation-knn or segmentation?",
    "probe outputs/photos -p depth": "depth needs --depth",
    "probe outputs/photos -p segmentation --masks masks --iterations 5": "No such option '--iterations'\n\n"
        "hint: leave it out; no protocol of `layertap probe` is trained in iterations",
    "probe outputs/photos -p clip --masks masks": "--masks is for -p segmentation, not for clip",
    "probe outputs/photos -p segmentation-knn --masks masks --save a.safetensors": "the protocol segmentation-knn has "
        "no probe that can be saved\n\nhint: use another protocol",
}  # fmt: skip
