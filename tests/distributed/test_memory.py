"""What a job may use of its node's memory."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainkit.distributed.device import cgroup_free

GIB = 1 << 30


V2 = ("memory.max", "memory.current", "memory.stat")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")


@pytest.mark.parametrize(
    ("line", "groups", "free"),
    [
        pytest.param(
            "0::/job_7/step_0/task_0",
            {
                "job_7": dict(zip(V2, (8 * GIB, 3 * GIB, f"inactive_file {GIB}"), strict=True)),
                "job_7/step_0": dict(zip(V2, ("max", 3 * GIB, "inactive_file 0"), strict=True)),
            },
            6 * GIB,
            id="SLURM's, whichever group of the job has it; files in memory do not count",
        ),
        pytest.param(
            "4:memory:/slurm/job_7",
            {"memory/slurm/job_7": dict(zip(V1, (4 * GIB, GIB, "cache 5\ntotal_inactive_file 0"), strict=True))},
            3 * GIB,
            id="the first version of cgroups",
        ),
        *[pytest.param(line, {}, 1 << 60, id=f"no limit: {line}") for line in ("0::/", "4:memory:/gone", "3:cpu:/")],
    ],
)
def test_what_a_cgroup_allows_is_room(tmp_path: Path, line: str, groups: dict[str, dict[str, Any]], free: int) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"9:name=systemd:/x\n{line}\n")
    for name, files in groups.items():
        folder = tmp_path / "sys/fs/cgroup" / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            (folder / file).write_text(str(content))
    assert cgroup_free(tmp_path) == free


_CODE = """
import resource, torch
from trainkit.workarounds import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def new_pages():
    before = faults()
    [torch.ones(1 << 20) for _ in range(8)]
    return faults() - before

keep_freed_memory()
print(min(new_pages() for _ in range(10)))
"""


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="another C library")
@pytest.mark.parametrize(("variable", "is_kept"), [("OTHER", True), ("MALLOC_TRIM_THRESHOLD_", False)])
def test_freed_memory_is_kept_unless_a_user_says(variable: str, is_kept: bool) -> None:
    env = {**os.environ, variable: "131072"}
    done = subprocess.run([sys.executable, "-c", _CODE], env=env, capture_output=True, text=True, check=True)
    assert (int(done.stdout) < 100) == is_kept  # of 8 times 1,024 pages
