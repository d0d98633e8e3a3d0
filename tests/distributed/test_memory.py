"""Memory of a node that a job may use."""

import os
from pathlib import Path

import pytest

from tests.shell import PROJECT, python
from trainkit.common.process import memory_variables
from trainkit.distributed.device import cgroup_free

GIB = 1 << 30


@pytest.mark.parametrize(
    ("lines", "folder", "limit", "used", "cached"),
    [
        pytest.param("0::/job_7/step_0", "", "memory.max", "memory.current", "inactive_file", id="version 2"),
        pytest.param(
            "4:cpu,memory:/job_7/step_0\n0::/\n3:cpuset:/gone",
            *("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            id="version 1, with an empty group of version 2",
        ),
    ],
)
def test_a_cgroups_limit_is_room(tmp_path: Path, lines: str, folder: str, limit: str, used: str, cached: str) -> None:
    """SLURM's, whichever group of the job has it; files in memory do not count."""
    assert cgroup_free(tmp_path) == 1 << 60
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"9:name=systemd:/x\n{lines}\n")
    assert cgroup_free(tmp_path) == 1 << 60
    for name, allowed, kept in (("job_7", 8 * GIB, GIB), ("job_7/step_0", "max", 0)):
        group = tmp_path / "sys/fs/cgroup" / folder / name
        group.mkdir(parents=True)
        for file, content in ((limit, allowed), (used, 3 * GIB), ("memory.stat", f"cache 5\n{cached} {kept}")):
            (group / file).write_text(str(content))
    assert cgroup_free(tmp_path) == 6 * GIB


_CODE = """
import resource

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def new_pages():
    before = faults()
    [b"x" * (1 << 22) for _ in range(8)]
    return faults() - before

print(min(new_pages() for _ in range(10)))
"""


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="another C library")
@pytest.mark.parametrize(("variable", "is_kept"), [("OTHER", True), ("MALLOC_TRIM_THRESHOLD_", False)])
def test_freed_memory_is_kept_unless_a_user_says(variable: str, is_kept: bool) -> None:
    env = {variable: "131072"}
    done = python("-c", _CODE, cwd=PROJECT, **env, **memory_variables(env))
    assert (int(done.stdout) < 100) == is_kept  # of 8 times 1,024 pages
