"""A swarm of real peers whose network is cut for a while."""

import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.runs import wait_until
from tests.swarm.conftest import FAST, TOKEN, started_in
from tests.swarm.internet import internet

pytestmark = [pytest.mark.swarm, pytest.mark.long]

ROUND_SECONDS = 4
SETTINGS = (*FAST, f"collaborative.round_seconds={ROUND_SECONDS}", "collaborative.rounds=60")
CREATE = ("swarm", "create", "hivemind", "--name", "creator", "--port", "4711", "--allow-code", *SETTINGS)


def test_the_halves_of_a_network_that_was_cut_become_one_swarm_again(tmp_path: Path) -> None:
    """For three rounds the anchor and a volunteer do not reach the creator and another volunteer. All train on."""
    with internet(public=2, homes=2) as net, started_in(tmp_path) as commands:
        creator = commands.start(*CREATE, on=net.on("pub1"))
        token = creator.says(TOKEN)[1]
        trusted = commands.invite("anchors", "--reduce")
        anchoring = ("swarm", "anchor", trusted, "--allow-code", "--port", "4712", "--name", "anchor")
        anchor = commands.start(*anchoring, on=net.on("pub2"))
        volunteers = [commands.join(token, "--name", f"home{i}", on=net.on(f"lan{i}")) for i in (1, 2)]
        creator.says(r"4 peers averaged.*\n(.*\n)*round .* 4 peers averaged", 150)
        with net.split("pub2", "nat2"):
            time.sleep(3 * ROUND_SECONDS)
        cut = len(creator.output)
        creator.says(rf"(?s)\A.{{{cut}}}.*4 peers averaged", 15 * ROUND_SECONDS)
        creator.process.send_signal(signal.SIGINT)
        assert [command.ends() for command in (creator, anchor, *volunteers)] == [0] * 4

    # Each half has gone on by itself, and the owner's has been taken over by the other.
    assert "2 peers averaged" in creator.output.partition("4 peers averaged")[2]
    assert "2 peers averaged" in volunteers[1].output
    assert "taking over their state" not in creator.output
    assert "taking over their state" in anchor.output + volunteers[1].output


def test_a_copy_that_is_started_in_a_cut_network_goes_on_alone(tmp_path: Path) -> None:
    """As its owner has asked with ``--force``; the creator that was cut off leaves when it hears of that."""
    with internet(public=3, homes=1) as net, started_in(tmp_path) as commands:
        creator = commands.start(*CREATE, on=net.on("pub1"))
        token = creator.says(TOKEN)[1]
        anchoring = ("swarm", "anchor", commands.invite("anchors", "--reduce"), "--allow-code", "--port", "4712")
        anchor = commands.start(*anchoring, on=net.on("pub2"))
        home = commands.join(token, "--name", "home", on=net.on("lan1"))
        creator.says("3 peers averaged", 150)
        saved = commands.run("hivemind-0001") / "swarm.json"
        wait_until(lambda: "/ip4/45.10.10.12/" in saved.read_text(), 60, "the anchor among those that are remembered")
        creator.process.send_signal(signal.SIGSTOP)  # or a checkpoint might go while it is copied
        copy = shutil.copytree(commands.run("hivemind-0001"), commands.folder / "copied" / "hivemind-0001")
        creator.process.send_signal(signal.SIGCONT)
        with net.split("pub1"):
            # A machine has a name of its own, by which it knows that the process of the run is not here.
            machine = (*net.on("pub3"), "unshare", "--uts", "sh", "-c", 'hostname elsewhere; exec "$@"', "sh")
            resume = ("swarm", "create", "--allow-code", "--force", "--resume", str(copy))
            again = commands.start(*resume, on=machine)
            again.says("3 peers averaged", 150)
        assert creator.ends(120) == 0
        healed = len(again.output)
        again.says(rf"(?s)\A.{{{healed}}}.*3 peers averaged", 20 * ROUND_SECONDS)
        assert home.process.poll() is None
        again.process.send_signal(signal.SIGINT)
        assert [command.ends() for command in (again, anchor, home)] == [0] * 3
    assert "was started later, at /ip4/45.10.10.13/" in creator.output
    assert home.output.count("The creator ended the run.") == 1
