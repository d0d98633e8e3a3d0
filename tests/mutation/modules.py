"""The core modules, and for each the quick tests that must notice a change in it."""

from pathlib import Path

ROOT = Path(__file__).parents[2]

MODULES: dict[str, tuple[str, ...]] = {
    "trainkit/training/optim.py": ("tests/training/test_optim.py",),
    "trainkit/training/precision.py": (
        *("tests/training/test_precision.py", "tests/training/test_loop.py", "tests/training/test_update.py"),
        *("-k", "not learns and not dropout"),
    ),
    "trainkit/tasks/meter.py": ("tests/tasks/test_meter.py", "tests/tasks/test_multilabel.py"),
    "trainkit/training/recorder.py": (
        *("tests/training/test_recorder.py", "tests/tasks/test_meter.py", "tests/tasks/test_multilabel.py"),
        *("tests/training/test_loop.py", "-k", "not dropout"),
    ),
    "trainkit/training/update.py": (
        *("tests/training/test_update.py", "tests/training/test_loop.py"),
        "tests/training/test_precision.py::test_a_skipped_update_is_an_event_whoever_trains",
    ),
    "trainkit/data/base.py": ("tests/data", "-k", "not killed and not walks and not damaged_image"),
    "trainkit/checkpoint/format.py": ("tests/checkpoint/test_format.py", "tests/checkpoint/test_save.py", "-k", "not kill"),
    "trainkit/run/events.py": ("tests/run",),
}
