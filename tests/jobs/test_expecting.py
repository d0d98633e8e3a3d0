"""What a dry run says of the training to come is what the training then does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rank_functions import run_command
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir

Command = Callable[..., Any]
QUICK = ("train.epochs=1", "schedule.warmup_epochs=0", "monitor.loggers=[jsonl]")


def expected(command: Command, *arguments: str) -> dict[str, tuple[str, str]]:
    """Name -> value and the rest of its line, of what a dry run derives."""
    done = command("submit", *arguments, "--dry-run")
    assert done.code == 0, done.err
    names = ("total_steps", "precision", "micro_batch_size", "grad_accum_steps", "memory of a rank")
    found = {}
    for line in done.err.splitlines():
        name = next((name for name in names if line.startswith(f"{name}  ")), None)
        if name is not None:
            value, _, rest = line.removeprefix(name).strip().partition("  ")
            found[name] = (value, " ".join(rest.split()))
    return found


def test_what_a_dry_run_expects_is_what_the_run_does_and_takes(
    command: Command, no_slurm: dict[str, str], tmp_path: Path
) -> None:
    arguments = ("single", *QUICK, "train.micro_batch_size=16")
    before = expected(command, *arguments)
    assert before["memory of a rank"] == (
        "?", "not known no earlier run of this model tells. train.micro_batch_size=auto finds what fits"
    )  # fmt: skip
    done = run_command("submit", *arguments, "--executor", "debug", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "runs" / "single-0001")
    (started,) = read_events(run, "started")
    for name in ("total_steps", "precision", "micro_batch_size", "grad_accum_steps"):
        assert before[name][0] == str(started[name])
    took = json.loads(run.summary.read_text())["max_memory_mb_of_ranks"][0]
    value, why = expected(command, *arguments)["memory of a rank"]
    assert value == f"{took:,.0f} MB"
    assert "single-0001 took on cpu" in why
    assert expected(command, *arguments, "optim.lr=1e-4")["memory of a rank"][0] == value  # which costs no memory
    value, why = expected(command, *arguments, "train.global_batch_size=32", "train.micro_batch_size=8")[
        "memory of a rank"
    ]
    assert value == "?"  # of another batch the activations are not known, but what the parameters take is
    assert f"{started['params']:,} parameters (counted by single-0001), their gradients and moments take 1 MB" in why
    other = expected(command, *arguments, "model.width=8")["memory of a rank"]
    assert "no earlier run of this model tells" in other[1]


@pytest.mark.parametrize(
    ("arguments", "name", "value", "words"),
    [
        (["train.max_steps=7"], "total_steps", "7", "train.max_steps"),
        (["train.early_stopping_patience=2"], "total_steps", "380", "fewer if it stops early"),
        (["train.micro_batch_size=auto"], "grad_accum_steps", "auto", "found before the first update"),
        (["train.micro_batch_size=16", "--nodes", "2"], "grad_accum_steps", "2", "32 / 16"),
        (["--nodes", "2"], "micro_batch_size", "32", "(64 / 2 ranks)"),
        (["train.precision=fp32"], "precision", "fp32", "train.precision"),
    ],
)
def test_what_follows_from_the_settings_is_said_with_its_reason(
    command: Command, no_slurm: dict[str, str], arguments: list[str], name: str, value: str, words: str
) -> None:
    told = expected(command, "ddp", *arguments)[name]
    assert (told[0], words in told[1]) == (value, True), told


def test_precision_is_the_nodes_and_a_swarm_has_no_number_of_updates(command: Command, fake_slurm: Path) -> None:
    assert "from Ampere on" in expected(command, "ddp", "--gpus-per-node", "2")["precision"][1]
    assert "AVX512-BF16" in expected(command, "ddp", "--gpus-per-node", "0")["precision"][1]
    assert "total_steps" not in expected(command, "hivemind")
