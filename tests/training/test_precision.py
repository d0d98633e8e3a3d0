from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.rank_functions import run_ranks, train_run
from trainkit.bench.arms import amp_notes
from trainkit.bench.base import Place, Where
from trainkit.config.loading import load
from trainkit.config.schema import OptimConfig
from trainkit.distributed.process_group import Distributed, distributed
from trainkit.errors import RefusedError
from trainkit.ranks.env import RankEnv
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics
from trainkit.strategies import fsdp
from trainkit.training import precision as precision_module
from trainkit.training.layout import make_deterministic
from trainkit.training.optim import build_optimizer
from trainkit.training.precision import Precision, Skip, Stepped, allow_tf32, choose_precision

CPU = torch.device("cpu")


def alone() -> Distributed:
    return Distributed(RankEnv.single(), CPU)


def test_auto_on_cpu_is_bf16_exactly_where_torch_finds_instructions_for_it() -> None:
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    assert choose_precision("auto", CPU) == ("bf16" if native else "fp32")


def test_auto_is_fp32_on_a_processor_without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.config.schema.cpu_flags", lambda: {"avx2", "avx512f"})
    assert choose_precision("auto", CPU) == "fp32"


@pytest.mark.parametrize("flag", ["avx512_bf16", "amx_bf16"])
def test_auto_is_bf16_on_a_processor_that_multiplies_it(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    monkeypatch.setattr("trainkit.config.schema.cpu_flags", lambda: {"avx2", flag})
    assert choose_precision("auto", CPU) == "bf16"


def test_a_bench_says_that_a_cpu_emulates_bf16_only_of_one_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    config, where = load("single").config, Where((Place(0, 0, 0, "n1", "cpu"),))
    for flag, notes in (("avx512_bf16", 0), ("amx_bf16", 0), ("avx512f", 1)):
        monkeypatch.setattr("trainkit.config.schema.cpu_flags", partial(set, [flag]))
        assert len(amp_notes(config, where)) == notes


def test_tf32_on_cpu_is_refused() -> None:
    with pytest.raises(RefusedError, match="tf32"):
        choose_precision("tf32", CPU)


GPU = torch.device("cuda", 1)
PASCAL, VOLTA, TURING, AMPERE, HOPPER = (6, 1), (7, 0), (7, 5), (8, 0), (9, 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> torch.device:
    """A device whose generation is the parameter: all that is asked of a GPU before it is used."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", {GPU: request.param}.get)
    return GPU


@pytest.mark.parametrize(
    ("gpu", "name"),
    [(PASCAL, "fp32"), (VOLTA, "fp16"), (TURING, "fp16"), (AMPERE, "bf16"), (HOPPER, "bf16")],
    indirect=["gpu"],
)
def test_auto_on_a_gpu_is_what_its_generation_multiplies_fast(gpu: torch.device, name: str) -> None:
    assert choose_precision("auto", gpu) == name
    assert choose_precision("fp32", gpu) == "fp32"


@pytest.mark.parametrize("gpu", [AMPERE, HOPPER], indirect=True)
def test_tf32_is_there_from_ampere_on(gpu: torch.device) -> None:
    assert choose_precision("tf32", gpu) == "tf32"


@pytest.mark.parametrize("gpu", [TURING], indirect=True)
def test_tf32_on_an_older_gpu_is_refused(gpu: torch.device) -> None:
    with pytest.raises(RefusedError, match="tf32"):
        choose_precision("tf32", gpu)


@pytest.mark.parametrize(("allowed", "matmul"), [(True, "high"), (False, "highest")])
def test_tf32_is_for_products_and_convolutions(allowed: bool, matmul: str) -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        allow_tf32(allowed)
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == (matmul, allowed)
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_matrices_are_multiplied_in_the_format_that_was_asked_for(name: str, dtype: torch.dtype) -> None:
    precision = Precision(name, alone())
    assert precision.name == name
    assert bool(precision.state_dict()["scaler"]) == (name == "fp16"), "only fp16 scales the loss"
    with precision.autocast():
        assert nn.Linear(4, 4)(torch.randn(2, 4)).dtype == dtype


def test_an_fp16_overflow_skips_the_update_and_is_counted() -> None:
    model = nn.Linear(4, 1)
    before = model.weight.detach().clone()
    precision = Precision("fp16", alone())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update(factor: float) -> Stepped:
        precision.backward(model(torch.ones(2, 4)).sum() * factor)
        stepped = precision.step(optimizer, model.parameters(), None)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert stepped.norm is None
        return stepped

    first = update(float("inf"))
    assert torch.equal(model.weight, before)
    assert (first.nonfinite.item(), first.skip) == (1.0, Skip(before=65536.0, after=32768.0, parameter=0))
    assert precision.skipped_steps == 1
    second = update(1.0)
    assert not torch.equal(model.weight, before)
    assert (second.nonfinite.item(), second.skip) == (0.0, None)
    assert precision.skipped_steps == 1
    assert update(float("nan")).skip == Skip(32768.0, 16384.0, 0)
    assert precision.skipped_steps == 2


def test_momentum_begins_with_the_first_update_that_does_not_overflow() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    precision = Precision("fp16", alone())
    make_deterministic(True)  # fresh memory holds nan
    try:
        for factor in (float("inf"), 1.0, 1.0):
            precision.backward(model(torch.ones(2, 4)).sum() * factor)
            precision.step(optimizer, model.parameters(), None)
    finally:
        make_deterministic(False)
    assert torch.isfinite(model.weight).all()
    assert optimizer.state[model.weight]["momentum_buffer"].tolist() == [pytest.approx([3.8] * 4)]


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


def _first_to_overflow(env: RankEnv) -> int | None:
    with distributed(env, use_gpu=False) as dist:
        model = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(4))  # each rank its own, as shards are
        precision = Precision("fp16", dist)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        factors = [1.0, 1.0, float("nan"), 1.0] if dist.rank == 1 else [1.0, 1.0, 1.0, float("inf")]
        losses = [part(torch.ones(1, 1)).sum() * factor for part, factor in zip(model, factors, strict=True)]
        precision.backward(torch.stack(losses).sum())
        skip = precision.step(optimizer, model.parameters(), max_norm=1.0).skip  # clipping makes all gradients nan
        return None if skip is None else skip.parameter


def test_all_ranks_name_the_first_parameter_that_overflowed_anywhere() -> None:
    assert run_ranks(2, _first_to_overflow) == [2, 2]


@pytest.mark.parametrize(
    ("preset", "world_size", "precision"), [("ddp", 2, "bf16"), pytest.param("fsdp", 2, "fp16", marks=pytest.mark.long)]
)
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


def _weights_after_a_bad_update(name: str, fused: bool) -> tuple[list[torch.Tensor], dict[Any, Any]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = build_optimizer(model, OptimConfig(name=name))
    if not fused:
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    precision = Precision("fp32", Distributed(RankEnv.single(), torch.device("cpu")))
    for factor in (1.0, float("nan")):
        precision.backward(model(torch.ones(3, 4)).sum() * factor)
        stepped = precision.step(optimizer, model.parameters(), None)
        assert stepped.nonfinite.item() == (factor != 1.0)
    return [parameter.detach().clone() for parameter in model.parameters()], optimizer.state_dict()["state"]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_bad_update_leaves_weights_and_optimizer_alone_with_and_without_the_fused_kernel(name: str) -> None:
    torch.manual_seed(0)
    start = nn.Linear(4, 2)
    (fused, state), (plain, other) = (_weights_after_a_bad_update(name, fused) for fused in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(fused, plain, strict=True))
    assert not torch.equal(fused[0], start.weight), "the good update was made"
    for moments, others in zip(state.values(), other.values(), strict=True):
        assert all(torch.equal(moments[key], others[key]) for key in others)
        assert all(torch.isfinite(value).all() for value in moments.values())


def _bad_in_shards(env: RankEnv, factors: list[float]) -> tuple[float, bool]:
    with distributed(env, use_gpu=False) as dist:
        torch.manual_seed(0)
        model = fsdp.build(dist).parallelize(nn.Linear(4, 2))
        (weight, _) = (parameter.to_local() for parameter in model.parameters())  # type: ignore[attr-defined]
        before = weight.clone()
        precision = Precision("fp32", dist)
        precision.backward((model(torch.ones(3, 4)) * torch.tensor(factors)).sum())
        stepped = precision.step(build_optimizer(model, OptimConfig()), model.parameters(), None)
        return stepped.nonfinite.item(), torch.equal(weight, before)


@pytest.mark.parametrize("factors", [[1.0, math.nan], [math.inf, math.nan]])
def test_what_is_bad_in_the_shard_of_one_rank_is_bad_on_all(factors: list[float]) -> None:
    assert run_ranks(2, _bad_in_shards, factors) == [(1.0, True)] * 2


def test_scale_and_skips_go_on_where_they_were() -> None:
    model = nn.Linear(4, 1)
    first, second, other = (Precision(name, alone()) for name in ("fp16", "fp16", "fp32"))
    first.backward(model(torch.ones(2, 4)).sum() * math.inf)
    first.step(torch.optim.SGD(model.parameters(), lr=0.1), model.parameters(), None)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert second.state_dict()["scaler"]["scale"] == 32768.0
    other.load_state_dict(first.state_dict())
    assert other.state_dict() == {"skipped_steps": 1, "scaler": {}}
    first.load_state_dict(Precision("fp32", alone()).state_dict())
    assert first.state_dict()["skipped_steps"] == 0
    assert first.state_dict()["scaler"]["scale"] == 32768.0, "no scale in a checkpoint of fp32"


def test_a_bad_update_that_is_clipped_leaves_the_weights_alone_too() -> None:
    model = nn.Linear(4, 1)
    before = model.weight.detach().clone()
    precision = Precision("fp32", alone())
    optimizer = build_optimizer(model, OptimConfig())
    precision.backward(model(torch.ones(2, 4)).sum() * float("inf"))
    assert precision.step(optimizer, model.parameters(), 1.0).nonfinite.item() == 1.0
    assert torch.equal(model.weight, before)
    precision.backward(model(torch.ones(2, 4)).sum())
    assert precision.step(optimizer, model.parameters(), 1.0).nonfinite.item() == 0.0
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("settings", [{}, {"name": "sgd", "nesterov": True}, {"name": "sgd", "momentum": 0.0}])
def test_an_update_that_the_device_says_is_not_finite_leaves_no_trace(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision_module, "is_free_to_ask", lambda device: False)

    def values(bad: tuple[int, ...]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, precision = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)), Precision("fp32", alone())
        optimizer = build_optimizer(model, OptimConfig.model_validate(settings))
        for number in range(4 + len(bad)):
            # The first one too: SGD has no momentum yet, and would keep what happens to be in its memory.
            generator = torch.Generator().manual_seed(number - sum(number > one for one in bad))
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            if number in bad:
                next(model.parameters()).grad = torch.full((8, 4), math.nan)
            precision.step(optimizer, model.parameters(), None)
        moments = [value for parameter in model.parameters() for value in optimizer.state.get(parameter, {}).values()]
        return [*model.parameters(), *filter(torch.is_tensor, moments)]

    without, among = values(()), values((0, 3))
    assert len(without) == len(among)
    assert all(torch.equal(one, other) for one, other in zip(without, among, strict=True))


def test_a_parameter_without_a_gradient_is_no_bad_one() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    precision = Precision("fp32", alone())
    precision.backward(model[1](torch.ones(1, 2)).sum())
    assert precision.step(build_optimizer(model, OptimConfig()), model.parameters(), None).nonfinite.item() == 0.0


def _norm_of_shards(env: RankEnv) -> float:
    with distributed(env, use_gpu=False) as dist:
        model = fsdp.build(dist).parallelize(nn.Linear(4, 2, bias=False))
        precision = Precision("fp32", dist)
        precision.backward(model(torch.full((1, 4), 100.0)).sum())
        norm = precision.step(build_optimizer(model, OptimConfig()), model.parameters(), 1.0).norm
        assert type(norm) is torch.Tensor, "whole on every rank"
        return float(norm)


def test_the_norm_of_sharded_gradients_is_that_of_all_of_them() -> None:
    assert run_ranks(2, _norm_of_shards) == pytest.approx([math.sqrt(8) * 100.0] * 2)
