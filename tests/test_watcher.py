"""A change of a file and the end of a process are told at once, without looking again and again."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from trainkit import watcher
from trainkit.watcher import FileWatcher

linux_tells = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
LONG = 60.0


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "100"]) as running:
        yield running
        running.kill()


def soon(work: Callable[[], object]) -> None:
    threading.Timer(0.1, work).start()


def waited(notice: FileWatcher, otherwise: float = LONG) -> float:
    began = time.monotonic()
    notice.wait(otherwise)
    return time.monotonic() - began


@linux_tells
@pytest.mark.parametrize("is_there", [True, False])
def test_one_is_told_when_a_file_comes_and_when_it_grows(tmp_path: Path, is_there: bool) -> None:
    file = tmp_path / "metrics.jsonl"
    if is_there:
        file.touch()
    with FileWatcher([file]) as notice:
        for work in ([] if is_there else [file.touch]), [lambda: file.write_text("1\n")]:
            for each in work:
                soon(each)
                assert waited(notice) < LONG / 2


@linux_tells
@pytest.mark.parametrize("held", [0, 1024])
def test_what_happened_since_the_last_look_is_told_at_once(tmp_path: Path, held: int) -> None:
    """Also to a process that holds thousands of files."""
    file = tmp_path / "events.jsonl"
    file.touch()
    with ExitStack() as files:
        while files.enter_context(file.open()).fileno() < held:
            pass
        with FileWatcher([file]) as notice:
            file.write_text("1\n")
            assert waited(notice) < LONG / 2


def test_other_files_beside_it_disturb_nobody(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.touch()
    with FileWatcher([file]) as notice:
        (tmp_path / "system-host.jsonl").write_text("1\n")
        assert not notice.wait(0.05)


@linux_tells
def test_one_is_told_once_when_a_process_ends(process: subprocess.Popen[bytes]) -> None:
    with FileWatcher(process=process.pid) as notice:
        soon(process.kill)
        assert waited(notice) < LONG / 2
        assert notice.process_is_over
        assert waited(notice, 0.05) >= 0.05, "an ended process must not keep whoever waits busy"


@linux_tells
def test_who_is_told_of_all_looks_seldom(
    process: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "_SELDOM", 0.4)
    (tmp_path / "events.jsonl").touch()
    with FileWatcher([tmp_path / "events.jsonl"], process.pid) as notice:
        assert waited(notice, 0.01) >= 0.4


def test_where_a_file_cannot_be_seen_one_looks_as_often_as_one_likes(
    process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    with FileWatcher([tmp_path / "not there" / "rank-0.out"], process.pid) as notice:
        assert waited(notice, 0.05) < watcher._SELDOM


def test_where_nobody_tells_one_looks_as_often_as_one_likes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "_open_inotify", lambda: None)
    with FileWatcher([tmp_path / "events.jsonl"]) as notice:
        assert 0.05 <= waited(notice, 0.05) < watcher._SELDOM


def test_a_process_that_is_gone_is_nobody_to_wait_for(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    with FileWatcher(process=process.pid) as notice:
        assert waited(notice, 0.05) < watcher._SELDOM
