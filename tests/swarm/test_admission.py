"""Who takes part: credentials, revoked invitations, bans; in the process that asks and in those forked from it."""

from __future__ import annotations

import json
import multiprocessing
import time

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from trainkit.swarm import invitations
from trainkit.swarm.admission import Admission, Board, credential, peer_id_of, revoked_list
from trainkit.swarm.averager import Digest, read_digest, sha256_of, sign_digest
from trainkit.swarm.invitations import Key, Pass, Role, UntrustedError, open_pass

OWNER, STRANGER = Key(b"o" * 32), Key(b"s" * 32)
RSA = (
    rsa.generate_private_key(public_exponent=65537, key_size=2048)
    .public_key()
    .public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
)
PEER = peer_id_of(RSA)


def invited(role: Role = "volunteer", owner: Key = OWNER, name: str = "anna", seconds: float = 60) -> Pass:
    return invitations.grant(owner, "digits-0001", name, role, time.time() + seconds)


def test_a_peer_is_known_by_the_id_that_libp2p_proves() -> None:
    assert PEER.startswith("Qm")
    assert len(PEER) == 46


def test_who_was_introduced_is_admitted_as_what_the_owner_says() -> None:
    admission = Admission(OWNER.public)
    assert admission.admitted(PEER) is None
    admission.introduce(credential(invited("reducer"), RSA))
    member = admission.admitted(PEER)
    assert member is not None
    assert (member.peer_id, member.name, member.role, member.trusted) == (PEER, "anna", "reducer", True)


def test_a_volunteer_is_not_trusted() -> None:
    assert not Admission(OWNER.public).introduce(credential(invited("volunteer"), RSA)).trusted


@pytest.mark.parametrize("role", ["owner", "reducer", "volunteer"])
def test_a_credential_by_a_stranger_admits_nobody_whatever_it_claims(role: Role) -> None:
    admission = Admission(OWNER.public)
    with pytest.raises(UntrustedError):
        admission.introduce(credential(invited(role, STRANGER), RSA))
    with pytest.raises(UntrustedError):
        admission.introduce(credential(open_pass("eve", time.time() + 60), RSA))
    assert admission.admitted(PEER) is None


def test_a_digest_or_a_list_is_no_credential() -> None:
    with pytest.raises(UntrustedError):
        Admission(OWNER.public).introduce(sign_digest(invited("owner"), Digest("run", 1, "ab")))


@pytest.mark.parametrize("key", [b"", b"x" * 1025])
def test_what_is_no_key_has_no_peer_id(key: bytes) -> None:
    with pytest.raises(UntrustedError, match="no key"):
        peer_id_of(key)


def test_a_peer_is_a_member_until_its_invitation_expires() -> None:
    admission = Admission(OWNER.public)
    admission.introduce(credential(invited(seconds=60), RSA))
    assert admission.admitted(PEER, now=time.time() + 58)
    assert not admission.admitted(PEER, now=time.time() + 61)


def test_who_is_revoked_is_out_at_once_and_cannot_come_back_with_the_same_invitation() -> None:
    admission, own, again = Admission(OWNER.public), invited(), invited()
    admission.introduce(credential(own, RSA))
    assert admission.revoke(revoked_list(invited("owner"), 1, [own.grant.id]))
    assert admission.admitted(PEER) is None
    with pytest.raises(UntrustedError, match="revoked"):
        admission.introduce(credential(own, RSA))
    admission.introduce(credential(again, RSA))
    assert admission.admitted(PEER)


def test_an_older_list_does_not_bring_anybody_back() -> None:
    admission, own = Admission(OWNER.public), invited()
    old, new = (revoked_list(invited("owner"), serial, ids) for serial, ids in ((1, []), (2, [own.grant.id])))
    assert admission.revoke(new)
    assert not admission.revoke(old)
    with pytest.raises(UntrustedError, match="revoked"):
        admission.introduce(credential(own, RSA))


@pytest.mark.parametrize("role", ["reducer", "volunteer"])
def test_only_the_owner_revokes(role: Role) -> None:
    with pytest.raises(UntrustedError, match="only the owner"):
        Admission(OWNER.public).revoke(revoked_list(invited(role), 1, []))


@pytest.mark.parametrize(
    "content",
    [b"", b"5", b"[1]", b'["1", []]', b"[true, []]", b"[-1, []]", b"[1, [5]]", b'[1, ["ab"]]', b"[1e400, []]"],
)
def test_a_list_of_a_wrong_shape_is_refused(content: bytes) -> None:
    with pytest.raises(UntrustedError, match="no list"):
        Admission(OWNER.public).revoke(invited("owner").state("revoked", content))


def test_a_banned_peer_is_out_and_a_banned_invitation_with_every_peer_that_uses_it() -> None:
    admission, own = Admission(OWNER.public), invited()
    admission.introduce(credential(own, RSA))
    for banned in (PEER, own.grant.id):
        admission.ban([banned])
        assert admission.admitted(PEER) is None
        with pytest.raises(UntrustedError, match="banned"):
            admission.introduce(credential(own, RSA))
        admission.ban([])
        assert admission.admitted(PEER)


def test_nobody_bans_the_owner() -> None:
    admission, own = Admission(OWNER.public), invited("owner")
    admission.introduce(credential(own, RSA))
    admission.ban([PEER, own.grant.id])
    assert admission.admitted(PEER)


def test_a_fork_hears_of_what_is_revoked_and_banned_after_it_was_made() -> None:
    admission, own = Admission(OWNER.public), invited()
    admission.introduce(credential(own, RSA))
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()

    def ask() -> None:
        while theirs.recv():
            theirs.send(admission.admitted(PEER) is not None)

    child = fork.Process(target=ask, daemon=True)
    child.start()
    theirs.close()  # where the fork has died, there is nothing more to wait for

    def seen_there() -> bool:
        ours.send(True)
        assert ours.poll(30)
        return bool(ours.recv())

    assert seen_there()
    admission.ban([PEER])
    assert not seen_there()
    admission.ban([])
    assert seen_there()
    admission.revoke(revoked_list(invited("owner"), 1, [own.grant.id]))
    assert not seen_there()
    ours.send(False)
    child.join(10)


def test_the_board_refuses_what_does_not_fit_and_keeps_what_was_there() -> None:
    board = Board()
    board.write({"a": 1})
    with pytest.raises(ValueError, match="too much"):
        board.write({"a": "x" * (1 << 18)})
    assert board.read() == {"a": 1}


def test_at_an_open_run_everybody_is_a_volunteer() -> None:
    admission = Admission(OWNER.public, open_run=True)
    assert admission.introduce(credential(open_pass("eve", time.time() + 60), RSA)).role == "volunteer"


def test_a_run_turns_out_not_to_be_open() -> None:
    admission, own = Admission(OWNER.public, open_run=True), credential(open_pass("eve", time.time() + 60), RSA)
    admission.introduce(own)
    admission.settle(OWNER.public, open_run=False)
    assert admission.admitted(PEER) is None
    with pytest.raises(UntrustedError):
        admission.introduce(own)


def test_a_record_does_not_outlast_the_invitation_of_its_writer_but_the_writer_may_have_been_revoked_since() -> None:
    """Of many records under one key hivemind refuses all if it refuses one: the answer must not change with time."""
    admission, own = Admission(OWNER.public), invited(seconds=60)
    admission.revoke(revoked_list(invited("owner"), 1, [own.grant.id]))
    shown = credential(own, RSA)
    assert admission.invited(shown, until=own.grant.expires).peer_id == PEER
    with pytest.raises(UntrustedError, match="outlast"):
        admission.invited(shown, until=own.grant.expires + 1)


def test_until_the_owner_is_known_any_owner_counts_and_from_then_on_only_that_one() -> None:
    admission, theirs = Admission(None, open_run=True), credential(invited("owner", STRANGER), RSA)
    admission.introduce(theirs)
    admission.settle(OWNER.public, open_run=False)
    assert (admission.owner, admission.open_run) == (OWNER.public, False)
    assert admission.admitted(PEER) is None
    with pytest.raises(UntrustedError):
        admission.introduce(theirs)
    with pytest.raises(ValueError):
        admission.settle(STRANGER.public, open_run=False)


# Digests

DIGEST = Digest("digits-0001-ab", 7, sha256_of([memoryview(b"theta"), memoryview(b"momentum")]))


@pytest.mark.parametrize("role", ["owner", "reducer"])
def test_the_owners_side_says_which_state_is_the_runs(role: Role) -> None:
    signed = sign_digest(invited(role), DIGEST)
    assert read_digest(Admission(OWNER.public), signed, run_id="digits-0001-ab") == DIGEST


@pytest.mark.parametrize("own", [invited("volunteer"), invited("owner", STRANGER), open_pass("eve", time.time() + 60)])
def test_a_volunteer_that_claims_to_be_of_the_owners_side_says_nothing(own: Pass) -> None:
    for open_run in (False, True):
        with pytest.raises(UntrustedError):
            read_digest(Admission(OWNER.public, open_run=open_run), sign_digest(own, DIGEST), run_id=DIGEST.run_id)


def test_a_digest_of_another_run_or_of_an_earlier_start_is_none_of_this_one() -> None:
    with pytest.raises(UntrustedError, match="another run"):
        read_digest(Admission(OWNER.public), sign_digest(invited("owner"), DIGEST), run_id="digits-0001-cd")


@pytest.mark.parametrize("content", [[], ["digits-0001-ab", -1, "x"], ["digits-0001-ab", 1.5, "x"], ["a", 1], 5])
def test_a_digest_of_a_wrong_shape_is_refused(content: object) -> None:
    said = invited("owner").state("state", json.dumps(content).encode())
    with pytest.raises(UntrustedError):
        read_digest(Admission(OWNER.public), said, run_id="digits-0001-ab")


def test_weights_and_momentum_cannot_be_shifted_into_each_other() -> None:
    assert sha256_of([memoryview(b"ab"), memoryview(b"c")]) != sha256_of([memoryview(b"a"), memoryview(b"bc")])
