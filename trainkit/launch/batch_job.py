"""Hooks of a batch script on its first node, before and after its ranks: for submitted runs and for plain templates.

    begun=$(python -m trainkit.launch.batch_job begin)      shell lines: the attempt, where its ranks meet, their secret
    python -m trainkit.launch.batch_job preflight           what the check of the nodes found; 3 if one is bad
    python -m trainkit.launch.batch_job end CODE            queue the job again if that is worth it; its exit code

All find the run in TRAINKIT_RUN_DIR. ``end --no-requeue`` leaves a saved run as it is, ``--chain`` queues another job
instead of this one, ``--in-place`` first tries to begin the next attempt on the nodes of the same job that are in order
(its shell lines are on stdout then); with ``--without-ranks`` a signal, which CODE names, came before the ranks.
"""

import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from trainkit.cluster.plan import CONTINUE
from trainkit.cluster.ranks import HEAD_SUFFIX, Secret, job_port
from trainkit.cluster.scheduler import JobPlace, NodeState, OwnJob, Scheduler, around
from trainkit.cluster.signals import SIGNALS, ending_in_words
from trainkit.common import fileio, terminal
from trainkit.common.errors import RunFailedError, TrainkitError, UserError
from trainkit.common.hosts import expand, free_port
from trainkit.common.process import NoAnswer, NoProgram, run_program
from trainkit.diagnosis.rank_log import RankLog, is_lost_connection
from trainkit.launch import notify
from trainkit.recovery.keeper import PLACE
from trainkit.recovery.retries import (
    FAILED_PREFLIGHT,
    budget_spent,
    culprits,
    excluded_nodes,
    first_attempt,
    is_broken,
    passing_failure,
    preflight_findings,
    spared,
)
from trainkit.run.events import RUN_DIR, Attempt, read_events
from trainkit.run.folder import NODES, OVER, REQUEUE, SAMPLER, RunDir, umask_of
from trainkit.run.history import RunHistory, history_of

How = Literal["requeue", "chain", "no"]
END_SECONDS = 300
"""Time for a scheduler to end a script whose job it has requeued."""
EARLY_SECONDS = 90.0
"""SLURM sends the signal up to 60 s early, and ranks take a while to start."""
REFUSED = 3
RANK_NODES = "TRAINKIT_RANK_NODES"
"""Variable of the script of a job with spare nodes: how many its ranks take, and how many it has, ``2-3``."""
ON_NODES = "TRAINKIT_NODELIST"
"""Variable with the nodes of a job with spare nodes on which its ranks start, separated by commas."""
LEFT = "TRAINKIT_NODES_LEFT"
"""Variable with all nodes of such a job that have not been given up since it began."""


def pronounce(env: Mapping[str, str]) -> int:
    """Show the results of the check of the job's nodes; 3, and the attempt has failed, if a node is bad.

    Nodes that gave no answer are not held back: the ranks themselves tell best whether they can start there.
    """
    attempt = Attempt.named_in(env)
    if attempt is None:
        return 0
    found, lines = preflight_findings(attempt)
    terminal.say("\n".join(lines) or "The preflight gave no answer; the ranks are started nevertheless.")
    code = 0
    for item in found:
        if item.bad:
            attempt.failed(f"{FAILED_PREFLIGHT}{item.node}: {item.check}: {item.what}", rank=None, host=item.node)
            code = REFUSED
    return code


# Around the ranks


def begin(env: Mapping[str, str]) -> str:
    """Begin the next attempt. Returns the shell lines that tell the ranks of it, or that end the script.

    It ends where the run has finished: SLURM also starts a job again whose ranks went on to the end without its script.

    Raises:
        RunFailedError: the job was started again and again, and nothing came of it.
    """
    run = RunDir(Path(env[RUN_DIR]))
    scheduler, place = around(env, run)
    history = history_of(run)
    cut = history.cut_short
    scheduler.claim(run, env)
    if history.finished:
        terminal.warn(f"{run.name} has finished: there is nothing left to do.")
        return "exit 0"
    if cut is not None and cut.cancelled:
        raise RunFailedError(f"{run.name} was cancelled.", why="That was before it had a job.", fix=_resume(run))
    before = run.attempts()
    spent = budget_spent(run) if place.restarts else ""
    if spent:
        Attempt(run, before[-1]).ended("FAILED", job_id=place.job_id, why=spent)
        why = "SLURM, a node or the program ends it each time; `python -m jobs.why` looks for the cause."
        raise RunFailedError(f"{run.name} is not started again: {spent}.", why=why, fix=_resume(run))
    if before:
        _Job.around(Attempt(run, before[-1]), env).leave_lost_nodes()
    nodes = place.nodelist
    if RANK_NODES in env:
        chosen = _nodes_for_ranks(place.nodes, env)
        if not chosen:
            _Job.around(Attempt(run, before[-1] if before else 0), env).ask_for_more_nodes()
        nodes = ",".join(chosen)
    if (run.path.parent / SAMPLER).is_file():
        from trainkit.launch.sampler import choose  # and with it the configuration's classes, for some sweeps alone

        choose(run)
    return _lines(Attempt.begin(run), nodes, env, left=place.nodes)


def _nodes_for_ranks(nodes: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Select nodes of a job with spare ones; none where there are too few.

    The script's own comes last: where it is lost, the job is, so that it should have the least to do.
    """
    count = int(env[RANK_NODES].partition("-")[0])
    own = env.get("SLURMD_NODENAME", "")
    others = [node for node in nodes if node != own]
    if len(others) >= count:
        return others[:count]
    return list(nodes) if len(nodes) == count else []


def _lines(attempt: Attempt, nodes: str, env: Mapping[str, str], left: Sequence[str]) -> str:
    """Return the shell lines that tell ranks on these nodes of an attempt that has begun. ``left``: of the job."""
    run = attempt.run
    NODES.send(attempt.logs, ",".join(left), within=run.path)
    terminal.warn(f"Attempt {attempt.number} on {nodes}: the ranks' output is in {attempt.logs}")
    head = expand(nodes)[0] + env.get(HEAD_SUFFIX, "")
    variables = attempt.environment() | {
        "MASTER_ADDR": head,
        "MASTER_PORT": str(free_port(job_port(env))),
        PLACE: f"{head}:{free_port()}",
        "TRAINKIT_SECRET": Secret.generate().text,
    }
    if RANK_NODES in env:
        variables |= {ON_NODES: nodes, LEFT: ",".join(left)}
    lines = [f"umask {umask_of(run.path):04o}"]  # srun opens the ranks' logs
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return "\n".join(lines)


def _resume(run: RunDir) -> str:
    if not run.plan.is_file():  # of a template
        words = f"{CONTINUE}={shlex.quote(str(run.path))} sbatch"
        return f"`{words}`, with the same arguments as before, goes on from the newest checkpoint."
    return f"`{terminal.command('resume', run.path)}` goes on from the newest checkpoint."


def again(code: int, env: Mapping[str, str]) -> str:
    """Begin the next attempt on the nodes of the same job that are in order.

    Returns the shell lines that tell the ranks of it; none where they are too few, or the attempt is left to `end`.
    """
    attempt = Attempt.named_in(env)
    if attempt is None:
        return ""
    attempt = attempt.newest_in_place()
    job = _Job.around(attempt, env)
    history = history_of(attempt.run)
    handed_back = attempt.number in history.handed_back and not _failed_by_itself(attempt, history, code)
    if handed_back or history.finished or attempt.successor() is not None:
        return ""
    failure = passing_failure(attempt, code)
    own = job.scheduler.own_job(job.place.job_id)
    if not failure or not own.is_to_be_queued or _ends_soon(attempt.run, own):
        return ""
    if failure not in [item.error for item in history.failures if item.attempt == attempt.number]:
        attempt.failed(failure, rank=None)
    if budget_spent(attempt.run):
        return ""
    before = env[LEFT].split(",")
    found = culprits(attempt, before, job.nodes)
    left = [node for node in before if node not in found and node in (own.nodes or before)]
    chosen = _nodes_for_ranks(left, env)
    own_node = env.get("SLURMD_NODENAME", "")
    is_lost = bool(own.nodes) and own_node not in own.nodes  # the job has lost its script, and goes back into the queue
    if not chosen or is_lost or signal.sigpending().intersection(SIGNALS):
        return ""
    for node in found.keys() - excluded_nodes(attempt.run).keys():
        attempt.excluded(node, found[node])
    if not found:  # where srun alone was killed, its ranks live on; a lost node would not answer
        job.scheduler.end_steps(job.place.job_id)
    after = attempt.start_again(job.place.job_id, spare_nodes=len(left) - len(chosen))
    without = f", without {', '.join(found)}" if found else ""
    terminal.warn(f"Attempt {attempt.number}: {failure}; attempt {after.number} starts in place{without}.")
    return _lines(after, ",".join(chosen), env, left)


def _ends_soon(run: RunDir, own: OwnJob) -> bool:
    """True if ranks that start now are too late for the signal before a time limit or a preemption: without ranks it
    reaches nobody, and SLURM may send it a minute early."""
    lead = fileio.read_object(run.plan).get("lead_seconds", 0)
    return own.ends_at is not None and own.ends_at - time.time() < lead + EARLY_SECONDS


def end(code: int, env: Mapping[str, str], *, how: How) -> int:
    """Record how the attempt ended, and queue the job again if it was handed back, or failed and may do better.

    Returns the job's exit code: never 0 while something is left to train, for jobs that wait for this one must not
    start.
    """
    attempt = Attempt.named_in(env)
    if attempt is None:
        return code
    attempt = attempt.newest_in_place()
    job = _Job.around(attempt, env)
    job_id = job.place.job_id
    if not attempt.run.config.is_file():  # refused before there was a run that another command would know
        terminal.warn("\n".join(RankLog(attempt.logs / "rank-0.err").words))
        return code
    newer = attempt.successor()
    if newer is not None:  # SLURM took this node for dead, and has started the job again elsewhere
        terminal.say(f"Attempt {newer} has taken over from this one, {attempt.number}: nothing is queued again.")
        return code or 1
    history = history_of(attempt.run)
    failure = ""
    if attempt.number not in history.handed_back or _failed_by_itself(attempt, history, code):
        if history.is_script and not code and not history.finished:
            attempt.ended("COMPLETED", job_id=job_id)
            return 0
        if history.finished and not code:
            return 0
        code = code or 1
        if not history.finished:
            failure = passing_failure(attempt, code)
        if not failure:
            attempt.ended("FAILED", job_id=job_id, exit_codes=[code])
            return code
    what = f"Failed ({failure})" if failure else "Saved"
    if how == "no":
        terminal.say(f"{what}; requeue is off. {_resume(attempt.run)}")
        attempt.ended("FAILED" if failure else "PREEMPTED", job_id=job_id, exit_codes=[code])
        return code or 1
    own = job.scheduler.own_job(job_id)
    if not own.is_to_be_queued:  # cancelled, or on its way back already
        terminal.say(f"{what}. The job is {own.state}, so it is not queued again.")
        job.exclude_bad_nodes(own, failed=bool(code))
        return code or 1
    recorded = [item.error for item in history.failures if item.attempt == attempt.number]
    if failure and failure not in recorded:
        attempt.failed(failure, rank=None)
    refusal = budget_spent(attempt.run) or job.queue_again(how, own, env, failed=bool(failure))
    if refusal:
        terminal.say(f"{what}, and not queued again: {refusal}. {_resume(attempt.run)}")
        attempt.failed(f"not queued again: {refusal}", rank=None)
        attempt.ended("FAILED", job_id=job_id, why=refusal)
    return code or 1


def _failed_by_itself(attempt: Attempt, history: RunHistory, code: int) -> bool:
    """True if a rank of a script failed before any was told to stop: srun told the others, who handed the run back."""
    if not history.is_script:
        return False
    if code and not passing_failure(attempt, code):
        return True
    for item in history.failures:
        is_of_others = is_lost_connection(item.error) or item.error == ending_in_words(-signal.SIGTERM)
        if item.attempt == attempt.number and not is_of_others:
            return True
    return False


@dataclass(frozen=True)
class _Job:
    """The job of this script, with an attempt of its run that is over."""

    attempt: Attempt
    scheduler: Scheduler
    place: JobPlace
    size: str = ""
    """Number of nodes that a job with spare ones takes: ``2-3``."""
    tasks_per_node: int = 1

    @classmethod
    def around(cls, attempt: Attempt, env: Mapping[str, str]) -> "_Job":
        """The job of the process with this environment."""
        tasks = int(env.get("SLURM_NTASKS_PER_NODE", "1"))
        return cls(attempt, *around(env, attempt.run), size=env.get(RANK_NODES, ""), tasks_per_node=tasks)

    def _requeue(self, *, has_lost: bool) -> None:
        """Queue the job again; after a loss it waits for the nodes of its ranks, and takes spare ones as there are."""
        self.scheduler.requeue(self.place.job_id)
        if self.size and has_lost:
            try:
                self.scheduler.resize(self.place.job_id, self.size, self.needed * self.tasks_per_node)
            except NoAnswer as refusal:
                terminal.warn(f"The job does not wait for {self.size} nodes: {refusal.words}")

    def ask_for_more_nodes(self) -> None:
        """Queue the job again, which SLURM has started on fewer nodes than its ranks take."""
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        self._requeue(has_lost=True)
        _wait_for_the_end()
        why = f"It has lost the others, and has {self.place.nodelist} left."
        raise RunFailedError("The job is queued again, for more nodes.", why=why, fix="None is needed.")

    @cached_property
    def nodes(self) -> dict[str, NodeState]:
        return self.scheduler.nodes(self.place.partition)

    def leave_lost_nodes(self) -> None:
        """Exclude the nodes that ended the attempt without a word. If this job has been given one of them again, queue
        it once more, for other nodes; only once, because no node is excluded twice."""
        lost = self._lost_nodes()
        if not lost:
            return
        job_id = self.place.job_id
        out = self._without(self.scheduler.own_job(job_id), lost)
        again = sorted(set(lost) & out & set(self.place.nodes))
        if not again:
            return
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        try:
            self._requeue(has_lost=True)
            self.scheduler.exclude(job_id, sorted(out))
        except NoAnswer as refusal:
            terminal.warn(f"{', '.join(again)} cannot be excluded: {refusal.words}")
            if self.scheduler.own_job(job_id).is_to_be_queued:
                return
        self.attempt.requeued(job_id)
        if _wait_for_the_end():
            return
        why = f"{', '.join(again)} has ended attempt {self.attempt.number}: {lost[again[0]]}."
        raise RunFailedError("The job is queued again, for other nodes.", why=why, fix="None is needed.")

    def _lost_nodes(self) -> dict[str, str]:
        """Name nodes that ended the attempt without a word, as after a power cut, and why."""
        attempt = self.attempt
        kinds = {event["event"] for event in read_events(attempt.run) if event.get("attempt") == attempt.number}
        is_earlier = attempt.number < first_attempt(attempt.run)  # of an earlier submission
        if is_earlier or {"handed_back", "requeued", "ended", "excluded"} & kinds:
            return {}
        try:  # the message is as old as the attempt
            nodes = expand(NODES.read(attempt.logs))
            began = NODES.at(attempt.logs).stat().st_mtime
        except (OSError, UserError):
            return {}
        found = culprits(attempt, nodes, self.nodes)
        if not found:
            for node, when in self.scheduler.restarted(nodes, began).items():
                found[node] = f"{when}, while attempt {attempt.number} ran there"
        return found

    def queue_again(self, how: How, own: OwnJob, env: Mapping[str, str], *, failed: bool) -> str:
        """Queue the job, or another one behind it. Returns why that was not possible; empty once it is done."""
        attempt = self.attempt
        job_id = self.place.job_id
        refusal = ""
        if how == "requeue":
            try:
                self._requeue(has_lost=failed)
            except NoProgram:  # in a container
                REQUEUE.send(attempt.logs, job_id, within=attempt.run.path)
                attempt.requeued(job_id)
                return ""
            except NoAnswer as error:
                if self.scheduler.own_job(job_id).is_to_be_queued:  # else it was taken, and only the answer was lost
                    refusal = f"requeue refused: {error.words}"
            if not refusal:
                attempt.requeued(job_id)
                self.exclude_bad_nodes(own, failed=failed)
                return _wait_for_the_end()
        try:
            link = self.scheduler.next_link(attempt.run, sorted(self._bad_nodes(own, failed=failed)), env)
        except (NoAnswer, OSError) as error:
            words = error.words if isinstance(error, NoAnswer) else error
            return refusal or f"no further job: {words}"
        terminal.say(f"Job {link} goes on when this one has ended.")
        attempt.requeued(link)
        return ""

    def exclude_bad_nodes(self, own: OwnJob, *, failed: bool) -> None:
        """Exclude bad nodes from a job that is on its way back into the queue."""
        out = self._bad_nodes(own, failed=failed)
        if out == set(own.excluded):
            return
        try:
            self.scheduler.exclude(self.place.job_id, sorted(out))
            terminal.say(f"Without {', '.join(sorted(out)) or 'no node'} from now on.")
        except NoAnswer as refusal:
            terminal.say(f"{', '.join(sorted(out))} cannot be excluded: {refusal.words}")

    def _bad_nodes(self, own: OwnJob, *, failed: bool) -> set[str]:
        """Name nodes for the next start to do without: those of the job now, and those that ended this attempt."""
        found = culprits(self.attempt, self.place.nodes, self.nodes) if failed else {}
        return self._without(own, found)

    def _without(self, own: OwnJob, found: dict[str, str]) -> set[str]:
        """Join the user's exclusions and bad nodes, as long as enough are left: else the job would wait for ever.

        Args:
            found: nodes that have ended the attempt, and why. Those that are excluded are recorded.
        """
        known = excluded_nodes(self.attempt.run)
        bad = list(known | found)  # the oldest first
        if not bad:
            return set(own.excluded)
        asked = set(own.excluded) - set(known)
        out = spared([node for node in bad if node not in own.required], self._usable() - asked, self.needed)
        kept = [node for node in bad if node not in out]
        if kept:
            why = "too few nodes would be left"
            if set(kept) <= set(own.required):
                why = "they are in --nodelist"
            # On stderr: what `begin` says on stdout is for the shell.
            terminal.warn(f"{', '.join(kept)} should be left out, but {why}: the run goes on with them.")
        for node in out:
            if node not in known:
                self.attempt.excluded(node, found[node])
        return asked | set(out)

    @property
    def needed(self) -> int:
        return int(self.size.partition("-")[0]) if self.size else self.place.needed

    def _usable(self) -> set[str]:
        """Name the nodes where the job can start: they are of the kinds that it has now."""
        kinds = {self.nodes[name].kind for name in self.place.nodes if name in self.nodes}
        return {name for name, node in self.nodes.items() if not is_broken(node.state) and node.kind in kinds}


def _wait_for_the_end() -> str:
    """Wait until the scheduler ends this script by a SIGTERM. Returns what is wrong if it does not."""
    if signal.sigtimedwait([signal.SIGTERM], END_SECONDS):
        return ""
    return "SLURM took the requeue and did not act on it"


def feed(folders: Sequence[Path], env: Mapping[str, str]) -> int:
    """Queue runs of a sweep that the queue did not take before. Returns the job's exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # of the job's own requeue
    if not around(env)[0].feed(folders, env):
        return 0
    terminal.warn(_wait_for_the_end())
    return 1


def _tell_followers(attempt: Attempt) -> None:
    """Tell commands that follow the run that its job ends now: they need not wait to ask the scheduler."""
    with suppress(OSError):
        OVER.send(attempt.logs, "", within=attempt.run.path)


def main(arguments: Sequence[str], env: Mapping[str, str]) -> int:
    """Run a verb. Only batch scripts call it, so that a mistake in the arguments is ours."""
    verb, *rest = arguments
    attempt = Attempt.named_in(env)
    try:
        if verb == "begin":
            terminal.say(begin(env))
            verb = ""  # it goes on
            return 0
        if verb == "preflight":
            return pronounce(env)
        if verb == "feed":
            return feed(list(map(Path, rest)), env)
        how: How = "requeue"
        if "--no-requeue" in rest:
            how = "no"
        elif "--chain" in rest:
            how = "chain"
        code = int(rest[0])
        # SIGTERM comes of a preemption that signals the batch shell too, or of our requeue: block it to wait for it.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        if "--without-ranks" in rest and attempt is not None:
            attempt.handed_back(node_rank=0, step=None, signals=[signal.Signals(code - 128).name])
        if "--in-place" not in rest:
            return end(code, env, how=how)
        lines = again(code, env)
        if lines:
            terminal.say(lines)
            verb = ""
            return 0
        with redirect_stdout(sys.stderr):  # what is on stdout is for the shell
            return end(code, env, how=how)
    except TrainkitError as error:
        terminal.warn(str(error))
        return error.exit_code
    finally:
        if verb in ("begin", "end") and env.get(RUN_DIR):
            notify.tell(RunDir(Path(env[RUN_DIR])), env)
        if verb == "end" and attempt is not None:
            _tell_followers(attempt)


if __name__ == "__main__":
    run_program(main)
