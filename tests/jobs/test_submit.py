from __future__ import annotations

import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runs import last_event
from trainkit.fileio import append_jsonl
from trainkit.run.events import append_event
from trainkit.run.folder import RunDir, next_path

pytestmark = pytest.mark.usefixtures("no_slurm")

PROJECT = Path(__file__).parents[2]
FAST = ("train.epochs=2", "schedule.warmup_epochs=0", "monitor.loggers=[jsonl]")

Command = Callable[..., Any]
Files = Callable[[], list[Path]]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Everything that lies in the test's folder now."""
    return lambda: sorted(path for path in tmp_path.rglob("*") if not path.name.endswith(".calls"))


def test_a_dry_run_prints_the_script_that_is_submitted_and_writes_nothing(
    command: Command, fake_slurm: Path, files: Files, tmp_path: Path
) -> None:
    arguments = ("ddp", "--nodes", "2", "--gpus-per-node", "2", "--account", "thesis", "optim.lr=1e-4")
    before = files()
    dry = command("submit", *arguments, "--dry-run")
    assert dry.code == 0
    assert files() == before
    assert "#SBATCH --account" in dry.err
    assert "flag --account" in dry.err
    done = command("submit", *arguments)
    assert done.code == 0, done.err
    assert (tmp_path / "runs" / "ddp-0001" / "submit.sbatch").read_bytes() == dry.out.encode()
    assert (fake_slurm / "submitted.sbatch").read_bytes() == dry.out.encode()


def test_on_a_narrow_terminal_a_dry_run_cuts_no_setting_and_no_value(
    command: Command, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("ddp", "--nodes", "2", "--gpus-per-node", "2", "optim.lr=1e-4", "model.name=vit_base_patch32_224")
    wide = [line.split("  ")[0] for line in command("submit", *arguments, "--dry-run").err.splitlines() if "  " in line]
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    told = command("submit", *arguments, "--dry-run").err
    lines = {name: re.findall(f"^{re.escape(name)} .*", told, re.MULTILINE) for name in wide}
    assert "#SBATCH --gpus-per-node" in lines
    assert [name for name, found in lines.items() if not found or len(found[0]) > 80] == []
    assert "vit_base_patch32_224" in told
    assert "ddp.yaml:" in told


def test_a_submission_says_job_id_folder_and_what_to_type_next(
    command: Command, fake_slurm: Path, tmp_path: Path
) -> None:
    """In words that can be typed, whatever the folder's name; its data is found from anywhere."""
    done = command("submit", "ddp", "--nodes", "2", "data.root=my/data", "--run-dir", "my runs/ddp-0001")
    assert done.code == 0, done.err
    run = tmp_path / "my runs" / "ddp-0001"
    assert "Submitted job 4711" in done.out
    commands = [shlex.split(line.partition("python ")[2]) for line in done.out.splitlines() if "-m jobs." in line]
    assert [(words[1], str(run) in words) for words in commands] == [
        ("jobs.logs", True), ("jobs.status", True), ("jobs.cancel", True)
    ]  # fmt: skip
    assert {"config.yaml", "plan.json", "submit.sbatch", "manifest.json", "code", "logs"} <= {
        path.name for path in run.iterdir()
    }
    submitted = last_event(RunDir(run), "submitted") or {}
    assert (submitted["executor"], submitted["job_id"]) == ("slurm", "4711")
    assert json.loads((run / "manifest.json").read_text())["command"][3:6] == ["ddp", "--nodes", "2"]
    assert f"root: {tmp_path}/my/data" in (run / "config.yaml").read_text()


def test_a_run_that_sbatch_refuses_leaves_nothing_behind(command: Command, fake_slurm: Path, tmp_path: Path) -> None:
    (fake_slurm / "sbatch").write_text("#!/bin/bash\necho 'sbatch: error: Invalid account' >&2\nexit 1\n")
    done = command("submit", "ddp")
    assert done.code == 4
    assert "Invalid account" in done.err
    left = [path.name for path in (tmp_path / "runs").iterdir()]
    assert left == [".code"], "the code, which the next run shares"


def test_a_sweep_is_one_array_of_complete_runs(command: Command, fake_slurm: Path, tmp_path: Path) -> None:
    done = command("submit", "ddp", "--sweep", "optim.lr=1e-3,2e-3", "--sweep", "seed=1,2")
    assert done.code == 0, done.err
    sweep = tmp_path / "runs" / "ddp-0001"
    assert "array of 4" in done.out
    assert "#SBATCH --array=0-3\n" in (fake_slurm / "submitted.sbatch").read_text()
    points = json.loads((sweep / "sweep.json").read_text())
    assert points[3] == {"run": "3", "overrides": ["optim.lr=2e-3", "seed=2"]}
    assert (last_event(RunDir(sweep / "3"), "submitted") or {})["job_id"] == "4711_3"
    assert "lr: 0.002" in (sweep / "3" / "config.yaml").read_text()
    assert (sweep / "3" / "code" / "jobs" / "train.py").is_file()


def test_a_followed_job_says_what_it_waits_for_and_how_it_ended(
    command: Command, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.schedulers.base.EVERY_SECONDS", 0.5)
    states = "echo x >> $0.n; if [ $(wc -l < $0.n) -lt 3 ]; then echo '4711|PENDING|Priority|0:00|'; "
    states += "else echo '4711|FAILED|NonZeroExitCode|0:01|n1'; fi"
    (fake_slurm / "squeue").write_text(f"#!/bin/bash\n{states}\n")
    done = command("submit", "ddp", "--follow")
    assert done.code == 1
    assert done.out.count("Job 4711: PENDING (Priority)") == 1
    assert "ddp-0001: FAILED" in done.err
    assert "NonZeroExitCode" in done.err


def test_submissions_at_the_same_time_get_folders_of_their_own(
    command: Command, fake_slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = [tmp_path / "runs" / "ddp-0001"]
    taken[0].mkdir(parents=True)
    (taken[0] / "config.yaml").write_text("seed: 0\n")
    found = next_path
    # As if the other folder had been made between the look and the deed.
    monkeypatch.setattr("trainkit.start.next_path", lambda root, name: taken.pop() if taken else found(root, name))
    done = command("submit", "ddp")
    assert done.code == 0, done.err
    assert f"run folder  {tmp_path}/runs/ddp-0002" in done.out
    assert f"TRAINKIT_RUN_DIR={tmp_path}/runs/ddp-0002\n" in (fake_slurm / "submitted.sbatch").read_text()
    assert (tmp_path / "runs" / "ddp-0001" / "config.yaml").read_text() == "seed: 0\n"


@pytest.fixture
def calls(fake_slurm: Path) -> Callable[[], list[str]]:
    """Names of SLURM's commands that were called since the last look."""
    file = fake_slurm / "calls"
    for name in ("sbatch", "scontrol", "squeue", "sacct"):
        text = (fake_slurm / name).read_text()
        (fake_slurm / name).write_text(text.replace("\n", f"\necho {name} >> {file}\n", 1))

    def look() -> list[str]:
        found = file.read_text().split() if file.exists() else []
        file.unlink(missing_ok=True)
        return found

    return look


def test_the_same_run_is_not_queued_twice_unless_asked(
    command: Command, fake_slurm: Path, files: Files, calls: Callable[[], list[str]], tmp_path: Path
) -> None:
    assert command("submit", "ddp", "--nodes", "2").code == 0
    assert len(calls()) <= 4
    before = files()
    done = command("submit", "ddp", "--nodes", "2", "--time", "10:00")
    assert (done.code, done.err) == (0, "")
    assert "ddp-0001 is the same run, and it is PENDING (job 4711)" in done.out
    assert f"cancel      python -m jobs.cancel {tmp_path}/runs/ddp-0001" in done.out
    assert "--again" in done.out
    assert files() == before
    assert calls() == ["squeue"], "nothing was queued, and one question was enough"
    for name_of_its_own in (["--again"], ["--job-name", "x"], ["launch.job_name=x"], ["--run-dir", "runs/mine"]):
        done = command("submit", "ddp", *name_of_its_own)
        assert (done.code, "Submitted job" in done.out) == (0, True)
        assert len(calls()) <= 4
    assert command("submit", "ddp", "seed=1").code == 0


def test_what_would_only_fail_again_is_not_offered_to_be_resumed(
    command: Command, fake_slurm: Path, tmp_path: Path
) -> None:
    assert command("submit", "ddp").code == 0
    run = RunDir(tmp_path / "runs" / "ddp-0001")
    (run.checkpoints / "step-00000007").mkdir(parents=True)
    (run.checkpoints / "latest").symlink_to("step-00000007")
    run.attempt_logs(0).mkdir()
    error = "Training has diverged: 3 updates in a row were not finite. The loss of the last one is nan."
    append_event(run, "failed", attempt=0, rank=0, host="n1", error=error)
    append_event(run, "ended", attempt=0, state="FAILED", job_id="4711")
    done = command("submit", "ddp")
    assert f"has ended (FAILED): `python -m jobs.why {run.path}` says why. This one begins anew." in done.err


def test_a_finished_run_is_the_same_and_a_failed_one_may_be_tried_again(
    command: Command, fake_slurm: Path, calls: Callable[[], list[str]], tmp_path: Path
) -> None:
    assert command("submit", "ddp").code == 0
    run = RunDir(tmp_path / "runs" / "ddp-0001")
    append_event(run, "ended", attempt=0, state="FAILED", job_id="4711")
    calls()
    done = command("submit", "ddp")
    assert done.code == 0
    assert "ddp-0001 is the same run, and it has ended (FAILED): `python -m jobs.why " in done.err
    assert len(calls()) <= 4
    run = RunDir(tmp_path / "runs" / "ddp-0002")
    append_event(run, "ended", attempt=0, state="CANCELLED", job_id="4711")
    (run.checkpoints / "step-00000007").mkdir(parents=True)
    (run.checkpoints / "latest").symlink_to("step-00000007")
    done = command("submit", "ddp")
    assert "ddp-0002 is the same run, and it was cancelled" in done.err
    assert f"`python -m jobs.resume {run.path}` goes on with it from step 7. This one begins anew." in done.err
    run = RunDir(tmp_path / "runs" / "ddp-0003")
    append_event(run, "ended", attempt=0, state="COMPLETED")
    append_jsonl(run.metrics, {"split": "val", "step": 7, "acc1": 90.0, "loss": 0.5})
    calls()
    for follow in ([], ["--follow"], ["--wait"]):
        done = command("submit", "ddp", *follow)
        assert (done.code, done.err) == (0, "")
        assert done.out.splitlines()[:3] == [
            "ddp-0003 is up to date: it has finished with this configuration, code and data.",
            "val acc1 90.00 % (best, step 7)",
            f"run folder       {run.path}",
        ]
        assert "--again" in done.out.splitlines()[-1]


def test_a_run_that_may_live_for_all_that_is_known_is_not_started_twice(command: Command, fake_slurm: Path) -> None:
    assert command("submit", "ddp").code == 0
    (fake_slurm / "squeue").write_text("#!/bin/bash\necho 'slurm_load_jobs error: Unable to contact' >&2\nexit 1\n")
    done = command("submit", "ddp")
    assert done.code == 3
    assert "ddp-0001 is the same run, and nobody can tell whether it still runs." in done.err


def test_the_same_command_follows_a_run_that_goes_on(no_slurm: dict[str, str], tmp_path: Path) -> None:
    submit = [sys.executable, "-m", "jobs.submit", "single", *FAST, "train.epochs=15", "--executor", "local"]
    first, again = (
        subprocess.run([*submit, *flags], env=no_slurm, cwd=tmp_path, capture_output=True, text=True, check=False)
        for flags in (["--no-follow"], [])
    )
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    assert "single-0001 is the same run, and it is " in again.stdout
    assert "test acc1" in again.stdout
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.name.startswith("single")] == ["single-0001"]


def test_other_code_of_ones_own_makes_another_run(command: Command, fake_slurm: Path, tmp_path: Path) -> None:
    model = tmp_path / "my_model.py"
    model.write_text("def build(info):\n    return 1\n")
    for code, says in ((1, "Submitted job"), (1, "is the same run"), (2, "Submitted job")):
        model.write_text(f"def build(info):\n    return {code}\n")
        assert says in command("submit", "ddp", "model.name=my_model:build").out


def test_of_a_sweep_only_what_is_missing_is_trained(command: Command, fake_slurm: Path, tmp_path: Path) -> None:
    assert command("submit", "ddp", "seed=3").code == 0
    done = command("submit", "ddp", "--sweep", "seed=2..4")
    assert done.code == 0, done.err
    assert "Submitted job 4711 (array of 2)" in done.out
    assert "ddp-0001 is the same run, and it is PENDING" in done.out
    points = json.loads((tmp_path / "runs" / "ddp-0002" / "sweep.json").read_text())
    assert [point["overrides"] for point in points] == [["seed=2"], ["seed=4"]]
    told = 'for i in "" _0 _1; do echo "4711$i|RUNNING|None|0:10|n1"; done'
    (fake_slurm / "squeue").write_text(f"#!/bin/bash\n{told}\n")
    done = command("submit", "ddp", "--sweep", "seed=2..4")
    assert done.code == 0, done.err
    assert "Submitted" not in done.out
    assert "ddp-0002/1 is the same run, and it is RUNNING (job 4711_1)." in done.out
    both = f"{tmp_path}/runs/ddp-0002 {tmp_path}/runs/ddp-0001"
    assert f"results     python -m jobs.report {both}" in done.out
    assert "Submitted job" in command("submit", "ddp", "--sweep", "seed=2..4", "--again").out


def test_a_run_is_repeated_by_its_name_from_anywhere(command: Command, fake_slurm: Path, tmp_path: Path) -> None:
    command("submit", "ddp", "optim.lr=3e-4", "--run-dir", "elsewhere/first")
    done = command("submit", "first", "seed=1", "--dry-run")
    assert done.code == 0
    assert re.search(r"optim.lr +0.0003 +file \S*elsewhere/first/config.yaml", done.err)
    assert "Did you mean 'ddp'?" in command("submit", "ddpp").err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["ddpp"], 2, "Did you mean 'ddp'?"),
        (["ddp", "optim.wieght_decay=1"], 2, "Did you mean 'optim.weight_decay'?"),
        (["ddp", "--nodes", "0"], 2, "--nodes"),
        (["ddp", "--nodes", "two"], 2, "--nodes"),
        (["ddp", "--time", "soon"], 2, "--time"),
        (["ddp", "--node", "2"], 2, "Did you mean '--nodes'?"),
        (["ddp", "--executor", "slrum"], 2, "Did you mean 'slurm'?"),
        (["ddp", "--cluster", "nosuch"], 2, "Unknown cluster profile"),
        (["ddp", "optim.lr"], 2, "section.key=value"),
        (["ddp", "--nodes", "3"], 2, "global_batch_size=63 or 66"),
        (["ddp", "train.global_batch_size=1260"], 2, "Use train.global_batch_size=1024, or more data."),
        (["ddp", "model.name=resnet5"], 2, "Unknown model 'resnet5'"),
        (["ddp", "data.name=digit"], 2, "Did you mean 'digits'?"),
        (["ddp", "strategy.name=dpp"], 2, "Did you mean"),
        (["ddp", "strategy.bucket=3"], 2, "Unknown key 'strategy.bucket'"),
        (["single", "--nodes", "2"], 2, "one process"),
        (["ddp", "data.name=cifar10", "data.root=nosuch"], 2, "jobs.prepare cifar10"),
        (["--join", "token"], 2, "submit hivemind --join TOKEN"),
        (["hivemind", "--join", "token", "--array", "0-3"], 2, "Give a whole number: --array 4."),
        (["broken.yaml"], 2, "broken.yaml:2"),
        (["latin.yaml"], 2, "byte 13 is 0xe9"),
        (["nosuch.yaml"], 2, "No file"),
        (["ddp", "--run-dir", "taken"], 2, "exists already"),
        (["ddp", "--run-dir", "half"], 2, "exists already"),
        (["ddp", "--run-dir", ""], 2, "The name of the folder is empty"),
        (["ddp", "--run-dir", "file/run"], 2, "Cannot make the run folder"),
        (["ddp", "--sweep", "seed=1,2", "--run-dir", "taken"], 2, "File exists"),
        (["ddp", "--sweep", "seed=1,x"], 2, "seed"),
        (["ddp", "--sweep", "seed"], 2, "has no values"),
        (["ddp", "--sweep", "launch.nodes=1,2"], 2, "cannot change resources"),
        (["ddp", "--nodes", "2", "--gpus-per-node", "4"], 3, "ddp_sim"),
        (["ddp", "--gres", "gpu:1"], 3, "--gpus-per-node 0"),
        (["ddp", "--executor", "slurm"], 3, "no SLURM on this machine"),
    ],
)
def test_wrong_input_is_answered_in_three_lines_and_writes_nothing(
    command: Command, files: Files, tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    (tmp_path / "broken.yaml").write_text("model: {name: fashion_cnn}\n]: x\n")
    (tmp_path / "latin.yaml").write_bytes(b"seed: 1 # caf\xe9\n")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.yaml").write_text("seed: 0\n")
    (tmp_path / "half").mkdir()
    (tmp_path / "file").write_text("in the way")
    before = files()
    done = command("submit", *arguments)
    assert (done.code, done.out) == (code, "")
    assert words in done.err
    assert [line.split(":")[0] for line in done.err.splitlines()[1:]] == ["  why", "  fix"]
    assert files() == before


@pytest.mark.parametrize(("name", "words"), [(b"caf\xe9/runs", "is no text in UTF-8"), (b"occupied", "TRAINKIT_RUNS")])
def test_a_runs_folder_that_cannot_be_is_refused_before_anything_is_written(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: bytes, words: str
) -> None:
    """As of an archive that was made with another encoding, or with a file in its place."""
    place = tmp_path / os.fsdecode(b"caf\xe9")
    place.mkdir()
    (tmp_path / "occupied").write_text("a file where the folder should be")
    monkeypatch.setenv("TRAINKIT_RUNS", str(tmp_path / os.fsdecode(name)))
    done = command("submit", "ddp")
    assert done.code == 2
    assert words in done.err
    assert list(place.iterdir()) == []


def test_a_rank_that_raises_is_named_with_its_traceback(command: Command, tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text("def build(info):\n    raise RuntimeError('my own mistake')\n")
    done = command("submit", "ddp", *FAST, "model.name=my_model:build")
    assert done.code == 1
    assert "RuntimeError: my own mistake" in done.err
    assert "Traceback" in done.err
    assert " raised RuntimeError: my own mistake, at my_model.py:2." in done.err
    # And not `jobs.resume`: the run has a copy of the code as it was.
    assert f"fix: Mend my_model.py:2: `python -m jobs.submit {tmp_path / 'runs' / 'ddp-0001'}`" in done.err


def test_a_rank_that_refuses_its_settings_is_quoted_everywhere(command: Command, tmp_path: Path) -> None:
    done = command("submit", "single", *FAST, "model.freeze=[nothing]")
    run = tmp_path / "runs" / "single-0001"
    what = "model.freeze: no parameter fits 'nothing'."
    why = "The model's are named like 0.weight, 1.weight, 1.bias."
    fix = 'Use shell wildcards over whole names, for example model.freeze=["blocks.[0-5].*"]. '
    fix += f"`python -m jobs.submit {run} model.freeze=...`"
    assert done.code == 2  # it is the user's setting that is wrong, found late
    assert done.err.splitlines() == [f"single-0001: FAILED. {what}", f"  why: {why}", f"  fix: {fix}"]
    assert command("why", "single-0001").out.splitlines()[1:] == [f"  why: {why}", f"  fix: {fix}"]
    status = command("status", "single-0001").out.splitlines()
    assert [line for line in status if line[:3] in ("cau", "why", "fix")] == [
        f"cause   {what}", f"why     {why}", f"fix     {fix}"
    ]  # fmt: skip
    logs = command("logs", "single-0001").out.splitlines()
    assert logs[:3] == [f"--- single-0001: FAILED. {what}", f"--- why: {why}", f"--- fix: {fix}"]
    report = command("report", "single-0001")
    assert report.code == 2
    assert report.err.splitlines()[1:] == [f"  why: {what} {why}", f"  fix: {fix}"]


def test_debug_runs_in_this_very_process_so_that_breakpoints_work(no_slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text(
        "from trainkit.models.fashion_cnn import build as ours\n"
        "def build(info):\n    breakpoint()\n    return ours(info)\n"
    )
    command = [sys.executable, "-m", "jobs.submit", "ddp", "--nodes", "2", "--executor", "debug", *FAST]
    done = subprocess.run(
        [*command, "model.name=my_model:build"], input="p 'stopped ' + 'here'\nc\n", env=no_slurm, cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "stopped here" in done.stdout
    assert "rank 0 of 1 in this process" in done.stdout
    assert "not 2 nodes" in done.stdout
    assert "val acc1" in done.stdout


def test_interrupting_a_followed_run_leaves_it_running(no_slurm: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-m", "jobs.submit", "single", "train.epochs=500", "monitor.loggers=[jsonl]"]
    with subprocess.Popen(
        command,
        env=no_slurm,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        # As from a terminal, also where the tests themselves run in the background, which ignores interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as submit:
        assert submit.stdout is not None
        while "Attempt 0" not in (line := submit.stdout.readline()):
            assert line, "it ended before it started"
        submit.send_signal(signal.SIGINT)
        rest = submit.stdout.read()
        assert submit.wait() == 130
    assert "Detached; the run goes on." in rest
    run = tmp_path / "runs" / "single-0001"
    assert last_event(RunDir(run), "ended") is None
    cancel = [sys.executable, "-m", "jobs.cancel", str(run)]
    subprocess.run(cancel, env=no_slurm, cwd=tmp_path, check=True, capture_output=True)
    deadline = time.monotonic() + 30
    while last_event(RunDir(run), "ended") is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert (last_event(RunDir(run), "ended") or {})["state"] == "CANCELLED"
    assert os.path.isdir(run)


def test_a_run_that_may_have_a_job_is_kept_when_interrupted(command: Command, fake_slurm: Path, tmp_path: Path) -> None:
    (fake_slurm / "sbatch").write_text("#!/bin/bash\necho 'welcome to our site'\n")
    done = command("submit", "ddp", "--run-dir", "runs/ddp-0001")
    assert done.code == 4
    assert "Nobody can tell" in done.err
    assert "welcome to our site" in done.err
    (script,) = (tmp_path / "runs" / "ddp-0001" / ".submitit").glob("*.sbatch")
    (fake_slurm / "squeue").write_text(f"""#!/bin/bash
case "$*" in *%o*) echo '4711|{script}' ;; *) echo '4711|PENDING|Resources|0:00|' ;; esac
""")
    assert command("status", "ddp-0001").out.splitlines()[1].split()[1:3] == ["PENDING", "4711"]


# A run folder is as open as its mode says, and not as the umask of whoever starts or reports on it

ALL = ["monitor.loggers=[console,jsonl,tensorboard,wandb]", "monitor.profile_steps=[2,4]", "train.epochs=1"]


def wrong_modes(run: Path, mode: int) -> list[str]:
    """Everything in a run folder that is more or less open than the folder is to be."""
    wrong = []
    for path in (run, *run.rglob("*")):
        if not path.is_symlink():
            found = stat.S_IMODE(path.stat().st_mode)
            if found != (mode if path.is_dir() else mode & 0o666):
                wrong.append(f"{found:o} {path.relative_to(run)}")
    return wrong


@pytest.mark.parametrize(
    ("umask", "mode"),
    [
        (0o000, "750"),
        *(
            pytest.param(umask, mode, marks=pytest.mark.long)
            for umask in (0o000, 0o002, 0o077)
            for mode in ("700", "750", "2770")
            if (umask, mode) != (0o000, "750")
        ),
    ],
)
def test_all_of_a_finished_run_is_as_open_as_its_mode_says(umask: int, mode: str, tmp_path: Path) -> None:
    def job(verb: str, *words: str) -> None:
        own = {"TRAINKIT_RUN_MODE": mode, "XDG_STATE_HOME": str(tmp_path / "state"), "WANDB_MODE": "offline"}
        command = [sys.executable, "-m", f"jobs.{verb}", *words]
        env = {**os.environ, **own}
        done = subprocess.run(command, cwd=tmp_path, env=env, umask=umask, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    job("submit", "single", "--executor", "local", "--wait", "--run-dir", "runs/one", *ALL)
    job("evaluate", "runs/one")
    job("report", "runs/one")
    run = tmp_path / "runs" / "one"
    there = {path.name for path in run.iterdir()}
    assert there >= {"tensorboard", "wandb", "profile", "checkpoints", "logbook.md", "report.html", ".submitit", "code"}
    assert wrong_modes(run, int(mode, 8)) == []
    assert (tmp_path / "runs").stat().st_mode & 0o022 == 0, "who can write there replaces the run"
