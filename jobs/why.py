"""``python -m jobs.why RUN``: why a run failed or does not start: one cause, its evidence, one command to fix it."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence

from jobs import cli
from trainkit.cluster.job_states import job_state, job_states
from trainkit.cluster.scheduler import JobState
from trainkit.common import terminal
from trainkit.run.events import read_events
from trainkit.run.find import find_runs
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of


def parser() -> cli.Parser:
    parser = cli.Parser("why", "Say why a run failed or does not start; for a sweep, each cause once.")
    parser.add_argument("run", metavar="RUN", help="a run's or a sweep's name or folder")
    return parser.taking("--attempt", "--host")


def main(argv: Sequence[str], env: Mapping[str, str]) -> None:
    args = parser().parsed(argv, env)
    from trainkit.diagnosis.causes import cause_of

    runs = find_runs(args.run, env)
    if len(runs) > 1:
        _print_sweep(runs)
        return
    run = runs[0]
    cli.require_attempt(run, args.attempt)
    state = job_state(run)
    cause = cause_of(run, state, args.attempt)
    print(_of_run(run, state, cause or _nothing(run, state)))
    if args.attempt is None and state.start:
        print(f"SLURM plans to start it about {state.start.replace('T', ' ')[:16]}, unless other jobs come first.")
    if args.attempt is None and state.alive == "yes":
        _print_earlier(run, state)


def _of_run(run: RunDir, state: JobState, words: object) -> str:
    job = f" (job {state.job_id})" if state.job_id else ""
    return terminal.lines(f"{run.name}: {state.state}{job}. {words}")


def _print_sweep(runs: Sequence[RunDir]) -> None:
    """Print how many runs are in which state, and each cause with the runs that have it, told of the first."""
    from trainkit.diagnosis.causes import cause_of

    states = job_states(runs)
    counts = Counter(state.state for state in states)
    print(f"{len(runs)} runs: {', '.join(f'{count} {state}' for state, count in counts.most_common())}.")
    same: dict[tuple[str, str], list[tuple[RunDir, JobState, object]]] = {}
    for run, state in zip(runs, states, strict=True):
        cause = cause_of(run, state)
        if cause:
            same.setdefault(cause.gist(run), []).append((run, state, cause))
        elif state.state in ("UNKNOWN", "NOT SUBMITTED"):
            same.setdefault((state.state, state.reason), []).append((run, state, _nothing(run, state)))
    for (run, state, told), *others in same.values():
        print(_of_run(run, state, told))
        if others:
            print(terminal.one_line(f"  The same: {', '.join(other.path.name for other, _, _ in others)}.", 1000))


def _print_earlier(run: RunDir, state: JobState) -> None:
    """Print what ended the attempt before, of a run that goes on."""
    from trainkit.diagnosis.causes import cause_of

    life = history_of(run)
    last = max(life.requeued, default=-1)
    if last in life.handed_back:
        print(f"Attempt {last} was told to stop; it saved, and the run continues.")
    elif last in life.requeued:
        cause = cause_of(run, state, last)
        how = "was queued again"
        if any(event.get("in_place") for event in read_events(run, "requeued") if event.get("attempt") == last):
            how = "was started again in place"
        if cause:
            print(terminal.lines(f"Attempt {last} failed and {how}. {cause}"))


def _nothing(run: RunDir, state: JobState) -> str:
    from trainkit.diagnosis.activity import activity_of
    from trainkit.launch.run_status import forecast_of, words
    from trainkit.run.run_progress import progress_of

    if state.state == "RUNNING":
        life = history_of(run)
        left = forecast_of(run, state, life, progress_of(run, pace_since=life.started.get("time", 0.0)))
        if left is None:
            return str(activity_of(run, ends=""))
        end = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + left.seconds))
        return str(activity_of(run, ends=f"It ends about {end}, {words(left)}."))
    if state.state == "COMPLETED":
        return "It has finished; nothing failed."
    if state.state == "UNKNOWN":
        return f"Its state is unknown: {state.reason}."
    if state.state == "NOT SUBMITTED":
        return f"It was never queued; `{terminal.command('resume', run.path)}` queues it."
    said = "Nothing in its folder shows a failure."
    return f"{said} {state.reason}." if state.reason else said


if __name__ == "__main__":
    cli.run(main)
