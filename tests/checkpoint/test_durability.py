"""A checkpoint is on the disk before its name is, and nobody writes who has lost the run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainkit.checkpoint import format
from trainkit.checkpoint.save import Checkpoints
from trainkit.distributed.process_group import Distributed
from trainkit.errors import RefusedError
from trainkit.ranks.env import RankEnv

TENSORS = {"model": {"w": torch.ones(10)}, "optimizer": {"m": torch.ones(10)}}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is flushed (by the inode that lies behind the descriptor) and renamed, in order."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor: int) -> None:
        fsync(descriptor)
        done.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")

    def recorded_replace(source: Any, target: Any, **folders: int) -> None:
        replace(source, target, **folders)
        done.append(f"rename to {Path(target).name}")

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    return done


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="tells descriptors by /proc")
def test_everything_is_flushed_before_the_checkpoint_has_its_name_and_the_name_after(
    tmp_path: Path, calls: list[str]
) -> None:
    format.write(tmp_path / "checkpoints", 1, TENSORS, {})
    assert calls == [
        "fsync model.safetensors",
        "fsync optimizer.safetensors",
        "fsync state.json",
        "fsync .step-00000001.partial",
        "rename to step-00000001",
        "fsync checkpoints",  # before `latest` names it
        f"fsync {tmp_path.name}",
        "rename to latest",
        "fsync checkpoints",
    ]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="tells descriptors by /proc")
def test_what_is_said_anew_of_a_checkpoint_is_flushed_before_it_takes_its_place(
    tmp_path: Path, calls: list[str]
) -> None:
    format.write(tmp_path, 1, TENSORS, {})
    calls.clear()
    format.write(tmp_path, 1, TENSORS, {"note": "again"})
    renamed = calls.index("rename to state.json")
    assert calls[:renamed][-2:] == ["fsync state.json", "fsync .step-00000001.partial"]
    assert calls[renamed + 1] == "fsync step-00000001"


class Lease:
    """Held for so many questions."""

    def __init__(self, questions: int) -> None:
        self.left = questions

    def check(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise RefusedError("Another process writes this run now.", why="It has taken it over.", fix="See it.")


def contents(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("questions", [0, 1], ids=["before it begins", "while it writes"])
def test_who_has_lost_the_run_leaves_everything_as_it_was(tmp_path: Path, questions: int) -> None:
    dist, model = Distributed(RankEnv.single(), torch.device("cpu")), nn.Linear(2, 1)
    Checkpoints(tmp_path, keep=1, dist=dist).save(model, None, step=1, state={}, best_step=1)
    before = contents(tmp_path)
    lease = Lease(questions)
    with pytest.raises(RefusedError, match="Another process"):
        Checkpoints(tmp_path, keep=1, dist=dist, may_write=lease.check).save(model, None, step=2, state={}, best_step=2)
    assert contents(tmp_path) == before
    assert (format.pointed(tmp_path, "latest"), format.pointed(tmp_path, "best")) == (1, 1)


def test_extra_tensors_come_back_with_their_checkpoint(tmp_path: Path) -> None:
    dist, model = Distributed(RankEnv.single(), torch.device("cpu")), nn.Linear(2, 1)
    checkpoints = Checkpoints(tmp_path, keep=1, dist=dist)
    extra = {"common": {"theta": torch.arange(3.0), "momentum": torch.ones(3)}}
    checkpoints.save(model, None, step=1, state={"round": 4}, best_step=None, extra=extra)
    restored = checkpoints.restore(nn.Linear(2, 1), None, extra=("common",))
    assert restored is not None
    assert restored.state == {"round": 4}
    assert torch.equal(restored.extra["common"]["theta"], torch.arange(3.0))
