"""What peers of a swarm tell one another through its DHT: the creator's manifest, and every peer's progress."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from trainkit.collaborative.trust import peer_id_of

PROTOCOL = 1


@dataclass(frozen=True)
class Manifest:
    """What all peers of a run have in common."""

    run_id: str
    name: str
    config: str
    """The complete configuration as YAML."""
    config_sha256: str
    num_parameters: int
    first_round: int
    versions: dict[str, str] = field(default_factory=dict)
    stopped: bool = False
    """The creator has ended the run before its last round."""
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Progress:
    """What a peer says about its last round."""

    name: str
    round: int
    samples: int
    samples_per_sec: float
    loss: float
    group: int
    """Peers that averaged together, itself included; 0: it went on alone."""
    time: float
    client: bool = False
    """It only calls out, as behind a router, and so neither reduces nor gives its state away."""
    parts: int = 0
    """Parts of the average that reached it, of ``expected``."""
    expected: int = 0
    sent: int = 0
    """Bytes that it has sent for the round, and received."""
    received: int = 0
    val_loss: float | None = None
    """The last validation, of those who validate the common model."""
    val_acc1: float | None = None


def manifests_in(found: Any) -> dict[str, Manifest]:
    """Peer id -> manifest, of what the DHT returned for `trust.MANIFEST`."""
    return {peer: Manifest(**value) for peer, value in _records(found).items()}


def progress_in(found: Any) -> dict[str, Progress]:
    """Peer id -> progress, of what the DHT returned for `trust.PROGRESS`."""
    return {peer: Progress(**value) for peer, value in _records(found).items()}


def _records(found: Any) -> dict[str, dict[str, Any]]:
    """Peer id -> record. Shapes and signatures have been checked by the DHT's validators."""
    records: dict[str, dict[str, Any]] = {}
    if found is not None and isinstance(found.value, dict):
        for subkey, entry in found.value.items():
            with suppress(ValueError, TypeError):
                records[peer_id_of(subkey)] = dict(entry.value)
    return records
