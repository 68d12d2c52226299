"""Workers that make shards of nothing: files, one for each shard; at the top of a module, so that they can be sent."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from extract.errors import InputError


@dataclass(frozen=True)
class MadeUp:
    """Makes `shard-N` in a folder.

    Attributes:
        out: the folder.
        takes_s: seconds for each.
        does: shard -> what happens when it is made: "fails", "kills", "kills ahead" (also while the shard before it in
            a list is made), "hangs", "cannot stop" (takes a second, and is published), "dies after publishing" or
            "refuses" (at the start).
    """

    out: Path
    takes_s: float = 0.0
    does: dict[int, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def __call__(self, say: Callable[[str], None]) -> Iterator[_Making]:
        if "refuses" in self.does.values():
            raise InputError("layer 'x' not found")
        say("ready")
        yield _Making(self)


class _Making:
    about = "a made-up device"

    def __init__(self, made_up: MadeUp):
        self._made_up = made_up

    def build(
        self, shards: Sequence[int], on_rows: Callable[[int, int, bool], None], stop: Callable[[], bool]
    ) -> Iterator[tuple[int, dict[str, Any] | None]]:
        for place, shard in enumerate(shards):
            on_rows(shard, 0, True)
            does = self._made_up.does.get(shard, "")
            if does == "fails":
                raise ValueError("a bad shard")
            if does == "kills" or "kills ahead" in map(self._made_up.does.get, shards[place : place + 2]):
                os.kill(os.getpid(), signal.SIGKILL)
            end = time.monotonic() + {"hangs": 600, "cannot stop": 1.5}.get(does, self._made_up.takes_s)
            while time.monotonic() < end and not (stop() and does not in ("hangs", "cannot stop")):
                time.sleep(0.002)
            if stop() and does != "cannot stop":
                return
            on_rows(shard, 10, False)
            receipt = self._publish(shard)
            if does == "dies after publishing":
                os.kill(os.getpid(), signal.SIGKILL)
            yield shard, receipt

    def _publish(self, shard: int) -> dict[str, Any] | None:
        try:
            (self._made_up.out / f"shard-{shard}").touch(exist_ok=False)
        except FileExistsError:
            return None
        return {"shard": shard, "status": {"ok": 10}}
