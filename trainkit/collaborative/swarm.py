"""A swarm seen from outside: its run, its peers, what they have reached."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainkit.collaborative import address, processes
from trainkit.collaborative.peer import ADDRESS_FILE
from trainkit.errors import TrainkitError, UserError
from trainkit.records.metrics import read_metrics
from trainkit.records.rundir import RunDir, find_run, list_runs, runs_root


@dataclass(frozen=True)
class PeerRow:
    """One line of the table."""

    name: str
    peer: str
    round: int
    group: int
    samples: int
    samples_per_sec: float
    loss: float
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
    history: tuple[Mapping[str, Any], ...] = ()
    """Last validation records, of a run in a folder here."""


def look(reference: str | None, env: Mapping[str, str]) -> View:
    """The swarm at an address, of a run, or of the newest run here that has one.

    Raises:
        UserError: nobody answers at the address, or there is no such run.
    """
    if reference is not None and address.looks_like(reference):
        address.check(reference)
        return _ask([reference], None)
    run_dir = find_run(reference, env) if reference is not None else _newest(env)
    file = run_dir.path / ADDRESS_FILE
    if not file.is_file():
        raise UserError(
            f"{run_dir.name} is not a swarm.", why=f"It has no {ADDRESS_FILE}.", fix="`python -m jobs.status` shows it."
        )
    try:
        return _ask(file.read_text(encoding="utf-8").split(), run_dir)
    except TrainkitError:
        return _from_records(run_dir)


def _newest(env: Mapping[str, str]) -> RunDir:
    root = runs_root(env)
    swarms = [run for run in list_runs(root) if (run.path / ADDRESS_FILE).is_file()]
    if not swarms:
        raise UserError(
            f"No swarm in {root}.",
            why="None of the runs there has created one.",
            fix="Give an ADDRESS, or create one: python -m jobs.swarm create hivemind",
        )
    return swarms[-1]


def _ask(addresses: Sequence[str], run_dir: RunDir | None) -> View:
    processes.require_hivemind()
    from trainkit.collaborative import trust
    from trainkit.collaborative.clock import RoundClock
    from trainkit.collaborative.dht import open_dht, read_manifest
    from trainkit.collaborative.settings import adapted

    with trust.identity() as identity, open_dht(identity, peers=addresses) as dht:
        manifest = read_manifest(dht, addresses)
        peers = dht.progress()
    collaborative = adapted(manifest.config, (), allow_code=True).collaborative
    clock = RoundClock(collaborative.round_seconds, manifest.first_round, collaborative.rounds)
    now = time.time()
    rows = tuple(
        PeerRow(
            name=own.name,
            peer=peer,
            round=own.round + 1,
            group=own.group,
            samples=own.samples,
            samples_per_sec=own.samples_per_sec,
            loss=own.loss,
            seconds_ago=max(0.0, now - own.time),
        )
        for peer, own in sorted(peers.items(), key=lambda item: item[1].name)
    )
    samples = sum(row.samples for row in rows)
    return View(
        name=manifest.name,
        round=min(clock.index(now) + 1, clock.count),
        rounds=clock.count,
        running=not manifest.stopped and now < clock.end,
        peers=rows,
        loss=sum(row.loss * row.samples for row in rows) / samples if samples else None,
        history=_history(run_dir) if run_dir else (),
    )


def _from_records(run_dir: RunDir) -> View:
    """What the run folder says of a swarm that does not answer any more."""
    from trainkit.config.loading import load

    records = read_metrics(run_dir, "train")
    last = records[-1] if records else {}
    rounds = load(str(run_dir.config)).config.collaborative.rounds
    return View(
        name=run_dir.name,
        round=int(last.get("round") or 0),
        rounds=rounds,
        running=False,
        peers=(),
        loss=last.get("loss"),
        history=_history(run_dir),
    )


def _history(run_dir: RunDir) -> tuple[Mapping[str, Any], ...]:
    by_step = {record["step"]: record for record in read_metrics(run_dir, "train")}
    rows = []
    for record in read_metrics(run_dir, "val")[-10:]:
        train = by_step.get(record["step"], {})
        rows.append({**record, "peers": train.get("peers"), "train_loss": train.get("loss")})
    return tuple(rows)
