"""The core modules, and for each the quick tests that must notice a change in it."""

from pathlib import Path

ROOT = Path(__file__).parents[2]

MODULES: dict[str, tuple[str, ...]] = {
    "trainkit/training/optim.py": ("tests/training/test_optim.py",),
    "trainkit/training/precision.py": ("tests/training/test_precision.py", "-k", "not learns"),
    "trainkit/tasks/meter.py": (
        "tests/tasks/test_meter.py",
        "tests/tasks/test_multilabel.py::test_loss_map_and_f1_are_scikit_learns_on_any_number_of_ranks",
    ),
    "trainkit/training/recorder.py": ("tests/training/test_recorder.py", "tests/tasks/test_meter.py"),
    "trainkit/training/update.py": ("tests/training/test_update.py",),
    "trainkit/data/base.py": ("tests/data/test_base.py",),
    "trainkit/checkpoint/format.py": ("tests/checkpoint/test_format.py", "-k", "not kill_at_any_moment"),
    "trainkit/run/events.py": ("tests/run/test_events.py",),
}
