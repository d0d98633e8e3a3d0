"""An exponential moving average of the weights, which is often the better model (Polyak and Juditsky, 1992)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainkit.checkpoint.state import follow_masters, master_of, plain_name
from trainkit.distributed.process_group import local_part


def decay_at(updates: int, decay: float) -> float:
    """How much of the average stays at the update after ``updates`` others: the first ones count for more, or a short
    run would end with what it began with (TensorFlow's rule: Abadi et al., `ExponentialMovingAverage`)."""
    return min(decay, (1 + updates) / (10 + updates))


class Ema:
    """The averaged weights of a model, sharded as it is, on the devices of its weights.

    As in timm's `ModelEmaV3` the running statistics of BatchNorm are averaged too, and its counts are the model's own.
    What is not trained is the model's own as well.

    Args:
        model: as made by the strategy. The average begins with its present weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model, self._decay = model, decay
        self._averages: dict[str, Tensor] = {}
        """By plain name; tied weights have several names and one average."""
        self._pairs: list[tuple[Tensor, Tensor]] = []
        """This rank's parts of the model's tensors and of their averages, each once."""
        seen: dict[int, Tensor] = {}
        for name, own in _tensors_of(model).items():
            # Buffers in fp16 are no statistics, which need more digits.
            is_statistic = not isinstance(own, nn.Parameter) and own.dtype in (torch.float32, torch.float64)
            if own.requires_grad or is_statistic:
                if id(own) not in seen:
                    seen[id(own)] = own.detach().clone()
                    self._pairs.append((own, seen[id(own)]))
                self._averages[name] = seen[id(own)]
        # average += weight * (own - average) is a step of SGD with the gradient -own and a weight decay of 1. The fused
        # kernel makes it in one pass, and leaves it out by itself where `found_inf` is 1 on the device.
        averages = [local_part(average) for _, average in self._pairs]
        self._step = torch.optim.SGD(averages, lr=0.0, weight_decay=1.0, maximize=True, fused=True)

    @torch.no_grad()
    def update(self, nonfinite: Tensor, *, updates: int) -> None:
        """Take the weights after an update into the average.

        Args:
            nonfinite: 1.0 on the device where that update came to nothing: the average then stays as it is.
            updates: how many updates the average has had before.
        """
        for own, average in self._local():
            average.grad = own.detach() if own.numel() else None  # a small tensor's shards do not reach all ranks
        self._step.param_groups[0]["lr"] = 1.0 - decay_at(updates, self._decay)
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
        return [(local_part(own), local_part(average)) for own, average in self._pairs]


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Plain name -> the model's own parameter or buffer, sharded ones as they are."""
    inner = model.module if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel) else model
    state = inner.state_dict(keep_vars=True)
    return {plain_name(name): master_of(value) for name, value in state.items() if isinstance(value, Tensor)}
