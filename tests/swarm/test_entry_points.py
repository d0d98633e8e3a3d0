"""A peer of two ranks in a swarm: real commands, DDP on the CPU."""

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.runs import wait_until
from tests.swarm.conftest import Command, Commands
from trainkit.cluster.ranks import VARIABLE, ForgedError, RankEnv, Secret
from trainkit.cluster.signals import StopFlag
from trainkit.common import jsonl
from trainkit.common.errors import UserError
from trainkit.config.loading import load
from trainkit.run.folder import RunDir
from trainkit.swarm.network import processes
from trainkit.swarm.peer import entry_points
from trainkit.swarm.peer.entry_points import hidden, ranks_of_peer, run_swarm_rank
from trainkit.swarm.protocol.messages import Manifest

MANIFEST = Manifest("run-1", "run", "seed: 0", 1, "ab" * 32, 10, 1, 8)


def launched(rank: int, size: int) -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "NODE_RANK")
    values = (rank, size, rank, size, 29500, 0)
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in zip(names, values, strict=True)}}


def test_a_peer_is_one_rank_or_those_that_torchrun_has_started() -> None:
    with ranks_of_peer(None, [], {}) as (env, secret):
        assert (env.world_size, bool(secret)) == (1, False)
    with ranks_of_peer(None, [], launched(1, 2) | {"TRAINKIT_SECRET": "x" * 16}) as (env, secret):
        assert (env.rank, env.world_size, secret.text) == (1, 2, "x" * 16)


@pytest.mark.parametrize(("number", "env"), [(0, {}), (-1, {}), (1000, {}), (3, launched(0, 2))])
def test_a_number_of_ranks_that_cannot_be_is_refused(number: int, env: dict[str, str]) -> None:
    with pytest.raises(UserError, match="--nproc"), ranks_of_peer(number, [], env):
        pass


@pytest.mark.usefixtures("hivemind_here")
@pytest.mark.parametrize("theirs", [Secret.generate(), None], ids=["another secret", "in the clear"])
def test_a_rank_takes_no_token_from_who_does_not_know_the_secret(
    theirs: Secret | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = b"trainkit1.token" if theirs is None else hidden(theirs).encrypt(b"trainkit1.token")
    store = SimpleNamespace(get=lambda key: said)
    monkeypatch.setattr("trainkit.distributed.rendezvous.meet", lambda *_, **__: store)
    rank = RankEnv.from_mapping(launched(1, 2))
    with pytest.raises(ForgedError):
        run_swarm_rank(load("hivemind").config, rank, StopFlag(), writer=None, env={VARIABLE: Secret.generate().text})


@pytest.mark.parametrize(
    ("least", "flags", "words"),
    [
        (0.0, ["--no-train"], ["-m", "trainkit", "swarm", "create", "--resume", "RUN", "--no-train"]),
        (60.0, [], []),  # it would die again, and again
        (0.0, None, []),
    ],
    ids=["a creator", "that has just started", "a volunteer"],
)
def test_who_comes_back_after_the_death_of_a_helper(
    least: float, flags: list[str] | None, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become: list[str] = []
    monkeypatch.setattr(entry_points, "_WORTH_ANOTHER_SECONDS", least)
    monkeypatch.setattr(os, "execv", lambda path, given: become.extend(given[1:]))
    run = RunDir.create(tmp_path / "hivemind-0001", "seed: 0\n")

    def lose_the_averager() -> None:
        with entry_points.terminal_peer(lambda config, name: run, flags) as hooks:
            assert hooks.open_run is not None
            hooks.open_run(load("hivemind").config, "")
            raise processes.HelperDiedError("averager")

    with nullcontext() if words else pytest.raises(processes.HelperDiedError):
        lose_the_averager()
    assert become == [str(run.path) if word == "RUN" else word for word in words]
    assert [*jsonl.read_jsonl(run.path / "events.jsonl")][-1]["state"] == "FAILED"


def second_rank(command: Command) -> psutil.Process:
    def found() -> list[psutil.Process]:
        children = psutil.Process(command.process.pid).children()
        return [child for child in children if child.environ().get("RANK") == "1" and "join" in child.cmdline()]

    return wait_until(found, 30, "rank 1")[0]


@pytest.mark.long
@pytest.mark.swarm
def test_two_ranks_are_one_peer_that_leaves_and_fails_as_one(commands: Commands) -> None:
    creator, address = commands.create("collaborative.round_seconds=6", "collaborative.rounds=500")
    first = commands.join(address, "--name", "pair", "--nproc", "2")
    second = commands.join(address, "--name", "broken", "--nproc", "2")
    creator.says("3 peers averaged", 150)  # and not five
    assert sorted(row["name"] for row in commands.status(address)["peers"]) == ["broken", "creator", "pair"]

    second_rank(second).kill()
    assert second.ends(60) == 1
    assert "A rank of this peer has died." in second.output
    creator.says("broken has left", 60)

    other = second_rank(first)
    first.process.send_signal(signal.SIGINT)
    assert first.ends(60) == 0
    assert not other.is_running()
    creator.process.send_signal(signal.SIGINT)
    assert creator.ends() == 0
