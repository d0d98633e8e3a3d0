"""What every verb answers for a damaged run, for one of somebody else's, and where SLURM's programs misbehave."""

import importlib
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import trainkit
from jobs.__main__ import verbs
from tests.jobs.conftest import Command, make_run
from tests.runs import script
from tests.shell import PROJECT
from trainkit.cluster import slurm_submission
from trainkit.common import jsonl, process
from trainkit.common.errors import RefusedError, UserError
from trainkit.config import plugins
from trainkit.config.loading import load
from trainkit.report.facts import Facts
from trainkit.run.events import append_event, read_events, submitted
from trainkit.run.folder import RunDir
from trainkit.run.ownership import READS, TRAINS, require_own_code

# Damaged runs

HUGE = "9" * 5000
DEEP = "[" * 100_000
LAUGHS = "".join(f"a{n}: &a{n} [{f'*a{n - 1}, ' * 9 * (n > 0)}]\n" for n in range(30))
Damage = Callable[[RunDir], object]


def replaced(name: str, how: Callable[[Path], object]) -> Damage:
    def damage(run: RunDir) -> None:
        path = run.path / name
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        how(path)

    return damage


def sparse(name: str) -> Damage:
    def make(path: Path) -> None:
        path.touch()
        os.truncate(path, 300 << 30)

    return replaced(name, make)


def written(name: str, content: str | bytes) -> Damage:
    return replaced(name, lambda path: path.write_bytes(content.encode() if isinstance(content, str) else content))


def good(path: Path) -> RunDir:
    run = make_run(path)
    jsonl.append_jsonl(run.metrics, {"split": "val", "step": 19, "epoch": 1.0, "acc1": 55.39, "loss": 1.0})
    return run


def line(**fields: object) -> str:
    return json.dumps(fields) + "\n"


# What tests/run hold of single records; here verbs meet them.
EVENTS = [
    line(event="submitted", job_id={"a": 1}, executor=3, pid="x", host=[1]),
    line(event="started", total_steps="many", steps_per_epoch=0, hosts=3, world_size=-1, attempt="0", step=[]),
    line(event="failed", rank="first", error={"a": "b"}, time=1e300),
    f'{{"event": "started", "total_steps": {HUGE}, "time": {HUGE}, "step": 1e999}}\n',
    f'{{"event": "started", "hosts": {DEEP}\n',
]
METRICS = [
    line(split=["val"], step=True),
    line(split="val", step=20, epoch=[1], acc1="high", loss={}),
    '{"split": "val", "step": 21, "acc1": NaN, "loss": Infinity, "epoch": NaN}\n',
    f'{{"split": "train", "step": 22, "images_per_sec": {"9" * 300}, "epoch": 1e308, "lr": "x"}}\n',
]
RECORDS = ("events.jsonl", "metrics.jsonl")
FILES = (*RECORDS, "summary.json", "manifest.json", "plan.json", "config.yaml")
DAMAGES: dict[str, Damage] = {
    **{f"events-{number}": written("events.jsonl", text) for number, text in enumerate(EVENTS)},
    **{f"metrics-{number}": written("metrics.jsonl", text) for number, text in enumerate(METRICS)},
    "garbage": written("events.jsonl", bytes(range(256)) * 40),
    **{f"list-{name}": written(name, "[1, 2]") for name in ("plan.json", "summary.json", "manifest.json")},
    **{f"fifo-{name}": replaced(name, os.mkfifo) for name in FILES},
    **{f"loop-{name}": replaced(name, lambda path: path.symlink_to(path)) for name in (*RECORDS, "logs")},
    **{f"sparse-{name}": sparse(name) for name in (*FILES, "lease.json")},
    "sweep-broken": written("sweep.json", "{"),
    "logs-are-a-file": written("logs", ""),
    "log-of-a-rank-x": replaced("logs", lambda path: (path / "0/rank-x.err").mkdir(parents=True)),
    "too-many-events": written("events.jsonl", line(event="submitted", time=1) * 2000),
    "events-without-end": replaced("events.jsonl", lambda path: path.symlink_to("/dev/zero")),
    "config-laughs": written("config.yaml", LAUGHS),
    "config-deep": written("config.yaml", DEEP),
    "everything-gone": lambda run: shutil.rmtree(run.path),
}


@pytest.mark.nightly
def test_every_verb_answers_for_a_damaged_run_and_status_lists_the_others(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "_MOST_RECORDS", 1000)
    runs = tmp_path / "runs"
    good(runs / "good-0001")
    for name, damage in DAMAGES.items():
        bad = good(runs / name)
        submitted(bad, "slurm", "17")
        damage(bad)
    good(runs / "good-0003")
    done = command("status", "--all").ok()
    rows = {row.split()[0]: row for row in done.out.splitlines()[1:]}
    assert all("55.39" in rows[name] for name in ("good-0001", "good-0003"))
    assert max(map(len, done.out.splitlines())) < 400
    for name in RECORDS:  # whether it runs is unknown, and not no
        assert [words for words in (name, "not a regular file") if words not in rows[f"fifo-{name}"]] == []
    for name in DAMAGES:
        for verb in (["status"], ["logs"], ["cancel"], ["resume", "--dry-run"]):
            done = command(*verb, str(runs / name))
            assert done.code in (0, 2, 3, 4), (verb, name, done.err)
            assert "Traceback" not in done.out + done.err, (verb, name)
    command("resume", str(runs / "fifo-events.jsonl")).refused(2, "events.jsonl")


def test_a_report_of_odd_records_shows_what_is_left(command: Command, tmp_path: Path) -> None:
    run = good(tmp_path / "runs" / "a$b_{$-0001")  # which some take for mathematics
    run.events.write_text("".join(EVENTS))
    with run.metrics.open("a") as out:
        out.write("".join(METRICS))
    run.summary.write_text(line(steps="x", train_seconds=1e308, best_step=[1], test=3, params="y"))
    run.manifest.write_text(line(git=[1], packages=3))
    samples = line(time="x") + line(time=1e308) + line(time=5, gpus=3) + line(time=6, gpus=[{"index": []}])
    (run.path / "system-x.jsonl").write_text(samples)
    command("report", str(run.path)).ok()
    assert "55.39 %" in (run.path / "logbook.md").read_text()


@pytest.mark.parametrize("name", ["metrics.jsonl", "system-n1.jsonl"])
def test_a_report_of_several_runs_leaves_an_odd_one_out_and_says_so(
    command: Command, tmp_path: Path, name: str
) -> None:
    runs = [good(tmp_path / "runs" / f"run-000{number}") for number in (1, 2, 3)]
    sparse(name)(runs[1])
    done = command("report", *(str(run.path) for run in runs), "--out", "out").ok()
    assert [line for line in done.err.splitlines() if "run-0002" in line and "322,122,547,200 bytes" in line]
    page = (tmp_path / "out" / "report.html").read_text()
    assert ("run-0001" in page, "run-0003" in page) == (True, True)
    done = command("report", *(str(run.path) for run in runs[1:]), "--compare", "--out", "out")
    assert (done.code, "run-0002" not in done.out) == (2, True), "the reference cannot be left out"


EVIL = "\x1b]0;title\x07\x1b[2J\x1b[31mred\x9b1m\r\n\u202ename"


def test_nothing_that_a_terminal_obeys_comes_out_of_a_record(command: Command, tmp_path: Path) -> None:
    run = good(tmp_path / "runs" / "evil\x1b[31m\n-0001")
    submitted(run, "local", EVIL)
    jsonl.append_jsonl(run.events, {"event": EVIL, "time": 1, "error": EVIL, EVIL: EVIL})
    jsonl.append_jsonl(run.events, {"event": "failed", "time": 1, "rank": 0, "error": EVIL})
    for verb in ("status", "logs", "cancel"):
        done = command(verb, str(run.path))
        assert re.search("[\x1b\x9b\x07\u202e]", done.out + done.err) is None, verb
    assert len(command("status").out.splitlines()) == 2


# SLURM's programs, or wrappers of a site, that say too much, nothing or what is no text

MOUTHFUL = "yes '4711|RUNNING|None|0:00|n1|N/A' | head -c 5000000"
STRANGE = r"printf '4711|RUNNING|caf\xe9 \033]0;title\007\0b|0:00|n\033[31m1|N/A\n'; printf 'caf\xe9 \033[2J\n' >&2"
SILENT = "trap '' TERM; sleep 60"
PROGRAMS = ("sbatch", "srun", "squeue", "sacct", "scontrol", "scancel", "sinfo", "sacctmgr")
VERBS = (
    *("submit ddp --again", "submit ddp --dry-run", "submit ddp --estimate", "status", "why first", "logs first"),
    *("resume first", "cluster show", "cancel first"),
)


@pytest.fixture
def all_say(command: Command, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has programs of a site say this, all or those named; a run ``first`` has a job there."""
    monkeypatch.setattr(slurm_submission, "SEARCH_PAUSES", (0.0,))
    assert command("submit", "ddp", "--run-dir", "runs/first").code == 0

    def say(body: str, *names: str) -> None:
        for name in names or PROGRAMS:
            script(fake_slurm / name, body)

    return say


Say = Callable[..., None]


@pytest.mark.parametrize("body", [STRANGE, f"{STRANGE}; exit 1", MOUTHFUL], ids=["answers", "fails", "does not end"])
def test_what_is_no_text_or_no_answer_is_no_bug_and_moves_no_terminal(
    command: Command, all_say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    """Who talks without end is not listened to: tests/test_process.py."""
    monkeypatch.setattr(process, "MOST", 1_000_000)
    all_say(body)
    for verb in VERBS:
        done = command(*verb.split())  # which lets everything through that is no error for users
        assert done.code in (0, 2, 3, 4), verb
        assert re.search("[\0\x1b\x07]", done.out + done.err) is None, verb
        assert len(done.out + done.err) < 40_000, verb
        assert done.code == 0 or "  why: " in done.err, verb
    assert max(file.stat().st_size for file in tmp_path.rglob("events.jsonl")) < 5000


@pytest.mark.parametrize("name", ["squeue", "scontrol"])
def test_a_submission_goes_on_beside_a_scheduler_that_is_silent(
    command: Command, all_say: Say, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "PATIENCE_SECONDS", 0.5)
    all_say(SILENT, name)
    before = set((tmp_path / "runs").iterdir())
    command("submit", "ddp", "--again").ok("4711")
    (made,) = {*(tmp_path / "runs").iterdir()} - before
    assert [event["job_id"] for event in read_events(RunDir(made), "submitted")] == ["4711"]


def test_an_sbatch_that_never_ends_may_have_queued_the_job(
    command: Command, all_say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_submission, "SBATCH_SECONDS", 0.5)
    all_say(SILENT, "sbatch")
    command("submit", "ddp", "--again").refused(
        4, "It is unknown whether SLURM has accepted the job", "sbatch gave no answer within 0.5 s"
    )
    assert (tmp_path / "runs" / "ddp-0001" / "config.yaml").is_file()


@pytest.mark.nightly
def test_a_line_without_end_is_cut_where_it_is_shown(command: Command, all_say: Say) -> None:
    all_say("printf '4711|RUNNING|'; head -c 20000000 /dev/zero | tr '\\0' r; echo '|0:00|n1|N/A'", "squeue")
    assert len(command("status").ok("RUNNING").out) < 10_000
    all_say("echo first words >&2; yes | head -c 1500000 >&2; exit 1", "srun")
    done = command("cluster", "check")
    assert (done.code, done.err[:12]) == (4, "first words\n")
    assert "The message of srun is above" in done.err
    assert len(done.err) < 1_010_000


@pytest.mark.parametrize("told", ["ClusterName = %s", "PartitionName=%s Nodes=n[1-2] State=UP"])
def test_a_line_too_long_to_be_a_fact_of_a_site_is_no_answer(command: Command, all_say: Say, told: str) -> None:
    long = told.replace("%s", "$(head -c 2000000 /dev/zero | tr '\\0' r)")
    all_say(f'echo "NodeName=n1 CPUTot=8 State=IDLE"; echo "{long}"', "scontrol")
    for verb in ("cluster show", "submit ddp --dry-run"):
        done = command(*verb.split())
        assert "an unreadable answer: one line has 2.0 MB" in done.out + done.err
        assert len(done.out + done.err) < 40_000


# Runs of somebody else's: no verb runs the code that they name, or sends anything, unless the user says so

MARK = "it-ran"


def of_ones_own(path: Path, *overrides: str) -> RunDir:
    """A run whose snapshot holds a module that leaves a mark when it is imported."""
    run = make_run(path, *overrides)
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
        run = of_ones_own(tmp_path / "ddp-0001", *overrides)
        forget()
        return run

    return make


def asked(run: RunDir, *overrides: str, allow: bool = False, loads: bool = False) -> None:
    """As a verb asks; one that only loads then searches what it may."""
    found = require_own_code(run.path, load(str(run.path), overrides), allow_code=allow, use=READS if loads else TRAINS)
    if loads:
        plugins.search_snapshot(found.code, own=found.own)


CODE, FETCHED, BUCKET, ENTITY = "model.name=strange:build", "data.url=", "checkpoint.remote=", "monitor.wandb_project="
ALL = (CODE, FETCHED, BUCKET, ENTITY)
ASKS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(["evaluate RUN", "export RUN x.onnx", "predict RUN ."], (CODE, FETCHED)),
    **dict.fromkeys(["train RUN", "submit RUN", "submit RUN --dry-run", "launch RUN", "resume RUN"], ALL),
    **dict.fromkeys(["swarm create RUN", "bench amp RUN"], ALL),
    "sync RUN": (ENTITY,),
    # These name nothing of the run's settings, or only show them.
    **dict.fromkeys(["status RUN", "logs RUN", "why RUN", "report RUN --out told", "cancel RUN", "clean RUN"], ()),
    "shell RUN": (),
    **dict.fromkeys(["tag RUN x", "note RUN x", "pack nowhere x.tar", "unpack x.tar", "completion nosuch"], ()),
    **dict.fromkeys(["prepare digits", "join", "cluster show"], ()),
}
"""Command -> the settings of a stranger's run that it asks about before it obeys them."""


def test_every_verb_says_here_what_it_asks_of_a_strangers_run() -> None:
    """A new one does something with a run's settings, or nothing. `require_own_code` asks."""
    assert {words.split()[0] for words in ASKS} == set(verbs(PROJECT / "jobs"))


@pytest.mark.parametrize("words", ASKS)
def test_no_verb_runs_code_sends_or_fetches_anything_as_a_strangers_run_says(
    command: Command, theirs: Theirs, tmp_path: Path, words: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        url = f"http://127.0.0.1:{server.getsockname()[1]}/shards"
        bucket = tmp_path / "bucket"
        settings = [CODE, "data.name=stream", f"{FETCHED}{url}", f"{BUCKET}file://{bucket}", f"{ENTITY}eve"]
        run = theirs(*settings, "monitor.loggers=[jsonl,wandb]")
        run.metrics.write_text("{}\n")
        done = command(*[str(run.path) if word == "RUN" else word for word in words.split()])
        asked = [key for key in ALL if key in done.err.partition("\n")[0]]
        assert asked == list(ASKS[words]), done.err
        assert not asked or (done.code, "--allow-code" in done.err) == (3, True)
        assert ((tmp_path / MARK).exists(), bucket.exists()) == (False, False)
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize("verb", ["resume", "launch"])
def test_a_strangers_snapshot_is_not_started(command: Command, theirs: Theirs, verb: str) -> None:
    """They start the program in code/, whatever the configuration names."""
    run = theirs()
    done = command(verb, str(run.path))
    assert (done.code, run.attempts(), str(run.code) in done.err) == (3, [], True)


def test_what_we_have_is_repeated_of_a_strangers_run_and_no_more(command: Command, theirs: Theirs) -> None:
    run = theirs()
    assert command("submit", str(run.path), "--dry-run").code == 0
    run.config.write_text(run.config.read_text().replace("name: digits", "name: strange:build"))
    assert command("submit", str(run.config), "--dry-run").code == 3, "nor is it a preset"


def test_a_strangers_run_that_has_finished_is_not_sent_by_resume(
    command: Command, theirs: Theirs, tmp_path: Path
) -> None:
    """`resume` sends what is left of a finished run: its folder may hold what the user has put there by now."""
    bucket = tmp_path / "bucket"
    run = theirs(f"checkpoint.remote=file://{bucket}")
    append_event(run, "started", attempt=0)
    append_event(run, "ended", attempt=0, state="COMPLETED")
    assert (command("resume", str(run.path)).code, bucket.exists()) == (3, False)


RUNS_CODE = [
    *("data.name=strange:build", "model.name=local-dir:/x", "strategy.name=strange:build"),
    *("launch.setup=[touch it]", "launch.sbatch={prolog: x}", "launch.srun={task-prolog: x}", "launch.modules=[evil]"),
    *("launch.environment=venv:/x", "launch.cluster=devcluster"),
    *("launch.container_image=x.sif", "launch.container_mounts=[/x:/usr]"),
]
SENDS = [
    *("checkpoint.remote=s3://eve/all", "launch.mail_user=eve", "monitor.wandb_project=eve"),
    "collaborative.initial_peers=[/ip4/1.2.3.4/tcp/1]",
]


def test_one_refusal_lists_everything_that_imports_starts_or_sends_something(theirs: Theirs) -> None:
    run = theirs(*RUNS_CODE, *SENDS)
    with pytest.raises(RefusedError) as caught:
        asked(run)
    code, _, places = caught.value.what.partition("send to places, or admit people, that you have not named: ")
    assert "run code that is not yours: " in code
    for settings, told in ((RUNS_CODE, code), (SENDS, places)):
        assert [setting for setting in settings if setting.partition("=")[0] not in told] == []
    asked(run, allow=True)
    for own in ("digits", "mine:build"):  # what the user puts in its place is theirs
        with pytest.raises(RefusedError) as caught:
            asked(run, f"data.name={own}")
        assert "data.name" not in caught.value.what


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


@pytest.mark.parametrize("own", [True, False])
def test_a_runs_own_module_comes_first_and_one_that_was_allowed_last(
    theirs: Theirs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    here = tmp_path / "here"
    for folder, value in ((here, "here"), (tmp_path / "code", "snapshot")):
        folder.mkdir()
        (folder / f"model_in_two_places_{own}.py").write_text(f"def build(): return {value!r}\n")
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", list(sys.path))
    plugins.search_snapshot(tmp_path / "code", own=own)
    assert plugins.load("trainkit.models", f"model_in_two_places_{own}:build")() == ("snapshot" if own else "here")
    asked(run := theirs("data.name=strange:build"), allow=True, loads=True)
    assert sys.path[-1] == str(run.code)


TRACEBACK = ("Traceback (most recent call last):", '  File "a.py", line 1, in f')
LINKS = ("logs/0/rank-0.out", "logs/0/rank-0.err", "metrics.jsonl", "evaluations.jsonl", "summary.json", "plan.json")


@pytest.mark.parametrize("key", ["log", "json"])
def test_no_verb_shows_a_file_of_the_users_that_a_run_links_to(
    command: Command, forget: Callable[[], None], tmp_path: Path, key: str
) -> None:
    """A log book is for others, and what `why` says is sent to whoever helps."""
    run = of_ones_own(tmp_path / "runs" / "ddp-0001")
    append_event(run, "submitted", executor="local", job_id="1")
    append_event(run, "started", attempt=0, world_size=1, total_steps=9)
    append_event(run, "ended", attempt=0, state="FAILED", job_id="1", exit_codes=[1])
    lines = ['{"stopped_early": "hunter2", "advice": "hunter2"}', *TRACEBACK, "RuntimeError: hunter2"]
    (tmp_path / "key").write_text("\n".join(lines if key == "log" else lines[:1]))
    run.attempt_logs(0).mkdir(parents=True)
    for name in LINKS:
        (run.path / name).symlink_to(tmp_path / "key")
    forget()
    for verb in ("logs", "logs -f", "why", "status", "report --out told"):
        done = command(*verb.split(), "ddp-0001")
        written = [file.read_text() for file in (tmp_path / "told").glob("*.*")]
        assert "hunter2" not in "".join([done.out, done.err, *written]), verb
    with pytest.raises(UserError, match="It is a link"):
        _ = trainkit.open("ddp-0001").summary


def test_settings_are_not_read_through_a_link_in_a_run(command: Command, tmp_path: Path) -> None:
    run = of_ones_own(tmp_path / "runs" / "ddp-0001")
    run.config.rename(tmp_path / "mine.yaml")
    run.config.symlink_to(tmp_path / "mine.yaml")
    for verb in ("status", "report --out told", "evaluate", "resume", "submit"):
        done = command(*verb.split(), str(run.path))
        assert (done.code, "config.yaml is a link" in done.err) == (2, True), verb
    assert Facts(run, "0").config == {}, "those of a sweep are looked at without being opened one by one"
