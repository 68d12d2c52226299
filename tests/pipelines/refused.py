"""Wrong commands whose message has no hint of more than a word, with what follows "error: ".

As in `mistakes.py`, `...` stands for any text, and SMALL for a network that needs no download.
"""

OF_IMAGES = {
    "embed phtos SMALL": "phtos: no such folder or file\n\nhint: did you mean photos?",
    "embed phtos -o s3://bucket/photos": "phtos: no such folder or file\n\nhint: did you mean photos?",
    "embed phtos -o out --engine processes": "phtos: no such folder or file\n\nhint: did you mean photos?",
    "embed photos/atn SMALL": "photos/atn: no such folder or file\n\nhint: did you mean photos/ant?",
    "embed empty SMALL": "empty: no images; the folder is empty",
    "embed names.csv SMALL": "names.csv: no column 'path' among 'file', 'label'; expected a header with 'path' and "
                             "optionally 'label', 'split' and 'id'",
    "embed twice.csv SMALL": "twice.csv: line 3: ant/0.png is already in twice.csv: line 2; expected each path only "
                             "once",
    "embed split.csv SMALL": "split.csv: line 2: split 'dev'; expected train, val, test or an empty value",
}  # fmt: skip

OF_BACKBONES_AND_LAYERS = {
    "embed photos -b resnet50": "backbone 'resnet50' not found\n\n"
                                "hint: did you mean torchvision/resnet50 or timm/resnet50?",
    "embed photos -b tmm/resnetx": "backbone 'tmm/resnetx' not found\n\nhint: did you mean timm/...?",
    "embed photos -b timm/test_resnet --weights lost.pth": "weights file lost.pth does not exist\n\n"
                                                           "hint: did you mean last.pth?",
    "embed photos -b timm/test_resnet --weights ''": "--weights: String should have at least 1 character; got ''",
    "embed photos -b timm/test_vit --weights random --size 200 --crop 200": "timm/test_vit does not accept pictures of "
                                                                            "200x200: ...",
    "embed photos SMALL -l layer4:avg": "':avg' after layer 'layer4' is neither a pooling (auto, none, ...) nor one of "
                                        "its tensors (layer4)",
    "list timm/resnett": "backbone 'timm/resnett' not found; nearest: 'timm/resnet...\n\n"
                         "hint: list them: layertap list timm",
    "list nosuch/*": "backbone 'nosuch/*' not found\n\nhint: the sources are bundled, ...",
    "list timm/test_resnet layr1": "layer 'layr1' not found in timm/test_resnet; nearest: 'layer1', ...\n\n"
                                   "hint: list them: layertap list timm/test_resnet",
    "list timm/test_resnet layer1 --bytes 0": "--bytes is 0; expected a number of images, or a folder or list of "
                                              "images",
    "list timm/test_resnet layer1 --bytes nowhere": "nowhere: no such folder or file",
    "list timm layer1": "layers are those of one backbone; expected SOURCE/NAME\n\nhint: list them: layertap list",
    "list timm/res* --ops": "layers are those of one backbone; expected SOURCE/NAME\n\nhint: list them: layertap list",
    "list --bytes 10": "layers are those of one backbone; expected SOURCE/NAME\n\nhint: list them: layertap list",
    "layers": "Missing argument 'BACKBONE'\n\nhint: ... list --help lists arguments and options",
}  # fmt: skip

OF_VALUES = {
    "embd photos": "No such command 'embd'\n\nhint: did you mean embed?",
    "outputs/photos": "outputs/photos is a path; expected a command\n\nhint: layertap show outputs/photos",
    "embed photos --bach-size 4": "No such option '--bach-size'\n\nhint: did you mean --batch-size or --size?",
    "embed photos --dtype int4": "Invalid value for '--dtype': 'int4' is not one of 'float32', 'float16', 'bfloat16', "
                                 "'int8'\n\nhint: did you mean int8?",
    "embed photos --dtype fp16": "Invalid value for '--dtype': 'fp16' is not one of 'float32', 'float16', 'bfloat16', "
                                 "'int8'\n\nhint: did you mean float16 or bfloat16?",
    "findings outputs/photos --kind duplicates": "Invalid value for '--kind': 'duplicates' is not one of 'failed', "
                                                 "'copy across splits', 'copy', 'near-duplicate', 'suspect label', "
                                                 "'outlier'\n\nhint: did you mean copy or near-duplicate?",
    "embed photos --limit -3": "--limit: expected at least 1; got -3",
    "embed photos --batch-size many": "Invalid value for '--batch-size': 'many' is not a valid integer\n\n"
                                      "hint: ... embed --help lists arguments and options",
    "embed photos --batch-size 99999999999999": "--batch-size: expected at most 100000; got 99999999999999",
    "embed photos --workers 100000": "--workers: expected at most ... processes on this machine; each takes some "
                                     "hundred MB; got 100000",
    "embed photos SMALL --seed 99999999999999999999": "--seed: expected less than 9223372036854775808; got "
                                                      "99999999999999999999",
    "embed photos SMALL --size abc": "--size: expected pixels, such as 256 or 256x320; got 'abc'",
    "embed photos SMALL --crop 1x2x3": "--crop: expected pixels, such as 256 or 256x320; got '1x2x3'",
    "embed photos SMALL --mean 1,2": "mean [1.0, 2.0]: expected three numbers from 0 to 1, since pixels are scaled to "
                                     "0..1",
    "embed photos SMALL --std a,1,c": "--std: expected a valid number; got 'a'\n--std: expected a valid number; "
                                      "got 'c'",
    "embed photos SMALL --max-pixels 0": "--max-pixels: expected at least 1; got 0",
    "embed photos SMALL --compress zip": "Invalid value for '--compress': 'zip' is not one of 'gzip', 'lzf', 'blosc2'"
                                         "\n\nhint: did you mean gzip?",
    "embed photos SMALL -o names.csv/deeper": "names.csv/deeper: the folder cannot be created in ...names.csv: Not a "
                                              "directory\n\nhint: choose another output folder with -o",
    "embed --config photo.yaml": "config file photo.yaml: No such file or directory\n\nhint: did you mean photos.yaml?",
    "embed --config key.yaml": "key 'bacbone' not found in key.yaml; nearest: 'backbone'",
    "embed --config type.yaml": "type.yaml: batch_size: expected a valid integer; got 'many'",
    "embed --config broken.yaml": "config file broken.yaml is not YAML: line 3, column 8: expected ',' or ']', but got "
                                  "':'",
}  # fmt: skip

OF_SEVERAL_WORKERS = {
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
}  # fmt: skip

WITHOUT_EFFECT = {
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
}  # fmt: skip

OF_DATA_SETS = {
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
    "embed photos SMALL -o outputs/photos --seed 1": "outputs/photos holds other features; rows with these differences "
                                                     "cannot be mixed:\n  weights_sha256: stored ..., now ...\n\n"
                                                     "hint: choose another output folder: -o outputs/photos-2",
    "embed photos SMALL -o outputs/photos -l layer1:pca2": "outputs/photos holds other features; ...\n\n"
                                                           "hint: choose another output folder: -o outputs/photos-2",
}  # fmt: skip

REFUSED = OF_IMAGES | OF_BACKBONES_AND_LAYERS | OF_VALUES | OF_SEVERAL_WORKERS | WITHOUT_EFFECT | OF_DATA_SETS
