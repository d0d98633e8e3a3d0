from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from trainkit.errors import UserError
from trainkit.run.folder import RunDir
from trainkit.swarm.address import MOST_OTHERS, Home, Memory, home_of, identity_in, keep_identity, known_of

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
HOME = Home("hivemind-0001-0123abcd", 448830083, "0.0.0.0", 4711, None, "anna")


def at(port: int) -> str:
    return f"/ip4/203.0.113.7/tcp/{port}/p2p/{PEER}"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "hivemind-0001", "seed: 0\n")


def test_a_peer_comes_back_to_the_place_that_it_has_left(run: RunDir) -> None:
    home = replace(HOME, announce="/dns/swarm.example.org/tcp/4711", others=(at(1), at(2)))
    home.write(run)
    assert home_of(run) == home


def test_a_run_that_was_no_swarm_has_no_home(run: RunDir) -> None:
    assert home_of(run) is None


@pytest.mark.parametrize("text", ["", "[]", '{"run_id": "a"}', '{"run_id": "a", "first_round": "x"}'])
def test_a_home_that_says_nothing_is_refused_by_its_file(run: RunDir, text: str) -> None:
    (run.path / "swarm.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"swarm\.json does not say where the swarm was"):
        home_of(run)


def test_the_key_is_kept_for_its_user_alone_and_never_replaced(run: RunDir, tmp_path: Path) -> None:
    for key in (b"first", b"second"):
        file = tmp_path / "key"
        file.write_bytes(key)
        keep_identity(run, file)
    assert identity_in(run).read_bytes() == b"first"
    assert identity_in(run).stat().st_mode & 0o777 == 0o600


def test_what_others_call_an_address_is_one_or_is_left_out() -> None:
    assert known_of([at(1), "\x1b[2J", at(2), at(1), 7, f"/ip4/nowhere/tcp/1/p2p/{PEER}"]) == (at(1), at(2))


def test_others_are_remembered_on_the_disk_the_newest_first_and_not_without_end(run: RunDir) -> None:
    memory = Memory([at(1)])
    memory.keep_in(run, HOME)
    memory.note([at(2)])
    memory.note([at(port) for port in range(10, 10 + MOST_OTHERS - 2)])
    others = json.loads((run.path / "swarm.json").read_text(encoding="utf-8"))["others"]
    assert (len(others), others[0], others[-2:]) == (MOST_OTHERS, at(10), [at(2), at(1)])
    memory.note([at(99)])
    assert memory.others == (at(99), *others[:-1])
