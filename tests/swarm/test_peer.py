"""A peer of two ranks in a swarm: real commands, DDP on the CPU."""

import errno
import hashlib
import io
import os
import signal
import sys
import zipfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO, NamedTuple

import psutil
import pytest

from tests.runs import wait_until
from tests.swarm.conftest import Command, Commands
from trainkit import fileio
from trainkit.config.loading import load
from trainkit.errors import RefusedError, UserError
from trainkit.ranks import ForgedError, RankEnv, Secret
from trainkit.ranks.signals import StopFlag
from trainkit.run import snapshot
from trainkit.run.folder import RunDir
from trainkit.swarm import peer, processes
from trainkit.swarm.address import EXAMPLE
from trainkit.swarm.admission import own_pass, with_token
from trainkit.swarm.invitations import Key, write_token
from trainkit.swarm.messages import Manifest
from trainkit.swarm.peer import hidden, ranks_of_peer, run_swarm_rank

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


class Given(NamedTuple):
    """What a creator gives, and what comes of it for who joins with ``--code``."""

    archive: bytes
    started: list[list[str]]

    def join(self, *, allow_code: bool) -> None:
        entry = with_token(write_token(own_pass(Key.generate(), "anna"), [EXAMPLE]))
        peer.join_with_code(entry, ["--nproc", "2"], {"PYTHONPATH": "here"}, allow_code=allow_code)


@pytest.fixture
def given(
    request: pytest.FixtureRequest, hivemind_here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Given:
    """An archive of this trainkit with another file; or what the test has instead."""
    from trainkit.swarm import access, dht

    archive = getattr(request, "param", None) or snapshot.packed(
        {**snapshot._content(dict(snapshot._packages())), "trainkit/errors.py": b"# theirs\n", "mine.py": b"1\n2\n"}
    )
    manifest = replace(MANIFEST, code=hashlib.sha256(archive).hexdigest())
    node, started = SimpleNamespace(in_dht=lambda *_: archive), list[list[str]]()

    def start(program: str, words: list[str], env: dict[str, str]) -> None:
        started.append([program, *words, env["PYTHONPATH"], env["TRAINKIT_TOKEN"][:10]])

    monkeypatch.setattr(access, "identity", lambda *_: nullcontext())
    monkeypatch.setattr(dht, "open_dht", lambda *_, **__: nullcontext(node))
    monkeypatch.setattr(dht, "read_manifest", lambda *_, **__: ("Qm", manifest))
    monkeypatch.setattr(os, "execve", start)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return Given(archive, started)


def kept_in(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "state").rglob("*") if path.is_file() and path.suffix == ".py"]


def test_the_owners_code_is_shown_and_run_from_its_own_folder_once_allowed(
    given: Given, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = hashlib.sha256(given.archive).hexdigest()
    with pytest.raises(RefusedError, match="Nothing of it was run"):
        given.join(allow_code=False)
    told, kept = capsys.readouterr().out, tmp_path / "state" / "trainkit" / "code" / digest[:16]
    number = len(snapshot.unpacked(given.archive) or ())
    assert told.startswith(f"Code of run, signed by its owner (key {MANIFEST.owner[:16]}): {number} files, 2.")
    assert f"SHA-256 {digest}." in told
    lines = len((snapshot.INSTALLED / "trainkit/errors.py").read_bytes().splitlines())
    assert told.endswith(f"here:\n  +2 -0 mine.py\n  +1 -{lines} trainkit/errors.py\n")
    assert given.started == []
    given.join(allow_code=True)
    (started,) = given.started
    assert started[:1] == [sys.executable]
    assert started[-4:] == ["--nproc", "2", f"{kept}:here", "trainkit1."]
    assert (kept / "mine.py").read_bytes() == b"1\n2\n"


@pytest.mark.parametrize(("answer", "runs"), [("yes\n", True), ("y\n", False), ("", False)])
def test_who_sits_at_the_terminal_is_asked(
    given: Given, answer: str, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True, readline=lambda: answer))
    with nullcontext() if runs else pytest.raises(RefusedError):
        given.join(allow_code=False)
    assert bool(given.started) == runs


OUT = io.BytesIO()
with zipfile.ZipFile(OUT, "w", zipfile.ZIP_DEFLATED) as archive:
    archive.writestr("../../out.py", "x = 1")


@pytest.mark.parametrize("given", [OUT.getvalue(), OUT.getvalue()[:80]], indirect=True, ids=["leads out", "cut"])
def test_what_is_no_archive_of_code_leaves_nothing_on_the_disk(given: Given, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="What was sent is no code"):
        given.join(allow_code=True)
    assert (given.started, kept_in(tmp_path), [*tmp_path.rglob("out.py")]) == ([], [], [])


def test_code_that_was_changed_since_is_not_run(given: Given, tmp_path: Path) -> None:
    given.join(allow_code=True)
    (changed,) = (path for path in kept_in(tmp_path) if path.name == "mine.py")
    changed.unlink()
    changed.write_text("evil = 1\n")
    with pytest.raises(UserError, match="cannot be kept") as told:
        given.join(allow_code=True)
    assert told.value.why == "Somebody has changed what is there."
    assert len(given.started) == 1


def test_a_full_disk_is_told_in_words_and_leaves_no_half(
    given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = iter(range(50))

    def create(*where: Path) -> BinaryIO:
        if next(turns, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return fileio.create(*where)

    monkeypatch.setattr(snapshot, "create", create)
    with pytest.raises(UserError, match="cannot be kept") as told:
        given.join(allow_code=True)
    assert told.value.why == "No space left on device."
    assert (given.started, kept_in(tmp_path)) == ([], [])


@pytest.mark.usefixtures("hivemind_here")
@pytest.mark.parametrize("theirs", [Secret.generate(), None], ids=["another secret", "in the clear"])
def test_a_rank_takes_no_token_from_who_does_not_know_the_secret(
    theirs: Secret | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = b"trainkit1.token" if theirs is None else hidden(theirs).encrypt(b"trainkit1.token")
    store = SimpleNamespace(get=lambda key: said)
    monkeypatch.setattr("trainkit.distributed.meeting.meet", lambda *_, **__: store)
    env, secret = RankEnv.from_mapping(launched(1, 2)), Secret.generate()
    with pytest.raises(ForgedError):
        run_swarm_rank(load("hivemind").config, env, StopFlag(), writer=None, secret=secret)


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
    monkeypatch.setattr(peer, "_WORTH_ANOTHER_SECONDS", least)
    monkeypatch.setattr(os, "execv", lambda path, given: become.extend(given[1:]))
    run = RunDir.create(tmp_path / "hivemind-0001", "seed: 0\n")

    def lose_the_averager() -> None:
        with peer.terminal_peer(lambda config, name: run, flags) as hooks:
            assert hooks.open_run is not None
            hooks.open_run(load("hivemind").config, "")
            raise processes.HelperDiedError("averager")

    with nullcontext() if words else pytest.raises(processes.HelperDiedError):
        lose_the_averager()
    assert become == [str(run.path) if word == "RUN" else word for word in words]
    assert [*fileio.read_jsonl(run.path / "events.jsonl")][-1]["state"] == "FAILED"


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
