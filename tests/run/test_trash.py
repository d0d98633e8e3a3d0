import os
import time
from pathlib import Path

import pytest

from trainkit.common.errors import UserError
from trainkit.run.folder import RunDir
from trainkit.run.trash import KEPT_SECONDS, TRASH, empty_trash, new_heap, parts_of, size_of, throw_away


def test_what_a_run_takes_is_told_by_part(run: RunDir) -> None:
    run.checkpoints.mkdir()
    for name in ("checkpoints/a", "system-vm.jsonl", "tensorboard", "code.zip", "events.jsonl"):
        (run.path / name).write_bytes(os.urandom(100_000))
    found = parts_of(run)
    for part in ("checkpoints", "samples", "curves", "code", "other"):
        assert 100_000 <= found[part] < 120_000, part


def test_what_others_share_and_what_a_link_leads_to_is_not_counted(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(100_000))
    os.link(tmp_path / "big", run.code_archive)
    run.code.symlink_to(tmp_path)
    assert parts_of(run)["code"] < 10_000
    assert size_of(tmp_path / "absent") == 0


def test_the_trash_is_emptied_of_what_is_old(run: RunDir) -> None:
    root = run.path.parent
    throw_away([run.path], root, heap := new_heap(root))
    assert (empty_trash(root), heap.exists()) == (0, True)
    old = heap.rename(root / TRASH / f"{int(time.time() - KEPT_SECONDS) - 1}-0123abcd")
    (other := root / TRASH / "mine").mkdir()
    assert (empty_trash(root), old.exists(), other.exists()) == (1, False, True)
    other.rmdir()
    empty_trash(root)
    assert not (root / TRASH).exists()


def test_a_trash_that_is_a_link_is_neither_filled_nor_emptied(run: RunDir, tmp_path: Path) -> None:
    root, there = run.path.parent, tmp_path / "there"
    (there / "1000000000-0123abcd").mkdir(parents=True)
    (root / TRASH).symlink_to(there)
    assert empty_trash(root) == 0
    with pytest.raises(UserError):
        throw_away([run.path], root, new_heap(root))
    assert run.config.is_file()
    assert (there / "1000000000-0123abcd").is_dir()


def test_a_link_in_the_trash_is_not_followed(run: RunDir, tmp_path: Path) -> None:
    (mine := tmp_path / "mine").mkdir()
    heap = run.path.parent / TRASH / "1000000000-0123abcd"
    heap.mkdir(parents=True)
    (heap / "x").symlink_to(mine)
    assert empty_trash(run.path.parent) == 1
    assert mine.is_dir()
