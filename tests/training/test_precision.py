"""`train.precision=o2`: an fp16 model with fp32 BatchNorm that follows fp32 weights."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.rank_functions import run_ranks, train_run
from tests.training.parts import evaluated, parts_of
from tests.training.poisoned import train_and_tell
from trainkit.bench.base import Place, Where
from trainkit.bench.benches.one_device import amp_notes
from trainkit.checkpoint.save import Checkpoints
from trainkit.checkpoint.state import master_of, weights_of
from trainkit.cluster.ranks import RankEnv
from trainkit.common.errors import RefusedError
from trainkit.config.loading import load
from trainkit.config.schema import OptimConfig
from trainkit.data.base import Batch
from trainkit.distributed.device import allow_tf32
from trainkit.distributed.process_group import Distributed, distributed
from trainkit.distributed.strategies import fsdp
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics
from trainkit.training import precision as precision_module
from trainkit.training.optim import build_optimizer
from trainkit.training.precision import Precision, choose_precision, to_half
from trainkit.training.train_state import TrainState
from trainkit.training.update import Updater

CPU = torch.device("cpu")
ALONE = Distributed(RankEnv.single(), CPU)


@pytest.mark.parametrize(("flag", "name"), [("avx512f", "fp32"), ("avx512_bf16", "bf16"), ("amx_bf16", "bf16")])
def test_auto_is_bf16_on_a_processor_that_multiplies_it(monkeypatch: pytest.MonkeyPatch, flag: str, name: str) -> None:
    monkeypatch.setattr("trainkit.cluster.survey.cpu_flags", lambda: {"avx2", flag})
    assert choose_precision("auto", CPU) == name
    config, where = load("single").config, Where((Place(0, 0, 0, "n1", "cpu"),))
    assert bool(amp_notes(config, where)) == (name == "fp32"), "a bench says that such a CPU emulates bf16"


GPU = torch.device("cuda", 1)
PASCAL, VOLTA, AMPERE = (6, 1), (7, 0), (8, 0)


@pytest.mark.parametrize(("generation", "name"), [(PASCAL, "fp32"), (VOLTA, "fp16"), (AMPERE, "bf16")])
def test_auto_on_a_gpu_is_what_its_generation_multiplies_fast(
    monkeypatch: pytest.MonkeyPatch, generation: tuple[int, int], name: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", {GPU: generation}.get)
    assert choose_precision("auto", GPU) == name
    assert choose_precision("fp32", GPU) == "fp32"
    for device in (CPU, GPU) if name != "bf16" else (CPU,):
        with pytest.raises(RefusedError, match="tf32"):
            choose_precision("tf32", device)
    if name == "bf16":
        assert choose_precision("tf32", GPU) == "tf32"


def test_tf32_is_for_products_and_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    for allowed, matmul in ((True, "high"), (False, "highest")):  # which is how it was
        allow_tf32(allowed)
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == (matmul, allowed)


def _skipped(dist: Distributed) -> tuple[int, bool, int]:
    model = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(4))  # each rank its own, as shards are
    before = [part.weight.detach().clone() for part in model]  # type: ignore[operator]
    precision = Precision("fp16", dist)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    factors = [1.0, 1.0, float("nan"), 1.0] if dist.rank == 1 else [1.0] * 4
    losses = [part(torch.ones(1, 1)).sum() * factor for part, factor in zip(model, factors, strict=True)]
    precision.backward(torch.stack(losses).sum())
    skip = precision.step(optimizer, model.parameters(), max_norm=1.0).skip  # clipping makes all gradients nan
    assert skip is not None
    kept = all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    assert precision.state_dict()["scaler"]["scale"] == skip.after == 32768.0
    return skip.parameter, kept, precision.skipped_steps


def _of_shards(dist: Distributed, factors: list[float], max_norm: float | None) -> tuple[float, bool, float]:
    """Whether an update is bad, whether it has left the weights as they were, and the norm of its gradients."""
    torch.manual_seed(0)
    model = fsdp.build(dist, sharding=fsdp.Sharding()).parallelize(nn.Linear(4, 2, bias=False))
    (weight,) = (parameter.to_local() for parameter in model.parameters())  # type: ignore[attr-defined]
    before, precision = weight.clone(), Precision("fp32", dist)
    precision.backward((model(torch.full((1, 4), 100.0)) * torch.tensor(factors)).sum())
    stepped = precision.step(build_optimizer(model, OptimConfig()), model.parameters(), max_norm)
    assert stepped.norm is None or type(stepped.norm) is torch.Tensor, "whole on every rank"
    return stepped.nonfinite.item(), torch.equal(weight, before), float(stepped.norm or 0.0)


def _on_a_rank(env: RankEnv) -> list[Any]:
    with distributed(env, use_gpu=False) as dist:
        bad = [_of_shards(dist, factors, None) for factors in ([1.0, math.nan], [math.inf, math.nan])]
        return [_skipped(dist), *bad, _of_shards(dist, [1.0, 1.0], 1.0)]


def test_what_is_bad_on_one_rank_is_bad_on_all_who_name_where() -> None:
    """And the norm of sharded gradients is that of all of them."""
    norm = pytest.approx(math.sqrt(8) * 100.0)
    assert run_ranks(2, _on_a_rank) == [[(2, True, 1), (1.0, True, 0.0), (1.0, True, 0.0), (0.0, False, norm)]] * 2


def test_a_run_goes_on_with_its_loss_scale_or_in_another_precision() -> None:
    half, full = Precision("fp16", ALONE), Precision("fp32", ALONE)
    model = nn.Linear(4, 1)
    for factor in (1.0, math.inf):
        half.backward(model(torch.ones(2, 4)).sum() * factor)
        half.step(torch.optim.SGD(model.parameters(), lr=0.1), model.parameters(), None)
    saved = half.state_dict()
    assert (saved["skipped_steps"], saved["scaler"]["scale"], saved["scaler"]["_growth_tracker"]) == (1, 32768.0, 0)
    again = Precision("fp16", ALONE)
    again.load_state_dict(saved)
    assert again.state_dict() == saved
    full.load_state_dict(saved)
    assert full.state_dict() == {"skipped_steps": 1, "scaler": {}}
    half.load_state_dict({})
    assert half.state_dict() == {**saved, "skipped_steps": 0}


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.half), ("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_products_have_the_format_and_gradients_are_clipped(name: str, dtype: torch.dtype) -> None:
    precision, model = Precision(name, ALONE), nn.Linear(4, 1, bias=False)
    before = model.weight.detach().clone()
    with precision.autocast():
        scores = model(torch.full((1, 4), 32.0))
    precision.backward(scores.float().sum() / 64)  # or fp16 would overflow
    stepped = precision.step(torch.optim.SGD(model.parameters(), lr=1.0), model.parameters(), max_norm=0.25)
    assert (precision.name, scores.dtype) == (name, dtype)
    assert [float(stepped.norm or 0), float((model.weight.detach() - before).norm())] == pytest.approx([1.0, 0.25])


class Scaled(nn.Module):
    """Takes a number by its name, and gives scores and what is none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1, bias=False)

    def forward(self, images: torch.Tensor, *, factor: float) -> dict[str, torch.Tensor]:
        return {"scores": self.layer(images) * factor, "counts": torch.tensor([3])}


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
def test_a_module_of_the_users_takes_what_it_took_and_gives_fp32(name: str) -> None:
    module = Scaled()
    nn.init.constant_(module.layer.weight, 1 + 2**-12)  # 1 in both half formats
    found = Precision(name, ALONE).around(module)(torch.ones(1, 4), factor=0.5)
    assert (found["scores"].dtype, found["counts"].dtype) == (torch.float32, torch.int64)
    assert found["scores"].item() == (2 * (1 + 2**-12) if name == "fp32" else 2.0)


@pytest.mark.parametrize(("is_free", "max_norm"), [(True, None), (True, 1.0), (False, None), (False, 1.0)])
@pytest.mark.parametrize("settings", [{}, {"name": "sgd", "nesterov": True}, {"name": "sgd", "momentum": 0.0}])
def test_an_update_that_is_not_finite_leaves_no_trace(
    settings: dict[str, Any], is_free: bool, max_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the host asks the device or the fused optimizers see for themselves; with clipping and without."""
    monkeypatch.setattr(precision_module, "is_free_to_ask", lambda device: is_free)

    def values(bad: tuple[int, ...]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, precision = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)), Precision("fp32", ALONE)
        optimizer = build_optimizer(model, OptimConfig.model_validate(settings))
        for number in range(4 + len(bad)):
            # The first one too: SGD has no momentum yet, and would keep what happens to be in its memory.
            generator = torch.Generator().manual_seed(number - sum(number > one for one in bad))
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            if number in bad:
                next(model.parameters()).grad = torch.full((8, 4), math.nan)
            stepped = precision.step(optimizer, model.parameters(), max_norm)
            assert stepped.nonfinite.item() == (number in bad)
        assert hasattr(optimizer, "found_inf") != is_free, "who does not wait for the device tells the optimizer"
        moments = [value for parameter in model.parameters() for value in optimizer.state.get(parameter, {}).values()]
        return [*model.parameters(), *filter(torch.is_tensor, moments)]

    without, among = values(()), values((0, 3))
    assert len(without) == len(among)
    assert all(torch.equal(one, other) for one, other in zip(without, among, strict=True))


def test_a_parameter_without_a_gradient_is_no_bad_one() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    precision = Precision("fp32", ALONE)
    precision.backward(model[1](torch.ones(1, 2)).sum())
    assert precision.step(build_optimizer(model, OptimConfig()), model.parameters(), None).nonfinite.item() == 0.0


IMAGES = torch.randint(0, 256, (8, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
BATCH = Batch(IMAGES, torch.arange(8) % 7, torch.arange(8))
PLAIN = ("optim.name=sgd", "optim.momentum=0", "optim.weight_decay=0", "train.micro_batch_size=8")


class Net(nn.Module):
    """A filter, a BatchNorm and a matrix, always the same."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.filters, self.norm, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Linear(6, 7)
        self.register_buffer("offset", torch.full((6,), 0.1))
        self.formats: list[torch.dtype] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.filters(images))).mean((2, 3)) + self.get_buffer("offset")
        self.formats += [images.dtype, hidden.dtype]
        scores: torch.Tensor = self.head(hidden)
        return scores


def parts(*overrides: str, precision: str = "o2") -> TrainState:
    return parts_of(*PLAIN, *overrides, f"train.precision={precision}", model=Net())


def updated(count: int, *overrides: str, precision: str = "o2", lr: float = 0.05) -> dict[str, torch.Tensor]:
    """The weights that are saved after so many updates."""
    trained = parts(*overrides, precision=precision)
    update = Updater(trained)
    size = trained.micro_batch_size
    for step in range(count):
        batches = [Batch(*(part[start : start + size] for part in BATCH)) for start in range(0, 8, size)]
        update(iter(batches), lr=lr, seed=step)
    return weights_of(trained.model)


def test_everything_is_fp16_but_batchnorm_and_what_learns() -> None:
    model = parts().model
    halves = {name: str(value.dtype) for name, value in model.state_dict().items()}
    assert {name for name, dtype in halves.items() if dtype == "torch.float32"} == {
        "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var",
    }  # fmt: skip
    assert halves["filters.weight"] == halves["offset"] == "torch.float16"
    plain = dict(Net().named_parameters())
    assert all(torch.equal(master_of(parameter), plain[name]) for name, parameter in model.named_parameters())
    model(torch.rand(2, 3, 4, 4))
    assert set(model.formats) == {torch.float16}  # type: ignore[arg-type]
    assert to_half(nn.Embedding(3, 2), ALONE)(torch.tensor([2])).dtype == torch.float16, "numbers of words stay"


def _masters(env: RankEnv) -> list[list[float]]:
    """Before and after, of a model that each rank has drawn for itself."""
    torch.manual_seed(env.rank)
    model = nn.Linear(2, 1, bias=False)
    drawn = model.weight.tolist()[0]
    with distributed(env, use_gpu=False) as dist:
        return [drawn, master_of(to_half(model, dist).weight).tolist()[0]]  # type: ignore[arg-type]


def test_all_ranks_have_the_fp32_weights_of_the_first() -> None:
    (first, used), (other, used_there) = run_ranks(2, _masters)
    assert first == used == used_there != other


def test_momentum_begins_with_zeros_but_for_what_another_rank_updates() -> None:
    """The same update as without; on a GPU, one that comes to nothing leaves it so."""
    here, elsewhere, frozen = (nn.Parameter(torch.ones(2)) for _ in range(3))
    here.grad, elsewhere.grad = torch.ones(2), torch.ones(2)
    optimizer = torch.optim.SGD([here, elsewhere, frozen], lr=0.1, momentum=0.9)
    optimizer.elsewhere = {id(elsewhere)}  # type: ignore[attr-defined]  # as strategy.zero says
    precision_module._begin_momentum(optimizer)
    assert {id(parameter) for parameter in optimizer.state} == {id(here)}
    assert optimizer.state[here]["momentum_buffer"].tolist() == [0, 0]
    optimizer.step()
    assert here.tolist() == pytest.approx([0.9, 0.9])


@pytest.mark.parametrize(
    "settings",
    [
        ("optim.name=adamw",),
        ("optim.name=lamb", "train.grad_clip_norm=0.1"),
        ("optim.name=muon",),
        ("optim.name=sgd", "optim.momentum=0.9", "train.grad_clip_norm=0.1", "train.channels_last=true"),
        ("model.freeze=[filters.*]", "train.micro_batch_size=4"),
    ],
    ids=lambda value: "+".join(value),
)
def test_every_optimizer_clipping_and_freezing_work_on_the_fp32_weights(settings: tuple[str, ...]) -> None:
    learnt, wanted = (updated(3, *settings, precision=precision, lr=0.01) for precision in ("o2", "fp32"))
    start = Net().state_dict()
    assert torch.equal(learnt["filters.weight"], start["filters.weight"]) == ("freeze" in settings[0])
    for name in ("filters.weight", "head.weight", "norm.weight"):
        assert torch.allclose(learnt[name], wanted[name], atol=2e-3), name
        assert learnt[name].dtype == torch.float32


def test_a_checkpoint_of_o2_is_one_of_fp32_and_the_other_way_round(tmp_path: Path) -> None:
    trained = parts("optim.name=adamw")
    Updater(trained)(iter([BATCH]), lr=0.05, seed=0)
    kept = Checkpoints(tmp_path / "checkpoints", keep=1, dist=ALONE)
    kept.save(trained.model, trained.optimizer, step=1, state={})
    kept.settle()
    saved = load_file(next((tmp_path / "checkpoints").glob("step-*/model.safetensors")))
    assert {value.dtype for value in saved.values()} == {torch.float32, torch.int64}
    full, again = parts("optim.name=adamw", precision="fp32"), parts("optim.name=adamw")
    for other in (full, again):
        kept.restore(other.model, other.optimizer)
        for name, parameter in other.model.named_parameters():
            assert torch.equal(master_of(parameter), saved[name])
            mean = other.optimizer.state[master_of(parameter)]["exp_avg"]
            assert mean.dtype == torch.float32
            assert mean.abs().sum() > 0
    assert torch.equal(again.model.state_dict()["head.weight"], saved["head.weight"].half()), "the model follows them"


def test_the_averaged_weights_are_those_of_the_fp32_weights() -> None:
    averages, losses = [], []
    for precision in ("o2", "fp32"):
        trained = parts("train.ema_decay=0.9", precision=precision)
        assert trained.ema is not None
        update = Updater(trained)
        for step in range(3):
            made = update(iter([BATCH]), lr=1e-4, seed=step)
            trained.ema.update(made.stepped.nonfinite, updates=step)
        averages.append(trained.ema.tensors()["head.weight"].clone())
        with trained.ema.in_model():
            losses.append(evaluated(trained, batch_size=4)["loss"])
    start = Net().head.weight.detach()
    assert averages[0].dtype == torch.float32
    assert torch.allclose(averages[0] - start, averages[1] - start, rtol=0.1, atol=1e-7)
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


def test_tied_weights_stay_tied_and_frozen_ones_frozen() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    first.bias.requires_grad_(False)
    to_half(nn.ModuleList([first, second]), ALONE)
    assert first.weight is second.weight
    assert master_of(first.weight).dtype == torch.float32
    assert not master_of(first.bias).requires_grad


# A white image is not a number, so that an update with one is skipped.

SKIPPING = [
    ("o2", "single", 1, ()),
    ("o2", "ddp", 2, ("train.micro_batch_size=2",)),
    ("fp16", "fsdp", 2, ("train.micro_batch_size=1", "train.grad_clip_norm=1")),
]


@pytest.mark.parametrize(("precision", "preset", "world_size", "settings"), SKIPPING, ids=str)
def test_a_skipped_update_is_an_event_whoever_trains(
    tmp_path: Path, precision: str, preset: str, world_size: int, settings: tuple[str, ...]
) -> None:
    all_of_it = (f"train.precision={precision}", "train.max_steps=6", "data.positions='3,5'", *settings)
    assert run_ranks(world_size, train_and_tell, tmp_path / "run", preset, all_of_it) == ["finished"] * world_size
    events = read_events(RunDir(tmp_path / "run"), "skipped")
    assert [(e["step"], e["scale_before"], e["scale_after"], e["parameter"]) for e in events] == [
        (3, 65536.0, 32768.0, "layers.2.weight"), (4, 32768.0, 16384.0, "layers.2.weight"),
    ]  # fmt: skip
    assert [record["step"] for record in read_metrics(RunDir(tmp_path / "run"), "train")] == [1, 2, 3, 4, 5, 6]
    assert read_metrics(RunDir(tmp_path / "run"), "train")[-1]["skipped_steps"] == 2


IMAGES_OF_8 = (
    "data.name=synthetic", "data.train_size=64", "data.val_size=8", "data.test_size=8", "data.image_size=8",
    "data.num_classes=3",
)  # fmt: skip


@pytest.mark.nightly
def test_an_optimizer_that_the_ranks_share_updates_the_fp32_weights(tmp_path: Path) -> None:
    settings = ("train.precision=o2", "train.max_steps=4", "train.global_batch_size=8", *IMAGES_OF_8)
    saved = []
    for name in ("ddp", "zero"):
        ended = run_ranks(2, train_run, tmp_path / name, "ddp", (*settings, f"strategy.name={name}"))
        assert ended == ["finished"] * 2
        saved.append((tmp_path / name / "checkpoints/latest/model.safetensors").read_bytes())
    assert saved[0] == saved[1]
