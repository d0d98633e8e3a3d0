"""One rank of a loop of the user's own: its device, its part of models and data, and what makes the run go on."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from trainkit.checkpoint.state import parameters_of, unwrapped
from trainkit.cluster.ranks import RankEnv, Secret
from trainkit.cluster.signals import StopFlag
from trainkit.common import terminal
from trainkit.common.errors import UserError
from trainkit.config.schema import Config
from trainkit.data.batches import RankBatches, RankFetch
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

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_FAREWELL_SECONDS = 60.0
"""Longest wait for the other ranks at the end of a program: one of them may have ended by `sys.exit`."""
_waiting: list[Rank] = []
"""The rank that the end of the program leaves, as no ``with`` does; a process has one process group."""


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
        self._optimizers: list[torch.optim.Optimizer] = []
        self._updates = False
        self._keeper: LoopKeeper | None = None
        self._open = ExitStack()
        self._excepthook = sys.excepthook

    # A rank without `with` is left when the program ends

    def _stay_open(self, stack: ExitStack) -> None:
        self._open = stack
        _waiting.append(self)
        atexit.register(self._at_exit)
        if not hasattr(sys, "ps1"):  # at whose prompt the program goes on
            sys.excepthook = self._at_error

    def _stay_no_longer(self) -> None:
        if self in _waiting:
            _waiting.remove(self)
            atexit.unregister(self._at_exit)
            sys.excepthook = self._excepthook

    def __enter__(self) -> Rank:
        self._stay_no_longer()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._open.__exit__(*error)

    def close(self) -> None:
        """Leave the run, where there is neither a ``with`` nor an end of the program: in a notebook."""
        self._stay_no_longer()
        left_loop = self._keeper is not None  # sooner than its batches were over
        if left_loop and self.is_main:
            what = "The program has left its loop before the batches were over: only what the last checkpoint has is"
            terminal.warn(f"{what} saved. A loop that may end sooner stands in `with rank.saved(...) as state:`.")
        if left_loop or not self._dist.come_together(_FAREWELL_SECONDS):
            self._open.__exit__(SystemExit, SystemExit(), None)
        self._open.close()

    def _at_exit(self) -> None:
        with suppress(SystemExit):
            self.close()

    def _at_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Leave with the error that ends the program. Raises SystemExit for one that was said in three lines."""
        self._stay_no_longer()
        self._open.__exit__(kind, error, trace)
        self._excepthook(kind, error.with_traceback(trace), trace)

    # Its place

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

    @overload
    def wrap(self, item: nn.Module, /) -> nn.Module: ...

    @overload
    def wrap(self, *items: Any) -> Any: ...

    def wrap(self, *items: Any) -> Any:
        """Put modules on this rank's device, for training on all ranks together, in ``train.precision``; optimizers and
        data loaders may come along.

        What is trained begins with the weights of rank 0. Outputs are fp32 in every precision.

        Args:
            items: modules; one without trainable parameters is shared out only where ``strategy`` shards. Optimizers of
                these modules: one that is made of the wrapped module need not come along. ``DataLoader``, which become
                `batches` of so many samples over all ranks, an epoch each time.

        Returns:
            The item that takes the place of the given one; a tuple for several.

        Raises:
            UserError: something is none of these, or its batches cannot be shared out.
        """
        made: list[Any] = []
        replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        for item in items:
            if isinstance(item, nn.Module):
                before = dict(item.named_parameters())
                made.append(self._wrap_module(item))
                after = parameters_of(made[-1])
                for name, parameter in before.items():
                    replaced[id(parameter)] = (parameter, after[name])
            else:
                made.append(item)
        for index, item in enumerate(items):
            if isinstance(item, torch.optim.Optimizer):
                _take_over(item, replaced)
                self._prepare(item)
            elif isinstance(item, torch.utils.data.DataLoader):
                made[index] = self._batches_of(item)
            elif not isinstance(item, nn.Module):
                what = f"rank.wrap() takes no {type(item).__name__}."
                why = "It takes modules, optimizers and data loaders."
                raise UserError(what, why=why, fix="Leave it out; rank.device says where tensors belong.")
        return made[0] if len(made) == 1 else tuple(made)

    def _wrap_module(self, module: nn.Module) -> nn.Module:
        config = self._session.config
        strategy = build_strategy(config.strategy, self._dist, self._precision.name)
        model = parallelized(self._precision.around(module), strategy, config, self._dist)
        if any(parameter.requires_grad for parameter in model.parameters()):
            self._wrapped.append((strategy, model))
        return model

    def _prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer follow the strategy, once."""
        if any(known is optimizer for known in self._optimizers):
            return
        self._optimizers.append(optimizer)
        for strategy, _ in self._wrapped[:1]:
            if isinstance(strategy, SharesOptimizer):
                strategy.share(optimizer)
        if self._precision.scales_loss:
            optimizer.register_step_pre_hook(self._require_update)

    def _require_update(self, *_: object) -> None:
        if not self._updates:
            what = "optimizer.step() is not enough in fp16."
            why = "Small gradients become 0 there, unless the loss is scaled before, and they are scaled back after."
            fix = "Use rank.backward(loss) and rank.update(optimizer), or train.precision=bf16 or fp32."
            raise UserError(what, why=why, fix=fix)

    def _batches_of(self, loader: DataLoader[Any]) -> RankBatches:
        """Return the batches that stand for a data loader."""
        sampler = loader.sampler
        is_random = isinstance(sampler, torch.utils.data.RandomSampler) and not sampler.replacement
        if loader.batch_size is None or not (is_random or isinstance(sampler, torch.utils.data.SequentialSampler)):
            what = "A data loader with a sampler of its own, or without batches, cannot be shared out."
            why = "Every rank has to know which samples are whose, and where a run goes on."
            raise UserError(what, why=why, fix="Use shuffle=True or False, or rank.batches(dataset, ...).")
        left = len(loader.dataset) % loader.batch_size  # type: ignore[arg-type]
        if left and not loader.drop_last and self.is_main:
            terminal.say(f"Note: the last {left} samples of each epoch, less than a batch, are left out.")
        return self.batches(
            loader.dataset, global_batch_size=loader.batch_size, epochs=None, workers=loader.num_workers,
            collate_fn=loader.collate_fn, shuffle=is_random,
        )  # fmt: skip

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
        self._updates = True
        try:
            return self._precision.step(optimizer, parameters, clip_norm).norm
        finally:
            self._updates = False

    def mean(self, tensor: Tensor) -> Tensor:
        """Return the mean of a tensor over the ranks, the same on all; without gradients."""
        return self._dist.all_reduce_sum(tensor.detach().clone()) / self.world_size

    def batches(
        self, dataset: Any, *, global_batch_size: int, epochs: int | None = 1, workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None, shuffle: bool = True,
    ) -> RankBatches:  # fmt: skip
        """Share out the samples of a data set among the ranks, in one order at any number of ranks.

        Args:
            dataset: of torch's kind, with ``__len__`` and ``__getitem__``.
            global_batch_size: samples of an update over all ranks. What is left of an epoch is dropped; the next one
                begins with another order.
            epochs: passes over the data; None: `RankBatches.epochs` is told.
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
        fetch = RankFetch(dataset, collate_fn or default_collate, self._session.config.seed)
        return RankBatches(fetch, loading, global_batch_size=global_batch_size, epochs=epochs, shuffle=shuffle)

    def saved(self, **given: Any) -> State:
        """Go on from the newest checkpoint of the run, and save the last one at the end of the loop: with the block, if
        it stands in a ``with``, or else with the last batch.

        Args:
            given: by name, whatever has ``state_dict`` and ``load_state_dict``: modules, optimizers, schedulers,
                batches, generators. All else is the first value of a plain one: a number, a text, a tensor, or lists,
                tuples and dicts of them.

        Raises:
            UserError: something cannot be saved, or the checkpoint is of other objects.
        """
        for item in given.values():
            if isinstance(item, torch.optim.Optimizer):
                self._prepare(item)
        keeper = LoopKeeper(self._session, self._precision, self._wrapped, given)
        stack = ExitStack()
        state = stack.enter_context(self._keeping(keeper))
        keeper.loop = self._open.enter_context(stack)
        return state

    @contextmanager
    def _keeping(self, keeper: LoopKeeper) -> Iterator[State]:
        self._keeper = keeper
        try:
            with keeper.open() as state:
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
                what, why="Records have the step of a state.", fix="Call it inside the loop of a rank.saved(...)."
            )
        self._keeper.log(split, values)


def _take_over(optimizer: torch.optim.Optimizer, replaced: dict[int, tuple[nn.Parameter, nn.Parameter]]) -> None:
    """Give an optimizer the parameters that stand in the place of its own, which it has not updated yet."""
    for group in optimizer.param_groups:
        own = group["params"]
        group["params"] = [replaced[id(item)][1] if id(item) in replaced else item for item in own]
        if optimizer.state and any(new is not old for new, old in zip(group["params"], own, strict=True)):
            what = f"This {type(optimizer).__name__} has made an update, or loaded a state."
            why = "Its state is that of parameters that sharding has replaced."
            raise UserError(what, why=why, fix="Call rank.wrap() first.")


def stay_open(rank: Rank, stack: ExitStack) -> Rank:
    """Keep a rank open until the end of its ``with`` block or, without one, of the program; then leave ``stack``."""
    rank._stay_open(stack)
    return rank


def close_waiting() -> None:
    """Close the rank that would stay open until the end of the program: another one begins."""
    for rank in list(_waiting):
        rank.close()


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
