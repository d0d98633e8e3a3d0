"""How a group exchanges, and whom the averager lets in: in this process, where calls go through queues."""

import asyncio
import json
import multiprocessing
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.compression import NoCompression
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.asyncio import as_aiter
from torch import Tensor

from tests.benchmarks import swarm_matchmaking
from trainkit.swarm import admission
from trainkit.swarm import averager as module
from trainkit.swarm.accounts import Account, Accounts, Link, Shown
from trainkit.swarm.admission import Admission, Board
from trainkit.swarm.averager import _Averager
from trainkit.swarm.diloco import PART, PROBE_SIZE, Codec, Outcome, encoded_bytes
from trainkit.swarm.exchange import Exchange, Sending, digest_of, in_order, read_digest, read_state, sign_digest
from trainkit.swarm.invitations import Key, Pass, Role, UntrustedError, grant
from trainkit.swarm.messages import CLIENT, NODE
from trainkit.swarm.robust import Limits, Screen

pytestmark = pytest.mark.usefixtures("hivemind_here")

VALUES = 4 * PART - 100
KNOWN = Board()
KNOWN.write(verified={}, differ=[])


@dataclass(frozen=True)
class Member:
    """A peer of the test's group, which is called by a letter."""

    name: str
    vector: Tensor
    weights: Sequence[float] = (1.0, 1.0, 1.0, 1.0)
    codec: Codec = "fp16"
    reduces: float = 0.0
    seconds: Sequence[float] = (0.0, 0.0, 0.0, 0.0)
    """How long each of its parts is on its way."""
    cut: bool = False
    """It sends half of what it says."""
    twice: bool = False
    """It sends everything in two calls at once."""


def meet(
    *members: Member,
    codec: Codec = "fp16",
    delicate: int = VALUES,
    patience: float = 10.0,
    screens: dict[str, Screen] | None = None,
    knows_all: bool = True,
) -> dict[str, tuple[Tensor, Outcome]]:
    """The average and the outcome of each member; the owner is trusted. ``screens`` is given the screen of each.

    Args:
        knows_all: otherwise who does not reduce knows itself, and those who do.
    """

    class Near(Exchange):
        """An exchange whose calls reach the others directly."""

        def _get_peer_stub(self, peer: PeerID) -> Any:
            async def call(messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
                sender, context = senders[self.peer_id], SimpleNamespace(remote_id=self.peer_id)
                said = [message async for message in messages] if sender.twice else []

                async def arriving() -> AsyncIterator[Any]:
                    on_the_way = iter(sender.seconds)
                    async for message in as_aiter(*said) if sender.twice else messages:
                        if sender.cut:
                            message.tensor_part.buffer = message.tensor_part.buffer[::2]
                        await asyncio.sleep(next(on_the_way))
                        yield message

                if sender.twice:
                    again = drained(group[peer].rpc_aggregate_part(as_aiter(*said), context))
                    calls.append(asyncio.ensure_future(again))
                return group[peer].rpc_aggregate_part(arriving(), context)

            return SimpleNamespace(rpc_aggregate_part=call)

    ids = {member.name: PeerID(member.name.encode()) for member in members}
    senders = {ids[member.name]: member for member in members}
    group: dict[PeerID, Exchange] = {}
    calls: list[Any] = []

    async def drained(answers: AsyncIterator[Any]) -> None:
        async for _ in answers:
            pass

    async def run() -> dict[str, tuple[Tensor, Outcome]]:
        for member in members:
            known = [one for one in members if knows_all or member.reduces or one.reduces or one is member]
            group[ids[member.name]] = Near(
                p2p=SimpleNamespace(peer_id=ids[member.name]),
                servicer_type=DecentralizedAverager,
                prefix=None,
                group_id=b"group",
                tensors=[member.vector],
                ordered_peer_ids=[ids[one.name] for one in known],
                peer_fractions=tuple(one.reduces for one in known),
                sender_timeout=patience,
                reducer_timeout=15.0,
                compression=NoCompression(),
                part_size_bytes=4 * PART,
                sending=Sending(member.weights, member.codec, codec, delicate),
                limits=Limits(frozenset({str(ids.get("owner"))}), owners=frozenset({str(ids.get("owner"))})),
            )
            if screens is not None:
                screens[member.name] = group[ids[member.name]].screen

        async def take(one: Exchange) -> tuple[Tensor, Outcome]:
            (average,) = [tensor async for tensor in one]
            return average, one.outcome()

        found = await asyncio.wait_for(asyncio.gather(*map(take, group.values())), 20.0)
        return dict(zip(ids, found, strict=True))

    return asyncio.run(run())


def filled(value: float) -> Tensor:
    return torch.full((VALUES,), value)


OWNER = Member("owner", filled(1.0), reduces=1.0)
SLOW = Member("slow", filled(7.0), seconds=(0.0, 60.0, 60.0, 60.0))


def test_two_reducers_average_is_weighted_and_the_same_bits_for_every_peer() -> None:
    torch.manual_seed(0)
    common = torch.randn(VALUES)
    first, second, third = (common + 0.02 * torch.randn(VALUES) for _ in range(3))
    members = [Member("owner", first, (3.0,) * 4, reduces=0.5), Member("second", second, reduces=0.5)]
    members.append(Member("third", third, codec="8bit"))
    found = meet(*members)
    (first, _), *others = found.values()
    assert all(torch.equal(first, average) for average, _ in others)
    expected = (3 * members[0].vector + members[1].vector + members[2].vector) / 5
    assert float((first - expected).norm() / expected.norm()) < 0.005
    assert all(outcome.received == outcome.expected == (3, 3, 3, 3) for _, outcome in found.values())


def test_a_slow_peer_is_left_out_and_still_gets_every_average() -> None:
    found = meet(OWNER, Member("quick", filled(0.5)), SLOW, patience=1.0)
    average, outcome = found["quick"]
    assert outcome.received == (3, 2, 2, 2)
    assert outcome.expected == (3, 3, 3, 3)
    assert outcome.counted == (True,) * 4
    assert float(average[-1]) == 0.75
    slow, own = found["slow"]
    assert torch.equal(slow, average)
    assert own.counted == (True, False, False, False)
    assert len(found["owner"][1].late) == 1


def test_a_slow_peers_time_is_not_charged_to_a_quick_one() -> None:
    found = meet(OWNER, Member("quick", filled(0.0)), Member("slow", filled(7.0), seconds=(0.0, 0.3, 0.3, 0.3)))
    slow = found["slow"][1]
    assert found["quick"][1].timed_seconds < 0.5 * slow.timed_seconds
    assert slow.timed_bytes == 2 * (VALUES - PART)
    assert 0.8 < slow.timed_seconds < 3.0


def test_a_part_left_out_costs_no_bytes_and_of_nobody_arrives_nowhere() -> None:
    found = meet(replace(OWNER, weights=(0.0, 1.0, 1.0, 1.0)), Member("guest", filled(0.5), (0.0, 1.0, 0.0, 0.0)))
    average, outcome = found["guest"]
    assert outcome.expected == outcome.received == (0, 2, 1, 1)
    assert outcome.counted == (False, True, False, False)
    assert outcome.bytes_up == 2 * PART
    assert (float(average[PART]), float(average[-1])) == (0.75, 1.0)


def test_a_weight_that_is_no_number_counts_as_none() -> None:
    found = meet(OWNER, Member("liar", filled(9.0), (float("nan"), float("inf"), -1.0, 1.0)))
    assert found["owner"][1].received == (1, 1, 1, 2)


def test_running_statistics_are_sent_in_16_bit_when_all_else_is_8() -> None:
    found = meet(OWNER, Member("guest", filled(0.0), codec="8bit"), codec="8bit", delicate=3 * PART)
    last = VALUES - 3 * PART
    assert found["guest"][1].bytes_up == 3 * (PART + 4 * PART // 512) + 2 * last
    found = meet(OWNER, Member("guest", filled(0.0), codec="4bit"), codec="4bit")  # there are none
    assert found["guest"][1].bytes_up == encoded_bytes(3 * PART, "4bit") + encoded_bytes(last, "4bit")


def test_who_calls_twice_counts_once_and_takes_nobodys_place() -> None:
    slower = Member("slower", filled(4.0), seconds=(0.3, 0.0, 0.0, 0.0))
    found = meet(OWNER, Member("liar", filled(7.0), twice=True), slower)
    average, outcome = found["slower"]
    assert outcome.counted == (True,) * 4
    assert torch.allclose(average, filled(3.0))  # of 1, 4 and 7, which is clipped to the median of their lengths


def test_a_part_of_another_size_drops_its_sender_and_nobody_waits() -> None:
    screens: dict[str, Screen] = {}
    found = meet(OWNER, Member("guest", filled(4.0)), Member("liar", filled(7.0), cut=True), screens=screens)
    average, outcome = found["guest"]
    assert outcome.counted == (True,) * 4
    assert torch.allclose(average, filled(1.0))  # the shorter of two, to whose length the longer is clipped
    (verdict,) = [one for one in screens["owner"].verdicts() if one.action == "dropped"]
    assert verdict.why == "sent something of the wrong shape"
    assert found["owner"][1].late == ()


def test_an_anchor_whose_senders_are_all_late_ends() -> None:
    found = meet(Member("idle", filled(0.0), (0.0,) * 4, reduces=1.0), SLOW, patience=1.0)
    assert found["slow"][1].received == (1, 0, 0, 0)


def test_averages_that_are_refused_are_as_if_they_had_not_arrived() -> None:
    own = torch.randn(VALUES)
    found = meet(Member("owner", own, reduces=0.5), Member("anna", torch.randn(VALUES), reduces=0.5))
    average, outcome = found["owner"]
    theirs = [peer != str(outcome.reducers[0]) for peer in outcome.reducers]
    kept = outcome.refusing({outcome.reducers[-1]}, average, own)
    assert theirs == [False, False, True, True]
    assert kept.received == (2, 2, 0, 0)
    assert kept.counted == (True, True, False, False)
    assert torch.equal(average[2 * PART :], own[2 * PART :])
    assert not torch.equal(average[: 2 * PART], own[: 2 * PART])


# What a peer finds out about itself before it sends anything.

WEIGHTS = torch.linspace(-1, 1, PROBE_SIZE)


def test_a_peer_that_has_drifted_says_so_and_gives_what_it_has_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    async def member(peer: str) -> Any:
        known = SimpleNamespace(peer_id=peer, name=peer, role="reducer", invitation="its own", trusted=True)
        return known if peer == "reducer" else None

    def said(mode: int, weights: Tensor) -> bytes:
        about = {"rate": 5.0, "probe": weights.numpy().tobytes() if mode == NODE else b""}
        return bytes(msgpack.packb([None, mode, msgpack.packb(about)]))

    class Runner:
        def __init__(self, *, sending: Sending, **_: Any) -> None:
            weights.append(list(sending.weights))

        def __aiter__(self) -> AsyncIterator[Tensor]:
            return as_aiter()  # type: ignore[no-any-return]

        def outcome(self) -> Outcome:
            return Outcome()

    weights: list[list[float]] = []
    monkeypatch.setattr(module, "Exchange", Runner)
    common = SimpleNamespace(num_parameters=2)
    averager: Any = SimpleNamespace(
        peer_id="me", own=SimpleNamespace(grant=SimpleNamespace(role="volunteer")),
        guard=SimpleNamespace(member=member),
        common=common, plan=torch.tensor([0.0, 8.0, 8.0]), codec="fp16", _p2p=None, prefix="",
        known=KNOWN, _accounts=Accounts(1), _arriving=None,
        get_tensors=lambda: nullcontext(()), _running_groups={b"": SimpleNamespace(set_result=str)},
        _report=lambda runner, draw: None, probe=1.01 * WEIGHTS,
    )  # fmt: skip
    gathered = [said(CLIENT, torch.zeros(0)), said(NODE, WEIGHTS), b"\xc1garbage"]  # which stops nobody
    group: Any = SimpleNamespace(peer_ids=["me", "reducer", "liar"], gathered=gathered, group_id=b"")
    done = asyncio.run(_Averager._aggregate_with_group(averager, group, 0))
    assert (done.rates, done.drifted, weights) == ({"me": 5.0, "reducer": 5.0, "liar": 0.0}, True, [[8.0, 8.0]])


# Who is let into a group.


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def averager() -> Any:
    async def member(peer: str) -> Any:
        return SimpleNamespace(peer_id=peer)

    made: Any = _Averager.__new__(_Averager)
    made._late, made._may_fetch, made._refused, made._parent_pid = {}, {}, {}, -1
    made._reducers, made._told, made._allreduce_timeout = 1, (b"", frozenset()), 4.0
    made.guard = SimpleNamespace(member=member)
    return made


def test_who_is_late_too_often_in_a_row_is_shut_out_for_longer_each_time(averager: Any, clock: Clock) -> None:
    def waited(arrived: list[str], rounds: int) -> list[float]:
        found = []
        for _ in range(rounds):
            averager.note_late(["eve", "ann"], ["eve"], ["ann", *arrived])
            began = clock.now
            while averager.is_benched("eve"):
                clock.now += 1.0
            found.append(clock.now - began)
        averager.note_late(["eve"], [], [])  # one round in time and all is forgotten
        return found

    assert waited([], 8) == [0, 0, 30, 120, 480, 600, 600, 600]  # it sends nothing
    assert waited(["eve"], 8) == [0, 0, 0, 0, 0, 30, 60, 120]  # it never ends
    assert not averager.is_benched("ann")
    peers = [f"Qm{index}" for index in range(5000)]
    averager.note_late(peers, peers, [])
    assert len(averager._late) <= 1000


def test_a_group_has_256_places_for_each_that_reduces_and_one_for_a_reducer(averager: Any) -> None:
    async def trusts(peer: str) -> bool:
        return peer == "rita"

    def is_welcome(peer: str, mode: int) -> bool:
        words = msgpack.packb([None, mode, msgpack.packb({})])
        request = averaging_pb2.JoinRequest(gather=words)
        return bool(asyncio.run(averager._welcomes(request, peer)))

    averager.guard.trusts = trusts
    averager._matchmaking = SimpleNamespace(current_followers=dict.fromkeys(range(255)))
    assert is_welcome("ann", CLIENT)
    averager._matchmaking.current_followers[255] = None
    assert not is_welcome("ann", CLIENT)
    assert is_welcome("rita", NODE)
    averager._reducers = 2  # it has come
    assert is_welcome("ann", CLIENT)


def test_two_that_reduce_lead_one_group_of_twice_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hivemind's own matchmaking; in the first round nobody knows yet how many reduce."""
    monkeypatch.setattr(module, "_LARGEST_GROUP", 20)
    assert swarm_matchmaking.row(40, 2, 1)[2] in ("21", "22")
    assert swarm_matchmaking.row(40, 2, 2)[2:5] == ["40", "0", "0"]


def test_who_only_calls_out_is_told_of_those_who_reduce_and_of_some_others(
    averager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(mode: int) -> bytes:
        return bytes(msgpack.packb([None, mode, msgpack.packb({"probe": bytes(1024)})]))

    peers = [PeerID(f"{number:04}".encode()) for number in range(1000)]
    words = [said(NODE if number in (300, 999) else CLIENT) for number in range(1000)]
    begin = averaging_pb2.MessageFromLeader(
        code=averaging_pb2.BEGIN_ALLREDUCE, group_id=b"group", ordered_peer_ids=[one.to_bytes() for one in peers],
        gathered=words,
    )  # fmt: skip

    async def lead(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
        yield averaging_pb2.MessageFromLeader(code=averaging_pb2.ACCEPTED)
        yield begin

    async def answers(peer: PeerID, mode: int) -> list[Any]:
        request = averaging_pb2.JoinRequest(gather=said(mode), client_mode=mode == CLIENT)
        return [one async for one in averager.rpc_join_group(request, SimpleNamespace(remote_id=peer))]

    async def trusts(peer: str) -> bool:
        return True

    averager.guard.trusts = trusts
    averager._matchmaking = SimpleNamespace(current_followers={})
    monkeypatch.setattr(DecentralizedAverager, "rpc_join_group", lead)
    assert asyncio.run(answers(peers[300], NODE))[1] == begin
    accepted, told = asyncio.run(answers(peers[500], CLIENT))
    assert (accepted.code, told.code, told.group_id) == (averaging_pb2.ACCEPTED, begin.code, b"group")
    known = [*range(16), 300, 500, 999]  # in the leader's order, by which the vector is cut
    assert list(told.ordered_peer_ids) == [peers[number].to_bytes() for number in known]
    assert list(told.gathered) == [words[number] for number in known]


def test_who_knows_only_some_of_the_group_gets_the_same_average() -> None:
    """Of three that call out, each knows itself and those who reduce."""
    torch.manual_seed(0)
    members = [Member("owner", torch.randn(VALUES), reduces=0.3), Member("rita", torch.randn(VALUES), reduces=0.7)]
    members += [Member(name, torch.randn(VALUES)) for name in ("ann", "bob", "cem")]
    everybody, some = meet(*members), meet(*members, knows_all=False)
    for name, (average, outcome) in everybody.items():
        assert torch.equal(some[name][0], average)
        assert max(some[name][1].expected) == 5
        assert some[name][1].counted == outcome.counted == (True,) * 4


def test_the_owner_gets_its_average_as_one_peer_would_have_made_it(
    averager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(message: tuple[str, list[Any], dict[str, Any]]) -> None:
        asyncio.run(getattr(averager, message[0])(*message[1], **message[2]))

    monkeypatch.setattr(module, "MPFuture", Future)
    averager._closed, averager._popen, averager._outer_pipe = False, None, SimpleNamespace(send=send)
    averager._averaged_tensors, eves = [torch.ones(4)], [(1, torch.tensor([5.0, 6.0]))]
    averager._screen = SimpleNamespace(alone=lambda peer: eves if peer == "eve" else [])
    assert averager.alone("ann") is None
    assert averager.alone("eve").tolist() == [1.0, 5.0, 6.0, 1.0]
    averager._screen = None  # of a round that has failed nothing is left
    assert averager.alone("eve") is None


def test_what_a_peer_has_moved_is_added_up_over_the_rounds_that_were_used(averager: Any) -> None:
    """What is old by half, at last."""
    averager.common, averager._moved = SimpleNamespace(num_parameters=4), {}

    async def rounds(*of: tuple[int, list[float]] | None) -> list[Tensor | None]:
        for by in of:
            moved = [] if by is None else [("eve", by[0], torch.tensor(by[1]))]
            averager._screen = SimpleNamespace(moved=lambda moved=moved: moved)
            await averager._note_used()
        return [await there(averager, "taken_back", peer) for peer in ("ann", "eve", "eve")]

    unknown, found, again = asyncio.run(rounds((0, [1.0, 2.0]), None, (1, [5.0, 6.0])))
    assert unknown is again is None
    old = (1 + 0.8**2) / 2
    torch.testing.assert_close(found, torch.tensor([old, 2 * old + 5.0, 6.0, 0.0]))


def test_a_peer_is_given_the_state_once_at_a_time_and_not_without_end(
    averager: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def state(self: Any, request: Any, context: Any) -> Any:
        for piece in ("theta", "momentum"):
            clock.now += 3.0
            yield piece

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
    assert asyncio.run(run()) == [0, 1, 0, 2]


async def there(averager: Any, work: str, *of: Any) -> Any:
    """What the averager's process does when it is asked."""
    return await getattr(type(averager), work).__wrapped__(averager, *of)


LINK = Link(0, 0, "0" * 64, "0" * 64)
ACCOUNT = Account(round=3, links=[LINK, LINK], precision="fp32", micro_batch_size=1, sums="A" * 512)


@pytest.fixture
def owners(averager: Any) -> Any:
    """The owner's averager, which has drawn nobody yet."""
    averager.common, averager.next_chunk_timeout = SimpleNamespace(theta=torch.zeros(9)), 1.0
    averager._shown, averager._tell_shown = multiprocessing.Pipe(duplex=False)
    averager._showing, averager.guard.admission = asyncio.Lock(), SimpleNamespace(admitted=str)
    averager._accounts, averager._arriving = Accounts(1), None
    averager.known = Board()
    averager.known.write(verified={"ann": 64.0, "cyd": 0.0, "dan": 0.0, "eve": 64.0}, differ=["dan"])
    return averager


async def told(averager: Any, peer: str, *, is_slow: bool = False) -> list[Any]:
    """What the owner answers to a peer's account."""
    data = ACCOUNT.model_copy(update={"is_slow": is_slow}).model_dump_json().encode()
    request, context = averaging_pb2.DownloadData(metadata=data), SimpleNamespace(remote_id=peer)
    (answer,) = [answer async for answer in averager.rpc_account(request, context)]
    return json.loads(answer.metadata)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("peer", "pieces", "arrives"),
    [
        ("eve", [b"snap", b"shots"], True),
        ("eve", [b"x" * 8_000_000], False),
        ("ann", [b"snap", b"shots"], False),
    ],
)
def test_only_who_was_asked_shows_its_work(owners: Any, peer: str, pieces: list[bytes], arrives: bool) -> None:
    async def show() -> None:
        stream = as_aiter(*(averaging_pb2.DownloadData(tensor_part=runtime_pb2.Tensor(buffer=one)) for one in pieces))
        async for _ in owners.rpc_show(stream, SimpleNamespace(remote_id=peer)):
            pass

    async def run() -> None:
        await there(owners, "draw", {"eve": True}, 3)
        owners._arriving.set_result({"eve": {PART: "given"}})
        assert await told(owners, "ann") == [[], [], "counts"]
        assert await told(owners, "bob") == [[], [], "tried"]  # of whom nothing is known yet
        assert await told(owners, "cyd") == [[], [], "tried"]
        assert await told(owners, "dan") == [[], [], "differs"]
        assert await told(owners, "eve") == [[0, 1], [1], "counts"]
        assert await told(owners, "eve") == [[], [], "counts"]  # once
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(show(), 1.0)

    asyncio.run(run())
    shown = owners.shown()
    assert (shown is not None and (shown.peer, shown.data, shown.given)) == (
        arrives and ("eve", b"snapshots", {PART: "given"})
    )
    assert [*owners._accounts.heard().owing] == ([] if arrives else ["eve"])


def test_who_leaves_while_it_is_looked_at_spoils_nothing_that_others_show(owners: Any) -> None:
    """A peer that was banned broke the pipe, and with it the creator."""
    owners.common.theta = torch.zeros(100_000)
    sent = {peer: bytes([number]) * 1_000_000 for number, peer in enumerate(("eve", "ann"))}

    async def show(peer: str) -> None:
        owners._accounts.asked[peer] = Shown(peer, ACCOUNT, None, (), {})
        stream = as_aiter(averaging_pb2.DownloadData(tensor_part=runtime_pb2.Tensor(buffer=sent[peer])))
        async for _ in owners.rpc_show(stream, SimpleNamespace(remote_id=peer)):
            pass

    async def run() -> list[Any]:
        leaving = asyncio.ensure_future(show("eve"))
        await asyncio.sleep(0.3)  # more than fits into the pipe: it waits until somebody looks
        leaving.cancel()
        staying = asyncio.ensure_future(show("ann"))
        await asyncio.sleep(0.3)
        try:
            reading = (asyncio.to_thread(owners._shown.recv) for _ in sent)
            found = [await asyncio.wait_for(one, 10.0) for one in reading]
            await staying
        finally:
            owners._tell_shown.close()  # so that no thread waits for the other end
            owners._shown.close()
        return found

    found = asyncio.run(run())
    assert {shown.peer: shown.data for shown in found} == sent


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("drawn_again", [False, True])
def test_who_is_drawn_hears_what_to_show_when_all_that_it_gives_has_arrived(
    owners: Any, drawn_again: bool, is_slow: bool
) -> None:
    """It could show something first, and then give something else; nor is it held to what it gives later."""
    arrived = {4 * PART: "given", 2 * PART: "given", 0: "given"}

    async def run() -> Any:
        await there(owners, "draw", {"eve": False}, 3)
        asking = asyncio.ensure_future(told(owners, "eve", is_slow=is_slow))
        await asyncio.sleep(0.3)
        assert not asking.done()
        if drawn_again:
            await there(owners, "draw", {"ann": False}, 4)
        owners._arriving.set_result({"eve": arrived})
        return await asking

    wanted, parts, standing = asyncio.run(run())
    assert (wanted, standing) == ([], "counts")
    assert set(parts) <= {0, 2, 4}
    assert len(parts) == (0 if drawn_again else 2 if is_slow else 3)
    assert ("eve" in owners._accounts.heard().owing) == bool(parts)  # who need not show anything owes nothing


def test_what_arrives_in_a_round_that_ends_late_is_none_of_the_next(averager: Any) -> None:
    """Else an honest peer would seem to have given what it has not trained, whenever a network fails for a while."""

    def ended(given: str) -> Any:
        screen = SimpleNamespace(given=given, verdicts=tuple, counted=dict)
        return SimpleNamespace(ordered_peer_ids=(), banned_senders=(), received={}, screen=screen, outcome=Outcome)

    averager._arriving, averager._refused, averager._accounts = None, {}, Accounts(1)
    averager._found = []
    averager.guard.admission = SimpleNamespace(admitted=lambda peer: None)

    async def rounds() -> None:
        await there(averager, "draw", {"eve": True}, 3)
        late = averager._arriving
        await there(averager, "draw", {"eve": True}, 4)
        averager._report(ended("in round 3"), late)
        assert not averager._arriving.done()
        averager._report(ended("in round 4"), averager._arriving)
        assert averager._arriving.result() == "in round 4"

    asyncio.run(rounds())


def test_a_reducer_whose_averages_do_not_come_is_out_of_groups_for_a_while(averager: Any, clock: Clock) -> None:
    """With it nobody learns anything in its parts."""
    averager._arriving, averager._accounts = None, Accounts(1)
    averager._found = []
    averager.guard.admission = SimpleNamespace(admitted=lambda peer: None)
    screen = SimpleNamespace(given={}, verdicts=tuple, counted=dict)
    benched = list[bool]()
    for came in (0, 0, 2, 0, 0, 0, 0, 0, 0):
        outcome = Outcome(received=(2, came), expected=(2, 2), counted=(True, True), reducers=("me", "rita"))
        averager._report(
            SimpleNamespace(
                ordered_peer_ids=("me", "rita"), banned_senders=(), received={"me": 1, "rita": 1}, screen=screen,
                outcome=lambda outcome=outcome: outcome,
            ), None,
        )  # fmt: skip
        benched.append(averager.is_benched("rita"))
    assert benched == [*[False] * 8, True]
    assert not averager.is_benched("me")
    clock.now += 40.0
    assert not averager.is_benched("rita")


# Whose state a newcomer takes over, and what it takes for one.

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


def read(*tensors: Tensor, digest: object, piece: int = 300) -> tuple[int, list[Tensor]]:
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
        found, state = asyncio.run(read_state(stream(), [1000, 900], Admission(KEY.public), RUN))
    except ValueError as error:
        raise ValueError(f"{error} ({count - len(made)})") from None
    return found.round, state


def test_a_state_is_what_the_owners_side_has_signed() -> None:
    for digest in (signed(by("owner")), signed(by("reducer"))):
        round_index, tensors = read(*STATE, digest=digest)
        assert round_index == 7
        assert all(torch.equal(*pair) for pair in zip(tensors, STATE, strict=True))


OTHER = torch.cat([STATE[0][:-1], torch.zeros(1)])
OWNERS = signed(by("owner"))


@pytest.mark.parametrize(
    ("tensors", "digest", "why"),
    [
        pytest.param(STATE, signed(by("volunteer")), "a volunteer does not say", id="a volunteer's"),
        pytest.param(STATE, signed(by("owner"), run="b"), "of another run", id="of another run"),
        pytest.param(STATE, signed(by("owner", STRANGER)), "to another run", id="another owner's"),
        pytest.param(STATE, b"", "cut short", id="with half a signature"),
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
