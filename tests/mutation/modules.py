"""The core modules, and for each the quick tests that must notice a change in it."""

from pathlib import Path

ROOT = Path(__file__).parents[2]

# As pytest's command line has them, relative to tests/.
MODULES = {
    "trainkit/training/optim.py": "training/test_optim.py",
    "trainkit/training/schedule.py": "training/test_optim.py",
    "trainkit/training/ema.py": "training/test_optim.py",
    "trainkit/training/precision.py": "training/test_precision.py training/test_loop.py training/test_update.py",
    "trainkit/training/tasks/meter.py": "training/tasks/test_meter.py training/tasks/test_multilabel.py",
    "trainkit/training/recorder.py": "training/test_recorder.py training/test_loop.py training/tasks/test_meter.py"
    " training/tasks/test_multilabel.py training/test_survivor.py training/test_pruning.py",
    "trainkit/training/update.py": "training/test_update.py training/test_loop.py training/test_precision.py",
    "trainkit/data/base.py": "data",
    "trainkit/data/order.py": "data",
    "trainkit/data/draws.py": "data",
    "trainkit/checkpoint/format.py": "checkpoint/test_format.py",
    "trainkit/run/events.py": "run jobs/test_status.py jobs/test_logs.py launch/test_batch_job.py"
    " cluster/test_slurm_submission.py monitor/test_follow.py recovery/test_council.py",
}
SLOW = "learns_it or killed_worker or was_killed_leaves or killed_job or is_killed or walks or damaged_image"
"""Tests that are left out, as pytest's -k takes them."""


def tests_of(module: str) -> tuple[str, ...]:
    """What pytest is told to run."""
    return (*(f"tests/{name}" for name in MODULES[module].split()), "-k", f"not ({SLOW})")
