from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from trainkit.config.loading import Loaded
from trainkit.errors import RefusedError, UserError
from trainkit.launch.plan import make_plan
from trainkit.run.events import append_event
from trainkit.run.folder import RunDir
from trainkit.schedulers.slurm import translated, with_job_ids
from trainkit.site.profile import Site


@pytest.fixture
def find(tmp_path: Path) -> Callable[[str], Sequence[RunDir]]:
    """Runs by what has become of them; `sweep` has four."""

    def make(name: str, job_id: str = "", ended: str = "", executor: str = "slurm") -> RunDir:
        run = RunDir.create(tmp_path / name, "seed: 0\n")
        if job_id:
            append_event(run, "submitted", executor=executor, job_id=job_id, attempts_before=0)
        if ended:
            append_event(run, "ended", attempt=0, state=ended)
        return run

    alone = [
        make("waits", "17"), make("done", "18", "COMPLETED"), make("failed", "19", "FAILED"), make("never"),
        make("here", "20", executor="local"), make("4711", "21"),
    ]  # fmt: skip
    runs = {run.name: [run] for run in alone}
    runs["sweep"] = [make(f"s{index}", f"30_{index}") for index in range(3)]
    runs["partly"] = [make("p0", "40_0", "COMPLETED"), make("p1", "40_1"), make("p2", "50_0")]

    def find(name: str) -> Sequence[RunDir]:
        if name not in runs:
            raise UserError(f"No run '{name}'.")
        return runs[name]

    return find


@pytest.mark.parametrize(
    ("written", "given"),
    [
        ("afterok:17_3+5,singleton", "afterok:17_3+5,singleton"),
        ("afterok:4711", "afterok:4711"),  # although a run is called so
        ("afterok:waits:12", "afterok:17:12"),
        ("afterok:waits,afterany:sweep", "afterok:17,afterany:30"),
        ("afterok:partly", "afterok:40_1:50_0"),
        ("afterok:done", ""),
        ("afterany:failed", ""),
    ],
)
def test_names_of_runs_become_what_is_left_to_wait_for(
    find: Callable[[str], Sequence[RunDir]], written: str, given: str
) -> None:
    assert translated(written, find) == given


@pytest.mark.parametrize(
    ("written", "error", "words"),
    [
        ("afterok:nosuch", UserError, "No run 'nosuch'"),
        ("afterok:failed", RefusedError, "jobs.resume"),
        ("afternotok:done", RefusedError, "done is COMPLETED"),
        ("afterok:here", UserError, "executor local"),
        ("afterok:never", UserError, "never submitted"),
    ],
)
def test_what_cannot_come_true_is_refused(
    find: Callable[[str], Sequence[RunDir]], written: str, error: type[UserError], words: str
) -> None:
    with pytest.raises(error, match=words):
        translated(written, find)


def test_the_plan_says_whose_jobs_they_are(
    find: Callable[[str], Sequence[RunDir]], loaded: Callable[..., Loaded], gpu_site: Site
) -> None:
    plan = with_job_ids(make_plan(loaded(dependency="afterok:waits"), gpu_site, Path("run")), find)
    (item,) = [item for item in plan.directives if item.name == "dependency"]
    said = (item.value, str(item.source), item.reason)
    assert said == ("afterok:17", "flag --dependency", "the jobs of afterok:waits")
    met = with_job_ids(make_plan(loaded(dependency="afterok:done"), gpu_site, Path("run")), find)
    assert not [item for item in met.directives if item.name == "dependency"]
