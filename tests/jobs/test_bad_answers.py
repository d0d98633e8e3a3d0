"""SLURM's programs, or wrappers of a site, that say too much, nothing or what is no text: every verb copes with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainkit import process
from trainkit.schedulers import slurm_submission

Command = Callable[..., Any]
MOUTHFUL = "yes '4711|RUNNING|None|0:00|n1|N/A' | head -c 5000000"
STRANGE = r"printf '4711|RUNNING|caf\xe9 \033]0;title\007\0b|0:00|n\033[31m1|N/A\n'; printf 'caf\xe9 \033[2J\n' >&2"
SILENT = "trap '' TERM; sleep 60"
PROGRAMS = ("sbatch", "srun", "squeue", "sacct", "scontrol", "scancel", "sinfo", "sacctmgr")
VERBS = {
    "submit": ("submit", "ddp", "--again"),
    "dry run": ("submit", "ddp", "--dry-run"),
    "estimate": ("submit", "ddp", "--estimate"),
    "status": ("status",),
    "why": ("why", "first"),
    "logs": ("logs", "first"),
    "resume": ("resume", "first"),
    "show": ("cluster", "show"),
    "cancel": ("cancel", "first"),
}


@pytest.fixture
def first(command: Command, fake_slurm: Path, tmp_path: Path) -> Path:
    """A run whose job is queued, at a site whose programs can be replaced."""
    run = tmp_path / "runs" / "first"
    assert command("submit", "ddp", "--run-dir", str(run)).code == 0
    return run


def all_say(folder: Path, body: str, *names: str) -> None:
    for name in names or PROGRAMS:
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)


@pytest.mark.parametrize("body", [STRANGE, f"{STRANGE}; exit 1"], ids=["answers", "fails"])
def test_what_is_no_text_is_no_bug_and_moves_no_terminal(
    command: Command, fake_slurm: Path, first: Path, body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_submission, "SEARCH_PAUSES", (0.0,))
    all_say(fake_slurm, body)
    for name, verb in VERBS.items():
        done = command(*verb)  # which lets everything through that is no error for users
        assert done.code in (0, 2, 3, 4), name
        assert re.search("[\0\x1b\x07]", done.out + done.err) is None, name
        assert done.code == 0 or "  why: " in done.err, name


def test_who_talks_without_end_is_not_listened_to(
    command: Command, fake_slurm: Path, first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "MOST", 1_000_000)
    all_say(fake_slurm, MOUTHFUL)
    for name in ("submit", "status", "show", "cancel"):
        done = command(*VERBS[name])
        assert "no answer in its first 1.0 MB" in done.out + done.err, name
        assert len(done.out + done.err) < 2000, name
    assert max(file.stat().st_size for file in first.parent.rglob("events.jsonl")) < 5000


@pytest.mark.parametrize("name", ["squeue", "scontrol"])
def test_a_submission_goes_on_beside_a_scheduler_that_is_silent(
    command: Command, fake_slurm: Path, first: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "PATIENCE_SECONDS", 0.5)
    all_say(fake_slurm, SILENT, name)
    done = command(*VERBS["submit"])
    assert done.code == 0, done.err
    assert "4711" in done.out


def test_an_sbatch_that_never_ends_may_have_queued_the_job(
    command: Command, fake_slurm: Path, first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.schedulers.slurm_submission.SBATCH_SECONDS", 0.5)
    monkeypatch.setattr(slurm_submission, "SEARCH_PAUSES", (0.0,))
    all_say(fake_slurm, SILENT, "sbatch")
    done = command(*VERBS["submit"])
    assert done.code == 4
    assert "Nobody can tell whether SLURM has taken the job" in done.err
    assert "sbatch gave no answer within 0.5 s" in done.err
    assert (first.parent / "ddp-0001" / "config.yaml").is_file()


def test_a_line_without_end_is_cut_where_it_is_shown(command: Command, fake_slurm: Path, first: Path) -> None:
    line = "printf '4711|RUNNING|'; head -c 20000000 /dev/zero | tr '\\0' r; echo '|0:00|n1|N/A'"
    all_say(fake_slurm, line, "squeue")
    done = command("status")
    assert "RUNNING" in done.out
    assert len(done.out) < 10_000


@pytest.mark.parametrize("told", ["ClusterName = %s", "PartitionName=%s Nodes=n[1-2] State=UP"])
def test_a_line_too_long_to_be_a_fact_of_a_site_is_no_answer(
    command: Command, fake_slurm: Path, first: Path, told: str
) -> None:
    long = "$(head -c 2000000 /dev/zero | tr '\\0' r)"
    all_say(fake_slurm, f'echo "NodeName=n1 CPUTot=8 State=IDLE"; echo "{told.replace("%s", long)}"', "scontrol")
    for verb in ("show", "dry run"):
        done = command(*VERBS[verb])
        assert "no answer that can be read: a line of it has 2.0 MB" in done.out + done.err
        assert len(done.out + done.err) < 20_000


def test_what_srun_says_in_a_check_of_nodes_is_cut(command: Command, fake_slurm: Path, first: Path) -> None:
    all_say(fake_slurm, "echo first words >&2; yes | head -c 1500000 >&2; exit 1", "srun")
    done = command("cluster", "check")
    assert done.code == 4
    assert done.err.startswith("first words\n")
    assert "srun has said above what is wrong" in done.err
    assert len(done.err) < 1_010_000


def test_a_list_of_more_nodes_than_any_machine_has_is_not_made(command: Command, fake_slurm: Path, first: Path) -> None:
    all_say(fake_slurm, "echo 'PartitionName=main Default=YES Nodes=n[1-99999999999] State=UP'", "scontrol")
    done = command("submit", "ddp", "--estimate")
    assert done.code == 3
    assert "Cannot read the host list 'n[1-99999999999]'" in done.err
