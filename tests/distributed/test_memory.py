"""What a job may use of its node's memory."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.rank_functions import run_ranks
from trainkit.distributed.device import cgroup_free, give_freed_memory_back, keep_freed_memory
from trainkit.ranks.env import RankEnv

GIB = 1 << 30

glibc = pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="another C library")


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def member_of(root: Path, line: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"9:name=systemd:/x\n{line}\n")


def test_slurms_limit_counts_whichever_group_of_the_job_has_it(tmp_path: Path) -> None:
    member_of(tmp_path, "0::/job_7/step_0/task_0")
    top = tmp_path / "sys/fs/cgroup"
    group(top / "job_7", memory__max=str(8 * GIB), memory__current=str(3 * GIB), memory__stat=f"inactive_file {GIB}")
    group(top / "job_7/step_0", memory__max="max", memory__current=str(3 * GIB), memory__stat="inactive_file 0")
    assert cgroup_free(tmp_path) == 6 * GIB, "files in memory do not count"


def test_the_first_version_of_cgroups_is_read_as_well(tmp_path: Path) -> None:
    member_of(tmp_path, "4:memory:/slurm/job_7")
    limits = {"memory__limit_in_bytes": str(4 * GIB), "memory__usage_in_bytes": str(GIB)}
    group(tmp_path / "sys/fs/cgroup/memory/slurm/job_7", **limits, memory__stat="cache 5\ntotal_inactive_file 0")
    assert cgroup_free(tmp_path) == 3 * GIB


@pytest.mark.parametrize("line", ["0::/", "4:memory:/gone", "3:cpu:/"])
def test_where_there_is_no_limit_there_is_room(tmp_path: Path, line: str) -> None:
    member_of(tmp_path, line)
    assert cgroup_free(tmp_path) > 1000 * GIB


def _faults() -> int:
    """Pages that are new to this process in each round, at least."""
    found = []
    for _ in range(10):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [torch.ones(1 << 20) for _ in range(8)]
        del tensors
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(found)


def _found(env: RankEnv) -> tuple[int, int]:
    """Faults where what is freed is kept, and right after it was given back."""
    keep_freed_memory()
    kept = _faults()
    give_freed_memory_back()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 20)
    return kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@glibc
def test_what_is_kept_is_taken_again_without_the_kernel_until_it_is_given_back() -> None:
    ((kept, anew),) = run_ranks(1, _found)
    assert kept < 100
    assert anew > 500  # of the 1,024 pages of one


@glibc
@pytest.mark.parametrize(("name", "calls"), [("MALLOC_TRIM_THRESHOLD_", 0), ("GLIBC_TUNABLES", 0), ("OTHER", 2)])
def test_what_a_user_has_said_in_the_environment_holds(monkeypatch: pytest.MonkeyPatch, name: str, calls: int) -> None:
    monkeypatch.setenv(name, "0")
    with mock.patch("ctypes.CDLL") as library:
        keep_freed_memory()
    assert library.return_value.mallopt.call_count == calls
