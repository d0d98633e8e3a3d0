"""Peers with another torch, in a swarm of real peers: who trains alike counts after an audit, the other one leaves."""

import pytest

from tests.runs import wait_until
from tests.swarm.conftest import Command, Commands
from trainkit.run.contributions import Contributions
from trainkit.run.folder import RunDir

SMALL = ("train.global_batch_size=32", "train.micro_batch_size=32", "data.workers=0")
QUICK = ("collaborative.round_seconds=8", "collaborative.rounds=500", "model.name=fashion_cnn", *SMALL)
WAITS = r"^torch: 1\.13 here, \S+ in the run\. What this peer learns counts once the creator has repeated"


@pytest.mark.long
@pytest.mark.swarm
def test_another_torch_counts_after_an_audit_and_one_that_differs_leaves(commands: Commands) -> None:
    """Both say that they have torch 1.13; one trains as everybody, the other adds noise to each update."""
    creator, _ = commands.create(*QUICK)

    def join(attack: str) -> Command:
        peer = commands.attack(attack, "join", commands.invite(attack), "--name", attack)
        peer.says(WAITS)
        return peer

    def samples(name: str) -> float:
        rows = Contributions.of(RunDir(commands.run("hivemind-0001"))).rows()
        return float(sum(row["samples"] for row in rows if row["name"] == name))

    def agreed(peer: Command) -> bool:
        """Whether an audit has agreed; before that nothing of the peer's has counted."""
        before = samples("other-torch")
        peer.note_family()
        has_agreed = "an audit agrees with this peer: from now on it counts" in peer.output
        assert has_agreed or before == 0
        return has_agreed

    same = join("other-torch")
    same.says("2 peers averaged")
    wait_until(lambda: agreed(same), 480, lambda: f"{same.output} {creator.output}")
    other = join("trains-otherwise")
    other.says("compute something else than the run's", 480)
    assert other.ends() == 3
    assert "fix: python -m pip install " in other.output
    wait_until(lambda: samples("other-torch"), 60, "samples that count")
    assert samples("trains-otherwise") == 0
    assert "banned" not in creator.output
    assert "The audit of trains-otherwise in round" in creator.output
    assert "The audit of other-torch in round" not in creator.output
