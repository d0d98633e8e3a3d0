"""One writer for a run folder. Holders elsewhere are made by changing where a process says that it runs."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import RunFailedError, UserError
from trainkit.run import lease as module
from trainkit.run.folder import RunDir
from trainkit.run.lease import EXPIRY_SECONDS, Holder, Lease, ProcessId, StaleAttemptError, lease_on


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", "seed: 0\n")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.2)


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
    held.enter_context(lease_on(run, Holder.me(job_id="4711", attempt=2)))
    assert run.lease.stat().st_mode & 0o777 == 0o600
    who = f"job 4711, process {os.getpid()} on {socket.gethostname()}, attempt 2"
    with pytest.raises(UserError, match=rf"is being written by {who}"), lease_on(run, me()):
        pass
    assert str(Holder.me()) == f"process {os.getpid()} on {socket.gethostname()}"


def test_it_is_free_again_after_its_holder_has_left(run: RunDir) -> None:
    for _ in range(2):
        with lease_on(run, me()) as lease:
            lease.check()
    assert not run.lease.exists()
    assert [path.name for path in run.path.iterdir() if "lease" in path.name] == []


def test_a_holder_that_was_killed_here_is_replaced_at_once(run: RunDir) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from trainkit.run.lease import Holder, lease_on\nfrom trainkit.run.folder import RunDir\n"
        "with lease_on(RunDir(Path(sys.argv[1])), Holder.me(attempt=3)): os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(run.path)], check=False)
    assert json.loads(run.lease.read_text())["attempt"] == 3
    began = time.monotonic()
    with lease_on(run, me()) as lease:
        lease.check()
    assert time.monotonic() - began < 5


def test_one_elsewhere_that_does_not_renew_is_waited_for_then_replaced(
    run: RunDir, held: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    held.enter_context(lease_on(run, elsewhere()))
    monkeypatch.setattr(Lease, "_renew", lambda self: None)
    age(run, EXPIRY_SECONDS - 1)
    began = time.monotonic()
    held.enter_context(lease_on(run, me(), patience=10.0)).check()
    assert 0.5 < time.monotonic() - began < 8


def test_one_elsewhere_that_renews_is_alive_and_refuses(run: RunDir, held: ExitStack) -> None:
    held.enter_context(lease_on(run, elsewhere()))
    began = time.monotonic()
    with pytest.raises(UserError, match=r"is being written by process .* on far"):
        held.enter_context(lease_on(run, me(), patience=30.0))
    assert time.monotonic() - began < 10, "as soon as it is seen to renew"


def test_a_job_that_slurm_starts_again_takes_over_at_once(run: RunDir, held: ExitStack) -> None:
    before = held.enter_context(lease_on(run, elsewhere(job_id="7", attempt=0)))
    after = held.enter_context(lease_on(run, me(job_id="7", attempt=1)))
    after.check()
    with pytest.raises(RunFailedError, match="has another writer now: job 7"):
        before.check()


def test_an_earlier_attempt_does_not_take_over_from_a_later_one(run: RunDir, held: ExitStack) -> None:
    held.enter_context(lease_on(run, elsewhere(job_id="7", attempt=1)))
    began = time.monotonic()
    with pytest.raises(StaleAttemptError, match=r"has another writer now: job 7, process .* on far, attempt 1"):
        held.enter_context(lease_on(run, me(job_id="7", attempt=0), patience=60.0))
    assert time.monotonic() - began < 5, "it knows at once"


@pytest.mark.parametrize(
    ("theirs", "mine"),
    [("7", {"job_id": "8", "attempt": 1}), ("7", {"job_id": "7", "attempt": 0}), ("7", {"job_id": "7"}),
     ("", {"attempt": 1})],
)  # fmt: skip
def test_only_a_later_attempt_of_the_same_job_takes_over(
    run: RunDir, held: ExitStack, theirs: str, mine: dict[str, Any]
) -> None:
    held.enter_context(lease_on(run, elsewhere(job_id=theirs, attempt=0)))
    with pytest.raises(UserError):
        held.enter_context(lease_on(run, replace(Holder.me(), **mine), patience=0.0))


def test_what_the_scheduler_knows_to_be_dead_is_not_waited_for(run: RunDir, held: ExitStack) -> None:
    held.enter_context(lease_on(run, elsewhere(job_id="7")))
    held.enter_context(lease_on(run, me(), is_dead=lambda other: other.job_id == "7", patience=0.0)).check()


def test_a_command_that_starts_a_job_is_waited_for_by_that_job(run: RunDir, held: ExitStack) -> None:
    with ExitStack() as command:
        command.enter_context(lease_on(run, Holder.me()))
        threading.Timer(0.5, command.pop_all().close).start()
        held.enter_context(lease_on(run, me(), patience=10.0)).check()


def test_who_was_taken_for_dead_notices_and_leaves_the_new_lease_alone(run: RunDir) -> None:
    with ExitStack() as second:
        with lease_on(run, elsewhere()) as lost:
            second.enter_context(lease_on(run, me(), is_dead=lambda other: True))
            lost._renew()
            with pytest.raises(RunFailedError) as error:
                lost.check()
            assert "jobs.status" in error.value.fix
        assert run.lease.exists(), "leaving does not take it from its new holder"


def test_a_lease_that_was_removed_is_lost_and_neither_renewed_nor_released(run: RunDir) -> None:
    with lease_on(run, me()) as lease:
        run.lease.unlink()
        with pytest.raises(RunFailedError, match="somebody who has removed"):
            lease.check()
        lease._renew()
    assert not run.lease.exists()


def test_one_that_is_being_replaced_is_looked_at_again(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    with lease_on(run, me()) as lease:
        aside = run.lease.rename(run.path / "aside")
        monkeypatch.setattr(time, "sleep", lambda seconds: aside.rename(run.lease))
        lease.check()


def test_a_file_system_without_hard_links_will_do(
    run: RunDir, held: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*names: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    held.enter_context(lease_on(run, me(job_id="7"))).check()
    assert run.lease.stat().st_mode & 0o777 == 0o600
    words = run.lease.read_bytes()
    with pytest.raises(UserError, match="job 7"):
        held.enter_context(lease_on(run, me()))
    # Of two that found none, the second finds the first one's.
    other = run.path / "other"
    other.write_text("{}")
    assert not module._put(other, run.lease)
    assert run.lease.read_bytes() == words


@pytest.mark.parametrize("left_for", [0.0, 3600.0])
def test_who_died_while_taking_over_hinders_others_for_a_while_only(run: RunDir, left_for: float) -> None:
    with ExitStack() as dead:
        dead.enter_context(lease_on(run, elsewhere()))
        words = run.lease.read_text()
    run.lease.write_text(words)
    age(run, EXPIRY_SECONDS + 1)
    right = run.path / f".lease-{json.loads(words)['token']}.over"
    right.touch()
    os.utime(right, (time.time() - left_for,) * 2)
    took = threading.Event()

    def take() -> None:
        with lease_on(run, me(), patience=0.0):
            took.set()

    thread = threading.Thread(target=take)
    thread.start()
    assert took.wait(5.0 if left_for else 0.5) == bool(left_for)
    right.unlink(missing_ok=True)
    thread.join()
    assert took.is_set()


@pytest.mark.parametrize("words", ["[1, 2", "{}", '{"token": null, "attempt": "3"}', None])
def test_a_lease_that_nobody_can_read_expires_like_any_other(run: RunDir, words: str | None) -> None:
    run.lease.write_text(words) if words is not None else os.mkfifo(run.lease)
    with pytest.raises(UserError) as refused, lease_on(run, me(), patience=0.0):
        pass
    assert refused.value.what == f"{run.name} is being written by process 0 on an unknown machine."
    age(run, EXPIRY_SECONDS + 1)
    with lease_on(run, me(), patience=0.0) as lease:
        lease.check()


def test_of_many_that_want_a_dead_ones_lease_exactly_one_gets_it(run: RunDir) -> None:
    with ExitStack() as dead:
        dead.enter_context(lease_on(run, elsewhere()))
        left = run.lease.read_text()
    run.lease.write_text(left)
    age(run, EXPIRY_SECONDS + 1)
    winners: list[Lease] = []
    losers: list[UserError] = []
    start, stop = threading.Barrier(12), threading.Event()

    def want() -> None:
        start.wait()
        try:
            with lease_on(run, me(), patience=0.0) as lease:
                winners.append(lease)
                stop.wait(20)
        except UserError as error:
            losers.append(error)

    threads = [threading.Thread(target=want) for _ in range(12)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 15
    # The one who has won says so here last: its lease is seen by the others before it can.
    while len(winners) + len(losers) < 12 and time.monotonic() < deadline:
        time.sleep(0.02)
    try:
        assert (len(winners), len(losers)) == (1, 11)
        winners[0].check()
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_folder_that_cannot_be_written_is_an_error_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Cannot write into"), lease_on(RunDir(tmp_path / "gone"), me()):
        pass


@pytest.mark.parametrize("word", ["", "client", "{pid}", "{pid}:1", "0:1"])
def test_a_word_of_a_process_that_is_not_here_names_none(word: str) -> None:
    assert ProcessId.seen_from_here(word.format(pid=os.getpid())) is None
    me = ProcessId.of(os.getpid())
    assert ProcessId.seen_from_here(me.word()) == me
