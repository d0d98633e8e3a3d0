"""A run of somebody else's may name code. No verb runs it unless the user says so."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import trainkit
from trainkit import plugins
from trainkit.config.loading import load, to_yaml
from trainkit.errors import RefusedError, UserError
from trainkit.report.facts import Facts
from trainkit.run.events import append_event, history_of
from trainkit.run.folder import RunDir
from trainkit.run.ownership import require_own_code

Command = Callable[..., Any]
MARK = "it-ran"
STRAY = ("torch", "yaml", "typing", "numpy", "sitecustomize")
PROJECT = Path(__file__).parents[2]


def made(path: Path, *overrides: str) -> RunDir:
    """A run whose snapshot holds a module that leaves a mark when it is imported."""
    run = RunDir.create(path, to_yaml(load("ddp", overrides).config))
    run.code.mkdir()
    (run.code / "strange.py").write_text(f"open({str(path.parent / MARK)!r}, 'w')\ndef build(root): ...\n")
    return run


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    """From now on the user is one who has made no run."""
    return lambda: monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another-user"))


Theirs = Callable[..., RunDir]


@pytest.fixture
def theirs(forget: Callable[[], None], tmp_path: Path) -> Theirs:
    """Makes a run with these settings, by somebody else."""

    def make(*overrides: str) -> RunDir:
        run = made(tmp_path / "ddp-0001", *overrides)
        forget()
        return run

    return make


def asked(run: RunDir, *overrides: str, allow: bool = False, loads: bool = False) -> None:
    """As a verb asks; one that only loads then searches what it may."""
    found = require_own_code(run.path, load(str(run.path), overrides), allow_code=allow, only_loads=loads)
    if loads:
        plugins.search_snapshot(found.code, own=found.own)


@pytest.mark.parametrize(
    "verb", ["evaluate", "train", "submit", "submit --dry-run", "launch", "resume", "swarm create"]
)
def test_no_verb_runs_code_that_a_strangers_run_names(
    command: Command, theirs: Theirs, no_slurm: dict[str, str], tmp_path: Path, verb: str
) -> None:
    run = theirs("data.name=strange:build")
    name, *flags = verb.split()
    done = command(name, *flags, str(run.path))
    assert done.code == 3, done.err
    assert "data.name=strange:build" in done.err
    assert "--allow-code" in done.err
    assert not (tmp_path / MARK).exists()


@pytest.fixture
def shadowing(tmp_path: Path) -> RunDir:
    """A run that names no code, with files in its snapshot that are called as libraries are."""
    run = made(tmp_path / "ddp-0001")
    for name in STRAY:
        (run.code / f"{name}.py").write_text(f"open({str(tmp_path / MARK)!r}, 'w')\n")
    return run


def start(*words: str, cwd: Path, env: Mapping[str, str] = os.environ) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, which has imported nothing yet."""
    command = [sys.executable, "-m", *words]
    own = {**env, "PYTHONPATH": str(PROJECT)}
    return subprocess.run(command, cwd=cwd, env=own, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("whose", "flags"), [("mine", ()), ("theirs", ()), ("theirs", ("--allow-code",))], ids=["mine", "theirs", "allowed"]
)
def test_no_file_of_a_snapshot_is_imported_in_place_of_a_library(
    shadowing: RunDir, forget: Callable[[], None], tmp_path: Path, whose: str, flags: tuple[str, ...]
) -> None:
    if whose == "theirs":
        forget()
    done = start("jobs.evaluate", str(shadowing.path), *flags, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "No checkpoint 'best'" in done.stderr
    assert not (tmp_path / MARK).exists()


def test_ones_own_snapshot_gives_its_modules_and_no_libraries(shadowing: RunDir, tmp_path: Path) -> None:
    """With a module of its own that is named, and that imports another beside it."""
    (shadowing.code / "strange.py").write_text("import beside, torch\ndef net(info): return torch.nn.Identity()\n")
    (shadowing.code / "beside.py").write_text(f"open({str(tmp_path / 'beside-ran')!r}, 'w')\n")
    code = (
        "from trainkit import importing, plugins; importing.installed_first(); from pathlib import Path; "
        f"plugins.search_snapshot(Path({str(shadowing.code)!r}), own=True); "
        "print(plugins.load('trainkit.models', 'strange:net')(None))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.stdout == "Identity()\n", done.stderr
    assert (tmp_path / "beside-ran").exists()
    assert not (tmp_path / MARK).exists()


def test_the_copy_of_a_run_in_a_bucket_shadows_no_library(
    shadowing: RunDir, forget: Callable[[], None], tmp_path: Path
) -> None:
    forget()
    (shadowing.path / "pictures").mkdir()
    done = start("jobs.predict", f"file://{shadowing.path}", str(shadowing.path / "pictures"), cwd=tmp_path)
    assert done.returncode in (1, 2), done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / MARK).exists()


def test_the_folder_of_a_stranger_shadows_no_library_from_within(
    shadowing: RunDir, forget: Callable[[], None], tmp_path: Path
) -> None:
    """`python -m` puts the current folder first on the module path."""
    forget()
    for verb in ("evaluate", "status", "report"):
        done = start(f"jobs.{verb}", str(shadowing.path), cwd=shadowing.code)
        assert "Traceback" not in done.stderr
    assert not (tmp_path / MARK).exists()


def test_a_strangers_module_is_not_found_by_a_library_that_can_do_without(
    theirs: Theirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries try to import what may not be installed. No place of a stranger's run answers, not even from within."""
    run = theirs()
    monkeypatch.chdir(run.code)
    monkeypatch.setattr(sys, "path", [str(run.code), *sys.path])
    asked(run, loads=True)
    with pytest.raises(ImportError):
        importlib.import_module("strange")


def test_code_that_was_allowed_comes_behind_everything(theirs: Theirs, monkeypatch: pytest.MonkeyPatch) -> None:
    run = theirs("data.name=strange:build")
    monkeypatch.setattr(sys, "path", list(sys.path))
    asked(run, allow=True, loads=True)
    assert sys.path[-1] == str(run.code)


@pytest.mark.parametrize("verb", ["resume", "launch"])
def test_a_strangers_snapshot_is_not_started(
    command: Command, theirs: Theirs, no_slurm: dict[str, str], verb: str
) -> None:
    """They start the program in code/, whatever the configuration names."""
    run = theirs()
    done = command(verb, str(run.path))
    assert (done.code, run.attempts()) == (3, [])
    assert str(run.code) in done.err


def test_the_configuration_of_a_strangers_run_is_no_preset(command: Command, theirs: Theirs) -> None:
    run = theirs("data.name=strange:build")
    assert command("submit", str(run.config), "--dry-run").code == 3


SETTINGS = [
    "data.name=strange:build", "model.name=strange:build", "strategy.name=strange:build", "model.name=local-dir:/x",
    "launch.setup=[touch it]", "launch.sbatch.prolog=x", "launch.srun.task-prolog=x", "launch.cluster=devcluster",
    "launch.environment=venv:/x", "launch.modules=[evil]", "launch.container_image=x.sif",
    "launch.container_mounts=[/x:/usr]", "checkpoint.remote=s3://eve/all", "launch.mail_user=eve",
    "monitor.wandb_project=eve", "collaborative.initial_peers=[/ip4/1.2.3.4/tcp/1]", "collaborative.open=true",
]  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
def test_everything_that_imports_starts_or_sends_something_counts(
    forget: Callable[[], None], tmp_path: Path, setting: str
) -> None:
    run = made(tmp_path / "ddp-0001", setting)
    asked(run)  # the user's own
    forget()
    with pytest.raises(RefusedError, match=".".join(setting.split("=")[0].split(".")[:2])):
        asked(run)
    asked(run, allow=True)


def test_one_refusal_lists_all_that_is_asked_for(theirs: Theirs) -> None:
    run = theirs("data.name=strange:build", "launch.setup=[touch it]", "checkpoint.remote=s3://eve/all")
    with pytest.raises(RefusedError) as caught:
        asked(run)
    assert "run code that is not yours: data.name=strange:build, launch.setup=['touch it']" in caught.value.what
    told = "send to places, or let in others, that you have not named: checkpoint.remote=s3://eve/all"
    assert told in caught.value.what


@pytest.mark.parametrize("verb", ["submit", "submit --dry-run", "resume", "launch", "train", "bench amp"])
def test_no_verb_sends_anything_where_a_strangers_run_says(
    command: Command, theirs: Theirs, no_slurm: dict[str, str], tmp_path: Path, verb: str
) -> None:
    bucket = tmp_path / "bucket"
    run = theirs(f"checkpoint.remote=file://{bucket}")
    name, *flags = verb.split()
    done = command(name, *flags, str(run.path))
    assert done.code == 3, done.err
    assert f"checkpoint.remote=file://{bucket}" in done.err
    assert not bucket.exists()


def test_a_strangers_run_that_has_finished_is_not_sent_by_resume(
    command: Command, forget: Callable[[], None], no_slurm: dict[str, str], tmp_path: Path
) -> None:
    """`resume` sends what is left of a finished run: its folder may hold what the user has put there by now."""
    bucket = tmp_path / "bucket"
    run = made(tmp_path / "ddp-0001", f"checkpoint.remote=file://{bucket}")
    append_event(run, "started", attempt=0)
    append_event(run, "ended", attempt=0, state="COMPLETED")
    forget()
    assert history_of(run).finished
    done = command("resume", str(run.path))
    assert (done.code, bucket.exists()) == (3, False), done.err


def test_weights_that_were_started_from_count_unless_nothing_unpickles_them(
    forget: Callable[[], None], tmp_path: Path
) -> None:
    overlay = "model.pretrained_cfg_overlay={{file: /w/{}}}".format
    runs = [made(tmp_path / name, "model.name=resnet18", overlay(name)) for name in ("w.safetensors", "w.bin")]
    forget()
    asked(runs[0])
    with pytest.raises(RefusedError, match=r"w\.bin"):
        asked(runs[1])


def test_a_strangers_run_of_what_we_have_is_evaluated_and_repeated(
    command: Command, theirs: Theirs, no_slurm: dict[str, str]
) -> None:
    run = theirs()
    assert command("submit", str(run.path), "--dry-run").code == 0


def test_what_the_user_puts_in_its_place_is_theirs(theirs: Theirs) -> None:
    run = theirs("data.name=strange:build")
    asked(run, "data.name=digits")
    asked(run, "data.name=mine:build")


def test_a_runs_own_module_is_found_in_its_snapshot_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    for folder, value in ((here, 1), (tmp_path / "code", 2)):
        folder.mkdir()
        (folder / "model_in_two_places.py").write_text(f"def build(): return {value}\n")
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", list(sys.path))
    plugins.search_snapshot(tmp_path / "code", own=True)
    assert plugins.load("trainkit.models", "model_in_two_places:build")() == 2


TRACEBACK = ("Traceback (most recent call last):", '  File "a.py", line 1, in f')
LINKS = ("logs/0/rank-0.out", "logs/0/rank-0.err", "metrics.jsonl", "evaluations.jsonl", "summary.json", "plan.json")


@pytest.mark.parametrize("key", ["log", "json"])
@pytest.mark.parametrize("verb", ["logs", "logs -f", "why", "status", "report --out told", "notebook"])
def test_no_verb_shows_a_file_of_the_users_that_a_run_links_to(
    command: Command, forget: Callable[[], None], no_slurm: dict[str, str], tmp_path: Path, verb: str, key: str
) -> None:
    """A log book is for others, and what `why` says is sent to whoever helps."""
    run = made(tmp_path / "runs" / "ddp-0001")
    append_event(run, "submitted", executor="local", job_id="1")
    append_event(run, "started", attempt=0, world_size=1, total_steps=9)
    append_event(run, "ended", attempt=0, state="FAILED", job_id="1", exit_codes=[1])
    lines = ['{"stopped_early": "hunter2", "advice": "hunter2"}', *TRACEBACK, "RuntimeError: hunter2"]
    (tmp_path / "key").write_text("\n".join(lines if key == "log" else lines[:1]))
    run.attempt_logs(0).mkdir(parents=True)
    for name in LINKS:
        (run.path / name).symlink_to(tmp_path / "key")
    forget()
    if verb == "notebook":
        with pytest.raises(UserError, match="It is a link"):
            _ = trainkit.open("ddp-0001").summary
        return
    name, *flags = verb.split()
    done = command(name, "ddp-0001", *flags)
    written = [file.read_text() for file in (tmp_path / "told").glob("*.*")]
    assert "hunter2" not in "".join([done.out, done.err, *written])


@pytest.mark.parametrize("words", ["status RUN", "report RUN --out told", "evaluate RUN", "resume RUN", "submit RUN"])
def test_settings_are_not_read_through_a_link_in_a_run(
    command: Command, no_slurm: dict[str, str], tmp_path: Path, words: str
) -> None:
    run = made(tmp_path / "runs" / "ddp-0001")
    run.config.rename(tmp_path / "mine.yaml")
    run.config.symlink_to(tmp_path / "mine.yaml")
    done = command(*words.replace("RUN", str(run.path)).split())
    assert done.code == 2
    assert "config.yaml is a link" in done.err


def test_a_report_reads_no_settings_through_a_link_in_a_run(tmp_path: Path) -> None:
    """Those of a sweep are looked at without being opened one by one."""
    run = made(tmp_path / "0")
    run.config.rename(tmp_path / "mine.yaml")
    run.config.symlink_to(tmp_path / "mine.yaml")
    assert Facts(run, "0").config == {}
