"""The two lists of tests: what either runs, and that nothing is in neither."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.conftest import NIGHTLY, NIGHTLY_FIXTURES, NIGHTLY_MARKS

PROJECT = Path(__file__).resolve().parents[1]
SUITE = """
import pytest

@pytest.fixture
def wheel(): ...
@pytest.fixture
def installed(wheel): ...

def test_plain(): ...
def test_that_needs_a_wheel(installed): ...
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_case(n): ...
@pytest.mark.nightly
def test_that_costs(): ...
@pytest.mark.long
def test_of_minutes(): ...
@pytest.mark.long
@pytest.mark.slurm
def test_of_minutes_on_a_cluster(): ...
class Test:
    pytestmark = pytest.mark.gpu
    def test_in_a_class(self): ...
"""
MARKED = "@pytest.mark.{0}\ndef test_of_{0}(): ...\n"


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A small suite with the options and the conftest.py of this one."""
    options = tomllib.loads((PROJECT / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]["ini_options"]
    markers = "".join(f"\n    {line}" for line in options["markers"])
    ini = f"[pytest]\naddopts = {options['addopts']}\npythonpath = .\nmarkers ={markers}\n"
    (tmp_path / "pytest.ini").write_text(ini)
    (tmp_path / "tests").mkdir()
    for name in ("__init__.py", "conftest.py", "scratch.py"):
        shutil.copy(PROJECT / "tests" / name, tmp_path / "tests")
    (tmp_path / "tests" / "test_it.py").write_text(SUITE + "".join(map(MARKED.format, NIGHTLY_MARKS)))
    return tmp_path


def collected(suite: Path, *options: str) -> list[str]:
    """Tests of ``suite`` that pytest would run."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=suite, capture_output=True, text=True, check=True)
    return re.findall(r"^tests/test_it.py::(\S+)", done.stdout, re.MULTILINE)


def test_a_test_that_is_not_long_is_in_one_of_the_two_lists(suite: Path) -> None:
    default, nightly = collected(suite), collected(suite, "-m", NIGHTLY)
    assert default == ["test_plain", "test_case[1]"]
    assert sorted([*default, *nightly]) == sorted(collected(suite, "-m", "not long"))
    assert {f"test_of_{name}" for name in ("slurm", "swarm")} <= set(nightly)
    assert "wheel" in NIGHTLY_FIXTURES


def test_ci_runs_both_lists() -> None:
    script = (PROJECT / ".ci" / "run").read_text("utf-8")
    default = "pytest -n auto --dist loadfile"
    assert f'{default} -m "{NIGHTLY}" "$@" 2>&1 | tee second-list.log\n' in script
    assert script.endswith('exit "$code"\n')
    assert "set -euo pipefail" in script
    assert f"{default}\n" in (PROJECT / "README.md").read_text("utf-8")
