"""What a job may use of its node's memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainkit.distributed.device import cgroup_free

GIB = 1 << 30


def test_what_a_cgroup_allows_is_room(tmp_path: Path) -> None:
    """SLURM's, whichever group of the job has it; files in memory do not count."""
    assert cgroup_free(tmp_path) == 1 << 60
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("9:name=systemd:/x\n0::/job_7/step_0\n")
    assert cgroup_free(tmp_path) == 1 << 60
    for group, limit, cached in (("job_7", 8 * GIB, GIB), ("job_7/step_0", "max", 0)):
        folder = tmp_path / "sys/fs/cgroup" / group
        folder.mkdir(parents=True)
        for name, content in (("max", limit), ("current", 3 * GIB), ("stat", f"anon 5\ninactive_file {cached}")):
            (folder / f"memory.{name}").write_text(str(content))
    assert cgroup_free(tmp_path) == 6 * GIB


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
