"""``python -m jobs.bench``: really run, in small; its figures worked out again from what each turn took."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.conftest import PROJECT, Done
from trainkit.bench.arms import CONTROL

QUICK = ("--rounds", "3", "--updates", "2", "monitor.loggers=[jsonl]")


def bench(tmp_path: Path, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run it as a user on a laptop does."""
    here = {"PYTHONPATH": str(PROJECT), "TRAINKIT_RUNS": str(tmp_path / "runs"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "jobs.bench", *words]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **here}, capture_output=True, text=True, check=False
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def results(tmp_path: Path) -> dict[str, Any]:
    (file,) = tmp_path.glob("runs/bench-*/results.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def seconds(told: dict[str, Any], arm: str) -> list[float]:
    return [one["seconds"] for one in sorted(told["samples"], key=lambda one: one["round"]) if one["arm"] == arm]


def test_amp_measures_each_format_in_turns_and_the_first_one_twice(tmp_path: Path) -> None:
    done = bench(tmp_path, "amp", "single", "--executor", "debug", "train.global_batch_size=16", *QUICK)
    told = results(tmp_path)
    assert [one["arm"] for one in told["samples"]] == [
        *("fp32", "bf16", CONTROL), *(CONTROL, "bf16", "fp32"), *("fp32", "bf16", CONTROL)
    ]  # fmt: skip
    assert {one["images"] for one in told["samples"]} == {2 * 16}
    for arm in told["arms"]:
        rates = [32 / one for one in seconds(told, arm["name"])]
        assert (arm["rate"], arm["rate_min"], arm["rate_max"]) == pytest.approx(
            (statistics.median(rates), min(rates), max(rates))
        )
    pairs = zip(seconds(told, "fp32"), seconds(told, CONTROL), strict=True)
    assert told["control"]["ratios"] == pytest.approx([one / again for one, again in pairs])
    assert told["arms"][0]["loss"] == pytest.approx(told["arms"][1]["loss"], rel=0.05)  # of the same updates
    assert "fp16  " in done.stdout  # left out, and said why
    assert "it crawls on a CPU" in done.stdout
    assert done.stdout.splitlines()[-2].strip().startswith("json")
    assert max(map(len, done.stdout.splitlines())) < 200


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["ampp"], "There is no bench 'ampp'."),
        ([], "NAME missing."),
        (["amp", "--arms", "fp32,fp64"], "'fp64' is no arm of bench amp."),
        (["amp", "--arms", "fp32,fp32"], "--arms names an arm twice."),
        (["amp", "--rounds", "1"], "--rounds 1 is not possible."),
        (["amp", "hivemind"], "Bench amp cannot measure strategy.name=hivemind."),
        (["amp", "train.presicion=bf16"], "Unknown key 'train.presicion'."),
        (["--show", "nowhere"], "No run 'nowhere'."),
        (["amp", "--show", "nowhere"], "--show takes no other words."),
    ],
)
def test_wrong_words_are_three_lines_and_no_folder(
    command: Callable[..., Done], tmp_path: Path, words: list[str], what: str
) -> None:
    done = command("bench", *words)
    assert (done.code, done.err.splitlines()[0]) == (2, what)
    assert [line.split(":")[0] for line in done.err.splitlines()[1:]] == ["  why", "  fix"]
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_says_what_would_be_one_job_and_writes_nothing(
    command: Callable[..., Done], fake_slurm: Path, tmp_path: Path
) -> None:
    done = command("bench", "amp", "ddp", "--nodes", "2", "--gpus-per-node", "4", "--time", "30", "--dry-run")
    assert done.code == 0, done.err
    assert "#SBATCH --nodes=2" in done.out
    assert "#SBATCH --no-requeue" in done.out  # it would begin anew, on other nodes
    assert not (tmp_path / "runs").exists()


def test_on_a_cluster_all_arms_are_one_job(command: Callable[..., Done], fake_slurm: Path, tmp_path: Path) -> None:
    done = command("bench", "amp", "ddp", "--nodes", "2", "--gpus-per-node", "4", "--time", "30", "--arms", "fp32,bf16")
    assert done.code == 0, done.err
    assert "Submitted job 4711: 2 nodes x 4 ranks." in done.out
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"python -m jobs.bench --show {folder}" in done.out
    assert json.loads((folder / "bench.json").read_text())["arms"] == ["fp32", "bf16"]


def test_a_run_that_is_no_bench_is_not_shown(command: Callable[..., Done], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    done = command("bench", "--show", str(tmp_path))
    assert done.code == 2
    assert "is not the folder of a bench." in done.err
