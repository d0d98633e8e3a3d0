"""Bookkeeping of a training, for every loop: validation, checkpoints and the final summary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from trainkit.checkpoint.alone import Stems, stems_of
from trainkit.checkpoint.save import Checkpoints, Restored
from trainkit.common.errors import UserError
from trainkit.config.schema import Config
from trainkit.distributed.device import device_name
from trainkit.distributed.process_group import Distributed, StopVote
from trainkit.distributed.watchdog import Pace
from trainkit.monitor.base import Logger
from trainkit.monitor.profiler import Profiler
from trainkit.run.events import Attempt, Remark, read_events
from trainkit.run.folder import RunDir
from trainkit.training.clock import CHECKPOINT, END, EVALUATION, Clock
from trainkit.training.costs import costs
from trainkit.training.evaluation import EvaluationPass, measure, measure_saved
from trainkit.training.progress import Progress, Pruner
from trainkit.training.saved_model import told_input
from trainkit.training.saver import Saver
from trainkit.training.survivor import is_whole
from trainkit.training.tasks.base import require_same_classes
from trainkit.training.tasks.meter import Mistakes, confusion_json
from trainkit.training.train_state import TrainState

MOST_ROLLBACKS = 3
"""A run that diverges after each of this many checkpoints does so whatever the data."""


def too_many(files: Sequence[str], most: int) -> UserError:
    """The error for more broken images than may be."""
    count = "1 image is" if len(files) == 1 else f"{len(files)} images are"
    what = f"{count} broken, and data.max_broken={most}."
    why = f"These cannot be decoded: {', '.join(files[:5])}."
    if len(files) > 5:
        why = f"{why[:-1]} and {len(files) - 5} more."
    fix = "Replace or delete the files, or raise data.max_broken."
    return UserError(what, why=why, fix=fix, key="data.max_broken")


def go_on(state: TrainState, checkpoints: Checkpoints) -> tuple[Restored | None, Progress]:
    """Restore the newest whole checkpoint that is a training's, and how far it was; None if there is none.

    An average of the weights that it does not have begins with its weights. If the run is longer by now, the validation
    of its old end does not count, unless it was due anyway.

    Raises UserError where it was trained on other classes; on every rank.
    """
    restored = checkpoints.restore(
        state.model, state.optimizer, into=state.further_tensors(), accept=lambda found: Progress.of(found.state)
    )
    progress = Progress()
    if restored is not None:
        progress = Progress.of(restored.state)
        if progress.step < state.total_steps:
            progress.take_back_end()
        checkpoints.spared = progress.spared
        require_same_classes(restored.state, state.splits, state.config.data.root)
        state.precision.load_state_dict(restored.state["precision"])
    if state.ema is None:
        progress.ema_updates = 0
    elif not progress.ema_updates:
        state.ema.restart()
    return restored, progress


def plain_state(state: TrainState, progress: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain values of a checkpoint."""
    return {
        "progress": progress,
        "precision": state.precision.state_dict(),
        "world_size": state.dist.world_size,
        "micro_batch_size": state.micro_batch_size,
        **told_input(state.splits),
    }


def survives(state: TrainState) -> bool:
    """Return whether a rank that is left alone has the whole state."""
    return state.precision.name != "o2" and is_whole(state.dist, [state.strategy])


def as_finished(
    state: TrainState, progress: Mapping[str, Any], buffers: Mapping[int, Tensor]
) -> tuple[Stems, Mapping[str, Any]]:
    """Collect the checkpoint of an update that is finished, whatever has been begun since; asks no other rank.

    Args:
        buffers: address of each buffer of the model -> a copy of it.
    """
    stems = stems_of(state.model, state.optimizer, state.further_tensors())
    found: dict[str, dict[str, Tensor]] = {}
    for stem, named in stems.items():
        found[stem] = {name: buffers.get(value.data_ptr(), value) for name, value in named.items()}
    return found, plain_state(state, progress)


@dataclass(frozen=True)
class Instruments:
    """Parts of a training that watch it, all of them optional."""

    beat: Callable[[], None] = lambda: None
    """Called whenever this rank has made progress."""
    clock: Clock = field(default_factory=Clock)
    hosts: Sequence[str] = ()
    """Host of each rank, where that is known."""
    saved: Callable[[], None] = lambda: None
    """Called on rank 0 when a checkpoint is on disk."""
    profiler: Profiler = field(default_factory=lambda: Profiler(RunDir(Path()), None))
    pruner: Pruner | None = None
    """Comparison with the other runs of a sweep."""
    pace: Pace = field(default_factory=lambda: Pace(None, 0.0))


@dataclass(frozen=True)
class Keeper(Saver):
    """Saves, records and stops our own loops. Every rank calls every method."""

    state: TrainState
    writer: Attempt
    checkpoints: Checkpoints
    metrics: Logger
    progress: Progress
    instruments: Instruments = field(default_factory=Instruments)

    @property
    def config(self) -> Config:
        return self.state.config

    @property
    def dist(self) -> Distributed:
        return self.state.dist

    def should_stop(self, vote: StopVote, requested: bool) -> bool:
        """Vote on stopping, saving and news, and go on with a checkpoint that is under way."""
        broken = self.state.broken
        return self.poll(vote, requested, news=bool(broken.met or broken.waited), tell=self.tell_broken)

    def tell_broken(self) -> None:
        """Tell all ranks of the broken images that any has met; an event names each, once in the life of a run. Events
        name files that were waited for, too.

        Raises UserError on every rank where they are more than ``data.max_broken``.
        """
        known = self.progress.broken
        found = dict[str, str]()
        waited = dict[str, float]()
        for met, waited_for in self.state.dist.gather_json(self.state.broken.take()):
            found |= met
            waited |= waited_for
        for file, seconds in waited.items():
            self.remark("data_waited", file=file, seconds=seconds)
        new = sorted(found.keys() - set(known))
        if new and self.state.dist.is_main:
            written = {event.get("file") for event in read_events(self.writer.run, "broken_image")}  # by other attempts
            for file in sorted(set(new) - written):
                self.remark("broken_image", file=file, why=found[file])
        if len(known) + len(new) > self.state.broken.most:
            raise too_many([*known, *new], self.state.broken.most)
        known += new

    def save(
        self, *, optimizer: bool = True, extra: Mapping[str, Mapping[str, Tensor]] | None = None, **more: Any
    ) -> None:
        """Write a checkpoint of the present step, or begin to (``checkpoint.asynchronous``): `settle` waits for it.

        Args:
            optimizer: with its state.
            extra: tensors that belong to it besides the model's and the optimizer's, as `Checkpoints.save` takes them.
            more: further plain values for its ``state.json``.
        """
        state = self.state
        progress = self.progress
        step = progress.step

        def written() -> None:
            if state.dist.is_main:
                self.writer.saved(step, **more)
                self.instruments.saved()

        with self.instruments.clock.during(CHECKPOINT):
            self.instruments.clock.settle(progress)
            self.instruments.beat()
            self.tell_broken()
            self.checkpoints.spared = progress.spared
            content = {**plain_state(state, asdict(progress)), **more}
            trained = state.optimizer if optimizer else None
            extra = {**state.further_tensors(), **(extra or {})}
            self.checkpoints.best = progress.best_step
            self.checkpoints.save(state.model, trained, step=step, state=content, extra=extra, done=written)
            self.instruments.beat()

    def settle(self) -> None:
        """Wait until what has been saved is on the disk. Raises RunFailedError if that cannot be."""
        with self.instruments.clock.during(CHECKPOINT):
            self.checkpoints.settle()
            self.instruments.beat()


@dataclass(frozen=True)
class Recorder(Keeper):
    """Validates and sums up a training by epochs; what is due when is the loop's to ask."""

    @property
    def pruned(self) -> str:
        """Why its sweep stops the run; empty if it does not."""
        pruner = self.instruments.pruner
        return "" if pruner is None else pruner.why

    def validation_is_due(self) -> bool:
        """After the present step: at the end, and every ``train.eval_every_epochs``."""
        return self._is_due(epochs=self.state.config.train.eval_every_epochs)

    def is_added_by_end(self) -> bool:
        """Return whether a validation is due only because the run ends here, and would not be in a longer one."""
        every = self.state.steps_per_epoch * self.state.config.train.eval_every_epochs
        return self.progress.step == self.state.total_steps and self.progress.step % every != 0

    def saving_is_due(self) -> bool:
        """After the present step: at the end, and by ``checkpoint.every_epochs`` and ``every_steps``."""
        checkpoint = self.state.config.checkpoint
        return self._is_due(epochs=checkpoint.every_epochs, steps=checkpoint.every_steps)

    def _is_due(self, *, epochs: int | None, steps: int | None = None) -> bool:
        rhythms = (self.state.total_steps, self.state.steps_per_epoch * (epochs or 0), steps)
        return any(every and self.progress.step % every == 0 for every in rhythms)

    def stops_early(self) -> bool:
        """Return whether training ends early: ``train.early_stopping_patience`` validations in a row were no better, or
        the sweep stops the run. All ranks answer alike, for they judge by the same numbers."""
        patience = self.state.config.train.early_stopping_patience
        return bool(self.pruned) or (patience is not None and self.progress.stalled >= patience)

    def is_over(self) -> bool:
        """Nothing is left to train."""
        return self.progress.step >= self.state.total_steps or self.stops_early()

    def tell_early_stop(self) -> str:
        """Why training has ended before its last update, said and written as an event; empty if it has not."""
        progress = self.progress
        total = self.state.total_steps
        if progress.step >= total or not self.stops_early():
            return ""
        kind: Remark = "stopped_early"
        how = "Stopped early"
        why = f"{self.state.judged_by} has not improved in {progress.stalled} validations in a row"
        if self.pruned:
            kind = "pruned"
            how = "Pruned"
            why = self.pruned
        self.remark(kind, step=progress.step, total_steps=total, best=progress.best, why=why)
        self.say(f"{how} after {progress.step} of {total} steps: {why}.")
        return why

    def validate(self, where: Mapping[str, Any], should_stop: Callable[[], bool] = lambda: False) -> bool | None:
        """Validate, record the metrics with ``where``, and return whether this model is the best so far.

        Returns None where ``should_stop`` ended the pass half way.
        """
        state = self.state
        progress = self.progress
        config = state.config
        by = state.judged_by
        with self.instruments.clock.during(EVALUATION):
            found = measure(
                state, EvaluationPass(state.splits.val, should_stop=should_stop, beat=self.instruments.beat)
            )
        if found is None:
            return None
        self.tell_broken()
        name = by.removeprefix("val/")
        metric = state.metrics.find(name)
        higher = metric is None or metric.higher_is_better
        progress.before_end = progress.judged() if self.is_added_by_end() else None
        min_delta = config.train.early_stopping_min_delta
        better = progress.judge(found.metrics, by, higher_is_better=higher, min_delta=min_delta)
        if config.schedule.name == "plateau" and progress.flat > config.schedule.patience:
            progress.flat = 0
            progress.falls += 1
        self.metrics.log({**where, "split": "val", **found.metrics})
        pruner = self.instruments.pruner
        if pruner is not None and progress.step < state.total_steps:  # a run at its end need not be ended
            epoch = progress.step / state.steps_per_epoch
            every = config.train.eval_every_epochs
            pruner.look(found.metrics, name, epoch, every=every, higher_is_better=higher)
        if better:
            kind = "ema" if name.startswith("ema_") else "raw"
            self._show(found.mistakes.get(kind), "val", progress.step)
        return better

    def test(self, where: Mapping[str, Any]) -> dict[str, float]:
        """Test metrics of the best weights, recorded with ``where``; which class was taken for which, in a file."""
        self.instruments.clock.to(EVALUATION)
        state = self.state
        step = self.progress.step
        best = step if self.progress.best_step is None else self.progress.best_step
        one_pass = EvaluationPass(state.splits.test, beat=self.instruments.beat, confusion=True)
        if best == step:
            found = measure(state, one_pass)
            assert found is not None
        else:
            kinds = ["raw"] if state.ema is None else ["raw", "ema"]
            best, found = measure_saved(state, self.checkpoints, best, one_pass, kinds=kinds)
        self.instruments.clock.to(END)
        self.tell_broken()
        if state.dist.is_main and found.counts:  # before the record: loggers show it with that
            content = confusion_json(state.splits.info, found.counts, split="test", step=best)
            self.write(self.writer.run.confusion, content)
        self.metrics.log({**where, "split": "test", **found.metrics})
        self._show(found.mistakes.get("raw"), "test", best)
        return found.metrics

    def _show(self, found: Mistakes | None, split: str, step: int) -> None:
        """Keep the images that were told wrong most surely, for the report. Every rank must call it."""
        if found is not None:
            images = found.read()
            with suppress(OSError):  # a full disk: pictures are nothing to end a run for
                if self.state.dist.is_main:
                    self.write(self.writer.run.mistakes(split), {"split": split, "step": step, "images": images})

    def roll_back(self, position: int) -> bool:
        """Be again where the newest whole checkpoint is, with the data from ``position`` on; and save that.

        False if there is none, or it has been tried too often.
        """
        progress = self.progress
        before = self.progress.step
        if progress.rollbacks == MOST_ROLLBACKS:
            return False
        self.state.survivor.changes()
        restored, there = go_on(self.state, self.checkpoints)
        if restored is None:
            return False
        # What no way back makes better.
        there.seconds = progress.seconds
        there.broken = progress.broken
        there.position = position
        there.rollbacks = progress.rollbacks + 1
        there.nonfinite = 0
        progress.take_over(there)
        self.remark("rolled_back", step=progress.step, from_step=before, position=position)
        self.save()  # whoever goes on from here does not meet that data again
        return True

    def summarize(self, outcome: str, *, epochs: float, test: Mapping[str, float] | None, **more: Any) -> None:
        """Write ``summary.json``, of what is on the disk by then; None is null there, as is what is not finite."""
        self.settle()
        state = self.state
        progress = self.progress
        self.instruments.clock.settle(progress)
        seconds = progress.train_seconds
        speed = round(progress.images / seconds, 2) if seconds else None
        spent = costs(state, self.writer.run, progress.seconds, speed)
        if not state.dist.is_main:
            return
        summary: dict[str, Any] = {
            "outcome": outcome,
            "steps": progress.step,
            "epochs": round(epochs, 4),
            "best": {state.judged_by: progress.best},
            "best_step": progress.best_step,
            "val": progress.val,
            "test": test,
            "train_seconds": round(seconds, 3),
            "images_per_sec": speed,
            "world_size": state.dist.world_size,
            "grad_accum_steps": state.grad_accum_steps,
            "micro_batch_size": state.micro_batch_size,
            "precision": state.precision.name,
            "skipped_steps": state.precision.skipped_steps,
            "broken_images": len(progress.broken),
            "device": device_name(state.dist.device),
            "params": state.num_parameters,
            **spent,
            **more,
        }
        self.write(self.writer.run.summary, summary, indent=2)
        if spent["advice"]:
            self.say(f"Faster: {spent['advice']}.")
