"""Peers that cheat, in swarms of real peers: what the honest ones end with, and what is said of the others."""

import json
import signal

import pytest

from tests.swarm.attacked import swarm
from tests.swarm.conftest import Commands, started_in
from trainkit.run.contributions import Contributions
from trainkit.run.folder import RunDir

pytestmark = [pytest.mark.swarm, pytest.mark.long]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The loss of three honest peers among themselves."""
    with started_in(tmp_path_factory.mktemp("honest")) as commands:
        return swarm(commands, honest=2).loss


@pytest.mark.parametrize("attack", ["times-50", "weight", "name", "stall"])
def test_an_attacker_costs_honest_peers_10_percent_of_loss_at_most(
    attack: str, undisturbed: float, commands: Commands
) -> None:
    found = swarm(commands, attack, honest=3 if attack == "weight" else 2)
    assert found.is_as_good_as(undisturbed)
    if attack in ("times-50", "weight"):
        assert "mallory" in found.names("peer_dropped", "peer_left_out")
    if attack == "stall":  # after some rounds nobody waits for it
        waited = found.creator.output.count("too late: mallory")
        assert 0 < waited < found.creator.output.count("3 peers averaged")
    for text in (found.status, found.creator.output):
        assert text.replace("\n", "").isprintable()


@pytest.mark.parametrize("attack", ["half", "zeros"])
def test_three_times_the_speed_claimed_buys_neither_harm_nor_credit(
    attack: str, undisturbed: float, commands: Commands
) -> None:
    """Against the owner and one honest volunteer, by one who is honest for three rounds. Audits find it out."""
    found = swarm(commands, attack, honest=1)
    assert found.is_as_good_as(undisturbed)
    assert found.names("peer_banned") == ["mallory"]
    assert "mallory" not in {one.name for one in Contributions.of(RunDir(found.run)).best_first()}


@pytest.mark.parametrize("attack", ["labels", "trigger"])
def test_who_trains_on_other_samples_spoils_little(attack: str, undisturbed: float, commands: Commands) -> None:
    found = swarm(commands, attack, honest=2)
    assert found.is_as_good_as(undisturbed)
    from tests.swarm.table import of_model  # which starts what attackers need

    assert of_model(found.run)["backdoor"] < 15.0  # it was 2 to 9 %
    assert set(found.names("peer_banned")) <= {"mallory"}


def test_who_comes_four_times_with_one_invitation_is_no_majority(undisturbed: float, commands: Commands) -> None:
    found = swarm(commands, *["turned"] * 4, honest=2)
    assert found.is_as_good_as(undisturbed)
    assert set(found.names("peer_dropped")) == {"mallory"}
    assert len({event["peer"] for event in found.events("peer_dropped")}) == 4
    assert found.names("peer_banned") == ["mallory"]


def test_nobody_adopts_the_weights_of_a_volunteer_whatever_it_signs(undisturbed: float, commands: Commands) -> None:
    found = swarm(commands, "impostor", honest=2, late=True)
    assert found.is_as_good_as(undisturbed)
    (attacker,), (*_, late) = found.attackers, found.honest
    assert "GAVE AWAY" not in attacker.output  # nobody has asked it
    assert "Joined hivemind-0001" in late.output
    assert "taking over their state" not in found.creator.output
    for peer in found.honest:  # a busy machine makes one drift now and then, and that one asks the creator
        assert peer.output.count("taking over their state") <= 2
    # Who wants to average for others without being of the owner's side is in no group.
    assert "peers averaged" not in attacker.output


def test_a_reducer_that_gives_back_no_average_is_banned_by_the_owner(undisturbed: float, commands: Commands) -> None:
    found = swarm(commands, "reduces", honest=2, until="mallory")
    assert found.is_as_good_as(undisturbed)
    assert "GAVE BACK what is no average" in found.attackers[0].output
    assert set(found.names("peer_dropped")) == {"mallory"}
    assert found.names("peer_banned") == ["mallory"]


def test_plain_hivemind_without_an_invitation_gets_nothing(commands: Commands) -> None:
    creator, token = commands.create("collaborative.round_seconds=4", "collaborative.rounds=500")
    guest = commands.join(token, "--name", "guest")
    creator.says("2 peers averaged")
    intruder = commands.intrude(token)
    assert intruder.ends() == 0, intruder.output
    creator.says(rf"(?s)\A.{{{len(creator.output)}}}.*2 peers averaged")
    status = commands.status(token)
    creator.process.send_signal(signal.SIGINT)
    assert [creator.ends(), guest.ends()] == [0, 0]
    print(intruder.output)
    (found,) = (json.loads(line) for line in intruder.output.splitlines() if line.startswith("{"))
    of_stock, of_run = found["stock"], found["run"]
    # The same calls get from a stock averager what it has.
    gives = {"store": "stored", "state": "gave its state", "group": "NOT_LOOKING_FOR_GROUP"}
    assert gives.items() <= of_stock["got"].items()
    assert found["node"].startswith("refused")
    assert of_run["got"].pop("group") == "PROTOCOL_VIOLATION"
    # Who is still sending while it is refused may see no answer but a closed connection.
    assert of_run["got"].pop("part") in ("PROTOCOL_VIOLATION", "nothing (BrokenPipeError)")
    assert all(what.startswith("nothing") for what in of_run["got"].values()), of_run["got"]
    # Calls in which nobody says anything stay open for ever, and a message may have any length: there, not here.
    assert (of_stock["held"], of_stock["poured"]) == (60, 64)
    assert of_run["held"] == 0
    assert of_run["poured"] < 32
    assert "intruder" not in creator.output
    assert len(status["peers"]) == 2
