"""The lease: one process writes at a time. Holders elsewhere are made by changing where a process says that it runs."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from tests.runs import wait_until
from trainkit.common.errors import RunFailedError, UserError
from trainkit.run import run_lease
from trainkit.run.folder import RunDir
from trainkit.run.run_lease import Holder, ProcessId


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lease, "RENEW_SECONDS", 0.2)


def me(**changes: object) -> Holder:
    return replace(Holder.me(attempt=0), **changes)  # type: ignore[arg-type]


def elsewhere(**changes: object) -> Holder:
    there = me(**changes)
    return replace(there, process=replace(there.process, host="far"))


@pytest.fixture
def held(run: RunDir) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def age(run: RunDir, seconds: float) -> None:
    """As if the holder had not renewed for so long."""
    then = time.time() - seconds
    os.utime(run.lease, (then, then))


def test_a_second_writer_is_refused_and_told_who_holds_it(run: RunDir, held: ExitStack) -> None:
    held.enter_context(run_lease.lease_on(run, Holder.me(job_id="4711", attempt=2)))
    assert run.lease.stat().st_mode & 0o777 == 0o600
    who = f"job 4711, process {os.getpid()} on {socket.gethostname()}, attempt 2"
    with pytest.raises(UserError, match=rf"is being written by {who}"), run_lease.lease_on(run, me()):
        pass
    assert str(Holder.me()) == f"process {os.getpid()} on {socket.gethostname()}"


def test_a_holder_that_was_killed_here_is_replaced_at_once(run: RunDir, held: ExitStack) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        held.enter_context(run_lease.lease_on(run, Holder(ProcessId.of(process.pid), attempt=3)))
        process.kill()
    held.enter_context(run_lease.lease_on(run, me(), patience=0.0)).check()


def test_one_elsewhere_that_does_not_renew_is_waited_for_then_replaced(
    run: RunDir, held: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    held.enter_context(run_lease.lease_on(run, elsewhere()))
    monkeypatch.setattr(run_lease.Lease, "renew", lambda self: None)
    age(run, run_lease.EXPIRY_SECONDS - 1)
    began = time.monotonic()
    held.enter_context(run_lease.lease_on(run, me(), patience=10.0)).check()
    assert 0.5 < time.monotonic() - began < 8


def test_one_elsewhere_that_renews_is_alive_and_refuses(run: RunDir, held: ExitStack) -> None:
    held.enter_context(run_lease.lease_on(run, elsewhere()))
    began = time.monotonic()
    with pytest.raises(UserError, match=r"is being written by process .* on far"):
        held.enter_context(run_lease.lease_on(run, me(), patience=10.0))
    assert time.monotonic() - began < 8, "as soon as it is seen to renew"


def test_a_job_that_slurm_starts_again_takes_over_at_once(run: RunDir, held: ExitStack) -> None:
    before = held.enter_context(run_lease.lease_on(run, elsewhere(job_id="7", attempt=0)))
    after = held.enter_context(run_lease.lease_on(run, me(job_id="7", attempt=1)))
    after.check()
    with pytest.raises(RunFailedError, match="has another writer now: job 7"):
        before.check()


def test_an_earlier_attempt_does_not_take_over_from_a_later_one(run: RunDir, held: ExitStack) -> None:
    held.enter_context(run_lease.lease_on(run, elsewhere(job_id="7", attempt=1)))
    with pytest.raises(
        run_lease.StaleAttemptError, match=r"has another writer now: job 7, process .* on far, attempt 1"
    ):
        held.enter_context(run_lease.lease_on(run, me(job_id="7", attempt=0), patience=0.0))


@pytest.mark.parametrize(
    ("theirs", "mine"),
    [("7", {"job_id": "8", "attempt": 2}), ("7", {"job_id": "7", "attempt": 1}), ("7", {"job_id": "7"}),
     ("", {"attempt": 2})],
)  # fmt: skip
def test_only_a_later_attempt_of_the_same_job_takes_over(
    run: RunDir, held: ExitStack, theirs: str, mine: dict[str, Any]
) -> None:
    held.enter_context(run_lease.lease_on(run, elsewhere(job_id=theirs, attempt=1)))
    with pytest.raises(UserError):
        held.enter_context(run_lease.lease_on(run, replace(Holder.me(), **mine), patience=0.0))


def test_what_the_scheduler_knows_to_be_dead_is_not_waited_for(run: RunDir, held: ExitStack) -> None:
    held.enter_context(run_lease.lease_on(run, elsewhere(job_id="7")))
    held.enter_context(run_lease.lease_on(run, me(), is_dead=lambda other: other.job_id == "7", patience=0.0)).check()


def test_a_command_that_starts_a_job_is_waited_for_by_that_job(run: RunDir, held: ExitStack) -> None:
    with ExitStack() as command:
        command.enter_context(run_lease.lease_on(run, Holder.me()))
        threading.Timer(0.5, command.pop_all().close).start()
        held.enter_context(run_lease.lease_on(run, me(), patience=10.0)).check()


def test_who_was_taken_for_dead_notices_and_leaves_the_new_lease_alone(run: RunDir) -> None:
    with ExitStack() as second:
        with run_lease.lease_on(run, elsewhere()) as lost:
            second.enter_context(run_lease.lease_on(run, me(), is_dead=lambda other: True))
            lost.renew()
            with pytest.raises(RunFailedError) as error:
                lost.check()
            assert "jobs.status" in error.value.fix
        assert run.lease.exists(), "leaving does not take it from its new holder"


def test_a_lease_that_was_removed_is_lost_and_neither_renewed_nor_released(run: RunDir) -> None:
    with run_lease.lease_on(run, me()) as lease:
        run.lease.unlink()
        with pytest.raises(RunFailedError, match="somebody who removed"):
            lease.check()
        lease.renew()
    assert not run.lease.exists()


def test_one_that_is_being_replaced_is_looked_at_again(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_lease.lease_on(run, me()) as lease:
        aside = run.lease.rename(run.path / "aside")
        monkeypatch.setattr(time, "sleep", lambda seconds: aside.rename(run.lease))
        lease.check()


def left_by_a_dead_one(run: RunDir) -> str:
    with run_lease.lease_on(run, elsewhere()):
        words = run.lease.read_text()
    run.lease.write_text(words)
    age(run, run_lease.EXPIRY_SECONDS + 1)
    return words


@pytest.mark.parametrize("left_for", [0.0, 3600.0])
def test_who_died_while_taking_over_hinders_others_for_a_while_only(run: RunDir, left_for: float) -> None:
    right = run.path / f".lease-{json.loads(left_by_a_dead_one(run))['token']}.over"
    right.touch()
    os.utime(right, (time.time() - left_for,) * 2)
    with ThreadPoolExecutor(1) as threads, ExitStack() as stack:
        taking = threads.submit(lambda: stack.enter_context(run_lease.lease_on(run, me(), patience=0.0)))
        assert bool(wait([taking], 5.0 if left_for else 0.4).done) == bool(left_for)
        right.unlink(missing_ok=True)
        taking.result(10).check()


@pytest.mark.parametrize("words", ["[1, 2", "{}", '{"token": null, "attempt": "3"}', None])
def test_a_lease_that_nobody_can_read_expires_like_any_other(run: RunDir, words: str | None) -> None:
    run.lease.write_text(words) if words is not None else os.mkfifo(run.lease)
    with pytest.raises(UserError) as refused, run_lease.lease_on(run, me(), patience=0.0):
        pass
    assert refused.value.what == f"{run.name} is being written by process 0 on an unknown machine."
    age(run, run_lease.EXPIRY_SECONDS + 1)
    with run_lease.lease_on(run, me(), patience=0.0) as lease:
        lease.check()


def test_of_many_that_want_a_dead_ones_lease_exactly_one_gets_it(run: RunDir) -> None:
    left_by_a_dead_one(run)
    start = threading.Barrier(12)

    def want(stack: ExitStack) -> run_lease.Lease | None:
        start.wait()
        try:
            return stack.enter_context(run_lease.lease_on(run, me(), patience=0.0))
        except UserError:
            return None

    with ExitStack() as stack, ThreadPoolExecutor(12) as threads:
        (winner,) = filter(None, threads.map(want, [stack] * 12))
        winner.check()


@pytest.mark.parametrize("word", ["", "client", "{pid}", "{pid}:1", "0:1"])
def test_a_word_of_a_process_that_is_not_here_names_none(word: str) -> None:
    assert ProcessId.seen_from_here(word.format(pid=os.getpid())) is None
    me = ProcessId.of(os.getpid())
    assert ProcessId.seen_from_here(me.word()) == me


def test_a_process_is_signalled_unless_it_is_another_one_of_its_number() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        process = ProcessId.of(child.pid)
        assert ProcessId.from_fields(process.fields()) == process
        old = {key: value for key, value in process.fields().items() if key != "process_space"}
        assert ProcessId.from_fields(old) == replace(process, space="")
        assert replace(process, space="").is_here()
        for other in ({"host": "far"}, {"started": "1"}, {"started": ""}, {"space": "elsewhere"}):
            replace(process, **other).signal(signal.SIGKILL)  # type: ignore[arg-type]
        assert not run_lease.is_stopped(child.pid)
        process.signal(signal.SIGSTOP)
        wait_until(lambda: run_lease.is_stopped(child.pid))
        assert process.is_alive()
        process.signal(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not process.is_alive(), "a zombie does not run"
    assert child.returncode == -signal.SIGKILL
    assert not run_lease.is_stopped(child.pid)
    process.signal(signal.SIGKILL)
