from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import timm.optim
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.rank_functions import run_ranks
from trainkit.checkpoint.save import Checkpoints
from trainkit.config.optimizers import library_optimizers, objection
from trainkit.config.schema import OptimConfig
from trainkit.distributed.process_group import distributed
from trainkit.errors import UserError
from trainkit.ranks.env import RankEnv
from trainkit.strategies import ddp
from trainkit.training.optim import build_optimizer, set_lr

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


def frozen_half() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))


@pytest.mark.parametrize("config", [ADAMW, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2)),
         {"0.bias", "1.weight", "1.bias", "2.bias"}),
        (lambda: nn.Sequential(small_vit(), nn.Linear(2, 2)), {"0.cls_token", "0.pos_embed", "1.bias"}),
        (lambda: nn.DataParallel(small_vit(), device_ids=[]), {"module.cls_token", "module.pos_embed"}),
        (frozen_half, {"1.bias"}),
        (lambda: nn.Linear(2, 2, bias=False), set()),
    ],
    ids=["a network", "a backbone below a head", "DataParallel", "frozen", "no biases"],
)  # fmt: skip
def test_matrices_decay_and_biases_norms_and_what_the_model_names_do_not(
    config: OptimConfig, make: Callable[[], nn.Module], names: set[str]
) -> None:
    model = make()
    found = not_decayed(model, build_optimizer(model, config))
    assert names <= found
    assert names == found or "cls_token" in str(names)
    assert not any(name.endswith("qkv.weight") for name in found)


def test_decay_really_shrinks_the_weights_and_leaves_the_biases() -> None:
    model = nn.Linear(2, 2)
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    optimizer = build_optimizer(model, ADAMW)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(model.weight, weight * (1 - 0.25 * 0.5))
    assert torch.equal(model.bias, bias)


def _not_decayed_by_wrapper(env: RankEnv) -> list[set[str]]:
    with distributed(env, use_gpu=False) as dist:
        parallel = ddp.build(dist).parallelize(small_vit())
        sharded = small_vit()
        fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.world_size,)))
        return [not_decayed(model, build_optimizer(model, ADAMW)) for model in (small_vit(), parallel, sharded)]


def test_ddp_and_fsdp_decay_what_one_process_does() -> None:
    for plain, parallel, sharded in run_ranks(2, _not_decayed_by_wrapper):
        assert "cls_token" in plain
        assert parallel == {f"module.{name}" for name in plain}
        assert sharded == plain


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
def test_the_settings_reach_every_group_and_so_does_a_new_rate(
    config: OptimConfig, kind: str, given: dict[str, object]
) -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), config)
    assert type(optimizer).__name__ == kind
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    for group in optimizer.param_groups:
        assert given.items() <= {**optimizer.defaults, **group}.items()
    set_lr(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


def test_lambs_step_of_a_matrix_is_as_long_as_the_matrix_times_the_rate() -> None:
    model = nn.Linear(8, 8)
    optimizer = build_optimizer(model, LAMB)
    before = model.weight.detach().clone()
    model.weight.grad, model.bias.grad = torch.randn(8, 8), torch.randn(8)
    optimizer.step()
    assert (model.weight - before).norm().item() == pytest.approx(0.25 * before.norm().item(), rel=1e-4)


def test_muons_step_has_equal_singular_values_and_biases_have_adamws() -> None:
    model = nn.Linear(16, 16)
    optimizer = build_optimizer(model, MUON.model_copy(update={"weight_decay": 0.0, "nesterov": False}))
    before, bias = model.weight.detach().clone(), model.bias.detach().clone()
    random, _ = torch.linalg.qr(torch.randn(16, 16))  # and from there singular values from 1 to 4
    model.weight.grad, model.bias.grad = random * torch.linspace(1, 4, 16), torch.full((16,), 7.0)
    optimizer.step()
    values = torch.linalg.svdvals((model.weight - before).detach())
    assert values.max() / values.min() < 1.5
    assert torch.allclose((model.bias - bias).abs(), torch.tensor(0.25), rtol=1e-3)


@pytest.mark.parametrize("config", [ADAMW, SGD, LAMB, MUON], ids=lambda config: config.name)
def test_layers_nearer_to_the_image_learn_slower(config: OptimConfig) -> None:
    model = small_vit()
    optimizer = build_optimizer(model, config.model_copy(update={"layer_decay": 0.5}))
    set_lr(optimizer, 0.125)
    rate = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    rates = {name: rate[id(parameter)] for name, parameter in model.named_parameters()}
    assert rates["head.weight"] == 0.125
    assert rates["blocks.0.attn.qkv.weight"] < rates["head.weight"]
    assert rates["patch_embed.proj.weight"] == rates["blocks.0.attn.qkv.weight"] / 2
    assert not_decayed(model, optimizer) >= {"cls_token", "pos_embed", "head.bias"}


def test_layers_are_the_same_below_ddps_wrapper() -> None:
    config = ADAMW.model_copy(update={"layer_decay": 0.5})
    plain, wrapped = (build_optimizer(model, config) for model in (small_vit(), nn.DataParallel(small_vit(), [])))
    assert [(g["lr_scale"], g["weight_decay"], len(g["params"])) for g in plain.param_groups] == [
        (g["lr_scale"], g["weight_decay"], len(g["params"])) for g in wrapped.param_groups
    ]


def test_a_model_that_names_no_layers_is_refused() -> None:
    with pytest.raises(UserError, match="needs to know the model's layers"):
        build_optimizer(nn.Linear(2, 2), ADAMW.model_copy(update={"layer_decay": 0.5}))


def _sharded_sgd_makes_an_update(env: RankEnv) -> bool:
    with distributed(env, use_gpu=False) as dist:
        model = nn.Linear(2, 2)
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.world_size,)))
        optimizer = build_optimizer(model, SGD)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return any(group["fused"] for group in optimizer.param_groups)


def test_sharded_sgd_does_without_the_fused_kernel() -> None:
    assert run_ranks(1, _sharded_sgd_makes_an_update) == [False]


ACCEPTED = sorted(
    name for name, listed in library_optimizers().items() if not any(objection(listed, {}, sharded=False))
)


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
        checkpoints.save(model, optimizer, step=2, state={}, best_step=None)
        checkpoints.restore(other, resumed)
        for seed in (3, 4):
            update(model, optimizer, seed)
            update(other, resumed, seed)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


def test_what_timm_and_torch_have_is_known_without_them() -> None:
    known = library_optimizers()
    timms = timm.optim.list_optimizers()  # type: ignore[attr-defined]
    assert {f"timm/{name}" for name in timms} == {key for key in known if key.startswith("timm")}
    classes = {name for name, item in vars(torch.optim).items() if inspect.isclass(item) and name != "Optimizer"}
    assert {f"torch/{name.lower()}" for name in classes} == {key for key in known if key.startswith("torch")}
    assert len(ACCEPTED) > 90


@pytest.mark.parametrize("name", ["adan", "lion", "adopt", "rmsprop", "timm/muon", "torch/adafactor", "torch/nadam"])
def test_the_options_of_a_library_are_those_of_its_class(name: str) -> None:
    listed = library_optimizers()[name if "/" in name else f"timm/{name}"]
    parameters = list(inspect.signature(type(build_optimizer(network(), OptimConfig(name=name)))).parameters.values())
    assert listed.signature.options == tuple(item.name for item in parameters[1:])
    defaults = {item.name: item.default for item in parameters}
    assert listed.signature.defaults == {key: defaults[key] for key in listed.signature.defaults}
    assert listed.signature.defaults["weight_decay"] == 0


def test_settings_and_further_keys_reach_an_optimizer_of_a_library() -> None:
    given = {"name": "adan", "lr": 0.25, "weight_decay": 0.5, "betas": [0.9, 0.8, 0.7], "eps": 1e-3}
    optimizer = build_optimizer(nn.Linear(2, 2), OptimConfig.model_validate(given))
    for group, decay in zip(optimizer.param_groups, (0.5, 0.0), strict=True):
        assert (group["lr"], group["betas"], group["eps"]) == (0.25, (0.9, 0.8, 0.7), 1e-3)
        assert (group["weight_decay"], group["no_prox"]) == (decay, False)
    assert type(build_optimizer(nn.Linear(2, 2), OptimConfig(name="torch/adafactor"))) is torch.optim.Adafactor
    assert build_optimizer(nn.Linear(2, 2), OptimConfig(name="lambc")).defaults["max_grad_norm"] is None


def test_a_value_that_the_library_refuses_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match=r"cannot be made with these options(.|\n)*Invalid"):
        build_optimizer(nn.Linear(2, 2), OptimConfig.model_validate({"name": "adan", "eps": -1.0}))


OWN = """
import torch

class Slow(torch.optim.Optimizer):
    def __init__(self, params, lr, *, weight_decay=0.0, drag=1.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "drag": drag})
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["drag"] *= 0.5
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    p.add_(p.grad, alpha=-group["lr"] * group["drag"] / state["count"])

def slow(groups, lr, *, drag: float = 0.5):
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
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_optim.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("function", ["slow", "Slow"])
def test_an_optimizer_of_the_users_own_is_made_with_its_options(own: None, function: str) -> None:
    given = {"name": f"my_optim:{function}", "lr": 0.5, "drag": 0.125}
    optimizer = build_optimizer(nn.Linear(2, 2), OptimConfig.model_validate(given))
    found = [(group["lr"], group["drag"], group["weight_decay"]) for group in optimizer.param_groups]
    assert found == [(0.5, 0.125, 0.05), (0.5, 0.125, 0)]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("Sharp", r"cannot make the updates(.|\n)*a closure is needed"),
        ("Forgetful", "cannot go on from a checkpoint"),
        ("nothing", r"cannot make the updates(.|\n)*returned int"),
    ],
)
def test_own_optimizers_that_cannot_be_resumed_are_refused(own: None, function: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        build_optimizer(nn.Linear(2, 2), OptimConfig(name=f"my_optim:{function}"))
