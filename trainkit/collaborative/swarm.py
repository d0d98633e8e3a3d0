"""A swarm seen from outside: its run, its peers, what they have reached, and who has contributed how much."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from trainkit import reading, terminal
from trainkit.collaborative import address, invitation, reader
from trainkit.collaborative.address import ADDRESS_FILE
from trainkit.collaborative.clock import RoundClock, UpdateClock
from trainkit.collaborative.entry import VARIABLE, Entry, by_address, entry_of, warned
from trainkit.collaborative.inviting import addresses_of, run_with
from trainkit.collaborative.owner import KEY_FILE, own_pass, owner_of
from trainkit.errors import TrainkitError, UserError
from trainkit.records.contributions import Contribution, Contributions
from trainkit.records.metrics import read_metrics
from trainkit.records.rundir import RunDir

if TYPE_CHECKING:
    from trainkit.collaborative.messages import Manifest, Progress

# A stranger may publish as many records as it likes, each under a key of its own.
_MOST_PEERS = 5000


@dataclass(frozen=True)
class PeerRow:
    """What a peer says of its last round."""

    name: str
    """As it calls itself."""
    credited: str
    """Under which name its work is counted, see `invitation.credited`."""
    peer: str
    role: Literal["creator", "public", "client"]
    """Others reach a public one; a client only calls out, as behind a router."""
    round: int
    group: int
    parts: int
    """Parts of the average that reached it, of so many ``expected``; 0 of 0: not said."""
    expected: int
    samples: int
    samples_per_sec: float
    loss: float
    sent: int
    """Bytes, for the last round."""
    received: int
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
    """``loss`` and ``acc1`` of the last validation of the common model, by its creator."""
    contributions: tuple[Contribution, ...] = ()
    """By the account of the run's creator, most samples first."""
    history: tuple[Mapping[str, Any], ...] = ()
    """Last validation records, of a run in a folder here."""

    @property
    def samples_per_sec(self) -> float:
        """Of all peers together."""
        return sum(row.samples_per_sec for row in self.peers)


@contextmanager
def looking(reference: str | None, env: Mapping[str, str]) -> Iterator[Callable[[], View]]:
    """Reach a swarm by a token, at an address, of a run, or of the newest run here that has one. Each call looks anew.

    Without a reference a token in TRAINKIT_TOKEN comes first; ``-``: it is in standard input; a file may hold it.

    Raises:
        UserError: nobody answers at the address, or there is no such run.
    """
    with ExitStack() as held:
        if reference == "-" or (reference is None and env.get(VARIABLE)) or _is_entry(reference or ""):
            entry = warned(entry_of([reference] if reference else [], env, name="status"))
            asked = held.enter_context(reader.open_reader(entry))
            yield lambda: view_of(asked.read(), entry.addresses, None)
            return
        run_dir = run_seen(reference, env)
        file = run_dir.path / ADDRESS_FILE
        if not file.is_file():
            raise UserError(
                f"{run_dir.name} is not a swarm.",
                why=f"It has no {ADDRESS_FILE}.",
                fix="`python -m jobs.status` shows it.",
            )
        addresses = addresses_of(run_dir)
        try:
            asked = held.enter_context(reader.open_reader(_owners_entry(run_dir, addresses)))
        except TrainkitError:
            yield lambda: _from_records(run_dir)
            return

        def look() -> View:
            try:
                return view_of(asked.read(), addresses, run_dir)
            except TrainkitError:  # it has ended since
                return _from_records(run_dir)

        yield look


def _is_entry(reference: str) -> bool:
    return address.looks_like(reference) or invitation.looks_like(reference) or os.path.isfile(reference)


def _owners_entry(run_dir: RunDir, addresses: tuple[str, ...]) -> Entry:
    """Whoever has the run's key needs no token."""
    if not (run_dir.path / KEY_FILE).exists():
        return by_address(addresses, name="status")
    return Entry(addresses, own_pass(owner_of(run_dir.path).key, "status", "volunteer"))


def run_seen(reference: str | None, env: Mapping[str, str]) -> RunDir:
    """The run of that name or path, or the newest one here through which others can reach a swarm.

    Raises UserError when there is none.
    """
    return run_with(ADDRESS_FILE, reference, env, fix="Give a TOKEN")


def view_of(told: reader.Told, addresses: Sequence[str], run_dir: RunDir | None) -> View:
    """What is shown of what a swarm has published.

    Raises UserError when it is not clear which run it is.
    """
    from trainkit.collaborative.messages import manifest_of

    creator, manifest = manifest_of(told.manifests, addresses)
    clock, now = _clock_of(manifest, told.progress, creator), time.time()
    told_of = list(told.progress.items())[:_MOST_PEERS]
    rows = [_row(peer, own, creator, told.names.get(peer, ""), clock, now) for peer, own in told_of]
    rows.sort(key=lambda row: (row.role != "creator", row.name, row.peer))
    samples = sum(row.samples for row in rows)
    validated = told.progress.get(creator)
    return View(
        name=terminal.one_line(manifest.name, 128),
        round=min(clock.index(now) + 1, clock.count),
        rounds=clock.count,
        running=not manifest.stopped and not clock.is_over(now),
        peers=tuple(rows),
        loss=sum(row.loss * row.samples for row in rows) / samples if samples else None,
        val={"loss": validated and validated.val_loss, "acc1": validated and validated.val_acc1},
        # Anybody may publish such an account: only the creator's own counts.
        contributions=tuple(told.contributions.get(creator, ())),
        history=_history(run_dir) if run_dir else (),
    )


def _clock_of(manifest: Manifest, told: Mapping[str, Progress], creator: str) -> RoundClock:
    from trainkit.collaborative.settings import adapted

    agreed = adapted(manifest.config, (), allow_code=True).collaborative
    if agreed.sync == "diloco":
        return RoundClock(agreed.round_seconds, manifest.first_round, agreed.rounds)
    # The creator knows how far they are; without it, most of the others do.
    heard = sorted(own.round for own in told.values())
    done = told[creator].round if creator in told else heard[len(heard) // 2] if heard else agreed.rounds
    return UpdateClock(agreed.round_seconds, manifest.first_round, agreed.rounds, lambda: done)


def _row(peer: str, own: Progress, creator: str, invited: str, clock: RoundClock, now: float) -> PeerRow:
    return PeerRow(
        name=own.name,
        credited=terminal.name(invitation.credited("" if peer == creator else invited, own.name)),
        peer=peer,
        role="creator" if peer == creator else "client" if own.client else "public",
        round=min(own.round + 1, clock.count),
        group=own.group,
        parts=own.parts,
        expected=own.expected,
        samples=own.samples,
        samples_per_sec=own.samples_per_sec,
        loss=own.loss,
        sent=own.sent,
        received=own.received,
        seconds_ago=max(0.0, now - own.time),
    )


def _from_records(run_dir: RunDir) -> View:
    """What the run folder says of a swarm that does not answer any more."""
    from trainkit.config.loading import load

    records = read_metrics(run_dir, "train")
    last = records[-1] if records else {}
    history = _history(run_dir)
    validated = history[-1] if history else {}
    return View(
        name=run_dir.name,
        round=int(last.get("round") or 0),
        rounds=load(str(run_dir.config)).config.collaborative.rounds,
        running=False,
        peers=(),
        loss=last.get("loss"),
        val={key: value if reading.is_number(value := validated.get(key)) else None for key in ("loss", "acc1")},
        contributions=tuple(Contributions.of(run_dir).best_first()),
        history=history,
    )


def _history(run_dir: RunDir) -> tuple[Mapping[str, Any], ...]:
    by_step = {record["step"]: record for record in read_metrics(run_dir, "train")}
    rows = []
    for record in read_metrics(run_dir, "val")[-10:]:
        train = by_step.get(record["step"], {})
        rows.append({**record, "peers": train.get("peers"), "train_loss": train.get("loss")})
    return tuple(rows)
