"""What the README tells a new user to type is typed here, word for word."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import readme
from tests.runs import last_event
from trainkit.run.folder import RunDir

QUICK_FIRST_RUN = ("train.epochs=1", "monitor.loggers=[jsonl]")


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


def test_the_commands_for_a_laptop_work_as_they_stand(tmp_path: Path) -> None:
    first = type_in(f"python -m jobs.submit ddp --nodes 2 {' '.join(QUICK_FIRST_RUN)}", tmp_path)
    assert first.returncode == 0, first.stderr
    assert "simulating 2 nodes x 1 rank" in first.stdout
    assert "no SLURM on this machine" in first.stdout
    assert "val acc1" in first.stdout
    run = RunDir(tmp_path / "runs" / "ddp-0001")
    assert str(run.path) in first.stdout.splitlines()[-1]
    assert (last_event(run, "started") or {})["world_size"] == 2
    assert (last_event(run, "ended") or {})["state"] == "COMPLETED"
    assert not run.path.joinpath("submit.sbatch").exists()
    for line in [line for block in readme.blocks("laptop") for line in block]:
        done = type_in(line, tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, line
    assert (run.path / "logbook.md").exists()
    of_ddp = [RunDir(path) for path in sorted((tmp_path / "runs").glob("ddp-0*"))]  # by submit, by torchrun, alone
    assert [(last_event(run, "started") or {})["world_size"] for run in of_ddp] == [2, 2, 1]


def test_the_commands_for_two_machines_work_as_they_stand(tmp_path: Path) -> None:
    from trainkit.ranks.env import free_port

    (lines,) = readme.blocks("two machines")
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    nodes = []
    port = free_port()
    for rank, line in enumerate(lines):
        home = tmp_path / f"node{rank}"
        home.mkdir()
        (home / "run.secret").write_text("known to this test only")
        (home / "run.secret").chmod(0o600)
        # Both machines are this one, so the name stands for it and the default port may be taken.
        here = f"{line} --master-port {port}".replace("node0.example.org", "127.0.0.1")
        nodes.append(
            subprocess.Popen(
                shlex.split(here),
                cwd=home,
                env={**env, "TRAINKIT_RUNS": str(home / "runs")},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert "val acc1" in said[0], "node 0 shows rank 0's console and what the run came to"
    for rank in (0, 1):
        assert (last_event(RunDir(tmp_path / f"node{rank}" / "runs" / "ddp-0001"), "ended") or {})[
            "state"
        ] == "COMPLETED"


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
