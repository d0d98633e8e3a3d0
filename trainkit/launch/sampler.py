"""The settings of a sweep's trial, chosen when it begins: by TPE, from what the trials before it have come to.

Run folders hold all that is known. For each question a study is made anew of the records of the other trials, so that
tasks of a job array on many nodes share nothing but a file system, and a trial that is started again keeps what it has.
"""

import hashlib
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from trainkit import fileio
from trainkit.config.loading import load, to_yaml
from trainkit.errors import UserError
from trainkit.run.events import Holder, chosen_point, history_of, lease_on, sampled
from trainkit.run.folder import SAMPLER, RunDir, as_open_as, list_runs
from trainkit.run.selection import is_higher_better, measured
from trainkit.sweep import Axis, axis_of

FEWEST = 10
"""Results without which TPE has nothing to go by: a trial that begins before keeps what it has drawn."""
Trial = tuple[list[str], float | None]
"""Settings, and their result, of which more is better. One that runs, or has failed, has None: its like is avoided."""
_MOST_ASKED = 20
_PATIENCE_SECONDS = 300.0
"""How long a trial waits for others that are just choosing."""


def choose(run: RunDir) -> None:
    """Give a run its settings before its first attempt, if it is of a sweep whose sampler chooses them.

    What keeps it from that, such as settings that are not possible together, is said, and it keeps what it has drawn.
    """
    sweep, asked = run.path.parent, fileio.read_object(run.path.parent / SAMPLER)
    if asked.get("sampler") != "tpe" or chosen_point(run):
        return
    from trainkit.report.facts import submitted_points  # most jobs do without

    axes, by = [axis_of(text) for text in asked["sweep"]], "random"
    point = submitted_points(sweep)[run.name][-len(axes) :]
    with ExitStack() as held:
        held.enter_context(as_open_as(run.path))
        try:
            if _trials(sweep, asked["others"]):
                held.enter_context(lease_on(RunDir(sweep), Holder.me(), patience=_PATIENCE_SECONDS, in_turn=True))
                suggested = suggest(axes, trials := _trials(sweep, asked["others"]), f"{asked['sweep']} {run.name}")
                fileio.write(run.config, to_yaml(load(str(run.config), suggested).config), run.path)
                by, point = f"tpe, {sum(result is not None for _, result in trials)} results", suggested
        except (UserError, ImportError) as error:
            print(f"{run.name} keeps the settings that it has drawn. {error}", file=sys.stderr, flush=True)
        sampled(run, by, point)


def suggest(axes: Sequence[Axis], trials: Sequence[Trial], seed: str) -> list[str]:
    """The overrides of the next trial, by the tree-structured Parzen estimator (Bergstra et al., 2011) of optuna.

    Args:
        trials: all that have begun. None has the same point, as long as others are found.
        seed: with the same trials, the choice is a function of it.
    """
    import optuna
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    spaces: dict[str, Any] = {
        axis.key: CategoricalDistribution(axis.values) if axis.ends is None
        else IntDistribution(*map(int, axis.ends), log=axis.is_log) if axis.is_whole
        else FloatDistribution(*axis.ends, log=axis.is_log)
        for axis in axes
    }  # fmt: skip
    number = int(hashlib.sha256(seed.encode()).hexdigest()[:8], 16)
    sampler = optuna.samplers.TPESampler(seed=number, n_startup_trials=0, constant_liar=True, multivariate=True)
    study = optuna.create_study(sampler=sampler, direction="maximize")
    for words, result in trials:
        told = dict(word.split("=", 1) for word in words)
        state = TrialState.RUNNING if result is None else TrialState.COMPLETE
        with suppress(KeyError, ValueError):  # of a sweep that was written over
            params = {axis.key: float(told[axis.key]) if axis.ends else told[axis.key] for axis in axes}
            study.add_trial(create_trial(state=state, params=params, distributions=spaces, value=result))
    point, taken = list[str](), [words for words, _ in trials]
    for _ in range(_MOST_ASKED):
        params = study.ask(spaces).params
        point = [axis.override(params[axis.key]) for axis in axes]
        if point not in taken:
            break
    return point


def _trials(sweep: Path, others: Sequence[str]) -> list[Trial]:
    """Those that have begun, with their best validations, of this sweep and runs of earlier ones; none while there are
    too few results. A run that was pruned counts as far as it came."""
    found = list[Trial]()
    for run in [*list_runs(sweep), *(RunDir(Path(path)) for path in others)]:
        with suppress(UserError):  # it cannot be read
            if point := chosen_point(run):
                best = measured(run, "val") if history_of(run).finished else None
                found.append((point, best if best is None or is_higher_better(run, "val") else -best))
    return found if sum(result is not None for _, result in found) >= FEWEST else []
