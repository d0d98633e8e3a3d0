"""``python -m jobs.why RUN``: why a run failed or does not start: one cause, its evidence, one command to fix it."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence

from jobs import cli
from trainkit import terminal
from trainkit.run.events import history_of
from trainkit.run.folder import RunDir, find_runs
from trainkit.schedulers.base import JobState, job_state, job_states


def parser() -> cli.Parser:
    parser = cli.Parser("why", "Say why a run failed, or why it does not start; of a sweep, each cause once.")
    parser.add_argument("run", metavar="RUN", help="a run's or a sweep's name or folder")
    return parser.taking("--attempt", "--host")


def main(argv: Sequence[str], env: Mapping[str, str]) -> None:
    args = parser().parsed(argv, env)
    from trainkit.diagnosis.causes import cause_of

    if len(runs := find_runs(args.run, env)) > 1:
        _print_sweep(runs)
        return
    run = runs[0]
    cli.require_attempt(run, args.attempt)
    state = job_state(run)
    cause = cause_of(run, state, args.attempt)
    print(_of_run(run, state, _nothing(run, state) if cause is None else cause))
    if args.attempt is None and state.start:
        print(f"SLURM means to start it about {state.start.replace('T', ' ')[:16]}, if no job comes before it.")
    if args.attempt is None and state.alive == "yes":
        _print_earlier(run, state)


def _of_run(run: RunDir, state: JobState, words: object) -> str:
    heading = f"{run.name}: {state.state}" + (f" (job {state.job_id})" if state.job_id else "")
    return terminal.lines(f"{heading}. {words}")


def _print_sweep(runs: Sequence[RunDir]) -> None:
    """How many runs are in which state, and each cause with the runs that have it, told of the first of them."""
    from trainkit.diagnosis.causes import cause_of

    states = job_states(runs)
    counts = Counter(state.state for state in states)
    print(f"{len(runs)} runs: {', '.join(f'{count} {state}' for state, count in counts.most_common())}.")
    same: dict[tuple[str, str], list[tuple[RunDir, JobState, object]]] = {}
    for run, state in zip(runs, states, strict=True):
        if cause := cause_of(run, state):
            same.setdefault(cause.gist(run), []).append((run, state, cause))
        elif state.state in ("UNKNOWN", "NOT SUBMITTED"):
            same.setdefault((state.state, state.reason), []).append((run, state, _nothing(run, state)))
    for (run, state, told), *others in same.values():
        print(_of_run(run, state, told))
        if others:
            print(terminal.one_line(f"  The same: {', '.join(other.path.name for other, _, _ in others)}.", 1000))


def _print_earlier(run: RunDir, state: JobState) -> None:
    """What ended the attempt before, of a run that goes on."""
    from trainkit.diagnosis.causes import cause_of

    for last in sorted(history_of(run).requeued)[-1:]:
        if last in history_of(run).handed_back:
            print(f"Attempt {last} was told to stop: it saved, and goes on.")
        elif cause := cause_of(run, state, last):
            print(terminal.lines(f"Attempt {last} failed and was queued again. {cause}"))


def _nothing(run: RunDir, state: JobState) -> str:
    from jobs.status import forecast_of, words
    from trainkit.diagnosis.evidence import course_of
    from trainkit.run.metrics import progress_of

    if state.state == "RUNNING":
        life = history_of(run)
        left = forecast_of(run, state, life, progress_of(run, pace_since=life.started.get("time", 0.0)))
        end = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + left.seconds)) if left is not None else ""
        return str(course_of(run, ends=f"It ends about {end}, {words(left)}." if left is not None else ""))
    resume, reason = terminal.command("resume", run.path), f" {state.reason}." if state.reason else ""
    said = {
        "COMPLETED": "It came to its end; nothing failed.",
        "UNKNOWN": f"Nobody can tell what became of it: {state.reason}.",
        "NOT SUBMITTED": f"It has never been queued: `{resume}` queues it.",
    }
    return said.get(state.state, f"Nothing that it has left speaks of a failure.{reason}")


if __name__ == "__main__":
    cli.run(main)
