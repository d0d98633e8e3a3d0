"""What a job may use of its node's memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainkit.distributed.device import cgroup_free

GIB = 1 << 30


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


_CODE = """
import resource, torch
from trainkit.workarounds import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def new_pages(count):
    before = faults()
    tensors = [torch.ones(1 << 20) for _ in range(count)]
    del tensors
    return faults() - before

keep_freed_memory()
kept = min(new_pages(8) for _ in range(10))
print(kept)
"""


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="another C library")
@pytest.mark.parametrize(("variable", "is_kept"), [("OTHER", True), ("MALLOC_TRIM_THRESHOLD_", False)])
def test_freed_memory_is_kept_unless_a_user_says(variable: str, is_kept: bool) -> None:
    env = {**os.environ, variable: "131072"}
    done = subprocess.run([sys.executable, "-c", _CODE], env=env, capture_output=True, text=True, check=True)
    assert (int(done.stdout) < 100) == is_kept  # of 8 times 1,024 pages
