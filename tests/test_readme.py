"""What the README tells a new user to type is typed here, word for word."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import readme


def type_in(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a line on a machine without SLURM, with this environment active."""
    env = {**os.environ, "PATH": str(Path(sys.executable).parent), "TRAINKIT_RUNS": "runs"}
    return subprocess.run(shlex.split(line), cwd=cwd, env=env, capture_output=True, text=True, check=False)


def test_every_block_says_where_it_is_run() -> None:
    # The first two, the main command and the tests, are what `.ci/run` gives.
    marks = readme.marks()
    assert marks[:2] == [None, None]
    assert set(marks[2:]) == {"laptop", "slurm", "login node", "two machines", "swarm"}


def test_ci_gives_the_first_two_blocks() -> None:
    script = (readme.README.parent / ".ci" / "run").read_text()
    assert "for n in 1 2" in script
    assert "README.md" in script


@pytest.mark.parametrize("word", ["Non-goals", "Your own model and data", "SLURM in five minutes", "Presets"])
def test_the_readme_has_its_sections(word: str) -> None:
    assert f"\n## {word}\n" in readme.README.read_text("utf-8")


def test_the_readmes_model_is_one_that_trains(tmp_path: Path) -> None:
    text = readme.README.read_text("utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    (tmp_path / "my_models.py").write_text(code)
    command = code.splitlines()[0].split("used by: ")[1]
    done = type_in(f"{command} train.epochs=1 monitor.loggers=[jsonl]", tmp_path)
    assert done.returncode == 0, done.stderr
