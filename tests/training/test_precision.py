from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.rank_functions import run_ranks, train_run
from trainkit.distributed.process_group import Distributed, distributed
from trainkit.errors import RefusedError
from trainkit.ranks.env import RankEnv
from trainkit.records.metrics import read_metrics
from trainkit.records.rundir import RunDir
from trainkit.training.precision import Precision, choose_precision

CPU = torch.device("cpu")


def alone() -> Distributed:
    return Distributed(RankEnv.single(), CPU)


def test_auto_on_cpu_is_bf16_exactly_where_torch_finds_instructions_for_it() -> None:
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    assert choose_precision("auto", CPU) == ("bf16" if native else "fp32")


def test_auto_is_fp32_on_a_processor_without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.training.precision._cpu_flags", lambda: {"avx2", "avx512f"})
    assert choose_precision("auto", CPU) == "fp32"


def test_auto_is_bf16_on_a_processor_that_multiplies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.training.precision._cpu_flags", lambda: {"avx512_bf16"})
    assert choose_precision("auto", CPU) == "bf16"


def test_tf32_on_cpu_is_refused() -> None:
    with pytest.raises(RefusedError, match="tf32"):
        choose_precision("tf32", CPU)


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_matrices_are_multiplied_in_the_format_that_was_asked_for(name: str, dtype: torch.dtype) -> None:
    with Precision(name, alone()).autocast():
        assert nn.Linear(4, 4)(torch.randn(2, 4)).dtype == dtype


def test_an_fp16_overflow_skips_the_update_and_is_counted() -> None:
    model = nn.Linear(4, 1)
    before = model.weight.detach().clone()
    precision = Precision("fp16", alone())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision.backward(model(torch.ones(2, 4)).sum() * float("inf"))
    precision.step(optimizer, model.parameters(), None)
    assert torch.equal(model.weight, before)
    assert precision.skipped_steps == 1
    precision.backward(model(torch.ones(2, 4)).sum())
    precision.step(optimizer, model.parameters(), None)
    assert not torch.equal(model.weight, before)
    assert precision.skipped_steps == 1


def _overflow_on_rank_1(env: RankEnv) -> tuple[bool, int]:
    with distributed(env, use_gpu=False) as dist:
        model = nn.Linear(4, 1)  # each rank its own, as the shards of FSDP are
        before = model.weight.detach().clone()
        precision = Precision("fp16", dist)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        factor = float("inf") if dist.rank == 1 else 1.0
        precision.backward(model(torch.ones(2, 4)).sum() * factor)
        precision.step(optimizer, model.parameters(), None)
        return torch.equal(model.weight, before), precision.skipped_steps


def test_an_overflow_on_one_rank_skips_the_update_on_all() -> None:
    assert run_ranks(2, _overflow_on_rank_1) == [(True, 1), (True, 1)]


@pytest.mark.parametrize(("preset", "world_size", "precision"), [("ddp", 2, "bf16"), ("fsdp", 2, "fp16")])
def test_mixed_precision_learns(tmp_path: Path, preset: str, world_size: int, precision: str) -> None:
    folder = tmp_path / "run"
    run_ranks(world_size, train_run, folder, preset, (f"train.precision={precision}", "train.max_steps=19"))
    trace = [record["loss"] for record in read_metrics(RunDir(folder), "train")]
    assert sum(trace[-3:]) < sum(trace[:3])


def test_gradients_are_clipped_to_the_norm(tmp_path: Path) -> None:
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.detach().clone()
    precision = Precision("fp32", alone())
    precision.backward(model(torch.full((1, 4), 100.0)).sum())
    norm = precision.step(optimizer, model.parameters(), 1.0).norm
    assert norm is not None
    assert norm.item() == pytest.approx(200.0)
    assert (before - model.weight).norm().item() == pytest.approx(1.0, rel=1e-4)
