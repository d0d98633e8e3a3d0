"""A creator and a volunteer at home, each behind a router that lets nobody in, and an anchor that both reach."""

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from tests.swarm.conftest import FAST, Command, Commands, started_in
from tests.swarm.internet import Internet, internet

ANCHORS = r"TRAINKIT_TOKEN=(trainkit1\.\S+) python -m jobs\.swarm anchor --carry$"
GUESTS = r"TRAINKIT_TOKEN=(trainkit1\.\S+) python -m jobs\.join$"


def at_home(net: Internet, commands: Commands, rounds: int, seconds: float) -> tuple[Command, str, Command]:
    """A creator behind the first router, the line of its anchor, and a volunteer behind the second."""
    settings = (*FAST, f"collaborative.round_seconds={seconds}", f"collaborative.rounds={rounds}")
    create = ("swarm", "create", "hivemind", "--name", "creator", "--allow-code", "--through", net.address("pub1"))
    creator = commands.start(*create, *settings, on=net.on("lan1"))
    anchors = creator.says(ANCHORS)[1]
    guests = creator.says(GUESTS)[1]
    anchor_is(commands, net, anchors)
    creator.says("the anchor answers: from now on others reach this machine through it")
    return creator, anchors, commands.join(guests, "--name", "home", on=net.on("lan2"))


def anchor_is(commands: Commands, net: Internet, token: str, machine: str = "pub1") -> Command:
    return commands.start("swarm", "anchor", token, "--carry", "--name", "anchor", "--allow-code", on=net.on(machine))


def averaged_again(creator: Command, seconds: float = 120.0) -> None:
    """Wait for two more rounds of all three."""
    creator.says(rf"(?s)\A.{{{len(creator.output)}}}.*3 peers averaged.*3 peers averaged", seconds)


def weights_of(run: Path) -> dict[str, Any]:
    return safetensors.torch.load_file(run / "checkpoints" / "latest" / "model.safetensors")


@pytest.mark.nightly
@pytest.mark.swarm
def test_who_is_at_home_trains_with_others_at_home_through_an_anchor(tmp_path: Path) -> None:
    with internet(public=1, homes=2) as net, started_in(tmp_path) as commands:
        creator, _, home = at_home(net, commands, rounds=16, seconds=6)
        anchor = commands.started[1]
        averaged_again(creator)
        assert [one.ends(150) for one in (creator, anchor, home)] == [0, 0, 0]

    assert "it was dialled back at /ip4/45.10.10.11/tcp/4712/" in anchor.output
    run = commands.run("hivemind-0001")
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert "peer_audited" in {event["event"] for event in events}, creator.output
    first, *others = map(
        weights_of, [run, *commands.runs_root.glob("*-anchor-*"), *commands.runs_root.glob("*-peer-*")]
    )
    assert len(others) == 2
    for other in others:
        for name, values in first.items():
            assert float((other[name] - values).float().norm()) <= 1e-3 * float(values.float().norm()), name


@pytest.mark.long
@pytest.mark.swarm
def test_on_a_campus_an_anchor_may_have_a_private_address(tmp_path: Path) -> None:
    with internet(public=1, homes=2, network="10.77.10") as net, started_in(tmp_path) as commands:
        creator, _, _ = at_home(net, commands, rounds=16, seconds=6)
        commands.started[1].says("it was dialled back at /ip4/10.77.10.11/tcp/4712/")
        creator.says("3 peers averaged", 120.0)


@pytest.mark.long
@pytest.mark.swarm
def test_an_anchor_comes_back_and_a_router_gets_another_address(tmp_path: Path) -> None:
    with internet(public=1, homes=2) as net, started_in(tmp_path) as commands:
        creator, anchors, home = at_home(net, commands, rounds=200, seconds=6)
        averaged_again(creator)
        anchor = commands.started[1]
        anchor.note_family()
        for one in anchor.alive():
            one.kill()
        creator.says("the anchor does not answer: until it does, nobody reaches this machine")
        anchor = anchor_is(commands, net, anchors)
        averaged_again(creator)
        router = (*net.on("nat1"), "ip", "addr")
        for change in (("flush",), ("add", "45.10.10.99/24")):
            subprocess.run([*router, *change, "dev", "eth0"], check=True)
        time.sleep(1.0)  # connections of before are still held to be alive
        averaged_again(creator)
        revoked = commands.start("swarm", "revoke", "guest", on=net.on("lan1"))
        assert revoked.ends() == 0
        assert home.ends() == 3
        creator.process.send_signal(signal.SIGINT)
        assert [one.ends() for one in (creator, anchor)] == [0, 0]
    assert "The swarm knows." in revoked.output
    assert "invitation" in home.output.splitlines()[-3]


@pytest.mark.long
@pytest.mark.swarm
def test_a_creator_at_home_is_killed_and_then_moves_to_another_anchor(tmp_path: Path) -> None:
    with internet(public=2, homes=2) as net, started_in(tmp_path) as commands:
        creator, _, home = at_home(net, commands, rounds=200, seconds=6)
        anchor = commands.started[1]
        run = str(commands.run("hivemind-0001"))
        guests = creator.says(GUESTS)[1]
        averaged_again(creator)
        creator.kill()
        home.says(r"(?s)3 peers averaged.*(Waiting for it|2 peers averaged)")
        again = commands.start("resume", run, "--allow-code", on=net.on("lan1"))
        again.says("the anchor answers")
        averaged_again(again)
        assert "TRAINKIT_TOKEN" not in again.output  # the anchor and the volunteer need nothing
        anchor.note_family()
        for one in anchor.alive():
            one.kill()
        again.says("the anchor does not answer")
        for peer in (again, home):  # nobody could tell the volunteer where the swarm is
            peer.process.send_signal(signal.SIGINT)
            assert peer.ends() == 0
        through = ("--through", f"{net.address('pub2')}:5000")
        moved = commands.start("swarm", "create", "--resume", run, "--allow-code", *through, on=net.on("lan1"))
        place = moved.says(r"^  python -m jobs\.join TOKEN (/ip4/45\.10\.10\.12/tcp/5000/p2p/\w+)$")[1]
        anchor_is(commands, net, moved.says(ANCHORS)[1], "pub2")
        moved.says("the anchor answers")
        commands.join(guests, place, "--name", "home", on=net.on("lan2"))
        averaged_again(moved)
    before = int(re.findall(r"^round (\d+)/200", again.output, re.M)[-1])
    assert f"Continues after round {before}:" in moved.output
