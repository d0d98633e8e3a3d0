from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainkit.records import index


def made(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.yaml").touch()
    return path


def test_remembered_runs_are_known_oldest_first(tmp_path: Path) -> None:
    runs = [made(tmp_path / name) for name in ("b", "a")]
    for run in runs:
        index.remember(run)
    assert index.known() == runs


def test_a_run_remembered_twice_is_one(tmp_path: Path) -> None:
    run = made(tmp_path / "a")
    index.remember(run)
    index.remember(run)
    assert index.known() == [run]


def test_a_run_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    index.remember(tmp_path / "gone")
    assert index.known() == []


def test_at_first_nothing_is_known() -> None:
    assert index.known() == []


def test_the_state_folder_is_the_desktop_standards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    index.remember(made(tmp_path / "a"))
    assert (Path(os.environ["HOME"]) / ".local/state/trainkit/runs").read_text() == f"{tmp_path / 'a'}\n"


def test_a_home_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    index.remember(tmp_path)
    assert index.known() == []
