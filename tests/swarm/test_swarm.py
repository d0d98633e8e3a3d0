"""Whole swarms: real peers on the loopback interface, started by the commands."""

import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests import readme
from tests.runs import wait_until
from tests.swarm.conftest import Commands
from trainkit.common import fileio, jsonl
from trainkit.swarm.identity.invitations import Key, grant, read_token, write_token

pytestmark = pytest.mark.swarm

STRANGER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
NOBODY = f"/ip4/127.0.0.1/tcp/9/p2p/{STRANGER}"


def summary(run: Path) -> dict[str, Any]:
    return fileio.read_object(run / "summary.json")


@pytest.mark.long
def test_a_swarm_survives_kill_9_and_a_late_join_and_learns(commands: Commands) -> None:
    # Two minutes, of which all that happens here takes one, for machines that have much else to do.
    creator, token = commands.create("collaborative.round_seconds=5", "collaborative.rounds=24")
    first, second = (commands.join(token, "--name", name, *commands.folder_of(name)) for name in ("first", "second"))
    creator.says("3 peers averaged(.*\n)+.*3 peers averaged")  # their names are known by the second time

    first.kill()  # as the memory killer does it, or `restart runtime` in a notebook
    assert len(first.family) >= 3  # itself, the DHT, libp2p's daemon
    wait_until(lambda: not first.alive(), 10, f"the end of what was started by the killed peer: {first.alive()}")

    late = commands.join(token, "--name", "late", *commands.folder_of("late"))
    late.says(
        "Other users of this machine can see the token in the list of processes; put it in TRAINKIT_TOKEN or a file"
    )
    late.says("peers averaged")
    creator.says("first has left")
    assert {row["name"] for row in commands.status(token)["peers"]} >= {"creator", "second", "late"}
    board = commands.start("swarm", "status", token, "--leaderboard")
    assert board.ends() == 0, board.output
    for name in ("creator", "guest first", "guest second"):
        assert re.search(rf"^  {name} +\d", board.output, re.MULTILINE), board.output

    assert [peer.ends(150) for peer in (creator, second, late)] == [0, 0, 0]
    done = summary(commands.run("hivemind-0001"))
    assert (done["outcome"], done["rounds"], done["most_peers"]) == ("finished", 24, 3)
    contributed = {item["name"]: item for item in done["contributions"]}
    assert {"creator", "guest first", "guest second", "guest late"} <= set(contributed)
    assert contributed["creator"]["rounds"] > contributed["guest first"]["rounds"] > 0
    assert contributed["guest first"]["bytes"] > 10_000 * contributed["guest first"]["rounds"]
    # What was accepted is credited, and that is no more than what was trained.
    for name in ("second", "late"):
        trained = 64 * list(jsonl.read_jsonl(commands.run(name) / "metrics.jsonl"))[-1]["step"]
        assert 0 < contributed[f"guest {name}"]["samples"] <= trained
    assert done["best"]["val/acc1"] >= 98.5
    assert done["val"]["acc1"] >= 98.0
    # All end with the same model: what a peer that joined has validated is what the creator has.
    joined = [summary(commands.run(name))["val"]["acc1"] for name in ("second", "late")]
    assert joined == pytest.approx([done["val"]["acc1"]] * 2, abs=0.8)

    afterwards = commands.start("swarm", "status", str(commands.run("hivemind-0001")))
    afterwards.says("hivemind-0001: not running, round 24/24")


@pytest.mark.long
def test_the_guides_commands_work_and_what_cannot_work_is_refused(commands: Commands) -> None:
    """Many things happen to one swarm, at once where they can: starting a peer costs seconds."""
    creator, token = commands.create("collaborative.round_seconds=4", "collaborative.rounds=500")
    address = commands.address()
    machine, port = address.rsplit("/", 1)[0], address.split("/")[4]
    _, join, ask = readme.blocks("swarm", readme.DOCS / "swarm.md")[0]
    assert join == "TRAINKIT_TOKEN=TOKEN python -m jobs.join"
    guest = commands.type_in(join.replace("=TOKEN", f"={token}"), "--name", "guest", "--allow-code")
    (commands.folder / "invited.txt").write_text(f"{token}\n", encoding="utf-8")
    here = ("--executor", "local", "--gpus-per-node", "0", "--wait", "--allow-code", "data.workers=0")
    submitted = commands.start("submit", "hivemind", "--join", "invited.txt", *here)
    trusted = commands.invite("trusted", "--reduce")
    (commands.folder / "token.txt").write_text(f"{trusted}\n", encoding="utf-8")
    public = commands.join("token.txt", "--name", "public", "--public", "--host", "127.0.0.1")
    own, other = read_token(token)[0], f"{machine}/{STRANGER}"
    strangers = grant(Key(b"s" * 32), own.grant.run, "guest", "owner", time.time() + 3600)
    refused = {
        "No peer of the swarm answers at /ip4/127.0.0.1/tcp/9/": ("swarm", "status", write_token(own, [NOBODY])),
        f"No peer of the swarm answers at {other}": ("swarm", "status", write_token(own, [other])),
        "Cannot listen on 127.0.0.1, port": ("swarm", "create", "hivemind", "--host", "127.0.0.1", "--port", port),
        "No peer of the swarm answers at": ("join", write_token(strangers, [address])),  # by an owner of another run
    }
    tried = {says: commands.start(*words) for says, words in refused.items()}
    creator.says("4 peers averaged")
    for command in (guest, public, submitted):
        command.note_family()
    seen = [word for command in (guest, public, submitted) for one in command.alive() for word in one.cmdline()]
    asked = commands.type_in(ask)
    assert asked.ends() == 0
    assert re.search(r"^hivemind-0001: running, round \d+/500, 4 peers", asked.output, re.MULTILINE)
    guest.process.terminate()
    assert guest.ends() == 0
    creator.says(r"4 peers averaged(.*\n)+.*3 peers averaged")  # the run ends with its creator, not with a guest
    assert commands.start("swarm", "stop").ends() == 0
    assert [peer.ends() for peer in (creator, public, submitted)] == [0, 0, 0]
    assert "Left the swarm." in guest.output
    assert "The creator ended the run." in public.output

    # Refused is with exit code 2, in three lines, and nothing is written.
    for says, command in tried.items():
        assert command.ends() == 2
        lines = command.output.splitlines()[-3:]  # after what it was doing meanwhile
        assert lines[0].startswith(says)
        assert [line[:6] for line in lines[1:]] == ["  why:", "  fix:"]
    names = sorted(path.name for path in commands.runs_root.glob("[!.]*"))
    assert [name[:-5] for name in names] == ["hivemind", "hivemind-0001-peer", "hivemind-0001-peer", "hivemind-peer"]

    # A token is in no list of processes, and in nothing that is kept.
    assert seen
    assert not any(word.startswith("trainkit1") for word in seen)
    assert "list of processes" not in guest.output + public.output
    kept = [file for root in (commands.runs_root, commands.folder / "state") for file in root.rglob("*")]
    texts = [file.read_bytes() for file in kept if file.is_file()]
    assert len(texts) > 20
    for secret in (token, trusted):
        assert [item for item in texts if secret.encode() in item or read_token(secret)[0].key.seed in item] == []

    # The creator's run folder is one like any other.
    run, (job,) = commands.run("hivemind-0001"), commands.runs_root.glob("hivemind-peer-*")
    assert [summary(path)["outcome"] for path in (run, job)] == ["stopped", "stopped"]
    assert {"train", "val"} <= {record["split"] for record in jsonl.read_jsonl(run / "metrics.jsonl")}
    assert (run / "checkpoints" / "best" / "model.safetensors").is_file()
    assert (run / "manifest.json").is_file()
    assert {"started", "saved", "peer_joined"} <= {event["event"] for event in jsonl.read_jsonl(run / "events.jsonl")}
