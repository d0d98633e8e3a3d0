"""Other settings for a run that goes on: which may change, and how its schedule goes on."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from trainkit.checkpoint import format
from trainkit.common import fileio, jsonl, terminal
from trainkit.common.errors import UserError
from trainkit.config import plugins, yaml
from trainkit.config.checks import strategy_traits
from trainkit.config.layers import flatten
from trainkit.config.loading import Loaded
from trainkit.config.schema import Config
from trainkit.config.task_metrics import check_task
from trainkit.run.code_files import code_digest
from trainkit.run.events import prolonged
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of
from trainkit.run.run_manifest import fingerprint
from trainkit.run.secrets import refuse_settings
from trainkit.run.snapshot import read_code
from trainkit.run.user_lists import mark

Schedule = Literal["stretch", "restart"]
Load = Callable[[Sequence[str]], Loaded]
_LOOKED_AT = 10_000
"""Updates whose rates are compared: enough for any schedule of ours, and a moment's work."""


@dataclass(frozen=True)
class Change:
    """Settings that a user wants a run to go on with."""

    overrides: Sequence[str] = ()
    schedule: Schedule | None = None
    """Stretch a schedule that goes by the run's length over the new length, or begin it anew."""

    def __bool__(self) -> bool:
        return bool(self.overrides or self.schedule)


class Standing(NamedTuple):
    """Progress of a run, by its record and its newest checkpoint."""

    step: int
    total_steps: int
    steps_per_epoch: int
    stalled: int
    """Validations in a row without improvement."""
    falls: int
    """Number of times that its rate has fallen by the schedule plateau."""
    inexact: str = ""
    """Why it cannot become the run that was longer from the start; empty if it can."""


@dataclass(frozen=True)
class Prolongation:
    """A run's configuration with the changes, which are possible."""

    run: RunDir
    loaded: Loaded
    changed: tuple[str, ...]
    standing: Standing | None = None
    """None for a run that has never begun to train."""
    total_steps: int = 0
    schedule: Schedule | None = None
    told: str = ""
    """Says to the user how the run goes on."""
    inexact: str = ""
    """Why it is not the run that was trained so from the start, beside its schedule; empty if it is."""

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Write down that it goes on. The body writes the configuration; the caller holds the lease.

        A run that has finished is unfinished again. It equals other runs (`submit` calls it up to date) by what it has
        become; killed half way, or changed in ways that no run has from its start, it equals none.
        """
        run = self.run
        where = self.standing
        if where is not None and (self.total_steps != where.total_steps or history_of(run).finished):
            how = self.schedule or "goes on"
            prolonged(run, where.step, before=where.total_steps, total_steps=self.total_steps, how=how)
            run.summary.unlink(missing_ok=True)  # the numbers of an end that is none by now: metrics.jsonl has them
        if not self.changed:
            yield
            return
        before = fileio.read_object(run.manifest).get("fingerprint")
        self._write_fingerprint("")
        yield
        if not before or self.schedule is not None or self.inexact:
            return
        code = read_code(run)
        if code is not None:
            python = {name: data for name, data in code.items() if name.endswith(".py")}
            now = fingerprint(self.loaded.config, code_digest(python))
            mark(run.path, now)
            self._write_fingerprint(now)

    def _write_fingerprint(self, text: str) -> None:
        manifest = {**fileio.read_object(self.run.manifest), "fingerprint": text}
        fileio.write(self.run.manifest, json.dumps(manifest, indent=2) + "\n", self.run.path)


def prolongation(run: RunDir, change: Change, load: Load) -> Prolongation:
    """Load the run with the changes. Nothing is written.

    Args:
        load: loads its configuration with overrides.

    Raises:
        UserError: a setting cannot change, or its schedule would not be what it was; says which ways there are.
    """
    stored = load(()).config
    if strategy_traits(stored.strategy.name).loop == "collaborative":
        raise settings_are_of_all(run)
    loaded = load(change.overrides)
    changed = changed_settings(run, stored, loaded)
    schedule = change.schedule
    where = _standing(run, stored)
    if where is None:
        if schedule:
            raise _changes_nothing(run, schedule, why="It has not started to train.", fix="Leave it out.")
        return Prolongation(run, loaded, changed)
    total = _total(loaded.config, where.steps_per_epoch)
    _check_length(run, loaded, changed, where, total)
    inexact = _inexact(stored, loaded.config, changed, where, total)
    warning = f"It does not become the run that was trained so from the start. {inexact}" if inexact else ""
    if total == where.total_steps:
        if schedule:
            fix = "Give its new length as well, such as train.epochs=30."
            raise _changes_nothing(run, schedule, why="Its length stays as it is.", fix=fix)
        return Prolongation(run, loaded, changed, where, total, told=warning, inexact=inexact)
    told = f"{run.name} has trained {where.step} of {where.total_steps} updates, and continues to {total}"
    if schedule == "restart":
        loaded = load([*change.overrides, f"schedule.start_step={where.step}"])
        changed = (*changed, "schedule.start_step")
        _require_known(run, changed)
    elif _has_same_rates(stored, loaded.config, where, total):
        told += f", with the rates that it would have had from the start. {warning}".rstrip()
        return Prolongation(run, loaded, changed, where, total, told=told, inexact=inexact)
    elif schedule is None:
        raise _has_to_choose(run, stored, loaded.config, where, total, change)
    told += f"; its schedule is {schedule}ed."
    if not stored.schedule.is_own:
        now = _last_rate(stored, where)
        then = _rates(loaded.config, where, total)(where.step)
        told += f" The rate was {now:.3g}, and the next is {then:.3g}."
    return Prolongation(run, loaded, changed, where, total, schedule, told, inexact)


def to_the_end(config: Config) -> list[str]:
    """The settings with which a run that has stopped early goes on to its end."""
    lifted = ["train.early_stopping_patience=null"]
    if config.train.early_stopping_min_delta and config.schedule.name != "plateau":
        lifted.append("train.early_stopping_min_delta=0")  # which nothing waits for then
    return lifted


def _inexact(stored: Config, config: Config, changed: Sequence[str], where: Standing, total: int) -> str:
    """Say why a run does not become that which was trained with ``config`` from the start; empty if it does."""
    before = stored.train.early_stopping_patience
    after = config.train.early_stopping_patience
    keys = set(yaml.packaged("continuation")["inexact"]) & set(changed)
    if "train.early_stopping_min_delta" in changed and (after is not None or config.schedule.name == "plateau"):
        keys.add("train.early_stopping_min_delta")
    if after is not None and (before is None or after < before):
        keys.add("train.early_stopping_patience")
    sentences = []
    if where.inexact and total > where.step:
        sentences.append(where.inexact)
    if keys:
        verb = "was" if len(keys) == 1 else "were"
        sentences.append(f"{' and '.join(sorted(keys))} {verb} different so far.")
    return " ".join(sentences)


def settings_are_of_all(run: RunDir) -> UserError:
    """The error for a swarm."""
    why = "All peers that joined have its settings, and it counts rounds."
    return UserError(f"{run.name} is a swarm, whose settings cannot change.", why=why, fix="Create another swarm.")


def may_change(key: str) -> bool:
    """Return True for a setting that may change when a run goes on."""
    table = yaml.packaged("continuation")["may_change"]
    return key in table or key.partition(".")[0] in table


def changed_settings(run: RunDir, stored: Config, loaded: Loaded) -> tuple[str, ...]:
    """The settings that differ, which may. Raises UserError for one that may not, or is not possible."""
    before = dict(flatten(stored.model_dump(mode="json")))
    after = dict(flatten(loaded.config.model_dump(mode="json")))
    changed = tuple(key for key in {**before, **after} if before.get(key) != after.get(key))
    for key in changed:
        if not may_change(key):
            given = str(loaded.source(key).where)
            words = [given] if "=" in given else []
            why = yaml.packaged("continuation")["must_stay"][key.partition(".")[0]]
            fix = f"`{terminal.command('submit', run.path, *words)}` starts a new run with it and this one's settings."
            raise UserError(f"{key} cannot change when {run.name} continues.", why=why, fix=fix, key=key)
    _require_known(run, changed)
    with loaded.pointing_at_sources():
        for logger in loaded.config.monitor.loggers if "monitor.loggers" in changed else ():
            if ":" in logger and logger not in stored.monitor.loggers:
                why = "The run uses its own copy of the code, which may not have this logger."
                fix = "Leave it out, or submit a new run."
                raise UserError(f"Logger {logger} cannot be added.", why=why, fix=fix, key="monitor.loggers")
            plugins.check_options("trainkit.monitor", logger, {}, where="monitor")
        if "checkpoint.best" in changed and not loaded.config.task.is_own:
            check_task(loaded.config)
    refuse_settings(loaded)
    return changed


def _require_known(run: RunDir, changed: Sequence[str]) -> None:
    """Raise UserError for a setting that the run's own, older code would refuse."""
    known, _ = yaml.read(run.config, follow=False)
    for key in changed:
        section, _, name = key.partition(".")
        if section != "launch" and name not in (known.get(section) or {}):
            why = "It trains with its own copy of the code, which is older than this setting."
            fix = f"`{terminal.command('submit', run.path)}` with it starts a new run."
            raise UserError(f"{run.name} does not know {key}.", why=why, fix=fix, key=key)


def _standing(run: RunDir, stored: Config) -> Standing | None:
    """Read how far a run has trained; None if it has not begun. Raises UserError where that cannot be told."""
    started = history_of(run).started
    if not started:
        return None
    per_epoch = started.get("steps_per_epoch")
    steps = format.steps(run.checkpoints)
    if not steps or not per_epoch:
        why = "Its record does not say how many updates an epoch has." if steps else "It has no checkpoint."
        fix = f"`{terminal.command('submit', run.path)}` with these settings starts a new run."
        raise UserError(f"{run.name} cannot continue with other settings.", why=why, fix=fix)
    step = steps[-1]
    progress: dict[str, Any] = {}
    with suppress(format.BrokenCheckpointError, KeyError, TypeError, ValueError):  # the job takes the one before
        progress.update(format.manifest_of(run.checkpoints, step).state["progress"])
    total = _total(stored, per_epoch)
    before_end = progress.get("before_end")
    if isinstance(before_end, Mapping):  # what its validations have come to without that of its end
        progress.update(before_end)
    inexact = ""
    if step == total and step % (per_epoch * stored.train.eval_every_epochs):
        best = progress.get("best_step")
        if not isinstance(before_end, Mapping):
            inexact = f"Its end, update {step}, was validated between two validations, and has counted as one."
        elif jsonl.is_whole(best) and best not in steps:
            inexact = f"Its best model without that of its end, update {step}, is that of update {best}, "
            inexact += "whose checkpoint has been deleted."
    return Standing(step, total, per_epoch, _count(progress, "stalled"), _count(progress, "falls"), inexact)


def _count(progress: Mapping[str, Any], name: str) -> int:
    count = progress.get(name)
    return count if jsonl.is_whole(count) else 0


def _total(config: Config, steps_per_epoch: int) -> int:
    return config.train.max_steps or config.train.epochs * steps_per_epoch


def _check_length(run: RunDir, loaded: Loaded, changed: Sequence[str], where: Standing, total: int) -> None:
    """Raise UserError unless that many updates leave something to train."""
    train = loaded.config.train
    finished = history_of(run).finished
    if "train.epochs" in changed and train.max_steps is not None:
        why = f"train.max_steps={train.max_steps} takes precedence."
        fix = f"Give train.max_steps={train.epochs * where.steps_per_epoch}, or train.max_steps=null as well."
        raise UserError(f"train.epochs={train.epochs} has no effect.", why=why, fix=fix, key="train.epochs")
    if total < where.step or (finished and total == where.step):
        epochs = where.step / where.steps_per_epoch
        why = f"It has trained {where.step} updates ({epochs:.4g} epochs), and {total} were requested."
        longer = terminal.command("resume", run.path, f"train.epochs={int(epochs) + 10}")
        fix = f"`{longer}` goes on; `evaluate` and `predict` take earlier weights by --checkpoint STEP."
        raise UserError(f"{run.name} has nothing left to train.", why=why, fix=fix, key="train.epochs")
    patience = train.early_stopping_patience
    if finished and patience is not None and where.stalled >= patience:
        why = f"{where.stalled} validations in a row were no better, and train.early_stopping_patience={patience}."
        more = f"train.early_stopping_patience={where.stalled + patience}"
        fix = f"Give {more} as well, or {' '.join(to_the_end(loaded.config))}."
        raise UserError(f"{run.name} would stop early again at once.", why=why, fix=fix)


def _rates(config: Config, where: Standing, total: int) -> Callable[[int], float]:
    """The learning rate of each update, by a schedule of ours."""
    from trainkit.training.schedule import lr_at  # a model that is opened comes without a part of training

    return partial(
        lr_at, optim=config.optim, schedule=config.schedule, steps_per_epoch=where.steps_per_epoch,
        total_steps=total, falls=where.falls,
    )  # fmt: skip


def _last_rate(stored: Config, where: Standing) -> float:
    return _rates(stored, where, where.total_steps)(max(where.step - 1, 0))


def _has_same_rates(stored: Config, config: Config, where: Standing, total: int) -> bool:
    """Return True if the updates made would have had the same rates in a run of the new length."""
    if stored.schedule.is_own:
        return False
    before = _rates(stored, where, where.total_steps)
    after = _rates(config, where, total)
    looked_at = {
        *range(stored.schedule.start_step, where.step, max(where.step // _LOOKED_AT, 1)),
        max(where.step - 1, 0),
    }
    return all(before(step) == after(step) for step in looked_at)


def _has_to_choose(
    run: RunDir, stored: Config, config: Config, where: Standing, total: int, change: Change
) -> UserError:
    """The error that explains the ways to go on with a schedule that goes by the run's length."""
    why = "It is your own function, which may depend on the run's length."
    jump = ""
    peak = ""
    if not stored.schedule.is_own:
        now = _last_rate(stored, where)
        then = _rates(config, where, total)(where.step)
        peak = f", up to {stored.optim.lr:.3g} again,"
        if now == then:
            why = f"Its warm-up took half of its {where.total_steps} updates; of {total} it would have been longer."
        else:
            why = f"After {where.step} of {where.total_steps} updates its rate is {now:.3g}"
            why += f"; of {total} it would be {then:.3g}."
            jump = f", and the rate jumps to {then:.3g}"
    anew = terminal.command("submit", run.path, *change.overrides)
    fix = f"Add --restart-schedule: it starts again{peak} for the remaining {total - where.step} updates; or "
    fix += f"--stretch-schedule: it continues as if it had been planned for {total}{jump}; or `{anew}`: a new run."
    what = f"{run.name} is trained by schedule.name={stored.schedule.name}, which depends on its length."
    return UserError(what, why=why, fix=fix)


def _changes_nothing(run: RunDir, schedule: Schedule, *, why: str, fix: str) -> UserError:
    return UserError(f"--{schedule}-schedule changes nothing of {run.name}.", why=why, fix=fix)
