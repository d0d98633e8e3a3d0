"""What a peer of a group finds out about itself before it sends anything."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainkit.config.loading import load
from trainkit.swarm import invitations
from trainkit.swarm.admission import Admission, Member
from trainkit.swarm.exchange import CLIENT, About, Gathered, Outcome
from trainkit.swarm.invitations import Key, Role, UntrustedError
from trainkit.swarm.robust import Round
from trainkit.swarm.sync_diloco import PROBE_SIZE, Given

pytestmark = pytest.mark.usefixtures("hivemind_here")

WEIGHTS = torch.linspace(-1, 1, PROBE_SIZE)


def strays(own: torch.Tensor, role: str = "volunteer", *, trusted: bool = True) -> bool:
    """With weights ``own``, in a group with somebody who has others and gives its state away."""
    from trainkit.swarm.averager import _Averager

    async def member(peer: str) -> Any:
        return SimpleNamespace(peer_id=peer, role="reducer", trusted=trusted and peer == "reducer")

    def about(weights: torch.Tensor, *, shares: bool) -> Gathered:
        return Gathered(None, CLIENT, About(shares=shares, probe=weights.numpy().tobytes()))

    averager: Any = SimpleNamespace(
        peer_id="me", guard=SimpleNamespace(member=member), own=SimpleNamespace(grant=SimpleNamespace(role=role))
    )
    group: Any = {"me": about(own, shares=False), "reducer": about(WEIGHTS, shares=True)}
    return asyncio.run(_Averager._has_strayed(averager, group))


def test_a_gradient_of_other_weights_than_the_owners_sides_is_not_sent() -> None:
    assert strays(1.01 * WEIGHTS)
    assert not strays(WEIGHTS + 1e-6)


def settled(
    theirs: torch.Tensor, *, same_weights: bool, role: str = "reducer", average: float = 1.0
) -> tuple[Round, list[tuple[bool, ...]]]:
    """A round of a volunteer with `WEIGHTS`, whose group's reducer had others; and which parts it has stepped by."""
    from trainkit.swarm.average import Averaging, _Exchange

    nobody = SimpleNamespace(role="volunteer")
    member = SimpleNamespace(peer_id="reducer", role=role, trusted=True)
    stepped: list[tuple[bool, ...]] = []
    common: Any = SimpleNamespace(
        same_weights=same_weights,
        num_parameters=4,
        probe=lambda: WEIGHTS,
        step=lambda *_, arrived, **__: stepped.append(arrived),
    )
    averager: Any = SimpleNamespace(
        peer_id="me",
        client_mode=True,
        lock_averaged_tensors=threading.Lock(),
        _averaged_tensors=[average * torch.ones(4)],
    )
    dht: Any = SimpleNamespace(member=lambda peer: member, own=SimpleNamespace(grant=nobody))
    link: Any = SimpleNamespace(learn=lambda sent, outcome: "", upload=None)
    averaging = Averaging(averager, dht, common, load("hivemind").config.collaborative, link)
    told = {"reducer": {"shares": True, "probe": theirs.numpy().tobytes()}}
    outcome = Outcome((2,), (2,), (True,), ("reducer",), (), 0, 0, 0, 0.0)
    averaging._exchange = _Exchange(
        control=SimpleNamespace(result=lambda seconds: (told, outcome)),
        given=Given(torch.ones(4), (1.0,), torch.ones(4), sound=True),
        sent=(1.0,), trained=1.0, next_round=3, alone=False, began=time.monotonic(), failed="",
    )  # fmt: skip
    result = averaging.settle(1.0, trained_on=False, leads=False)
    assert result is not None
    return result, stepped


def test_an_average_of_gradients_at_other_weights_is_not_used() -> None:
    result, stepped = settled(1.01 * WEIGHTS, same_weights=True)
    assert (result.used, result.why, result.drifted) == ("nothing", "the others are at another update", True)
    assert stepped == [(False,)]
    assert settled(WEIGHTS, same_weights=True)[0].used == "average"


@pytest.mark.parametrize(("role", "used"), [("reducer", "nothing"), ("owner", "average")])
def test_what_the_owner_has_averaged_is_not_for_others_to_judge(role: str, used: str) -> None:
    assert settled(WEIGHTS, same_weights=False, role=role, average=8.0)[0].used == used


def test_a_pseudo_gradient_is_of_use_to_whoever_has_drifted() -> None:
    result, stepped = settled(1.01 * WEIGHTS, same_weights=False)
    assert (result.used, result.drifted, stepped) == ("average", True, [(True,)])


def test_what_volunteers_say_of_their_weights_makes_nobody_a_stray() -> None:
    assert not strays(1.01 * WEIGHTS, trusted=False)


def test_by_the_owners_weights_all_others_are_measured() -> None:
    assert not strays(1.01 * WEIGHTS, "owner")


# Whose state a newcomer takes over, and what it takes for one.


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

    from trainkit.swarm.averager import in_order

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
    from trainkit.swarm.averager import in_order

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
    from trainkit.swarm.averager import digest_of, sign_digest

    return sign_digest(invitations.grant(key, "digits-0001", "x", role, time.time() + 60), digest_of(run, 7, tensors))


def read(sent: list[Any]) -> tuple[int, list[Tensor], int]:
    """Round and tensors, and how many messages were taken."""
    from trainkit.swarm.averager import read_state

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


# Who is let into a group.


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    from trainkit.swarm import averager as swarm_averager

    clock = Clock()
    monkeypatch.setattr(swarm_averager, "time", clock)
    return clock


@pytest.fixture
def averager() -> Any:
    from trainkit.swarm.averager import GuardedAverager

    made: Any = GuardedAverager.__new__(GuardedAverager)
    made._late, made._fetching, made._fetched, made._parent_pid = {}, set(), {}, -1
    return made


def test_who_takes_a_place_in_three_groups_in_a_row_and_sends_nothing_is_not_waited_for(
    averager: Any, clock: Clock
) -> None:
    for _ in range(3):
        assert not averager.is_benched("eve")
        averager.note_late(["eve", "ann"], ["eve"], ["ann"])
    assert averager.is_benched("eve")
    assert not averager.is_benched("ann")


def test_nor_is_who_begins_and_never_ends_after_twice_as_many(averager: Any, clock: Clock) -> None:
    for _ in range(6):
        assert not averager.is_benched("eve")
        averager.note_late(["eve"], ["eve"], ["eve"])
    assert averager.is_benched("eve")


def test_it_may_come_again_later_and_each_time_it_waits_longer(averager: Any, clock: Clock) -> None:
    waited = []
    for _ in range(8):
        averager.note_late(["eve"], ["eve"], [])
        began = clock.now
        while averager.is_benched("eve"):
            clock.now += 1.0
        waited.append(clock.now - began)
    assert waited == [0, 0, 30, 120, 480, 600, 600, 600]


def test_one_round_in_which_it_is_in_time_and_all_is_forgotten(averager: Any, clock: Clock) -> None:
    for late in (["eve"], ["eve"], [], ["eve"], ["eve"]):
        averager.note_late(["eve"], late, [])
    assert not averager.is_benched("eve")


def test_the_memory_of_who_was_late_is_bounded(averager: Any) -> None:
    peers = [f"Qm{index}" for index in range(5000)]
    averager.note_late(peers, peers, [])
    assert len(averager._late) <= 1000


def test_a_peer_is_given_the_state_once_at_a_time_and_not_without_end(
    averager: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio
    from types import SimpleNamespace

    from hivemind.averaging import DecentralizedAverager

    async def state(self: Any, request: Any, context: Any) -> Any:
        for piece in ("theta", "momentum"):
            clock.now += 3.0
            yield piece

    async def admits(peer: Any) -> bool:
        return True

    async def fetch() -> list[str]:
        answers = averager.rpc_download_state(None, SimpleNamespace(remote_id="eve"))
        return [piece async for piece in answers]

    async def run() -> list[int]:
        first = averager.rpc_download_state(None, SimpleNamespace(remote_id="eve"))
        await anext(first)
        meanwhile = await fetch()
        rest = [piece async for piece in first]
        at_once = await fetch()
        clock.now += 6.0  # as long as that took
        return [len(pieces) for pieces in (meanwhile, rest, at_once, await fetch())]

    monkeypatch.setattr(DecentralizedAverager, "rpc_download_state", state)
    averager._admits = admits
    assert asyncio.run(run()) == [0, 1, 0, 2]


def test_peers_of_one_invitation_share_a_voice_but_for_the_owners_side_and_guests() -> None:
    from trainkit.swarm.admission import Member
    from trainkit.swarm.averager import voices_of

    def member(name: str, role: Any = "volunteer") -> Member:
        return Member("", name, role, 0, f"invitation of {name}", b"")

    members = {"a": member("eve"), "b": member("eve"), "c": member("ann"), "d": member("guest"), "e": member("guest")}
    owners = {"f": member("ranks", "reducer"), "g": member("ranks", "reducer")}
    assert voices_of({**members, **owners}) == {"a": 0.5, "b": 0.5, "c": 1.0}


def test_a_step_that_fails_is_told_by_its_control_and_not_once_more_where_nobody_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import asyncio

    from hivemind.averaging import DecentralizedAverager

    from trainkit.swarm.averager import _Averager

    async def too_long(self: Any, **options: Any) -> None:
        raise asyncio.TimeoutError

    monkeypatch.setattr(DecentralizedAverager, "_step", too_long)
    made: Any = _Averager.__new__(_Averager)
    made._parent_pid = -1
    asyncio.run(made._step(step=None))
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(DecentralizedAverager._step(made, step=None))
