"""A stale attempt: SLURM took its node for dead and started the job again, and its ranks live on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from trainkit.run.events import Attempt, Writer, read_events, writing
from trainkit.run.folder import RunDir
from trainkit.run.lease import StaleAttemptError


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", "seed: 0\n")


@pytest.fixture
def both(run: RunDir) -> Iterator[tuple[Writer, Writer]]:
    """The first attempt's writer, and that of the second, which has taken over."""
    with ExitStack() as stack:
        first = stack.enter_context(writing(Attempt.begin(run), job_id="7"))
        first.attempt.started(step=0)
        yield first, stack.enter_context(writing(Attempt.begin(run), job_id="7"))


@pytest.mark.parametrize(
    "write",
    [
        lambda attempt: attempt.saved(10),
        lambda attempt: attempt.handed_back(node_rank=0, step=10, signals=["SIGTERM"]),
        lambda attempt: attempt.failed("connection reset", rank=0),
        lambda attempt: attempt.ended("COMPLETED", step=10),
        lambda attempt: attempt.remark("skipped", step=10),
    ],
    ids=["saved", "handed_back", "failed", "ended", "remark"],
)
def test_rank_0_of_a_stale_attempt_writes_nothing_down(
    run: RunDir, both: tuple[Writer, Writer], write: Callable[[Attempt], None]
) -> None:
    before = run.events.read_bytes()
    with pytest.raises(StaleAttemptError, match=r"has another writer now: job 7, .* attempt 1"):
        write(both[0].attempt)
    assert run.events.read_bytes() == before
    write(both[1].attempt)
    assert run.events.read_bytes() != before


def test_an_attempt_that_comes_after_a_newer_one_has_trained_never_begins(run: RunDir) -> None:
    late, newer = Attempt.begin(run), Attempt.begin(run)
    with writing(newer, job_id="7"):
        newer.started(step=0)
    with pytest.raises(StaleAttemptError, match="attempt 1 has trained"), writing(late, job_id="7"):
        pass
    assert not run.lease.exists()


def test_a_script_knows_the_attempt_that_has_taken_over_from_its_own(run: RunDir) -> None:
    first, second = Attempt.begin(run), Attempt.begin(run)
    assert first.successor() is None, "the newer one has only been begun"
    with writing(second, job_id="7"):
        assert (first.successor(), second.successor()) == (1, None)
        second.started(step=0)
    assert (first.successor(), second.successor()) == (1, None)


def test_a_failure_that_cannot_be_written_down_is_said(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run.events.mkdir()
    Attempt(run, 0).failed("OSError: No space left on device", rank=0)
    assert "OSError: No space left on device\n(not written down: " in capsys.readouterr().err
    run.events.rmdir()
    assert read_events(run) == []
