"""Sampling: a sweep's trial chooses its settings when it begins, by TPE, from the results of the trials before it.

Run folders hold all that is known. For each question a study is made anew of the records of the other trials, so that
tasks of a job array on many nodes share nothing but a file system, and a trial that is started again keeps what it has.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from trainkit.common import fileio, terminal
from trainkit.common.errors import UserError
from trainkit.config.loading import load, to_yaml
from trainkit.config.sweep import Axis, axis_of, check_sampler
from trainkit.run.events import chosen_point, sampled
from trainkit.run.find import list_runs
from trainkit.run.folder import SAMPLER, RunDir, as_open_as
from trainkit.run.history import history_of
from trainkit.run.run_lease import Holder, lease_on
from trainkit.run.selection import is_higher_better, measured

FEWEST = 10
"""Results that TPE needs: a trial that begins before keeps what it has drawn."""
Trial = tuple[list[str], float | None]
"""Settings, and their result, of which more is better; None for one that runs, or has failed: its like is avoided."""
_MOST_ASKED = 20
_PATIENCE_SECONDS = 300.0
"""Time that a trial waits for others that are just choosing."""


def choose(run: RunDir) -> None:
    """Give a run its settings before its first attempt, if it is of a sweep whose sampler chooses them.

    If that fails, as with settings that are not possible together, it warns, and the run keeps what it has drawn.
    """
    sweep = run.path.parent
    asked = fileio.read_object(sweep / SAMPLER)
    if asked.get("sampler") != "tpe" or chosen_point(run):
        return
    from trainkit.report.sweep_points import submitted_points  # most jobs do without

    by = "random"
    point = submitted_points(sweep).get(run.name, [])
    with ExitStack() as held:
        held.enter_context(as_open_as(run.path))
        try:
            words = _texts(asked, "sweep")
            others = _texts(asked, "others")
            axes = [axis_of(text) for text in words]
            point = point[-len(axes) :]
            check_sampler("tpe", words, trials=len(words))  # anew: others may have written the file since
            if _trials(sweep, others):
                held.enter_context(lease_on(RunDir(sweep), Holder.me(), patience=_PATIENCE_SECONDS, in_turn=True))
                trials = _trials(sweep, others)  # anew: others have chosen meanwhile
                suggested = suggest(axes, trials, f"{words} {run.name}")
                fileio.write(run.config, to_yaml(load(str(run.config), suggested).config), run.path)
                by = f"tpe, {_results(trials)} results"
                point = suggested
        except (UserError, ImportError) as error:
            terminal.warn(f"{run.name} keeps its random draw. {terminal.lines(str(error))}")
        sampled(run, by, point)


def _texts(asked: Mapping[str, Any], name: str) -> list[str]:
    """Read a list of texts from the sampler's file. Raises UserError where it is none."""
    found = asked.get(name)
    if isinstance(found, list) and all(isinstance(item, str) for item in found):
        return found
    why = f"Its entry '{name}' is not a list of texts."
    raise UserError(f"{SAMPLER} of the sweep is damaged.", why=why, fix="Submit the sweep again.")


def suggest(axes: Sequence[Axis], trials: Sequence[Trial], seed: str) -> list[str]:
    """Choose the next trial's overrides by optuna's tree-structured Parzen estimator (Bergstra et al., 2011).

    Args:
        trials: all that have begun. None has the same point, as long as others are found.
        seed: with the same trials, the choice is a function of it.
    """
    import optuna
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    spaces = {axis.key: _space(axis) for axis in axes}
    number = int(hashlib.sha256(seed.encode()).hexdigest()[:8], 16)
    sampler = optuna.samplers.TPESampler(seed=number, n_startup_trials=0, constant_liar=True, multivariate=True)
    study = optuna.create_study(sampler=sampler, direction="maximize")
    for words, result in trials:
        state = TrialState.RUNNING if result is None else TrialState.COMPLETE
        with suppress(KeyError, ValueError):  # of a sweep that was written over
            params = _values(axes, words)
            study.add_trial(create_trial(state=state, params=params, distributions=spaces, value=result))
    point = list[str]()
    for _ in range(_MOST_ASKED):
        params = study.ask(spaces).params
        point = [axis.override(params[axis.key]) for axis in axes]
        if all(point != words for words, _ in trials):
            break
    return point


def _space(axis: Axis) -> Any:
    """The values that an axis takes, as optuna describes them."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if axis.ends is None:
        return CategoricalDistribution(axis.values)
    low, high = axis.ends
    if axis.is_whole:
        return IntDistribution(int(low), int(high), log=axis.is_log)
    return FloatDistribution(low, high, log=axis.is_log)


def _values(axes: Sequence[Axis], words: Sequence[str]) -> dict[str, str | float]:
    """Read a point's value on each axis. Raises KeyError or ValueError where it has none."""
    told = dict(word.split("=", 1) for word in words)
    found: dict[str, str | float] = {}
    for axis in axes:
        found[axis.key] = float(told[axis.key]) if axis.ends else told[axis.key]
    return found


def _results(trials: Sequence[Trial]) -> int:
    return sum(result is not None for _, result in trials)


def _trials(sweep: Path, others: Sequence[str]) -> list[Trial]:
    """List the trials that have begun, with their best validations, of this sweep and runs of earlier ones; none while
    there are too few results. A run that was pruned counts as far as it came."""
    found = list[Trial]()
    for run in (*list_runs(sweep), *map(RunDir, map(Path, others))):
        with suppress(UserError, ValueError):  # it cannot be read, or has a name that no file has
            point = chosen_point(run)
            if point:
                best = measured(run, "val") if history_of(run).finished else None
                if best is not None and not is_higher_better(run, "val"):
                    best = -best
                found.append((point, best))
    return found if _results(found) >= FEWEST else []
