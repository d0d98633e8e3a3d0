"""Which state is the run's: a digest of the common weights, signed by the owner's side.

Whoever takes over a state computes its digest anew. So it matters neither who handed it over nor how old that peer
says it is: a state counts if one of the owner's side has signed it, for this run and for the round that it claims.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trainkit import reading
from trainkit.collaborative.admission import Admission
from trainkit.collaborative.invitation import Pass
from trainkit.collaborative.signing import UntrustedError


@dataclass(frozen=True)
class Digest:
    """What was signed about a state."""

    run_id: str
    """Of this start of the run: the state of an earlier one is none of this one's."""
    round: int
    """The round that begins with this state."""
    sha256: str
    """Of the weights and the momentum, see `sha256_of`."""


def sha256_of(tensors: Iterable[memoryview]) -> str:
    """Of several buffers in their order, each with its length in bytes; in hex."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.nbytes.to_bytes(8, "big"))
        found.update(tensor)
    return found.hexdigest()


def digest_of(run_id: str, round_index: int, tensors: Iterable[Any]) -> Digest:
    """Of a state, as torch has it on the CPU."""
    return Digest(run_id, round_index, sha256_of(memoryview(tensor.numpy()).cast("B") for tensor in tensors))


def sign_digest(own: Pass, digest: Digest) -> bytes:
    """The digest as a statement."""
    return own.state("state", json.dumps([digest.run_id, digest.round, digest.sha256]).encode())


def read_digest(admission: Admission, statement: bytes, *, run_id: str, now: float | None = None) -> Digest:
    """What the owner's side says about a state.

    Raises UntrustedError when a volunteer or a stranger has signed it, or it belongs to another run.
    """
    found = admission.read(statement, "state", now=now)
    if found.grant.role == "volunteer":
        raise UntrustedError("a volunteer does not say which state is the run's")
    try:
        digest = Digest(*reading.parse(found.content))
    except (ValueError, TypeError, RecursionError) as error:
        raise UntrustedError("it is no digest") from error
    if type(digest.round) is not int or digest.round < 0 or not isinstance(digest.sha256, str):
        raise UntrustedError("it is no digest")
    if digest.run_id != run_id:
        raise UntrustedError("it is the digest of another run")
    return digest
