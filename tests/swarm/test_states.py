"""States that a newcomer takes over: whose, and what it takes for one."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils import MSGPackSerializer
from torch import Tensor

from trainkit.swarm.identity import admission
from trainkit.swarm.identity.admission import Admission
from trainkit.swarm.identity.invitations import Key, Pass, Role, UntrustedError, grant
from trainkit.swarm.network.states import digest_of, in_order, read_digest, read_state, sign_digest

pytestmark = pytest.mark.usefixtures("hivemind_here")

KEY, STRANGER = Key(b"o" * 32), Key(b"s" * 32)
RUN = "digits-0001-ab"
STATE = (torch.arange(1000.0), torch.ones(900))
ROLES: dict[str, Role] = {"rita": "reducer", "owner": "owner", "vera": "volunteer"}


def named(peer: str) -> bytes:
    """A peer's id, as a record of the DHT has it."""
    return bytes([0x12, 0x20]) + peer.encode().ljust(32, b".")


def asked(found: dict[bytes, Any]) -> list[bytes]:
    """Who is asked for the state, where the DHT has found that; eve is a stranger."""
    known = {str(PeerID(named(peer))): ROLES.get(peer) for peer in ("rita", "owner", "vera", "eve")}

    async def look_up(peer: str) -> admission.Member | None:
        role = known[peer]
        return None if role is None else admission.Member(peer, peer, role, round(time.time()) + 60, peer, b"")

    return [bytes(peer.to_bytes()) for peer in asyncio.run(in_order(found, str(PeerID(named("me"))), look_up))]


@pytest.mark.parametrize(
    ("said", "order"),
    [
        ({"rita": 1e300, "owner": 1.0, "vera": 1e300, "eve": 1e300, "me": 1.0}, ["owner", "rita"]),
        ({"rita": 1.0, "owner": None}, ["rita"]),  # who gives it away no more is not asked
    ],
)
def test_the_owner_is_asked_first_whatever_others_say(said: dict[str, float | None], order: list[str]) -> None:
    assert asked({named(peer): SimpleNamespace(value=value) for peer, value in said.items()}) == [*map(named, order)]


def by(role: Role, owner: Key = KEY) -> Pass:
    return grant(owner, "digits-0001", "x", role, time.time() + 86400)


def signed(own: Pass, *, run: str = RUN) -> bytes:
    return sign_digest(own, digest_of(run, 7, STATE))


def read(
    *tensors: Tensor, digest: object, piece: int = 300, note: Callable[[float], object] = float
) -> tuple[int, list[Tensor]]:
    """Round and tensors of a state as hivemind sends it; a ValueError says how many messages were taken."""
    made: list[Any] = []
    for tensor in tensors:
        data = tensor.numpy().tobytes()
        for first in range(0, max(1, len(data)), piece):
            part = runtime_pb2.Tensor(buffer=data[first : first + piece], dtype="" if first else "float32")
            metadata = b"" if made else MSGPackSerializer.dumps({"digest": digest})
            made.append(averaging_pb2.DownloadData(tensor_part=part, metadata=metadata))
    count = len(made)

    async def stream() -> AsyncIterator[Any]:
        while made:
            yield made.pop(0)

    try:
        found, state = asyncio.run(read_state(stream(), [1000, 900], Admission(KEY.public), RUN, note=note))
    except ValueError as error:
        raise ValueError(f"{error} ({count - len(made)})") from None
    return found.round, state


def test_a_state_is_what_the_owners_side_has_signed() -> None:
    for digest in (signed(by("owner")), signed(by("reducer"))):
        round_index, tensors = read(*STATE, digest=digest)
        assert round_index == 7
        assert all(torch.equal(*pair) for pair in zip(tensors, STATE, strict=True))
        assert all(tensor.is_shared() for tensor in tensors), "copied on its way into the peer's own process"


def test_how_much_of_a_state_has_arrived_is_known() -> None:
    shares: list[float] = []
    read(*STATE, digest=signed(by("owner")), piece=4000, note=shares.append)
    assert shares == pytest.approx([1000 / 1900, 1.0])


OTHER = torch.cat([STATE[0][:-1], torch.zeros(1)])
OWNERS = signed(by("owner"))


@pytest.mark.parametrize(
    ("tensors", "digest", "why"),
    [
        pytest.param(STATE, signed(by("volunteer")), "a volunteer does not say", id="a volunteer's"),
        pytest.param(STATE, signed(by("owner"), run="b"), "of another run", id="of another run"),
        pytest.param(STATE, signed(by("owner", STRANGER)), "to another run", id="another owner's"),
        pytest.param(STATE, b"", "it is truncated", id="with half a signature"),
        pytest.param(STATE, None, "nobody has signed it", id="nobody's"),
        pytest.param((OTHER, STATE[1]), OWNERS, "not what was signed", id="with another number in it"),
        pytest.param((torch.ones(1_000_000),), OWNERS, r"longer than the state of this run \(2[0-9]\)", id="endless"),
        pytest.param((STATE[0], STATE[1][:-1]), OWNERS, "than the state of this run", id="too short"),
        pytest.param((*STATE, torch.zeros(1)), OWNERS, "than the state of this run", id="with a tensor more"),
        pytest.param((), OWNERS, "than the state of this run", id="empty"),
    ],
)
def test_and_nothing_else_is_one(tensors: tuple[Tensor, ...], digest: object, why: str) -> None:
    with pytest.raises((UntrustedError, ValueError), match=why):
        read(*tensors, digest=digest)


def test_a_list_of_a_wrong_shape_and_a_strangers_word_are_no_digest() -> None:
    known = Admission(KEY.public)
    for content in ([], [RUN, -1, "x"], [RUN, 1.5, "x"], [RUN, 1, 5], ["a", 1], 5):
        with pytest.raises(UntrustedError, match="it is no statement of that kind"):
            read_digest(known, by("owner").state("state", json.dumps(content).encode()), run_id=RUN)
    for own in (by("volunteer"), grant(Key(b"s" * 32), RUN, "eve", "owner", 2e9)):
        with pytest.raises(UntrustedError):
            read_digest(known, signed(own), run_id=RUN)


def test_weights_and_momentum_cannot_be_shifted_into_each_other() -> None:
    theta, momentum = STATE
    assert digest_of(RUN, 7, [theta, momentum]) != digest_of(RUN, 7, [torch.cat([theta, momentum[:1]]), momentum[1:]])
