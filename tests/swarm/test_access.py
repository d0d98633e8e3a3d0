"""In processes of their own: importing hivemind changes how this one starts processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainkit.swarm.messages import MOST_PEERS

PROJECT = Path(__file__).parents[2]
PREPARE = """
import dataclasses, time
from trainkit.swarm import processes
processes.require_hivemind()
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import CompositeValidator, DHTRecord
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer
from trainkit.swarm import invitations as invitation, access as trust
from trainkit.swarm.admission import Admission
from trainkit.swarm.messages import Manifest, PeerProgress as Progress
from trainkit.swarm.access import BANNED, CREDITS, MANIFEST, PROGRESS, REVOKED, peer_key
from trainkit.swarm.invitations import Key

OWNER, STRANGER = Key(b"o" * 32), Key(b"s" * 32)
SOON = time.time() + 60

def peer(role="volunteer", owner=OWNER, path=None, open_run=False):
    own = invitation.grant(owner, "run", "anna", role, time.time() + 600) if owner else invitation.open_pass("eve", 2e9)
    return trust.identity(path, own, Admission(OWNER.public, open_run=open_run))

def record(identity, key, value, until=SOON):
    return DHTRecord(DHTID.generate(source=key).to_bytes(), MSGPackSerializer.dumps(identity.subkey),
                     MSGPackSerializer.dumps(value), until)

def signed(identity, own):
    return dataclasses.replace(own, value=CompositeValidator(identity.validators()).sign_value(own))

progress = {**dataclasses.asdict(Progress("anna", 3, 64, 10.0, 0.5, 2, 1e9)), "addresses": []}
"""


SERVE = """
import json, os, sys, traceback
for line in sys.stdin:
    if (child := os.fork()) == 0:
        status = 1
        try:
            exec(json.loads(line))
            status = 0
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(status)
    print("done" if os.waitpid(child, 0)[1] == 0 else "failed", flush=True)
"""

Run = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """What a test's code prints, in a process of its own, forked from one that has imported everything."""
    server = subprocess.Popen(
        [sys.executable, "-c", PREPARE + SERVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
    )
    assert server.stdin is not None
    assert server.stdout is not None
    into, out = server.stdin, server.stdout

    def printed(code: str) -> list[str]:
        print(json.dumps(code), file=into, flush=True)
        lines = []
        while (line := out.readline()) not in ("done\n", "failed\n", ""):
            lines.append(line.rstrip("\n"))
        assert line == "done\n", lines
        return lines

    yield printed
    server.communicate()


@pytest.mark.swarm
def test_a_member_writes_under_its_own_peer_id_alone_and_nobody_else_there(run: Run) -> None:
    assert run("""
with peer() as anna, peer() as eve, peer(owner=STRANGER) as stranger, peer(owner=None) as self_made:
    print(anna.peer_id == str(PeerID.from_identity(anna.path.read_bytes())))
    checks = CompositeValidator(eve.validators())
    own = record(anna, PROGRESS, progress)
    good = signed(anna, own)
    print(checks.validate(good), checks.strip_value(good) == own.value)
    print("as it is", checks.validate(own))
    print("by another", checks.validate(signed(eve, own)))
    by_eve = signed(eve, record(eve, PROGRESS, progress))
    print("taken over", checks.validate(dataclasses.replace(by_eve, subkey=own.subkey)))
    print("changed", checks.validate(dataclasses.replace(good, value=good.value.replace(b"anna", b"hans", 1))))
    print("elsewhere", checks.validate(dataclasses.replace(good, key=DHTID.generate(source="x").to_bytes())))
    print("for longer", checks.validate(dataclasses.replace(good, expiration_time=SOON + 1)))
    print("cut", any(checks.validate(dataclasses.replace(good, value=good.value[:size])) for size in range(0, 900, 50)))
    for other in (stranger, self_made):
        print("not invited", checks.validate(signed(other, record(other, PROGRESS, progress))))
    print("outlasts", checks.validate(signed(anna, record(anna, PROGRESS, progress, time.time() + 700))))
    nowhere = dataclasses.replace(own, subkey=MSGPackSerializer.dumps(None))
    print("without a subkey", checks.validate(signed(anna, nowhere)))
""") == [
        "True",
        "True True",
        "as it is False",
        "by another False",
        "taken over False",
        "changed False",
        "elsewhere False",
        "for longer False",
        "cut False",
        "not invited False",
        "not invited False",
        "outlasts False",
        "without a subkey False",
    ]


@pytest.mark.swarm
def test_a_volunteer_tells_of_itself_and_of_nothing_else(run: Run) -> None:
    """Neither that it leads a group or gives a state away (hivemind's own records), nor of the run, nor whom to ban."""
    assert run("""
with peer() as volunteer, peer("reducer") as reducer, peer("owner") as owner:
    checks = CompositeValidator(owner.validators())
    manifest = dataclasses.asdict(Manifest("run-1", "run", "seed: 0", 1, "ab" * 32, 10, 1, 8))
    for key, value in ((PROGRESS, progress), ("run_outer.0b", True), ("run_outer.all_averagers", 1e9), (REVOKED, b"x"),
                       (BANNED, b"x"), (CREDITS, {"rows": []}), (MANIFEST, manifest)):
        print([checks.validate(signed(one, record(one, key, value))) for one in (volunteer, reducer, owner)])
    own, anothers = peer_key(volunteer.peer_id), peer_key(reducer.peer_id)
    print([checks.validate(signed(volunteer, record(volunteer, key, b"x"))) for key in (own, anothers)])
""") == [
        "[True, True, True]",
        "[False, True, True]",
        "[False, True, True]",
        "[False, True, True]",
        "[False, True, True]",
        "[False, False, True]",
        "[False, False, True]",
        "[True, False]",
    ]


@pytest.mark.swarm
def test_at_an_open_run_strangers_tell_of_themselves(run: Run) -> None:
    assert run("""
with peer(owner=None) as stranger, peer("owner", open_run=True) as owner:
    checks = CompositeValidator(owner.validators())
    for key, value in ((PROGRESS, progress), ("run_outer.all_averagers", 1e9)):
        print(checks.validate(signed(stranger, record(stranger, key, value))))
""") == ["True", "False"]


@pytest.mark.swarm
def test_a_manifest_whose_model_would_fill_a_machine_is_refused(run: Run) -> None:
    assert run("""
with peer("owner") as owner:
    checks = CompositeValidator(owner.validators())
    manifest = dataclasses.asdict(Manifest("run-1", "run", "seed: 0", 1, "ab" * 32, 10, 1, 8))
    for change in ({}, {"num_classes": 1 << 30}, {"num_classes": 0}, {"in_chans": 1 << 20}, {"image_size": 1 << 20},
                   {"image_size": "8"}):
        print(checks.validate(signed(owner, record(owner, MANIFEST, {**manifest, **change}))))
""") == ["True", *["False"] * 5]


@pytest.mark.swarm
def test_records_of_a_wrong_shape_or_size_are_refused(run: Run) -> None:
    assert run("""
with peer() as anna:
    checks = CompositeValidator(anna.validators())
    for change in ({}, {"round": -1}, {"round": "3"}, {"samples_per_sec": -1.0}, {"name": "x" * 200},
                   {"more": "x" * 9000}, {"more": 1}):
        print(checks.validate(signed(anna, record(anna, PROGRESS, {**progress, **change}))))
    print(checks.validate(signed(anna, record(anna, peer_key(anna.peer_id), b"x" * 9000))))
""") == ["True", *["False"] * 5, "True", "False"]


@pytest.mark.swarm
def test_an_identity_that_is_kept_is_the_same_next_time_and_private(run: Run, tmp_path: Path) -> None:
    assert run(f"""
from pathlib import Path
file = Path({str(tmp_path)!r}) / "key"
ids = []
for _ in range(2):
    with peer(path=file) as anna:
        ids.append(anna.peer_id)
print(len(set(ids)), oct(file.stat().st_mode & 0o077))
with peer() as passing:
    pass
print(passing.path.exists())
file = Path({str(tmp_path)!r}) / "nonsense"
file.write_text("nonsense")
try:
    with peer(path=file): pass
except Exception as error:
    print(type(error).__name__)
""") == ["1 0o0", "False", "UserError"]


@pytest.mark.swarm
@pytest.mark.parametrize("how", ["revoked", "banned"])
def test_who_is_out_may_ask_who_is_out_and_nothing_else(run: Run, how: str) -> None:
    assert run(f"""
import asyncio
from hivemind.proto import dht_pb2
from trainkit.swarm.access import BANNED, hashed
from trainkit.swarm.admission import revoked_list
from trainkit.swarm.admission import own_pass

with peer() as eve, peer("owner") as owner:
    async def answered(*requests):
        for request in requests:
            await eve.authorizer().sign_request(request, None)
            if not await owner.authorizer().validate_request(request):
                print("refused")

    def left():
        find = dht_pb2.FindRequest(keys=[hashed(REVOKED), hashed(PROGRESS), hashed(BANNED)])
        store = dht_pb2.StoreRequest(keys=[hashed(PROGRESS)], subkeys=[b"x"], values=[b"x"], expiration_time=[SOON],
                                     in_cache=[False])
        ping = dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=b"x"))
        asyncio.run(answered(find, store, ping))
        print([key in (hashed(REVOKED), hashed(BANNED), hashed(PROGRESS)) for key in find.keys],
              len(store.keys), len(store.values), ping.HasField("peer"))

    left()
    if {how!r} == "revoked":
        owner.admission.revoke(revoked_list(own_pass(OWNER, "owner"), 1, [eve.own.grant.id]))
    else:
        owner.admission.ban([eve.peer_id])
    left()
with peer(owner=STRANGER) as stranger:
    print(owner.authorizer().is_token_valid(asyncio.run(stranger.authorizer().get_token())))
""") == ["[True, True, True] 1 1 False", "[True, False, True] 0 0 False", "False"]


@pytest.mark.swarm
def test_who_is_out_is_told_why_in_words(run: Run) -> None:
    assert run("""
from trainkit.swarm.admission import revoked_list
from trainkit.swarm.bans import Ban, bans_list
from trainkit.swarm.bans import Excluded
from trainkit.swarm.admission import own_pass
from trainkit.swarm.access import BANNED

def said(change):
    with peer() as anna:
        excluded = Excluded(anna.own, anna.peer_id, anna.admission)
        change(excluded, anna.own.grant.id)
        try:
            excluded.require_welcome()
            print("welcome")
        except Exception as error:
            print(type(error).__name__, error.what, error.why)

def banned(by):
    return lambda excluded, own: excluded.hear(BANNED, bans_list(by, [Ban(own, "anna", "lied", 5.0)]))

said(lambda excluded, own: None)
said(lambda excluded, own: excluded.hear(REVOKED, revoked_list(own_pass(OWNER, "owner"), 1, [own])))
said(lambda excluded, own: excluded.hear(REVOKED, revoked_list(own_pass(OWNER, "owner"), 1, ["ab" * 32])))
said(banned(own_pass(OWNER, "anchor", "reducer")))
""") == [
        "welcome",
        "RefusedError Your invitation was revoked. The owner of the run has ended the invitations of anna.",
        "welcome",
        "RefusedError You were banned from the run. 3 times in a row your part of a round was left out: lied.",
    ]


@pytest.mark.swarm
def test_what_a_reducer_has_heard_of_who_is_out_it_passes_on_and_a_volunteer_does_not(run: Run) -> None:
    assert run("""
from trainkit.swarm.admission import revoked_list
from trainkit.swarm.bans import Ban, bans_list
from trainkit.swarm.bans import Excluded
from trainkit.swarm.admission import own_pass
from trainkit.swarm.access import BANNED

for role in ("volunteer", "reducer"):
    with peer(role) as anna, peer("owner") as next:
        excluded = Excluded(anna.own, anna.peer_id, anna.admission)
        excluded.hear(REVOKED, revoked_list(own_pass(OWNER, "owner"), 1, ["ab" * 32]))
        excluded.hear(BANNED, bans_list(own_pass(OWNER, "owner"), [Ban("QmEve", "eve", "lied", 5.0)]))
        told = Excluded(next.own, next.peer_id, next.admission)
        for key, statement in excluded.told().items():
            told.hear(key, statement)
        print(next.admission.revoked == ["ab" * 32], list(told.bans.read()))
""") == ["False []", "True ['QmEve']"]


@pytest.mark.swarm
def test_a_record_of_before_that_somebody_sends_again_displaces_no_newer_one_and_is_none_after_its_time(
    run: Run,
) -> None:
    """Whoever has read a record can send the very bytes, signature and all."""
    assert run("""
import asyncio
from hivemind.dht.node import DHTNode
from trainkit.swarm.access import bound_records

bound_records(PROGRESS)  # as the process of every node does

async def node(identity, peers=()):
    checks = CompositeValidator(identity.validators())
    return await DHTNode.create(record_validator=checks, initial_peers=peers, identity_path=str(identity.path))

def said(found):
    return {item.value["round"] for item in found.value.values()} if found else found

async def main(owner, anna, eve):
    at_owner = await node(owner)
    addresses = await at_owner.protocol.p2p.get_visible_maddrs()
    annas, eves = await node(anna, addresses), await node(eve, addresses)
    now = time.time()
    old, new = (signed(anna, record(anna, PROGRESS, {**progress, "round": number}, now + seconds))
                for number, seconds in ((3, 2.5), (4, 60.0)))
    async def sent(which):
        key, to = DHTID.from_bytes(which.key), at_owner.protocol.p2p.peer_id
        return await eves.protocol.call_store(
            to, [key], [which.value], [which.expiration_time], subkeys=[MSGPackSerializer.loads(which.subkey)])
    async def known():
        return said(await at_owner.get(PROGRESS, latest=True))
    print("old", await sent(old), await known())
    print("new", await sent(new), await known())
    print("again", await sent(old), await known())
    await asyncio.sleep(max(0.0, old.expiration_time - time.time()) + 0.1)
    print("too late", await sent(old), await known())
    for each in (eves, annas, at_owner):
        await each.shutdown()

with peer("owner") as owner, peer() as anna, peer() as eve:
    asyncio.run(main(owner, anna, eve))
""") == ["old [True] {3}", "new [True] {4}", "again [False] {4}", "too late [False] {4}"]


# A DHT that somebody floods: what a node keeps of it, what a reader takes in, and how long that takes.


# In a process of its own: importing hivemind changes how this one starts processes, and bounds are set for good.
CODE = """
import json, time
from trainkit.swarm import processes
processes.require_hivemind()
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from trainkit.swarm.access import bound_records

asked = []
DHTProtocol._validate_record = lambda self, key, subkey, value, expires: (asked.append(subkey), value != b"bad")[1]
bound_records("news")
news, other, now = DHTID.generate(source="news"), DHTID.generate(source="other"), time.time()
storage, found = DHTLocalStorage(), {}
found["stored"] = sum(storage.store(news, b"x", now + 60.0, subkey=index) for index in range(10_000))
found["renewed"] = storage.store(news, b"y", now + 90.0, subkey=7)
found["late"] = storage.store(news, b"x", now + 90.0, subkey=20_000)
found["lasting"] = storage.store(news, b"y", now + 9e9, subkey=8)
found["others"] = storage.store(other, b"x", now + 9e9, subkey=8)

many = DictionaryDHTValue()
for index in range(10_000):
    many.store(index, b"bad" if index % 2 else b"good", now + 60.0)
protocol = DHTProtocol.__new__(DHTProtocol)
found["read"] = protocol._validate_dictionary(b"news", many)
found["asked"], found["left"] = len(asked), sorted(set(item.value for _, item in many.items()))[0].decode()
found["sizes"] = [len(storage.get(news).value), len(many)]
found["garbage"] = protocol._validate_dictionary(b"news", b"no dictionary")
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, object]:
    done = subprocess.run([sys.executable, "-c", CODE], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return loaded


@pytest.mark.swarm
def test_a_node_keeps_so_many_records_and_whoever_is_there_may_stay(found: dict[str, object]) -> None:
    assert (found["stored"], found["renewed"], found["late"]) == (MOST_PEERS, True, False)


@pytest.mark.swarm
def test_news_do_not_outlast_an_hour_and_other_records_may(found: dict[str, object]) -> None:
    assert (found["lasting"], found["others"]) == (False, True)


@pytest.mark.swarm
def test_of_a_flood_a_reader_looks_at_the_first_and_keeps_the_valid_ones(found: dict[str, object]) -> None:
    assert (found["read"], found["asked"], found["left"]) == (True, MOST_PEERS, "good")
    assert found["sizes"] == [MOST_PEERS, MOST_PEERS // 2]
    assert found["garbage"] is False
