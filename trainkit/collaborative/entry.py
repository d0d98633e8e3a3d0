"""The way into a run: a token, for those who were invited, or an address, where the run is open to all."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainkit import reading, terminal
from trainkit.collaborative import address, invitation
from trainkit.collaborative.admission import Admission
from trainkit.collaborative.invitation import NOBODY, Pass
from trainkit.errors import UserError

VARIABLE = "TRAINKIT_TOKEN"
"""A token in the environment is not in the list of processes, which everybody on a machine can read."""

SEEN = f"Who uses this machine sees the token in its list of processes; put it in {VARIABLE} or a file, or give -."
_A_YEAR = 365 * 86400.0
_LONGEST_FILE = 16_384


@dataclass(frozen=True)
class Entry:
    """Where the swarm is, and what this peer may do there."""

    addresses: tuple[str, ...]
    own: Pass
    seen: bool = False
    """Its token is an argument, which others on this machine see for as long as the process runs."""

    @property
    def invited(self) -> bool:
        """Whether somebody has invited this peer, so that it need not be an open run."""
        return self.own.grant.owner != NOBODY

    @property
    def name(self) -> str:
        """Of whom the owner has invited; empty for guests, who are many."""
        return self.own.grant.name if self.invited and self.own.grant.name != invitation.GUESTS else ""

    @property
    def text(self) -> str:
        """As `entry_of` takes it: a secret, if this peer was invited."""
        return invitation.write_token(self.own, self.addresses) if self.invited else " ".join(self.addresses)

    def admission(self) -> Admission:
        """Who else takes part. That it is an open run only its manifest says, and who owns one reached by its address:
        `read_manifest` settles both."""
        return Admission(self.own.grant.owner if self.invited else None, open_run=True)


def entry_of(words: Sequence[str], env: Mapping[str, str], *, name: str) -> Entry:
    """The way in that was given: a token, or addresses of an open run.

    Args:
        words: a token, a file that holds one, or ``-`` to read it from standard input, and addresses to try before
            its own; or addresses alone. None: it is in TRAINKIT_TOKEN.
        name: how an open run sees this peer.

    Raises UserError when it is none of these.
    """
    if not words:
        if not env.get(VARIABLE, "").strip():
            raise UserError(
                "TOKEN missing.",
                why=f"Neither a token nor an address was given, and {VARIABLE} is not set.",
                fix="Ask whoever runs it for a token, which `python -m jobs.swarm invite` makes.",
            )
        return _entry_in(env[VARIABLE], VARIABLE, name)
    given = [word for word in words if address.looks_like(word)]
    others = [word for word in words if not address.looks_like(word)]
    if not others:
        return by_address(given, name=name)
    if len(others) > 1:
        raise UserError(
            "One token at a time.", why=f"{len(others)} were given.", fix="Give one token, or addresses alone."
        )
    word = others[0]
    seen = invitation.looks_like(word)
    if word == "-":
        found = _entry_in(sys.stdin.read(_LONGEST_FILE), "Standard input", name)
    elif not seen and os.path.isfile(word):
        found = _entry_in(reading.read_start(Path(word), _LONGEST_FILE, follow=True), word, name)
    else:
        found = _entry_in(word, "", name)
    # The run has moved since it was invited to, or an anchor is nearer.
    return Entry((*(address.check(item) for item in given), *found.addresses), found.own, seen)


def _entry_in(text: str, source: str, name: str) -> Entry:
    """The token or the addresses in ``text``, which ``source`` holds; none: the user has typed it."""
    if invitation.looks_like(text):
        return with_token(text)
    if words := [word for word in text.split() if address.looks_like(word)]:
        return by_address(words, name=name)
    what = f"{source} holds neither a token nor an address." if text.strip() else f"{source} is empty."
    raise UserError(
        # Not all of it, for it may be most of a secret.
        what if source else f"{terminal.one_line(text, 40)!r} is neither a token, nor an address, nor a file with one.",
        why=f"A token begins with {invitation.PREFIX}, and the address of an open run is like {address.EXAMPLE}.",
        fix="Copy the whole line that `python -m jobs.swarm create` or `invite` has printed.",
    )


def warned(entry: Entry) -> Entry:
    """The same; on stderr a word to who has given a token as an argument."""
    if entry.seen:
        print(SEEN, file=sys.stderr, flush=True)
    return entry


def is_setting(word: str) -> bool:
    """``section.key=value``; neither a token nor an address is."""
    return re.match(r"[a-z_]+(\.[a-z_0-9]+)*=", word) is not None


def by_address(addresses: Sequence[str], *, name: str) -> Entry:
    """Into an open run."""
    found = tuple(address.check(item) for item in addresses)
    return Entry(found, invitation.open_pass(name, time.time() + _A_YEAR))


def with_token(text: str) -> Entry:
    """As somebody who was invited."""
    found = invitation.read_token(text)
    return Entry(found.addresses, found.own)
