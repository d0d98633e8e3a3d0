"""Whose state a newcomer takes over, and what it takes for one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainkit.swarm import invitations
from trainkit.swarm.admission import Admission, Member
from trainkit.swarm.invitations import Key, Pass, Role, UntrustedError

pytestmark = pytest.mark.usefixtures("hivemind_here")

OWNER = Key(b"o" * 32)
RUN = "digits-0001-ab"
STATE = (torch.arange(1000.0), torch.ones(900))
SIZES = [1000, 900]


def named(peer: str) -> bytes:
    """A peer's id, as a record of the DHT has it."""
    return bytes([0x12, 0x20]) + peer.encode().ljust(32, b".")


def order(roles: dict[str, Role | None], said: dict[str, Any]) -> list[bytes]:
    """Who is asked. ``roles``: None for strangers; ``said``: how important each says it is."""
    from hivemind.p2p import PeerID

    from trainkit.swarm.exchange import in_order

    known = {str(PeerID(named(peer))): role for peer, role in roles.items()}

    async def look_up(peer: str) -> Member | None:
        role = known[peer]
        return None if role is None else Member(peer, peer, role, round(time.time()) + 60, peer, b"")

    found = {named(peer): SimpleNamespace(value=value) for peer, value in said.items()}
    own = str(PeerID(named("me")))
    return [bytes(peer.to_bytes()) for peer in asyncio.run(in_order(found, own, look_up))]


def test_the_owner_is_asked_first_whatever_others_say_of_themselves() -> None:
    roles: dict[str, Role | None] = {"rita": "reducer", "owner": "owner", "vera": "volunteer", "eve": None}
    asked = order(roles, {"rita": 1e300, "owner": 1.0, "vera": 1e300, "eve": 1e300, "me": 1.0})
    assert asked == [named("owner"), named("rita")]


def test_who_gives_it_away_no_more_is_not_asked() -> None:
    assert order({"rita": "reducer", "owner": "owner"}, {"rita": 1.0, "owner": None}) == [named("rita")]


@pytest.mark.parametrize("found", [None, 7, {"x": SimpleNamespace(value=1.0)}, {b"x": 7}])
def test_a_record_of_anything_else_names_nobody(found: object) -> None:
    from trainkit.swarm.exchange import in_order

    async def look_up(peer: str) -> Member | None:
        raise AssertionError

    assert asyncio.run(in_order(found, "me", look_up)) == []


def messages(*tensors: Tensor, digest: object, piece: int = 300) -> list[Any]:
    """As hivemind sends a state."""
    from hivemind.proto import averaging_pb2, runtime_pb2
    from hivemind.utils import MSGPackSerializer

    made: list[Any] = []
    for tensor in tensors:
        data = tensor.numpy().tobytes()
        for first in range(0, max(1, len(data)), piece):
            part = runtime_pb2.Tensor(buffer=data[first : first + piece], dtype="" if first else "float32")
            metadata = b"" if made else MSGPackSerializer.dumps({"digest": digest})
            made.append(averaging_pb2.DownloadData(tensor_part=part, metadata=metadata))
    return made


def signed(*tensors: Tensor, role: Role = "owner", run: str = RUN, key: Key = OWNER) -> bytes:
    from trainkit.swarm.exchange import digest_of, sign_digest

    return sign_digest(invitations.grant(key, "digits-0001", "x", role, time.time() + 60), digest_of(run, 7, tensors))


def read(sent: list[Any]) -> tuple[int, list[Tensor], int]:
    """Round and tensors, and how many messages were taken."""
    from trainkit.swarm.exchange import read_state

    taken = 0

    async def stream() -> AsyncIterator[Any]:
        nonlocal taken
        for message in sent:
            taken += 1
            yield message

    try:
        digest, tensors = asyncio.run(read_state(stream(), SIZES, Admission(OWNER.public), RUN))
    except ValueError as error:
        raise ValueError(f"{error} ({taken})") from None
    return digest.round, tensors, taken


@pytest.mark.parametrize("role", ["owner", "reducer"])
def test_a_state_is_what_the_owners_side_has_signed(role: Role) -> None:
    round_index, tensors, _ = read(messages(*STATE, digest=signed(*STATE, role=role)))
    assert round_index == 7
    assert all(torch.equal(*pair) for pair in zip(tensors, STATE, strict=True))


@pytest.mark.parametrize(
    "digest",
    [signed(*STATE, role="volunteer"), signed(*STATE, run="another"), signed(*STATE, key=Key(b"s" * 32)), b"", 7, None],
    ids=["a volunteer's", "another run's", "a stranger's", "empty", "a number", "none"],
)
def test_and_nothing_else_is_one(digest: object) -> None:
    with pytest.raises((UntrustedError, ValueError)):
        read(messages(*STATE, digest=digest))


def test_a_state_that_is_not_the_one_that_was_signed_is_none() -> None:
    other = STATE[0].clone()
    other[500] += 1
    with pytest.raises(ValueError, match="not what was signed"):
        read(messages(other, STATE[1], digest=signed(*STATE)))


def test_one_that_does_not_end_is_not_kept() -> None:
    with pytest.raises(ValueError, match=r"longer than the state of this run \(2[0-9]\)"):
        read(messages(*(torch.ones(1_000_000),), digest=signed(*STATE)))


@pytest.mark.parametrize("tensors", [STATE[:1], (STATE[0], STATE[1][:-1]), (*STATE, torch.zeros(0)), ()])
def test_nor_is_one_of_another_model(tensors: tuple[Tensor, ...]) -> None:
    with pytest.raises(ValueError, match="than the state of this run"):
        read(messages(*tensors, digest=signed(*STATE)))


# Digests


def by(role: Role, owner: Key = OWNER) -> Pass:
    return invitations.grant(owner, "digits-0001", "x", role, time.time() + 60)


@pytest.mark.parametrize("content", [[], [RUN, -1, "x"], [RUN, 1.5, "x"], [RUN, 1, 5], ["a", 1], 5])
def test_a_digest_of_a_wrong_shape_is_refused(content: object) -> None:
    from trainkit.swarm.exchange import read_digest

    said = by("owner").state("state", json.dumps(content).encode())
    with pytest.raises(UntrustedError, match="it is no digest"):
        read_digest(Admission(OWNER.public), said, run_id=RUN)


@pytest.mark.parametrize("own", [by("volunteer"), by("owner", Key(b"s" * 32)), invitations.open_pass("eve", 2e9)])
@pytest.mark.parametrize("open_run", [False, True])
def test_neither_a_volunteer_nor_a_stranger_says_which_state_is_the_runs(own: Pass, open_run: bool) -> None:
    from trainkit.swarm.exchange import digest_of, read_digest, sign_digest

    statement = sign_digest(own, digest_of(RUN, 7, STATE))
    with pytest.raises(UntrustedError):
        read_digest(Admission(OWNER.public, open_run=open_run), statement, run_id=RUN)


def test_weights_and_momentum_cannot_be_shifted_into_each_other() -> None:
    from trainkit.swarm.exchange import digest_of

    theta, momentum = STATE
    assert digest_of(RUN, 7, [theta, momentum]) != digest_of(RUN, 7, [torch.cat([theta, momentum[:1]]), momentum[1:]])
