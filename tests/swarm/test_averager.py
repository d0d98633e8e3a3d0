"""The averager: whom it lets into a group, what it gives away, and what it hears and is shown for audits."""

import asyncio
import json
import multiprocessing
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils.asyncio import as_aiter
from torch import Tensor, nn

from tests.benchmarks import swarm_matchmaking
from trainkit.swarm.identity.admission import Board
from trainkit.swarm.network.averager import Averager
from trainkit.swarm.network.exchange import Sending
from trainkit.swarm.network.groups import Groups
from trainkit.swarm.network.states import OwnState
from trainkit.swarm.protocol.codecs import PART
from trainkit.swarm.protocol.messages import CLIENT, NODE
from trainkit.swarm.protocol.outer_step import PROBE_SIZE, ExchangeOutcome, OuterState
from trainkit.swarm.trust.accounts import Account, Commitment, Shown
from trainkit.swarm.trust.auditor import Accounts
from trainkit.swarm.trust.screening import Moves

pytestmark = pytest.mark.usefixtures("hivemind_here")

KNOWN = Board()
KNOWN.write(verified={}, differ=[], passed=[])

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

        def outcome(self) -> ExchangeOutcome:
            return ExchangeOutcome()

    weights: list[list[float]] = []
    monkeypatch.setattr("trainkit.swarm.network.averager.Exchange", Runner)
    common = SimpleNamespace(num_parameters=2, theta=torch.zeros(2))
    averager: Any = SimpleNamespace(
        peer_id="me", own=SimpleNamespace(grant=SimpleNamespace(role="volunteer")),
        guard=SimpleNamespace(member=member), groups=SimpleNamespace(reducers=1),
        common=common, plan=torch.tensor([0.0, 8.0, 8.0]), codec="fp16", _p2p=None, prefix="",
        known=KNOWN, _accounts=Accounts(1), _arriving=None,
        get_tensors=lambda: nullcontext(()), _running_groups={b"": SimpleNamespace(set_result=str)},
        _report=lambda runner, draw: None, probe=1.01 * WEIGHTS,
    )  # fmt: skip
    gathered = [said(CLIENT, torch.zeros(0)), said(NODE, WEIGHTS), b"\xc1garbage"]  # which stops nobody
    group: Any = SimpleNamespace(peer_ids=["me", "reducer", "liar"], gathered=gathered, group_id=b"")
    done = asyncio.run(Averager._aggregate_with_group(averager, group, 0))
    assert (done.rates, done.drifted, weights) == ({"me": 5.0, "reducer": 5.0, "liar": 0.0}, True, [[8.0, 8.0]])


# Who is let into a group.


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("trainkit.swarm.network.averager.time", clock)
    monkeypatch.setattr("trainkit.swarm.network.groups.time", clock)
    return clock


@pytest.fixture
def averager() -> Any:
    async def member(peer: str) -> Any:
        return SimpleNamespace(peer_id=peer)

    made: Any = Averager.__new__(Averager)
    made._may_fetch, made._parent_pid, made._allreduce_timeout = {}, -1, 4.0
    made.guard = SimpleNamespace(member=member)
    made.groups = Groups(made.guard)
    return made


def test_who_is_late_too_often_in_a_row_is_shut_out_for_longer_each_time(averager: Any, clock: Clock) -> None:
    def waited(arrived: list[str], rounds: int) -> list[float]:
        found = []
        for _ in range(rounds):
            averager.groups.lateness.note(["eve", "ann"], ["eve"], ["ann", *arrived])
            began = clock.now
            while averager.groups.lateness.is_benched("eve"):
                clock.now += 1.0
            found.append(clock.now - began)
        averager.groups.lateness.note(["eve"], [], [])  # one round in time and all is forgotten
        return found

    assert waited([], 8) == [0, 0, 30, 120, 480, 600, 600, 600]  # it sends nothing
    assert waited(["eve"], 8) == [0, 0, 0, 0, 0, 30, 60, 120]  # it never ends
    assert not averager.groups.lateness.is_benched("ann")
    peers = [f"Qm{index}" for index in range(5000)]
    averager.groups.lateness.note(peers, peers, [])
    assert len(averager.groups.lateness._late) <= 1000


def test_a_group_has_256_places_for_each_that_reduces_and_one_for_a_reducer(averager: Any) -> None:
    async def trusts(peer: str) -> bool:
        return peer == "rita"

    def is_welcome(peer: str, mode: int) -> bool:
        words = msgpack.packb([None, mode, msgpack.packb({})])
        request = averaging_pb2.JoinRequest(gather=words)
        return bool(asyncio.run(averager.groups.welcomes(request, peer, followers)))

    averager.guard.trusts = trusts
    followers = dict.fromkeys(range(255))
    assert is_welcome("ann", CLIENT)
    followers[255] = None
    assert not is_welcome("ann", CLIENT)
    assert is_welcome("rita", NODE)
    averager.groups.reducers = 2  # it has come
    assert is_welcome("ann", CLIENT)


def test_two_that_reduce_lead_one_group_of_twice_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hivemind's own matchmaking; in the first round nobody knows yet how many reduce."""
    monkeypatch.setattr("trainkit.swarm.network.groups._LARGEST_GROUP", 20)
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
    averager._search = SimpleNamespace(current_followers={})
    monkeypatch.setattr(DecentralizedAverager, "rpc_join_group", lead)
    assert asyncio.run(answers(peers[300], NODE))[1] == begin
    accepted, told = asyncio.run(answers(peers[500], CLIENT))
    assert (accepted.code, told.code, told.group_id) == (averaging_pb2.ACCEPTED, begin.code, b"group")
    known = [*range(16), 300, 500, 999]  # in the leader's order, by which the vector is cut
    assert list(told.ordered_peer_ids) == [peers[number].to_bytes() for number in known]
    assert list(told.gathered) == [words[number] for number in known]


def test_the_owner_gets_its_average_as_one_peer_would_have_made_it(
    averager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(message: tuple[str, list[Any], dict[str, Any]]) -> None:
        asyncio.run(getattr(averager, message[0])(*message[1], **message[2]))

    monkeypatch.setattr("hivemind.utils.mpfuture.MPFuture", Future)
    averager._closed, averager._popen, averager._outer_pipe = False, None, SimpleNamespace(send=send)
    averager._averaged_tensors, eves = [torch.ones(4)], [(1, torch.tensor([5.0, 6.0]))]
    averager._screen = SimpleNamespace(alone=lambda peer: eves if peer == "eve" else [])
    assert averager.alone("ann") is None
    assert averager.alone("eve").tolist() == [1.0, 5.0, 6.0, 1.0]
    averager._screen = None  # of a round that has failed nothing is left
    assert averager.alone("eve") is None


def test_what_a_peer_has_moved_is_added_up_over_the_rounds_that_were_used(averager: Any) -> None:
    """What is old by half, at last."""
    averager._moves = Moves(4)

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
    async def state() -> AsyncIterator[str]:
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

    monkeypatch.setattr(type(averager), "_own_state", lambda self: state())
    monkeypatch.setattr(type(averager), "allow_state_sharing", True)
    assert asyncio.run(run()) == [0, 1, 0, 2]


def test_a_peer_that_calls_twice_at_once_is_given_one_state(averager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def state() -> AsyncIterator[str]:
        await asyncio.sleep(0.0)
        yield "theta"

    async def member(peer: str) -> Any:
        await asyncio.sleep(0.0)  # it is looked up in the DHT
        return SimpleNamespace(peer_id=peer)

    async def fetch() -> list[str]:
        return [piece async for piece in averager.rpc_download_state(None, SimpleNamespace(remote_id="eve"))]

    async def run() -> list[list[str]]:
        return list(await asyncio.gather(fetch(), fetch()))

    averager.guard.member = member
    monkeypatch.setattr(type(averager), "_own_state", lambda self: state())
    monkeypatch.setattr(type(averager), "allow_state_sharing", True)
    assert asyncio.run(run()) == [["theta"], []]


def test_all_who_fetch_a_state_are_given_the_same_copy(averager: Any) -> None:
    """One for each would be eight bytes a weight each time, in the memory of the creator."""
    model = nn.Linear(4, 3)
    common = OuterState(model, lr=1.0, momentum=0.0)
    own: Any = SimpleNamespace(state=lambda purpose, content: content)
    averager.own_state = OwnState(common, own, "run")
    first, tensors, _ = averager.get_current_state()
    theta = tensors[0]
    assert averager.get_current_state()[1][0] is theta
    assert theta.is_shared()
    assert torch.equal(theta, common.theta)
    common.load(common.theta + 1.0, common.momentum, 1)
    assert averager.own_state.signed() != first["digest"]
    assert tensors == [], "hivemind's thread holds on to that list after the state has changed"
    assert torch.equal(averager.get_current_state()[1][0], common.theta)
    common.undo(torch.ones(15))
    assert torch.equal(averager.get_current_state()[1][0], common.theta)


async def there(averager: Any, work: str, *of: Any) -> Any:
    """What the averager's process does when it is asked."""
    return await getattr(type(averager), work).__wrapped__(averager, *of)


LINK = Commitment(0, 0, "0" * 64, "0" * 64)
ACCOUNT = Account(round=3, links=[LINK, LINK], precision="fp32", micro_batch_size=1, sums="A" * 512)


@pytest.fixture
def owners(averager: Any) -> Any:
    """The owner's averager, which has drawn nobody yet."""
    averager.common, averager.next_chunk_timeout = SimpleNamespace(theta=torch.zeros(9)), 1.0
    averager._shown, averager._tell_shown = multiprocessing.Pipe(duplex=False)
    averager._on_its_way = 0
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


def test_who_has_yet_to_show_something_is_waited_for(owners: Any) -> None:
    async def run() -> list[int]:
        found = [await there(owners, "awaited")]
        await there(owners, "draw", {"eve": False, "gone": False}, 3)
        owners._accounts.took_part(["eve"])
        found.append(await there(owners, "awaited"))
        owners._accounts.asked["eve"] = Shown("eve", ACCOUNT, None, (), {})
        stream = as_aiter(averaging_pb2.DownloadData(tensor_part=runtime_pb2.Tensor(buffer=bytes(100))))
        async with owners._showing:  # what somebody else has shown is on its way
            async with asyncio.timeout(20.0):
                shows = owners.rpc_show(stream, SimpleNamespace(remote_id="eve"))
                await anext(shows)
                rest = asyncio.ensure_future(anext(shows))
                await asyncio.sleep(0.1)
                found.append(await there(owners, "awaited"))
        await rest
        return [*found, await there(owners, "awaited")]

    assert asyncio.run(run()) == [0, 1, 1, 0]
    assert owners._shown.poll()


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
            reading = (asyncio.to_thread(Averager.shown, owners) for _ in sent)
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
        return SimpleNamespace(
            ordered_peer_ids=(), banned_senders=(), received={}, screen=screen, outcome=ExchangeOutcome
        )

    averager._arriving, averager._accounts = None, Accounts(1)
    averager._found = []
    averager.guard.admission = SimpleNamespace(names=dict)

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
    averager.guard.admission = SimpleNamespace(names=dict)
    screen = SimpleNamespace(given={}, verdicts=tuple, counted=dict)
    benched = list[bool]()
    for came in (0, 0, 2, 0, 0, 0, 0, 0, 0):
        outcome = ExchangeOutcome(received=(2, came), expected=(2, 2), counted=(True, True), reducers=("me", "rita"))
        averager._report(
            SimpleNamespace(
                ordered_peer_ids=("me", "rita"), banned_senders=(), received={"me": 1, "rita": 1}, screen=screen,
                outcome=lambda outcome=outcome: outcome,
            ), None,
        )  # fmt: skip
        benched.append(averager.groups.lateness.is_benched("rita"))
    assert benched == [*[False] * 8, True]
    assert not averager.groups.lateness.is_benched("me")
    clock.now += 40.0
    assert not averager.groups.lateness.is_benched("rita")


def test_only_the_owners_side_leads_a_group_and_not_while_it_is_benched() -> None:
    """A leader divides the work among all."""

    async def trusts(peer: str) -> bool:
        return peer != "eve"

    guard: Any = SimpleNamespace(trusts=trusts)
    groups = Groups(guard)
    for _ in range(3):
        groups.lateness.note(["rita"], {"rita"}, ())

    async def followed() -> list[bool]:
        return [await groups.follows(peer) for peer in ("ann", "eve", "rita")]

    assert asyncio.run(followed()) == [True, False, False]
