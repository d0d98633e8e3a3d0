"""What happened to a run: written by one module, read back with types; an attempt that another one has followed."""

from __future__ import annotations

import ast
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from trainkit.errors import UserError
from trainkit.run.events import (
    Attempt,
    Writer,
    append_event,
    cancelled,
    history_of,
    never_began,
    read_events,
    submitted,
    writing,
)
from trainkit.run.folder import RunDir
from trainkit.run.lease import ProcessId, StaleAttemptError


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", "seed: 0\n")


def test_events_are_timed_and_in_order_and_one_kind_can_be_read_alone(run: RunDir) -> None:
    for kind in ("submitted", "started", "saved"):
        append_event(run, kind, step=7)
    assert [event["event"] for event in read_events(run)] == ["submitted", "started", "saved"]
    (event,) = read_events(run, "saved")
    assert event["step"] == 7
    assert abs(event["time"] - time.time()) < 60


def test_a_text_of_any_length_leaves_a_record_that_can_be_read(run: RunDir) -> None:
    append_event(run, "unanswered", error="x" * 100_000_000)
    assert run.events.stat().st_size < 100_000
    assert [event["event"] for event in read_events(run)] == ["unanswered"]


PROJECT = Path(__file__).parents[2]


def test_nothing_else_writes_events() -> None:
    writers = {
        str(file.relative_to(PROJECT))
        for package in ("jobs", "trainkit")
        for file in (PROJECT / package).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("append_event")
    }
    assert writers == {"trainkit/run/events.py"}


def test_each_event_says_what_it_is_of(run: RunDir) -> None:
    here = socket.gethostname()
    submitted(run, "slurm", "4711", attempts_before=3)
    cancelled(run, "4711")
    never_began(run, "4711", "CANCELLED")
    attempt = Attempt(run, 4)
    attempt.started(step=5, world_size=2)
    attempt.saved(6, epoch=1.5)
    attempt.handed_back(node_rank=1, step=6, signals=("SIGUSR2",))
    attempt.requeued("4711")
    attempt.failed("it broke", rank=1)
    attempt.failed("it broke there", rank=None, host="n2")
    attempt.remark("skipped", step=7)
    attempt.ended("FAILED", job_id="4711", exit_codes=[1])
    assert [{key: value for key, value in event.items() if key != "time"} for event in read_events(run)] == [
        {"event": "submitted", "executor": "slurm", "job_id": "4711", "attempts_before": 3},
        {"event": "cancelled", "job_id": "4711"},
        {"event": "ended", "state": "CANCELLED", "job_id": "4711"},
        {"event": "started", "attempt": 4, "step": 5, "world_size": 2},
        {"event": "saved", "attempt": 4, "step": 6, "epoch": 1.5},
        {"event": "handed_back", "attempt": 4, "node_rank": 1, "step": 6, "signals": ["SIGUSR2"], "host": here},
        {"event": "requeued", "attempt": 4, "job_id": "4711"},
        {"event": "failed", "attempt": 4, "rank": 1, "host": here, "error": "it broke"},
        {"event": "failed", "attempt": 4, "rank": None, "host": "n2", "error": "it broke there"},
        {"event": "skipped", "attempt": 4, "step": 7},
        {"event": "ended", "attempt": 4, "state": "FAILED", "job_id": "4711", "exit_codes": [1]},
    ]


def test_the_claim_on_an_attempt_is_its_users_alone(tmp_path: Path) -> None:
    attempt = Attempt.begin(RunDir(tmp_path / "not" / "yet" / "there"))
    assert (attempt.logs / "node-0").stat().st_mode & 0o777 == 0o600


def test_nodes_that_share_a_folder_begin_the_same_attempt_until_it_is_over(run: RunDir) -> None:
    assert [Attempt.begin(run, node_rank=rank).number for rank in (0, 1, 2)] == [0, 0, 0]
    assert [Attempt.begin(run, node_rank=rank).number for rank in (2, 0)] == [1, 1]
    assert run.attempts() == [0, 1]
    Attempt(run, 1).started(step=0)
    assert Attempt.begin(run, node_rank=1).number == 1, "a node that comes late joins what trains already"
    Attempt(run, 1).ended("FAILED")
    assert Attempt.begin(run, node_rank=3).number == 2, "and not what is over"


def test_a_gap_left_by_a_deleted_log_folder_changes_no_number(run: RunDir) -> None:
    for _ in range(2):
        Attempt.begin(run).ended("FAILED")
    (run.attempt_logs(0) / "node-0").unlink()
    run.attempt_logs(0).rmdir()
    assert Attempt.begin(run).number == 2


@pytest.mark.parametrize(
    "env",
    [
        {"TRAINKIT_ATTEMPT": "0"},
        {"TRAINKIT_RUN_DIR": "/x"},
        {"TRAINKIT_RUN_DIR": "/x", "TRAINKIT_ATTEMPT": "²"},
        {"TRAINKIT_RUN_DIR": "/x", "TRAINKIT_ATTEMPT": "-1"},
    ],
)
def test_half_an_attempt_in_the_environment_is_refused(env: dict[str, str]) -> None:
    with pytest.raises(UserError, match="do not name an attempt"):
        Attempt.named_in(env)
    assert Attempt.named_in({}) is None


def test_a_whole_life_is_read_back(run: RunDir) -> None:
    me = ProcessId("n1", 7, "123", "space")
    submitted(run, "local", "7", me)
    first = Attempt.begin(run)
    first.started(step=0, world_size=2)
    first.saved(10)
    first.handed_back(node_rank=0, step=12, signals=["SIGUSR2"])
    first.requeued("7")
    assert Attempt.named_in(first.environment()) == first
    second = Attempt.begin(run)
    second.started(step=12, world_size=2)
    second.failed("ValueError: bad", rank=1, host="n2")
    second.ended("FAILED", job_id="7", exit_codes=[0, 1])
    life = history_of(run)
    assert life.submission is not None
    assert (life.submission.job_id, life.submission.process, life.submission.ended) == ("7", me, "FAILED")
    assert life.handed_back == life.requeued == {0}
    (failure,) = life.failures
    assert (failure.attempt, failure.rank, failure.host, failure.error) == (1, 1, "n2", "ValueError: bad")
    assert life.started["step"] == 12
    assert (life.outcome, life.finished) == ("FAILED", False)


def test_what_happened_before_a_submission_is_not_its_ending(run: RunDir) -> None:
    submitted(run, "slurm", "1")
    cancelled(run, "1")
    Attempt.begin(run).ended("CANCELLED")
    submitted(run, "slurm", "2")
    first, second = history_of(run).submissions
    assert (first.cancelled, first.ended, second.cancelled, second.ended) == (True, "CANCELLED", False, None)
    assert second.attempts_before == 1
    assert history_of(run).outcome is None


def test_a_training_that_came_to_its_end_has_finished_whatever_follows(run: RunDir) -> None:
    attempt = Attempt.begin(run)
    attempt.ended("COMPLETED", step=380)
    attempt.ended("FAILED", exit_codes=[1])
    assert history_of(run).finished


def test_odd_events_are_read_as_far_as_they_make_sense(run: RunDir) -> None:
    append_event(run, "submitted", executor=["slurm"], job_id={"a": 1}, attempts_before="x", pid="7", host=3)
    append_event(run, "failed", attempt="0", rank=True, host=None, error=["x"])
    append_event(run, "handed_back", attempt=-1)
    append_event(run, "ended", state=5.5)
    with run.events.open("a") as out:
        out.write('{"event": "submitted", "time": "abc"}\n[1]\n{"event": ["x"]}\nnonsense\n')
    life = history_of(run)
    assert [(item.executor, item.job_id, item.process) for item in life.submissions] == [("", "", None)] * 2
    assert (life.failures[0].rank, life.failures[0].error, life.handed_back) == (None, "", frozenset())
    assert life.outcome is None
    assert len(read_events(run)) >= 5


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
