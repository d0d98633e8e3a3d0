"""Dependencies on runs. SLURM starts a job at once if it no longer knows the job to wait for."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.launch.conftest import GPU_SITE
from trainkit.cluster.slurm_dependency import translated, with_job_ids
from trainkit.common.errors import RefusedError, UserError
from trainkit.config.loading import Loaded
from trainkit.launch.planning import make_plan
from trainkit.run.events import append_event
from trainkit.run.folder import RunDir

Find = Callable[[str], Sequence[RunDir]]
FakeCommand = Callable[[str, str], Path]

QUEUE = """\
17|RUNNING|None|0:10|n1
30_0|PENDING|Priority|0:00|
30_1|PENDING|Priority|0:00|
30_2|PENDING|Priority|0:00|
40_0|RUNNING|None|0:10|n1
40_1|RUNNING|None|0:10|n1
50_0|PENDING|Priority|0:00|
60|PENDING|Priority|0:00|
70_0|RUNNING|None|0:10|n1
"""
ACCOUNTS = """\
70_0|RUNNING|0:0|n1
70_1|FAILED|1:0|n2
80|COMPLETED|0:0|n1
81|FAILED|1:0|n1
"""


@pytest.fixture
def slurm(fake_command: FakeCommand) -> FakeCommand:
    """A SLURM with these jobs in its queue and its accounts."""
    fake_command("squeue", f"cat <<'E'\n{QUEUE}E")
    fake_command("sacct", f"cat <<'E'\n{ACCOUNTS}E")
    return fake_command


@pytest.fixture
def find(tmp_path: Path) -> Find:
    """Runs by what has become of them; `sweep` has three."""

    def make(name: str, job_id: str = "", ended: str = "", executor: str = "slurm") -> RunDir:
        run = RunDir.create(tmp_path / name, "seed: 0\n")
        if job_id:
            append_event(run, "submitted", executor=executor, job_id=job_id, attempts_before=0)
        if ended:
            append_event(run, "ended", attempt=0, state=ended)
        return run

    alone = [
        make("waits", "17"), make("done", "18", "COMPLETED"), make("failed", "19", "FAILED"), make("never"),
        make("here", "20", executor="local"), make("4711", "21"), make("requeued", "60", "PREEMPTED"),
        make("killed", "81"), make("lost", "99"), make("stopped", "98"), make("went-well", "80"),
    ]  # fmt: skip
    runs = {run.name: [run] for run in alone}
    append_event(runs["stopped"][0], "cancelled", job_id="98")
    runs["sweep"] = [make(f"s{index}", f"30_{index}") for index in range(3)]
    runs["partly"] = [make("p0", "40_0", "COMPLETED"), make("p1", "40_1"), make("p2", "50_0")]
    runs["half"] = runs["partly"][:2]
    runs["apart"] = [make("a0", "40_0"), make("a1", "50_0")]
    runs["mixed"] = [make("m0", "70_0"), make("m1", "70_1")]

    def find(name: str) -> Sequence[RunDir]:
        if name not in runs:
            raise UserError(f"No run '{name}'.")
        return runs[name]

    return find


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(
    ("written", "given"),
    [
        # Names of runs become what is left to wait for
        ("afterok:waits:12", "afterok:17:12"),
        ("afterok:waits,afterany:sweep", "afterok:17,afterany:30"),
        ("afterok:partly", "afterok:40_1:50_0"),
        ("aftercorr:half", "aftercorr:40"),
        ("afterany:mixed", "afterany:70_0"),
        ("afterok:done", ""),
        ("afterany:failed", ""),
        ("afterany:stopped", ""),
        ("afterok:went-well", ""),
        ("afterok:requeued", "afterok:60"),  # although its record has an end
        # Job ids are SLURM's to judge, also where a run is called so
        ("afterok:17_3,singleton", "afterok:17_3,singleton"),
        ("after:17+5", "after:17+5"),
        ("afterok:30_*", "afterok:30_*"),
        ("afterok:4711", "afterok:4711"),
        ("afterok:17?afterok:80", "afterok:17?afterok:80"),
        ("singleton", "singleton"),
    ],
)
def test_a_dependency_becomes_what_is_left_to_wait_for(find: Find, written: str, given: str) -> None:
    assert translated(written, find) == given


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(
    ("written", "error", "words"),
    [
        ("afterok:nosuch", UserError, "No run 'nosuch'"),
        ("afterok:here", UserError, "executor local"),
        ("afterok:never", UserError, "never submitted"),
        ("aftercorr:apart", UserError, "several arrays"),
        ("afterok:waits?afterok:17", UserError, "any one of its jobs is enough"),
        ("afterok:failed", RefusedError, "jobs.resume"),
        ("afterok:killed", RefusedError, "killed is FAILED"),  # nothing has written an end into its record
        ("AfterOK:stopped", RefusedError, "stopped is CANCELLED"),
        ("afterok:mixed", RefusedError, "m1 is FAILED"),  # one that the queue has forgotten
        ("afternotok:done", RefusedError, "done is COMPLETED"),
        ("afterok:lost", RefusedError, "SLURM does not know job 99 of lost"),  # SLURM would start the job at once
    ],
)
def test_what_cannot_come_true_or_would_not_wait_is_refused(
    find: Find, written: str, error: type[UserError], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        translated(written, find)
    assert caught.value.exit_code == error.exit_code


def test_without_accounts_only_the_record_tells_of_a_forgotten_job(slurm: FakeCommand, find: Find) -> None:
    slurm("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    slurm("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    assert translated("afterok:done,afterany:failed", find) == ""
    with pytest.raises(RefusedError, match="there is no accounting here"):
        translated("afterok:went-well", find)


def test_where_slurm_does_not_answer_only_records_count(slurm: FakeCommand, find: Find) -> None:
    slurm("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    slurm("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    assert translated("afterok:lost,afterok:done", find) == "afterok:99"
    with pytest.raises(RefusedError, match="failed is FAILED"):
        translated("afterok:failed", find)


@pytest.mark.usefixtures("slurm")
def test_the_plan_says_whose_jobs_they_are(find: Find, loaded: Callable[..., Loaded]) -> None:
    plan = with_job_ids(make_plan(loaded(dependency="afterok:waits"), GPU_SITE, Path("run")), find)
    (item,) = [item for item in plan.directives if item.name == "dependency"]
    said = (item.value, str(item.source), item.reason)
    assert said == ("afterok:17", "flag --dependency", "what afterok:waits still waits for")
    met = with_job_ids(make_plan(loaded(dependency="afterok:done"), GPU_SITE, Path("run")), find)
    assert not [item for item in met.directives if item.name == "dependency"]
