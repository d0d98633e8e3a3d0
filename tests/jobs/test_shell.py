"""A shell beside the ranks of a run: of runs on this machine here, of jobs of a cluster in tests/slurm."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.debian import cannot_run
from tests.jobs.conftest import PROJECT, Command, make_run
from tests.runs import script, wait_until
from trainkit.cluster.plan import Plan
from trainkit.cluster.scheduler import named
from trainkit.common.errors import RefusedError
from trainkit.launch import on_node
from trainkit.launch.shell import place_of
from trainkit.run.events import append_event
from trainkit.run.folder import RunDir

ASLEEP = """
def asleep_here():
    (run / f'up-{rank}').touch()
    time.sleep(300)
asleep_here()
"""
Shell = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def sleeping(
    no_slurm: dict[str, str],
    local_run: Callable[..., tuple[RunDir, Plan]],
    rank_function: Callable[[str], Callable[[str], str]],
    tmp_path: Path,
    command: Command,
) -> Iterator[RunDir]:
    """A run of two ranks on this machine that sleep."""
    run, plan = local_run(nodes=1, ntasks_per_node=2)
    named(plan.executor).submit(run.path, [run], plan, rank_function(ASLEEP), cwd=tmp_path, env=dict(os.environ))
    wait_until(lambda: (run.path / "up-0").exists() and (run.path / "up-1").exists())
    yield run
    command("cancel", str(run.path))


def shell(run: RunDir, *words: str, **env: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "jobs.shell", str(run.path), *words]
    given = {**os.environ, "PYTHONPATH": str(PROJECT), **env}
    return subprocess.run(command, env=given, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=100)


@pytest.mark.nightly
def test_a_command_has_the_environment_of_a_rank_and_is_none(sleeping: RunDir, tmp_path: Path) -> None:
    before = sorted(sleeping.path.rglob("*")), sleeping.events.read_text()
    told = shell(sleeping, "--rank", "1", "--", sys.executable, "-c", "import os; print(dict(os.environ), os.getcwd())")
    assert told.returncode == 0, told.stderr
    assert f"'PYTHONPATH': '{sleeping.code}" in told.stdout
    assert told.stdout.rstrip().endswith(os.path.realpath(tmp_path))
    assert re.findall("'(?:TRAINKIT_(?:RUN_DIR|SECRET|ATTEMPT)|SUBMITIT_\\w+|RANK|MASTER_ADDR)'", told.stdout) == []
    assert shell(sleeping, "--", "/bin/sh", "-c", "exit 7").returncode == 7
    missing = shell(sleeping, "--", "no-such-program")
    assert (missing.returncode, missing.stderr.splitlines()[0]) == (2, "no-such-program cannot be started.")
    assert (sorted(sleeping.path.rglob("*")), sleeping.events.read_text()) == before


@pytest.mark.nightly
def test_the_view_names_the_ranks_and_their_processes(sleeping: RunDir) -> None:
    told = shell(sleeping, "--top", COLUMNS="80")
    rows = [line.split() for line in told.stdout.splitlines()]
    assert {row[1] for row in rows if row[2].isdecimal()} >= {"0", "1"}, told.stderr
    assert max(map(len, told.stdout.splitlines())) <= 80


@pytest.mark.nightly
def test_stacks_are_those_of_the_rank_and_a_refusal_says_what_to_do(sleeping: RunDir, tmp_path: Path) -> None:
    beside = Path(sys.executable).with_name("py-spy")
    if not beside.is_file() and shutil.which("py-spy") is None:
        cannot_run("there is no py-spy")
    told = shell(sleeping, "--rank", "1", "--stack")
    if "may not look into another one" in told.stderr:
        cannot_run("this machine does not let py-spy look")
    assert "asleep_here" in told.stdout, told.stderr
    assert "libc" in told.stdout or "libpython" in told.stdout, "the native part"


@pytest.mark.parametrize(
    ("events", "words", "code", "says"),
    [
        ([], (), 2, "has no node: it is NOT SUBMITTED"),
        ([{"event": "ended", "state": "FAILED"}], (), 2, "has no node: it is FAILED"),
        ([], ("--top", "--rank", "1"), 2, "--top shows all nodes"),
        ([], ("--stack", "--", "ls"), 2, "Behind `--` stands one command"),
        ([], ("--",), 2, "Behind `--` stands one command"),
        ([], ("--rank", "1", "--node", "n1"), 2, "not allowed with argument"),
        ([], ("--host", "login"), 2, "There is no terminal for a shell"),
    ],
)
def test_what_has_no_node_or_no_sense_is_refused(
    command: Command, tmp_path: Path, events: list[dict[str, str]], words: tuple[str, ...], code: int, says: str
) -> None:
    run = make_run(tmp_path / "runs" / "ddp-0001")
    for event in events:
        append_event(run, event["event"], state=event["state"])
    done = command("shell", "ddp-0001", *words)
    assert done.code == code
    assert says in done.err
    assert "  why: " in done.err
    assert "  fix: " in done.err


def test_a_job_that_waits_has_no_node_yet(command: Command, fake_slurm: Path) -> None:
    command("submit", "ddp", "--run-dir", "runs/waits")
    done = command("shell", "waits")
    assert done.code == 2
    assert "it is PENDING" in done.err
    assert "why: Resources" in done.err
    assert "waits for its start" in done.err


RUNNING = "echo '4711|RUNNING|None|0:10|n[1-2]|N/A'"


def test_a_job_that_only_a_record_names_is_not_entered(command: Command, fake_slurm: Path, tmp_path: Path) -> None:
    (fake_slurm / "squeue").write_text(f"#!/bin/sh\n{RUNNING}\n")
    make_run(tmp_path / "runs" / "theirs", executor="slurm", job_id="4711")
    done = command("shell", "theirs")
    assert done.code == 3
    assert "Job 4711 may not be theirs's" in done.err
    assert "  fix: " in done.err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_run_of_somebody_else_is_not_entered(command: Command, fake_slurm: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "theirs", job="4711")
    os.chown(run.events, 12345, 12345)
    done = command("shell", "theirs")
    assert done.code == 3
    assert "theirs is not yours" in done.err
    assert "User 12345" in done.err
    assert "Ask them" in done.err


def test_ranks_are_on_the_nodes_of_the_job_in_order(command: Command, fake_slurm: Path, tmp_path: Path) -> None:
    command("submit", "ddp", "--nodes", "2", "--ntasks-per-node", "2", "--gpus-per-node", "2", "--run-dir", "runs/two")
    (fake_slurm / "squeue").write_text(f"#!/bin/sh\n{RUNNING}\n")
    place = place_of(RunDir(tmp_path / "runs" / "two"))
    assert [place.node_of(rank) for rank in range(4)] == ["n1", "n1", "n2", "n2"]
    assert [place.first_rank(node) for node in ("n1", "n2", "0", "1")] == [0, 2, 0, 2]
    step = place.shell(3, ["ls"])
    assert step[:3] == ["srun", "--overlap", "--jobid=4711"]
    assert "--nodelist=n2" in step
    for words, says in ((("--rank", "4"), "has no rank 4"), (("--node", "n3"), "has no node n3")):
        command("shell", "two", *words).refused(2, says, "  why: ", "  fix: ")


@pytest.mark.parametrize(
    ("image", "begins"),
    [("docker://x", "apptainer exec"), ("nvcr.io#nvidia/pytorch", "--container-image=nvcr.io#nvidia/pytorch")],
)
def test_a_shell_is_in_the_container_of_the_ranks(
    command: Command, fake_slurm: Path, tmp_path: Path, image: str, begins: str
) -> None:
    (fake_slurm / "srun").write_text("#!/bin/sh\necho --container-image\n")
    command("submit", "ddp", "--container-image", image, "--run-dir", "runs/inside").ok("4711")
    (fake_slurm / "squeue").write_text(f"#!/bin/sh\n{RUNNING}\n")
    words = " ".join(place_of(RunDir(tmp_path / "runs" / "inside")).shell(0, ["ls"]))
    if begins.startswith("--"):
        assert begins in words
        assert words.endswith(f"PYTHONPATH={tmp_path}/runs/inside/code ls")
    else:  # on the node, where the rank's folder is known
        assert words.endswith("on_node " + f"{tmp_path}/runs/inside shell 0 ls")


# Jupyter


def test_a_lab_without_jupyter_is_refused_before_anything_is_queued(
    command: Command, fake_slurm: Path, tmp_path: Path
) -> None:
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").touch()
    venv = f"launch.environment=venv:{tmp_path}/venv"
    command("submit", "lab", venv).refused(2, "There is no Jupyter", "nothing was queued", "-m pip install jupyterlab")
    assert not (fake_slurm / "submitted.sbatch").exists()
    assert not (tmp_path / "runs").exists()
    (tmp_path / "venv" / "bin" / "jupyter-lab").touch()
    command("submit", "lab", venv, "--dry-run").ok(f"{tmp_path}/venv/bin/python")


DENIED = "Error: Permission Denied: Try running again with elevated permissions by going 'sudo env \"PATH=$PATH\" !!'"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (None, "Stacks need py-spy"),
        (f"echo {shlex.quote(DENIED)} >&2; exit 1", "kernel.yama.ptrace_scope"),
        (
            "echo 'Error: Failed to find python version from target process' >&2; exit 1",
            "Failed to find python version",
        ),
    ],
    ids=["missing", "not permitted", "fails"],
)
def test_stacks_that_cannot_be_taken_say_why(
    no_slurm: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str | None, says: str
) -> None:
    run = make_run(tmp_path / "runs" / "ddp-0001")
    monkeypatch.setattr(on_node, "ranks_here", lambda run: {3: psutil.Process()})
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    if body is not None:
        script(tmp_path / "py-spy", body)
    with pytest.raises(RefusedError) as refused:
        on_node.stacks(run, 3, {"PATH": "/nowhere"})
    assert says in str(refused.value)
    assert refused.value.fix


def test_a_child_that_is_no_python_hides_no_stack(
    no_slurm: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "runs" / "ddp-0001")
    monkeypatch.setattr(on_node, "ranks_here", lambda run: {0: psutil.Process()})
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    script(tmp_path / "py-spy", f'[ "$4" = {os.getpid()} ] && echo "in the rank" && [ $# = 4 ]')
    with subprocess.Popen(["/bin/sleep", "60"]) as child:
        try:
            assert "in the rank" in on_node.stacks(run, 0, {"PATH": "/nowhere"})
        finally:
            child.kill()
