"""What a swarm publishes, read from outside in about a second: no torch, no process that trains, nothing published."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trainkit import fileio, programs
from trainkit.config import yaml
from trainkit.config.loading import Loaded, load
from trainkit.errors import RunFailedError, TrainkitError, error_from_json
from trainkit.swarm import address, processes
from trainkit.swarm.admission import Entry, entry_of
from trainkit.swarm.spec import adapted, check_own
from trainkit.workarounds import hivemind_without_torch

if TYPE_CHECKING:
    from trainkit.swarm.access import Identity


T = TypeVar("T")

_START_SECONDS = 15.0
_READ_SECONDS = 10.0


@dataclass(frozen=True)
class SwarmRecords:
    """What was found at one time. Each by peer id."""

    manifests: dict[str, Any]
    progress: dict[str, Any]
    contributions: dict[str, Any]
    names: Mapping[str, str] = field(default_factory=dict)
    """By which they were invited."""


@contextmanager
def open_reader(entry: Entry) -> Iterator[Callable[[], SwarmRecords]]:
    """Reach the swarm that ``entry`` leads to with a node that only asks, and leave nothing behind.

    Each call of what is yielded asks for everything at once. It raises UserError when nobody answers, or there is no
    run; RefusedError when this peer is out by now.

    Raises UserError when nobody answers there.
    """
    if not hivemind_without_torch():
        processes.require_hivemind()
    from hivemind.dht.node import DHTNode
    from hivemind.dht.validation import CompositeValidator

    from trainkit.swarm import access

    loop = asyncio.new_event_loop()

    def done(work: Coroutine[Any, Any, T], seconds: float) -> T:
        return loop.run_until_complete(asyncio.wait_for(work, seconds))

    try:
        with access.identity(None, entry.own, entry.admission()) as identity:
            access.bound_node()
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
                node = done(created, _START_SECONDS + 5.0)
            except TrainkitError:
                raise
            except Exception:  # of libp2p's daemon, in many words
                if done(address.is_off(entry.addresses), _READ_SECONDS):
                    raise address.wrong_clock() from None
                raise address.nobody_answers(entry.addresses[0], invited=entry.invited) from None
            try:
                yield partial(_read, node, done, entry.addresses[0], identity)
            finally:
                with suppress(Exception):  # on the way out
                    done(node.shutdown(), 3.0)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        with suppress(Exception):
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()


def _read(node: Any, done: Callable[[Any, float], Any], peer: str, identity: Identity) -> SwarmRecords:
    from trainkit.swarm.access import BANNED, CREDITS, MANIFEST, PROGRESS, REVOKED
    from trainkit.swarm.bans import Excluded
    from trainkit.swarm.messages import credits_in, manifests_in, no_run_at, progress_in

    excluded = Excluded(identity.own, identity.peer_id, identity.admission)
    deadline = time.monotonic() + _READ_SECONDS
    while True:
        keys = [MANIFEST, PROGRESS, CREDITS, REVOKED, BANNED]
        try:
            found = done(node.get_many(keys, sufficient_expiration_time=float("inf")), _READ_SECONDS)
        except (asyncio.TimeoutError, OSError):
            raise address.nobody_answers(peer) from None
        if manifests := manifests_in(found[MANIFEST]):
            names = identity.admission.names()
            return SwarmRecords(manifests, progress_in(found[PROGRESS]), credits_in(found[CREDITS]), names)
        for key in (REVOKED, BANNED):
            excluded.take(key, found[key])
        excluded.require_welcome()
        if time.monotonic() > deadline:
            raise no_run_at(peer)
        time.sleep(0.3)


# What a swarm's run is configured as, asked by a process of its own: the one that asks may import hivemind later.
#
# python -m trainkit.swarm.reader      where the swarm is, in a line of standard input -> JSON

_SECONDS = 60.0


def run_at(entry: Entry) -> str:
    """The configuration, as YAML, of the run that ``entry`` leads to, as its creator publishes it.

    Raises UserError when nobody answers.
    """
    what = "The swarm could not be asked for its settings."
    try:
        answer = programs.ask([sys.executable, "-m", "trainkit.swarm.reader"], text=f"{entry.text}\n", seconds=_SECONDS)
    except programs.NoAnswer as error:
        words = error.words.replace(sys.executable, "The process that asks")
        raise RunFailedError(
            what,
            why=f"{words}: this machine is overloaded, or its network is.",
            fix="Try again; `python -m jobs.swarm doctor` with the same token says what is in the way.",
        ) from None
    try:
        told: dict[str, Any] = fileio.parse(answer.out)
    except ValueError:
        raise RunFailedError(
            what,
            why=(answer.err.strip().splitlines() or ["Nothing was said."])[-1][:200],
            fix="Try `python -m jobs.swarm status` with the same token; that traceback is ours to mend.",
        ) from None
    if "error" in told:
        raise error_from_json(told["error"])
    return str(told["config"])


def as_peer(
    entry: Entry,
    overrides: Sequence[str],
    *,
    flags: Mapping[str, tuple[Any, str]],
    env: Mapping[str, str],
    allow_code: bool,
) -> Loaded:
    """The configuration of a job that joins by ``entry``: its creator's, with resources and data of this machine.

    Raises UserError for overrides of what all peers have in common, and for code of the creator's own that is not
    allowed.
    """
    own = [text for text in overrides if not text.startswith("launch.")]
    config = run_at(entry)
    check_own(own)
    adapted(config, own, allow_code=allow_code)
    with tempfile.TemporaryDirectory(prefix="trainkit-") as folder:
        file = Path(folder) / "hivemind-peer.yaml"
        fileio.write(file, config)
        values, _ = yaml.read(file)
        values.pop("launch", None)  # of the creator's own site
        values["data"] = {key: value for key, value in values["data"].items() if key not in ("root", "workers")}
        values["collaborative"] |= {"initial_peers": list(entry.addresses), "port": 0}
        fileio.write(file, yaml.dump(values))
        return load(str(file), list(overrides), flags=flags, env=env)


def main() -> int:
    """Ask, and print the answer."""
    from trainkit.swarm.messages import manifest_of, require_going_on

    try:
        entry = entry_of(sys.stdin.readline().split(), {}, name="ask")
        with open_reader(entry) as read:
            _, manifest = manifest_of(read().manifests, entry.addresses)
        require_going_on(manifest)
        print(json.dumps({"config": manifest.config}))
    except TrainkitError as error:
        print(json.dumps({"error": error.to_json()}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
