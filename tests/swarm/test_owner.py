"""The owner's key and lists, in the run folder."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from trainkit.errors import UserError
from trainkit.swarm.admission import KEY_FILE, Admission, Owner, credential, keep_key, key_of, owner_of
from trainkit.swarm.invitations import Key, UntrustedError, write_token

ADDRESS = "/ip4/203.0.113.7/tcp/4711/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
DAY = 86400.0


def made_in(folder: Path) -> Owner:
    return keep_key(folder, key_of(folder))


def test_the_key_is_made_once_and_nobody_else_can_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = made_in(tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert owner_of(tmp_path).key.public == made_in(tmp_path).key.public == made.key.public
    assert sorted(path.name for path in tmp_path.iterdir()) == [KEY_FILE]


def test_a_run_that_has_a_key_gets_no_other(tmp_path: Path) -> None:
    made = made_in(tmp_path)
    with pytest.raises(AssertionError, match="one key"):
        keep_key(tmp_path, Key.generate())
    assert owner_of(tmp_path).key.public == made.key.public


def test_without_a_key_nobody_is_the_owner(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="was not created here"):
        owner_of(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"nonsense", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"]
)
def test_a_file_that_is_no_key_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / KEY_FILE).write_bytes(content)
    (tmp_path / KEY_FILE).chmod(0o600)
    with pytest.raises(UserError, match="is no key of a run"):
        made_in(tmp_path)
    assert (tmp_path / KEY_FILE).read_bytes() == content


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (tmp_path / KEY_FILE).write_bytes(key)
    (tmp_path / KEY_FILE).chmod(0o600)
    with pytest.raises(UserError, match="is no key of a run"):
        owner_of(tmp_path)


def test_a_key_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    made_in(tmp_path)
    (tmp_path / KEY_FILE).chmod(0o640)
    with pytest.raises(UserError, match="Others can read") as caught:
        owner_of(tmp_path)
    assert caught.value.fix == f"chmod 600 {tmp_path / KEY_FILE}"


def test_a_key_that_was_cut_while_it_was_written_is_absent(tmp_path: Path) -> None:
    (tmp_path / f".{KEY_FILE}.partial").write_bytes(b"half")
    assert made_in(tmp_path).key.public == owner_of(tmp_path).key.public


@pytest.mark.parametrize("name", ["", "x" * 65, "a\x1b[31mb", "two\nlines", "two  spaces", " ahead", "\u202egpj"])
def test_a_name_that_could_not_be_typed_as_it_is_shown_is_refused(tmp_path: Path, name: str) -> None:
    owner = Owner(tmp_path, Key(b"o" * 32))
    with pytest.raises(UserError, match="no name for an invitation"):
        owner.invite(name, "volunteer", 60.0)
    assert owner.invite("Anna-Lena Müller, Raum 3 (日本) 🚀", "volunteer", 60.0).grant.expires > 0
    assert len(list(tmp_path.iterdir())) == 1


def test_the_list_of_invitations_has_no_secret_in_it(tmp_path: Path) -> None:
    owner = made_in(tmp_path)
    invited = owner.invite("anna", "reducer", 7 * DAY)
    token = write_token(invited, [ADDRESS])
    left = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (line,) = left["invited.jsonl"].decode().splitlines()
    assert json.loads(line)["name"] == "anna"
    assert json.loads(line)["expires"] == pytest.approx(time.time() + 7 * DAY, abs=5)
    for content in left.values():
        assert invited.key.seed not in content
        assert invited.key.seed.hex().encode() not in content
        assert token[60:].encode() not in content


def test_everybody_of_a_name_is_revoked_and_stays_so_and_others_are_not(tmp_path: Path) -> None:
    owner = made_in(tmp_path)
    anna, again, bo = (owner.invite(name, "volunteer", DAY) for name in ("anna", "anna", "bo"))
    assert owner.revoked() is None
    owner.revoke("anna")
    statement = owner.revoke("bo")
    assert owner_of(tmp_path).revoked() == statement
    admission = Admission(owner.key.public)
    assert admission.revoke(statement)
    for invited in (anna, again, bo):
        with pytest.raises(UntrustedError, match="revoked"):
            admission.introduce(credential(invited, b"key"))
    admission.introduce(credential(owner.invite("anna", "volunteer", DAY), b"key"))


def test_each_list_is_newer_than_the_one_before(tmp_path: Path) -> None:
    owner = made_in(tmp_path)
    owner.invite("anna", "volunteer", DAY)
    admission = Admission(owner.key.public)
    for _ in range(3):
        time.sleep(0.002)
        assert admission.revoke(owner.revoke("anna"))


def test_an_invitation_that_has_expired_is_not_named_any_more(tmp_path: Path) -> None:
    owner = made_in(tmp_path)
    expired, alive = owner.invite("anna", "volunteer", 0.0), owner.invite("anna", "volunteer", DAY)
    content = owner.revoke("anna")
    assert alive.grant.id.encode() in content
    assert expired.grant.id.encode() not in content


def test_who_was_never_invited_cannot_be_revoked(tmp_path: Path) -> None:
    owner = made_in(tmp_path)
    owner.invite("anna", "volunteer", DAY)
    with pytest.raises(UserError) as caught:
        owner.revoke("ana")
    assert caught.value.why == f"Invited to {tmp_path.name}: anna."


@pytest.mark.parametrize("name", ["", "a" * 65, "an\nna", "\x1b[31m"])
def test_a_name_can_be_printed(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError):
        made_in(tmp_path).invite(name, "volunteer", DAY)
