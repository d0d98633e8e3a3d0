from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.records.replacing import replacing, write_private


def test_a_file_is_as_it_was_until_the_new_one_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    file.write_text("old")
    with replacing(file) as beside:
        beside.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new"
    assert [*tmp_path.iterdir()] == [file]


def test_where_it_cannot_be_finished_nothing_of_it_is_left(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    file.write_text("old")

    def fail() -> None:
        with replacing(file) as beside:
            beside.write_text("ne")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk is full"):
        fail()
    assert file.read_text() == "old"
    assert [*tmp_path.iterdir()] == [file]


def test_what_a_killed_process_has_left_is_written_over(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    (tmp_path / ".summary.json.partial").write_text("half of a longer one")
    with replacing(file) as beside:
        beside.write_text("new")
    assert file.read_text() == "new"
    assert [*tmp_path.iterdir()] == [file]


def test_nobody_else_can_read_a_key_not_even_through_what_a_killed_process_has_left(tmp_path: Path) -> None:
    file = tmp_path / "owner.key"
    left = tmp_path / ".owner.key.partial"
    left.touch(0o644)
    with left.open("rb") as held:
        write_private(file, b"secret")
        assert held.read() == b""
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"secret", 0o600)
