"""Signatures, invitations and tokens: every way in which they can be forged, and what is said."""

import base64
import json
import time
from dataclasses import replace
from typing import Any

import pytest

from trainkit.common.errors import UserError
from trainkit.swarm.identity import invitations
from trainkit.swarm.identity.invitations import Grant, Key, Pass, UntrustedError, looks_like, read_token, write_token
from trainkit.swarm.protocol.addresses import EXAMPLE

OWNER = Key(b"o" * 32)
STRANGER = Key(b"s" * 32)
NOW = 1_800_000_000.0


def anna(role: invitations.Role = "volunteer", owner: Key = OWNER, expires: float = NOW + 60) -> Pass:
    return invitations.grant(owner, "digits-0001", "anna", role, expires)


def read(data: bytes, purpose: str = "peer", *, now: float = NOW) -> invitations.Statement:
    return invitations.read_statement(data, purpose, owner=OWNER.public, now=now)


def refusal(data: bytes, purpose: str = "peer", **options: Any) -> str:
    with pytest.raises(UntrustedError) as caught:
        read(data, purpose, **options)
    return str(caught.value)


# Signatures


def test_a_signature_is_for_one_purpose_and_one_content() -> None:
    signature = OWNER.sign("grant", b"content")
    assert invitations.is_signed(OWNER.public, signature, "grant", b"content")
    assert not invitations.is_signed(OWNER.public, signature, "gran", b"tcontent")


# Statements


def by(owner: Key, granted: Grant, key: Key = STRANGER) -> Pass:
    return Pass(granted, owner.sign("grant", granted.to_bytes()), key)


UNTIL = int(NOW + 60)
OWNERS = "the owner has not signed it"
NOT_ITS_KEY = "it was not signed with the key of its invitation"


@pytest.mark.parametrize(
    ("own", "purpose", "says"),
    [
        pytest.param(anna(), "state", NOT_ITS_KEY, id="for another purpose"),
        pytest.param(replace(anna(), key=STRANGER), "peer", NOT_ITS_KEY, id="without its secret key"),
        pytest.param(anna(owner=STRANGER), "peer", "it is an invitation to another run", id="by somebody else"),
        pytest.param(
            by(STRANGER, Grant("digits-0001", OWNER.public, STRANGER.public, "eve", "owner", UNTIL)), "peer", OWNERS,
            id="in the owner's name",
        ),
        *(
            pytest.param(replace(anna(), grant=replace(anna().grant, **change)), "peer", OWNERS, id=f"changed {change}")
            for change in ({"role": "reducer"}, {"expires": UNTIL + 9999}, {"name": "bo"}, {"key": STRANGER.public})
        ),
        pytest.param(
            by(STRANGER, Grant("open", bytes(32), STRANGER.public, "eve", "volunteer", UNTIL)), "peer",
            "it is an invitation to another run", id="by nobody, as in open runs of version 0.1",
        ),
    ],
)  # fmt: skip
def test_who_was_not_invited_so_by_the_owner_is_not_believed(own: Pass, purpose: str, says: str) -> None:
    assert refusal(own.state("peer", b"x"), purpose) == says


def test_what_an_invited_peer_says_is_believed_until_its_invitation_ends() -> None:
    said = anna("reducer", expires=NOW + 60).state("peer", b"my key")
    found = read(said, now=NOW + 59.9)
    assert (found.grant.name, found.grant.role, found.grant.run) == ("anna", "reducer", "digits-0001")
    assert found.content == b"my key"
    assert refusal(said, now=NOW + 60) == "its invitation has expired"


def test_what_is_cut_short_lengthened_or_changed_in_any_byte_is_refused() -> None:
    said = anna().state("peer", b"x")
    refusal(said + b"\x00")
    for at in range(0, len(said), 11):
        refusal(said[:at])
        refusal(said[:at] + bytes([said[at] ^ 1]) + said[at + 1 :])
    assert refusal(anna().state("peer", b"x" * 70_001)) == "it is too long"


def fields(owner: object = "A" * 43, name: object = "anna", role: str = "volunteer", until: object = 19e8) -> bytes:
    until = int(until) if isinstance(until, float) else until
    return json.dumps(["r", owner, "A" * 43, name, role, until]).encode()


@pytest.mark.parametrize(
    "fields",
    [
        *(b"[]", b"null", b"{}", b"\xff", b"[" * 60_000),
        *(fields(owner="YQ"), fields(owner="A" * 42 + "!"), fields(owner=7), fields(role="king")),
        *(fields(name=name) for name in ("an\x1b[31mna", "a" * 65, 5)),
        *(fields(until=until) for until in ("soon", True, 1 << 41, 0)),
        fields().replace(b"1900000000", b"1e400"),
    ],
)
def test_a_grant_has_its_types_and_sizes_or_is_none(fields: bytes) -> None:
    with pytest.raises(UntrustedError):
        Grant.from_bytes(fields)


# Tokens


def later() -> Pass:
    return anna(expires=time.time() + 60)


def test_a_token_is_one_word_that_carries_the_pass_and_the_addresses() -> None:
    own = later()
    text = write_token(own, [EXAMPLE])
    assert (text[:10], len(text.split()), len(text) < 1000) == ("trainkit1.", 1, True)
    found, addresses = read_token(text)
    assert addresses == (EXAMPLE,)
    assert (found.grant, found.signature, found.key.seed) == (own.grant, own.signature, own.key.seed)
    assert str(own.key.seed) not in repr(found)  # a secret is in no representation
    assert own.key.seed.hex() not in repr(own)


def test_a_token_is_read_wrapped_by_a_mail_program_or_in_its_whole_line() -> None:
    text = write_token(later(), [EXAMPLE])
    for line in (f"  TRAINKIT_TOKEN={text} python -m jobs.join\n", f"export TRAINKIT_TOKEN='{text}'"):
        assert looks_like(line)
        assert read_token(line)[1] == (EXAMPLE,)
    assert read_token(f"\n  {text[:70]}\n {text[70:]} \n")[1] == (EXAMPLE,)
    assert not [name for name in ("trainkit-0001", "runs/trainkit1.old", "/home/me/trainkit", "") if looks_like(name)]


def test_a_token_with_any_letter_changed_is_refused_and_not_repeated() -> None:
    text = write_token(later(), [EXAMPLE])
    broken = [text[:size] for size in (0, 5, 10, 11, 60, 200, len(text) - 1)]
    broken += [text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :] for at in range(10, len(text), 13)]
    broken += [text + "A", text + "=", text + "!", text.replace("1.", "2."), text[:50] + "+/" + text[52:], "A" * 9000]
    for wrong in broken:
        with pytest.raises(UserError) as caught:
            read_token(wrong)
        assert caught.value.what == "This is not a token."
        assert wrong[12:40] not in str(caught.value) or len(wrong) < 40


def test_a_token_that_leads_nowhere_is_refused() -> None:
    own = later()
    for where in ([], ["/ip4/203.0.113.7/tcp/4711"], ["x" * 5000], "text", [5]):
        body = invitations.pack([own.grant.to_bytes(), own.signature, own.key.seed, json.dumps(where).encode()])
        text = base64.urlsafe_b64encode(invitations.pack([body, own.key.sign("token", body)])).decode().rstrip("=")
        with pytest.raises(UserError):
            read_token("trainkit1." + text)


def test_a_token_that_has_expired_says_when() -> None:
    text = write_token(anna(expires=NOW), [EXAMPLE])
    with pytest.raises(UserError) as caught:
        read_token(text, now=NOW)
    assert caught.value.what == "The invitation of anna to digits-0001 has expired."
    assert "2027-01-15 08:00 UTC" in caught.value.why
