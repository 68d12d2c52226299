"""Signals to end that arrive several times: exit code 130 or 143, and a plain message."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from extract import defaults
from extract.errors import LayertapError
from extract.images.loading import DeadWorkerError, _start_worker
from pipelines.terminal.graceful_stop import Terminated, signals_held

CODES = [(signal.SIGTERM, 143), (signal.SIGINT, 130)]

# A command that has unfinished files to remove when it ends.
COMMAND = """
import pathlib, sys, time
import click
from extract import defaults
from pipelines import cli
defaults.AT_ONCE_S = 0.3

@click.command()
@click.argument("seconds", type=float)
@click.argument("mark", type=pathlib.Path)
def slow(seconds, mark):
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        time.sleep(seconds)
        mark.write_text("cleaned")

cli.main.add_command(slow)
cli.main()
"""


@contextlib.contextmanager
def command(cleaning_s: float, mark: Path) -> Iterator[subprocess.Popen[str]]:
    arguments = [sys.executable, "-c", COMMAND, "slow", str(cleaning_s), str(mark)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("number", "code"), CODES)
def test_a_signal_that_comes_several_times_at_once_lets_a_command_clean_up(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with command(0.1, tmp_path / "mark") as process:
        for _ in range(10):
            process.send_signal(number)
            time.sleep(0.005)
        errors = process.communicate()[1]
        assert errors == ("terminated\n" if number == signal.SIGTERM else "interrupted\n")
        assert process.returncode == code
    assert (tmp_path / "mark").read_text() == "cleaned"


def test_a_second_signal_some_time_later_is_heard(tmp_path: Path) -> None:
    with command(30, tmp_path / "mark") as process:
        process.send_signal(signal.SIGINT)
        time.sleep(0.35)
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=10)[1]
        assert errors == "interrupted\n"
        assert process.returncode == 130
    assert not (tmp_path / "mark").exists()


def decode_for_long(ready: Any) -> None:
    _start_worker(True, 0)
    ready.set()
    while True:
        time.sleep(0.01)


def test_a_worker_that_gets_sigterm_twice_at_once_lives_and_ends_at_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(defaults, "AT_ONCE_S", 0.3)
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    worker = context.Process(target=decode_for_long, args=(ready,), daemon=True)
    worker.start()
    assert ready.wait(10)
    for _ in range(3):
        worker.terminate()
        time.sleep(0.005)
    worker.join(0.4)
    assert worker.is_alive()
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == -signal.SIGTERM


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)])
def test_workers_that_die_of_a_signal_are_not_reported_as_short_of_memory(
    number: signal.Signals, error: type[BaseException]
) -> None:
    with pytest.raises(error) as raised, signals_held() as received:
        os.kill(os.getpid(), number)
        assert received == [number]
        raise DeadWorkerError("a process that decodes images died")
    assert type(raised.value) is error
    with pytest.raises(DeadWorkerError), signals_held():
        raise DeadWorkerError("without a signal")
    with pytest.raises(LayertapError, match="the disk is full"), signals_held():
        os.kill(os.getpid(), number)
        raise LayertapError("the disk is full")


def test_signals_held_around_a_block_that_holds_them_are_held_after_it() -> None:
    with signals_held() as outer:
        with signals_held() as inner:
            pass
        os.kill(os.getpid(), signal.SIGINT)
        assert (outer, inner) == ([signal.SIGINT], [])
