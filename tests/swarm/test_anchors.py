"""A swarm over a small internet: two homes behind routers, an anchor, and a creator that is killed. One story."""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.swarm.conftest import TOKEN, Command, Commands, started_in
from tests.swarm.internet import internet

pytestmark = [pytest.mark.swarm, pytest.mark.long]

ROUND_SECONDS = 6
FAST = (
    "monitor.loggers=[jsonl]",
    "collaborative.matchmaking_seconds=1.5",
    f"collaborative.round_seconds={ROUND_SECONDS}",
    "collaborative.rounds=60",
    "model.name=tests.swarm.patient:model",
    "data.name=tests.swarm.rooted:data",
)


@dataclass
class Story:
    """The creator is killed when all average; a newcomer joins through the anchor; the creator comes back elsewhere;
    the anchor is killed while all send their parts."""

    commands: Commands
    seen: dict[str, Any]
    """`swarm status --json`, when all averaged."""
    doctor: Command
    hidden: Command
    """An anchor behind a router."""
    bare: Command
    """Would train, and has no data."""
    creator: Command
    anchor: Command
    homes: list[Command]
    """Two that believe they can be reached."""
    late: Command
    again: Command
    """The creator, on another machine, from a copy of its run folder."""
    twin: Command
    """The same from the run folder itself, on the creator's own machine."""
    killed_at: dict[str, int]
    """How much the anchor had said when the creator was killed, and the creator when the anchor was."""


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with internet(public=3, homes=2) as net, started_in(tmp_path_factory.mktemp("swarm")) as commands:
        create = ("swarm", "create", "hivemind", "--name", "creator", "--port", "4711", "--allow-code", *FAST)
        here = f"data.root={commands.folder}"  # the anchor's data.root is where there is nothing
        creator = commands.start(*create, here, on=net.on("pub1"))
        token = creator.says(TOKEN)[1]
        trusted = commands.invite("anchors", "--reduce")
        anchoring = ("swarm", "anchor", trusted, "--allow-code", "--port", "4712", "--name")
        anchor = commands.start(*anchoring, "anchor", on=net.on("pub2"))
        hidden = commands.start(*anchoring, "hidden", on=net.on("lan1"))
        doctor = commands.start("swarm", "doctor", token, on=net.on("lan2"))
        assert hidden.ends() == 2
        doctor.ends()
        bare = commands.join(token, on=net.on("pub3"))
        assert bare.ends() == 2
        homes = [commands.join(trusted, here, "--public", "--name", f"home{i}", on=net.on(f"lan{i}")) for i in (1, 2)]
        creator.says(r"4 peers averaged.*\n(.*\n)*round .* 4 peers averaged")
        seen = commands.status(token, on=net.on("pub3"))
        address = re.escape(net.address("pub2"))
        through_anchor = anchor.says(rf"jobs\.join TOKEN (/ip4/{address}/tcp/\d+/p2p/\w+)")[1]
        creator.kill()
        killed_at = {"anchor": len(anchor.output)}
        anchor.says("creator has left")
        late = commands.join(token, here, through_anchor, "--name", "late", on=net.on("pub3"))
        late.says("4 peers averaged")
        copy = shutil.copytree(commands.run("hivemind-0001"), commands.folder / "copied" / "hivemind-0001")
        resume = ("swarm", "create", "--allow-code", "--resume")
        again = commands.start(*resume, str(copy), on=net.on("pub3"))
        again.says("5 peers averaged", 120)
        twin = commands.start(*resume, str(commands.run("hivemind-0001")), on=net.on("pub1"))
        assert twin.ends() == 2
        again.says(r"5 peers averaged.*\n(.*\n)*.*5 peers averaged", 120)
        killed_at["again"] = len(again.output)
        anchor.note_family()
        time.sleep(ROUND_SECONDS - time.time() % ROUND_SECONDS + 0.02)  # all have met, and send their parts
        for one in anchor.alive():
            one.kill()
        again.says(r"4 peers averaged", 120)
        again.process.send_signal(signal.SIGINT)
        for command in (again, *homes, late):
            command.ends()
        yield Story(commands, seen, doctor, hidden, bare, creator, anchor, homes, late, again, twin, killed_at)


def test_who_is_behind_a_router_is_told_so_and_all_average(story: Story) -> None:
    for home in story.homes:
        assert re.search(r"Others cannot reach this machine: it was dialled at /ip4/45\.10\.10\.5[12]/", home.output)
        assert "4 peers averaged" in home.output  # with the creator and the anchor
    assert "it was dialled back at /ip4/45.10.10.12/tcp/4712/" in story.anchor.output
    assert "\nOthers cannot reach this machine, so it cannot be an anchor." in story.hidden.output
    assert "--announce PUBLIC_IP:4712" in story.hidden.output


def test_without_the_creator_all_go_on_through_the_anchor_newcomers_too(story: Story) -> None:
    afterwards = story.anchor.output[story.killed_at["anchor"] :]
    assert afterwards.count("3 peers averaged") >= 3
    assert all("Waiting for it" not in home.output for home in story.homes)
    assert "Joined hivemind-0001" in story.late.output


def test_the_creator_takes_over_what_the_others_have_reached_without_it(story: Story) -> None:
    before = int(re.findall(r"^round (\d+)/60", story.creator.output, re.MULTILINE)[-1])
    match = re.search(r"The others have gone on from round (\d+) to (\d+)", story.again.output)
    assert match is not None
    assert before - 1 <= int(match[1]) <= before
    assert int(re.findall(r"^round (\d+)/60", story.again.output, re.MULTILINE)[0]) == int(match[2]) + 1


def test_an_anchor_needs_no_data_makes_no_updates_and_keeps_checkpoints(story: Story) -> None:
    assert not (story.commands.folder / "data").exists()
    assert "The data set 'rooted' is not in" in story.bare.output  # which would train
    assert re.search(r"\d peers averaged", story.anchor.output)
    assert "images/s here" not in story.anchor.output
    (run,) = story.commands.runs_root.glob("*-anchor-*")
    assert (run / "checkpoints" / "latest" / "model.safetensors").is_file()


def test_the_creators_load_is_shown_and_the_anchor_shares_it(story: Story) -> None:
    rows = {row["name"]: row for row in story.seen["peers"]}
    assert set(rows) == {"creator", "anchor", "home1", "home2"}
    assert all(rows[name]["sent"] > 0 for name in ("creator", "anchor"))  # who has how many parts: `test_exchange`
    assert rows["anchor"]["samples"] == 0
    assert {name for name, row in rows.items() if row["role"] == "client"} == {"home1", "home2"}


def test_a_creator_that_has_moved_says_so_and_is_not_doubled(story: Story) -> None:
    place = r"python -m jobs\.join TOKEN /ip4/45\.10\.10\.13/tcp/4711/"
    assert re.search(rf"^It has moved\. Who trains finds it through an anchor.*\n  {place}", story.again.output, re.M)
    lines = story.twin.output.splitlines()
    assert lines[0] == "This run goes on already, on another machine."
    assert "answers at /ip4/45.10.10.13/tcp/4711/" in lines[1]
    assert "round" not in lines[-1]


def test_an_anchor_killed_while_all_send_their_parts_costs_a_round_at_most(story: Story) -> None:
    later = [line for line in story.again.output[story.killed_at["again"] :].splitlines() if line.startswith("round ")]
    until = next(index for index, line in enumerate(later) if "4 peers averaged" in line)
    assert len([line for line in later[:until] if "peers averaged" not in line]) <= 1
    assert [peer.process.returncode for peer in (story.again, story.late, *story.homes)] == [0, 0, 0, 0]
    assert "The creator ended the run." in story.late.output


def test_the_doctor_finds_nothing_behind_a_router_and_joins_nothing(story: Story) -> None:
    assert story.doctor.process.returncode == 0, story.doctor.output
    assert [line.split()[1] for line in story.doctor.output.splitlines() if line.startswith("ok")] == [
        *("device", "token", "tcp", "tcp", "clock", "manifest", "versions", "disk", "upload"),
    ]
    assert "peer@" not in story.creator.output
