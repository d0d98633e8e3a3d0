"""The exponential moving average of a model's weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainkit.checkpoint.state import follow_masters, master_of, plain_name, unwrapped
from trainkit.distributed.process_group import local_part
from trainkit.training.optim import SGD


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
        self._model = model
        self._decay = decay
        self._warmup = warmup
        self._averages: dict[str, Tensor] = {}  # by plain name; tied weights have several names and one average
        seen: dict[int, tuple[Tensor, Tensor]] = {}
        for name, own in _tensors_of(model).items():
            # Buffers in fp16 are no statistics, which need more digits; nor are masks of -inf, whose mean is NaN.
            is_statistic = not isinstance(own, nn.Parameter) and own.dtype in (torch.float32, torch.float64)
            is_statistic = is_statistic and bool(own.isfinite().all())
            if own.requires_grad or is_statistic:
                if id(own) not in seen:
                    seen[id(own)] = own, own.detach().clone()
                self._averages[name] = seen[id(own)][1]
        self._pairs = list(seen.values())
        # average += weight * (own - average) is a step of SGD with the gradient -own and a weight decay of 1. The fused
        # kernel makes it in one pass, and leaves it out by itself where `found_inf` is 1 on the device.
        averages = [average for _, average in self._local()]
        self._step = SGD(averages, lr=0.0, weight_decay=1.0, maximize=True, fused=True)

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
