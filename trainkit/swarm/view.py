"""A swarm seen from outside: its run, its peers, what they have reached, and who has contributed how much."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from trainkit import fileio, terminal
from trainkit.config.task import LOSS, metrics_of
from trainkit.errors import TrainkitError, UserError
from trainkit.run.contributions import Contribution, Contributions
from trainkit.run.folder import RunDir
from trainkit.run.metrics import TaskMetrics, described, read_metrics
from trainkit.swarm import address, invitations, reader
from trainkit.swarm.address import ADDRESS_FILE
from trainkit.swarm.admission import (
    KEY_FILE,
    VARIABLE,
    Entry,
    addresses_of,
    by_address,
    entry_of,
    own_pass,
    owner_of,
    run_with,
    warned,
)
from trainkit.swarm.messages import RoundClock, UpdateClock

if TYPE_CHECKING:
    from trainkit.swarm.messages import Manifest, PeerProgress


# A stranger may publish as many records as it likes, each under a key of its own.
_MOST_PEERS = 5000


@dataclass(frozen=True)
class PeerRow:
    """What a peer says of its last round."""

    name: str
    """As it calls itself."""
    credited: str
    """Under which name its work is counted, see `invitations.credited`."""
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
    """``loss`` and the headline of the last validation of the common model, by its creator."""
    metrics: TaskMetrics
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
    return address.looks_like(reference) or invitations.looks_like(reference) or os.path.isfile(reference)


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


def view_of(told: reader.SwarmRecords, addresses: Sequence[str], run_dir: RunDir | None) -> View:
    """What is shown of what a swarm has published.

    Raises UserError when it is not clear which run it is.
    """
    from trainkit.swarm.messages import manifest_of

    creator, manifest = manifest_of(told.manifests, addresses)
    clock, now = _clock_of(manifest, told.progress, creator), time.time()
    told_of = list(told.progress.items())[:_MOST_PEERS]
    rows = [_row(peer, own, creator, told.names.get(peer, ""), clock, now) for peer, own in told_of]
    rows.sort(key=lambda row: (row.role != "creator", row.name, row.peer))
    samples = sum(row.samples for row in rows)
    validated, metrics = told.progress.get(creator), _metrics_in(manifest)
    headline = validated.val_headline if validated is not None else None
    fits = headline is not None and metrics.metrics[metrics.headline].fits(headline)
    return View(
        name=terminal.one_line(manifest.name, 128),
        round=min(clock.index(now) + 1, clock.count),
        rounds=clock.count,
        running=not manifest.stopped and not clock.is_over(now),
        peers=tuple(rows),
        loss=sum(row.loss * row.samples for row in rows) / samples if samples else None,
        val={"loss": validated and validated.val_loss, metrics.headline: headline if fits else None},
        metrics=metrics,
        # Anybody may publish such an account: only the creator's own counts.
        contributions=tuple(told.contributions.get(creator, ())),
        history=_history(run_dir) if run_dir else (),
    )


def _clock_of(manifest: Manifest, told: Mapping[str, PeerProgress], creator: str) -> RoundClock:
    from trainkit.swarm.spec import adapted

    agreed = adapted(manifest.config, (), allow_code=True).collaborative
    if agreed.sync == "diloco":
        return RoundClock(agreed.round_seconds, manifest.first_round, agreed.rounds)
    # The creator knows how far they are; without it, most of the others do.
    heard = sorted(own.round for own in told.values())
    done = told[creator].round if creator in told else heard[len(heard) // 2] if heard else agreed.rounds
    return UpdateClock(agreed.round_seconds, manifest.first_round, agreed.rounds, lambda: done)


def _metrics_in(manifest: Manifest) -> TaskMetrics:
    """Of the run's task, where that is one of ours: a stranger's file is not read for them."""
    from trainkit.swarm.spec import adapted

    task = adapted(manifest.config, (), allow_code=True).task.name
    return TaskMetrics("loss", {"loss": LOSS}) if ":" in task else metrics_of(task)


def _row(peer: str, own: PeerProgress, creator: str, invited: str, clock: RoundClock, now: float) -> PeerRow:
    return PeerRow(
        name=own.name,
        credited=terminal.name(invitations.credited("" if peer == creator else invited, own.name)),
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
    validated, metrics = history[-1] if history else {}, described(run_dir)
    keys = ("loss", metrics.headline)
    return View(
        name=run_dir.name,
        round=int(last.get("round") or 0),
        rounds=load(str(run_dir.config)).config.collaborative.rounds,
        running=False,
        peers=(),
        loss=last.get("loss"),
        val={key: value if fileio.is_number(value := validated.get(key)) else None for key in keys},
        metrics=metrics,
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


# A swarm's view as text: tables that fit the terminal, and an object for programs.

PEERS = ("peer", "role", "round", "parts", "samples", "samples/s", "loss", "up", "down", "seen", "id")
# What a narrow terminal does without, in this order.
_DISPENSABLE_OF_PEERS = ("id", "samples", "seen", "loss", "down", "up", "role", "round", "parts")
LEADERBOARD = ("name", "samples", "share", "rounds", "hours", "bytes", "now")
_DISPENSABLE_OF_LEADERBOARD = ("now", "bytes", "rounds", "share", "hours")
_MOST_SHOWN = 100
# Of a name, on a terminal: whoever calls itself something long would leave no room for what the others do.
_LONGEST_NAME = 24


def status_lines(view: View) -> list[str]:
    """The text of ``status``."""
    state = "running" if view.running else "not running"
    words = [
        f"{view.name}: {state}",
        f"round {view.round}/{view.rounds}",
        f"{len(view.peers)} peer{'s' * (len(view.peers) != 1)}",
    ]
    words += [f"{view.samples_per_sec:,.0f} samples/s"] if view.peers else []
    words += [f"loss {view.loss:.4f}"] if view.loss is not None else []
    head = view.metrics.headline
    measured = [key for key in (head, "loss") if view.val.get(key) is not None]
    words += [f"val {view.metrics.words(key, view.val[key])}" for key in measured[:1]]
    lines = terminal.wrapped(", ".join(words))
    if view.peers:
        rows = [_peer(row) for row in view.peers[:_MOST_SHOWN]]
        lines += _indented(PEERS, rows, _DISPENSABLE_OF_PEERS)
        if len(view.peers) > _MOST_SHOWN:
            lines.append(f"  {len(view.peers) - _MOST_SHOWN} more peers are not shown; --json has them.")
    if view.history:
        header = ("round", "peers", "train loss", "val loss", f"val {head}")
        spec = view.metrics.metrics[head].spec
        keys = (("round", "d"), ("peers", "d"), ("train_loss", ".4f"), ("loss", ".4f"), (head, spec))
        rows = [tuple(_cell(record.get(key), spec) for key, spec in keys) for record in view.history]
        lines += _indented(header, rows, ("peers", "train loss"))
    return lines


def leaderboard_lines(view: View) -> list[str]:
    """The text of ``status --leaderboard``: who has contributed how much."""
    if not view.contributions:
        return [f"{view.name}: no contributions yet, or its creator has not said."]
    whole = sum(item.samples for item in view.contributions)
    here = {row.credited for row in view.peers}
    rows = [
        (
            item.name,
            f"{item.samples:,.0f}",
            f"{100 * item.samples / whole:.1f} %" if whole else "-",
            str(item.rounds),
            hours(item),
            terminal.size(item.bytes),
            "training" if item.name in here else "-",
        )
        for item in view.contributions
    ]
    title = f"{view.name}: round {view.round}/{view.rounds}, {whole:,.0f} samples of {len(rows)} contributors"
    return [*terminal.wrapped(title), *_indented(LEADERBOARD, rows, _DISPENSABLE_OF_LEADERBOARD)]


def as_object(view: View) -> dict[str, Any]:
    """What a program may rely on; what is not known is null."""
    plain: dict[str, Any] = fileio.finite({**asdict(view), "samples_per_sec": view.samples_per_sec})
    del plain["metrics"]
    return plain


def hours(item: Contribution) -> str:
    """``0.25``"""
    return f"{item.seconds / 3600:,.2f}"


def _peer(row: PeerRow) -> tuple[str, ...]:
    parts = f"{row.parts}/{row.expected}" if row.expected else "alone" if not row.group else f"of {row.group}"
    return (
        row.name,
        row.role,
        str(row.round),
        parts,
        f"{row.samples:,}",
        _cell(row.samples_per_sec, ",.0f"),
        _cell(row.loss, ".4f"),
        terminal.size(row.sent) if row.sent else "-",
        terminal.size(row.received) if row.received else "-",
        f"{terminal.age(row.seconds_ago)} ago",
        f"..{row.peer[-6:]}",
    )


def _indented(header: Sequence[str], rows: Sequence[Sequence[str]], dispensable: Sequence[str]) -> list[str]:
    notes = [row[0] if sys.stdout.isatty() and len(row[0]) > _LONGEST_NAME else "" for row in rows]
    shorter = [
        (f"{row[0][: _LONGEST_NAME - 3]}...", *row[1:]) if note else row for row, note in zip(rows, notes, strict=True)
    ]
    return [f"  {line}" for line in terminal.table(header, shorter, notes, dispensable=dispensable, indent=2)]


def _cell(value: object, spec: str) -> str:
    return format(value, spec) if isinstance(value, int | float) else "-"
