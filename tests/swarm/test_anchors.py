"""A swarm over a small internet: two homes behind routers, an anchor, and a creator that is killed. One story."""

import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.swarm.conftest import FAST, TOKEN, started_in
from tests.swarm.internet import internet

ROUND_SECONDS = 6
ROUNDS = (f"collaborative.round_seconds={ROUND_SECONDS}", "collaborative.rounds=60")
SETTINGS = (*FAST, *ROUNDS, "data.name=tests.swarm.rooted:data")


@pytest.mark.long
@pytest.mark.swarm
def test_an_anchor_carries_a_swarm_without_its_creator_and_may_die_itself(tmp_path: Path) -> None:
    """The creator is killed when all average; a newcomer joins through the anchor; the creator comes back elsewhere;
    the anchor is killed while all send their parts."""
    with internet(public=3, homes=2) as net, started_in(tmp_path) as commands:
        create = ("swarm", "create", "hivemind", "--name", "creator", "--port", "4711", "--allow-code", *SETTINGS)
        here = f"data.root={commands.folder}"  # the anchor's data.root is where there is nothing
        creator = commands.start(*create, here, on=net.on("pub1"))
        token = creator.says(TOKEN)[1]
        trusted = commands.invite("anchors", "--reduce")
        anchoring = ("swarm", "anchor", trusted, "--allow-code", "--port", "4712", "--name")
        anchor = commands.start(*anchoring, "anchor", on=net.on("pub2"))
        hidden = commands.start(*anchoring, "hidden", on=net.on("lan1"))  # behind a router
        doctor = commands.start("swarm", "doctor", token, on=net.on("lan2"))
        assert hidden.ends() == 2
        assert doctor.ends() == 0, doctor.output
        bare = commands.join(token, on=net.on("pub3"))
        assert bare.ends() == 2
        assert "The data set 'rooted' is not in" in bare.output
        homes = [commands.join(trusted, here, "--public", "--name", f"home{i}", on=net.on(f"lan{i}")) for i in (1, 2)]
        creator.says(r"4 peers averaged.*\n(.*\n)*round .* 4 peers averaged")
        seen = commands.status(token, on=net.on("pub3"))
        address = re.escape(net.address("pub2"))
        through_anchor = anchor.says(rf"jobs\.join TOKEN (/ip4/{address}/tcp/\d+/p2p/\w+)")[1]
        creator.kill()
        said = len(anchor.output)
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
        with_anchor = len(again.output)
        anchor.note_family()
        time.sleep(ROUND_SECONDS - time.time() % ROUND_SECONDS + 0.02)  # all have met, and send their parts
        for one in anchor.alive():
            one.kill()
        again.says(r"4 peers averaged", 120)
        again.process.send_signal(signal.SIGINT)
        assert [peer.ends() for peer in (again, late, *homes)] == [0, 0, 0, 0]

    # Who is behind a router is told so, and averages; the doctor joins nothing.
    for home in homes:
        assert re.search(r"Others cannot reach this machine: connecting to it at /ip4/45\.10\.10\.5[12]/", home.output)
        assert "4 peers averaged" in home.output  # with the creator and the anchor
        assert "Waiting for it" not in home.output
    assert "it was dialled back at /ip4/45.10.10.12/tcp/4712/" in anchor.output
    assert "\nOthers cannot reach this machine, so it cannot be an anchor." in hidden.output
    assert "--announce PUBLIC_IP:4712" in hidden.output
    checks = [line.split()[1] for line in doctor.output.splitlines() if line.startswith("ok")]
    assert checks == ["device", "token", "tcp", "tcp", "clock", "manifest", "versions", "disk"]
    assert "peer@" not in creator.output
    rows = {row["name"]: row for row in seen["peers"]}
    assert {name: row["role"] == "client" for name, row in rows.items()} == {
        "creator": False, "anchor": False, "home1": True, "home2": True
    }  # fmt: skip
    assert all(rows[name]["sent"] > 0 for name in ("creator", "anchor"))

    # An anchor needs no data, makes no updates, and keeps checkpoints; without the creator all go on through it.
    assert not (tmp_path / "data").exists()
    assert rows["anchor"]["samples"] == 0
    assert "images/s here" not in anchor.output
    (run,) = commands.runs_root.glob("*-anchor-*")
    assert (run / "checkpoints" / "latest" / "model.safetensors").is_file()
    assert anchor.output[said:].count("3 peers averaged") >= 3

    # The creator takes over what they have reached, says that it has moved, and is not doubled.
    before = int(re.findall(r"^round (\d+)/60", creator.output, re.MULTILINE)[-1])
    match = re.search(r"The others continued from round (\d+) to (\d+)", again.output)
    assert match is not None
    assert before - 1 <= int(match[1]) <= before
    assert int(re.findall(r"^round (\d+)/60", again.output, re.MULTILINE)[0]) == int(match[2]) + 1
    place = r"python -m jobs\.join TOKEN /ip4/45\.10\.10\.13/tcp/4711/"
    assert re.search(rf"^It has moved\. Peers find it through an anchor.*\n  {place}", again.output, re.M)
    lines = twin.output.splitlines()[-3:]  # after what it was doing meanwhile
    assert lines[0] == "This run already continues on another machine."
    assert "answers at /ip4/45.10.10.13/tcp/4711/" in lines[1]
    assert "round" not in lines[-1]

    # An anchor that dies while all send their parts costs a round at most.
    later = [line for line in again.output[with_anchor:].splitlines() if line.startswith("round ")]
    until = next(index for index, line in enumerate(later) if "4 peers averaged" in line)
    assert len([line for line in later[:until] if "peers averaged" not in line]) <= 1
    assert "The creator ended the run." in late.output
