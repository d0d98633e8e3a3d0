"""The state of a loop of the user's own: what is saved of it, recorded, and how it stops."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import nn

from trainkit.checkpoint.objects import SavedObjects, has_state
from trainkit.checkpoint.state import load_where_named
from trainkit.checkpoint.uploads import open_remote
from trainkit.common import terminal
from trainkit.common.errors import UserError
from trainkit.common.terminal import plural
from trainkit.config.schema import Config
from trainkit.config.task_metrics import TaskMetrics
from trainkit.data.batches import RankBatches
from trainkit.data.order import derive_seed
from trainkit.distributed.device import device_name, seed_all
from trainkit.distributed.process_group import AllOrNone, Distributed, StopVote
from trainkit.distributed.strategies.base import HasTensors, Strategy
from trainkit.monitor.base import Loggers
from trainkit.run.events import attempts_that
from trainkit.run.metrics import describe_names, metric_named, task_metrics
from trainkit.run.run_lease import ProcessId
from trainkit.training.loop_notes import LoopNotes
from trainkit.training.means import Means
from trainkit.training.precision import Precision
from trainkit.training.progress import Progress, Pruner
from trainkit.training.run_session import WAIT_AT_END, Session, checkpoints_of
from trainkit.training.saver import Saver
from trainkit.training.survivor import Survivor, is_whole


class Stopped(SystemExit):
    """The ranks were told to stop, and have saved: the process ends with exit code 0, unless somebody catches it."""


_MANY = 1000
"""Batches without a `State.step`: more than anybody adds up the gradients of."""


class State:
    """The state of a loop: what is saved, and how far it is.

    Plain values are attributes: ``state.best = 0.93``. They are declared by their first value, in `Rank.saved`.
    """

    _keeper: LoopKeeper

    def __init__(self, keeper: LoopKeeper) -> None:
        vars(self)["_keeper"] = keeper

    def __enter__(self) -> State:
        self._keeper.ends_with_batches = False
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._keeper.loop.__exit__(*error)

    @property
    def steps(self) -> int:
        """Calls of `step` over all attempts."""
        return self._keeper.steps

    def step(self) -> None:
        """End an update: the last line of the loop. It counts, saves when that is due, and stops when it is told to.

        All ranks must call it equally often. Told to stop (by a time limit, preemption, `cancel`), all save at the same
        step and end, with exit code 0; the run goes on there when it is started again.

        Raises:
            RunFailedError: a checkpoint or a record cannot be written.
        """
        keeper = self._keeper
        try:
            keeper.step()
        except Stopped as error:
            if keeper.ends_with_batches:
                keeper.loop.__exit__(Stopped, error, error.__traceback__)
            raise

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

    def __init__(
        self, session: Session, precision: Precision, wrapped: Sequence[tuple[Strategy, nn.Module]],
        given: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.session = session
        self.writer = session.writer
        self.precision = precision
        self.checkpoints = checkpoints_of(self.writer, self.config, self.dist, session.reports.keeper)
        self.values: dict[str, Any] = {}
        objects: dict[str, Any] = {}
        for name, item in given.items():
            if not name[0].isalpha() or name in ("step", "steps"):
                fix = "Begin it with a letter, and take neither step nor steps, which the state has itself."
                raise UserError(f"{name}= cannot be saved by that name.", why="It becomes a file's.", fix=fix)
            (objects if has_state(item) else self.values)[name] = item
        self.batches = [item for item in objects.values() if isinstance(item, RankBatches)]
        self.objects = SavedObjects(objects, self.values, self.dist)
        self.trained = Means(self.dist)
        self.evaluated = Means(self.dist)
        self.pruner = Pruner(self.writer.run, self.dist)
        self.progress = Progress()
        self.test: dict[str, float] | None = None
        self._wrapped = wrapped
        self._optimizers = [item for item in objects.values() if isinstance(item, torch.optim.Optimizer)]
        self._strategies = [item for item, _ in wrapped if isinstance(item, HasTensors)]
        self._survivor = Survivor()
        self._notes: LoopNotes | None = None
        self._is_owed = False
        """The work that follows an update is still to be done: ranks have failed right after it."""
        self._vote = StopVote(self.dist)
        self._metrics: Loggers
        self._beat: Callable[[], None] = session.reports.beat
        self._validations = 0
        self._recorded = (0, time.monotonic())
        self._batches_unstepped = 0
        self._known: set[str] = set()
        """Names of metrics that are described."""
        self._validated = AllOrNone(self.dist)
        self._has_begun = False
        self.loop = ExitStack()
        """Context in which this keeper is open."""
        self.ends_with_batches = True
        """Nobody has said by a ``with`` where the loop ends."""

    @property
    def config(self) -> Config:
        return self.session.config

    @property
    def dist(self) -> Distributed:
        return self.session.dist

    @property
    def steps(self) -> int:
        return self.progress.step

    @contextmanager
    def open(self) -> Iterator[State]:
        """Context of the loop: restores the newest checkpoint at its begin, and saves the last one at its end.

        Raises:
            UserError: the checkpoint is of other objects, or this attempt has ended already.
        """
        session = self.session
        self.dist.raise_together(self._ended_already())
        session.reports.starting.at("restore the newest checkpoint")
        session.uploading.uploads = open_remote(self.config.checkpoint.remote, self.writer, self.dist)
        stopped: Stopped | None = None
        with closing(self.checkpoints):
            self._restore()
            hosts = session.hosts()
            facts: dict[str, Any] = {"params": self._params, "precision": self.precision.name}
            self.checkpoints.forget_memory()
            known = {"total_steps": self._total} if self._total else {}
            parent = ProcessId.of(os.getppid()).word()  # whoever starts the ranks again finds the run by it
            session.started(hosts, step=self.steps, parent=parent, **known, **facts)
            metrics = self._described()
            facts |= {"resumed_step": self.steps, "metrics": metrics, "total_steps": self._total}
            live = session.live(hosts, 2, last=self._survivor.save, **facts)
            with live as (self._metrics, self._beat):
                session.reports.starting.at("")
                self._recorded = (self.steps, time.monotonic())
                self._seed()
                try:
                    for batches in self.batches:
                        batches.before = partial(self._before_batch, batches)
                        batches.planned = self._planned
                        batches.after = self._after_batches
                        batches.is_saved = True
                    self._arm()
                    if self._is_owed:
                        self._conclude()
                    yield State(self)
                    self._warn_of_no_steps("the loop has ended")
                    self._record(self.trained)
                    self._record(self.evaluated)
                except Stopped as error:
                    if not self.pruner.why:
                        raise
                    stopped = error
                except RuntimeError as error:
                    self._survivor.outlives(error)
                    raise
                finally:
                    self._vote.finish()
                self._save()
                self.checkpoints.settle()
                self._survivor.disarm()
            self._summarize()
            self.checkpoints.finish()
            if self.dist.is_main:
                self.writer.ended("COMPLETED", step=self.steps)
            session.uploading.seconds = WAIT_AT_END
        if stopped is not None:
            raise stopped

    def _described(self, *names: str) -> TaskMetrics:
        """Describe the metrics of the run by their names, and return what is known of all."""
        if self.dist.is_main:
            describe_names(self.writer.run, names, self._by.removeprefix("val/"))
        return task_metrics(self.writer.run)

    @property
    def _by(self) -> str:
        """Metric that the best model is judged by."""
        return self.config.checkpoint.best or "val/loss"

    def _ended_already(self) -> UserError | None:
        if not self.dist.is_main or self.writer.number not in attempts_that(self.writer.run, "ended"):
            return None
        fix = "Save all of it in one rank.saved(), or make runs of them: one script each."
        return UserError("This run has ended: it has one rank.saved().", why="Its checkpoints are those.", fix=fix)

    @property
    def _total(self) -> int:
        """Updates of the whole run, where one call of `State.step` a batch tells them; else 0."""
        return self.batches[0].total if len(self.batches) == 1 else 0

    @property
    def _params(self) -> int:
        return sum(item.numel() for item in self.objects.parameters.values() if item.requires_grad)

    def _restore(self) -> None:
        stems = [*self.objects.names, *map(_stem, range(len(self._strategies)))]
        found = self.checkpoints.newest(further=stems)
        if found is None:
            return
        restored, source = found
        state = restored.state
        self.objects.require_same(state.get("objects", {}))
        self.objects.restore(state["objects"], source, set(state["stems"]))
        for index, strategy in enumerate(self._strategies):
            if _stem(index) in state["stems"]:
                load_where_named(strategy.tensors(), source(_stem(index)), self.dist)
        self.precision.load_state_dict(state["precision"])
        self.progress = Progress.of(state)
        self.checkpoints.best = self.progress.best_step
        self._validations = state["validations"]
        self._is_owed = state.get("is_owed", False)
        for key, sums in state["window"].items():
            means = self.trained if key.startswith("train/") else self.evaluated
            means.go_on({key: sums})
        before = state["world_size"]
        if before != self.dist.world_size:
            self.say(f"Note: ranks: {self.dist.world_size} where {before} saved, with the same data in the same order.")

    def _arm(self) -> None:
        """Have this rank save what all have trained, should others fail, where it knows all of that."""
        keeper = self.session.reports.keeper
        replicated = [id(parameter) for _, model in self._wrapped for parameter in model.parameters()]
        trained = [id(item) for one in self._optimizers for group in one.param_groups for item in group["params"]]
        if keeper is None or not trained or not set(trained).issubset(replicated):
            return
        if is_whole(self.dist, [strategy for strategy, _ in self._wrapped]):
            self._survivor.arm(keeper)
            self._notes = LoopNotes(self._survivor, self.objects, self._optimizers, self.dist)
            self._notes.take(self.steps, self._own_counted(is_owed=self._is_owed))

    def _own_counted(self, *, is_owed: bool) -> dict[str, Any]:
        """Return what this rank would save alone. ``is_owed``: what follows the update is still to be done."""
        return self._counted({**self.trained.own(), **self.evaluated.own()}) | {"is_owed": is_owed}

    def _seed(self) -> None:
        seed_all(derive_seed(self.config.seed, self.steps, self.dist.rank), self.dist.device)

    def step(self) -> None:
        """See `State.step`."""
        self.progress.step += 1
        self._batches_unstepped = 0
        self._beat()
        if self._notes is not None:
            self._notes.take(self.steps, self._own_counted(is_owed=True))
        self._conclude()

    def _conclude(self) -> None:
        """Do what follows an update: record, vote, save."""
        ends_epoch = any(batches.ends_epoch for batches in self.batches)
        if self.steps % self.config.monitor.log_every == 0 or ends_epoch:
            self._record(self.trained)
        if ends_epoch:
            self._record(self.evaluated)
        elif not self.batches:
            self._record_where_all_have()
        stop = self.poll(self._vote, self.session.stop.requested)
        if self.pruner.why:
            self.remark("pruned", step=self.steps, total_steps=self._total, why=self.pruner.why)
            self.say(f"Pruned after {self.steps} steps: {self.pruner.why}.")
            raise Stopped(0)
        if stop or self._vote.save or self._is_due(ends_epoch):
            self._save()
        if stop:
            self.checkpoints.settle()
            self.session.hand_back(self.steps)
            self.session.stop.leaves_process = True
            raise Stopped(0)
        self._seed()
        if self._notes is not None:
            self._notes.finished(self.steps, self._own_counted(is_owed=False))

    def _is_due(self, ends_epoch: bool) -> bool:
        saving = self.config.checkpoint
        if self._total and self.batches[0].position == self._total:  # the last one comes with the end of the loop
            return False
        if self.progress.best_step == self.steps:
            return True
        if saving.every_steps is not None and self.steps % saving.every_steps == 0:
            return True
        return ends_epoch and saving.every_epochs is not None and (self.batches[0].epoch + 1) % saving.every_epochs == 0

    def _before_batch(self, batches: RankBatches) -> None:
        """Record what was validated after the last update, as of its step, and save a new best model."""
        self._beat()
        if self._has_begun and batches.position % batches.steps_per_epoch:
            is_best = self._record_where_all_have()
        else:  # all ranks come here between two epochs, whoever of them has validated
            is_best = self._record(self.evaluated)
        self._has_begun = True
        if is_best:
            self._save()
        self._batches_unstepped += 1
        if self._batches_unstepped == _MANY:
            self._warn_of_no_steps(f"{_MANY} batches were taken")

    def _planned(self) -> None:
        """Tell of how many updates there will be, where the loop says so after its start."""
        if self._total and self.dist.is_main:
            self.writer.started(total_steps=self._total)
            self._metrics.begin(self._total)

    def _after_batches(self) -> None:
        """End where no ``with`` says so, once the batches of all data are over."""
        if self.ends_with_batches and all(batches.is_over for batches in self.batches):
            self.loop.close()

    def _warn_of_no_steps(self, when: str) -> None:
        if self._batches_unstepped > 1 and self.dist.is_main:
            terminal.warn(f"state.step() was not called, and {when}: without it nothing is saved, and nothing stops.")

    def log(self, split: str, values: Mapping[str, Any]) -> None:
        """See `Rank.log`."""
        means = self.trained if split == "train" else self.evaluated
        means.add(split, values)

    def _record_where_all_have(self) -> bool:
        """Record a validation in the middle of an epoch. Returns True for a new best model.

        Raises UserError, one step later and on every rank, where only some ranks have logged one.
        """
        odd = self._validated.odd()
        if odd:
            raise UserError(
                f"Only {plural(len(odd), 'rank')} of {self.dist.world_size} logged a validation: {odd}.",
                why="In the middle of an epoch all ranks save the best model at that step.",
                fix='Call rank.log("val", ...) on every rank there, or at the end of an epoch on any.',
            )
        has = not self.evaluated.is_empty
        return self._validated.have(has) and self._record(self.evaluated)

    def _record(self, means: Means) -> bool:
        """Write a record of each split that any rank has logged something of. Returns True for a new best model."""
        sums = means.sums()
        means.clear()
        splits: dict[str, dict[str, float]] = {}
        for key, (total, count) in sums.items():
            split, _, name = key.partition("/")
            splits.setdefault(split, {})[name] = total / count
        since, began = self._recorded
        now = time.monotonic()
        if means is self.trained:
            self._recorded = (self.steps, now)
            self.progress.train_seconds += now - began
        if "val" in splits:
            self._validations += 1
        epoch = float(self._validations)
        speed: dict[str, float] = {}
        if self._total:
            batches = self.batches[0]
            epoch = round(batches.position / batches.steps_per_epoch, 4)
            if now > began and self.steps > since:
                speed["images_per_sec"] = round((self.steps - since) * batches.global_batch_size / (now - began), 2)
        where = {"time": round(time.time(), 3), "step": self.steps, "epoch": epoch}
        names = {name for values in splits.values() for name in values}
        if names - self._known and self.dist.is_main:
            self._described(*sorted(names))
        self._known |= names
        for split, values in splits.items():
            more = speed if split == "train" else {}
            self._metrics.log({**where, "split": split, **values, **more})
        self.test = splits.get("test", self.test)
        return "val" in splits and self._judge(splits["val"], epoch)

    def _judge(self, val: dict[str, float], epoch: float) -> bool:
        """Compare a validation with those before it, and the run with the others of its sweep."""
        name = self._by.removeprefix("val/")
        if name not in val:
            return False
        higher = metric_named(name).higher_is_better
        is_best = self.progress.judge(val, self._by, higher_is_better=higher)
        if not self._total or self.batches[0].position < self._total:
            self.pruner.look(val, name, epoch, every=epoch / self._validations, higher_is_better=higher)
        return is_best

    def _save(self) -> None:
        plain, stems = self.dist.together(self.objects.packed)
        for index, strategy in enumerate(self._strategies):
            stems[_stem(index)] = dict(strategy.tensors())
        counted = self._counted({**self.trained.sums(), **self.evaluated.sums()})
        state = {"objects": plain, "stems": sorted(stems), **counted}
        step = self.steps

        def written() -> None:
            if self.dist.is_main:
                self.writer.saved(step)
                self.session.uploading.look()

        self._beat()
        self.checkpoints.best = self.progress.best_step
        self.checkpoints.save_tensors(stems, step=step, state=state, done=written)
        self._beat()

    def _counted(self, window: Mapping[str, Any]) -> dict[str, Any]:
        """Return the plain values of a checkpoint that are not the user's."""
        return {
            "precision": self.precision.state_dict(),
            "world_size": self.dist.world_size,
            "progress": asdict(self.progress),
            "validations": self._validations,
            "window": window,
        }

    def _summarize(self) -> None:
        if not self.dist.is_main:
            return
        progress = self.progress
        summary = {
            "outcome": "pruned" if self.pruner.why else "finished",
            "steps": progress.step,
            "best": {self._by: progress.best},
            "best_step": progress.best_step,
            "val": progress.val,
            "test": self.test,
            "train_seconds": round(progress.train_seconds, 3),
            "world_size": self.dist.world_size,
            "precision": self.precision.name,
            "skipped_steps": self.precision.skipped_steps,
            "device": device_name(self.dist.device),
            "params": self._params,
            "stopped_early": self.pruner.why or None,
        }
        self.write(self.writer.run.summary, summary, indent=2)


def _stem(index: int) -> str:
    """Stem of the tensors of the strategy of a module; no name of an object has a dash."""
    return f"strategy-{index}"
