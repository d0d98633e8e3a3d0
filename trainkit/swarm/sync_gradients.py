"""``sync: gradients``: peers average gradients, and all make the same update from them; synchronous, for large batches.

What `hivemind.Optimizer` does in its default mode: a peer's ``step`` only gathers gradients; when all peers together
have gathered those of ``train.global_batch_size`` samples, they are averaged by samples, and every peer makes the same
update. hivemind's DHT, matchmaking and all-reduce are used as in `diloco`. The class itself is not: each of the three
parts that it is made of has to be replaced for what it does in version 1.1.12, and around them nothing is left of it
but the order of the calls, which is here and in `rounds`.

- Its `GradientAverager` empties its sums before it knows what becomes of the round, so that a failed round makes an
  update from zeros; takes the group that formed for what arrived; and averages whatever it is sent. Here `Gathered`
  holds its sums until an average has been used; the averager is the guarded one of every mode, with its screen and its
  count of what arrived; and a round that fails is tried again with the same gradients.
- Its `TrainingStateAverager` averages parameters as well, a second way in for whoever lies; downloads states without
  end from anybody; knows the learning rate only of schedulers that it can look into; and crashes in a peer that only
  calls out. Here all peers make one update from the very same bits, a state comes from the owner's side with a signed
  digest, the rate is a function of the round, and nothing depends on who can be reached.
- Its `ProgressTracker` lets any record end everybody's round, or send them all for a newer state. Here a volunteer's
  word counts in bounds, and only the owner's side says that there is a newer state: see `robust.Tally`.

Steps and averaging are never delayed against each other, which hivemind allows and where its peers fall out of step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.config.schema import Config
from trainkit.distributed.process_group import Distributed
from trainkit.models import freeze
from trainkit.ranks import RankEnv
from trainkit.swarm.link import num_parts
from trainkit.swarm.sync_diloco import Average, CommonState, Given, flatten, unflattened
from trainkit.training.build import TrainState
from trainkit.training.optim import build_optimizer, lr_at, set_lr
from trainkit.training.precision import Precision


class Gathered(torch.optim.Optimizer):
    """Takes gradients and moves nothing: what an update of `trainkit.training.update` is given for its optimizer."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self.times = 0
        self._sums: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Add the gradients that are there now."""
        parameters = self.param_groups[0]["params"]
        own = [torch.zeros_like(item) if item.grad is None else item.grad for item in parameters]
        if self._sums:
            torch._foreach_add_(self._sums, own)
        else:
            self._sums = [gradient.clone() for gradient in own]
        self.times += 1

    def mean(self) -> Tensor | None:
        """Of the gradients that were added: float32 on the CPU, all in one vector; None if there were none."""
        return flatten(self._sums).div_(self.times) if self.times else None

    def clear(self) -> None:
        """Begin anew."""
        self.times, self._sums = 0, []


@dataclass(frozen=True)
class GatheringParts(TrainState):
    """Parts whose updates are one micro batch each, and only gather gradients."""

    gathered: Gathered = field(kw_only=True)

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.gathered

    @classmethod
    def of(cls, parts: TrainState, gathered: Gathered) -> GatheringParts:
        """The gradients are clipped when they are averaged: so are those of an update on one machine."""
        train = parts.config.train.model_copy(
            update={"global_batch_size": parts.micro_batch_size, "grad_clip_norm": None}
        )
        own = {item.name: getattr(parts, item.name) for item in fields(parts)}
        return cls(**{**own, "config": parts.config.model_copy(update={"train": train})}, gathered=gathered)


class GradientState(CommonState):
    """The common weights, what the optimizer remembers, and the gradients gathered here for the next update.

    The update is made on the CPU, in every peer from the same bits (as hivemind's ``offload_optimizer``).
    """

    same_weights = True

    def __init__(self, model: nn.Module, config: Config) -> None:
        freeze(model, config.model.freeze)
        super().__init__(model)
        self.gathered = Gathered(self.params)
        self._rounds = config.collaborative.rounds
        self._config, self._clip = config, config.train.grad_clip_norm
        twin = copy.deepcopy(model)
        self._masters = [parameter for parameter in twin.parameters() if parameter.requires_grad]
        for master, part in unflattened(self.theta, self._masters):
            master.data = part
        self._optimizer = build_optimizer(twin, config.optim)
        self._precision = Precision("fp32", Distributed(RankEnv.single(), torch.device("cpu")))
        _begin(self._optimizer, self._masters)
        self.momentum = _remembered(self._optimizer)

    @property
    def lr(self) -> float:
        """Of the next update. The schedule of ``train.epochs`` is stretched over the rounds."""
        rounds = self._rounds
        return lr_at(
            min(self.round, rounds - 1),
            optim=self._config.optim,
            schedule=self._config.schedule,
            steps_per_epoch=max(1, round(rounds / self._config.train.epochs)),
            total_steps=rounds,
        )

    @property
    def samples(self) -> int:
        """Whose gradients are gathered here."""
        size = self._config.train.given_micro_batch_size
        assert size is not None, "check_combinations"
        return self.gathered.times * size

    def give(self, samples: int) -> Given:
        """The mean of the gathered gradients, with ``samples`` as its weight. They stay until an average is used."""
        buffers = flatten(self._tensors()[len(self.params) :])
        mean = self.gathered.mean() if samples else None
        finite = mean is None or bool(torch.isfinite(mean).all() and torch.isfinite(buffers).all())
        if mean is None or not finite:
            mean, samples, buffers = torch.zeros(self.num_parameters), 0, self.theta[self.num_parameters :]
        weights = (float(samples),) * num_parts(self.theta.numel())
        return Given(torch.cat([mean, buffers]), weights, torch.zeros(0), finite)

    def step(self, average: Average, given: Given, *, trained_on: bool = False) -> None:
        """The update. Where nothing has arrived there is none: neither weights nor gathered gradients change.

        ``average`` has this peer's own gradients where a part has not arrived; a gradient that came too late to be
        counted is given up, for the weights that it belongs to are gone.
        """
        if not given.sound:
            self.gathered.clear()
        if not any(average.arrived):
            return
        with self.lock:
            for master, part in unflattened(average.vector, self._masters):
                master.grad = part.clone()
            set_lr(self._optimizer, self.lr)
            self._precision.step(self._optimizer, self._masters, self._clip)
            self.theta[self.num_parameters :] = average.vector[self.num_parameters :]
            self.momentum.copy_(_remembered(self._optimizer))
            self.round = average.next_round
        self.forget()

    def load(self, theta: Tensor, momentum: Tensor, round_index: int) -> None:
        """Go on from another peer's state, or from a checkpoint. Raises ValueError when it does not fit."""
        super().load(theta, momentum, round_index)
        with self.lock:
            _remember(self._optimizer, self.momentum)

    def forget(self) -> None:
        """Drop what is gathered here."""
        self.gathered.clear()
        self.into_model()


def _begin(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Have it make its state, as it is before the first update: its size is then known, and a newcomer's fits."""
    before = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    set_lr(optimizer, 0.0)
    optimizer.step()
    with torch.no_grad():
        for parameter, value in zip(parameters, before, strict=True):
            parameter.grad = None
            parameter.copy_(value)
    _remember(optimizer, torch.zeros_like(_remembered(optimizer)))


def _places(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], str]]:
    """Where an optimizer keeps what it remembers: tensors and counts; timm's LAMB counts its updates in the group."""
    for group in optimizer.param_groups:
        if _changes(group.get("step")):
            yield group, "step"
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            yield from ((state, key) for key in sorted(state) if _changes(state[key]))


def _changes(value: object) -> bool:
    return isinstance(value, Tensor | int | float) and not isinstance(value, bool)  # a switch is set once


def _remembered(optimizer: torch.optim.Optimizer) -> Tensor:
    return flatten([torch.as_tensor(place[key], dtype=torch.float32) for place, key in _places(optimizer)])


@torch.no_grad()
def _remember(optimizer: torch.optim.Optimizer, vector: Tensor) -> None:
    position = 0
    for place, key in _places(optimizer):
        value = place[key]
        size = value.numel() if isinstance(value, Tensor) else 1
        part = vector[position : position + size]
        if isinstance(value, Tensor):
            value.copy_(part.view_as(value))
        else:
            place[key] = type(value)(part.item())
        position += size
