"""A swarm of real peers that average gradients: who comes, who dies, and what they end with."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.swarm.attacked import HARDER, swarm
from tests.swarm.conftest import GRADIENTS, Command, Commands, started_in
from trainkit import fileio

pytestmark = [pytest.mark.swarm, pytest.mark.long]

ROUNDS = 24
# A micro batch takes 0.6 s: three peers gather an update in 3 s.
SETTINGS = (*GRADIENTS, f"collaborative.rounds={ROUNDS}", "train.global_batch_size=1024")
UNSURE = (*SETTINGS, HARDER[0])


def trained(run: Path) -> list[dict[str, Any]]:
    return [record for record in fileio.read_jsonl(run / "metrics.jsonl") if record["split"] == "train"]


def test_peers_come_and_die_and_so_does_the_creator_and_no_update_is_lost(commands: Commands) -> None:
    """One of three peers is killed, another comes, the creator is killed, and comes back."""
    creator, token = commands.create(*SETTINGS)

    def join(name: str) -> Command:
        return commands.join(token, "--name", name, "--run-dir", str(commands.run(name)))

    first, second = join("first"), join("second")
    creator.says("3 peers averaged")
    second.kill()
    creator.says(r"3 peers averaged(.*\n)+.*2 peers averaged")
    late = join("late")
    late.says("3 peers averaged", 120)
    status = commands.status(token)
    assert status["running"]
    assert {"creator", "first", "late"} <= {row["name"] for row in status["peers"]}
    creator.kill()
    first.says("no average|Nobody of the swarm answers")  # as the round stood
    again = commands.start("swarm", "create", "--resume", "hivemind-0001", "--allow-code")
    assert [command.ends(400) for command in (again, first, late)] == [0, 0, 0], again.output
    run = commands.run("hivemind-0001")

    # All end with the same state, bit for bit, and had it after every update that they took part in.
    step = f"checkpoints/step-{ROUNDS:08d}/common.safetensors"
    creators, *others = (load_file(path / step) for path in (run, commands.run("first"), commands.run("late")))
    assert set(creators) == {"theta", "momentum"}
    for other in others:
        assert all(torch.equal(other[name], tensor) for name, tensor in creators.items())
    assert "behind the others" not in first.output + late.output

    # Each update is made once, and a death costs none.
    rounds = [record["round"] for record in trained(run)]
    assert rounds[-1] == ROUNDS
    assert len(rounds) - len(set(rounds)) <= 1  # the one that was not on the disk yet
    assert set(rounds) == set(range(1, ROUNDS + 1))
    after = creator.output.partition("3 peers averaged")[2]
    assert re.search(r"^round \d+/24  2 peers averaged, 4 of 4 parts", after, re.MULTILINE)
    assert "alone" not in after
    done = fileio.read_object(run / "summary.json")
    assert (done["outcome"], done["rounds"], done["most_peers"]) == ("finished", ROUNDS, 3)
    assert sum(item["samples"] for item in done["contributions"]) > 0.5 * ROUNDS * 1024

    # Losses are those of one process: within 0.15, at 1024 samples an update of which no two runs draw the same.
    same = ["train.global_batch_size=1024", "train.micro_batch_size=64", f"train.max_steps={ROUNDS}"]
    quick = ["monitor.loggers=[jsonl]", "monitor.log_every=1", "launch.gpus_per_node=0", "data.workers=0"]
    alone = commands.start("train", "single", *same, *quick, "--run-dir", str(commands.run("single")))
    assert alone.ends() == 0, alone.output
    swarms = {record["round"]: record["loss"] for record in trained(run)}
    single = {record["step"]: record["loss"] for record in trained(commands.run("single"))}
    print({number: (round(swarms[number], 3), round(single[number], 3)) for number in sorted(swarms)})
    assert max(abs(swarms[number] - single[number]) for number in swarms) < 0.15
    assert swarms[1] - swarms[ROUNDS] > 1.0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> float:
    with started_in(tmp_path_factory.mktemp("honest")) as commands:
        return swarm(commands, honest=2, settings=UNSURE, seconds=300).loss


@pytest.mark.parametrize("attack", ["times-50", "weight", "gathered", "ahead"])
def test_an_attacker_spoils_no_update(attack: str, undisturbed: float, commands: Commands) -> None:
    """The honest peers' loss is within 10 % of that without the attacker, who is named if it has sent nonsense."""
    found = swarm(commands, attack, honest=2, settings=UNSURE, until="mallory", seconds=300)
    assert found.is_as_good_as(undisturbed)
    if attack in ("times-50", "weight"):
        assert "mallory" in found.names("peer_dropped", "peer_left_out")
