from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from trainkit.checkpoint import format
from trainkit.checkpoint.format import BrokenCheckpointError
from trainkit.checkpoint.tensors import read_tensors
from trainkit.errors import UserError


def write(folder: Path, step: int, value: float = 0.0) -> Path:
    return format.write(folder, step, {"model": {"w": torch.full((100,), value)}}, {"note": "hello"})


def test_a_checkpoint_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write(tmp_path, 7, 3.0)
    assert format.verified(tmp_path, 7).state["note"] == "hello"
    assert torch.equal(read_tensors(tmp_path, format.described(tmp_path, 7), "model")["w"], torch.full((100,), 3.0))


def test_latest_names_the_newest(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)
    assert format.pointed(tmp_path, "latest") == 2


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in range(1, 7):
        write(tmp_path, step)
    format.point(tmp_path, "best", 2)
    format.prune(tmp_path, keep=3)
    assert format.steps(tmp_path) == [2, 4, 5, 6]


def test_pruning_keeps_what_latest_names_though_it_is_an_old_one(tmp_path: Path) -> None:
    """After a fall back to an older checkpoint, those after it are newer by number only."""
    for step in range(1, 6):
        write(tmp_path, step)
    format.point(tmp_path, "latest", 1)
    format.prune(tmp_path, keep=2)
    assert format.steps(tmp_path) == [1, 4, 5]


def test_pruning_removes_what_a_killed_deletion_left(tmp_path: Path) -> None:
    write(tmp_path, 1)
    left = tmp_path / ".step-00000009.deleted"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    format.prune(tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink()] == ["step-00000001"]


def test_a_checkpoint_is_deleted_though_an_earlier_deletion_of_it_was_killed(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    left = tmp_path / ".step-00000001.deleted"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    format.prune(tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000002"]


def test_names_and_numbers_stand_for_checkpoints(tmp_path: Path) -> None:
    for step in (3, 5, 8):
        write(tmp_path, step)
    format.point(tmp_path, "best", 3)
    format.point(tmp_path, "latest", 5)
    named = {which: format.resolve(tmp_path, which) for which in ("best", "latest", "8", "00005")}
    assert named == {"best": 3, "latest": 5, "8": 8, "00005": 5}


def test_a_name_that_stands_for_none_is_the_newest_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (3, 5, 8):
        write(tmp_path, step)
    assert format.resolve(tmp_path, "best") == 8
    words = "best does not name a checkpoint of this run. Taking the newest, of step 8.\n"
    assert capsys.readouterr().err.endswith(words)


def test_a_truncated_file_is_noticed(tmp_path: Path) -> None:
    weights = write(tmp_path, 1) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(BrokenCheckpointError, match="bytes instead of"):
        format.verified(tmp_path, 1)


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    weights = write(tmp_path, 1) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(BrokenCheckpointError, match="has changed"):
        format.verified(tmp_path, 1)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_an_unreadable_record_is_a_broken_checkpoint(tmp_path: Path, content: str) -> None:
    (write(tmp_path, 1) / "state.json").write_text(content)
    with pytest.raises(BrokenCheckpointError):
        format.verified(tmp_path, 1)


@pytest.mark.parametrize("step", [1, 7])  # a time limit saves at a step that the next attempt may pass by
def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path: Path, step: int) -> None:
    left = tmp_path / f".step-{step:08d}.partial"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    write(tmp_path, 1)
    assert format.steps(tmp_path) == [1]
    assert not left.exists()


def test_a_second_save_of_a_step_renews_what_is_said_of_it(tmp_path: Path) -> None:
    weights = write(tmp_path, 1) / "model.safetensors"
    before = weights.stat()
    format.write(tmp_path, 1, {"model": {"w": torch.zeros(100)}}, {"note": "again"})
    assert format.verified(tmp_path, 1).state["note"] == "again"
    assert weights.stat().st_ino == before.st_ino  # never taken away


def test_a_second_save_of_a_step_with_other_weights_replaces_them(tmp_path: Path) -> None:
    write(tmp_path, 1, 1.0)
    write(tmp_path, 1, 2.0)
    format.verified(tmp_path, 1)
    assert read_tensors(tmp_path, format.described(tmp_path, 1), "model")["w"][0] == 2


def test_a_broken_checkpoint_is_written_again(tmp_path: Path) -> None:
    (write(tmp_path, 1) / "model.safetensors").unlink()
    write(tmp_path, 1)
    assert set(format.verified(tmp_path, 1).files) == {"model.safetensors"}


def test_asking_for_a_checkpoint_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    write(tmp_path, 5)
    with pytest.raises(UserError) as error:
        format.resolve(tmp_path, "9")
    assert "5" in error.value.why


WRITER = """
import sys, torch
from pathlib import Path
from trainkit.checkpoint import format as files
from trainkit.checkpoint.format import BrokenCheckpointError
folder = Path(sys.argv[1])
print("ready", flush=True)
for step in range(1, 100000):
    files.write(folder, step, {"model": {"w": torch.full((20000,), float(step))}}, {})
    files.prune(folder, 2)
"""


def test_a_kill_at_any_moment_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    for attempt in range(4):
        folder = tmp_path / str(attempt)
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        with writer, writer.stdout:
            writer.stdout.readline()
            deadline = time.monotonic() + 60
            while len(format.steps(folder)) < 2 and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(0.013 * attempt)
            os.kill(writer.pid, signal.SIGKILL)
        assert format.steps(folder)
        for step in format.steps(folder):
            format.verified(folder, step)
            assert read_tensors(folder, format.described(folder, step), "model")["w"][0] == step
        latest = format.pointed(folder, "latest")
        assert latest is not None
        assert latest >= format.steps(folder)[-1] - 1
        assert format.path_of(folder, latest).is_dir()
