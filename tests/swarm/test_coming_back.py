"""A creator that is killed, or sleeps, and volunteers behind routers, who find it again by themselves: one story."""

import re
import signal
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from tests.swarm.conftest import FAST, TOKEN, Command, started_in
from tests.swarm.internet import internet
from trainkit.common import jsonl

ROUND_SECONDS = 4
SETTINGS = (*FAST, f"collaborative.round_seconds={ROUND_SECONDS}", "collaborative.rounds=120")


def sleep_for(command: Command, seconds: float) -> None:
    """As a laptop whose lid is closed: none of its processes does anything."""
    command.note_family()
    for act, wait in ((psutil.Process.suspend, seconds), (psutil.Process.resume, 0.0)):
        for one in command.alive():
            with suppress(psutil.NoSuchProcess):
                act(one)
        time.sleep(wait)


def rounds_in(output: str) -> list[int]:
    lines = [line for line in output.splitlines() if line.startswith("round ")]
    return [int(line.split()[1].partition("/")[0]) for line in lines]


@pytest.mark.long
@pytest.mark.swarm
def test_a_creator_comes_back_and_its_volunteers_find_it(tmp_path: Path) -> None:
    """It is killed while it saves, resumed, sleeps for three rounds, leaves by Ctrl-C, and is resumed once more."""
    with internet(public=1, homes=2) as net, started_in(tmp_path) as commands:
        run = commands.run("hivemind-0001")
        create = ("swarm", "create", "hivemind", "--name", "creator", "--port", "4711", "--allow-code", *SETTINGS)
        creator = commands.start(*create, on=net.on("pub1"))
        token, address = creator.says(TOKEN)[1], commands.address()
        names = {"anna": "lan1", "ben": "lan2"}
        volunteers = [commands.join(token, "--name", name, on=net.on(at)) for name, at in names.items()]
        creator.says("anna has joined")
        creator.says(r"round [3-9]/.* 3 peers averaged.*val loss")  # so that there are two checkpoints
        creator.kill()
        cut = max((run / "checkpoints").glob("step-*"))  # the newest, which `latest` may not name yet: only a beginning
        weights = cut / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
        for peer in volunteers:
            peer.says("Waiting for it for up to 1 d")
        again = commands.start("resume", str(run), "--allow-code", on=net.on("pub1"))
        again.says("3 peers averaged", 120)
        assert commands.address() == address
        sleep_for(again, 3.5 * ROUND_SECONDS)
        slept = len(again.output)
        again.says(rf"(?s)\A.{{{slept}}}.*3 peers averaged", 120)
        again.process.send_signal(signal.SIGINT)
        assert [command.ends() for command in (again, *volunteers)] == [0, 0, 0]
        last = commands.start("swarm", "create", "--resume", str(run), "--allow-code", "--no-train", on=net.on("pub1"))
        last.says(r"round \d+/120")
        assert commands.address() == address
        last.process.send_signal(signal.SIGINT)
        assert last.ends() == 0

    # After the last round saved; the last checkpoint may have been on its way, and the one before is cut.
    before, rounds = rounds_in(creator.output)[-1], rounds_in(again.output)
    assert max(2, before - 2) <= rounds[0] <= before + 1
    assert cut.name in again.output  # it is passed over in words
    assert (run / "swarm_identity").stat().st_mode & 0o777 == 0o600

    # Volunteers keep their weights meanwhile.
    for peer in volunteers:
        alone, _, after = peer.output.partition("Back in hivemind-0001, in round")
        assert "The weights of round" in alone
        assert alone.count("No peer of the swarm answers") == 1
        assert "3 peers averaged" in after
    for path in commands.runs_root.glob("*-peer-*"):
        assert list(path.glob("checkpoints/step-*/common.safetensors"))
        kinds = [event["event"] for event in jsonl.read_jsonl(path / "events.jsonl")]
        assert kinds.count("swarm_lost") == kinds.count("swarm_back") >= 1

    # Who has slept goes on with the round that it is by then.
    assert rounds == sorted(set(rounds))
    assert any(2 <= later - earlier <= 6 for earlier, later in pairwise(rounds))

    # Ctrl-C is a stop that can be resumed, here by a creator that does not train, and still judges.
    assert "Go on with it: python -m jobs.resume" in again.output
    said = re.search(
        r"^Continues after round (\d+): .*; the optimizer within rounds starts fresh\.$", last.output, re.M
    )
    assert said is not None
    assert rounds_in(last.output)[0] > max(int(said[1]), rounds[-1] - 2)
    assert "images/s here" not in last.output
    assert "val acc1" in last.output
