"""Peers that cheat, in swarms of real peers: what the honest ones end with, and what is said of the others."""

from __future__ import annotations

import json
import re

import pytest

from tests.swarm.attacked import swarm
from tests.swarm.conftest import Commands, started_in

pytestmark = [pytest.mark.swarm, pytest.mark.long]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The loss of three honest peers among themselves."""
    with started_in(tmp_path_factory.mktemp("honest")) as commands:
        return swarm(commands, honest=2).loss


@pytest.mark.parametrize(
    "attack",
    ["times-9", "times-50", "times1000", "nan", "weight", "gather", "name", "loss", "speed", "half", "twice", "stall"],
)
def test_an_attacker_costs_honest_peers_10_percent_of_loss_at_most(
    attack: str, undisturbed: float, commands: Commands
) -> None:
    found = swarm(commands, attack, honest=3 if attack == "weight" else 2)
    assert found.is_as_good_as(undisturbed)
    if attack in ("times-9", "times-50", "times1000", "nan", "weight", "gather", "half"):
        assert "mallory" in found.out()
    if attack == "twice":
        (attacker,) = found.attackers
        counted = re.findall("CALLS THAT COUNT: (.)", attacker.output)
        assert len(counted) >= 5
        assert set(counted) <= {"0", "1"}
        assert "PROTOCOL_VIOLATION" in attacker.output
    if attack == "stall":  # after some rounds nobody waits for it
        waited = found.creator.output.count("too late: mallory")
        assert 0 < waited < found.creator.output.count("3 peers averaged")
    for text in (found.status, found.creator.output):
        assert text.replace("\n", "").isprintable()


def test_who_comes_four_times_with_one_invitation_is_no_majority(undisturbed: float, commands: Commands) -> None:
    found = swarm(commands, *["turned"] * 4, honest=2)
    assert found.is_as_good_as(undisturbed)
    assert {event["name"] for event in found.events("peer_dropped")} == {"mallory"}
    assert len({event["peer"] for event in found.events("peer_dropped")}) == 4
    assert found.banned() == ["mallory"]


@pytest.mark.parametrize("attack", ["probe", "impostor"])
def test_nobody_adopts_the_weights_of_a_volunteer_whatever_it_signs(
    attack: str, undisturbed: float, commands: Commands
) -> None:
    found = swarm(commands, attack, honest=2, late=True)
    assert found.is_as_good_as(undisturbed)
    (attacker,), (*_, late) = found.attackers, found.honest
    assert "GAVE AWAY" not in attacker.output  # nobody has asked it
    assert "Joined hivemind-0001" in late.output
    assert "taking over their state" not in found.creator.output
    for peer in found.honest:  # a busy machine makes one drift now and then, and that one asks the creator
        assert peer.output.count("taking over their state") <= 2
    # Who wants to average for others without being of the owner's side is in no group.
    assert ("peers averaged" in attacker.output) == (attack == "probe"), attacker.output


@pytest.mark.parametrize("attack", ["reduces-minus", "reduces-minus-9", "reduces-minus-50"])
def test_a_reducer_that_gives_back_no_average_is_banned_by_the_owner(
    attack: str, undisturbed: float, commands: Commands
) -> None:
    found = swarm(commands, attack, honest=2, until="mallory")
    print(f"{attack}: loss {found.loss:.4f}, without the attacker {undisturbed:.4f}")
    assert "GAVE BACK what is no average" in found.attackers[0].output
    assert found.loss <= 1.1 * undisturbed
    assert {event["name"] for event in found.events("peer_dropped")} == {"mallory"}
    assert found.banned() == ["mallory"]


def test_the_owner_is_asked_for_weights_before_a_reducer_that_lies(undisturbed: float, commands: Commands) -> None:
    found = swarm(commands, "wrong-state", honest=2, late=True, until="mallory")
    assert found.is_as_good_as(undisturbed)
    assert "GAVE AWAY" not in found.attackers[0].output
    assert "Joined hivemind-0001" in found.honest[-1].output


def test_plain_hivemind_without_an_invitation_gets_nothing(undisturbed: float, commands: Commands) -> None:
    found = swarm(commands, "intruder", honest=2)
    assert found.is_as_good_as(undisturbed)
    (intruder,) = found.attackers
    print(intruder.output)
    (found_out,) = (json.loads(line) for line in intruder.output.splitlines() if line.startswith("{"))
    of_stock, of_run = found_out["stock"], found_out["run"]
    # The same calls get from a stock averager what it has.
    got = ("find: nothing", "store: stored", "state: gave its state", "group: NOT_LOOKING_FOR_GROUP")
    assert of_stock["got"] == dict.fromkeys((*got, "part: BAD_GROUP_ID"), 1)
    assert found_out["node"].startswith("refused")
    tried = of_run["got"]
    assert sum(tried.values()) >= 25
    assert all(re.match(r"\w+: (nothing|PROTOCOL_VIOLATION)", what) for what in tried), tried
    assert tried["group: PROTOCOL_VIOLATION"] >= 5
    assert tried["part: PROTOCOL_VIOLATION"] >= 5
    # Calls in which nobody says anything stay open for ever, and a message may have any length: there, not here.
    assert (of_stock["held"], of_stock["poured"]) == (60, 64)
    assert of_run["held"] == 0
    assert of_run["poured"] < 32
    assert "intruder" not in found.creator.output + found.status
    assert json.loads((found.run / "summary.json").read_text(encoding="utf-8"))["most_peers"] == 3
