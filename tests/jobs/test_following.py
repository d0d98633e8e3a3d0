from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from jobs import following
from trainkit.cluster import asking
from trainkit.cluster.slurm_jobs import JobState
from trainkit.records.rundir import RunDir


def test_who_waits_for_a_job_of_this_machine_is_told_of_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = subprocess.Popen(["sleep", "0.3"])

    class Asker:
        def __init__(self, run: RunDir) -> None: ...

        def state(self, **more: Any) -> JobState:
            return JobState("RUNNING" if job.poll() is None else "COMPLETED", str(job.pid), "local")

    monkeypatch.setattr(asking, "Asker", Asker)
    monkeypatch.setattr(following, "LOOK_SECONDS", 60.0)
    monkeypatch.setattr("jobs.following.time.sleep", lambda seconds: pytest.fail("it looks instead"))
    began = time.monotonic()
    assert following.wait_for(RunDir.create(tmp_path / "run", "seed: 0\n")) == 0
    assert 0.2 < time.monotonic() - began < 30
