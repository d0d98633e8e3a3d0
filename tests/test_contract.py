"""The names on which versions of trainkit agree.

A run trains with the copy of the code that it was submitted with. The program that resumes it may be newer: it writes
the batch script and the pickle, and these call the older code. So none of these names moves, and none of these
functions asks for more.
"""

import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

from tests.shell import python
from trainkit.cluster.pickles import BEGIN, TASK

# Function -> the arguments that it is called with.
FUNCTIONS: dict[str, tuple[object, ...]] = {
    "trainkit.worker:run_rank": ("RUN",),
    "trainkit.launch.batch_job:main": (["begin"], {}),
    "trainkit.launch.controller:main": (["FOLDER", "CWD"], {}),
    "trainkit.distributed.health:main": ({},),
}
# Modules that a batch script, a template or a controller starts with `python -m`.
PROGRAMS = (
    "trainkit.launch.batch_job",
    "trainkit.launch.controller",
    "trainkit.distributed.health",
    "trainkit",
    "jobs",
)
# Module -> what programs of users import from it.
NAMES = {
    "trainkit.data.base": ["DataInfo", "ModelInput", "Samples", "Splits"],
    "trainkit.tasks.base": ["Task"],
}
# What a snapshot of an older version has in place of today's modules: version -> file -> text.
OLDER = {
    "before the rooms": {
        "importing.py": "def installed_first(*_): print('libraries first', end=' ')",
        "process.py": "def leave(code): print('left', code)",
    },
    "of 0.1": {
        "importing.py": "def installed_first(*_): print('libraries first', end=' ')",
        "lifetime.py": "def leave(code): print('left', code)",
    },
}
SUBMITIT = "def submitit_main(): print('ran', end=' ')"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_is_called_by_another_version_takes_the_same(name: str) -> None:
    given = inspect.signature(pkgutil.resolve_name(name)).bind(*FUNCTIONS[name])
    assert given.args == FUNCTIONS[name]


@pytest.mark.parametrize("module", PROGRAMS)
def test_a_module_that_is_started_by_name_is_there(module: str) -> None:
    assert importlib.util.find_spec(module) is not None
    assert importlib.util.find_spec(f"{module}.__main__" if module in ("trainkit", "jobs") else module) is not None


@pytest.mark.parametrize("module", NAMES)
def test_a_name_that_users_import_is_there(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in NAMES[module] if not hasattr(found, name)] == []


@pytest.mark.parametrize("version", OLDER)
def test_a_rank_starts_with_the_code_of_an_older_version(version: str, tmp_path: Path) -> None:
    files = {f"trainkit/{name}": text for name, text in OLDER[version].items()}
    files |= {"trainkit/__init__.py": "", "submitit/__init__.py": "", "submitit/core/__init__.py": ""}
    files |= {"submitit/core/submission.py": SUBMITIT}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    done = python("-S", "-c", TASK, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.stdout.split() == ["libraries", "first", "ran", "left", "0"], done.stderr


def test_a_program_of_the_batch_script_starts_with_todays_code() -> None:
    done = python("-c", BEGIN + "import trainkit; print(trainkit.__name__)")
    assert done.stdout.split() == ["trainkit"], done.stderr
