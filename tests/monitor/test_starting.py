import io
import re
import time
from pathlib import Path

import pytest

from tests.runs import wait_until
from tests.shell import python
from trainkit.config.schema import Config
from trainkit.run.events import Attempt, read_events
from trainkit.run.folder import RunDir
from trainkit.training import startup as module
from trainkit.training.startup import Starting, hint_on_update

SLOW_MODEL = """
import time
from torch import nn

def build(info):
    time.sleep(4.0)
    return nn.Sequential(nn.Flatten(), nn.Linear(info.in_chans * info.image_size**2, info.num_classes))
"""


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.05)
    return Attempt.begin(RunDir.create(tmp_path / "ddp-0001", "seed: 0\n"))


def told(attempt: Attempt) -> list[str]:
    return [event["what"] for event in read_events(attempt.run, "starting")]


def test_what_takes_long_is_told_while_it_lasts_and_at_its_end(
    attempt: Attempt, capsys: pytest.CaptureFixture[str]
) -> None:
    starting = Starting(speaks=True, attempt=attempt)
    starting.at("read the data", lambda: "It is far away.")
    wait_until(lambda: told(attempt))
    starting.at("build the model")
    starting.at("")
    assert told(attempt)[0] == "0 s so far to read the data. It is far away."
    assert [re.sub(r"\d\.\d", "N", line) for line in told(attempt)[1:]] == ["it took N s to read the data."]
    assert capsys.readouterr().out.splitlines() == [f"Starting: {line}" for line in told(attempt)]


def test_nothing_is_written_for_a_run_that_is_not_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Copies of an older template load torch before they make the run."""
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.05)
    attempt = Attempt.begin(RunDir(tmp_path / "ddp-job1"))
    starting = Starting(speaks=True, attempt=attempt)
    starting.at("load torch")
    wait_until(lambda: "so far to load torch" in capsys.readouterr().out)
    starting.at("")
    assert [path.name for path in attempt.run.path.iterdir()] == ["logs"]
    RunDir.create(attempt.run.path, "seed: 0\n", after_logs=True)
    starting.at("read the data")
    wait_until(lambda: told(attempt))
    starting.stop()
    assert [re.sub(r"\d+", "N", line) for line in told(attempt)] == ["N s so far to read the data."]


def test_who_starts_in_a_terminal_is_told_again_and_again_by_the_caller() -> None:
    lines: list[str] = []
    starting = Starting(speaks=True, attempt=None, say=lines.append, seconds=(0.02, 0.02))
    for what in ("load", "join"):
        starting.at(what)
        wait_until(lambda: len(lines) >= 3)
        starting.stop()
        assert lines[:2] == [f"Starting: 0 s so far to {what}."] * 2
        lines.clear()


@pytest.mark.parametrize("speaks", [True, False])
def test_of_a_quick_start_and_by_other_ranks_nothing_is_said(
    attempt: Attempt, capsys: pytest.CaptureFixture[str], *, speaks: bool
) -> None:
    starting = Starting(speaks=speaks, attempt=attempt)
    for what in ("read the data", "build the model", ""):
        starting.at(what)
        time.sleep(0.0 if speaks else 0.1)
    time.sleep(0.2)
    assert (capsys.readouterr().out, told(attempt)) == ("", [])


def test_a_start_that_failed_says_no_more(attempt: Attempt, capsys: pytest.CaptureFixture[str]) -> None:
    starting = Starting(speaks=True, attempt=None)
    starting.at("read the data")
    time.sleep(0.2)
    said = capsys.readouterr().out
    starting.stop()
    time.sleep(0.2)
    assert said.count("\n") == 1
    assert capsys.readouterr().out == ""


def test_who_hears_nothing_any_more_does_not_end_a_start(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stdout", closed)
    asked: list[int] = []

    def hint() -> str:
        asked.append(1)
        return ""

    starting = Starting(speaks=True, attempt=attempt)
    for what in ("read the data", "build the model"):
        before = len(asked)
        starting.at(what, hint)
        wait_until(lambda: len(asked) > before)  # noqa: B023
    starting.at("")
    assert len(asked) == 2


def test_on_a_terminal_the_line_of_a_waiting_bar_is_cleared(
    attempt: Attempt, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    starting = Starting(speaks=True, attempt=attempt)
    starting.at("make the first update")
    wait_until(lambda: told(attempt))
    starting.stop()
    assert capsys.readouterr().out.startswith("\r\x1b[KStarting: 0 s so far")


CONFIG = Config.model_validate({"data": {"name": "image_folder", "root": "/data/imgs"}})
COMPILED = Config.model_validate({"train": {"compile": "model"}})


@pytest.mark.parametrize(
    ("config", "asked", "says"),
    [
        (CONFIG, {}, r""),
        (CONFIG, {"threads": 4, "cpus": 4}, r""),
        (CONFIG, {"threads": 1, "cpus": 1}, r""),
        (CONFIG, {"threads": 1, "cpus": 16}, r"A rank uses 1 thread, but this machine has 16 CPUs.*"),
        (COMPILED, {}, r"It compiles the model \(train.compile=model\)\."),
    ],
)
def test_a_hint_says_what_makes_the_first_update_long(config: Config, asked: dict[str, int], says: str) -> None:
    assert re.fullmatch(says, hint_on_update(config, **asked))


@pytest.mark.long
def test_a_slow_start_of_two_ranks_is_told_by_log_and_follower(tmp_path: Path) -> None:
    (tmp_path / "slow_model.py").write_text(SLOW_MODEL)
    words = ["ddp", "--executor", "local", "--ntasks-per-node", "2", "--gpus-per-node", "0"]
    words += ["model.name=slow_model:build", "train.max_steps=1", "monitor.loggers=[console,jsonl]"]
    done = python("-m", "jobs.submit", *words, cwd=tmp_path, TRAINKIT_RUNS=str(tmp_path / "runs"))
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "runs" / "ddp-0001" / "logs" / "0" / "rank-0.out").read_text()
    for said in (done.stdout, log):
        assert "Starting: 3 s so far to build the model (slow_model:build) and its optimizer." in said
        assert re.search(r"Starting: it took [4-9]\.\d s to build the model", said)
        assert said.count("Starting: 3 s so far to build") == 1
