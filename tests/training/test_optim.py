"""The average of the weights: what it is, that it goes on exactly, and that it is measured beside them."""

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import timm.optim
import torch
from torch import nn

from tests.checkpoint.reading import tensors
from tests.rank_functions import run_ranks, train_run
from tests.training.parts import keeper_of, parts_of
from trainkit.checkpoint import format
from trainkit.checkpoint.save import Checkpoints
from trainkit.cluster.ranks import RankEnv
from trainkit.common.errors import UserError
from trainkit.config.libraries import check_optimizer, library_optimizers, objection
from trainkit.config.loading import load
from trainkit.config.schema import OptimConfig, ScheduleConfig
from trainkit.distributed.process_group import distributed
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.training.ema import Ema
from trainkit.training.loop import train
from trainkit.training.optim import Airbench, build_optimizer, orthogonal, set_lr
from trainkit.training.progress import Progress
from trainkit.training.schedule import check_own_schedule, lr_at

ADAMW = OptimConfig(name="adamw", lr=0.25, weight_decay=0.5, betas=(0.8, 0.9))
SGD = OptimConfig(name="sgd", lr=0.25, weight_decay=0.5, momentum=0.7, nesterov=True)


def small_vit() -> nn.Module:
    model: nn.Module = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=12, depth=1, num_heads=3, num_classes=2
    )
    return model


def not_decayed(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    """Names, and every trainable parameter is in exactly one group."""
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(named)
    assert set(decay.values()) <= {0.0, 0.5}
    return {name for name, parameter in named.items() if decay[id(parameter)] == 0.0}


@pytest.mark.parametrize("config", [ADAMW, SGD], ids=["adamw", "sgd"])
def test_matrices_decay_and_biases_norms_and_what_the_model_names_do_not(config: OptimConfig) -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    plain = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), frozen, nn.Linear(2, 2))
    assert not_decayed(plain, build_optimizer(plain, config)) == {"0.bias", "1.weight", "1.bias", "3.bias"}
    backbone = nn.DataParallel(nn.Sequential(small_vit(), nn.Linear(2, 2)), device_ids=[])
    found = not_decayed(backbone, build_optimizer(backbone, config))
    assert found >= {"module.0.cls_token", "module.0.pos_embed", "module.1.bias"}
    assert not any(name.endswith("qkv.weight") for name in found)


LAMB = OptimConfig(name="lamb", lr=0.25, weight_decay=0.5, betas=(0.8, 0.9))
MUON = OptimConfig(name="muon", lr=0.25, weight_decay=0.5, betas=(0.8, 0.9), momentum=0.7, nesterov=True)


@pytest.mark.parametrize(
    ("config", "kind", "given"),
    [
        (ADAMW, "AdamW", {"lr": 0.25, "betas": (0.8, 0.9), "fused": True}),
        (SGD, "SGD", {"lr": 0.25, "momentum": 0.7, "nesterov": True, "fused": True}),
        (LAMB, "Lamb", {"lr": 0.25, "betas": (0.8, 0.9), "max_grad_norm": None}),  # others clip
    ],
    ids=["adamw", "sgd", "lamb"],
)
def test_settings_and_a_new_rate_reach_every_group(config: OptimConfig, kind: str, given: dict[str, object]) -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), config)
    assert type(optimizer).__name__ == kind
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    for group in optimizer.param_groups:
        assert given.items() <= {**optimizer.defaults, **group}.items()
    set_lr(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


@pytest.mark.parametrize("config", [ADAMW, MUON], ids=lambda config: config.name)
def test_layers_nearer_to_the_image_learn_slower(config: OptimConfig) -> None:
    config = config.model_copy(update={"layer_decay": 0.5})
    model = small_vit()
    optimizer = build_optimizer(model, config)
    set_lr(optimizer, 0.125)
    rate = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    rates = {name: rate[id(parameter)] for name, parameter in model.named_parameters()}
    assert rates["head.weight"] == 0.125
    assert rates["blocks.0.attn.qkv.weight"] < rates["head.weight"]
    assert rates["patch_embed.proj.weight"] == rates["blocks.0.attn.qkv.weight"] / 2
    assert not_decayed(model, optimizer) >= {"cls_token", "pos_embed", "head.bias"}
    with pytest.raises(UserError, match=r"optim\.layer_decay=0\.5 is not possible"):
        build_optimizer(nn.Linear(2, 2), config)


@pytest.mark.parametrize("name", ["timm/adamw", "adamc", "lionc"])
def test_a_layer_decays_by_its_own_rate_and_its_own_peak(name: str) -> None:
    model = small_vit()
    decay = 1e-2
    optimizer = build_optimizer(model, OptimConfig(name=name, lr=0.25, weight_decay=decay, layer_decay=0.5))
    set_lr(optimizer, 0.25)  # the peak: lr^2 / peak is lr
    before = [parameter.detach().clone() for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    groups = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    for was, (parameter, group) in zip(before, groups, strict=True):
        torch.testing.assert_close(parameter.detach(), was * (1 - group["lr"] * group["weight_decay"]))


def hidden() -> nn.Module:
    """With a filter, a matrix, a depthwise filter, a last layer, and biases."""
    torch.manual_seed(0)
    depthwise = nn.Conv2d(6, 6, 3, groups=6)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), depthwise, nn.Flatten(), nn.Linear(24, 10), nn.LayerNorm(10), nn.Linear(10, 4)
    )


@pytest.mark.parametrize("layer_decay", [1.0, 0.5])
def test_muon_is_torchs_for_matrices_and_filters_and_adamw_for_the_rest(layer_decay: float) -> None:
    config = OptimConfig(name="muon", lr=0.02, weight_decay=0.1, layer_decay=layer_decay)
    ours = small_vit() if layer_decay < 1 else hidden()
    theirs = copy.deepcopy(ours)
    last, whole = ("head.weight", ["cls_token", "pos_embed"]) if layer_decay < 1 else ("5.weight", [])
    optimizer = build_optimizer(ours, config)
    names = {parameter: name for name, parameter in ours.named_parameters()}
    groups = {names[p]: group for group in optimizer.param_groups for p in group["params"]}
    assert len(groups) == len(names)
    muon, others, flat = [], [], {}
    for name, parameter in theirs.named_parameters():
        rate = {"lr": config.lr * groups[name].get("lr_scale", 1.0), "weight_decay": groups[name]["weight_decay"]}
        is_matrix = parameter.ndim > 1 and name != last and name not in whole
        assert groups[name]["use_muon"] == is_matrix, name
        assert rate["weight_decay"] == (0.1 if is_matrix or name == last else 0.0)
        if is_matrix:
            flat[name] = nn.Parameter(parameter.detach().flatten(1))
            muon.append({"params": [flat[name]], **rate})
        else:
            flat[name] = parameter
            others.append({"params": [parameter], **rate})
    torchs = torch.optim.Muon(muon, lr=config.lr, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=config.lr, betas=(0.9, 0.999))
    for seed in range(5):
        torch.manual_seed(seed)
        for name, parameter in ours.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            flat[name].grad = parameter.grad.view_as(flat[name]).clone()
        set_lr(optimizer, config.lr)
        optimizer.step()
        torchs.step()
        adamw.step()
        for name, parameter in ours.named_parameters():
            assert torch.allclose(parameter, flat[name].view_as(parameter), rtol=1e-4, atol=2e-6), (seed, name)


def test_muon_as_timm_has_it_makes_the_updates_of_runs_of_before() -> None:
    config = OptimConfig(name="muon", momentum=0.9, nesterov=False, muon_as="timm")
    ours, theirs = hidden(), hidden()
    optimizer = build_optimizer(ours, config)
    groups = [{"params": [p for p in theirs.parameters() if (p.ndim < 2) == bias], "weight_decay": 0.05 * (not bias)}
              for bias in (False, True)]  # fmt: skip
    timms = timm.optim.Muon(groups, lr=2e-3, momentum=0.9, betas=(0.9, 0.999))  # type: ignore[attr-defined]
    for seed in (1, 2):
        update(ours, optimizer, seed)
        update(theirs, timms, seed)
    assert all(torch.equal(one, two) for one, two in zip(ours.parameters(), theirs.parameters(), strict=True))


ACCEPTED = sorted(name for name, entry in library_optimizers().items() if not any(objection(entry, {}, sharded=False)))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 18), nn.LayerNorm(18), nn.Linear(18, 4))


def update(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    set_lr(optimizer, 0.01 / seed)
    optimizer.step()


@pytest.mark.parametrize("name", [*OptimConfig.OURS, *ACCEPTED])
def test_every_optimizer_goes_on_from_a_checkpoint_to_the_last_bit(name: str, tmp_path: Path) -> None:
    config = OptimConfig(name=name, lr=0.01, weight_decay=0.0 if "rprop" in name else 0.05)
    with distributed(RankEnv.single(), use_gpu=False) as dist:
        checkpoints = Checkpoints(tmp_path, keep=3, dist=dist)
        model, other = network(), network()
        optimizer, resumed = (build_optimizer(item, config) for item in (model, other))
        for seed in (1, 2):
            update(model, optimizer, seed)
        assert any(not torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))
        checkpoints.save(model, optimizer, step=2, state={})
        checkpoints.restore(other, resumed)
        for seed in (3, 4):
            update(model, optimizer, seed)
            update(other, resumed, seed)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


def test_filters_keep_one_length_and_turn_by_steps_of_one_size() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 16, 3)
    optimizer = Airbench([{"params": [layer.weight]}], 0.24)
    for _ in range(3):
        layer.weight.grad = 100 * torch.randn_like(layer.weight)
        before = layer.weight.detach() * 16**0.5 / layer.weight.detach().norm()
        optimizer.step()
        step = torch.linalg.svdvals((layer.weight.detach() - before).flatten(1)) / 0.24
        assert ((step > 0.4) & (step < 1.3)).all()


def test_biases_and_the_head_are_updated_as_sgd_does_each_at_its_rate() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(6, 3), nn.Linear(6, 3)
    theirs.load_state_dict(ours.state_dict())
    rates = {theirs.weight: 1340.0, theirs.bias: 106.0}
    groups = [{"params": [each], "lr": rate / 4, "weight_decay": 0.004 / rate} for each, rate in rates.items()]
    optimizers = (
        Airbench(ours.parameters(), 0.06),  # a quarter of the rate at which theirs are 1340 and 106
        torch.optim.SGD(groups, momentum=0.85, nesterov=True),
    )
    for _ in range(3):
        gradients = [torch.randn_like(parameter) for parameter in ours.parameters()]
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("shape", [(3, 7), (7, 3)])
def test_newton_and_schulz_leave_the_directions_and_level_the_sizes(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    sizes = left.t() @ orthogonal(matrix) @ right.t()
    assert sizes.diagonal().sub(1).abs().max() < 0.5
    assert (sizes - sizes.diagonal().diag()).abs().max() < 1e-5


def test_airbench_takes_no_weight_decay_but_its_own() -> None:
    with pytest.raises(UserError, match=r"0 with optim\.name=airbench"):
        check_optimizer(load("single", ("optim.name=airbench", "optim.weight_decay=0.1")).config)
    check_optimizer(load("single", ("optim.name=airbench", "optim.weight_decay=0")).config)


def test_what_timm_and_torch_have_is_known() -> None:
    known = library_optimizers()
    timms = timm.optim.list_optimizers()  # type: ignore[attr-defined]
    assert {f"timm/{name}" for name in timms} == {key for key in known if key.startswith("timm")}
    classes = {name for name, item in vars(torch.optim).items() if inspect.isclass(item) and name != "Optimizer"}
    assert {f"torch/{name.lower()}" for name in classes} == {key for key in known if key.startswith("torch")}
    assert len(ACCEPTED) > 90


def test_settings_and_further_keys_reach_an_optimizer_of_a_library() -> None:
    given = {"name": "adan", "lr": 0.25, "weight_decay": 0.5, "betas": [0.9, 0.8, 0.7], "eps": 1e-3}
    optimizer = build_optimizer(nn.Linear(2, 2), OptimConfig.model_validate(given))
    for group, decay in zip(optimizer.param_groups, (0.5, 0.0), strict=True):
        assert (group["lr"], group["betas"], group["eps"]) == (0.25, (0.9, 0.8, 0.7), 1e-3)
        assert (group["weight_decay"], group["no_prox"]) == (decay, False)
    assert type(build_optimizer(nn.Linear(2, 2), OptimConfig(name="torch/adafactor"))) is torch.optim.Adafactor
    assert build_optimizer(nn.Linear(2, 2), OptimConfig(name="lambc")).defaults["max_grad_norm"] is None
    with pytest.raises(UserError, match=r"cannot be created with these options(.|\n)*Invalid"):
        build_optimizer(nn.Linear(2, 2), OptimConfig.model_validate({"name": "adan", "eps": -1.0}))


OWN = """
from tests.distributed.strategies.held import Drag as Slow

def slow(groups, lr, *, drag: float = 0.5):
    return Slow(groups, lr, drag=drag)

def by_name(groups, *, lr, drag: float = 0.5):
    return Slow(groups, lr, drag=drag)

class Sharp(Slow):
    def step(self, closure=None):
        assert closure is not None, "a closure is needed"

class Forgetful(Slow):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                kept = self.state[p].setdefault("kept", [])
                kept.append(p.grad)
                p.data.sub_(sum(kept), alpha=group["lr"])

def nothing(groups, lr):
    return 3

def falling(step, total_steps, lr):
    return lr * (1 - step / total_steps)

def asking(step, total_steps, lr, *, floor: float = 0.5, gamma, warmup_epochs, steps_per_epoch):
    return floor + gamma + warmup_epochs + steps_per_epoch

def wrong(step, total_steps, lr, *, gives):
    rates = {"text": "fast", "negative": -1.0, "nan": float("nan"), "none": None, "true": True}
    return (rates | {"infinite": float("inf"), "zero": 0})[gives]
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The module of optimizers and schedules of a user's own."""
    name = f"own_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.mark.parametrize("function", ["slow", "Slow", "by_name"])
def test_an_optimizer_of_the_users_own_is_made_with_its_options(own: str, function: str) -> None:
    given = {"name": f"{own}:{function}", "lr": 0.5, "drag": 0.125}
    optimizer = build_optimizer(nn.Linear(2, 2), OptimConfig.model_validate(given))
    found = [(group["lr"], group["drag"], group["weight_decay"]) for group in optimizer.param_groups]
    assert found == [(0.5, 0.125, 0.05), (0.5, 0.125, 0)]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("Sharp", r"cannot update a small model(.|\n)*a closure is needed"),
        ("Forgetful", "restored from its saved state, it makes a different update"),
        ("nothing", r"cannot update a small model(.|\n)*returned int"),
    ],
)
def test_own_optimizers_that_cannot_be_resumed_are_refused(own: str, function: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        build_optimizer(nn.Linear(2, 2), OptimConfig(name=f"{own}:{function}"))


TOTAL, PER_EPOCH = 100, 10


def lrs(*, lr: float = 1.0, total: int = TOTAL, **schedule: Any) -> list[float]:
    given: Any = {"optim": OptimConfig(lr=lr), "schedule": ScheduleConfig.model_validate(schedule)}
    return [lr_at(step, **given, steps_per_epoch=PER_EPOCH, total_steps=total) for step in range(total)]


TENTHS = [0.1 * (step + 1) for step in range(10)]
COSINE: dict[str, Any] = {"name": "cosine", "warmup_epochs": 1, "final_lr_ratio": 0.1}
WSD: dict[str, Any] = {"name": "wsd", "warmup_epochs": 1, "decay_ratio": 0.4, "final_lr_ratio": 0.1}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (COSINE, {**dict(enumerate(TENTHS)), 10: 1.0, 55: 0.55}),
        ({**COSINE, "name": "linear"}, {**dict(enumerate(TENTHS)), 10: 1.0, 32: 0.78, 55: 0.55, 99: 0.11}),
        ({"name": "constant", "warmup_epochs": 0.5}, {0: 0.2, **dict.fromkeys(range(5, 100), 1.0)}),
        # A quarter of the way down it is 1 - sqrt(1/4).
        (WSD, {**dict(enumerate(TENTHS)), **dict.fromkeys(range(10, 61), 1.0), 70: 0.1 + 0.9 * 0.5}),
        # A run shorter than its warm-up rises for half of it.
        ({"name": "cosine", "warmup_epochs": 5, "total": 6}, {0: 1 / 3, 1: 2 / 3, 2: 1.0, 3: 1.0}),
        ({"name": "wsd", "warmup_epochs": 5, "decay_ratio": 1.0, "total": 6}, {0: 1 / 3, 1: 2 / 3, 2: 1.0, 3: 1.0}),
        # The numbers are those of torch's OneCycleLR and StepLR.
        ({"name": "onecycle", "warmup_epochs": 3}, {0: 1 / 25, 14: 0.4940133, 29: 1.0, 60: 0.5892801, 99: 4e-6}),
        (
            {"name": "step", "warmup_epochs": 1, "step_epochs": 3, "gamma": 0.5},
            {**dict(enumerate(TENTHS)), 29: 1.0, 30: 0.5, 59: 0.5, 60: 0.25, 99: 0.125},
        ),
        ({"name": "onecycle", "warmup_epochs": 0.2}, {0: 1 / 25, 1: 1.0}),
        ({"name": "onecycle", "warmup_epochs": 0.1}, {0: 1.0}),
        ({"name": "onecycle", "final_lr_ratio": 1e-9}, {99: 1 / 25 / 1e4}),  # its own end is not passed
    ],
)
def test_a_schedule_warms_up_stays_and_falls(schedule: Any, expected: dict[int, float]) -> None:
    rates = lrs(**schedule)
    assert {step: rates[step] for step in expected} == pytest.approx(expected)


def test_a_plateau_falls_as_often_as_a_run_has_counted_down_to_its_floor() -> None:
    schedule = ScheduleConfig(name="plateau", warmup_epochs=1, gamma=0.5, final_lr_ratio=0.2)
    how: Any = {"optim": OptimConfig(lr=1.0), "schedule": schedule, "steps_per_epoch": PER_EPOCH, "total_steps": TOTAL}
    assert [lr_at(step, **how, falls=1) for step in range(10)] == pytest.approx(TENTHS)
    assert [lr_at(50, **how, falls=falls) for falls in range(4)] == [1.0, 0.5, 0.25, 0.2]


@pytest.mark.parametrize("name", ["onecycle", "cosine", "linear", "wsd"])
def test_a_schedule_that_was_begun_anew_is_that_of_a_run_of_the_rest(name: str) -> None:
    again = lrs(name=name, warmup_epochs=1, start_step=30)
    assert again[30:] == lrs(name=name, warmup_epochs=1, total=TOTAL - 30)


@pytest.mark.parametrize("name", ["onecycle", "cosine", "linear", "constant", "step", "wsd", "plateau"])
def test_every_schedule_learns_in_runs_of_few_updates_and_goes_by_the_peak(name: str) -> None:
    whole, half = (lrs(name=name, warmup_epochs=0, final_lr_ratio=0.25, lr=lr) for lr in (1.0, 0.5))
    assert half == pytest.approx([rate / 2 for rate in whole])
    assert whole[0] == pytest.approx(1.0, rel=1e-2), "no warm-up is possible"
    last = {"onecycle": 0.25, "cosine": 0.25, "constant": 1.0, "plateau": 1.0}.get(name, whole[-1])
    assert whole[-1] == pytest.approx(last, rel=2e-3), "the floor"
    for warmup_epochs in (0, 0.05, 0.1, 0.3, 1, 50):
        assert lrs(name=name, warmup_epochs=warmup_epochs, total=1) == [1.0]
        for total in range(2, 6):
            rates = lrs(name=name, warmup_epochs=warmup_epochs, total=total)
            assert all(0.0 < rate <= 1.0 for rate in rates)
            assert max(rates) >= 0.5


def test_a_function_of_the_users_own_says_the_rate_of_each_update(own: str) -> None:
    falling = [0.5 * (1 - step / TOTAL) for step in range(TOTAL)]
    assert lrs(name=f"{own}:falling", lr=0.5) == pytest.approx(falling)
    for given, floor in (({}, 0.5), ({"floor": 1}, 1)):  # its options, and the keys that it asks for
        rates = lrs(name=f"{own}:asking", gamma=0.25, warmup_epochs=2, **given)
        assert rates[0] == floor + 0.25 + 2 + PER_EPOCH
    assert set(lrs(name=f"{own}:wrong", gives="zero")) == {0.0}, "which is a rate"
    for gives in ("text", "negative", "nan", "none", "true", "infinite"):
        with pytest.raises(UserError, match="for update 0 of 100") as refused:
            lrs(name=f"{own}:wrong", gives=gives)
        assert refused.value.key == "schedule.name"


def test_a_schedule_of_ones_own_is_asked_for_the_whole_run_before_it_begins() -> None:
    asked: list[int] = []
    for total in (1, 7, 200_001):
        asked.clear()
        check_own_schedule(lambda step: asked.append(step) or 1.0, total)  # type: ignore[func-returns-value]
        assert (asked[0], asked[-1]) == (0, total - 1)
        assert min(total, 10_000) <= len(asked) <= 11_000


FINITE, NONFINITE = torch.zeros(()), torch.ones(())


@pytest.mark.parametrize("warmup", [True, False])
def test_each_update_moves_the_average_towards_the_weights_if_it_was_finite(warmup: bool) -> None:
    model = nn.Linear(3, 2)
    ema, expected = Ema(model, 0.5, warmup=warmup), model.weight.detach().clone()
    for updates in range(12):
        with torch.no_grad():
            model.weight += torch.randn(2, 3, generator=torch.Generator().manual_seed(updates))
        before = {name: value.clone() for name, value in ema.tensors().items()}
        ema.update(NONFINITE, updates=updates)
        assert all(torch.equal(value, before[name]) for name, value in ema.tensors().items())
        ema.update(FINITE, updates=updates)
        expected.lerp_(model.weight.detach(), 1 - min(0.5, (1 + updates) / (10 + updates) if warmup else 1.0))
    assert torch.allclose(ema.tensors()["weight"], expected, rtol=1e-6)


def test_within_the_model_has_the_average_and_afterwards_its_own_weights() -> None:
    model = nn.Linear(3, 2)
    ema = Ema(model, 0.9)
    nn.init.ones_(model.weight)
    ema.update(FINITE, updates=0)
    own, average = model.weight.detach().clone(), ema.tensors()["weight"].clone()

    def evaluated() -> None:
        with ema.in_model():
            assert torch.equal(model.weight, average)
            raise KeyError

    with pytest.raises(KeyError):
        evaluated()
    assert torch.equal(model.weight, own)
    assert torch.equal(ema.tensors()["weight"], average)


def test_statistics_and_tied_weights_are_averaged_but_nothing_frozen() -> None:
    batchnorm, frozen = nn.BatchNorm1d(2), nn.Linear(2, 1).requires_grad_(False)
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight = one.weight
    ema = Ema(nn.Sequential(batchnorm, frozen, one, other), 0.5)
    before = ema.tensors()["2.weight"].clone()
    batchnorm.get_buffer("running_mean").fill_(1.0)
    batchnorm.get_buffer("num_batches_tracked").fill_(7)
    nn.init.zeros_(one.weight)
    ema.update(FINITE, updates=100)
    tensors = ema.tensors()
    assert tensors["0.running_mean"].tolist() == [0.5, 0.5]
    assert tensors["0.num_batches_tracked"] == 7
    assert tensors["1.weight"].data_ptr() == frozen.weight.data_ptr()
    assert torch.equal(tensors["2.weight"], before / 2)
    assert torch.equal(tensors["3.weight"], before / 2), "once, under both its names"


def test_a_mask_of_infinities_is_not_averaged() -> None:
    """-inf less -inf is NaN: so are such buffers in timm 1.0.31's ModelEmaV3, and all scores of the averaged model."""
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
    ema = Ema(model, 0.5)
    ema.update(FINITE, updates=100)
    assert torch.equal(ema.tensors()["mask"], model.get_buffer("mask"))


# The momentum of BatchNorm's statistics makes them another's where micro batches are. 5 updates an epoch.
SETTINGS = (
    "train.max_steps=7", "train.ema_decay=0.9", "model.norm=batch", "train.micro_batch_size=8", "model.dropout=0.2",
    "data.name=synthetic", "data.train_size=160", "data.val_size=40", "data.test_size=20", "data.image_size=8",
    "train.global_batch_size=32",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ema") / "run"
    run_ranks(1, train_run, folder, "single", SETTINGS)
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("preset", ["zero", "fsdp"])
def test_the_average_is_the_same_on_any_number_of_ranks(tmp_path: Path, whole: Path, preset: str) -> None:
    run_ranks(2, train_run, tmp_path / "run", preset, SETTINGS)
    expected, found = tensors(whole / "checkpoints", "ema"), tensors(tmp_path / "run/checkpoints", "ema")
    assert expected.keys() == found.keys() == tensors(whole / "checkpoints", "model").keys()
    for name, value in expected.items():
        if "running" not in name and "num_batches" not in name:  # rank 0 has seen other samples than a single process
            assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-6), name
            assert not torch.equal(value, tensors(whole / "checkpoints", "model")[name]), name


@pytest.mark.long
def test_switched_on_later_it_begins_with_the_weights_and_says_so(tmp_path: Path) -> None:
    plain = ("train.max_steps=12", "checkpoint.every_steps=6")
    run_ranks(1, train_run, tmp_path / "run", "single", plain, 7)
    step = format.resolve(tmp_path / "run" / "checkpoints", "latest")
    run_ranks(1, train_run, tmp_path / "run", "single", (*plain, "train.ema_decay=0.9"))
    before, after = read_events(RunDir(tmp_path / "run"), "started")
    assert "ema_began" not in before
    assert (after["ema_began"], after["step"]) == (True, step)
    state = format.verified(tmp_path / "run" / "checkpoints", 12).state
    assert state["progress"]["ema_updates"] == 12 - step


def test_the_best_model_can_be_that_whose_average_is(tmp_path: Path) -> None:
    judged: dict[str, Any] = {}
    for best in ("val/loss", "val/ema_loss"):
        # At a rate so high the weights jump about, and their average lags behind: each has its own best.
        parts = parts_of("train.ema_decay=0.99", "train.max_steps=12", "optim.lr=1.0", f"checkpoint.best={best}")
        keeper = keeper_of(parts, tmp_path / best.replace("/", "-"), Progress())
        assert train(parts, keeper, lambda: False)
        name = best.removeprefix("val/")
        records = [record for record in keeper.metrics.records if record["split"] == "val"]  # type: ignore[attr-defined]
        assert keeper.progress.best == judged.setdefault(best, min(record[name] for record in records))
    assert judged["val/loss"] != judged["val/ema_loss"]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (("checkpoint.best=val/ema_acc1",), r"no averaged weights[\s\S]*train\.ema_decay=0\.9999"),
        *(((f"train.ema_decay={value}",), r"train\.ema_decay") for value in ("0", "1", "-0.1", "1.5", "true")),
    ],
)
def test_a_decay_is_between_0_and_1_and_without_one_no_average_is_judged(settings: tuple[str, ...], told: str) -> None:
    load("single", ("checkpoint.best=val/ema_acc1", "train.ema_decay=0.99"))
    with pytest.raises(UserError, match=told):
        load("single", settings)
