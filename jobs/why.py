"""``python -m jobs.why RUN``: why a run failed or does not start: one cause, its evidence, one command to fix it."""

from collections import Counter
from collections.abc import Mapping, Sequence

from jobs import cli, output
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
    return parser.taking("--attempt", "--json", "--host")


def main(argv: Sequence[str], env: Mapping[str, str]) -> None:
    args = parser().parsed(argv, env)
    from trainkit.diagnosis.causes import cause_of
    from trainkit.launch.findings import finding_of, nothing_of

    runs = find_runs(args.run, env)
    if args.json:
        from jobs.shapes import Finding

        if len(runs) == 1:
            cli.require_attempt(runs[0], args.attempt)
            found = [finding_of(runs[0], job_state(runs[0]), args.attempt)]
        else:
            groups = _groups(runs, job_states(runs))
            found = [finding_of(run, state, None, [other for other, _, _ in same]) for (run, state, _), *same in groups]
        output.emit([Finding.model_validate(item) for item in found])
        return
    if len(runs) > 1:
        _print_sweep(runs)
        return
    run = runs[0]
    cli.require_attempt(run, args.attempt)
    state = job_state(run)
    cause = cause_of(run, state, args.attempt)
    print(_of_run(run, state, cause or nothing_of(run, state)))
    if args.attempt is None and state.start:
        print(f"SLURM plans to start it about {state.start.replace('T', ' ')[:16]}, unless other jobs come first.")
    if args.attempt is None and state.alive == "yes":
        _print_earlier(run, state)


def _of_run(run: RunDir, state: JobState, words: object) -> str:
    job = f" (job {state.job_id})" if state.job_id else ""
    return terminal.lines(f"{run.name}: {state.state}{job}. {words}")


def _print_sweep(runs: Sequence[RunDir]) -> None:
    """Print how many runs are in which state, and each cause with the runs that have it, told of the first."""
    states = job_states(runs)
    counts = Counter(state.state for state in states)
    print(f"{len(runs)} runs: {', '.join(f'{count} {state}' for state, count in counts.most_common())}.")
    for (run, state, told), *others in _groups(runs, states):
        print(_of_run(run, state, told))
        if others:
            print(terminal.one_line(f"  The same: {', '.join(other.path.name for other, _, _ in others)}.", 1000))


def _groups(runs: Sequence[RunDir], states: Sequence[JobState]) -> list[list[tuple[RunDir, JobState, object]]]:
    """Group runs by cause, with what is told of each; those that nothing has failed of are left out."""
    from trainkit.diagnosis.causes import cause_of
    from trainkit.launch.findings import nothing_of

    same: dict[tuple[str, str], list[tuple[RunDir, JobState, object]]] = {}
    for run, state in zip(runs, states, strict=True):
        cause = cause_of(run, state)
        if cause:
            same.setdefault(cause.gist(run), []).append((run, state, cause))
        elif state.state in ("UNKNOWN", "NOT SUBMITTED"):
            same.setdefault((state.state, state.reason), []).append((run, state, nothing_of(run, state)))
    return list(same.values())


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


if __name__ == "__main__":
    cli.run(main)
