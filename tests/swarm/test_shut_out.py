"""One who is banned and one who is revoked, in a swarm of real peers: they are out, and stay out. One story."""

import re
import signal
import time

import pytest

from tests.swarm.attacked import HARDER
from tests.swarm.conftest import Command, Commands
from trainkit.common import jsonl


@pytest.mark.long
@pytest.mark.swarm
def test_who_is_banned_or_revoked_is_out_and_stays_out(commands: Commands) -> None:
    """Mallory sends her pseudo-gradient fifty times as long and turned round, until she is out; Anna is revoked."""
    creator, guests = commands.create(*HARDER, "collaborative.rounds=500")

    def join(name: str, token: str) -> tuple[str, ...]:
        return ("join", token, "--allow-code", "--name", name, *commands.folder_of(name))

    def refused(peer: Command, says: str) -> None:
        assert peer.ends(60) == 3
        assert says in peer.output
        assert "Traceback" not in peer.output

    honest = commands.start(*join("honest", guests))
    other_hivemind = commands.attack("other-hivemind", *join("other-hivemind", guests))
    refused(other_hivemind, "This peer differs from the run in: hivemind.\n  why: hivemind: ")
    hers = commands.invite("mallory")
    mallory = commands.attack("times-50", *join("mallory", hers))
    creator.says("mallory is banned")
    banned = "You were banned from the run.\n  why: 3 times in a row"
    refused(mallory, banned)
    refused(commands.start(*join("mallory-again", hers)), banned)

    annas = commands.invite("anna")
    anna = commands.start(*join("anna", annas))
    deaf = commands.attack("deaf", *join("deaf", annas))  # a second machine, that does not leave when it is told to
    creator.says("(anna|deaf) has joined.*\n(.*\n)*.*4 peers averaged")
    revoke = commands.start("swarm", "revoke", "anna", "hivemind-0001")
    revoke.says("Revoked: anna")
    revoked = time.monotonic()
    refused(anna, "Your invitation was revoked.")
    told_after = time.monotonic() - revoked
    assert told_after < 15
    assert revoke.ends() == 0
    refused(commands.start(*join("anna-again", annas)), "Your invitation was revoked.")
    creator.says("anna has left.*\n(.*\n)*.*2 peers averaged")
    assert deaf.process.poll() is None

    creator.kill()
    resumed = commands.start("resume", str(commands.run("hivemind-0001")), "--allow-code")
    resumed.says("2 peers averaged")
    refused(commands.start(*join("mallory-later", hers)), banned)  # of whom nobody but the run folder knows
    resumed.says("2 peers averaged(.*\n)*.*2 peers averaged")
    resumed.process.send_signal(signal.SIGINT)
    assert [command.ends(60) for command in (resumed, honest)] == [0, 0]

    # The attack has not spoiled the model: who knows nothing has a loss of 2.3.
    losses = [float(text) for text in re.findall(r"val loss (\S+)", creator.output)]
    assert losses[-1] < losses[0] < 2.4
    assert max(losses) < 2.4
    assert "other-hivemind" not in creator.output
    assert "mallory-later" not in resumed.output
    assert "3 peers averaged" not in resumed.output
    # Nobody has averaged with the deaf machine since.
    _, _, without = creator.output.partition("anna has left")[2].partition("2 peers averaged")
    assert without
    assert not re.search("[34] peers averaged", without)

    # Each time that mallory was left out is an event and a line; the third is a ban, or an audit before.
    run = commands.run("hivemind-0001")
    events = list(jsonl.read_jsonl(run / "events.jsonl"))
    dropped = [event for event in events if event["event"] == "peer_dropped"]
    (ban,) = (event for event in events if event["event"] == "peer_banned")
    assert {event["peer"] for event in dropped} == {ban["peer"]}
    audit = "has sent something else than it has trained"
    assert all(re.match(rf"was .* times longer|points against|{audit}", event["why"]) for event in dropped)
    line = r"^  (mallory was left out of|The audit of mallory in) round \d+: "
    once = [event for event in events if event["event"] == "peer_left_out" and event["peer"] == ban["peer"]]
    assert len(re.findall(line, creator.output, re.MULTILINE)) == len([*dropped, *once])  # an audit that fails once
    assert len(dropped) <= 4
    assert len(dropped) >= 3 or dropped[-1]["why"].startswith(audit)
    assert ban["name"] == "mallory"
    assert ban["round"] in {event["round"] for event in dropped[-2:]}
    assert "To lift it: python -m jobs.swarm unban mallory" in creator.output
    assert "mallory" in (run / "bans.jsonl").read_text(encoding="utf-8")
