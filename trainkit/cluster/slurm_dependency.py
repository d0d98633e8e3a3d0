"""Dependencies of a job: ``--dependency``, with names of runs in the place of job ids.

slurmctld forgets a job some minutes after its end (MinJobAge), and takes every dependency on a job that it does not
know for fulfilled. So the queue, the accounts and the run's record are asked first: what has come true falls away, and
what cannot come true is refused.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from trainkit.cluster.plan import Plan
from trainkit.cluster.scheduler import ENDED, built_in
from trainkit.cluster.slurm_commands import Jobs, accounted, hides_others, queued
from trainkit.common import terminal
from trainkit.common.errors import RefusedError, UserError
from trainkit.common.process import NoAnswer
from trainkit.run.folder import RunDir, is_sweep
from trainkit.run.history import history_of

Find = Callable[[str], Sequence[RunDir]]
_KEY = "launch.dependency"
_JOB_ID = re.compile(r"(\d+(?:_\d+)?)(?:_\*)?(\+\d+)?")  # 4711, 4711_3, 4711_*, and sbatch's +MINUTES
_LEFT_OUT = "Omit the dependency."


def with_job_ids(plan: Plan, find: Find) -> Plan:
    """Replace the names of runs in the plan's dependency by their job ids.

    Args:
        find: the run of a name, or all runs of a sweep; raises UserError for a name that there is none of.

    Raises:
        UserError: a name of no run, or of one that has no job in SLURM.
        RefusedError: it will never come true, or SLURM does not know the job and would not wait.
    """
    directives = []
    for item in plan.directives:
        if item.name == "dependency" and item.value is not None:
            text = translated(str(item.value), find)
            if not text:
                continue
            if text != item.value:
                item = replace(item, value=text, reason=f"what {item.value} still waits for")
        directives.append(item)
    return replace(plan, directives=tuple(directives))


class _NeverError(RefusedError):
    """Error for a dependency that will never come true; another of several may."""


class _Awaited(NamedTuple):
    """A job in a dependency."""

    job_id: str
    """Empty for a run that has none in SLURM."""
    written: str
    """The form that sbatch takes."""
    name: str
    """The user's name for it."""
    run: RunDir | None = None


class _Told:
    """SLURM's answers on the jobs of a dependency."""

    def __init__(self, job_ids: set[str]) -> None:
        self._queue = self._accounts = Jobs({})
        self.has_answered = False
        self.complaint = ""
        if not job_ids:
            return
        with suppress(NoAnswer):  # else sbatch will have none either
            self._queue = queued(job_ids)
            self.has_answered = True
        try:
            if self.has_answered:
                self._accounts = accounted(job_ids)  # of an array the queue forgets one task after the other
        except NoAnswer as error:
            self.complaint = error.words

    def ends(self, job_id: str) -> list[str]:
        """Return the states of a job, or of all tasks of an array; none if it is not known."""
        if "_" in job_id:
            queued_one = self._queue.of(job_id)
            accounted_one = self._accounts.of(job_id)
            known = [queued_one] if queued_one else []
            others = [accounted_one] if accounted_one and not queued_one else []
        else:
            known = self._queue.all_of(job_id)
            names = {state.job_id for state in known}
            others = [state for state in self._accounts.all_of(job_id) if state.job_id not in names]
        ended = [state for state in others if state.state in ENDED]
        # Accounts that lack the end of a job which is in no queue are of no help.
        if not known and len(ended) < len(others):
            return []
        return [state.state for state in (*known, *ended)]

    def is_queued(self, job_id: str) -> bool:
        """Return True if the controller still knows the job."""
        return bool(self._queue.all_of(job_id.partition("_")[0]))


def translated(text: str, find: Find) -> str:
    """Write a dependency with job ids for the names in it; empty if nothing is left to wait for."""
    any_of = "?" in text  # sbatch takes commas (all of them) or question marks (any of them), and not both
    terms = []
    job_ids = set[str]()
    for term in re.split(r"[,?]", text):
        kind, *rest = term.split(":")
        words = [_awaited(word, find) for word in rest]
        terms.append((kind, words))
        for word in words:
            job_ids.update(item.job_id for item in word)
    told = _Told(job_ids - {""})
    kept = []
    never: _NeverError | None = None
    for kind, words in terms:
        left = []
        for word in words:
            try:
                ids = _left(kind, word, told)
            except _NeverError as error:
                if not any_of:
                    raise
                never = error
                continue
            if any_of and not ids:
                return ""
            if any_of and len(ids) > 1:
                why = "With a question mark, any one of its jobs is enough, and some have ended."
                fix = "Name one of its runs, or use commas."
                raise UserError(f"{text} cannot be expressed in SLURM.", why=why, fix=fix, key=_KEY)
            left += ids
        if left or not words:
            kept.append(":".join([kind, *left]))
    if never is not None and not kept:
        raise never
    return ("?" if any_of else ",").join(kept)


def _awaited(word: str, find: Find) -> list[_Awaited]:
    """Find the job of an id, also where a run is called so, which ./4711 names; or the jobs of a run or a sweep."""
    match = _JOB_ID.fullmatch(word)
    if match is not None:
        return [_Awaited(match[1], word, f"job {match[1]}")]
    found = []
    for run in find(word):
        submission = history_of(run).submission
        job_id = ""
        if submission is not None and built_in(submission.executor).batch:
            job_id = submission.job_id
        name = run.name
        if is_sweep(run.path.parent):
            name = f"{run.path.parent.name}/{run.name}"
        found.append(_Awaited(job_id, job_id, name, run))
    return found


def _left(kind: str, word: Sequence[_Awaited], told: _Told) -> list[str]:
    """Return what is still to wait for of a job, or of a sweep's jobs, as sbatch takes it."""
    waiting = [item.written for item in word if _waits(kind, item, told)]
    arrays = {item.written.partition("_")[0] for item in word}
    is_array = len(arrays) == 1 and len(word) > 1
    is_by_task = kind.lower() == "aftercorr" and len(word) > 1  # task 3 waits for task 3: an array stays as it is
    if waiting and is_by_task and not is_array:
        named = ", ".join(item.name for item in word[:5])
        why = "Its runs are jobs of several arrays, but aftercorr works within one array."
        raise UserError(f"{kind} cannot wait for {named}.", why=why, fix="Use afterok.", key=_KEY)
    if is_array and waiting and (is_by_task or len(waiting) == len(word)):
        return list(arrays)
    return waiting


def _waits(kind: str, item: _Awaited, told: _Told) -> bool:
    """Return False if a dependency has come true, True if it still may.

    Raises:
        UserError: a run that has no job in SLURM.
        RefusedError: it will not come true, or SLURM would not wait.
    """
    ends = _ends(item, told)
    is_queued = told.is_queued(item.job_id)
    if not ends:
        if not told.has_answered or (item.run is None and hides_others()):
            return True  # nobody can tell, and sbatch may
        raise _unknown(item, told)
    delay = item.written.partition("+")[2]
    if delay and not is_queued:
        why = "SLURM has forgotten its start, and would not wait."
        fix = f"Use --sbatch begin=now+{delay}minutes, or omit the dependency."
        raise RefusedError(f"{kind}:{item.written} cannot be honoured.", why=why, fix=fix)
    if delay:
        return True
    over = all(end in ENDED for end in ends)
    failed = [end for end in ends if end in ENDED and end != "COMPLETED"]
    how = kind.lower()
    if (how in ("afterok", "aftercorr") and failed) or (how == "afternotok" and over and not failed):
        raise _never(kind, item, ends, failed)
    if over and how in ("after", "afterok", "aftercorr", "afternotok", "afterany"):
        return False
    if over and not is_queued:
        why = "It has ended and SLURM has forgotten it, so SLURM would not wait."
        raise RefusedError(f"{kind}:{item.name} cannot be honoured.", why=why, fix=_LEFT_OUT)
    return True


def _ends(item: _Awaited, told: _Told) -> list[str]:
    """Return the states of a job or of an array's tasks: by the run's record where SLURM has forgotten them."""
    ends = told.ends(item.job_id) if item.job_id else []
    if item.run is None:
        return ends
    life = history_of(item.run)
    if life.finished:
        return ["COMPLETED"]
    if not ends and life.submission is not None and life.submission.ended:
        ends = [life.submission.ended]
    elif not ends and life.submission is not None and life.submission.cancelled:
        ends = ["CANCELLED"]
    if not ends and not item.job_id:
        why = "It was never submitted."
        if life.submission is not None:
            why = f"It runs with the executor {life.submission.executor}."
        what = f"No job can wait for {item.run.name}: it has no job in SLURM."
        raise UserError(what, why=why, fix=f"Name a run that was submitted to SLURM. {_LEFT_OUT}", key=_KEY)
    return ends


def _never(kind: str, item: _Awaited, ends: Sequence[str], failed: Sequence[str]) -> _NeverError:
    name = item.job_id
    title = f"Job {item.job_id}"
    first = ""
    if item.run is not None:
        name = title = item.name
        first = f"`{terminal.command('resume', item.run.path)}` first, or "
    why = f"{title} is {failed[0] if failed else 'COMPLETED'}."
    if failed and len(ends) > 1:
        why = f"A task of {item.name} is {failed[0]}."
    fix = f"{first}use afterany:{name}, or omit the dependency." if failed else _LEFT_OUT
    return _NeverError(f"{kind}:{name} can never be met.", why=why, fix=fix[:1].upper() + fix[1:], key=_KEY)


def _unknown(item: _Awaited, told: _Told) -> RefusedError:
    """Make the error for a job on which SLURM would not wait."""
    of_run = f" of {item.name}" if item.run is not None else ""
    lost = f"there is no accounting here ({told.complaint})" if told.complaint else "its accounting has no end for it"
    why = f"Its queue does not list it, {lost}, and SLURM starts a job at once if it waits for an unknown job."
    fix = "Check the number, or omit the dependency if that job has ended as you want."
    return RefusedError(f"SLURM does not know job {item.job_id}{of_run}.", why=why, fix=fix)
