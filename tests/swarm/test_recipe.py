"""What the recipes' page says of the ViT with volunteers, typed with a small one."""

import signal
from pathlib import Path

import pytest

from tests import readme
from tests.recipes.student import SMALL
from tests.recipes.tiny import write_cifar10, write_vit_weights
from tests.swarm.conftest import TOKEN, Commands
from trainkit.report.facts import Facts
from trainkit.run.folder import RunDir

PAGE = readme.ASSIGNMENTS / "volunteers.md"


@pytest.mark.long
@pytest.mark.swarm
def test_the_vit_is_trained_by_volunteers_and_reported(commands: Commands, tmp_path: Path) -> None:
    (prepare, create, join, ask), (report,) = [
        lines for where in ("swarm", "after the swarm") for lines in readme.blocks(where, PAGE)
    ]
    assert commands.type_in(prepare, "--archive", str(write_cifar10(tmp_path))).ends() == 0
    vit = SMALL["cifar10_vit"].split()
    weights = write_vit_weights(tmp_path / "hub", vit[0].partition("=")[2])
    few = [*vit, f"model.pretrained_cfg_overlay={{file: {weights}}}", "monitor.loggers=[jsonl,tensorboard]"]
    short = ["collaborative.round_seconds=8", "collaborative.matchmaking_seconds=1.5", "--host", "127.0.0.1"]
    creator = commands.type_in(create, "--name", "creator", *few, *short)
    guest = commands.type_in(
        join.replace("=TOKEN", f"={creator.says(TOKEN, 180)[1]}"), "--name", "guest", "--allow-code"
    )
    creator.says("2 peers averaged", 240)
    assert commands.type_in(ask).ends() == 0
    creator.process.send_signal(signal.SIGINT)
    assert [creator.ends(120), guest.ends(120)] == [0, 0]
    assert commands.type_in(report).ends() == 0

    book = (commands.folder / "logbook" / "volunteers" / "logbook.md").read_text(encoding="utf-8")
    assert "guest" in book
    run = Facts(RunDir.open(commands.run("vit-swarm")), "")
    assert run.val
    assert any(run.run_dir.tensorboard.iterdir())
