"""The state of a loop of the user's own: what is saved of it, recorded, and how it stops."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import Tensor

from trainkit.checkpoint.objects import SavedObjects, has_state
from trainkit.common.errors import UserError
from trainkit.config.schema import Config
from trainkit.data.batches import RankBatches
from trainkit.data.order import derive_seed
from trainkit.distributed.device import as_float64, device_name, seed_all
from trainkit.distributed.process_group import Distributed, StopVote
from trainkit.monitor.base import Logger
from trainkit.training.precision import Precision
from trainkit.training.run_session import WAIT_AT_END, Session, checkpoints_of
from trainkit.training.saver import Saver


class Stopped(SystemExit):
    """The ranks were told to stop, and have saved: the process ends with exit code 0, unless somebody catches it."""


# What is logged

_NAME = re.compile(r"(?!ema_)[A-Za-z]\w{0,40}")
_OF_RECORDS = ("time", "step", "split", "epoch")
_SPLITS = ("train", "val", "test")
_MOST_PENDING = 64


class Means:
    """Means of what was logged, over steps and ranks. Nothing is copied from a device until they are read."""

    def __init__(self, dist: Distributed) -> None:
        self._dist = dist
        self._pending: dict[str, list[Tensor]] = {}
        self._totals: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._known: list[str] = []
        """Names on any rank, the same on all."""

    def add(self, split: str, values: Mapping[str, Any]) -> None:
        """Add numbers, or tensors of one number. Raises UserError for anything else."""
        for name, value in values.items():
            if _NAME.fullmatch(name) is None or name in _OF_RECORDS or split not in _SPLITS:
                why = f"Splits are {', '.join(_SPLITS)}; a record itself has {', '.join(_OF_RECORDS)}."
                raise UserError(f"{split}/{name} cannot be logged.", why=why, fix="Use another name.")
            if not isinstance(value, Tensor):
                value = _number(name, value)
            if value.numel() != 1:
                why = f"It has the shape {tuple(value.shape)}, and is not one number."
                raise UserError(f"{name} cannot be logged.", why=why, fix=f"Log {name}.mean().")
            pending = self._pending.setdefault(f"{split}/{name}", [])
            pending.append(value.detach().reshape(()))
            if len(pending) >= _MOST_PENDING:
                self._add_up(f"{split}/{name}")

    def _add_up(self, key: str) -> None:
        pending = self._pending[key]
        if pending:
            total = as_float64(torch.stack(pending)).sum()
            self._totals[key] = total + self._totals[key] if key in self._totals else total
            self._counts[key] = self._counts.get(key, 0) + len(pending)
            self._pending[key] = []

    def sums(self) -> dict[str, tuple[float, float]]:
        """Sum and count over all ranks of what was added since `clear`, by ``split/name``. Every rank must call it."""
        for key in self._pending:
            self._add_up(key)
        own = {key: (float(total), self._counts[key]) for key, total in self._totals.items()}
        while True:
            message = torch.zeros(2 * len(self._known) + 1, dtype=torch.float64)
            for index, key in enumerate(self._known):
                message[2 * index : 2 * index + 2] = torch.tensor(own.get(key, (0.0, 0.0)), dtype=torch.float64)
            message[-1] = len(own.keys() - set(self._known))
            *found, unknown = self._dist.all_reduce_sum(message).tolist()
            if not unknown:
                break
            names = self._dist.gather_json(sorted(own))
            self._known = sorted({*self._known, *(name for some in names for name in some)})
        pairs = zip(found[::2], found[1::2], strict=True)
        return {key: pair for key, pair in zip(self._known, pairs, strict=True) if pair[1]}

    def clear(self) -> None:
        """Begin anew."""
        self._totals.clear()
        self._counts.clear()

    def go_on(self, sums: Mapping[str, Any]) -> None:
        """Begin with what `sums` gave before a restart: a mean goes over its whole window."""
        for key, (total, count) in sums.items():
            if self._dist.is_main:
                self._totals[key] = torch.tensor(total, dtype=torch.float64)
                self._counts[key] = count

    def has(self, *splits: str) -> bool:
        """Return whether this rank has logged something of these splits since `clear`."""
        return any(
            key.partition("/")[0] in splits
            for key in {**self._pending, **self._totals}
            if self._pending.get(key) or key in self._totals
        )


def _number(name: str, value: Any) -> Tensor:
    try:
        return torch.tensor(float(value), dtype=torch.float64)
    except (TypeError, ValueError):
        why = f"It is a {type(value).__name__}, and not one number."
        raise UserError(f"{name} cannot be logged.", why=why, fix="Log a number, or leave it out.") from None


# The state of a user's own loop


class State:
    """The state of a loop: what is saved, and how far it is.

    Plain values are attributes: ``state.best = 0.93``. They are declared by their first value, in `Rank.saved`.

    Attributes:
        steps: how often `step` was called, over all attempts.
    """

    _keeper: LoopKeeper

    def __init__(self, keeper: LoopKeeper) -> None:
        vars(self)["_keeper"] = keeper

    @property
    def steps(self) -> int:
        """How often `step` was called, over all attempts."""
        return self._keeper.steps

    def step(self) -> None:
        """End an update: the last line of the loop. It counts, saves when that is due, and stops when it is told to.

        All ranks must call it equally often. Told to stop (by a time limit, preemption, `cancel`), all save at the same
        step and end, with exit code 0; the run goes on there when it is started again.

        Raises:
            RunFailedError: a checkpoint or a record cannot be written.
        """
        self._keeper.step()

    def __getattr__(self, name: str) -> Any:
        values = vars(self)["_keeper"].values
        if name in values:
            return values[name]
        raise AttributeError(f"rank.saved() has no {name}=")

    def __setattr__(self, name: str, value: Any) -> None:
        values = vars(self)["_keeper"].values
        if name not in values:
            what = f"state.{name} is not saved."
            why = "A value needs a first one, from which a run begins that does not go on from a checkpoint."
            raise UserError(what, why=why, fix=f"Declare it: rank.saved(..., {name}={value!r}).")
        values[name] = value


class LoopKeeper(Saver):
    """Keeps the loop of a user: counts, records, saves and stops it. Every rank calls every method.

    Args:
        given: objects and first plain values, by their names.
    """

    def __init__(self, session: Session, precision: Precision, given: Mapping[str, Any]) -> None:
        self.session = session
        self.writer = session.writer
        self.precision = precision
        self.checkpoints = checkpoints_of(self.writer, self.config, self.dist)
        self.values: dict[str, Any] = {}
        objects: dict[str, Any] = {}
        for name, item in given.items():
            (objects if has_state(item) else self.values)[name] = item
        self.batches = [item for item in objects.values() if isinstance(item, RankBatches)]
        self.objects = SavedObjects(objects, self.values, self.dist)
        self.means = Means(self.dist)
        self.steps = 0
        self.best: float | None = None
        self.best_step: int | None = None
        self.val: dict[str, float] = {}
        self.test: dict[str, float] | None = None
        self.seconds = 0.0
        self._vote = StopVote(self.dist)
        self._metrics: Logger
        self._beat: Callable[[], None] = session.reports.beat
        self._saved_step = -1
        self._recorded = (0, time.monotonic())

    @property
    def config(self) -> Config:
        return self.session.config

    @property
    def dist(self) -> Distributed:
        return self.session.dist

    @contextmanager
    def open(self) -> Iterator[State]:
        """Context of the loop: restores the newest checkpoint at its begin, and saves the last one at its end."""
        session = self.session
        session.reports.starting.at("restore the newest checkpoint")
        with closing(self.checkpoints):
            self._restore()
            hosts = session.hosts()
            facts = {
                "total_steps": self.batches[0].total if len(self.batches) == 1 else 0,
                "params": sum(item.numel() for item in self.objects.parameters.values() if item.requires_grad),
                "precision": self.precision.name,
            }
            session.started(hosts, step=self.steps, **facts)
            with session.live(hosts, 2, resumed_step=self.steps, **facts) as (self._metrics, self._beat):
                session.reports.starting.at("")
                self._seed()
                self._recorded = (self.steps, time.monotonic())
                try:
                    yield State(self)
                    self._flush()
                    self._save()
                    self.checkpoints.settle()
                finally:
                    self._vote.finish()
            self._summarize("finished")
            self.checkpoints.finish()
            if self.dist.is_main:
                self.writer.ended("COMPLETED", step=self.steps)
            session.uploading.seconds = WAIT_AT_END

    def _restore(self) -> None:
        names = list(self.objects.names)
        found = self.checkpoints.newest(further=names, accept=lambda restored: restored.state["objects"])
        if found is None:
            return
        restored, source = found
        state = restored.state
        self.objects.restore(state["objects"], source, set(state["stems"]))
        self.precision.load_state_dict(state["precision"])
        self.steps = restored.step
        self._saved_step = restored.step
        self.best = state["best"]
        self.best_step = state["best_step"]
        self.checkpoints.best = self.best_step
        self.val = state["val"]
        self.seconds = state["seconds"]
        self.means.go_on(state["window"])

    def _seed(self) -> None:
        seed_all(derive_seed(self.config.seed, self.steps, self.dist.rank), self.dist.device)

    def step(self) -> None:
        """See `State.step`."""
        self.steps += 1
        self._beat()
        every = self.config.monitor.log_every
        ends_epoch = any(batches.ends_epoch for batches in self.batches)
        if self.steps % every == 0 or ends_epoch or self.means.has("val", "test"):
            self._flush()
        stop = self.poll(self._vote, self.session.stop.requested)
        if stop or self._vote.save or self._is_due(ends_epoch):
            self._save()
        if stop:
            self.checkpoints.settle()
            self.session.hand_back(self.steps)
            raise Stopped(0)
        self._seed()

    def _is_due(self, ends_epoch: bool) -> bool:
        saving = self.config.checkpoint
        if saving.every_steps is not None and self.steps % saving.every_steps == 0:
            return True
        if self.best_step == self.steps:
            return True
        return ends_epoch and saving.every_epochs is not None and (self.batches[0].epoch + 1) % saving.every_epochs == 0

    def log(self, split: str, values: Mapping[str, Any]) -> None:
        """See `Rank.log`."""
        self._beat()
        self.means.add(split, values)

    def _flush(self) -> None:
        """Write a record of each split that any rank has logged something of."""
        sums = self.means.sums()
        self.means.clear()
        splits: dict[str, dict[str, float]] = {}
        for key, (total, count) in sums.items():
            split, _, name = key.partition("/")
            splits.setdefault(split, {})[name] = total / count
        since, began = self._recorded
        now = time.monotonic()
        self._recorded = (self.steps, now)
        self.seconds += now - began
        where: dict[str, Any] = {"time": round(time.time(), 3), "step": self.steps}
        speed: dict[str, float] = {}
        if len(self.batches) == 1:
            batches = self.batches[0]
            where["epoch"] = round(batches.position / batches.steps_per_epoch, 4)
            if now > began and self.steps > since:
                speed["images_per_sec"] = round((self.steps - since) * batches.global_batch_size / (now - began), 2)
        for split, means in splits.items():
            more = speed if split == "train" else {}
            self._metrics.log({**where, "split": split, **means, **more})
        if "test" in splits:
            self.test = splits["test"]
        if "val" in splits:
            self._judge(splits["val"])

    def _judge(self, val: dict[str, float]) -> None:
        self.val = val
        name = (self.config.checkpoint.best or "val/loss").removeprefix("val/")
        value = val.get(name, math.nan)
        sign = -1 if name.endswith("loss") else 1
        if math.isfinite(value) and (self.best is None or sign * value > sign * self.best):
            self.best = value
            self.best_step = self.steps

    def _save(self) -> None:
        plain, stems = self.objects.packed()
        step = self.steps
        window = self.means.sums()
        state = {
            "objects": plain,
            "stems": sorted(stems),
            "precision": self.precision.state_dict(),
            "world_size": self.dist.world_size,
            "best": self.best,
            "best_step": self.best_step,
            "val": self.val,
            "seconds": self.seconds,
            "window": window,
        }

        def written() -> None:
            if self.dist.is_main:
                self.writer.saved(step)
                self.session.uploading.look()

        self._beat()
        self.checkpoints.best = self.best_step
        self.checkpoints.save_tensors(stems, step=step, state=state, done=written)
        self._saved_step = step
        self._beat()

    def _summarize(self, outcome: str) -> None:
        if not self.dist.is_main:
            return
        summary = {
            "outcome": outcome,
            "steps": self.steps,
            "best": {self.config.checkpoint.best or "val/loss": self.best},
            "best_step": self.best_step,
            "val": self.val,
            "test": self.test,
            "train_seconds": round(self.seconds, 3),
            "world_size": self.dist.world_size,
            "precision": self.precision.name,
            "device": device_name(self.dist.device),
            "params": sum(item.numel() for item in self.objects.parameters.values() if item.requires_grad),
        }
        self.write(self.writer.run.summary, summary, indent=2)
