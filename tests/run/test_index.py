from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainkit.run import folder
from trainkit.run.folder import find_run


def made(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.yaml").touch()
    return path


def test_remembered_runs_are_known_oldest_first(tmp_path: Path) -> None:
    runs = [made(tmp_path / name) for name in ("b", "a")]
    for run in runs:
        folder.remember(run)
    assert folder.known() == runs


def test_a_run_remembered_twice_is_one(tmp_path: Path) -> None:
    run = made(tmp_path / "a")
    folder.remember(run)
    folder.remember(run)
    assert folder.known() == [run]


def test_a_run_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    folder.remember(tmp_path / "gone")
    assert folder.known() == []


def test_at_first_nothing_is_known() -> None:
    assert folder.known() == []


def test_the_state_folder_is_the_desktop_standards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    folder.remember(made(tmp_path / "a"))
    (file,) = (Path(os.environ["HOME"]) / ".local/state/trainkit/projects").glob("*/runs")
    assert file.read_text() == f"{tmp_path / 'a'}\n"


def test_a_home_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    folder.remember(tmp_path)
    assert folder.known() == []


def other_installation(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on it is another clone that looks."""
    monkeypatch.setattr(folder, "__file__", str(path / "trainkit" / "run" / "folder.py"))


def test_what_another_clone_has_started_is_known_to_who_asks_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.remember(made(tmp_path / "theirs"))
    folder.mark(tmp_path / "theirs", "abc")
    other_installation(tmp_path / "clone", monkeypatch)
    folder.remember(made(tmp_path / "ours"))
    assert folder.known() == [tmp_path / "ours"]
    assert set(folder.known(everywhere=True)) == {tmp_path / "ours", tmp_path / "theirs"}
    assert folder.marked() == []
    assert folder.has(tmp_path / "theirs")  # a command of this user made it


def test_the_list_of_before_each_clone_had_its_own_is_not_forgotten(tmp_path: Path) -> None:
    folder.state_file().parent.mkdir(parents=True)
    folder.state_file().write_text(f"{made(tmp_path / 'old')}\n")
    assert folder.known() == []
    assert folder.known(everywhere=True) == [tmp_path / "old"]
    assert folder.has(tmp_path / "old")


def test_a_name_is_looked_for_here_first_and_then_among_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("run-0001", "run-0002"):
        folder.remember(made(tmp_path / "theirs" / name))
    other_installation(tmp_path / "clone", monkeypatch)
    folder.remember(made(tmp_path / "ours" / "run-0001"))
    assert find_run("run-0001", {}).path == tmp_path / "ours" / "run-0001"
    assert find_run("run-0002", {}).path == tmp_path / "theirs" / "run-0002"
