"""A run that goes on with other settings than it began with: which may change, and what becomes of its schedule."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from trainkit import fileio, plugins, terminal
from trainkit.checkpoint import format
from trainkit.config import yaml
from trainkit.config.checks import strategy_traits
from trainkit.config.components import check_task
from trainkit.config.loading import Loaded, flatten
from trainkit.config.schema import Config
from trainkit.errors import UserError
from trainkit.run.events import history_of, prolonged
from trainkit.run.folder import RunDir, mark
from trainkit.run.secrets import refuse_settings
from trainkit.run.snapshot import code_digest, fingerprint, read_code

Schedule = Literal["stretch", "restart"]
Load = Callable[[Sequence[str]], Loaded]
_LOOKED_AT = 10_000
"""Updates whose rates are compared: enough for any schedule of ours, and a moment's work."""


@dataclass(frozen=True)
class Change:
    """Settings that a user wants a run to go on with."""

    overrides: Sequence[str] = ()
    schedule: Schedule | None = None
    """What becomes of a schedule that goes by the run's length: it is stretched over the new one, or begins anew."""

    def __bool__(self) -> bool:
        return bool(self.overrides or self.schedule)


class Standing(NamedTuple):
    """How far a run has trained, by its record and its newest checkpoint."""

    step: int
    total_steps: int
    steps_per_epoch: int
    stalled: int
    """Validations in a row without improvement."""
    falls: int
    """How often its rate has fallen by the schedule plateau."""


@dataclass(frozen=True)
class Prolongation:
    """A run's configuration with the changes, which are possible."""

    run: RunDir
    loaded: Loaded
    changed: tuple[str, ...]
    standing: Standing | None
    """None for a run that has never begun to train."""
    total_steps: int
    schedule: Schedule | None
    told: str
    """What becomes of the run, for the user."""

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Write down that it goes on. The body writes the configuration; the caller holds the lease.

        A run that has finished is unfinished again. It equals other runs (`submit` calls it up to date) by what it has
        become; killed half way, or changed in ways that no run has from its start, it equals none.
        """
        run, where = self.run, self.standing
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
        inexact = set(self.changed) & {*yaml.packaged("continuation")["inexact"], "schedule.start_step"}
        if before and self.schedule is None and not inexact and (code := read_code(run)) is not None:
            python = {name: data for name, data in code.items() if name.endswith(".py")}
            now = fingerprint(self.loaded.config, code_digest(python))
            mark(run.path, now)
            self._write_fingerprint(now)

    def _write_fingerprint(self, text: str) -> None:
        manifest = {**fileio.read_object(self.run.manifest), "fingerprint": text}
        fileio.write(self.run.manifest, json.dumps(manifest, indent=2) + "\n", self.run.path)


def prolongation(run: RunDir, change: Change, load: Load) -> Prolongation:
    """The run with the changes. Nothing is written.

    Args:
        load: loads its configuration with overrides.

    Raises:
        UserError: a setting cannot change, or its schedule would not be what it was; says which ways there are.
    """
    stored = load(()).config
    if strategy_traits(stored.strategy.name).loop == "collaborative":
        raise settings_are_of_all(run)
    loaded = load(change.overrides)
    changed, where = _changed(run, stored, loaded), _standing(run, stored)
    if where is None:
        if change.schedule:
            raise _nothing_to("schedule", run, change.schedule)
        return Prolongation(run, loaded, changed, None, 0, None, "")
    total = _total(loaded.config, where.steps_per_epoch)
    _check_length(run, loaded, changed, where, total)
    if total == where.total_steps:
        if change.schedule:
            raise _nothing_to("length", run, change.schedule)
        return Prolongation(run, loaded, changed, where, total, None, "")
    told = f"{run.name} has trained {where.step} of {where.total_steps} updates, and goes on to {total}"
    schedule = change.schedule
    if schedule == "restart":
        loaded = load([*change.overrides, f"schedule.start_step={where.step}"])
        changed = (*changed, "schedule.start_step")
        _require_known(run, changed)
    elif _is_the_same(stored, loaded.config, where, total):
        told += ", with the rates that it would have had from the start."
        return Prolongation(run, loaded, changed, where, total, None, told)
    elif schedule is None:
        raise _has_to_choose(run, stored, loaded.config, where, total, change)
    told += f"; its schedule is {schedule}ed."
    if not stored.schedule.is_own:
        now, then = _jump(stored, loaded.config, where, total)
        told += f" The rate was {now:.3g}, and the next is {then:.3g}."
    return Prolongation(run, loaded, changed, where, total, schedule, told)


def settings_are_of_all(run: RunDir) -> UserError:
    """The error for a swarm."""
    why, fix = "All who have joined have its settings, and it goes by rounds.", "Create another swarm."
    return UserError(f"{run.name} is a swarm, whose settings cannot change.", why=why, fix=fix)


def may_change(key: str) -> bool:
    """Whether a setting may change when a run goes on."""
    table = yaml.packaged("continuation")["may_change"]
    return key in table or key.partition(".")[0] in table


def _changed(run: RunDir, stored: Config, loaded: Loaded) -> tuple[str, ...]:
    """The settings that differ, which may. Raises UserError for one that may not, or is not possible."""
    before, after = (dict(flatten(config.model_dump(mode="json"))) for config in (stored, loaded.config))
    changed = tuple(key for key in {**before, **after} if before.get(key) != after.get(key))
    for key in changed:
        if not may_change(key):
            given = str(loaded.source(key).where)
            anew = terminal.command("submit", run.path, *[given] * ("=" in given))
            why = yaml.packaged("continuation")["must_stay"][key.partition(".")[0]]
            fix = f"`{anew}` starts a new run with it and the other settings of this one."
            raise UserError(f"{key} cannot change when {run.name} goes on.", why=why, fix=fix, key=key)
    _require_known(run, changed)
    with loaded.pointing_at_sources():
        for logger in loaded.config.monitor.loggers if "monitor.loggers" in changed else ():
            if ":" in logger and logger not in stored.monitor.loggers:
                why = "The run brings its own copy of code, which may not have it."
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
            why = "It trains with its own copy of the code, which is older than that setting."
            fix = f"`{terminal.command('submit', run.path)}` with it starts a new run."
            raise UserError(f"{run.name} does not know {key}.", why=why, fix=fix, key=key)


def _standing(run: RunDir, stored: Config) -> Standing | None:
    if not (started := history_of(run).started):
        return None
    per_epoch, steps = started.get("steps_per_epoch"), format.steps(run.checkpoints)
    if not steps or not per_epoch:
        why = "It has no checkpoint." if not steps else "Its record does not say how many updates an epoch has."
        fix = f"`{terminal.command('submit', run.path)}` with these settings starts a new run."
        raise UserError(f"{run.name} cannot go on with other settings.", why=why, fix=fix)
    progress: Mapping[str, Any] = {}
    with suppress(format.BrokenCheckpointError, KeyError, TypeError, ValueError):  # the job takes the one before
        progress = dict(format.described(run.checkpoints, steps[-1]).state["progress"])
    stalled, falls = (n if fileio.is_whole(n := progress.get(name)) else 0 for name in ("stalled", "falls"))
    return Standing(steps[-1], _total(stored, per_epoch), per_epoch, stalled, falls)


def _total(config: Config, steps_per_epoch: int) -> int:
    return config.train.max_steps or config.train.epochs * steps_per_epoch


def _check_length(run: RunDir, loaded: Loaded, changed: Sequence[str], where: Standing, total: int) -> None:
    """Raise UserError unless that many updates leave something to train."""
    train, finished = loaded.config.train, history_of(run).finished
    if "train.epochs" in changed and train.max_steps is not None:
        fix = f"Give train.max_steps={train.epochs * where.steps_per_epoch}, or train.max_steps=null as well."
        why = f"train.max_steps={train.max_steps} outranks it."
        raise UserError(f"train.epochs={train.epochs} changes nothing.", why=why, fix=fix, key="train.epochs")
    if total < where.step or (finished and total == where.step):
        epochs = where.step / where.steps_per_epoch
        why = f"It has trained {where.step} updates ({epochs:.4g} epochs), and is asked for {total}."
        longer = terminal.command("resume", run.path, f"train.epochs={int(epochs) + 10}")
        fix = f"`{longer}` goes on; `evaluate` and `predict` take earlier weights by --checkpoint STEP."
        raise UserError(f"{run.name} has nothing left to train.", why=why, fix=fix, key="train.epochs")
    patience = train.early_stopping_patience
    if finished and patience is not None and where.stalled >= patience:
        why = f"{where.stalled} validations in a row were no better, and train.early_stopping_patience={patience}."
        fix = f"Give train.early_stopping_patience={where.stalled + patience} as well, or null."
        raise UserError(f"{run.name} would stop early again at once.", why=why, fix=fix)


def _rate(config: Config, step: int, where: Standing, total: int) -> float:
    from trainkit.training.schedule import lr_at  # a model that is opened comes without a part of training

    return lr_at(
        max(step, 0), optim=config.optim, schedule=config.schedule, steps_per_epoch=where.steps_per_epoch,
        total_steps=total, falls=where.falls,
    )  # fmt: skip


def _is_the_same(before: Config, after: Config, where: Standing, total: int) -> bool:
    """Whether the updates made would have had the same rates in a run of the new length."""
    looked_at = {*range(before.schedule.start_step, where.step, max(where.step // _LOOKED_AT, 1)), where.step - 1}
    return not before.schedule.is_own and all(
        _rate(before, step, where, where.total_steps) == _rate(after, step, where, total) for step in looked_at
    )


def _jump(before: Config, after: Config, where: Standing, total: int) -> tuple[float, float]:
    """The rate of the last update, and that of the next."""
    return _rate(before, where.step - 1, where, where.total_steps), _rate(after, where.step, where, total)


def _has_to_choose(
    run: RunDir, stored: Config, config: Config, where: Standing, total: int, change: Change
) -> UserError:
    """The error that explains the ways to go on with a schedule that goes by the run's length."""
    name, step, rest = stored.schedule.name, where.step, total - where.step
    why, jump, peak = "It is a function of your own, which may go by the run's length.", "", ""
    if not stored.schedule.is_own:
        now, then = _jump(stored, config, where, total)
        peak = f", up to {stored.optim.lr:.3g} again,"
        if now == then:
            why = f"Its warm-up took half of its {where.total_steps} updates; of {total} it would have been longer."
        else:
            of_all = f"After {step} of {where.total_steps} updates"
            why = f"{of_all} its rate is {now:.3g}; of {total} it would be {then:.3g}."
            jump = f", and the rate jumps to {then:.3g}"
    fix = (
        f"Add --restart-schedule: it begins anew{peak} for the {rest} updates to come; or --stretch-schedule: it goes "
        f"on as if it had been planned for {total}{jump}; or "
        f"`{terminal.command('submit', run.path, *change.overrides)}`: a new run is trained from the start."
    )
    return UserError(f"{run.name} is trained by schedule.name={name}, which goes by its length.", why=why, fix=fix)


def _nothing_to(what: str, run: RunDir, schedule: Schedule) -> UserError:
    why = {"schedule": "It has not begun to train.", "length": "Its length stays as it is."}[what]
    fix = "Give its new length as well, such as train.epochs=30." if what == "length" else "Leave it out."
    return UserError(f"--{schedule}-schedule changes nothing of {run.name}.", why=why, fix=fix)
