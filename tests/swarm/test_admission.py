"""Who takes part, in all processes of a peer; the ways into a run; and what the owner keeps in its folder."""

import base64
import errno
import io
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from jobs import swarm
from trainkit.common import jsonl
from trainkit.common.errors import DiskError, UserError
from trainkit.run.folder import RunDir
from trainkit.swarm.identity import admission
from trainkit.swarm.identity.admission import Admission, Board
from trainkit.swarm.identity.invitations import GUESTS, Key, Pass, Role, UntrustedError, entry_of, grant, write_token
from trainkit.swarm.peer.owner import KEY_FILE, Owner, invite, keep_key, keep_needs, key_of, owner_of, revoked_in
from trainkit.swarm.peer.place import write_addresses
from trainkit.swarm.protocol.addresses import EXAMPLE

OWNER, STRANGER = Key(b"o" * 32), Key(b"s" * 32)
DAY = 86400.0
KIND = serialization.PublicFormat.SubjectPublicKeyInfo
PRIVATE = rsa.generate_private_key(public_exponent=65537, key_size=2048)
RSA = PRIVATE.public_key().public_bytes(serialization.Encoding.DER, KIND)
PEER = admission.peer_id_of(RSA)
ROLES: tuple[Role, ...] = ("owner", "reducer", "volunteer")


def invitation(role: Role = "volunteer", owner: Key = OWNER, seconds: float = 60) -> Pass:
    return grant(owner, "digits-0001", "anna", role, time.time() + seconds)


def shown(own: Pass) -> bytes:
    """The credential of a peer with that invitation."""
    return own.state("peer", RSA)


def revoked(*ids: str, serial: int = 1) -> bytes:
    return admission.revoked_list(invitation("owner"), serial, ids)


@pytest.fixture
def known() -> Admission:
    return Admission(OWNER.public)


@pytest.mark.parametrize("role", ROLES)
def test_a_peer_is_admitted_once_introduced_as_what_the_owner_says(role: Role, known: Admission) -> None:
    assert known.admitted(PEER) is None
    known.introduce(shown(invitation(role)))
    member = known.admitted(PEER)
    assert member is not None
    assert (member.peer_id, member.name, member.role, member.trusted) == (PEER, "anna", role, role != "volunteer")


def test_a_strangers_credential_a_list_and_what_is_no_key_admit_nobody(known: Admission) -> None:
    strangers = [shown(grant(STRANGER, "digits-0001", "anna", role, 2e9)) for role in ROLES]
    keys = [invitation().state("peer", key) for key in (b"", b"x" * 1025)]
    for credential in (*strangers, *keys, revoked()):
        with pytest.raises(UntrustedError):
            known.introduce(credential)
    assert known.admitted(PEER) is None


def test_a_peer_is_a_member_until_its_invitation_expires(known: Admission) -> None:
    known.introduce(shown(invitation(seconds=60)))
    assert known.admitted(PEER, now=time.time() + 58)
    assert not known.admitted(PEER, now=time.time() + 61)


def test_a_revoked_peer_is_out_at_once_and_no_older_list_brings_it_back(known: Admission) -> None:
    own, again = invitation(), invitation()
    known.introduce(shown(own))
    assert [known.revoke(revoked(*ids, serial=serial)) for ids, serial in (([own.grant.id], 2), ([], 1))] == [1, 0]
    assert known.admitted(PEER) is None
    with pytest.raises(UntrustedError, match="revoked"):
        known.introduce(shown(own))
    assert known.invited(shown(own), until=own.grant.expires).peer_id == PEER  # its records stay: all would be refused
    known.introduce(shown(again))
    assert known.admitted(PEER)


WRONG = (b"", b"5", b"[1]", b'["1", []]', b"[true, []]", b"[-1, []]", b"[1, [5]]", b'[1, ["ab"]]', b"[1e400, []]")


@pytest.mark.parametrize(
    ("role", "content", "says"),
    [
        ("reducer", b"[1, []]", "a reducer does not say such a thing"),
        ("volunteer", b"[1, []]", "a volunteer does not say such a thing"),
        *(("owner", content, "no statement of that kind") for content in WRONG),
    ],
)
def test_a_list_by_another_or_of_a_wrong_shape_is_refused(
    role: Role, content: bytes, says: str, known: Admission
) -> None:
    with pytest.raises(UntrustedError, match=says):
        known.revoke(invitation(role).state("revoked", content))


@pytest.mark.parametrize("role", ROLES)
def test_a_banned_peer_or_invitation_is_out_but_never_the_owner(role: Role, known: Admission) -> None:
    own = invitation(role)
    known.introduce(shown(own))
    for banned in (PEER, own.grant.id):
        known.ban([banned])
        assert (known.admitted(PEER) is None) == (role != "owner")
        if role != "owner":
            with pytest.raises(UntrustedError, match="banned"):
                known.introduce(shown(own))
        known.ban([])
        assert known.admitted(PEER)


def test_a_fork_hears_of_what_is_revoked_and_banned_after_it_was_made(known: Admission) -> None:
    own = invitation()
    known.introduce(shown(own))
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()

    def ask() -> None:
        while theirs.recv():
            theirs.send(known.admitted(PEER) is not None)

    child = fork.Process(target=ask, daemon=True)
    child.start()
    theirs.close()  # where the fork has died, there is nothing more to wait for

    def seen_there() -> bool:
        ours.send(True)
        assert ours.poll(30)
        return bool(ours.recv())

    seen = [seen_there()]
    for banned in ([PEER], []):
        known.ban(banned)
        seen.append(seen_there())
    known.revoke(revoked(own.grant.id))
    assert [*seen, seen_there()] == [True, False, True, False]
    ours.send(False)
    child.join(10)


def test_the_board_refuses_what_does_not_fit_and_keeps_what_was_there() -> None:
    board = Board()
    board.write(a=1)
    with pytest.raises(ValueError, match="too many"):
        board.write(a="x" * (1 << 20))
    board.write(b=2)
    assert board.read() == {"a": 1, "b": 2}


def test_who_reads_the_board_while_it_is_written_has_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board()
    board.write(a=1)

    class Data:
        """Shows what a reader sees in the middle of a change."""

        @property
        def value(self) -> bytes:
            return data.value

        @value.setter
        def value(self, new: bytes) -> None:
            for written in (new[:5], new):
                data.value = written
                seen.append(board.read())

    data, seen = board._data, list[dict[str, int]]()
    monkeypatch.setattr(board, "_data", Data())
    board.write(b=2)
    assert (seen, board.read()) == ([{"a": 1}] * 2, {"a": 1, "b": 2})


# Ways into a run: a token as an argument, in a file, from standard input, from the environment.

TOKEN = write_token(grant(OWNER, "run", "anna", "volunteer", time.time() + DAY), [EXAMPLE])
Given = Callable[[str, str], tuple[list[str], dict[str, str]]]


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Given:
    """The words and the environment by which a text is given in one of the ways."""

    def by(way: str, text: str) -> tuple[list[str], dict[str, str]]:
        file = tmp_path / "token.txt"
        file.write_text(f"{text}\n", encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{text}\n"))
        words = {"argument": [text], "file": [str(file)], "input": ["-"], "environment": []}[way]
        return words, {"TRAINKIT_TOKEN": f"{text}\n"} if way == "environment" else {}

    return by


@pytest.mark.parametrize("moved", [(), (EXAMPLE.replace("4711", "4712"),)], ids=["there", "moved"])
@pytest.mark.parametrize("way", ["argument", "file", "input", "environment"])
def test_a_token_is_taken_wherever_it_is_and_addresses_beside_it_come_first(
    way: str, moved: tuple[str, ...], given: Given, capsys: pytest.CaptureFixture[str]
) -> None:
    words, env = given(way, TOKEN)
    entry = entry_of([*words, *moved], env)
    assert (entry.addresses, entry.own.grant.name) == ((*moved, EXAMPLE), "anna")
    assert ("list of processes" in capsys.readouterr().err) == (way == "argument")


SECRET = "my secret thing"


@pytest.mark.parametrize(
    ("way", "text", "says"),
    [
        ("argument", TOKEN[3:], "no token in what was given"),
        ("argument", EXAMPLE, "no token in TRAINKIT_TOKEN"),
        ("environment", TOKEN[:-3], "This is not a token."),
        *(("environment", text, "no token in TRAINKIT_TOKEN") for text in ("", SECRET)),
        *((way, text, "no token in what was given") for way, text in (("input", ""), ("file", SECRET))),
    ],
    ids=["half a word", "an address", "half a variable", "no word", "a secret", "empty input", "a secret file"],
)
def test_what_is_no_token_is_named_without_what_it_is(way: str, text: str, says: str, given: Given) -> None:
    words, env = given(way, text)
    with pytest.raises(UserError, match=says) as refused:
        entry_of(words, env)
    assert not [secret for secret in (TOKEN[60:80], SECRET) if secret in str(refused.value)]


def test_who_was_invited_by_name_is_called_so_and_guests_are_many() -> None:
    guest = write_token(grant(OWNER, "run", GUESTS, "volunteer", time.time() + DAY), [EXAMPLE])
    assert [entry_of([word], {}).name for word in (TOKEN, guest)] == ["anna", ""]


# The owner's key and lists, in the run folder.


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    return keep_key(tmp_path, key_of(tmp_path))


def test_the_key_is_made_once_and_nobody_else_can_read_it(tmp_path: Path) -> None:
    (tmp_path / f".{KEY_FILE}.partial").write_bytes(b"half")  # one that was cut while it was written is absent
    with pytest.raises(UserError, match="was not created here"):
        owner_of(tmp_path)
    before = os.umask(0)
    try:
        made = keep_key(tmp_path, key_of(tmp_path))
    finally:
        os.umask(before)
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert owner_of(tmp_path).key.public == key_of(tmp_path).public == made.key.public


def test_a_run_without_its_key_gets_no_other_while_it_has_a_revoked_list(owner: Owner, tmp_path: Path) -> None:
    owner.invite("anna", "volunteer", 60.0)
    owner.revoke("anna")
    (tmp_path / KEY_FILE).unlink()
    with pytest.raises(UserError, match="is missing"):
        key_of(tmp_path)
    (tmp_path / "revoked").unlink()
    assert key_of(tmp_path).public != owner.key.public


PEM = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
CUT = b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        *((content, 0o600, "is not the key of a run") for content in (b"", CUT, PRIVATE.private_bytes(*PEM))),
        (b"", 0o640, "Others can read"),
    ],
    ids=["empty", "cut", "of another kind", "open"],
)
def test_a_file_that_is_no_key_or_that_others_read_is_refused(
    tmp_path: Path, content: bytes, mode: int, says: str
) -> None:
    file = tmp_path / KEY_FILE
    file.write_bytes(content)
    file.chmod(mode)
    with pytest.raises(UserError, match=says) as caught:
        key_of(tmp_path)
    assert file.read_bytes() == content
    assert mode == 0o600 or caught.value.fix == f"chmod 600 {file}"


@pytest.mark.parametrize("name", ["", "x" * 65, "a\x1b[31mb", "two\nlines", "two  spaces", " ahead", "\u202egpj"])
def test_a_name_that_could_not_be_typed_as_shown_is_refused(owner: Owner, name: str) -> None:
    with pytest.raises(UserError, match="not a valid name for an invitation"):
        owner.invite(name, "volunteer", 60.0)
    assert owner.invite("Anna-Lena Müller, Raum 3 (日本) 🚀", "volunteer", 60.0).grant.expires > 0


def test_an_invitation_is_a_line_to_type_and_no_secret_is_kept_of_it(owner: Owner, tmp_path: Path) -> None:
    _, line = invite(owner, (EXAMPLE,), "anna", 7 * DAY, "reducer")
    variable, *command = line.split()
    assert command == ["python", "-m", "jobs.join"]
    name, _, token = variable.partition("=")
    made = entry_of([], {name: token}).own
    assert (made.grant.name, made.grant.role) == ("anna", "reducer")
    listed = json.loads((tmp_path / "invited.jsonl").read_bytes())
    assert (listed["name"], listed["expires"]) == ("anna", pytest.approx(time.time() + 7 * DAY, abs=60))
    kept = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert not [
        secret for secret in (made.key.seed, made.key.seed.hex().encode(), token[60:].encode()) if secret in kept
    ]


def test_a_token_says_what_to_install_to_whoever_has_no_trainkit_yet(owner: Owner, tmp_path: Path) -> None:
    needs = [f"trainkit-vision @ git+https://git.example/anna/kit@{'ab' * 20}", "torch==2.14.*", "hivemind==1.1.*"]
    keep_needs(tmp_path, needs)

    def told() -> str:
        (word,) = re.findall(r"trainkit1\.(\S+)", invite(owner, (EXAMPLE,), "anna", DAY, "volunteer")[1])
        assert len(word) < 800
        assert entry_of([], {"TRAINKIT_TOKEN": f"trainkit1.{word}"}).addresses == (EXAMPLE,)
        return base64.urlsafe_b64decode(word + "==").decode(errors="replace")

    assert json.dumps([EXAMPLE, *needs], separators=(",", ":")) in told()
    (tmp_path / "requirements.txt").write_text("torch==2.14.*\n--index-url https://evil.example\n")
    assert json.dumps([EXAMPLE]) in told()


def test_everybody_of_a_name_is_revoked_and_stays_so(owner: Owner, tmp_path: Path) -> None:
    anna, again, bo = (owner.invite(name, "volunteer", DAY) for name in ("anna", "anna", "bo"))
    expired = owner.invite("anna", "volunteer", 0.0)
    assert not revoked_in(tmp_path)
    known = Admission(owner.key.public)
    content = owner.revoke("anna")
    assert [one.grant.id.encode() in content for one in (anna, expired)] == [True, False]
    assert known.revoke(content)
    time.sleep(0.002)
    assert known.revoke(owner.revoke("bo"))  # each list is newer than the one before
    assert not known.revoke(revoked_in(tmp_path))
    for guest in (anna, again, bo):
        with pytest.raises(UntrustedError, match="revoked"):
            known.introduce(shown(guest))
    known.introduce(shown(owner.invite("anna", "volunteer", DAY)))
    with pytest.raises(UserError) as caught:
        owner.revoke("ana")
    assert caught.value.why == f"Invited to {tmp_path.name}: anna, bo."


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_what_the_disk_refuses_is_said_in_its_words(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, record: object) -> None:
        raise OSError(number, os.strerror(number))

    run = RunDir.create(tmp_path / "swarm-1", "seed: 0")
    keep_key(run.path, OWNER)
    write_addresses(run, [EXAMPLE])
    monkeypatch.setattr(jsonl, "append_jsonl", full)
    owner_of(run.path)._invited.write_text('{"name": "anna", "id": "x"}\n')
    for verb in ("invite", "revoke"):
        with pytest.raises(DiskError) as caught:
            swarm.main([verb, "anna", str(run.path)], {})
        assert caught.value.what == f"Cannot write to {run.path}."
        assert caught.value.why.startswith(f"{os.strerror(number)}. The run itself continues")
