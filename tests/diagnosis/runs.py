"""Folders of failed runs, and what is said of them."""

import json
from pathlib import Path
from typing import Any

from trainkit.cluster.scheduler import JobState
from trainkit.config.loading import load, to_yaml
from trainkit.diagnosis.causes import Cause, cause_of
from trainkit.run.events import append_event
from trainkit.run.folder import RunDir

TRACEBACK = 'Traceback (most recent call last):\n  File "/home/me/lab/train.py", line 9, in <module>\n    main()\n{}\n'
EXITED = "srun: error: n2: task 1: Exited with exit code {}"
CONFIG = to_yaml(load("ddp").config)


def make_run(folder: Path, **plan: Any) -> RunDir:
    """A run of two ranks on n1 and n2 whose job 4711 is over."""
    run = RunDir.create(folder, CONFIG)
    run.attempt_logs(0).mkdir()
    run.plan.write_text(json.dumps({"time_limit_seconds": 3600, "world_size": 2, "ntasks_per_node": 1, **plan}))
    append_event(run, "submitted", executor="slurm", job_id="4711")
    for rank in (0, 1):
        (run.attempt_logs(0) / f"rank-{rank}.out").write_text("")
    return run


def diagnose(
    run: RunDir, job: str = "FAILED|NonZeroExitCode", *,
    batch: str = "", rank: str = "", nodes: str = "n[1-2]", executor: str = "slurm",
) -> Cause:  # fmt: skip
    """The cause where the batch script and rank 1 have printed these texts."""
    if rank:
        (run.attempt_logs(0) / "rank-1.err").write_text(rank + "\n")
        if "srun: error: n2" not in batch:
            batch += "\n" + EXITED.format(1)
    if run.logs.exists():
        (run.logs / "batch.out").write_text(f"Attempt 0 on n[1-2]: the ranks' output is in {run.logs}/0\n{batch}\n")
    state, _, reason = job.partition("|")
    cause = cause_of(run, JobState(state, "4711", executor, reason.replace("None", ""), nodes))
    assert cause is not None
    return cause
