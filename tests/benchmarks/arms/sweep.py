"""``python -m tests.benchmarks.arms.sweep FOLDER POINTS``: what submitting a sweep does before its first job."""

import os
import sys
from pathlib import Path

from trainkit.launch import preparation, run_folders, submission


def main(folder: Path, points: int) -> None:
    """Check, plan and write the runs."""
    sweep = [f"seed=0..{points - 1}"]
    request = preparation.Request("ddp", [], {"launch.executor": ("local", "here")}, sweep, folder, command=["here"])
    prepared = preparation.prepare(request, dict(os.environ))
    configs = [run_folders.stored_config(loaded, Path.cwd()) for loaded in prepared.loadeds]
    planned = submission.plan_runs(prepared)
    marks = [f"{number:032}" for number in range(points)]
    run_folders.write_sweep(folder, configs, planned.plan, planned.script, ["here"], prepared.variants, marks)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
