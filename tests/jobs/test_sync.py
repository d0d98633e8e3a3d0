"""W&B offline over requeues: all attempts of a run become one run of the server (wandb 2423, 3841, 4624, 5865)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import readme
from tests.jobs.conftest import Command, make_run
from tests.monitor.wandb_server import Server, serving
from trainkit.config.schema import Config
from trainkit.monitor import wandb as logger_module
from trainkit.monitor.base import open_loggers, run_id
from trainkit.run.events import append_event
from trainkit.run.folder import RunDir
from trainkit.run.labels import say
from trainkit.run.run_lease import Holder, lease_on

KEY = "0123456789abcdef" * 2 + "deadbeef"
BOTH = Config.model_validate({"monitor": {"loggers": ["jsonl", "wandb"]}})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    """A run that was requeued once: two attempts, each of which was recorded offline."""
    import wandb

    for variable, folder in [("HOME", "home"), ("WANDB_CONFIG_DIR", "config"), ("WANDB_CACHE_DIR", "cache")]:
        monkeypatch.setenv(variable, str(tmp_path / folder))
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = make_run(tmp_path / "runs" / "vit-lr3", "monitor.loggers=[jsonl,wandb]", "seed=7")
    append_event(run, "started", attempt=0, total_steps=40, world_size=2, precision="bf16")
    with open_loggers(BOTH, run, total_steps=40) as logger:
        for step in (10, 20, 30):
            logger.log({"step": step, "epoch": step / 20, "split": "train", "loss": 1 / step, "time": 1.7e9 + step})
    with open_loggers(BOTH, run, total_steps=40, resumed_step=20) as logger:
        logger.log({"step": 30, "epoch": 1.5, "split": "train", "loss": 0.5, "time": 1.7e9 + 100})
        logger.log({"step": 40, "epoch": 2.0, "split": "test", "loss": 0.25, "acc1": 90.0, "time": 1.7e9 + 110})
    say(run, tags=["paper"], notes=["requeued once"])
    assert len(list(run.wandb.glob("offline-run-*"))) == 2
    yield run
    wandb.teardown()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        yield server


def seen(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(row["step"], row.get("loss/train", row.get("loss/test")), row["_timestamp"]) for row in rows]


@pytest.mark.nightly
def test_all_attempts_arrive_as_one_run(
    run: RunDir, server: Server, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    ((line,),) = readme.blocks("logged in", readme.DOCS / "runs.md", typed=True)
    words = line.removeprefix("trainkit ").split()
    name = run_id(run)
    before = sorted(run.path.rglob("*"))
    for _ in range(2):  # the second time it replaces what is there
        command(*words).ok(f"wandb: 4 records as {name} in trainkit")
        expected = [(10, 0.1, 1.7e9 + 10), (20, 0.05, 1.7e9 + 20), (30, 0.5, 1.7e9 + 100), (40, 0.25, 1.7e9 + 110)]
        assert seen(server.rows(name)) == expected, "the newer record of a step counts"
        assert server.complete == {name: True}
    told = server.runs[name]
    assert (list(server.runs), told["displayName"], told["project"]) == ([name], "vit-lr3", "trainkit")
    assert (told["tags"], told["notes"]) == (["paper"], "requeued once")
    settings = json.loads(told["config"])
    assert (settings["seed"]["value"], settings["world_size"]["value"]) == (7, 2)
    assert settings["train"]["value"]["precision"] == "bf16"
    assert server.keys == {KEY}
    assert not [body for body in server.bodies if KEY.encode() in body]
    assert sorted(run.path.rglob("*")) == before, "the run's folder is as it was"


@pytest.mark.nightly
def test_without_a_login_or_a_server_it_says_so(run: RunDir, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(run.path.rglob("*"))
    command("sync", "vit-lr3").refused(2, "WANDB_MODE=offline")
    monkeypatch.delenv("WANDB_MODE")
    command("sync", "vit-lr3").refused(2, "There is neither WANDB_API_KEY nor a login", "wandb login")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(logger_module, "PATIENCE_SECONDS", 1.0)
    command("sync", "vit-lr3").refused(1, "vit-lr3 is not at W&B yet", "sends the whole run again")
    assert sorted(run.path.rglob("*")) == before


@pytest.mark.parametrize(("status", "why"), [(403, "refused some of it"), (500, "Timed out finishing run")])
def test_what_the_server_does_not_take_is_no_success(
    run: RunDir, server: Server, command: Command, monkeypatch: pytest.MonkeyPatch, status: int, why: str
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setattr(logger_module, "SYNC_SECONDS", 3.0)
    server.refuses = status
    command("sync", "vit-lr3").refused(1, "vit-lr3 is not at W&B yet", why)
    assert server.complete == {}
    server.refuses = 0
    command("sync", "vit-lr3").ok("4 records")
    assert server.complete == {run_id(run): True}


def test_a_run_that_is_trained_or_has_nothing_to_send_is_refused(
    run: RunDir, server: Server, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    with lease_on(run, Holder.me()):
        command("sync", "vit-lr3").refused(2, "vit-lr3 is being trained")
    make_run(tmp_path / "runs" / "ddp-0002", "monitor.loggers=[jsonl]")
    command("sync", "ddp-0002").refused(2, "ddp-0002 has nothing that can be sent")
    assert server.bodies == []


def test_a_strangers_run_is_sent_where_the_user_says(
    run: RunDir, server: Server, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went to the stranger's project with this user's key, and its tags and notes as well."""
    monkeypatch.delenv("WANDB_MODE")
    run.config.write_text(run.config.read_text().replace("wandb_project: trainkit", "wandb_project: eve"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another-user"))
    command("sync", "vit-lr3").refused(3, "monitor.wandb_project=eve", "--allow-code")
    assert server.bodies == []
    command("sync", "vit-lr3", "monitor.wandb_project=mine").ok("4 records", "in mine")
    assert [each["project"] for each in server.runs.values()] == ["mine"]
    command("sync", "vit-lr3", "--allow-code").ok("in eve")
