"""What a swarm publishes, read from outside in about a second: no torch, no process that trains, nothing published."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from trainkit.collaborative import address, processes, wall_clock
from trainkit.collaborative.entry import Entry
from trainkit.collaborative.light import put_up_packages
from trainkit.errors import TrainkitError

if TYPE_CHECKING:
    from trainkit.collaborative.trust import Identity

T = TypeVar("T")

_START_SECONDS = 15.0
_READ_SECONDS = 10.0


@dataclass(frozen=True)
class Told:
    """What was found at one time. Each by peer id."""

    manifests: dict[str, Any]
    progress: dict[str, Any]
    contributions: dict[str, Any]
    names: Mapping[str, str] = field(default_factory=dict)
    """By which they were invited."""


class Reader:
    """A node that only asks."""

    def __init__(self, loop: asyncio.AbstractEventLoop, node: Any, peers: Sequence[str], identity: Identity) -> None:
        from trainkit.collaborative.excluded import Excluded

        self._loop, self._node, self._peers, self._admission = loop, node, peers, identity.admission
        self._excluded = Excluded(identity.own, identity.peer_id, identity.admission)

    def read(self) -> Told:
        """Ask for everything at once.

        Raises UserError when nobody answers, or there is no run; RefusedError for who is out by now.
        """
        from trainkit.collaborative.messages import credits_in, manifests_in, no_run_at, progress_in
        from trainkit.collaborative.signed_records import BANNED, CREDITS, MANIFEST, PROGRESS, REVOKED

        deadline = time.monotonic() + _READ_SECONDS
        while True:
            keys = [MANIFEST, PROGRESS, CREDITS, REVOKED, BANNED]
            asked = self._node.get_many(keys, sufficient_expiration_time=float("inf"))
            try:
                found = self._loop.run_until_complete(asyncio.wait_for(asked, _READ_SECONDS))
            except (asyncio.TimeoutError, OSError):
                raise address.nobody_answers(self._peers[0]) from None
            if manifests := manifests_in(found[MANIFEST]):
                names = self._admission.names()
                return Told(manifests, progress_in(found[PROGRESS]), credits_in(found[CREDITS]), names)
            for key in (REVOKED, BANNED):
                self._excluded.take(key, found[key])
            self._excluded.require_welcome()
            if time.monotonic() > deadline:
                raise no_run_at(self._peers[0])
            time.sleep(0.3)


@contextmanager
def open_reader(entry: Entry) -> Iterator[Reader]:
    """Reach the swarm that ``entry`` leads to, and leave nothing behind.

    Raises UserError when nobody answers there.
    """
    put_up_packages()
    from hivemind.dht.node import DHTNode
    from hivemind.dht.validation import CompositeValidator

    from trainkit.collaborative import trust
    from trainkit.collaborative.bounds import bound_records

    loop = asyncio.new_event_loop()
    try:
        with trust.identity(None, entry.own, entry.admission()) as identity:
            processes.subprocesses_die_with_us()
            bound_records()
            created = DHTNode.create(
                initial_peers=list(entry.addresses),
                client_mode=True,
                host_maddrs=["/ip4/127.0.0.1/tcp/0"],  # libp2p insists on listening; nobody is told of it
                identity_path=str(identity.path),
                check_if_identity_free=False,  # it is a new one
                nat_port_map=False,
                startup_timeout=_START_SECONDS,
                # Of what is asked twice, the newest is wanted.
                cache_locally=False,
                record_validator=CompositeValidator(identity.validators()),
                authorizer=identity.authorizer(),
            )
            try:
                node = _done(loop, created, _START_SECONDS + 5.0)
            except TrainkitError:
                raise
            except Exception:  # of libp2p's daemon, in many words
                if _done(loop, wall_clock.is_off(entry.addresses), _READ_SECONDS):
                    raise wall_clock.wrong_clock() from None
                raise address.nobody_answers(entry.addresses[0], invited=entry.invited) from None
            try:
                yield Reader(loop, node, entry.addresses, identity)
            finally:
                with suppress(Exception):  # on the way out
                    _done(loop, node.shutdown(), 3.0)
    finally:
        _cancel_all(loop)
        loop.close()


def _done(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], seconds: float) -> T:
    return loop.run_until_complete(asyncio.wait_for(work, seconds))


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    with suppress(Exception):
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
