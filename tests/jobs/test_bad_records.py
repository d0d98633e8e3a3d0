"""A folder that is foreign or damaged: every verb has an answer for it, and it hides no other run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainkit import fileio
from trainkit.config.loading import load, to_yaml
from trainkit.run.events import submitted
from trainkit.run.folder import RunDir

Command = Callable[..., Any]
HUGE = "9" * 5000
DEEP = "[" * 100_000


LAUGHS = "".join(f"a{n}: &a{n} [{f'*a{n - 1}, ' * 9 * (n > 0)}]\n" for n in range(30))


def sparse(size: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        with path.open("wb") as out:
            out.truncate(size)

    return make


def good(path: Path) -> RunDir:
    run = RunDir.create(path, to_yaml(load("ddp").config))
    fileio.append_jsonl(run.metrics, {"split": "val", "step": 19, "epoch": 1.0, "acc1": 55.39, "loss": 1.0})
    return run


def replaced(name: str, how: Callable[[Path], object]) -> Callable[[RunDir], None]:
    def damage(run: RunDir) -> None:
        path = run.path / name
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        how(path)

    return damage


def written(name: str, content: str | bytes) -> Callable[[RunDir], None]:
    return replaced(name, lambda path: path.write_bytes(content.encode() if isinstance(content, str) else content))


def line(**fields: object) -> str:
    return json.dumps(fields) + "\n"


EVENTS = [
    line(event="submitted", job_id=["x"], executor="slurm", time="abc"),
    line(event="submitted", job_id={"a": 1}, executor=3, pid="x", host=[1]),
    line(event="submitted", job_id="1", executor="local", host=None, pid=True, attempts_before="two"),
    line(event="started", total_steps="many", steps_per_epoch=0, hosts=3, world_size=-1, attempt="0", step=[]),
    line(event=["started"]) + line(event=None) + line(time=1),
    line(event="failed", rank="first", error={"a": "b"}, time=1e300),
    f'{{"event": "started", "total_steps": {HUGE}, "time": {HUGE}, "step": 1e999}}\n',
    f'{{"event": "started", "hosts": {DEEP}\n',
    line(event="ended", state=["x"], exit_codes="no"),
]
ODD: list[Any] = [None, "high", 1e308, -1, [1], {}, True]
METRICS = [
    line(split="val", step="19", acc1=1.0),
    line(split="val", step=True, acc1=1.0),
    line(split=["val"], step=1),
    *(line(split="val", step=20, epoch=[1], acc1=odd, loss=odd) for odd in ODD),
    '{"split": "val", "step": 21, "acc1": NaN, "loss": Infinity, "epoch": NaN}\n',
    f'{{"split": "val", "step": {HUGE}, "acc1": {HUGE}}}\n',
    f'{{"split": "train", "step": 22, "images_per_sec": {"9" * 300}, "epoch": 1e308, "lr": "x"}}\n',
]
DAMAGES: dict[str, Callable[[RunDir], object]] = {
    **{f"events {number}": written("events.jsonl", text) for number, text in enumerate(EVENTS)},
    **{f"metrics {number}": written("metrics.jsonl", text) for number, text in enumerate(METRICS)},
    **{f"{name} garbage": written(name, bytes(range(256)) * 40) for name in ("events.jsonl", "metrics.jsonl")},
    **{f"{name} list": written(name, "[1, 2]") for name in ("plan.json", "summary.json", "manifest.json")},
    "sweep.json broken": written("sweep.json", "{"),
    "logs is a file": written("logs", ""),
    "logs loop": replaced("logs", lambda path: path.symlink_to(path)),
    "log of a rank x": replaced("logs", lambda path: (path / "0/rank-x.err").mkdir(parents=True)),
    "attempt of an odd number": replaced("logs", lambda path: (path / "\u00b2").mkdir(parents=True)),
    **{
        f"{name} fifo": replaced(name, lambda path: os.mkfifo(path))
        for name in ("events.jsonl", "metrics.jsonl", "summary.json", "manifest.json", "plan.json", "config.yaml")
    },
    **{
        f"{name} loop": replaced(name, lambda path: path.symlink_to(path))
        for name in ("events.jsonl", "metrics.jsonl", "config.yaml")
    },
    **{
        f"{name} sparse": replaced(name, sparse(300 << 30))
        for name in ("events.jsonl", "metrics.jsonl", "summary.json", "plan.json", "config.yaml", "lease.json")
    },
    "events.jsonl too many": written("events.jsonl", line(event="submitted", time=1) * 120_000),
    "metrics.jsonl one line": replaced("metrics.jsonl", sparse(2 << 30)),
    "events.jsonl without end": replaced("events.jsonl", lambda path: path.symlink_to("/dev/zero")),
    "config.yaml laughs": written("config.yaml", LAUGHS),
    "config.yaml digits": written("config.yaml", f"seed: {HUGE}\n"),
    "config.yaml garbage": written("config.yaml", bytes(range(256))),
    "config.yaml deep": written("config.yaml", DEEP),
    "everything gone": lambda run: shutil.rmtree(run.path),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_verb_answers_for_a_damaged_run_and_status_lists_the_others(
    command: Command, no_slurm: dict[str, str], tmp_path: Path, damage: str
) -> None:
    good(tmp_path / "runs" / "good-0001")
    bad = good(tmp_path / "runs" / "bad-0002")
    good(tmp_path / "runs" / "good-0003")
    submitted(bad, "slurm", "17")
    DAMAGES[damage](bad)
    done = command("status")
    assert done.code == 0
    rows = {row.split()[0]: row for row in done.out.splitlines()[1:]}
    assert {"good-0001", "good-0003"} <= rows.keys()
    assert all("55.39" in rows[name] for name in ("good-0001", "good-0003"))
    assert max(map(len, done.out.splitlines())) < 400
    for verb in (["status"], ["logs"], ["cancel"], ["resume", "--dry-run"]):
        done = command(*verb, str(bad.path))
        assert done.code in (0, 2, 3, 4), (verb, done.err)
        assert "Traceback" not in done.out + done.err


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl"])
def test_a_run_whose_records_cannot_be_read_says_why_and_stays_as_it_is(
    command: Command, no_slurm: dict[str, str], tmp_path: Path, name: str
) -> None:
    """Whether it runs is unknown, and not no."""
    bad = good(tmp_path / "runs" / "bad-0001")
    DAMAGES[f"{name} fifo"](bad)
    row = command("status").out.splitlines()[1]
    assert name in row
    assert "no regular file" in row
    if name == "events.jsonl":
        done = command("resume", str(bad.path))
        assert (done.code, name in done.err) == (2, True)


def test_a_report_of_odd_records_shows_what_is_left(command: Command, no_slurm: dict[str, str], tmp_path: Path) -> None:
    run = good(tmp_path / "runs" / "a$b_{$-0001")  # which matplotlib would take for mathematics
    run.events.write_text("".join(EVENTS))
    with run.metrics.open("a") as out:
        out.write("".join(METRICS))
    run.summary.write_text(line(steps="x", train_seconds=1e308, best_step=[1], test=3, params="y"))
    run.manifest.write_text(line(git=[1], packages=3))
    samples = [
        line(time="x"),
        line(time=1e308),
        line(time=5, gpus=3),
        line(time=6, gpus=[{"index": "0"}, {"index": []}]),
    ]
    (run.path / "system-x.jsonl").write_text("".join(samples))
    done = command("report", str(run.path))
    assert done.code == 0, done.err
    assert "55.39 %" in (run.path / "logbook.md").read_text()


# What a terminal would obey


EVIL = "\x1b]0;title\x07\x1b[2J\x1b[31mred\x9b1m\r\n\u202ename"


def test_nothing_that_a_terminal_obeys_comes_out_of_a_record(
    command: Command, no_slurm: dict[str, str], tmp_path: Path
) -> None:
    run = good(tmp_path / "runs" / "evil\x1b[31m\n-0001")
    submitted(run, "local", EVIL)
    fileio.append_jsonl(run.events, {"event": EVIL, "time": 1, "error": EVIL, EVIL: EVIL})
    fileio.append_jsonl(run.events, {"event": "failed", "time": 1, "rank": 0, "error": EVIL})
    for verb in ("status", "logs", "cancel"):
        done = command(verb, str(run.path))
        for forbidden in ("\x1b", "\x9b", "\x07", "\u202e"):
            assert forbidden not in done.out + done.err, verb
    table = command("status").out.splitlines()
    assert len(table) == 2


@pytest.mark.parametrize("job_id", ["--me", "-u root", "17 --me", "17;id", ""])
def test_a_job_id_that_is_none_never_reaches_scancel(
    command: Command, fake_slurm: Path, tmp_path: Path, job_id: str
) -> None:
    run = good(tmp_path / "runs" / "bad-0001")
    fileio.append_jsonl(run.events, {"event": "submitted", "executor": "slurm", "job_id": job_id, "time": 1})
    assert command("cancel", str(run.path)).code == 0
    assert not (fake_slurm / "cancelled").exists()


def test_a_run_of_somebody_else_cancels_no_job_of_ones_own(
    command: Command, fake_slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = good(tmp_path / "runs" / "theirs-0001")
    submitted(run, "slurm", "4711")
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert command("cancel", str(run.path)).code == 3
    assert not (fake_slurm / "cancelled").exists()


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl", "system-n1.jsonl"])
def test_a_report_of_several_runs_leaves_an_odd_one_out_and_says_so(
    command: Command, no_slurm: dict[str, str], tmp_path: Path, name: str
) -> None:
    runs = [good(tmp_path / "runs" / f"run-000{number}") for number in (1, 2, 3)]
    replaced(name, sparse(300 << 30))(runs[1])
    done = command("report", *(str(run.path) for run in runs), "--out", "out")
    assert done.code == 0, done.err
    assert [line for line in done.err.splitlines() if "run-0002" in line and "322,122,547,200 bytes" in line]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "run-0001" in page
    assert "run-0003" in page
    done = command("report", *(str(run.path) for run in runs[1:]), "--compare", "--out", "out")
    assert (done.code, "run-0002" not in done.out) == (2, True), "the reference cannot be left out"
