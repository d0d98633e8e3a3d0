"""Against a receiver of webhooks on loopback, which may hang or refuse, by apprise itself."""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.runs import wait_until
from tests.shell import python
from trainkit.common.errors import UserError
from trainkit.config.loading import load, to_yaml
from trainkit.launch import batch_job, notify
from trainkit.run.events import RUN_DIR, Attempt, append_event
from trainkit.run.folder import RunDir
from trainkit.run.user_lists import state_file

pytestmark = pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")  # apprise imports it
SECRET = "s3cr3t-room"
DIVERGED = "Training has diverged: 3 updates in a row were not finite."


class Receiver:
    """Keeps what is posted to it; in ``mode`` "hang" it never answers, in "refuse" it answers 403."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.got: list[dict[str, Any]] = []
        self.mode, self.released = "", threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                if outer.mode == "hang":
                    outer.released.wait(60.0)
                self.send_response(403 if outer.mode == "refuse" else 200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...

        self.server = ThreadingHTTPServer((host, 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def has(self, messages: int) -> bool:
        return len(self.got) == messages

    @property
    def address(self) -> str:
        return f"json://user:{SECRET}@127.0.0.1:{self.server.server_address[1]}/hook"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    pytest.importorskip("apprise")
    receiver = Receiver()
    yield receiver
    receiver.released.set()
    receiver.server.shutdown()
    receiver.server.server_close()


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv(notify.VARIABLE, raising=False)
    file = state_file("notify")
    file.parent.mkdir(parents=True)
    return file


def ended(path: Path, state: str, error: str = "", *overrides: str, **facts: Any) -> RunDir:
    run = RunDir.create(path, to_yaml(load("ddp", overrides).config))
    append_event(run, "submitted", executor="local", job_id="1", attempts_before=0)
    attempt = Attempt.begin(run)
    attempt.started(step=0, total_steps=10, world_size=2, hosts=["n1"])
    if error:
        attempt.failed(error, rank=1, host="n1")
    attempt.ended(state, job_id="1", **facts)
    return run


# Where to


def test_addresses_are_of_the_variable_or_of_the_private_file(state: Path) -> None:
    assert notify.addresses({}) == []
    state.write_text("# mine\nntfy://topic\n\n  slack://a/b/c\n")
    state.chmod(0o600)
    assert notify.addresses({}) == ["ntfy://topic", "slack://a/b/c"]
    assert notify.addresses({notify.VARIABLE: "json://a json://b"}) == ["json://a", "json://b"]


def test_a_file_that_others_can_read_is_not_used(state: Path) -> None:
    state.write_text(f"json://{SECRET}\n")
    state.chmod(0o640)
    with pytest.raises(UserError, match="Others can read") as caught:
        notify.addresses({})
    assert caught.value.fix.startswith("chmod 600")
    assert "chmod 600" in notify.objection({}, reaches_internet=True)


def test_before_a_run_it_is_said_why_nobody_will_be_told(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {notify.VARIABLE: f"json://{SECRET}"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert notify.objection({}, reaches_internet=False) == "", "nobody asked"
    assert "trainkit-vision[notify]" in notify.objection(asked, reaches_internet=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert notify.objection(asked, reaches_internet=True) == ""
    assert "launch.internet=false" in notify.objection(asked, reaches_internet=False)
    assert SECRET not in notify.objection(asked, reaches_internet=False)


# What


def test_a_failure_is_told_with_its_cause_and_what_to_do(state: Path, tmp_path: Path) -> None:
    title, text = notify.news_of(ended(tmp_path / "ddp-0001", "FAILED", DIVERGED)) or ("", "")
    assert title == "ddp-0001 has ended: FAILED"
    assert "diverged" in text
    assert "fix: " in text
    assert "jobs.why" in text


def test_a_run_that_is_not_started_again_says_so_and_why(state: Path, tmp_path: Path) -> None:
    run = ended(tmp_path / "ddp-0001", "FAILED", "killed by SIGKILL", why="3 attempts have failed")
    assert (notify.news_of(run) or ("", ""))[1].startswith("It is not started again: 3 attempts have failed.")


@pytest.mark.parametrize("kind", ["requeued", "cancelled", "goes on", "CANCELLED", "unwanted"])
def test_nothing_is_told_of_what_goes_on_was_cancelled_or_is_unwanted(state: Path, tmp_path: Path, kind: str) -> None:
    wanted = "finished" if kind == "unwanted" else "finished,failed"
    state_ = "CANCELLED" if kind == "CANCELLED" else "FAILED"
    run = ended(tmp_path / "ddp-0001", state_, "x", f"launch.notify=[{wanted}]")
    if kind in ("requeued", "cancelled"):
        append_event(run, kind, attempt=0, job_id="1")
    if kind == "goes on":
        Attempt.begin(run)
    assert notify.news_of(run) is None


def test_a_run_of_before_there_was_this_setting_is_told_of(state: Path, tmp_path: Path) -> None:
    run = ended(tmp_path / "ddp-0001", "COMPLETED")
    settings = run.config.read_text()
    (line,) = (line for line in settings.splitlines() if line.strip().startswith("notify:"))
    run.config.write_text(settings.replace(f"{line}\n", "").replace("    - finished\n    - failed\n", ""))
    assert (notify.news_of(run) or ("",))[0] == "ddp-0001 has finished"


def test_a_secret_in_the_words_of_a_rank_is_not_sent(state: Path, tmp_path: Path) -> None:
    run = ended(tmp_path / "ddp-0001", "FAILED", "ValueError: password = 'hunter2-is-my-Secret9'")
    assert "hunter2" not in str(notify.news_of(run))


# Sent


def test_all_receivers_are_told_and_none_of_them_is_written_down(
    receiver: Receiver, state: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = ended(tmp_path / "ddp-0001", "FAILED", DIVERGED)
    notify.tell(run, {notify.VARIABLE: f"{receiver.address} {receiver.address} nothing://x"})
    assert [got["title"] for got in receiver.got] == ["ddp-0001 has ended: FAILED"] * 2
    said = capfd.readouterr()
    assert (
        said.err == "No notification was sent about the end of ddp-0001: apprise does not know address 3 (nothing).\n"
    )
    assert SECRET not in said.out + said.err


@pytest.mark.parametrize("mode", ["hang", "refuse", "gone"])
def test_a_receiver_that_does_not_take_it_costs_no_more_than_its_patience(
    receiver: Receiver, state: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], mode: str
) -> None:
    receiver.mode, address = mode, receiver.address
    if mode == "gone":
        receiver.server.server_close()
    run, began = ended(tmp_path / "ddp-0001", "FAILED", DIVERGED), time.monotonic()
    notify.tell(run, {notify.VARIABLE: address})
    assert time.monotonic() - began < notify.PATIENCE_SECONDS + 2
    said = capfd.readouterr()
    assert said.err.startswith("No notification was sent about the end of ddp-0001: ")
    assert SECRET not in said.out + said.err


def test_nobody_waits_longer_for_receivers_than_the_patience(
    receiver: Receiver, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notify, "PATIENCE_SECONDS", 1.0)
    receiver.mode = "hang"
    run, began = ended(tmp_path / "ddp-0001", "FAILED", DIVERGED), time.monotonic()
    notify.tell(run, {notify.VARIABLE: receiver.address})
    assert time.monotonic() - began < 3.0
    assert capfd.readouterr().err == "No notification was sent about the end of ddp-0001: it took longer than 1 s.\n"


def test_a_folder_that_cannot_be_read_fails_nothing(
    receiver: Receiver, state: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = ended(tmp_path / "ddp-0001", "FAILED", DIVERGED)
    run.config.write_text("{")
    notify.tell(run, {notify.VARIABLE: receiver.address})
    assert receiver.got == []
    assert capfd.readouterr().err.startswith("No notification was sent about the end of ddp-0001: ")


def test_a_batch_job_tells_at_its_end_and_keeps_its_exit_code(receiver: Receiver, state: Path, tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "ddp-0001", to_yaml(load("ddp").config))
    attempt = Attempt.begin(run)
    attempt.failed("ValueError: bad", rank=0, host="n1")
    env = {**attempt.environment(), "SLURM_JOB_ID": "7", notify.VARIABLE: receiver.address}
    assert env[RUN_DIR]
    assert batch_job.main(["end", "1"], env) == 1
    assert [got["title"] for got in receiver.got] == ["ddp-0001 has ended: FAILED"]
    assert "ValueError: bad" in receiver.got[0]["message"]


@pytest.mark.long
def test_real_runs_tell_how_they_end_and_keep_no_address(receiver: Receiver, state: Path, tmp_path: Path) -> None:
    (tmp_path / "broken_model.py").write_text("def build(info):\n    raise RuntimeError('no such layer')\n")
    env = {
        "TRAINKIT_RUNS": str(tmp_path / "runs"), notify.VARIABLE: receiver.address, "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(map(str, [Path(__file__).parents[2], *map(Path, sys.path[1:])])),
    }  # fmt: skip
    quick = ["train.max_steps=2", "train.epochs=1", "monitor.loggers=[jsonl]"]
    kinds = (["local"], ["debug"], ["local", "model.name=broken_model:build"])
    for number, words in enumerate(kinds, 1):
        python("-m", "jobs.submit", "single", "--executor", *words, *quick, "--again", cwd=tmp_path, **env)
        wait_until(partial(receiver.has, number))  # a local job's controller outlives its run
    assert [got["title"] for got in receiver.got] == [
        "single-0001 has finished", "single-0002 has finished", "single-0003 has ended: FAILED"
    ]  # fmt: skip
    assert "no such layer" in receiver.got[2]["message"]
    assert "test acc1" in receiver.got[0]["message"]
    for file in (tmp_path / "runs").rglob("*"):
        if file.is_file():
            assert SECRET.encode() not in file.read_bytes(), file
