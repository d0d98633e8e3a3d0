"""What comes of a training, for every loop: how far it is, its best model, its checkpoints and its summary."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainkit import fileio
from trainkit.checkpoint.save import Checkpoints, Restored
from trainkit.data.base import Samples
from trainkit.distributed.device import device_name
from trainkit.distributed.process_group import Distributed
from trainkit.errors import UserError
from trainkit.monitor import Logger
from trainkit.monitor.profiler import Profiler
from trainkit.run.events import Attempt, Remark, read_events
from trainkit.run.folder import RunDir
from trainkit.saved_model import STEMS, told_input
from trainkit.tasks.base import require_same_classes
from trainkit.tasks.meter import MOST_CLASSES, Calibration, Confusion, Counts, Meter, Mistakes, Pool, confusion_json
from trainkit.training.build import TrainState
from trainkit.training.pruning import Pruner
from trainkit.training.timing import CHECKPOINT, END, EVALUATION, Clock, costs

MOST_ROLLBACKS = 3
"""A run that diverges after each of this many checkpoints does so whatever the data."""


@dataclass(frozen=True)
class Measured:
    """What `evaluate` found of each kind of weights."""

    metrics: dict[str, float] = field(default_factory=dict)
    """``loss``, the task's metrics and ``samples``; of averaged weights ``ema_loss`` and so on."""
    counts: dict[str, Counts] = field(default_factory=dict)
    """Empty where nobody asked for them, and where the task knows no classes or too many."""
    ece: dict[str, float] = field(default_factory=dict)
    """`Calibration`; as ``counts``."""
    mistakes: dict[str, Mistakes] = field(default_factory=dict)
    """Empty where the task does not say what is wrong."""


def measure(state: TrainState, samples: Samples, **how: Any) -> Measured | None:
    """Evaluate the model as it is, and its average; None if it was told to stop. ``how``: as `evaluate` takes it."""
    found = Measured()
    for kind in STEMS if state.ema is not None else ("raw",):
        with state.ema.in_model() if state.ema is not None and kind == "ema" else nullcontext():
            sync_buffers(state.model, state.dist)
            if not evaluate(state, samples, found, kind, **how):
                return None
    return found


def measure_saved(
    state: TrainState,
    checkpoints: Checkpoints,
    step: int,
    samples: Samples,
    *,
    kinds: Sequence[str],
    or_newest: bool = True,
    **how: Any,
) -> tuple[int, Measured]:
    """Evaluate the weights in the checkpoint of ``step``, which the model then has; and the step whose they were.

    Raises:
        UserError: as `Checkpoints.load_weights` does.
    """
    found = Measured()
    for kind in kinds:
        step = checkpoints.load_weights(state.model, step, or_newest=or_newest, stem=STEMS[kind])
        evaluate(state, samples, found, kind, **how)
    return step, found


def evaluate(
    state: TrainState,
    samples: Samples,
    found: Measured,
    kind: str = "raw",
    *,
    batch_size: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    beat: Callable[[], None] = lambda: None,
    confusion: bool = False,
) -> bool:
    """Add to ``found`` what one pass over ``samples`` gives; False if it was told to stop.

    Each sample counts once, whatever the number of ranks: the ranks run equally many forward passes, because
    collectives inside them would otherwise wait for ever, and what pads the last ones is masked. So are broken images.

    Args:
        kind: of the weights that the model has now.
        batch_size: samples per rank and forward pass; None: as in training.
        should_stop: asked before each batch; must answer alike on all ranks.
        beat: called for each batch.
        confusion: count which class is taken for which.
    """
    model, dist, task, classes = state.model, state.dist, state.task, state.splits.info.num_classes
    meter = Meter(task, dist)
    pool = Pool(task, dist) if task.has("pooled") else None
    mistakes = Mistakes(task, dist) if task.has("wrong") else None
    is_counted = confusion and task.has("taken_for") and classes <= MOST_CLASSES
    counts = Confusion(task, classes, dist) if is_counted else None
    calibration = Calibration(task, dist) if is_counted and task.has("probabilities") else None
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), state.eval_batches(samples, batch_size) as batches:
            for images, labels, mask in batches:
                beat()
                if should_stop():
                    return False
                with state.precision.autocast():
                    output = model(state.normalized(images))
                output = output.float()
                meter.add_masked(task.loss(output, labels, "none"), output, labels, mask)
                for each in (pool, mistakes, counts, calibration):
                    if each is not None:
                        each.add(images, output, labels, mask)
    finally:
        model.train(was_training)
    metrics = meter.read()
    if pool is not None and metrics["samples"]:
        metrics |= pool.read()
    found.metrics.setdefault("samples", metrics.pop("samples"))
    prefix = "ema_" if kind == "ema" else ""
    found.metrics.update({f"{prefix}{key}": value for key, value in metrics.items()})
    if counts is not None:
        found.counts[kind] = counts.read()
    if calibration is not None:
        found.ece[kind] = calibration.read()
    if mistakes is not None:
        found.mistakes[kind] = mistakes
    return True


def sync_buffers(model: nn.Module, dist: Distributed) -> None:
    """Give every rank rank 0's buffers (BatchNorm's running statistics).

    Without it ranks that shard a model would evaluate with statistics of their own samples only.
    """
    if dist.world_size > 1:
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, src=0)


def too_many(files: Sequence[str], most: int) -> UserError:
    """The error for more broken images than may be."""
    more = f" and {len(files) - 5} more" if len(files) > 5 else ""
    what = f"{len(files)} image{' is' if len(files) == 1 else 's are'} broken, and data.max_broken={most}."
    why = f"These cannot be decoded: {', '.join(files[:5])}{more}."
    fix = "Replace or delete the files, or raise data.max_broken."
    return UserError(what, why=why, fix=fix, key="data.max_broken")


@dataclass
class Progress:
    """How far a run is. Everything else of its state is in the model and the optimizer."""

    step: int = 0
    """Updates. One that fp16 skips is none; one that came to nothing for other reasons is."""
    position: int = 0
    """Global batches taken from the data: ``step``, and those that fp16 skipped or a rollback passed over."""
    nonfinite: int = 0
    """How many updates in a row, up to here, were not finite."""
    rollbacks: int = 0
    validated_step: int = 0
    """Step of the last finished validation; behind ``step`` if a stop request fell into it."""
    best: float | None = None
    best_step: int | None = None
    best_by: str | None = None
    """What ``best`` was judged by."""
    stalled: int = 0
    """Validations in a row, up to here, that were no better than ``reference``."""
    flat: int = 0
    """The same since the rate fell last, by ``schedule.name=plateau``."""
    falls: int = 0
    """How often it has fallen."""
    reference: float | None = None
    """What the next validation is compared with: the last one that was better by ``early_stopping_min_delta``."""
    train_seconds: float = 0.0
    """Seconds spent in training steps over all attempts, validation and saving excluded."""
    seconds: dict[str, float] = field(default_factory=dict)
    """And on what all time went, by the names of `trainkit.training.timing.PARTS`."""
    images: int = 0
    """Images trained on over all attempts."""
    val: dict[str, float] = field(default_factory=dict)
    """The last validation's metrics."""
    window: list[float] = field(default_factory=list)
    """What has been measured since the last train record: `Meter.sums`."""
    ema_updates: int = 0
    """How many updates are in the averaged weights; 0: there are none."""
    broken: list[str] = field(default_factory=list)
    """Files of images that are broken, of those that any rank has met."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Progress:
        """As `Recorder.save` left it.

        Raises KeyError, TypeError or ValueError for what it has not written.
        """
        progress = cls(**state["progress"])
        if not 0 <= progress.validated_step <= progress.step or progress.position < 0:
            raise ValueError(f"its progress is impossible: {progress}")
        return progress

    def take_over(self, other: Progress) -> None:
        """Be where ``other`` is."""
        vars(self).update(vars(other))

    def forget_best(self) -> None:
        """Nobody should take the model that was the best so far: the next one that is validated takes its place."""
        self.best = self.reference = None

    def judge(self, val: dict[str, float], by: str, *, higher_is_better: bool, min_delta: float = 0.0) -> bool:
        """Take note of a validation after the present step. Is this model the best so far?

        What is not a finite number is never better, and neither is a model whose loss is none: a score of some images
        is NaN then, whatever the accuracy on the others.

        Args:
            by: what it is judged by, such as val/loss.
            min_delta: by how much it must be better to be no stand-still, for early stopping.
        """
        name = by.removeprefix("val/")
        value, loss = val[name], val.get("ema_loss" if name.startswith("ema_") else "loss", 0.0)
        self.val, self.validated_step = val, self.step
        if self.best_by not in (None, by):  # two measures do not compare
            self.forget_best()

        is_finite = math.isfinite(value) and math.isfinite(loss)

        def beats(other: float | None, delta: float = 0.0) -> bool:
            if other is None or not is_finite:
                return is_finite
            return (value - other if higher_is_better else other - value) > delta

        self.stalled, self.flat = self.stalled + 1, self.flat + 1
        if beats(self.reference, min_delta):
            self.stalled, self.flat, self.reference = 0, 0, value
        if better := beats(self.best):
            self.best, self.best_step, self.best_by = value, self.step, by
        return better


def go_on(state: TrainState, checkpoints: Checkpoints) -> tuple[Restored | None, Progress]:
    """Restore the newest whole checkpoint that is a training's, and how far it was; None if there is none.

    An average of the weights that it does not have begins with its weights.

    Raises UserError where it was trained on other classes; on every rank.
    """
    restored = checkpoints.restore(
        state.model, state.optimizer, into=state.further_tensors(), accept=lambda found: Progress.of(found.state)
    )
    progress = Progress()
    if restored is not None:
        progress = Progress.of(restored.state)
        require_same_classes(restored.state, state.splits, state.config.data.root)
        state.precision.load_state_dict(restored.state["precision"])
    if state.ema is None:
        progress.ema_updates = 0
    elif not progress.ema_updates:
        state.ema.restart()
    return restored, progress


@dataclass(frozen=True)
class Recorder:
    """Validates, saves and sums up; what is due when is the loop's to ask. Every rank calls every method."""

    state: TrainState
    writer: Attempt
    checkpoints: Checkpoints
    metrics: Logger
    progress: Progress
    beat: Callable[[], None] = lambda: None
    clock: Clock = field(default_factory=Clock)
    hosts: Sequence[str] = ()
    """Of each rank, where that is known."""
    saved: Callable[[], None] = lambda: None
    """Called on rank 0 when a checkpoint is on disk."""
    profiler: Profiler = field(default_factory=lambda: Profiler(RunDir(Path()), None))
    pruner: Pruner | None = None
    """Of a run of a sweep."""

    @property
    def pruned(self) -> str:
        """Why its sweep stops the run; empty if it does not."""
        return self.pruner.why if self.pruner is not None else ""

    def validation_is_due(self) -> bool:
        """After the present step: at the end, and every ``train.eval_every_epochs``."""
        return self._is_due(epochs=self.state.config.train.eval_every_epochs)

    def saving_is_due(self) -> bool:
        """After the present step: at the end, and by ``checkpoint.every_epochs`` and ``every_steps``."""
        checkpoint = self.state.config.checkpoint
        return self._is_due(epochs=checkpoint.every_epochs, steps=checkpoint.every_steps)

    def _is_due(self, *, epochs: int | None, steps: int | None = None) -> bool:
        rhythms = (self.state.total_steps, self.state.steps_per_epoch * (epochs or 0), steps)
        return any(every and self.progress.step % every == 0 for every in rhythms)

    def minutes_are_over(self) -> bool:
        """``checkpoint.every_minutes``, by rank 0's clock: the ranks have yet to agree."""
        minutes = self.state.config.checkpoint.every_minutes
        return minutes is not None and self.state.dist.is_main and self.checkpoints.seconds_since_save() >= minutes * 60

    def stops_early(self) -> bool:
        """As many validations in a row were no better as ``train.early_stopping_patience`` allows; on all ranks alike,
        for they judge by the same numbers. Or its sweep stops the run."""
        patience = self.state.config.train.early_stopping_patience
        return bool(self.pruned) or (patience is not None and self.progress.stalled >= patience)

    def is_over(self) -> bool:
        """Nothing is left to train."""
        return self.progress.step >= self.state.total_steps or self.stops_early()

    def tell_early_stop(self) -> str:
        """Why training has ended before its last update, said and written as an event; empty if it has not."""
        state, progress = self.state, self.progress
        if progress.step >= state.total_steps or not self.stops_early():
            return ""
        why = self.pruned or f"{state.judged_by} has not improved in {progress.stalled} validations in a row"
        kind: Remark = "pruned" if self.pruned else "stopped_early"
        self.remark(kind, step=progress.step, total_steps=state.total_steps, best=progress.best, why=why)
        if state.dist.is_main:
            how = "Pruned" if self.pruned else "Stopped early"
            print(f"{how} after {progress.step} of {state.total_steps} steps: {why}.", flush=True)
        return why

    def remark(self, kind: Remark, **facts: Any) -> None:
        """Write an event, once for all ranks."""
        if self.state.dist.is_main:
            self.writer.remark(kind, **facts)

    def tell_broken(self) -> None:
        """Tell all ranks of the broken images that any has met; an event names each, once in the life of a run. Events
        name files that were waited for, too.

        Raises UserError on every rank where they are more than ``data.max_broken``.
        """
        known, found, waited = self.progress.broken, dict[str, str](), dict[str, float]()
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

    def validate(self, where: Mapping[str, Any], should_stop: Callable[[], bool] = lambda: False) -> bool | None:
        """Validate, record with ``where``, judge. Is this model the best so far? None: told to stop half way."""
        state, by = self.state, self.state.judged_by
        with self.clock.during(EVALUATION):
            found = measure(state, state.splits.val, should_stop=should_stop, beat=self.beat)
        if found is None:
            return None
        self.tell_broken()
        metric = state.metrics.find(by.removeprefix("val/"))
        higher, delta = metric is None or metric.higher_is_better, state.config.train.early_stopping_min_delta
        better = self.progress.judge(found.metrics, by, higher_is_better=higher, min_delta=delta)
        schedule = state.config.schedule
        if schedule.name == "plateau" and self.progress.flat > schedule.patience:
            self.progress.flat, self.progress.falls = 0, self.progress.falls + 1
        self.metrics.log({**where, "split": "val", **found.metrics})
        if self.pruner is not None and self.progress.step < state.total_steps:  # what is at its end needs no end
            epoch, every = self.progress.step / state.steps_per_epoch, state.config.train.eval_every_epochs
            self.pruner.look(found.metrics, by.removeprefix("val/"), epoch, every=every, higher_is_better=higher)
        if better:
            self._show(found.mistakes.get("ema" if by.startswith("val/ema_") else "raw"), "val", self.progress.step)
        return better

    def test(self, where: Mapping[str, Any]) -> dict[str, float]:
        """Test metrics of the best weights, recorded with ``where``; which class was taken for which, in a file."""
        self.clock.to(EVALUATION)
        state, step = self.state, self.progress.step
        how: dict[str, Any] = {"beat": self.beat, "confusion": True}
        best = step if self.progress.best_step is None else self.progress.best_step
        found: Measured | None
        if best == step:
            found = measure(state, state.splits.test, **how)
        else:
            has_average = state.ema is not None and STEMS["ema"] in self.checkpoints.described(best).stems
            kinds = ["raw", "ema"] if has_average else ["raw"]
            best, found = measure_saved(state, self.checkpoints, best, state.splits.test, kinds=kinds, **how)
        assert found is not None
        self.clock.to(END)
        self.tell_broken()
        if state.dist.is_main and found.counts:  # before the record: loggers show it with that
            content = confusion_json(state.splits.info, found.counts, split="test", step=best)
            self._write(self.writer.run.confusion, content)
        self.metrics.log({**where, "split": "test", **found.metrics})
        self._show(found.mistakes.get("raw"), "test", best)
        return found.metrics

    def _show(self, found: Mistakes | None, split: str, step: int) -> None:
        """Keep the images that were told wrong most surely, for the report. Every rank must call it."""
        if found is not None:
            images = found.read()
            with suppress(OSError):  # a full disk: pictures are nothing to end a run for
                if self.state.dist.is_main:
                    self._write(self.writer.run.mistakes(split), {"split": split, "step": step, "images": images})

    def save(
        self, *, optimizer: bool = True, extra: Mapping[str, Mapping[str, Tensor]] | None = None, **more: Any
    ) -> None:
        """Write a checkpoint of the present step, or begin to (``checkpoint.asynchronous``): `settle` waits for it.

        Args:
            optimizer: with its state.
            extra: tensors that belong to it besides the model's and the optimizer's, as `Checkpoints.save` takes them.
            more: further plain values for its ``state.json``.
        """
        state, progress, step = self.state, self.progress, self.progress.step

        def written() -> None:
            if state.dist.is_main:
                self.writer.saved(step, **more)
                self.saved()

        with self.clock.during(CHECKPOINT):
            self.clock.settle(progress)
            self.beat()
            self.tell_broken()
            facts = {"world_size": state.dist.world_size, "micro_batch_size": state.micro_batch_size}
            content = {"progress": asdict(progress), "precision": state.precision.state_dict(), **facts}
            self.checkpoints.save(
                state.model,
                state.optimizer if optimizer else None,
                step=step,
                state={**content, **told_input(state.splits), **more},
                best_step=progress.best_step,
                extra={**state.further_tensors(), **(extra or {})},
                done=written,
            )
            self.beat()

    def settle(self) -> None:
        """Wait until what has been saved is on the disk. Raises RunFailedError if that cannot be."""
        with self.clock.during(CHECKPOINT):
            self.checkpoints.settle()
            self.beat()

    def roll_back(self, position: int) -> bool:
        """Be again where the newest whole checkpoint is, with the data from ``position`` on; and save that.

        False if there is none, or it has been tried too often.
        """
        progress, before = self.progress, self.progress.step
        if progress.rollbacks == MOST_ROLLBACKS:
            return False
        restored, there = go_on(self.state, self.checkpoints)
        if restored is None:
            return False
        there.seconds, there.broken = progress.seconds, progress.broken  # which no way back makes better
        there.position, there.rollbacks, there.nonfinite = position, progress.rollbacks + 1, 0
        progress.take_over(there)
        self.remark("rolled_back", step=progress.step, from_step=before, position=position)
        self.save()  # whoever goes on from here does not meet that data again
        return True

    def summarize(self, outcome: str, *, epochs: float, test: Mapping[str, float] | None, **more: Any) -> None:
        """Write ``summary.json``, of what is on the disk by then; None is null there, as is what is not finite."""
        self.settle()
        state, progress = self.state, self.progress
        self.clock.settle(progress)
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
        self._write(self.writer.run.summary, summary, indent=2)
        if spent["advice"]:
            print(f"Faster: {spent['advice']}.", flush=True)

    def _write(self, file: Path, content: Mapping[str, Any], indent: int | None = None) -> None:
        """A file that is complete or absent."""
        text = json.dumps(fileio.finite(content), indent=indent, allow_nan=False) + "\n"
        self.writer.may_write()
        with fileio.replacing(file, self.writer.run.path) as out:
            out.write(text.encode())
            self.writer.may_write()
