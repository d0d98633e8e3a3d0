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
    """The averaged weights of a model, sharded as it is, and averaged where they are.

    As in timm's `ModelEmaV3` the running statistics of BatchNorm are averaged too, and its counts are the model's own.
    What is not trained is the model's own as well.

    Args:
        model: as made by the strategy. The average begins with its present weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model, self._decay = model, decay
        self._pairs: dict[str, tuple[Tensor, Tensor]] = {}
        """Plain name -> the model's own tensor, and its average."""
        averages: dict[int, Tensor] = {}  # tied weights have several names
        for name, own in _tensors_of(model).items():
            if isinstance(own, nn.Parameter):
                changes = own.requires_grad
            else:  # buffers in fp16 are no statistics, which need more digits
                changes = own.dtype in (torch.float32, torch.float64)
            if changes:
                average = averages.setdefault(id(own), own.detach().clone())
                self._pairs[name] = (own, average)

    @torch.no_grad()
    def update(self, nonfinite: Tensor, *, updates: int) -> None:
        """Take the weights after an update into the average.

        Args:
            nonfinite: of that update, 1.0 on the device where it came to nothing: the average then stays as it is.
            updates: how many the average has had before.
        """
        weight = 1.0 - decay_at(updates, self._decay)
        for device, (own, average) in self._by_device().items():
            # average += weight * (own - average) is SGD's step for the loss |own - average|^2 / 2. Its fused kernel
            # makes it in one pass, looks at ``nonfinite`` on the device, and is quicker than a `_foreach_lerp_`.
            torch._fused_sgd_(
                average,
                own,
                [],
                weight_decay=1.0,
                momentum=0.0,
                lr=weight,
                dampening=0.0,
                nesterov=False,
                maximize=True,
                is_first_step=False,
                grad_scale=None,
                found_inf=nonfinite.to(device),
            )

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew with the model's present weights."""
        for own, average in self._local():
            average.copy_(own)

    def tensors(self) -> dict[str, Tensor]:
        """The averaged model: plain name -> tensor, sharded ones as they are. Writing into them changes the average,
        or what the model has in common with it."""
        own = _tensors_of(self._model)
        return {name: self._pairs[name][1] if name in self._pairs else value.detach() for name, value in own.items()}

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
        """This rank's parts of the model's tensors and their averages, each once."""
        unique = {id(average): (own, average) for own, average in self._pairs.values()}
        return [(local_part(own), local_part(average)) for own, average in unique.values()]

    def _by_device(self) -> dict[torch.device, tuple[list[Tensor], list[Tensor]]]:
        lists: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
        for own, average in self._local():
            if own.numel():  # a small tensor's shards do not reach all ranks
                ours, averages = lists.setdefault(own.device, ([], []))
                ours.append(own)
                averages.append(average)
        return lists


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Plain name -> the model's own parameter or buffer, sharded ones as they are."""
    inner = model.module if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel) else model
    state = inner.state_dict(keep_vars=True)
    return {plain_name(name): master_of(value) for name, value in state.items() if isinstance(value, Tensor)}
