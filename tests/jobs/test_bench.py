"""``python -m jobs.bench``: really run, in small; its figures worked out again from what each turn took."""

import json
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.conftest import Done
from tests.runs import script
from tests.shell import python
from trainkit.bench.base import CONTROL, BenchRequest
from trainkit.cluster import slurm_submission

MODEL = """
import torch.distributed as c10d
from torch import nn
class Model(nn.Linear):
    def forward(self, images):
{}
        return super().forward(images.flatten(1))
def build(info):
    return Model(info.in_chans * info.image_size**2, info.num_classes)
"""
QUICK = ("--rounds", "3", "--updates", "2", "monitor.loggers=[jsonl]")


def bench(tmp_path: Path, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run it as a user on a laptop does."""
    here = {"TRAINKIT_RUNS": str(tmp_path / "runs"), "CUDA_VISIBLE_DEVICES": ""}
    done = python("-m", "jobs.bench", *words, cwd=tmp_path, **here)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def results(tmp_path: Path) -> dict[str, Any]:
    (file,) = tmp_path.glob("runs/bench-*/results.json")
    return dict(json.loads(file.read_text()))


def seconds(told: dict[str, Any], arm: str) -> list[float]:
    return [one["seconds"] for one in sorted(told["samples"], key=lambda one: one["round"]) if one["arm"] == arm]


@pytest.mark.long
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
    assert "it is very slow on a CPU" in done.stdout
    assert done.stdout.splitlines()[-2].strip().startswith("json")
    assert max(map(len, done.stdout.splitlines())) < 200


@pytest.mark.long
def test_ranks_fail_alone_or_together_and_the_other_arms_go_on(tmp_path: Path) -> None:
    """Two ranks, of which the second raises whenever it trains with the first: what is left is one rank alone."""
    broken = "        if self.training and c10d.get_rank() == 1: raise ValueError('the second rank cannot')"
    (tmp_path / "half_broken.py").write_text(MODEL.format(broken))
    words = ("ddp", "--ntasks-per-node", "2", "model.name=half_broken:build", *QUICK)
    done = bench(tmp_path, "strategy", "--arms", "single,ddp,zero", *words)
    told = results(tmp_path)
    assert {one["arm"] for one in told["samples"]} == {"single", CONTROL}
    assert [arm["failed"] for arm in told["arms"]] == ["", *["ValueError: the second rank cannot"] * 2]
    assert "only single could run here" in done.stdout
    assert done.stdout.count("the second rank cannot") == 2


@pytest.mark.nightly
def test_why_nothing_could_run_stands_in_the_table_and_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "greedy.py").write_text(MODEL.format("        if self.training: raise MemoryError('9 bytes')"))
    words = ("single", "--executor", "debug", "model.name=greedy:build", *QUICK)
    done = bench(tmp_path, "batch-size", "--arms", "8,16", *words, check=False)
    assert (done.returncode, done.stderr.splitlines()[0]) == (1, "No arm of bench batch-size could run.")
    assert "Traceback" not in done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines() if "out of memory: 9 bytes" in line] == ["8", "16"]


@pytest.mark.long
def test_scaling_and_network_are_measured_over_simulated_nodes(tmp_path: Path) -> None:
    bench(tmp_path, "scaling", "ddp", "--nodes", "2", "--ntasks-per-node", "1", *QUICK)
    told = results(tmp_path)
    taken = {name: seconds(told, name) for name in ("1 rank x 32", "2 ranks x 32")}
    weak = next(arm for arm in told["arms"] if arm["name"] == "2 ranks x 32")
    pairs = zip(taken["1 rank x 32"], taken["2 ranks x 32"], strict=True)
    assert weak["ratios"] == pytest.approx([2 * one / two for one, two in pairs])  # twice the images of one
    other = tmp_path / "other"
    other.mkdir()
    bench(other, "network", "ddp", "--nodes", "2", "--ntasks-per-node", "2", *QUICK)
    sums = results(other)
    assert {one["bytes"] for one in sums["samples"] if one["arm"] == "between, 1.0 MB"} == {2 * 2**20}  # 2 (n - 1) / n
    assert {one["bytes"] for one in sums["samples"] if one["arm"] == "all, 1.0 MB"} == {2 * 1.5 * 2**20}
    for arm in sums["arms"]:
        own = [one for one in sums["samples"] if one["arm"] == arm["name"]]
        assert arm["rate"] == pytest.approx(statistics.median(one["bytes"] / one["seconds"] / 1e9 for one in own))


def test_on_a_cluster_all_arms_are_one_job(
    command: Callable[..., Done], fake_slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("amp", "ddp", "--nodes", "2", "--gpus-per-node", "4", "--time", "30", "--arms", "fp32,bf16")
    # Queued again, it would begin anew, on other nodes.
    command("bench", *words, "--dry-run").ok("#SBATCH --nodes=2", "#SBATCH --no-requeue")
    assert not (tmp_path / "runs").exists(), "a dry run writes nothing"
    done = command("bench", *words).ok("Submitted job 4711: 2 nodes x 4 ranks.")
    (folder,) = (tmp_path / "runs").glob("[!.]*")
    assert f"python -m jobs.bench --show {folder}" in done.out
    assert json.loads((folder / "bench.json").read_text())["arms"] == ["fp32", "bf16"]
    monkeypatch.setattr(slurm_submission, "SEARCH_PAUSES", (0.0,))
    script(fake_slurm / "sbatch", "echo 'Socket timed out on send/recv operation' >&2; exit 1")
    command("bench", *words, "--run-dir", "later").refused(4, "It is unknown whether SLURM has accepted the job")
    assert (tmp_path / "later" / "bench.json").is_file(), "the job may come"


def test_the_report_of_a_bench_is_its_table(command: Callable[..., Done], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    command("bench", "--show", str(tmp_path)).refused(2, "is not the folder of a bench.")  # it is a run yet
    (tmp_path / "bench.json").write_text(BenchRequest("amp", "ddp").to_json())
    done = command("report", str(tmp_path)).ok()
    assert done.out.splitlines()[1].startswith("Does mixed precision help here? amp, preset ddp; it has not begun.")
    assert done.out == command("bench", "--show", str(tmp_path)).out
