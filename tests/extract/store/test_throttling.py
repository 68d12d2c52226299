"""Servers that answer 503, are silent or refuse connections for some time."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from extract.errors import LayertapError
from extract.store.places import objects as remote
from tests.extract.store.bucket_server import Proxy, first, put

A_MINUTE = "(6[0-9]|7[01])"  # the last pause begins before the minute is over, and is 12 s at most


class Clock:
    """The time as `objects` sees it, which passes in its pauses alone."""

    def __init__(self, after_pause: Callable[[int], None] = lambda number: None):
        self.now, self.pauses, self._after_pause = 1000.0, [], after_pause

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)
        self._after_pause(len(self.pauses))


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Pauses as long as for users, in no time."""
    return patched(monkeypatch, Clock())


def patched(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Clock:
    monkeypatch.setattr(remote, "time", clock)
    monkeypatch.setattr(remote, "_WAIT_S", 0.5)
    monkeypatch.setattr(remote, "_GIVE_UP_S", 60)
    return clock


def test_a_listing_whose_second_page_fails_is_retried_whole(
    proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "6")
    for number in range(11):
        put(proxy, f"{url}/shards/{number:06d}.json", b"x" * number)
    put(proxy, f"{url}/shards/", b"")  # a folder, as consoles create it
    seen: Counter[bool] = Counter()

    def rule(method: str, path: str, count: int) -> str | None:
        is_second_page = "continuation-token" in path
        seen[is_second_page] += 1
        return "503" if is_second_page and seen[True] < 3 else None

    proxy.rule = rule
    assert remote.names(f"{url}/shards") == {f"{number:06d}.json": number for number in range(11)}
    assert seen == {False: 3, True: 3}
    put(proxy, f"{url}/shards/new", b"")  # a listing is never stale
    put(proxy, f"{url}/shards-of-another/x", b"")
    assert len(remote.names(f"{url}/shards")) == 12


def test_a_request_is_retried_for_a_minute_with_growing_pauses(
    proxy: Proxy, url: str, unhurried: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.rule = lambda method, path, count: "SlowDown"
    with pytest.raises(LayertapError, match=f"^{url} cannot be accessed: HTTP 503, [0-9]+ times in {A_MINUTE} s"):
        remote.info(url)
    pauses = unhurried.pauses
    assert len(proxy.seen) == len(pauses) + 1
    assert sum(pauses[:-1]) < 60 <= sum(pauses)
    for number, pause in enumerate(pauses):
        assert 0.5 <= pause / min(0.5 * 2**number, 8) <= 1.5
    assert len(set(pauses)) == len(pauses)  # at random, so that many clients do not return at the same time
    warnings = [record.getMessage() for record in caplog.records if record.name == "layertap.store"]
    assert warnings[0] == f"{url} cannot be accessed yet (HTTP 503); retrying"
    assert 1 <= len(warnings) <= 2  # one a minute


def test_a_server_that_comes_back_is_not_given_up(proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(proxy, url, b"content")
    proxy.refuse()
    try:
        clock = patched(monkeypatch, Clock(lambda number: proxy.accept() if number == 7 else None))
        assert remote.read_range(url, 0, 7) == b"content"
        assert len(clock.pauses) == 7
        proxy.refuse()
        with pytest.raises(
            LayertapError, match=f"^{url} cannot be listed: EndpointConnectionError.* times in {A_MINUTE} s"
        ):
            remote.names(url)
    finally:
        if proxy.is_refusing:
            proxy.accept()


def test_a_silent_server_is_reported_after_the_first_request_and_once_for_all(
    proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_ANSWER_S", 0.2)
    proxy.slow_s = 0.6
    proxy.rule = lambda method, path, count: "hang"
    reported: list[tuple[str, int]] = []

    class Record(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            reported.append((record.getMessage(), proxy.counts["HEAD", f"/{url.removeprefix('s3://')}"]))

    handler = Record()
    logging.getLogger("layertap.store").addHandler(handler)
    try:
        with ThreadPoolExecutor(3) as pool:
            errors = [future.exception() for future in [pool.submit(remote.info, url) for _ in range(3)]]
    finally:
        logging.getLogger("layertap.store").removeHandler(handler)
    assert len(proxy.seen) == 15
    for error in errors:
        assert str(error).startswith(f"{url} cannot be accessed: no answer (ReadTimeoutError), 5 times in ")
    (message, requests), *more = reported
    assert message == f"{url} does not answer; retrying"
    assert requests < 6  # the second of one of the three had perhaps been sent
    assert len(more) <= 1  # another minute may have begun


def test_a_create_whose_answer_was_lost_recognises_its_own_object(proxy: Proxy, url: str) -> None:
    proxy.rule = first("lost", "PUT", "sets", 2)
    assert remote.put(url, b"ours")
    assert sum(method == "PUT" for method, *_ in proxy.seen) == 3
    assert not remote.put(url, b"ours")
    assert remote.read(url) == b"ours"


@pytest.mark.parametrize("count", [pytest.param(5, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.soak)])
def test_data_sets_are_written_resumed_and_read_while_the_server_fails(count: int) -> None:
    script = Path(__file__).with_name("throttling.py")
    run = subprocess.run([sys.executable, str(script), str(count)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    modes = json.loads(run.stdout.splitlines()[-1])
    assert sum(modes.values()) == count
    assert len(modes) >= 5
