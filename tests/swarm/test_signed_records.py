"""Signed records, requests to the DHT, identities, and the bounds on what a process of a peer takes from others."""

import asyncio
import dataclasses
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import CompositeValidator, DHTRecord
from hivemind.p2p import P2P, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer, auth

from trainkit.common.errors import RefusedError, UserError
from trainkit.swarm.identity import invitations
from trainkit.swarm.identity.admission import Admission, peer_key, revoked_list
from trainkit.swarm.identity.bans import Ban, Excluded, bans_list
from trainkit.swarm.identity.invitations import Key
from trainkit.swarm.network import bounds, signed_records
from trainkit.swarm.network.signed_records import hashed
from trainkit.swarm.peer.owner import own_pass
from trainkit.swarm.protocol.messages import (
    BANNED,
    CREDITS,
    MANIFEST,
    MOST_PEERS,
    PROGRESS,
    REVOKED,
    Manifest,
    PeerProgress,
)

pytestmark = pytest.mark.usefixtures("hivemind_here")

OWNER, STRANGER = Key(b"o" * 32), Key(b"s" * 32)
SOON = time.time() + 7200
MANIFEST_VALUE: dict[str, Any] = dataclasses.asdict(Manifest("run-1", "run", "seed: 0", 1, "ab" * 32, 10, 1, 8))
PROGRESS_VALUE: dict[str, Any] = {**dataclasses.asdict(PeerProgress("anna", 3, 64, 10.0, 0.5, 2, 1e9)), "addresses": []}
SPEAKERS = ("volunteer", "reducer", "owner")


def peer(
    role: invitations.Role = "volunteer", owner: Key = OWNER, path: Path | None = None
) -> AbstractContextManager[Any]:
    """The identity of somebody whom ``owner`` has invited."""
    own = invitations.grant(owner, "run", "anna", role, SOON + 600)
    return signed_records.identity(path, own)


@pytest.fixture(scope="module")
def peers(hivemind_here: None) -> Iterator[dict[str, Any]]:
    with (
        peer() as anna, peer() as eve, peer("reducer") as reducer, peer("owner") as owner,
        peer(owner=STRANGER) as stranger,
    ):  # fmt: skip
        yield {"volunteer": anna, "eve": eve, "reducer": reducer, "owner": owner, "a": stranger}


def record(identity: Any, key: str, value: object, until: float = SOON) -> Any:
    return DHTRecord(hashed(key), MSGPackSerializer.dumps(identity.subkey), MSGPackSerializer.dumps(value), until)


def checks_of(identity: Any) -> Any:
    return CompositeValidator([signed_records.SignedRecords(identity)])


def signed(identity: Any, own: Any, **changes: Any) -> Any:
    return dataclasses.replace(own, **{"value": checks_of(identity).sign_value(own), **changes})


def test_a_member_writes_under_its_own_peer_id_and_nobody_else_there(peers: dict[str, Any]) -> None:
    anna, eve = peers["volunteer"], peers["eve"]
    assert anna.peer_id == str(PeerID.from_identity(anna.path.read_bytes()))
    checks, own = checks_of(eve), record(anna, PROGRESS, PROGRESS_VALUE)
    good = signed(anna, own)
    assert checks.validate(good)
    assert checks.strip_value(good) == own.value
    wrong = {
        "as it is": own,
        "by another": signed(eve, own),
        "taken over": signed(eve, record(eve, PROGRESS, PROGRESS_VALUE), subkey=own.subkey),
        "changed": dataclasses.replace(good, value=good.value.replace(b"anna", b"hans", 1)),
        "elsewhere": dataclasses.replace(good, key=hashed("x")),
        "for longer": dataclasses.replace(good, expiration_time=SOON + 1),
        "by a stranger": signed(peers["a"], record(peers["a"], PROGRESS, PROGRESS_VALUE)),
        "outlasts": signed(anna, record(anna, PROGRESS, PROGRESS_VALUE, SOON + 700)),
        "without a subkey": signed(anna, dataclasses.replace(own, subkey=MSGPackSerializer.dumps(None))),
        "another's credential": signed(anna, record(anna, peer_key(eve.peer_id), b"x")),
        **{f"cut at {size}": dataclasses.replace(good, value=good.value[:size]) for size in range(0, 900, 50)},
    }
    assert [how for how, one in wrong.items() if checks.validate(one)] == []
    assert checks.validate(signed(anna, record(anna, peer_key(anna.peer_id), b"x")))


@pytest.mark.parametrize(
    ("key", "value", "writers"),
    [
        (PROGRESS, PROGRESS_VALUE, SPEAKERS),
        ("run_outer.0b", True, SPEAKERS[1:]),  # hivemind's own: who leads a group, who gives a state away
        ("run_outer.all_averagers", 1e9, SPEAKERS[1:]),
        (REVOKED, b"x", SPEAKERS[1:]),
        (BANNED, b"x", SPEAKERS[1:]),
        (CREDITS, [], SPEAKERS[2:]),
        (MANIFEST, MANIFEST_VALUE, SPEAKERS[2:]),
    ],
)
def test_a_volunteer_tells_of_itself_and_of_nothing_else(key: str, value: object, writers: Any, peers: Any) -> None:
    checks = checks_of(peers["owner"])
    told = {one: signed(peers[one], record(peers[one], key, value)) for one in SPEAKERS}
    assert tuple(one for one in SPEAKERS if checks.validate(told[one])) == writers


def test_addresses_of_a_volunteer_are_told_to_nobody(peers: dict[str, Any]) -> None:
    """All would dial them, and forget the peers that are there for them."""
    checks, value = checks_of(peers["eve"]), {**PROGRESS_VALUE, "addresses": ["/ip4/45.0.0.1/tcp/1"]}
    told = {one: signed(peers[one], record(peers[one], PROGRESS, value)) for one in SPEAKERS}
    assert tuple(one for one in SPEAKERS if checks.validate(told[one])) == SPEAKERS[1:]


WRONG_MANIFEST: tuple[dict[str, Any], ...] = (
    *({size: 1 << 30} for size in ("num_classes", "in_chans", "image_size")),  # it fills a machine
    *({"num_classes": 0}, {"image_size": "8"}, {"owner": "ab"}, {"facts": {"a": 1}}, {"stopped": 1}),
)
WRONG_PROGRESS: tuple[dict[str, Any], ...] = ({"round": -1}, {"name": "x" * 200}, {"more": "x" * 9000})


@pytest.mark.parametrize(
    ("key", "value", "valid"),
    [
        (MANIFEST, MANIFEST_VALUE, True),
        *((MANIFEST, {**MANIFEST_VALUE, **change}, False) for change in WRONG_MANIFEST),
        (MANIFEST, {**MANIFEST_VALUE, "more": 1}, True),  # of a later version
        (PROGRESS, {**PROGRESS_VALUE, "more": 1}, True),
        *((PROGRESS, {**PROGRESS_VALUE, **change}, False) for change in WRONG_PROGRESS),
        (CREDITS, [{"name": "anna"}], True),
        *((CREDITS, rows, False) for rows in (5, [5], [{"name": "anna"}] * 201)),
        *((REVOKED, 5, False), (BANNED, "x", False), ("own", b"x" * 9000, False)),
    ],
)  # fmt: skip
def test_records_of_a_wrong_shape_or_size_are_refused(key: str, value: object, valid: bool, peers: Any) -> None:
    owner = peers["owner"]
    key = peer_key(owner.peer_id) if key == "own" else key
    assert checks_of(owner).validate(signed(owner, record(owner, key, value))) == valid


def test_an_identity_that_is_kept_is_the_same_next_time_and_private(tmp_path: Path) -> None:
    with peer(path=tmp_path / "key") as first, peer(path=tmp_path / "key") as again, peer() as passing:
        assert first.peer_id == again.peer_id != passing.peer_id
        assert passing.path.exists()
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0
    assert not passing.path.exists()
    (tmp_path / "nonsense").write_text("nonsense")
    with pytest.raises(UserError, match="Cannot use the identity"), peer(path=tmp_path / "nonsense"):
        pass


def validated(sender: Any, receiver: Any, *requests: Any) -> list[bool]:
    """Whether each request is answered; what is left of it then."""

    async def run() -> list[bool]:
        for request in requests:
            await signed_records.Authorizer(sender).sign_request(request, None)
        return [bool(await signed_records.Authorizer(receiver).validate_request(request)) for request in requests]

    return asyncio.run(run())


@pytest.mark.parametrize("how", ["revoked", "banned"])
def test_a_peer_that_is_out_may_ask_who_is_out_and_nothing_else(how: str, peers: dict[str, Any]) -> None:
    lists = [hashed(REVOKED), hashed(BANNED), hashed(PROGRESS)]

    def left() -> tuple[list[bool], int, int, bool]:
        find = dht_pb2.FindRequest(keys=[hashed(REVOKED), hashed(PROGRESS), hashed(BANNED)])
        stored = {"subkeys": [b"x"], "values": [b"x"], "expiration_time": [SOON], "in_cache": [False]}
        store = dht_pb2.StoreRequest(keys=[hashed(PROGRESS)], **stored)
        ping = dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=b"x"))
        assert validated(eve, owner, find, store, ping) == [True] * 3
        return [key in lists for key in find.keys], len(store.keys), len(store.values), ping.HasField("peer")

    with peer() as eve, peer("owner") as owner:
        assert left() == ([True, True, True], 1, 1, False)
        if how == "revoked":
            owner.admission.revoke(revoked_list(own_pass(OWNER, "owner"), 1, [eve.own.grant.id]))
        else:
            owner.admission.ban([eve.peer_id])
        assert left() == ([True, False, True], 0, 0, False)
        stranger = asyncio.run(signed_records.Authorizer(peers["a"]).get_token())
        assert not signed_records.Authorizer(owner).is_token_valid(stranger)


def test_a_member_asks_for_so_many_records_at_once_and_no_more(peers: dict[str, Any]) -> None:
    kinds = (dht_pb2.FindRequest, dht_pb2.StoreRequest)
    for keys, answered in ((16, True), (17, False)):
        requests = [kind(keys=[b"x" * 20] * keys) for kind in kinds]
        assert validated(peers["volunteer"], peers["owner"], *requests) == [answered] * 2


@pytest.mark.parametrize(("sender", "kept"), [("volunteer", 0), ("reducer", 1)])
def test_only_the_owners_side_stores_whole_dictionaries(sender: str, kept: int, peers: dict[str, Any]) -> None:
    request = dht_pb2.StoreRequest(keys=[b"x"], subkeys=[DHTProtocol.IS_DICTIONARY], values=[b"x"])
    assert validated(peers[sender], peers["owner"], request) == [True]
    assert len(request.keys) == len(request.values) == kept


@pytest.mark.parametrize(("size", "answered"), [(64, True), (65, False), (1 << 20, False)])
def test_no_node_remembers_a_long_nonce(
    size: int, answered: bool, peers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth.secrets, "token_bytes", lambda _: bytes(random.randbytes(size)))
    assert validated(peers["volunteer"], peers["owner"], dht_pb2.PingRequest()) == [answered]


@pytest.mark.parametrize(("role", "passes_on"), [("volunteer", False), ("reducer", True)])
def test_who_is_out_is_told_so_and_a_reducer_passes_it_on(role: invitations.Role, passes_on: bool) -> None:
    def named(name: str, role: invitations.Role) -> Excluded:
        return Excluded(invitations.grant(OWNER, "run", name, role, SOON), f"Qm{name}", Admission(OWNER.public))

    first, second = named("Bob", role), named("Eve", "owner")
    ann, zoe = named("Ann", "volunteer"), named("Zoe", "volunteer")
    for peer, key, statement, says in (
        (ann, REVOKED, revoked_list(own_pass(OWNER, "owner"), 1, [ann._own.grant.id]), "invitations of Ann"),
        (zoe, BANNED, bans_list(own_pass(OWNER, "anchor", "reducer"), [Ban("QmZoe", "Zoe", "lied", 5.0)]), "out: lied"),
    ):
        peer.require_welcome()
        peer.hear(key, statement)
        with pytest.raises(RefusedError, match=says):
            peer.require_welcome()
        first.hear(key, statement)
    first.require_welcome()  # of others it may stay itself
    for key, statement in first.told().items():
        second.hear(key, statement)
    out = second._admission.revoked, list(second.bans.read())
    assert out == (([ann._own.grant.id], ["QmZoe"]) if passes_on else ([], []))


# What a node keeps and reads of a DHT that somebody floods.


def stored(name: str, role: invitations.Role = "volunteer", value: bytes = b"x") -> bytes:
    """What a node keeps of a record: the value, by whose invitation, and a signature."""
    return invitations.pack([value, invitations.grant(OWNER, "run", name, role, SOON).state("peer", b"key"), b""])


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Bounds this process as that of a node, for one test."""
    monkeypatch.setattr(DHTLocalStorage, "store_subkey", DHTLocalStorage.store_subkey)
    monkeypatch.setattr(DHTProtocol, "_validate_dictionary", DHTProtocol._validate_dictionary)
    monkeypatch.setattr(asyncio.subprocess, "create_subprocess_exec", asyncio.create_subprocess_exec)
    return bounds.bound_node.__wrapped__  # once for each test


def test_a_node_keeps_so_many_records_for_so_long(bound: Callable[[], None]) -> None:
    """The newest of each peer, which nobody displaces who sends an older one again, signature and all."""
    bound()
    news, now = DHTID.generate(source=PROGRESS), time.time()
    storage, (old, new) = DHTLocalStorage(), (stored("anna", "reducer", value) for value in (b"old", b"new"))
    kept = sum(storage.store(news, old, now + 60.0, subkey=index) for index in range(2 * MOST_PEERS))
    assert (kept, len(storage.get(news).value)) == (MOST_PEERS, MOST_PEERS)
    assert storage.store(news, new, now + 90.0, subkey=7)  # one that is there may stay
    assert not storage.store(news, new, now + 90.0, subkey=20_000)
    assert not storage.store(news, old, time.time() + 0.3, subkey=7)
    time.sleep(0.4)  # hivemind would drop the newer one when the older one expires
    assert storage.get(news).value.get(7).value == new


def test_one_invitation_has_so_many_peers_at_a_node_and_for_an_hour(
    bound: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has one can make up peers without end; the others keep their places."""
    bound()
    storage, now = DHTLocalStorage(), time.time()
    monkeypatch.setattr("trainkit.swarm.network.bounds.time", SimpleNamespace(time=lambda: now))

    def kept(invited: bytes, peers: range, seconds: float = 100.0) -> int:
        """Each has a record with the others, and one of its own."""
        keys = [(key, peer) for peer in peers for key in (PROGRESS, f"peer {peer}")]
        places = [(DHTID.generate(source=key), peer) for key, peer in keys]
        return sum(storage.store(key, invited, now + seconds, subkey=peer) for key, peer in places)

    mallory, guest, anna = stored("mallory"), stored(invitations.GUESTS), stored("anna")
    assert kept(mallory, range(1, 201), 100.0) == 2 * 64
    assert kept(guest, range(1000, 2000)) == 2 * 800
    assert kept(anna, range(3000, 3001)) == 2
    assert kept(mallory, range(64, 66), 200.0) == 2  # one that is there may stay
    assert kept(anna, range(3000, 3001), 3700.0) == 0
    now += 150.0
    assert kept(mallory, range(65, 200)) == 2 * 63  # all others are gone
    assert kept(stored("ben", "reducer"), range(4000, 4001), 9e9) == 2


def test_of_a_flood_a_reader_looks_at_the_first_and_keeps_the_valid(
    bound: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []

    def validate(self: Any, key: bytes, subkey: bytes, value: bytes, expires: float) -> bool:
        asked.append(subkey)
        return value != b"bad"

    monkeypatch.setattr(DHTProtocol, "_validate_record", validate)
    bound()
    many = DictionaryDHTValue()
    for index in range(2 * MOST_PEERS):
        many.store(index, b"bad" if index % 2 else b"good", time.time() + 60.0)
    protocol = DHTProtocol.__new__(DHTProtocol)
    assert protocol._validate_dictionary(b"news", many)
    assert (len(asked), len(many), {item.value for _, item in many.items()}) == (MOST_PEERS, MOST_PEERS // 2, {b"good"})
    assert not protocol._validate_dictionary(b"news", b"no dictionary")


# What a peer may send before anybody has asked who it is.


@pytest.mark.parametrize(
    ("arrives", "sizes", "said"),
    [
        # Between two messages a peer may be silent.
        ([(0.0, b"\x00length!!body"), (0.6, b"\x00")], [1, 8, 4, 1], [b"\x00", b"length!!", b"body", b"\x00"]),
        ([], [1], None),
        ([(0.0, b"\x00")], [1, 8], None),
        ([(0.0, b"\x00length!!bo"), (0.6, b"dy")], [1, 8, 4], None),
        ([(0.0, b"\x00length!!")], [1, 8, 1 << 33], None),
    ],
    ids=["honest", "never begins", "stops after a mark", "stops in a message", "announces too much"],
)
def test_a_peer_that_says_too_little_or_too_much_has_hung_up(
    arrives: list[tuple[float, bytes]], sizes: list[int], said: list[bytes] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "FIRST_SECONDS", 0.2)
    monkeypatch.setattr(bounds, "REST_SECONDS", 0.3)

    async def run() -> list[bytes] | None:
        stream = asyncio.StreamReader()

        async def feed() -> None:
            for seconds, data in arrives:
                await asyncio.sleep(seconds)
                stream.feed_data(data)

        feeding, reader = asyncio.ensure_future(feed()), bounds.BoundedReader(stream)
        try:
            return [await reader.readexactly(size) for size in sizes]
        except asyncio.IncompleteReadError:
            return None
        finally:
            feeding.cancel()

    assert asyncio.run(run()) == said


def test_a_peer_has_so_many_calls_at_once_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[Any] = []

    async def add(self: Any, name: str, handler: Any, balanced: bool = False) -> None:
        added.append(handler)

    monkeypatch.setattr(P2P, "add_binary_stream_handler", add)
    bounds.bound_calls()

    async def run() -> list[str]:
        hang_up, closed = asyncio.Event(), list[str]()

        async def handler(info: Any, reader: Any, writer: Any) -> None:
            await hang_up.wait()

        await P2P.add_binary_stream_handler(cast("P2P", None), "call", handler)

        async def call(peer: str) -> None:
            stream = SimpleNamespace(write=None, close=lambda: closed.append(peer))
            await added[0](SimpleNamespace(peer_id=peer), None, stream)

        calls = [asyncio.ensure_future(call(peer)) for peer in [*["eve"] * (bounds.MOST_CALLS + 3), "ann"]]
        await asyncio.sleep(0)
        hang_up.set()
        await asyncio.gather(*calls)
        await call("eve")
        return closed

    assert asyncio.run(run()) == ["eve"] * 3  # too many; later she may again
