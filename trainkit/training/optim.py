"""Build the optimizer that a configuration names, with its groups of parameters."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from trainkit.checkpoint.state import Held, load_moments, master_of, moments_of, unwrapped
from trainkit.cluster.ranks import RankEnv
from trainkit.common.errors import UserError, require
from trainkit.config import plugins
from trainkit.config.libraries import find_optimizer
from trainkit.config.schema import OptimConfig
from trainkit.distributed.process_group import Distributed, is_sharded

_Kind = TypeVar("_Kind", bound=type[torch.optim.Optimizer])


def without_compiler(kind: _Kind) -> _Kind:
    """A subclass of an optimizer whose methods are the plain functions under torch's decorators.

    These import torch's compiler, for a second and a half of CPU, to tell it where a compiled training loop is to be
    interrupted. Only models are compiled here.
    """
    names = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
    methods: dict[str, Any] = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    methods["step"] = torch.no_grad()(inspect.unwrap(kind.step))
    return cast(_Kind, type(kind.__name__, (kind,), methods))


SGD = without_compiler(torch.optim.SGD)
AdamW = without_compiler(torch.optim.AdamW)


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer over the trainable parameters of ``model``.

    Weight decay acts on matrices and filters. Biases, the scales of norms, and what the model itself names in
    ``no_weight_decay()`` (timm's: position embeddings, class tokens) are left alone. Build it after the model has been
    parallelized: sharding replaces the parameters.

    AdamW and SGD are torch's, LAMB (You et al., arXiv 1904.00962) and Muon (Jordan, kellerjordan.github.io/posts/muon,
    with the scale of Liu et al., arXiv 2502.16982, so that rates and decay are AdamW's) timm's, airbench is `Airbench`.
    Others are as timm and torch make them, or the user's own function or class: ``build(groups, lr=..., **options)``.

    Raises UserError for one of the user's own that cannot be used.
    """
    groups = _by_decay(model, config) if config.layer_decay == 1 else _by_layer(model, config)
    if config.name == "muon" and config.muon_as == "author":
        groups = [part for group in groups for part in _by_muon(group, _not_for_muon(model))]
    for group in groups:
        group["params"] = [master_of(parameter) for parameter in group["params"]]
    if not config.is_own:
        return _noted(_of_a_library(groups, config))
    make = plugins.load("trainkit.optim", config.name)
    _try_out(make, config)
    return _noted(make(groups, lr=config.lr, **config.given()))


def _noted(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """``optimizer`` with what checkpoints need not hold, because the configuration says it."""
    optimizer.as_built = [{**group, "params": None} for group in optimizer.param_groups]  # type: ignore[attr-defined]
    return optimizer


def _of_a_library(groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    given = {"lr": config.lr, **config.given()}
    # A fused kernel updates all parameters in one pass, on GPU and CPU alike.
    if config.name == "sgd":  # of which torch has no sharded version
        sharded = any(is_sharded(parameter) for group in groups for parameter in group["params"])
        return SGD(groups, fused=not sharded, **given)
    if config.name == "adamw":
        return AdamW(groups, fused=True, **given)
    if config.name == "airbench":
        return Airbench(groups, **given)
    listed = find_optimizer(config.name)
    if config.name == "muon" and config.muon_as == "author":
        given["ns_coefficients"] = "original"
    if listed.class_name == "Lamb":  # gradients are clipped by train.grad_clip_norm, like any optimizer's
        given["max_grad_norm"] = None
    try:
        if listed.library == "torch":
            optimizer: torch.optim.Optimizer = getattr(torch.optim, listed.name)(groups, **given)
            return optimizer
        from timm.optim import create_optimizer_v2  # type: ignore[attr-defined]

        optimizer = create_optimizer_v2(groups, opt=listed.name, weight_decay=config.weight_decay, **given)
    except (TypeError, ValueError) as error:
        what = f"optim.name={config.name} cannot be created with these options."
        why = f"{error}.".replace("..", ".")
        fix = "Correct them, or omit them."
        raise UserError(what, why=why, fix=fix, key="optim.name") from error
    for group in optimizer.param_groups:  # adamc and the like decay by lr^2 / peak: of each layer it is its own
        if "max_lr_snapshot" in group:
            group["max_lr_snapshot"] *= group.get("lr_scale", 1.0)
    return optimizer


def _try_out(make: Callable[..., Any], config: OptimConfig) -> None:
    """Refuse an optimizer of the user's own that needs more than gradients, or cannot go on from a checkpoint.

    It makes updates of a small model, is saved and restored, and makes one more: the same to the last bit.
    """

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        groups = [{"params": [model.weight], "weight_decay": config.weight_decay}]
        optimizer = make([*groups, {"params": [model.bias], "weight_decay": 0.0}], lr=config.lr, **config.given())
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"it returned {type(optimizer).__name__}, which is not a torch.optim.Optimizer")
        return model, _noted(optimizer)

    def update(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()

    try:
        with torch.random.fork_rng(devices=[]):
            model, optimizer = made()
            update(model, optimizer, 1)
            update(model, optimizer, 2)
            other, resumed = made()
            other.load_state_dict(model.state_dict())
            saved = Held({name: value.clone() for name, value in moments_of(model, optimizer).items()})
            load_moments(other, resumed, saved, Distributed(RankEnv.single(), torch.device("cpu")))
            update(model, optimizer, 3)
            update(other, resumed, 3)
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            if not torch.equal(one, two):
                raise ValueError("restored from its saved state, it makes a different update")
    except Exception as error:
        raise UserError(
            f"optim.name={config.name} cannot update a small model, or cannot continue from a checkpoint.",
            why=f"{type(error).__name__}: {error}".rstrip(".") + ".",
            fix="It must take parameter groups and a rate, make an update by step() alone (no closure is given), and "
            "keep what it needs in optimizer.state, as tensors or numbers. Then submit again.",
            key="optim.name",
        ) from error


def _by_decay(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    spared = _spared(model)
    decays: list[nn.Parameter] = []
    stays: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim < 2 or name in spared:
            stays.append(parameter)
        else:
            decays.append(parameter)
    groups = [{"params": decays, "weight_decay": config.weight_decay}, {"params": stays, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _by_layer(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Groups with an ``lr_scale`` each, which is lower for layers nearer to the image (Clark et al., arXiv 2003.10555).

    Raises UserError for a model that does not say, as timm's do, which parameters are a layer.
    """
    from timm.optim import param_groups_layer_decay  # type: ignore[attr-defined]

    inner = unwrapped(model)
    decay = config.layer_decay
    must_be = f"1 for {type(inner).__name__}, which has no group_matcher() that tells its layers, as timm's models have"
    require(hasattr(inner, "group_matcher"), "optim.layer_decay", f"{decay:g}", must_be)
    spared = _spared(inner)
    groups = param_groups_layer_decay(inner, config.weight_decay, no_weight_decay_list=spared, layer_decay=decay)
    return [{key: group[key] for key in ("params", "weight_decay", "lr_scale")} for group in groups]


def _not_for_muon(model: nn.Module) -> set[int]:
    """Ids of the parameters that Muon's author leaves to AdamW: of the last layer, what is no matrix or filter, and
    embeddings, which a model names in ``no_weight_decay()``."""
    spared = _spared(model)
    inner = unwrapped(model)
    told = getattr(inner, "get_classifier", None)  # timm's
    last = [module for module in inner.modules() if isinstance(module, nn.Linear)][-1:]
    if callable(told):
        last = told()
        if not isinstance(last, list | tuple):
            last = [last]
    found: set[int] = set()
    for layer in last:
        if isinstance(layer, nn.Module):
            found.update(map(id, layer.parameters()))
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or len(parameter) in (1, parameter.numel()) or name in spared:
            found.add(id(parameter))
    return found


def _by_muon(group: dict[str, Any], others: set[int]) -> list[dict[str, Any]]:
    """``group`` as one for Muon and one for AdamW, of which timm would make NAdamW where Muon is Nesterov's."""
    muons = [parameter for parameter in group["params"] if id(parameter) not in others]
    rest = [parameter for parameter in group["params"] if id(parameter) in others]
    groups = [
        {**group, "params": muons, "use_muon": True},
        {**group, "params": rest, "use_muon": False, "nesterov": False},
    ]
    return [each for each in groups if each["params"]]


def _spared(model: nn.Module) -> set[str]:
    """Names of parameters that a module says must not decay, wherever in the model it is: below a wrapper, or a
    backbone below a head of the user's own."""
    spared: set[str] = set()
    for path, module in model.named_modules():
        names = getattr(module, "no_weight_decay", None)
        if callable(names):
            spared.update(f"{path}.{name}".removeprefix(".") for name in names())
    return spared


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use ``lr`` for the next update; in groups of layers that learn slower, their share of it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


class Airbench(torch.optim.Optimizer):
    """Muon for filters, each of which is brought to one length before its update; SGD for biases and matrices.

    It is made for the network `trainkit.models.airbench` (Jordan, arXiv 2404.00498, and the later versions in his
    repository of that name): rates go by how large its parts begin.
    """

    # Rates of biases and of matrices where that of filters is 0.24, and how much of them decays.
    _LR = 0.24
    _BIAS_RATE = 106.0
    _MATRIX_RATE = 1340.0
    _DECAY = 0.004
    _MOMENTUM = 0.85
    _MUON_MOMENTUM = 0.6

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make an update of all parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group["lr"])

    def _update(self, parameter: Tensor, gradient: Tensor, lr: float) -> None:
        is_filter = parameter.ndim == 4
        momentum = self._MUON_MOMENTUM
        if not is_filter:
            rate = self._MATRIX_RATE if parameter.ndim > 1 else self._BIAS_RATE
            momentum = self._MOMENTUM
            gradient = gradient + self._DECAY / rate * parameter
            lr = lr / self._LR * rate
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        velocity = state["momentum_buffer"].mul_(momentum).add_(gradient)
        step = gradient.add(velocity, alpha=momentum)  # Nesterov's
        if is_filter:
            parameter.mul_(len(parameter) ** 0.5 / parameter.norm())
            step = orthogonal(step.flatten(1)).view_as(step)
        parameter.add_(step, alpha=-lr)


def orthogonal(matrix: Tensor) -> Tensor:
    """A matrix of the same singular vectors, whose singular values are about 1: three steps of Newton-Schulz."""
    tall = matrix.shape[0] > matrix.shape[1]
    near: Tensor = (matrix.t() if tall else matrix) / (matrix.norm() + 1e-7)
    for _ in range(3):
        square = near @ near.t()
        near = 3.4445 * near + (-4.7750 * square + 2.0315 * square @ square) @ near
    return near.t() if tall else near
