"""What happened to a run: written by one module, read back with types."""

import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainkit.common.errors import UserError
from trainkit.run import events, history, run_lease, user_lists
from trainkit.run.events import Attempt
from trainkit.run.folder import RunDir
from trainkit.run.run_lease import Holder, ProcessId


def test_a_text_of_any_length_leaves_a_record_that_can_be_read(run: RunDir) -> None:
    events.append_event(run, "unanswered", error="x" * 100_000_000)
    assert run.events.stat().st_size < 100_000
    assert [event["event"] for event in events.read_events(run)] == ["unanswered"]


def test_a_life_is_written_line_by_line_and_read_back(run: RunDir) -> None:
    here, process = socket.gethostname(), ProcessId("n1", 7, "123", "space")
    events.submitted(run, "slurm", "4711", process, attempts_before=3)
    assert user_lists.has_started(run.path, "slurm", "4711", process.word()), "this user knows it for their own"
    events.cancelled(run, "4711")
    events.never_began(run, "4711", "CANCELLED")
    first = Attempt.begin(run)
    first.started(step=5, world_size=2)
    first.saved(6, epoch=1.5)
    first.handed_back(node_rank=1, step=6, signals=("SIGUSR2",))
    first.requeued("4711")
    assert Attempt.named_in(first.environment()) == first
    second = Attempt.begin(run)
    second.started(step=12)
    second.failed("it broke", rank=1)
    second.failed("it broke there", rank=None, host="n2")
    second.remark("skipped", step=7)
    second.ended("FAILED", job_id="4711", exit_codes=[0, 1])
    submitted, *others = events.read_events(run)
    about = (submitted["event"], submitted["executor"], submitted["job_id"], submitted["attempts_before"])
    assert about == ("submitted", "slurm", "4711", 3)
    assert [{key: value for key, value in event.items() if key != "time"} for event in others] == [
        {"event": "cancelled", "job_id": "4711"},
        {"event": "ended", "state": "CANCELLED", "job_id": "4711"},
        {"event": "started", "attempt": 0, "step": 5, "world_size": 2},
        {"event": "saved", "attempt": 0, "step": 6, "epoch": 1.5},
        {"event": "handed_back", "attempt": 0, "node_rank": 1, "step": 6, "signals": ["SIGUSR2"], "host": here},
        {"event": "requeued", "attempt": 0, "job_id": "4711"},
        {"event": "started", "attempt": 1, "step": 12},
        {"event": "failed", "attempt": 1, "rank": 1, "host": here, "error": "it broke"},
        {"event": "failed", "attempt": 1, "rank": None, "host": "n2", "error": "it broke there"},
        {"event": "skipped", "attempt": 1, "step": 7},
        {"event": "ended", "attempt": 1, "state": "FAILED", "job_id": "4711", "exit_codes": [0, 1]},
    ]
    (saved,) = events.read_events(run, "saved")
    assert abs(saved["time"] - time.time()) < 60
    life = history.history_of(run)
    assert life.submission is not None
    assert (life.submission.job_id, life.submission.process, life.submission.ended) == ("4711", process, "FAILED")
    assert life.handed_back == life.requeued == {0}
    failure = life.failures[-1]
    assert (failure.attempt, failure.rank, failure.host, failure.error) == (1, None, "n2", "it broke there")
    assert life.started["step"] == 12
    assert (life.outcome, life.finished) == ("FAILED", False)


def test_nodes_that_share_a_folder_begin_the_same_attempt_until_it_is_over(run: RunDir, tmp_path: Path) -> None:
    assert [Attempt.begin(run, node_rank=rank).number for rank in (0, 1, 2)] == [0, 0, 0]
    assert [Attempt.begin(run, node_rank=rank).number for rank in (2, 0)] == [1, 1]
    assert run.attempts() == [0, 1]
    Attempt(run, 1).started(step=0)
    assert Attempt.begin(run, node_rank=1).number == 1, "a node that comes late joins what trains already"
    Attempt(run, 1).ended("FAILED")
    shutil.rmtree(run.attempt_logs(0))
    assert Attempt.begin(run, node_rank=3).number == 2, "and not what is over, or was deleted"
    there = Attempt.begin(RunDir(tmp_path / "not" / "yet" / "there"))
    for begun in (there, there.start_again("4711")):
        assert (begun.logs / "node-0").stat().st_mode & 0o777 == 0o600
    with (
        pytest.raises(UserError, match="Cannot write into"),
        run_lease.lease_on(RunDir(tmp_path / "gone"), Holder.me()),
    ):
        pass


def test_an_environment_that_names_no_attempt_is_that_of_none() -> None:
    for path, number in (("", ""), ("", "0"), ("/x", ""), ("/x", "²"), ("/x", "-1")):
        assert Attempt.named_in({"TRAINKIT_RUN_DIR": path, "TRAINKIT_ATTEMPT": number}) is None


def test_what_happened_before_a_submission_is_not_its_ending(run: RunDir) -> None:
    events.submitted(run, "slurm", "1")
    events.cancelled(run, "1")
    Attempt.begin(run).ended("CANCELLED")
    events.submitted(run, "slurm", "2")
    first, second = history.history_of(run).submissions
    assert (first.cancelled, first.ended, second.cancelled, second.ended) == (True, "CANCELLED", False, None)
    assert second.attempts_before == 1
    assert history.history_of(run).outcome is None


def test_a_training_that_came_to_its_end_has_finished_whatever_follows(run: RunDir) -> None:
    Attempt(run, 0).remark("pruned", why="behind")
    Attempt(run, 0).ended("COMPLETED", step=380)
    Attempt(run, 0).ended("FAILED", exit_codes=[1])
    assert (history.history_of(run).finished, history.history_of(run).pruned) == (True, True)


@pytest.mark.parametrize(("codes", "refused"), [([1, 2], 2), ([3, 1], 3), ([1, 143], 0), ([], 0)])
def test_what_a_rank_refused_is_told_by_its_exit_code(run: RunDir, codes: list[int], refused: int) -> None:
    """Of the last attempt that has ended; failures of earlier ones, told late, are passed over."""
    events.submitted(run, "slurm", "1")
    Attempt.begin(run).ended("FAILED", exit_codes=[2])
    Attempt.begin(run).ended("FAILED", exit_codes=codes)
    Attempt(run, 1).started(world_size=1)
    events.append_event(run, "failed", attempt=0, rank=0, error="late")
    found = history.history_of(run)
    assert (found.refused_with, found.failures) == (refused, [])


def test_odd_events_are_read_as_far_as_they_make_sense(run: RunDir) -> None:
    events.append_event(run, "submitted", executor=["slurm"], job_id={"a": 1}, attempts_before="x", pid="7", host=3)
    events.append_event(run, "failed", attempt="0", rank=True, host=None, error=["x"])
    events.append_event(run, "handed_back", attempt=-1)
    events.append_event(run, "ended", state=5.5)
    with run.events.open("a") as out:
        out.write('{"event": "submitted", "time": "abc"}\n[1]\n{"event": ["x"]}\nnonsense\n')
    life = history.history_of(run)
    assert [(item.executor, item.job_id, item.process) for item in life.submissions] == [("", "", None)] * 2
    assert (life.failures[0].rank, life.failures[0].error, life.handed_back) == (None, "", set())
    assert life.outcome is None
    assert len(events.read_events(run)) >= 5


WHOLE = ("attempt", "attempts_before", "rank", "node_rank", "step", "total_steps", "steps_per_epoch", "world_size",
         "params", "pid")  # fmt: skip
TEXTS = "executor", "host", "state", "error", "device", "precision", "process_started", "token"


@pytest.mark.parametrize(
    ("keys", "good", "bad"),
    [(WHOLE, (3, None), "3"), (TEXTS, ("x",), 3), (("hosts", "signals"), (["x"], []), [3]), (("time",), (5.5,), "5"),
     (("exit_codes",), ([3],), ["x"]), (("job_id",), ("7_1", "a.b+c-d"), "--me"), (("epoch",), (1.5, "x", None), {1})],
)  # fmt: skip
def test_a_field_of_another_type_than_its_own_is_left_out(
    keys: tuple[str, ...], good: tuple[Any, ...], bad: Any
) -> None:
    for key in keys:
        for value in good:
            assert events.typed_event({"event": "saved", key: value}) == {"event": "saved", key: value}
        assert events.typed_event({"event": "saved", key: bad}) == {"event": "saved"}
    assert events.typed_event({"event": "x", "job_id": 7, "error": " a\nb"}) == {
        "event": "x",
        "job_id": "7",
        "error": "a",
    }


def test_a_run_is_its_feeders_until_it_has_a_job_of_its_own(run: RunDir) -> None:
    events.waits(run, "slurm", "7", "the queue is full")
    events.submitting(run, "slurm", "abc", feeder="7")
    events.refused(run, "SubmitJob", full=True)
    events.waits(run, "slurm", "8", "the queue is full")
    (waiting,) = history.history_of(run).submissions
    assert (waiting.job_id, waiting.waits, waiting.cancelled) == ("8", "the queue is full", False)
    events.submitting(run, "slurm", "abc", feeder="8")
    events.submitted(run, "slurm", "9_4")
    assert [(job.job_id, job.waits) for job in history.history_of(run).submissions] == [("9_4", "")]


@pytest.mark.parametrize("first", ["cancelled", "submitting"])
def test_a_cancel_while_its_feeder_queues_it_ends_the_job(run: RunDir, first: str) -> None:
    events.waits(run, "slurm", "7", "the queue is full")
    if first == "cancelled":
        events.cancelled(run, "7")
    events.submitting(run, "slurm", "abc", feeder="7")
    if first == "submitting":
        events.cancelled(run, "7")
    assert cut_short(run).cancelled
    events.refused(run, "SubmitJob", full=True)  # then it is not queued later
    (waiting,) = history.history_of(run).submissions
    assert waiting.cancelled
    events.submitting(run, "slurm", "abc")  # by `resume`
    assert not cut_short(run).cancelled


def test_a_run_that_is_to_train_longer_may_wait_for_that(run: RunDir) -> None:
    Attempt.begin(run).ended("COMPLETED")
    events.prolonged(run, 5, before=5, total_steps=9, how="kept")
    (event,) = events.read_events(run, "prolonged")
    assert [event[name] for name in ("step", "total_steps_before", "total_steps", "schedule")] == [5, 5, 9, "kept"]
    events.submitting(run, "slurm", "abc")
    events.refused(run, "SubmitJob", full=True)
    assert not history.history_of(run).finished
    events.refused(run, "no such partition")
    assert history.history_of(run).finished


def cut_short(run: RunDir) -> history.Submission:
    cut = history.history_of(run).cut_short
    assert cut is not None
    return cut


def test_a_submission_without_an_answer_is_known_until_its_end_is(run: RunDir) -> None:
    Attempt.begin(run)
    began = time.time()
    events.submitting(run, "slurm", "abc")
    cut = cut_short(run)
    assert cut == history.Submission("slurm", cut.time, 1, ProcessId.of(os.getpid()), token="abc")
    events.unanswered(run, "timed out")
    events.cancelled(run, "")
    asked = cut_short(run)
    assert asked == replace(cut, time=asked.time, unanswered="timed out", cancelled=True)
    assert began - 0.001 <= cut.time <= asked.time <= time.time() + 0.001
    events.submitted(run, "slurm", "8", continues="7", adopted=True)
    events.submitted(run, "slurm", "8")
    life = history.history_of(run)
    assert (life.cut_short, [(job.job_id, job.attempts_before) for job in life.submissions]) == (None, [("8", 1)])
    found, plain = events.read_events(run, "submitted")
    assert (found["continues"], found["adopted"]) == ("7", True)
    assert not {"continues", "adopted"} & plain.keys()
    events.submitting(run, "slurm", "abc")
    events.refused(run, "no such partition")
    assert history.history_of(run).cut_short is None
    assert [event["error"] for event in events.read_events(run, ("unanswered", "refused"))] == [
        "timed out",
        "no such partition",
    ]


def test_the_size_is_found_that_was_last_probed_on_as_many_such_devices(run: RunDir) -> None:
    for size, world_size, device in ((8, 2, "a"), (16, 2, "a"), (32, 4, "a"), (64, 2, "b"), ("x", 2, "a")):
        Attempt(run, 0).remark("probed", micro_batch_size=size, world_size=world_size, device=device)
    assert [history.micro_batch_found(run, *of) for of in ((2, "a"), (2, "b"), (4, "b"))] == [16, 64, None]


@pytest.fixture
def both(run: RunDir) -> Iterator[tuple[Attempt, Attempt]]:
    """The first attempt's writer, and that of the second, which has taken over."""
    with ExitStack() as stack:
        first = stack.enter_context(events.writing(Attempt.begin(run), job_id="7"))
        first.started(step=0)
        yield first, stack.enter_context(events.writing(Attempt.begin(run), job_id="7"))


def test_rank_0_of_a_stale_attempt_writes_nothing_down(run: RunDir, both: tuple[Attempt, Attempt]) -> None:
    before = run.events.read_bytes()
    writes: tuple[Callable[[Attempt], None], ...] = (
        lambda attempt: attempt.failed("connection reset", rank=0),
        lambda attempt: attempt.ended("COMPLETED", step=10),
        lambda attempt: attempt.remark("skipped", step=10),
    )
    for write in writes:
        with pytest.raises(run_lease.StaleAttemptError, match=r"has another writer now: job 7, .* attempt 1"):
            write(both[0])
    assert run.events.read_bytes() == before
    writes[0](both[1])
    assert run.events.read_bytes() != before


def test_an_attempt_that_comes_after_a_newer_one_has_trained_never_begins(run: RunDir) -> None:
    late, newer = Attempt.begin(run), Attempt.begin(run)
    with events.writing(newer, job_id="7"):
        newer.started(step=0)
    with pytest.raises(run_lease.StaleAttemptError, match="attempt 1 has trained"), events.writing(late, job_id="7"):
        pass
    assert not run.lease.exists()


def test_a_script_knows_the_attempt_that_has_taken_over_from_its_own(run: RunDir) -> None:
    first, second = Attempt.begin(run), Attempt.begin(run)
    assert first.successor() is None, "the newer one has only been begun"
    with events.writing(second, job_id="7"):
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
    assert events.read_events(run) == []


def test_a_script_that_calls_trainkit_has_started_once_an_attempt(run: RunDir) -> None:
    for step in (0, 40):
        attempt = Attempt.begin(run)
        attempt.started(script=True, step=0, hosts=["n1"])
        attempt.remark("starting", what="load torch")
        attempt.started(step=step)
        attempt.started(total_steps=80)  # its loop has said so
    found = events.read_events(run, "started")
    facts = ("attempt", "step", "hosts", "script", "total_steps")
    assert [tuple(event[name] for name in facts) for event in found] == [
        (0, 0, ["n1"], True, 80), (1, 40, ["n1"], True, 80)
    ]  # fmt: skip
    assert [event["event"] for event in events.read_events(run)] == ["started", "starting"] * 2
    assert history.history_of(run).is_script
