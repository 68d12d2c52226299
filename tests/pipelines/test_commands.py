"""Names of commands and options: those of today, those of earlier versions, and those in hints and examples."""

from __future__ import annotations

import ast
import functools
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.shell_completion import ShellComplete

from extract import FeatureReader
from extract.extraction.settings import HEADINGS, Heading
from pipelines.cli import main
from pipelines.embed.config import EmbedConfig
from pipelines.terminal.commands import GONE_KINDS, GONE_OPTIONS, OLD_COMMANDS, OLD_OPTIONS
from pipelines.terminal.completion import SHELLS
from pipelines.terminal.config import keys_of
from tests.pipelines.test_cli import fails as message_of_failure
from tests.pipelines.test_cli import layertap, succeeds
from tests.test_documents import PAGES, ROOT, blocks, problem

RARE = {
    "sync_s", "scratch", "address", "cpus_per_worker", "workers_per_gpu", "shard_rows", "fit_on", "distortion",
    "min_cosine", "max_pixels",
}  # fmt: skip


@functools.cache
def options_of(command: str) -> set[str]:
    return {name for param in main.commands[command].params for name in (*param.opts, *param.secondary_opts)} | {
        "--help"
    }


def fails(*words: object) -> str:
    return message_of_failure(*words).removeprefix("error: ").strip()


# Commands


@pytest.mark.parametrize(("old", "new"), OLD_COMMANDS.items())
def test_a_command_of_an_earlier_version_names_the_new_one_in_one_line(old: str, new: str) -> None:
    result = succeeds(old, "--help")
    assert result.stderr == f"note: `layertap {old}` is now `layertap {new}`\n"
    assert result.stdout == layertap(*new.split(), "--help").stdout
    assert old not in main.commands
    assert problem([*new.split(), "x"]) is None  # it exists, with these options


def test_a_whole_name_lists_layers_and_the_earlier_command_its_backbone() -> None:
    name = "timm/test_resnet"
    assert [entry["spec"] for entry in json.loads(layertap("backbones", name, "--json").stdout)] == [name]
    text = layertap("list", name, "layer?", "fc").stdout
    assert [line.split()[0] for line in text.splitlines()] == ["layer", "layer1", "layer2", "layer3", "layer4", "fc"]
    rows = json.loads(layertap("list", name, "layer1.*", "--ops", "--json").stdout)
    assert {"layer1.0", "layer1.0/add"} <= {row["name"] for row in rows}
    globs = json.loads(layertap("list", "torchvision/resnet1*", "--json").stdout)
    assert [entry["spec"] for entry in globs] == [f"torchvision/resnet1{depth}" for depth in ("01", "52", "8")]


def test_the_embedding_is_listed_first_among_the_layers_with_the_shape_that_embed_stores(out: Path) -> None:
    spec = "timm/test_resnet"
    with FeatureReader(out) as reader:
        width = reader["embedding"].shape[1]
    first, second, *_ = rows = json.loads(layertap("list", spec, "--bytes", 10, "--json").stdout)
    assert (first["name"], first["shapes"], first["bytes"]) == ("embedding", {"": [width]}, 4 * width)
    assert first["bytes_in_all"] == 40 * width
    assert [row["name"] for row in rows].count("embedding") == 1
    assert json.loads(layertap("list", spec, "embedding", "--bytes", 10, "--json").stdout) == rows[:1]
    assert "embedding" not in layertap("list", spec, second["name"]).stdout
    (bundled,) = json.loads(layertap("list", "bundled/efficientnet_lite0", "embedding", "--json").stdout)
    assert bundled["shapes"] == {"": [1280]}


def test_an_unfinished_data_set_shows_its_progress_in_words_and_not_in_json(out: Path) -> None:
    (out / "shards" / "000001.json").unlink()
    whole = layertap("show", out).stdout
    assert "shards    " not in whole
    (out / "shards" / "000001.h5").unlink()
    result = layertap("show", out)
    assert "unfinished: 7 rows done" in result.stdout
    assert "shards    2 of 3" in result.stdout
    assert "to resume, run `layertap embed` with the same arguments again" in result.stdout
    assert json.loads(layertap("show", out, "--json").stdout)["shards_finished"] == 2
    shutil.rmtree(out / "shards")
    assert "unfinished: 0 rows done" in layertap("show", out).stdout


def test_the_status_of_an_empty_folder_and_of_a_failed_pass(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    assert fails("show", tmp_path, "--status").startswith(f"{tmp_path} has no shard yet; a run that is starting")
    runs = [{"event": "failed", "started": "2026-11-28T02:30:00+00:00", "seconds": 1.5, "error": "no server"}]
    for event, code in (("failed", 1), ("stopped", 0)):
        runs.append({**runs[0], "event": event})
        (tmp_path / "runs.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))
        result = layertap("show", tmp_path, "--status")
        assert (result.exit_code, f"{event.upper() if code else event} after 1.5 s" in result.stdout) == (code, True)


# Options


@pytest.mark.parametrize(
    ("command", "old", "new"),
    [("report", "--output", "--out"), ("report", "--layer", "--layers"), ("search", "--output", "--out"),
     ("search", "--layer", "--layers"), ("export", "--output", "--out"), ("predict", "--output", "--out"),
     ("probe", "--results", "--out"), ("probe", "--layer", "--layers"), ("inspect", "--picture", "--pictures"),
     ("embed", "--tasks", "--slurm")],
)  # fmt: skip
def test_an_earlier_name_of_an_option_is_read_as_the_new_one_and_not_listed(command: str, old: str, new: str) -> None:
    context = click.Context(main.commands[command])
    parser = main.commands[command].make_parser(context)
    for words in ([old, "7"], [f"{old}=7"]):
        assert parser.parse_args(words)[0] == parser.parse_args([new, "7"])[0] != {}
    assert not re.search(rf"{old}\b", layertap(command, "--help-all").stdout + layertap(command, "--help").stdout)
    assert OLD_OPTIONS[old] == new


def test_every_option_of_embed_stands_below_one_heading_of_its_field() -> None:
    text = layertap("embed", "--help-all").stdout
    parts = dict(re.findall(r"^([A-Z][^\n]*):\n((?:  .*\n|\n)+)", text, re.MULTILINE))
    for key, field in keys_of(EmbedConfig).items():
        (heading,) = [each for each in field.metadata if isinstance(each, Heading)]
        option = f"--{key.replace('_', '-')}"
        pattern = re.compile(rf"^  (-\w, )?{option}\b(?!-)", re.MULTILINE)
        below = [title for title, lines in parts.items() if pattern.search(lines)]
        assert below == ([heading] if key != "images" else []), key
    assert [title for title in parts if title in HEADINGS] == list(HEADINGS)


def test_rare_options_are_listed_by_help_all_alone_and_work() -> None:
    short, whole = layertap("embed", "--help").stdout, layertap("embed", "--help-all").stdout
    for key in RARE:
        option = f"--{key.replace('_', '-')}"
        assert re.search(rf"^  {option} ", whole, re.MULTILINE), key
        assert not re.search(rf"^  {option} ", short, re.MULTILINE), key
        assert problem(["embed", "photos", option, "1"]) is None
    for option in ("--ignore-label", "--class-names", "--max-memory-mb"):
        assert re.search(rf"^  {option} ", layertap("probe", "--help-all").stdout, re.MULTILINE)
        assert option not in layertap("probe", "--help").stdout
    assert "--help-all" not in layertap("export", "--help").stdout


@pytest.mark.parametrize(("option", "hint"), GONE_OPTIONS.items())
def test_an_option_that_does_not_exist_gets_a_hint(option: str, hint: str) -> None:
    words = [] if option == "--verbose" else ["list"] if option == "--weights" else ["embed", "photos"]
    assert fails(*words, option) == f"No such option '{option}'; {hint}"


@pytest.mark.parametrize(("kind", "hint"), GONE_KINDS.items())
def test_a_picture_that_is_no_longer_drawn_gets_a_hint(kind: str, hint: str) -> None:
    assert fails("draw", kind, "timm/test_resnet", "photos").endswith(f"; {hint}")


def test_the_version_is_printed_under_each_of_its_names() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert layertap("help").stdout == layertap("--help").stdout
    told = {layertap(word).stdout for word in ("-V", "--version", "version")}
    assert len(told) == 1
    assert told.pop().endswith(f", version {version}\n")


# Words of documents


def test_one_sentence_describes_the_project_everywhere() -> None:
    sentence = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["description"]
    site = re.search(r"^site_description: (.*)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert site is not None
    help_text = layertap("--help").stdout
    for text in (site[1], help_text, PAGES["README.md"], PAGES["docs/index.md"], (ROOT / "docs/llms.txt").read_text()):
        assert sentence in " ".join(text.split())


def test_two_commands_of_the_first_pages_do_not_write_other_features_into_one_folder() -> None:
    helps = layertap("--help").stdout + layertap("embed", "--help").stdout
    texts = re.findall(r"`(layertap embed [^`]*)`", PAGES["README.md"])
    texts += re.findall(r"^  (layertap embed .*?)(?:  | #|$)", helps, re.MULTILINE)
    for page in ("README.md", "docs/index.md", "docs/guides/extraction.md"):
        lines = [line for code in blocks(page, "bash") for line in code.splitlines()]
        texts += [line.partition(" #")[0] for line in lines if line.startswith("layertap embed ")]
    features: dict[str, set[tuple[Any, ...]]] = {}
    for text in texts:
        command = main.commands["embed"]
        words = shlex.split(text.partition(" && ")[0])[2:]
        values, _, _ = command.make_parser(click.Context(command)).parse_args(words)
        if values.get("plan") or not isinstance(values["images"], str):
            continue
        place = values.get("out") or f"outputs/{Path(values['images']).stem}"
        features.setdefault(place, set()).add((values.get("backbone"), *(values.get("layers") or ())))
    assert len(features) > 3
    assert {place: kinds for place, kinds in features.items() if len(kinds) > 1} == {}


# Options in hints, messages and examples

ROOMS = ("compare", "data_sets", "doctor", "embed", "network", "probe", "sync")


def commands_of(room: str) -> tuple[str, ...]:
    modules = {name: getattr(each.callback, "__module__", "") for name, each in main.commands.items()}
    return tuple(name for name, module in modules.items() if f".{room}." in module)


# Whose options a text of these modules may name without naming the command; the longest path decides.
OWNERS = {
    "extract": ("embed",),
    "extract/analysis": ("probe", "search", "inspect"),
    "extract/compute/principal_axes.py": ("probe",),  # of features that are stored
    "extract/extraction/check.py": ("check",),
    "extract/images/listing.py": ("search", "report", "verify", "export", "predict"),
    "extract/store": ("verify",),
    "extract/sync": ("sync",),
    "pipelines": tuple(main.commands),
    **{f"pipelines/{room}": commands_of(room) for room in ROOMS},
    "pipelines/embed/bench.py": ("embed",),
}  # fmt: skip
# Options of other programs, and options that are gone: module -> options.
OTHERS = {
    "extract/__init__.py": {"--install"},  # wsl
    "extract/system/optional_libraries.py": {"--python"},  # uv
    "pipelines/compare/job.py": {"--weights"},  # which is replaced in a hint by the column of the table
    "pipelines/embed/cluster/ray_tasks.py": {"--head"},  # ray start
    "pipelines/embed/cluster/slurm.py": {  # sbatch, squeue
        "--job-name", "--array", "--ntasks", "--cpus-per-task", "--gpus-per-task", "--requeue", "--open-mode",
        "--signal", "--output", "--noheader", "--format", "--jobs",
    },
    "pipelines/sync/systemd.py": {"--now"},  # systemctl
    "pipelines/terminal/commands.py": {*OLD_OPTIONS, *GONE_OPTIONS, "--help-all"},
}  # fmt: skip
OPTION = re.compile(r"(?<![\w./-])--[a-z][a-z-]*")


def literals(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of the string literals of a module without its docstrings; `{}` where a value is put in."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.JoinedStr | ast.Expr | ast.Constant)]
    inside = {id(value) for node in nodes if isinstance(node, ast.JoinedStr) for value in node.values}
    inside |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield (
                node.lineno,
                "".join(value.value if isinstance(value, ast.Constant) else "{}" for value in node.values),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, node.value


def wrong_options(module: str, text: str) -> list[str]:
    """Options in a text that the command lacks of which it is the text."""
    wrong = []
    for name, rest in re.findall(r"layertap ([a-z]+)\b([^`\n;]*)", text):
        if name in main.commands:
            wrong += [f"{name} {option}" for option in OPTION.findall(rest) if option not in options_of(name)]
        elif rest.startswith((" -", " OUT", " CONFIG", " {}")):
            wrong.append(f"layertap {name}")
    owners = OWNERS[max((path for path in OWNERS if module.startswith(path)), key=len)]
    free = re.sub(r"layertap [a-z]+\b[^`\n;]*", "", text)
    known = OTHERS.get(module, set()) | {option for owner in owners for option in options_of(owner)}
    return wrong + [option for option in OPTION.findall(free) if option not in known]


def test_every_option_in_a_text_of_the_program_is_one_of_its_command() -> None:
    faults, seen = [], Counter[str]()
    for path in [*(ROOT / "extract").rglob("*.py"), *(ROOT / "pipelines").rglob("*.py")]:
        module = str(path.relative_to(ROOT))
        source = path.read_text(encoding="utf-8")
        for line, text in literals(source) if "--" in source or "layertap " in source else ():
            if re.fullmatch(r"--[\w-]+(/--[\w-]+)?", text) and path.name in ("command.py", "cli.py"):
                continue  # the declaration of an option
            seen[module] += len(OPTION.findall(text))
            faults += [f"{module}:{line}: {option}" for option in wrong_options(module, text)]
    assert faults == []
    assert seen.total() > 150
    assert OTHERS.keys() <= seen.keys()


def test_a_text_with_an_option_that_its_command_lacks_is_noticed() -> None:
    assert wrong_options("pipelines/compare/x.py", "give the file: --weights FILE") == ["--weights"]
    assert wrong_options("extract/backbones/from_timm.py", "give the file: --weights FILE") == []
    assert wrong_options("extract/images/x.py", "`layertap show OUT --status`; use --fast") == []
    assert wrong_options("extract/images/x.py", "`layertap show OUT --fast`; use --watch") == ["show --fast", "--watch"]
    assert wrong_options("extract/images/x.py", "run layertap schedule CONFIG") == ["layertap schedule"]


@pytest.mark.parametrize("name", [name for name, command in main.commands.items() if command.help])
def test_every_example_of_a_help_is_a_command_with_its_options(name: str) -> None:
    lines = re.findall(r"^ *(layertap .*)", main.commands[name].help or "", re.MULTILINE)
    for line in lines:
        for part in re.split(r" && | \| | > ", line.partition(" #")[0]):
            words = shlex.split(part)
            if words[0] == "layertap":
                assert problem(words[1:]) is None, line


def test_a_hint_names_a_key_where_the_running_command_has_no_such_option(folder: Path, tmp_path: Path) -> None:
    values = {"images": str(folder), "out": str(tmp_path / "out"), "backbone": "timm/test_resnet", "device": "cuda:77"}
    (tmp_path / "sync.yaml").write_text(yaml.safe_dump({**values, "weights": "random", "settle": 0}))
    told = layertap("sync", tmp_path / "sync.yaml").stderr
    by_embed = layertap("embed", folder, "-b", "timm/test_resnet", "--weights", "random", "--device", "cuda:77").stderr
    assert "`device: cpu`" in told or "`device`" in told
    assert "--device" in by_embed
    assert "--device" not in told


# Completion in a shell, for which PyTorch is not imported


def offered(*words: str, what: str = "value") -> list[str]:
    """What click offers for the last word of a command line."""
    completion = ShellComplete(main, {}, "layertap", "_LAYERTAP_COMPLETE")
    return [getattr(item, what) for item in completion.get_completions(list(words[:-1]), words[-1])]


def test_commands_options_and_values_are_completed() -> None:
    assert offered("em") == ["embed"]
    assert offered("doctor", "--j") == ["--json"]
    assert offered("embed", "photos", "--dtype", "") == ["float32", "float16", "bfloat16", "int8"]
    assert offered("export", "out", "--to", "p") == ["parquet"]
    assert set(offered("")) == {name for name, command in main.commands.items() if not command.hidden}


def test_completion_after_a_path_or_an_earlier_name_of_a_command_prints_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    assert offered("photos", "") == offered("")
    assert offered("plan", "photos", "--add-l") == ["--add-layers"]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("argument", [["embed", "pho"], ["show", "out"], ["embed", "photos", "-o", "out"]])
def test_paths_are_left_to_the_shell(argument: list[str]) -> None:
    assert offered(*argument, what="type") == ["file"]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_printed_for_each_shell(shell: str) -> None:
    result = succeeds("completion", shell)
    assert "_LAYERTAP_COMPLETE" in result.stdout
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=result.stdout, text=True, check=True)
