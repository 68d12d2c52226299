"""What is wrong in a JSON file is told by name: where it is, what is there, and what belongs there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from extract import InputError
from extract.row_status import Status
from extract.store.format.dataset import DataSet
from extract.store.format.receipt import checked_receipt, reasons_of, receipt_bytes, receipt_of
from extract.store.format.schemas import RECEIPT
from extract.system.atomic_files import write_json
from extract.system.json_files import TIME, Text, parse_json, read_json, read_json_lines
from tests.extract.store.rows import complete_data_set

SHAPE = {"a": {"b": [int]}, "c?": (str, None), "d?": {str: float}, "e?": {Text("[0-9]+", "a number"): bool}, "f?": TIME}


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ({"a": {"b": []}}, None),
        ({"a": {"b": [0, 3]}, "c": None, "d": {"x": -1.5, "y": 2}, "e": {"7": True}, "other": [1]}, None),
        ({"a": {"b": [1]}, "f": "2026-01-31T12:00:00+00:00"}, None),
        ({"f": "2026"}, "it has no 'a'"),
        ({"a": 3}, "'a' is 3, expected an object"),
        ({"a": {"b": "text"}}, "'a'.'b' is \"text\", expected a list"),
        ({"a": {"b": [1, -2]}}, "'a'.'b'[1] is -2, expected a whole number from 0"),
        ({"a": {"b": [True]}}, "'a'.'b'[0] is true, expected a whole number from 0"),
        ({"a": {"b": [10**400]}}, "'a'.'b'[0] is a number of 1,329 bits, expected a whole number from 0"),
        ({"a": {"b": []}, "c": 1}, "'c' is 1, expected text"),
        ({"a": {"b": []}, "d": {"x": float("nan")}}, "'d'[\"x\"] is NaN, expected a finite number"),
        ({"a": {"b": []}, "d": {"x": 10**400}}, "'d'[\"x\"] is a number of 1,329 bits, expected a finite number"),
        ({"a": {"b": []}, "e": {"x": True}}, "'e' has the name \"x\", expected a number"),
        ({"a": {"b": []}, "e": {"": 1}}, "'e' has the name \"\", expected a number"),
        ({"a": {"b": []}, "f": "0001-01-01"}, "'f' is \"0001-01-01\", expected a time such as 2026-01-31T12:00:00+00"),
        ([1, 2], "it is a list of 2, expected an object"),
    ],
)
def test_a_fault_is_named(content: Any, fault: str | None) -> None:
    text = json.dumps(content).encode()
    if fault is None:
        assert parse_json(text, "x.json", SHAPE) == content
        return
    with pytest.raises(InputError) as raised:
        parse_json(text, "x.json", SHAPE)
    assert str(raised.value).startswith(f"x.json is damaged: {fault}")


def test_bytes_of_a_path_are_text_and_half_a_pair_is_not() -> None:
    assert parse_json(b'{"a": "\\udcff \\ud83d\\ude00"}', "x") == {"a": "\udcff \U0001f600"}
    with pytest.raises(InputError, match="x is damaged: it is not JSON: "):
        parse_json(b'{"a": "\\ud800"}', "x")
    with pytest.raises(InputError, match="x is damaged: it is empty"):
        parse_json(b"", "x")


def test_a_log_is_read_without_its_damaged_lines(tmp_path: Path) -> None:
    log = tmp_path / "runs.jsonl"
    assert list(read_json_lines(log)) == []
    log.write_bytes(b'{"n": 1}\n\xff\n[]\n{"n": "x"}\n{"n": 2}\n{"n":')
    assert list(read_json_lines(log, {"n": int})) == [{"n": 1}, {"n": 2}]


def test_a_receipt_with_long_reasons_for_all_rows_is_within_its_bound(tmp_path: Path) -> None:
    """Pictures in text take most bytes in JSON."""
    data = complete_data_set(tmp_path / "out", failed=tuple(range(10, 20)))
    for text in ("x" * 100_000, "\U0001f600" * 5000, "\udcff" * 959):
        reasons = dict.fromkeys(range(10, 20), text)
        with data.open_shard(1, data.path(1)) as shard:
            write_json(data.path(1).with_suffix(".json"), receipt_of(data.path(1), shard, reasons))
        assert data.path(1).with_suffix(".json").stat().st_size < receipt_bytes(10) - (1 << 15)
        kept = reasons_of(data.path(1), 10)
        assert kept.keys() == reasons.keys()
        assert all(reason.endswith("...") and text.startswith(reason.strip(".")) for reason in kept.values())


def test_a_receipt_that_is_written_has_the_shape_that_is_read(tmp_path: Path) -> None:
    data = complete_data_set(tmp_path / "out", "gzip", failed=(3,))
    receipt = checked_receipt(data.path(0), 10)
    assert receipt["status"] == {Status.OK.text: 9, Status.DECODE_ERROR.text: 1}
    assert receipt.keys() <= {name.removesuffix("?") for name in RECEIPT}
    assert DataSet.open(data.out) == data
    with pytest.raises(InputError, match=r"has [\d,]+ bytes, expected at most 10"):
        read_json(data.path(0).with_suffix(".json"), RECEIPT, 10)
