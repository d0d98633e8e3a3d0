"""A swarm seen from outside, in about a second without torch: its run, its peers, their progress and contributions.

Where no part of hivemind is loaded yet, only those parts are that talk to a DHT. A process that is to train afterwards
calls `processes.require_hivemind` first, and has all of it.
"""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from trainkit import fileio, terminal
from trainkit.config import yaml
from trainkit.config.components import LOSS, metrics_of
from trainkit.config.loading import Loaded, load
from trainkit.errors import TrainkitError
from trainkit.run.folder import RunDir
from trainkit.run.metrics import Contribution, Contributions, TaskMetrics, described, read_metrics
from trainkit.swarm import address, admission, invitations, messages, processes
from trainkit.swarm.address import ADDRESS_FILE
from trainkit.swarm.admission import Entry
from trainkit.swarm.messages import adapted, check_own, load_text
from trainkit.workarounds import hivemind_without_torch

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

    def read() -> SwarmRecords:
        excluded = access.Excluded(identity.own, identity.peer_id, identity.admission)
        keys = [messages.MANIFEST, messages.PROGRESS, messages.CREDITS, messages.REVOKED, messages.BANNED]
        deadline = time.monotonic() + _READ_SECONDS
        while True:
            try:
                found = done(node.get_many(keys, sufficient_expiration_time=float("inf")), _READ_SECONDS)
            except (asyncio.TimeoutError, OSError):
                raise address.nobody_answers(entry.addresses[0]) from None
            manifests, progress, contributed = (messages.records_in(key, found[key]) for key in keys[:3])
            if manifests:
                return SwarmRecords(manifests, progress, contributed, identity.admission.names())
            for key in (messages.REVOKED, messages.BANNED):
                excluded.take(key, found[key])
            excluded.require_welcome()
            if time.monotonic() > deadline:
                raise messages.no_run_at(entry.addresses[0])
            time.sleep(0.3)

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
                record_validator=CompositeValidator([access.SignedRecords(identity)]),
                authorizer=access.Authorizer(identity),
            )
            try:
                node = done(created, _START_SECONDS + 5.0)
            except TrainkitError:
                raise
            except Exception:  # of libp2p's daemon, in many words
                if done(address.is_off(entry.addresses), _READ_SECONDS):
                    raise address.wrong_clock() from None
                raise address.nobody_answers(entry.addresses[0]) from None
            try:
                yield read
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


def as_peer(
    entry: Entry, overrides: Sequence[str], *, flags: Mapping[str, Any], env: Mapping[str, str], allow_code: bool
) -> Loaded:
    """The configuration of a job that joins by ``entry``: its creator's, with resources and data of this machine.

    Raises UserError when nobody answers or the run is over, for overrides of what all peers have in common, and for
    code of the creator's own that is not allowed.
    """
    own = [text for text in overrides if not text.startswith("launch.")]
    check_own(own)
    with open_reader(entry) as read:
        _, manifest = messages.manifest_of(read().manifests)
    messages.require_going_on(manifest)
    config = adapted(manifest.config, own, allow_code=allow_code)
    # Without what is of the creator's own site.
    values = config.model_dump(mode="json", exclude={"launch": True, "data": {"root", "workers"}})
    values["collaborative"] |= {"initial_peers": list(entry.addresses), "port": 0}
    return load_text(yaml.dump(values), overrides, flags=flags, env=env)


@dataclass(frozen=True)
class PeerRow:
    """What a peer says of its last round."""

    said: messages.PeerProgress
    credited: str
    """Under which name its work is counted, see `invitations.credited`."""
    peer: str
    role: Literal["creator", "public", "client"]
    """Others reach a public one; a client only calls out, as behind a router."""
    round: int
    seconds_ago: float


@dataclass(frozen=True)
class View:
    """What `swarm status` shows."""

    name: str
    round: int
    rounds: int
    running: bool
    peers: tuple[PeerRow, ...]
    loss: float | None
    """Mean over the peers' samples of their last round."""
    val: Mapping[str, float | None]
    """``loss`` and the headline of the last validation of the common model, by its creator."""
    metrics: TaskMetrics
    contributions: tuple[Contribution, ...] = ()
    """By the account of the run's creator, most samples first."""

    @property
    def samples_per_sec(self) -> float:
        """Of all peers together."""
        return sum(row.said.samples_per_sec for row in self.peers)


@contextmanager
def looking(reference: str | None, env: Mapping[str, str]) -> Iterator[Callable[[], View]]:
    """Reach a swarm by a token, of a run that was created here, or of the newest run here. Each call looks anew.

    Without a reference a token in TRAINKIT_TOKEN comes first; ``-``: it is in standard input; a file may hold it.

    Raises:
        UserError: nobody answers, or there is no such run.
    """
    run_dir, entry, text = None, None, reference or ""
    is_entry = reference == "-" or invitations.looks_like(text) or os.path.isfile(text)
    if is_entry or (reference is None and env.get(admission.VARIABLE)):
        entry = admission.entry_of([text] if text else [], env)
    else:
        run_dir = admission.run_with(ADDRESS_FILE, reference, env, fix="Give a TOKEN")
        addresses = admission.addresses_of(run_dir)
        if (run_dir.path / admission.KEY_FILE).exists():  # its owner needs no token
            own = admission.own_pass(admission.owner_of(run_dir.path).key, "status", "volunteer")
            entry = admission.Entry(addresses, own)
    # A run in a folder here is shown from its records when nobody answers, or it has ended since.
    gone = suppress(TrainkitError) if run_dir is not None else nullcontext()
    with ExitStack() as held:
        read: Callable[[], SwarmRecords] | None = None
        if entry is not None:
            with gone:
                read = held.enter_context(open_reader(entry))

        def look() -> View:
            with gone:
                if read is not None:
                    return view_of(read())
            assert run_dir is not None
            return _from_records(run_dir)

        yield look


def view_of(told: SwarmRecords) -> View:
    """What is shown of what a swarm has published."""
    creator, manifest = messages.manifest_of(told.manifests)
    config, now = adapted(manifest.config, (), allow_code=True), time.time()
    agreed, progress, validated = config.collaborative, told.progress, told.progress.get(creator)
    done = messages.RoundClock(agreed.round_seconds, manifest.first_round, agreed.rounds).index(now)
    rows = [
        PeerRow(
            said=own,
            credited=terminal.name(invitations.credited("" if peer == creator else told.names.get(peer, ""), own.name)),
            peer=peer,
            role="creator" if peer == creator else "client" if own.client else "public",
            round=min(own.round + 1, agreed.rounds),
            seconds_ago=max(0.0, now - own.time),
        )
        for peer, own in progress.items()
    ]
    rows.sort(key=lambda row: (row.role != "creator", row.said.name, row.peer))
    samples = sum(row.said.samples for row in rows)
    # Of a task of ours: a stranger's file is not read for its metrics.
    metrics = TaskMetrics("loss", {"loss": LOSS}) if ":" in config.task.name else metrics_of(config.task.name)
    headline = validated.val_headline if validated is not None else None
    fits = headline is not None and metrics.metrics[metrics.headline].fits(headline)
    return View(
        name=terminal.one_line(manifest.name, 128),
        round=min(done + 1, agreed.rounds),
        rounds=agreed.rounds,
        running=not manifest.stopped and done < agreed.rounds,
        peers=tuple(rows),
        loss=sum(row.said.loss * row.said.samples for row in rows) / samples if samples else None,
        val={"loss": validated and validated.val_loss, metrics.headline: headline if fits else None},
        metrics=metrics,
        contributions=tuple(told.contributions.get(creator, ())),
    )


def _from_records(run_dir: RunDir) -> View:
    """What the run folder says of a swarm that does not answer any more."""
    last, validated = ((read_metrics(run_dir, split) or [{}])[-1] for split in ("train", "val"))
    metrics = described(run_dir)
    measured = {key: validated.get(key) for key in ("loss", metrics.headline)}
    return View(
        name=run_dir.name,
        round=int(last.get("round") or 0),
        rounds=load(str(run_dir.config)).config.collaborative.rounds,
        running=False,
        peers=(),
        loss=last.get("loss"),
        val={key: value if fileio.is_number(value) else None for key, value in measured.items()},
        metrics=metrics,
        contributions=tuple(Contributions.of(run_dir).best_first()),
    )
