"""What only a GPU can show; `pytest -m gpu` on a machine that has one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.rank_functions import run_ranks, train_run
from tests.training.poisoned import train_and_tell
from trainkit.records.events import read_events
from trainkit.records.metrics import read_metrics
from trainkit.records.rundir import RunDir

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    ("preset", "precision"),
    [(preset, name) for preset in ("single", "ddp", "fsdp") for name in ("fp32", "tf32", "bf16", "fp16", "o2")][:-1],
)
def test_a_gpu_trains_in_every_format_and_its_memory_is_recorded(tmp_path: Path, preset: str, precision: str) -> None:
    folder = tmp_path / "run"
    settings = ("launch.gpus_per_node=1", f"train.precision={precision}", "train.max_steps=19")
    assert run_ranks(1, train_run, folder, preset, settings) == ["finished"]
    records = read_metrics(RunDir(folder), "train")
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[-1]["max_memory_mb"] > 0


def test_a_checkpoint_of_the_gpu_goes_on_on_the_cpu(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_ranks(1, train_run, folder, "fsdp", ("launch.gpus_per_node=1", "train.max_steps=30"), 8)
    assert run_ranks(1, train_run, folder, "single", ("launch.gpus_per_node=0", "train.max_steps=30")) == ["finished"]


def test_fsdp_keeps_its_shards_in_host_memory_where_asked(tmp_path: Path) -> None:
    settings = ("launch.gpus_per_node=1", "train.precision=bf16", "train.max_steps=19", "train.grad_clip_norm=1.0")
    losses = []
    for name, more in (("there", ()), ("here", ("strategy.cpu_offload=true",))):
        assert run_ranks(1, train_run, tmp_path / name, "fsdp", (*settings, *more)) == ["finished"]
        losses.append([record["loss"] for record in read_metrics(RunDir(tmp_path / name), "train")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize("precision", ["fp16", "o2"])
def test_an_overflow_on_the_gpu_skips_the_update_and_is_an_event(tmp_path: Path, precision: str) -> None:
    settings = ("launch.gpus_per_node=1", f"train.precision={precision}", "train.max_steps=6", "data.positions='3'")
    assert run_ranks(1, train_and_tell, tmp_path / "run", "ddp", settings) == ["finished"]
    (event,) = read_events(RunDir(tmp_path / "run"), "skipped")
    told = (event["step"], event["scale_before"], event["scale_after"], event["parameter"])
    assert told == (3, 65536.0, 32768.0, "layers.2.weight")


def test_o2_on_the_gpu_learns_what_fp32_learns(tmp_path: Path) -> None:
    traces = []
    for precision in ("fp32", "o2"):
        settings = ("launch.gpus_per_node=1", f"train.precision={precision}", "train.max_steps=20", "model.norm=batch")
        run_ranks(1, train_run, tmp_path / precision, "ddp", settings)
        traces.append([record["loss"] for record in read_metrics(RunDir(tmp_path / precision), "train")])
    assert traces[1] == pytest.approx(traces[0], rel=5e-3)
