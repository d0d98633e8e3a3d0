"""A run goes to another user on another machine in one file."""

from pathlib import Path

import pytest
from PIL import Image

from tests.jobs.conftest import Command, make_run
from tests.shell import python

pytestmark = pytest.mark.usefixtures("no_slurm")
MODEL = "from torch import nn\ndef small(info):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the user is another one."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other state"))


@pytest.mark.nightly
def test_a_run_is_used_where_it_was_unpacked_and_its_code_asks(
    command: Command, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    train = ("train.epochs=1", "model.name=mine:small", "data.augment=false", "monitor.loggers=[console,jsonl]")
    done = python("-m", "jobs.submit", "single", *train, "--executor", "debug", "--name", "first", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    command("pack", "first", "first.tar").ok("Packed first with step 19", "unpack first.tar")
    (tmp_path / "mine.py").unlink()
    request.getfixturevalue("elsewhere")
    command("unpack", "first.tar", "--name", "second").ok("Unpacked second")
    command("status", "second").ok("COMPLETED", "by its own record")
    command("report", "second").ok("logbook.md")
    command("evaluate", "second").refused(3, "run code that is not yours: model.name=mine:small")
    assert "acc1" in python("-m", "jobs.evaluate", "second", "--allow-code", cwd=tmp_path).stdout
    Image.new("L", (8, 8)).save(tmp_path / "image.png")
    done = python("-m", "jobs.predict", "second", "image.png", "--allow-code", cwd=tmp_path)
    assert "image.png," in done.stdout, done.stderr


def test_checkpoints_are_chosen(command: Command, tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "ddp-0001")
    command("pack", "ddp-0001", "a.tar").ok("with no checkpoint")
    command("pack", "ddp-0001", "b.tar", "--checkpoint", "7").refused(2, "No checkpoint '7'")
    command("pack", "ddp-0001", "a.tar").refused(2, "exists already")
    command("unpack", "a.tar").refused(2, "exists already", "--name")
    command("unpack", "a.tar", "--name", "b/c").refused(2, "is not a valid name of a run")
    command("unpack", "c.tar").refused(2, "Cannot read")
    assert [path.name for path in tmp_path.glob("*.tar")] == ["a.tar"]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["ddp-0001"]
