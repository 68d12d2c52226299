"""Completion in a shell: what is offered, and that PyTorch is not imported for it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from pipelines.cli import main
from pipelines.terminal.completion import SHELLS
from tests.pipelines.test_cli import layertap


def offered(*words: str) -> list[str]:
    """What click offers for the last word of a command line."""
    completion = ShellComplete(main, {}, "layertap", "_LAYERTAP_COMPLETE")
    return [item.value for item in completion.get_completions(list(words[:-1]), words[-1])]


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
    completion = ShellComplete(main, {}, "layertap", "_LAYERTAP_COMPLETE")
    assert [item.type for item in completion.get_completions(argument[:-1], argument[-1])] == ["file"]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_printed_for_each_shell(shell: str) -> None:
    result = layertap("completion", shell)
    assert result.exit_code == 0
    assert "_LAYERTAP_COMPLETE" in result.stdout
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=result.stdout, text=True, check=True)
