"""A swarm seen from outside: its run, its peers, their progress and contributions."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from trainkit.common import jsonl, terminal
from trainkit.common.errors import TrainkitError
from trainkit.config import yaml
from trainkit.config.loading import Loaded, load
from trainkit.config.task_metrics import LOSS, TaskMetrics, metrics_of
from trainkit.run.contributions import Contribution, Contributions
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics, task_metrics
from trainkit.swarm.identity import invitations
from trainkit.swarm.identity.invitations import TOKEN_VARIABLE, Entry, entry_of
from trainkit.swarm.network import processes
from trainkit.swarm.peer import owner
from trainkit.swarm.peer.place import ADDRESS_FILE
from trainkit.swarm.peer.same_run import adapted, check_own, load_text
from trainkit.swarm.protocol import messages
from trainkit.swarm.protocol.addresses import nobody_answers

_READ = (messages.MANIFEST, messages.PROGRESS, messages.CREDITS)
_READ_SECONDS = 10.0


@dataclass(frozen=True)
class SwarmRecords:
    """Records that were found at one time. Each by peer id."""

    manifests: dict[str, Any]
    progress: dict[str, Any]
    contributions: dict[str, Any]
    names: Mapping[str, str] = field(default_factory=dict)
    """Names by which they were invited."""


@contextmanager
def open_reader(entry: Entry) -> Iterator[Callable[[], SwarmRecords]]:
    """Reach the swarm that ``entry`` leads to with a node that only asks, and leave nothing behind.

    Each call of what is yielded asks for everything at once. It raises UserError when nobody answers, or there is no
    run; RefusedError when this peer is out by now.

    Raises UserError when nobody answers there.
    """
    processes.require_hivemind()
    from trainkit.swarm.network import dht, signed_records

    with (
        signed_records.identity(None, entry.own) as identity,
        dht.open_dht(identity, peers=entry.addresses, introduces=False) as node,
    ):

        def read() -> SwarmRecords:
            dht.read_manifest(node, entry.addresses)
            try:
                found = node.ask(_READ).result(_READ_SECONDS)
            except (TimeoutError, OSError):
                raise nobody_answers(entry.addresses[0]) from None
            manifests, progress, contributed = (messages.records_in(key, found[key]) for key in _READ)
            return SwarmRecords(manifests, progress, contributed, node.in_dht(dht.known_names, _READ_SECONDS, {}))

        yield read


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
    """Row of a peer, by its word on its last round."""

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
    """View of a swarm, as `swarm status` shows it."""

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
    """Account of the run's creator, most samples first."""

    @property
    def samples_per_sec(self) -> float:
        """Samples per second of all peers together."""
        return sum(row.said.samples_per_sec for row in self.peers)


@contextmanager
def looking(reference: str | None, env: Mapping[str, str]) -> Iterator[Callable[[], View]]:
    """Reach a swarm by a token, of a run that was created here, or of the newest run here. Each call looks anew.

    Without a reference a token in TRAINKIT_TOKEN comes first; ``-``: it is in standard input; a file may hold it.

    Raises:
        UserError: nobody answers, or there is no such run.
    """
    run_dir = None
    entry = None
    text = reference or ""
    is_entry = reference == "-" or invitations.looks_like(text) or os.path.isfile(text)
    if is_entry or (reference is None and env.get(TOKEN_VARIABLE)):
        entry = entry_of([text] if text else [], env)
    else:
        run_dir = owner.run_with(ADDRESS_FILE, reference, env, fix="Give a TOKEN")
        addresses = owner.addresses_of(run_dir)
        if (run_dir.path / owner.KEY_FILE).exists():  # its owner needs no token
            entry = Entry(addresses, owner.own_pass(owner.owner_of(run_dir.path).key, "status", "volunteer"))
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
    """Return what is shown of what a swarm has published."""
    creator, manifest = messages.manifest_of(told.manifests)
    config = adapted(manifest.config, (), allow_code=True)
    now = time.time()
    agreed = config.collaborative
    validated = told.progress.get(creator)
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
        for peer, own in told.progress.items()
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
    """Return what the run folder says of a swarm that does not answer any more."""
    last, validated = ((read_metrics(run_dir, split) or [{}])[-1] for split in ("train", "val"))
    metrics = task_metrics(run_dir)
    val = {key: validated.get(key) for key in ("loss", metrics.headline) if jsonl.is_number(validated.get(key))}
    return View(
        name=run_dir.name,
        round=int(last.get("round") or 0),
        rounds=load(str(run_dir.config)).config.collaborative.rounds,
        running=False,
        peers=(),
        loss=last.get("loss"),
        val={"loss": None, metrics.headline: None} | val,
        metrics=metrics,
        contributions=tuple(Contributions.of(run_dir).best_first()),
    )
