from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainkit import fileio


def test_records_come_back_in_order(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    fileio.append_jsonl(file, {"a": 1})
    fileio.append_jsonl(file, {"b": [1.5, None, "x"]})
    assert list(fileio.read_jsonl(file)) == [{"a": 1}, {"b": [1.5, None, "x"]}]


def test_without_a_file_there_are_no_records(tmp_path: Path) -> None:
    assert list(fileio.read_jsonl(tmp_path / "a.jsonl")) == []


@pytest.mark.parametrize("torn", ['{"a": 2, "b', "{", "3\n", "[1]\n", "\n", "\xff\n"])
def test_a_line_that_is_no_record_is_passed_over(tmp_path: Path, torn: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"a": 1}\n' + torn.encode("latin-1"))
    assert list(fileio.read_jsonl(file)) == [{"a": 1}]


def test_a_torn_line_does_not_swallow_the_record_after_it(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"a": 1}\n{"a": 2, "b')
    fileio.append_jsonl(file, {"a": 3})
    assert list(fileio.read_jsonl(file)) == [{"a": 1}, {"a": 3}]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_json_does_not_have_is_null(tmp_path: Path, value: float) -> None:
    file = tmp_path / "a.jsonl"
    fileio.append_jsonl(file, {"loss": value})
    assert json.loads(file.read_text()) == {"loss": None}


def test_what_json_does_not_know_is_written_as_text(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    fileio.append_jsonl(file, {"path": Path("x/y")})
    assert list(fileio.read_jsonl(file)) == [{"path": "x/y"}]


def test_records_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    code = (
        "import sys; from pathlib import Path; from trainkit import fileio\n"
        "for n in range(50): fileio.append_jsonl(Path(sys.argv[1]), {'who': sys.argv[2], 'n': n, 'text': 'x' * 500})"
    )
    command = [sys.executable, "-c", code, str(file)]
    writers = [subprocess.Popen([*command, who], cwd=Path(__file__).parents[2]) for who in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    records = list(fileio.read_jsonl(file))
    assert [[r["n"] for r in records if r["who"] == who] for who in "ab"] == [list(range(50))] * 2
