"""The optimizer, and the average of the weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainkit import plugins
from trainkit.checkpoint.state import Held, follow_masters, load_moments, master_of, moments_of, plain_name, unwrapped
from trainkit.config.components import find_optimizer
from trainkit.config.schema import OptimConfig
from trainkit.distributed.process_group import Distributed, is_sharded, local_part
from trainkit.errors import UserError, require
from trainkit.ranks import RankEnv


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer over the trainable parameters of ``model``.

    Weight decay acts on matrices and filters. Biases, the scales of norms, and what the model itself names in
    ``no_weight_decay()`` (timm's: position embeddings, class tokens) are left alone. Build it after the model has been
    parallelized: sharding replaces the parameters.

    AdamW and SGD are torch's, LAMB (You et al., arXiv 1904.00962) and Muon (Jordan, kellerjordan.github.io/posts/muon,
    with the scale of Liu et al., arXiv 2502.16982, so that rates and decay are AdamW's) timm's, airbench the one below.
    Others are as timm and torch make them, or the user's own function or class: ``build(groups, lr, *, options)``.

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
    return _noted(make(groups, config.lr, **config.given()))


def _noted(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """``optimizer`` with what checkpoints need not hold, because the configuration says it."""
    optimizer.as_built = [{**group, "params": None} for group in optimizer.param_groups]  # type: ignore[attr-defined]
    return optimizer


def _of_a_library(groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    given = {"lr": config.lr, **config.given()}
    # A fused kernel updates all parameters in one pass, on GPU and CPU alike.
    if config.name == "sgd":  # of which torch has no sharded version
        sharded = any(is_sharded(parameter) for group in groups for parameter in group["params"])
        return torch.optim.SGD(groups, fused=not sharded, **given)
    if config.name == "adamw":
        return torch.optim.AdamW(groups, fused=True, **given)
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

        return create_optimizer_v2(groups, opt=listed.name, weight_decay=config.weight_decay, **given)
    except (TypeError, ValueError) as error:
        what = f"optim.name={config.name} cannot be made with these options."
        why = f"{error}.".replace("..", ".")
        fix = "Correct them, or leave them out."
        raise UserError(what, why=why, fix=fix, key="optim.name") from error


def _try_out(make: Callable[..., Any], config: OptimConfig) -> None:
    """Refuse an optimizer of the user's own that needs more than gradients, or cannot go on from a checkpoint.

    It makes updates of a small model, is saved and restored, and makes one more: the same to the last bit.
    """

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        groups = [{"params": [model.weight], "weight_decay": config.weight_decay}]
        optimizer = make([*groups, {"params": [model.bias], "weight_decay": 0.0}], config.lr, **config.given())
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"it returned {type(optimizer).__name__}, which is no torch.optim.Optimizer")
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
        if not all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True)):
            raise ValueError("restored from what is saved of it, it makes another update")
    except Exception as error:
        raise UserError(
            f"optim.name={config.name} cannot make the updates of a small model, or go on from a checkpoint.",
            why=f"{type(error).__name__}: {error}".rstrip(".") + ".",
            fix="It must take parameter groups and a rate, make an update by step() alone (no closure is given), and "
            "keep what it needs in optimizer.state, as tensors or numbers.",
            key="optim.name",
        ) from error


def _by_decay(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    spared = _spared(model)
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": decay} for decay in (config.weight_decay, 0.0)]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[parameter.ndim < 2 or name in spared]["params"].append(parameter)
    return [group for group in groups if group["params"]]


def _by_layer(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Groups with an ``lr_scale`` each, which is lower for layers nearer to the image (Clark et al., arXiv 2003.10555).

    Raises UserError for a model that does not say, as timm's do, which parameters are a layer.
    """
    from timm.optim import param_groups_layer_decay  # type: ignore[attr-defined]

    inner, decay = unwrapped(model), config.layer_decay
    must_be = f"1 for {type(inner).__name__}, which has no group_matcher() that tells its layers, as timm's models have"
    require(hasattr(inner, "group_matcher"), "optim.layer_decay", f"{decay:g}", must_be)
    spared = _spared(inner)
    groups = param_groups_layer_decay(inner, config.weight_decay, no_weight_decay_list=spared, layer_decay=decay)
    return [{key: group[key] for key in ("params", "weight_decay", "lr_scale")} for group in groups]


def _not_for_muon(model: nn.Module) -> set[int]:
    """Ids of the parameters that Muon's author leaves to AdamW: of the last layer, what is no matrix or filter, and
    embeddings, which a model names in ``no_weight_decay()``."""
    spared, inner = _spared(model), unwrapped(model)
    told = getattr(inner, "get_classifier", None)  # timm's
    last = told() if callable(told) else [each for each in inner.modules() if isinstance(each, nn.Linear)][-1:]
    layers = [layer for layer in (last if isinstance(last, list | tuple) else [last]) if isinstance(layer, nn.Module)]
    found = {id(parameter) for layer in layers for parameter in layer.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or len(parameter) in (1, parameter.numel()) or name in spared:
            found.add(id(parameter))
    return found


def _by_muon(group: dict[str, Any], others: set[int]) -> list[dict[str, Any]]:
    """``group`` as one for Muon and one for AdamW, of which timm would make NAdamW where Muon is Nesterov's."""
    both: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
    for parameter in group["params"]:
        both[id(parameter) in others].append(parameter)
    kinds: tuple[dict[str, Any], ...] = {"use_muon": True}, {"use_muon": False, "nesterov": False}
    return [{**group, "params": part, **kind} for part, kind in zip(both, kinds, strict=True) if part]


def _spared(model: nn.Module) -> set[str]:
    """Names of parameters that a module says must not decay, wherever in the model it is: below a wrapper, or a
    backbone below a head of the user's own."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if callable(names := getattr(module, "no_weight_decay", None))
        for name in names()
    }


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
    _LR, _RATES, _DECAY = 0.24, (106.0, 1340.0), 0.004
    _MOMENTUM, _MUON_MOMENTUM = 0.85, 0.6

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
        is_filter, momentum = parameter.ndim == 4, self._MUON_MOMENTUM
        if not is_filter:
            rate, momentum = self._RATES[parameter.ndim > 1], self._MOMENTUM
            gradient, lr = gradient + self._DECAY / rate * parameter, lr / self._LR * rate
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


class Ema:
    """The exponential moving average of a model's weights, which is often the better model (Polyak and Juditsky, 1992);
    sharded as the model is, on the devices of its weights.

    As in timm's `ModelEmaV3` the running statistics of BatchNorm are averaged too, and its counts are the model's own.
    What is not trained is the model's own as well.

    Args:
        model: as made by the strategy. The average begins with its present weights.
        warmup: the first updates count for more.
    """

    def __init__(self, model: nn.Module, decay: float, *, warmup: bool = True) -> None:
        self._model, self._decay, self._warmup = model, decay, warmup
        self._averages: dict[str, Tensor] = {}
        """By plain name; tied weights have several names and one average."""
        seen: dict[int, tuple[Tensor, Tensor]] = {}
        for name, own in _tensors_of(model).items():
            # Buffers in fp16 are no statistics, which need more digits.
            is_statistic = not isinstance(own, nn.Parameter) and own.dtype in (torch.float32, torch.float64)
            if own.requires_grad or is_statistic:
                if id(own) not in seen:
                    seen[id(own)] = own, own.detach().clone()
                self._averages[name] = seen[id(own)][1]
        self._pairs = list(seen.values())
        # average += weight * (own - average) is a step of SGD with the gradient -own and a weight decay of 1. The fused
        # kernel makes it in one pass, and leaves it out by itself where `found_inf` is 1 on the device.
        averages = [average for _, average in self._local()]
        self._step = torch.optim.SGD(averages, lr=0.0, weight_decay=1.0, maximize=True, fused=True)

    @torch.no_grad()
    def update(self, nonfinite: Tensor, *, updates: int) -> None:
        """Take the weights after an update into the average.

        Where there is a warm-up, the first ones count for more, or a short run would end with what it began with
        (TensorFlow's rule: Abadi et al., `ExponentialMovingAverage`).

        Args:
            nonfinite: 1.0 on the device where that update came to nothing: the average then stays as it is.
            updates: how many updates the average has had before.
        """
        for own, average in self._local():
            average.grad = own.detach() if own.numel() else None  # a small tensor's shards do not reach all ranks
        most = (1 + updates) / (10 + updates) if self._warmup else 1.0
        self._step.param_groups[0]["lr"] = 1.0 - min(self._decay, most)
        self._step.found_inf = nonfinite  # type: ignore[attr-defined]  # as torch's GradScaler does
        self._step.step()

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew with the model's present weights."""
        for own, average in self._local():
            average.copy_(own)

    def tensors(self) -> dict[str, Tensor]:
        """The averaged model: plain name -> tensor, sharded ones as they are. Writing into them changes the average,
        or what the model has in common with it."""
        return {name: self._averages.get(name, own.detach()) for name, own in _tensors_of(self._model).items()}

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Within it the model has the averaged weights; afterwards its own again, bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        _tensors_of(self._model)  # a sharded model gives its gathered parameters back, and will gather anew
        for own, average in self._local():  # one after the other: no second copy of the model
            kept = own.clone()
            own.copy_(average)
            average.copy_(kept)
        follow_masters(self._model.parameters())

    def _local(self) -> list[tuple[Tensor, Tensor]]:
        """This rank's parts of the model's tensors and of their averages, each once."""
        return [(local_part(own), local_part(average)) for own, average in self._pairs]


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Plain name -> the model's own parameter or buffer, sharded ones as they are."""
    state = unwrapped(model).state_dict(keep_vars=True)
    return {plain_name(name): master_of(value) for name, value in state.items() if isinstance(value, Tensor)}
