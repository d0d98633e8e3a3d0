"""One rank of a loop of the user's own: its device, its part of models and data, and what makes the run go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.checkpoint.state import unwrapped
from trainkit.cluster.ranks import RankEnv, Secret
from trainkit.cluster.signals import StopFlag
from trainkit.common.errors import UserError
from trainkit.config.schema import Config
from trainkit.data.batches import RankBatches
from trainkit.data.loader import Loading
from trainkit.data.order import derive_seed
from trainkit.distributed.device import seed_all
from trainkit.distributed.strategies.base import SharesOptimizer, Strategy, build_strategy
from trainkit.run.events import Attempt
from trainkit.training.placement import parallelized, use_process
from trainkit.training.precision import Precision, choose_precision
from trainkit.training.run_session import Session, Uploading, failures_recorded, meeting, open_together
from trainkit.training.saved import LoopKeeper, State, Stopped
from trainkit.training.startup import Reports


class Rank:
    """One rank of a run, and how it takes part in it. Made by `trainkit.rank`."""

    def __init__(self, session: Session) -> None:
        config = session.config
        name = choose_precision(config.train.precision, session.dist.device)
        if name == "o2":
            why = "Its optimizer trains other weights than the model's."
            raise UserError("train.precision=o2 is none for trainkit.rank().", why=why, fix="Use bf16 or fp16.")
        self._session = session
        self._dist = session.dist
        self._precision = Precision(name, session.dist)
        self._wrapped: list[tuple[Strategy, nn.Module]] = []
        self._keeper: LoopKeeper | None = None

    @property
    def device(self) -> torch.device:
        """Device on which this rank computes."""
        return self._dist.device

    @property
    def rank(self) -> int:
        """Its number among all ranks, from 0."""
        return self._dist.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._dist.world_size

    @property
    def is_main(self) -> bool:
        """True on the first rank, for what is to be done once."""
        return self._dist.is_main

    @property
    def path(self) -> Path:
        """Folder of the run."""
        return self._session.writer.run.path

    def wrap(self, module: nn.Module) -> nn.Module:
        """Put a module on this rank's device, for training on all ranks together, in ``train.precision``.

        Make its optimizer afterwards: sharding replaces the parameters. The weights are those of rank 0. What it
        returns has fp32 outputs in every precision.

        Args:
            module: a plain one; one without trainable parameters is shared out only where ``strategy`` shards.
        """
        config = self._session.config
        strategy = build_strategy(config.strategy, self._dist, self._precision.name)
        model = parallelized(self._precision.around(module), strategy, config, self._dist)
        if any(parameter.requires_grad for parameter in model.parameters()):
            self._wrapped.append((strategy, model))
        return model

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Return the user's own module inside of what `wrap` has returned, for its further methods."""
        return unwrapped(module)

    def autocast(self) -> AbstractContextManager[None]:
        """Context that computes in ``train.precision``; modules of `wrap` do so by themselves."""
        return self._precision.autocast()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss``, a tensor without dimensions, on all ranks; scaled where fp16 needs it."""
        with ExitStack() as synced:
            for strategy, model in self._wrapped:
                synced.enter_context(strategy.grad_sync(model, enabled=True))
            self._precision.backward(loss)

    def update(self, optimizer: torch.optim.Optimizer, clip_norm: float | None = None) -> Tensor | None:
        """Make an update, and clear the gradients; none where a gradient is infinite or not a number.

        Args:
            clip_norm: largest global norm of the gradients.

        Returns:
            The norm before clipping, a tensor without dimensions on the device; None without ``clip_norm``.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return self._precision.step(optimizer, parameters, clip_norm).norm

    def mean(self, tensor: Tensor) -> Tensor:
        """Return the mean of a tensor over the ranks, the same on all; without gradients."""
        return self._dist.all_reduce_sum(tensor.detach().clone()) / self.world_size

    def batches(
        self, dataset: Any, *, global_batch_size: int, epochs: int = 1, workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None, shuffle: bool = True,
    ) -> RankBatches:  # fmt: skip
        """Share out the samples of a data set among the ranks, in one order at any number of ranks.

        Args:
            dataset: of torch's kind, with ``__len__`` and ``__getitem__``.
            global_batch_size: samples of an update over all ranks. What is left of an epoch is dropped; the next one
                begins with another order.
            epochs: passes over the data.
            workers: loader processes of this rank.
            collate_fn: makes a batch of samples; None: torch's own.
            shuffle: False: in the order of the data set.

        Raises:
            UserError: the data is smaller than a batch, or the ranks cannot share a batch evenly.
        """
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            what = f"{type(dataset).__name__} has no length, or no sample by its number."
            why = "Only of such data every rank knows which samples are whose, and where a run goes on."
            raise UserError(what, why=why, fix="Give a data set with __len__ and __getitem__.")
        if global_batch_size % self.world_size:
            what = f"global_batch_size={global_batch_size} cannot be split evenly over {self.world_size} ranks."
            lower = max(global_batch_size // self.world_size, 1) * self.world_size
            fix = f"Use {lower} or {lower + self.world_size}, or another number of ranks."
            raise UserError(what, why="Every rank takes as many samples.", fix=fix)
        if len(dataset) < global_batch_size:
            what = f"global_batch_size={global_batch_size} is larger than the data."
            raise UserError(what, why=f"It has {len(dataset)} samples.", fix="Use a smaller batch, or more data.")
        from torch.utils.data import default_collate

        loading = Loading(self.rank, self.world_size, workers, self.device)
        return RankBatches(
            dataset, collate_fn or default_collate, loading, global_batch_size=global_batch_size, epochs=epochs,
            seed=self._session.config.seed, shuffle=shuffle,
        )  # fmt: skip

    @contextmanager
    def saved(self, **given: Any) -> Iterator[State]:
        """Context of a loop that goes on from the newest checkpoint of its run, and saves the last one at its end.

        Args:
            given: by name, whatever has ``state_dict`` and ``load_state_dict``: modules, optimizers, schedulers,
                batches, generators. All else is the first value of a plain one: a number, a text, a tensor, or lists,
                tuples and dicts of them.

        Raises:
            UserError: something cannot be saved, or the checkpoint is of other objects.
        """
        for item in given.values():
            for strategy, _ in self._wrapped[:1]:
                if isinstance(item, torch.optim.Optimizer) and isinstance(strategy, SharesOptimizer):
                    strategy.share(item)
        strategies = [strategy for strategy, _ in self._wrapped]
        self._keeper = LoopKeeper(self._session, self._precision, strategies, given)
        try:
            with self._keeper.open() as state:
                yield state
        finally:
            self._keeper = None

    def log(self, split: str = "train", **values: Any) -> None:
        """Log numbers: of training their mean over the steps since the last record (``monitor.log_every``) and over
        the ranks; of ``val`` and ``test`` the mean over what was logged in this step, and over the ranks.

        Records are written with the next `State.step`. They are what `status`, `report` and the loggers show; the best
        ``checkpoint.best`` selects the checkpoint ``best``.

        Args:
            split: ``train``, ``val`` or ``test``.
            values: numbers, or tensors of one number, on any device.

        Raises:
            UserError: something is not one number, or no state is open.
        """
        if self._keeper is None:
            what = "rank.log() has nothing to write to."
            raise UserError(
                what, why="Records have the step of a state.", fix="Call it inside `with rank.saved(...):`."
            )
        self._keeper.log(split, values)


@contextmanager
def rank_of(
    config: Config, env: RankEnv, stop: StopFlag, *, open_run: Callable[[], Attempt], secret: Secret, reports: Reports
) -> Iterator[Rank]:
    """Context of one rank of a user's own loop. Arguments as of `trainkit.training.experiment.run`."""
    stopped: Stopped | None = None
    with Uploading(stop) as uploading, reports.starting, meeting(config, env, secret, reports.starting) as dist:
        use_process(config)
        writer = open_together(config, dist, open_run)
        reports.starting.attempt = reports.node or writer
        seed_all(derive_seed(config.seed), dist.device)
        reports.starting.at("")
        with failures_recorded(writer, dist):
            try:
                yield Rank(Session(config, dist, writer, uploading, reports, stop))
            except Stopped as error:
                stopped = error
    if stopped is not None:
        raise stopped
