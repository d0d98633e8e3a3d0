"""One honest peer whose upload is slow, in a swarm whose other links are not. One story, and nobody configures it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.collaborative.conftest import Command, started_in, wait_for
from tests.collaborative.internet import internet

pytestmark = [pytest.mark.swarm, pytest.mark.long]

ROUND_SECONDS = 12
ROUNDS = 22
# Of the rounds before the slow peer the first ones are those in which the creator and the quick one start.
WARM, BEFORE, WITH = 3, 5, 8


@dataclass
class Story:
    """A creator and a quick peer; later a third, with 2 Mbit/s up."""

    creator: Command
    slow: Command
    records: list[dict[str, Any]]
    """The creator's rounds."""
    joined: int
    """Index of the first of them with the slow peer in it."""


def rounds_of(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [record for line in lines if (record := json.loads(line))["split"] == "train"]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with internet(public=3, homes=0) as net, started_in(tmp_path_factory.mktemp("swarm")) as commands:
        net.slow("pub3", "2mbit")
        settings = (f"collaborative.round_seconds={ROUND_SECONDS}", f"collaborative.rounds={ROUNDS}")
        own = ("model.name=tests.collaborative.patient:wide", "monitor.loggers=[jsonl]", "optim.lr=1e-4")
        where = ("--host", net.address("pub1"), "--name", "creator")
        creator = commands.start("swarm", "create", "hivemind", *settings, *own, *where, on=net.on("pub1"))
        address = creator.says(r"jobs\.join (/ip4/45\.10\.10\.11/tcp/\d+/p2p/\w+)")[1]
        commands.start("join", address, "--allow-code", "--name", "quick", on=net.on("pub2"))
        run = commands.run("hivemind-0001")

        def averaged(peers: int) -> list[int]:
            return [index for index, record in enumerate(rounds_of(run)) if record["peers"] == peers]

        wait_for(lambda: len(averaged(2)) >= WARM + BEFORE, 200, "rounds of two")
        slow = commands.start("join", address, "--allow-code", "--name", "slow", on=net.on("pub3"))
        wait_for(lambda: len(averaged(3)) >= WITH, 240, "rounds of three")
        yield Story(creator, slow, rounds_of(run), averaged(3)[0])


def updates(records: list[dict[str, Any]]) -> float:
    """The creator's, in a round on average."""
    steps: list[int] = [after["step"] - before["step"] for before, after in pairwise(records)]
    return sum(steps) / len(steps)


def test_it_costs_the_others_less_than_5_percent_of_their_updates(story: Story) -> None:
    before = story.records[WARM : story.joined]
    with_it = story.records[story.joined - 1 : story.joined + WITH]
    print(f"updates a round: {updates(before):.2f} without, {updates(with_it):.2f} with it")
    assert updates(with_it) >= 0.95 * updates(before)


def test_it_costs_the_others_no_round(story: Story) -> None:
    with_it = story.records[story.joined : story.joined + WITH]
    assert all(record["peers"] >= 2 for record in with_it)
    assert [record["round"] for record in with_it] == list(range(with_it[0]["round"], with_it[0]["round"] + WITH))


def test_at_first_it_is_late_and_a_round_says_how_many_parts_arrived(story: Story) -> None:
    first = story.records[story.joined]
    assert first["parts"] < first["parts_expected"]
    assert re.search(rf"3 peers averaged, {first['parts']} of {first['parts_expected']} parts", story.creator.output)
    assert "too late: " in story.creator.output


def test_later_all_that_it_sends_arrives_in_time(story: Story) -> None:
    last = [record for record in story.records if record["peers"] == 3][-3:]
    assert all(record["parts"] >= 0.95 * record["parts_expected"] for record in last)


def test_it_is_told_what_its_link_means_for_it(story: Story) -> None:
    assert re.search(
        r"upload [\d.]+ Mbit/s: this peer sends 8 bit, and each weight only in one of \d", story.slow.output
    )
    assert "nothing it learns is lost" in story.slow.output


def test_its_averages_are_the_others(story: Story) -> None:
    assert "taking over their state" not in story.slow.output.split("Joined")[1]
