"""Workers that make shards of nothing: files, one for each shard; at the top of a module, so that they can be sent."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
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
        does: shard -> what happens when it is made: "fails", "meets a cut file", "kills", "hangs", "dies after
            publishing", or "refuses" (at the start).
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

    def build(self, shard: int, on_rows: Callable[[int, bool], None]) -> dict[str, Any] | None:
        if (self._made_up.out / f"shard-{shard}").exists():
            return None
        on_rows(0, True)
        does = self._made_up.does.get(shard, "")
        if does == "fails":
            raise ValueError("a bad shard")
        if does == "meets a cut file":
            raise EOFError("a cut file")
        if does == "kills":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600 if does == "hangs" else self._made_up.takes_s)
        on_rows(10, False)
        receipt = self._publish(shard)
        if does == "dies after publishing":
            os.kill(os.getpid(), signal.SIGKILL)
        return receipt

    def _publish(self, shard: int) -> dict[str, Any] | None:
        try:
            (self._made_up.out / f"shard-{shard}").touch(exist_ok=False)
        except FileExistsError:
            return None
        return {"shard": shard, "status": {"ok": 10}}
