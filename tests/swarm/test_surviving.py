"""What a swarm loses when its creator dies, or one of its helpers: a round at most, and nothing without a word."""

import math
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.runs import wait_until
from tests.shell import python
from tests.swarm.conftest import Command, started_in
from trainkit.common import jsonl
from trainkit.config.loading import load
from trainkit.swarm.identity.invitations import Key, Pass, UntrustedError, grant
from trainkit.swarm.network import processes

pytestmark = pytest.mark.usefixtures("hivemind_here")

KEY = Key(b"o" * 32)
SETTINGS = ("collaborative.round_seconds=6", "collaborative.rounds=120")


@contextmanager
def averaging(own: Pass, peers: list[str], round_index: int, weight: float) -> Iterator[Any]:
    """A peer that averages two weights, which are the same number."""
    from trainkit.swarm.network.dht import open_dht
    from trainkit.swarm.network.signed_records import identity
    from trainkit.swarm.peer.averaging import Averaging, open_averager
    from trainkit.swarm.peer.link import Link
    from trainkit.swarm.protocol.outer_step import OuterState

    common, config = OuterState(nn.Linear(1, 1), lr=1.0, momentum=0.5), load("hivemind").config
    common.load(torch.full((2,), weight), torch.full((2,), weight), round_index)
    with ExitStack() as held:
        me = held.enter_context(identity(None, own))
        dht = held.enter_context(open_dht(me, host=None if peers else "127.0.0.1", peers=peers))
        averager = held.enter_context(open_averager(dht, common, config, "run"))
        yield Averaging(averager, dht, common, config.collaborative, Link(2, config.collaborative))


def grant_to(name: str, role: Any) -> Pass:
    return grant(KEY, "digits-0001", name, role, time.time() + 3600)


def give_back_and_die() -> None:
    """A volunteer gives back what the owner has signed, and nothing else; then the creator loses its daemon."""
    from trainkit.swarm.network.states import digest_of, read_digest, sign_digest

    owner, anna = grant_to("owner", "owner"), grant_to("anna", "volunteer")
    with averaging(owner, [], 3, 0.3) as creator, averaging(anna, creator._dht.addresses(), 7, 0.7) as volunteer:
        state, mine = volunteer._common, creator._common

        def given(newer_than: float, *statements: bytes, raw: bool = False) -> tuple[int | None, float]:
            creator.take_back(newer_than)
            to = creator._dht.peer_id
            give, known = volunteer.averager.give_back if raw else volunteer.give_back, dict[Any, bytes]()
            for statement in statements:
                with suppress(UntrustedError):
                    known[read_digest(volunteer._dht.admission, statement, run_id="run").sha256] = statement
            thread = threading.Thread(target=give, args=(to, statements[0] if raw else known))
            thread.start()
            found, until = None, time.monotonic() + 10.0
            while found is None and (thread.is_alive() and time.monotonic() < until):
                found = creator.take_back(newer_than)
                time.sleep(0.05)
            thread.join(60.0)
            return found or creator.take_back(newer_than), round(float(mine.theta[0]), 2)

        def says(own: Pass, round_index: int, weight: float) -> bytes:
            tensors = [torch.full((2,), weight)] * 2
            return sign_digest(own, digest_of("run", round_index, tensors))

        true = says(owner, 7, 0.7)
        print("others'", given(3, says(owner, 7, 0.8), says(anna, 7, 0.7), says(owner, 7, 0.9)))
        print("forged", given(3, says(anna, 7, 0.7), raw=True))
        print("another", given(3, says(owner, 7, 0.8), raw=True))
        print("not wanted", given(math.inf, true, raw=True))
        print("too old", given(7, true, raw=True))
        state.round = 12  # it has found nobody in five more
        print("given", given(3, says(owner, 6, 0.6), true), mine.round, round(float(mine.momentum[1]), 2))
        state.load(torch.full((2,), 0.9), torch.full((2,), 0.9), 9)
        print("moved on", given(7, true))
        creator.require_helpers()
        (daemon,) = [one for one in processes.family(creator._dht.node.pid) if one.name() == "p2pd"]
        daemon.kill()
        began = time.monotonic()
        try:
            while time.monotonic() < began + 10.0:
                creator.require_helpers()
                time.sleep(0.1)
        except processes.HelperDiedError as error:
            print(error.what)


@pytest.mark.swarm
def test_a_creator_takes_back_what_its_side_has_signed_and_misses_its_daemon() -> None:
    # In a process of its own, as its helpers are forks of it.
    done = python("-c", "from tests.swarm.test_surviving import give_back_and_die as act; act()")
    assert done.stdout.splitlines() == [
        "others' (None, 0.3)",
        "forged (None, 0.3)",
        "another (None, 0.3)",
        "not wanted (None, 0.3)",
        "too old (None, 0.3)",
        "given (7, 0.7) 3 0.7",
        "moved on (None, 0.7)",
        "A helper process of this peer died: its node of the DHT.",
    ], done.stderr


def last_average(creator: Command) -> int:
    return int(re.findall(r"^round (\d+)/.* 2 peers averaged", creator.output, re.MULTILINE)[-1])


@pytest.mark.long
@pytest.mark.swarm
def test_a_creator_with_an_old_folder_or_without_its_daemon_loses_one_round(tmp_path: Path) -> None:
    """It is killed, resumed from a copy of an older folder, and loses libp2p's daemon."""
    with started_in(tmp_path) as commands:
        creator, token = commands.create("--allow-code", *SETTINGS)
        anna = commands.join(token, "--name", "anna")
        creator.says("2 peers averaged", 150)
        run = commands.run("hivemind-0001")
        old = shutil.copytree(run, tmp_path / "copied" / "hivemind-0001", symlinks=True)
        enough = last_average(creator) + 4
        wait_until(lambda: last_average(creator) >= enough, 120, "four averages more")
        time.sleep(2.5)  # until anna has heard what the creator has signed
        creator.kill()
        before = last_average(creator)
        saved = [event["round"] for event in jsonl.read_jsonl(run / "events.jsonl") if event["event"] == "saved"]
        assert saved[-1] >= before - 1  # and so its own folder has lost one at most
        began = time.monotonic()
        again = commands.start("swarm", "create", "--resume", str(old), "--allow-code", "--force")
        restored = int(again.says(r"^Continues after round (\d+):", 150)[1])
        given = int(again.says(r"another peer has returned the weights of round (\d+)", 150)[1])
        again.says("2 peers averaged", 120)
        assert restored < before - 1
        assert before - 1 <= given <= before
        assert [event["round"] for event in jsonl.read_jsonl(old / "events.jsonl") if event["event"] == "given_back"]

        time.sleep(max(0.0, began + 35.0 - time.monotonic()))  # what dies at once would do so again
        again.note_family()
        (daemon,) = [one for one in again.alive() if one.name() == "p2pd"]
        daemon.kill()
        again.says("died: its node of the DHT. This peer restarts by itself", 10)
        told = len(again.output)
        again.says(rf"(?s)\A.{{{told}}}.*Continues after round {last_average(again)}:.* 2 peers averaged", 150)
        again.process.send_signal(signal.SIGINT)
        assert [again.ends(), anna.ends()] == [0, 0]
