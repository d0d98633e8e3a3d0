"""Who was left out of averages, how often in a row, and who may not come back: kept in the run folder.

Ids are those of peers, and of the invitations by which they came: a banned guest does not come back with a new key.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit import terminal
from trainkit.errors import UserError
from trainkit.records import jsonl

if TYPE_CHECKING:
    from trainkit.collaborative.screening import Verdict

# Rounds in a row in which a peer's contribution was dropped; one may be a fault on the way, or of a broken GPU.
STRIKES = 3
# Of them at once; strangers can make up as many ids as they like.
_MOST_BANS = 1000
_MOST_SUSPECTS = 1000

FILE = "bans.jsonl"


@dataclass(frozen=True)
class Ban:
    """Somebody who may not take part any more."""

    id: str
    """Of a peer, or of an invitation."""
    name: str
    why: str


class Bans:
    """The list in a run folder. Each line bans or lifts a ban, so that a run and a command can both write."""

    def __init__(self, file: Path | None) -> None:
        """``file``: None for a peer that keeps no records; its list ends with it."""
        self._file = file
        self._own: dict[str, Ban] = {}
        self._stamp: tuple[int, int] | None = None

    def read(self) -> dict[str, Ban]:
        """Id -> ban, as it is now; cheap when nothing has changed."""
        if self._file is None:
            return self._own
        try:
            status = self._file.stat()
        except FileNotFoundError:
            return {}
        stamp = (status.st_size, status.st_mtime_ns)
        if stamp != self._stamp:
            self._own, self._stamp = _read(self._file), stamp
        return self._own

    def add(self, ban: Ban) -> None:
        """From now on."""
        if self._file is None:
            self._own[ban.id] = ban
        elif ban.id not in self.read():
            jsonl.append(self._file, {"time": time.time(), "id": ban.id, "name": ban.name, "why": ban.why})

    def lift(self, name: str) -> list[Ban]:
        """Let those of that name (or id) take part again; who they were."""
        found = [ban for ban in self.read().values() if name in (ban.name, ban.id)]
        for ban in found:
            if self._file is None:
                del self._own[ban.id]
            else:
                jsonl.append(self._file, {"time": time.time(), "id": ban.id, "lifted": True})
        return found


def unban(run: Path, name: str) -> list[Ban]:
    """Let those of that name take part again in the run of a folder; the run reads it before its next round.

    Raises UserError when nobody of that name is banned.
    """
    bans = Bans(run / FILE)
    lifted = bans.lift(name)
    if not lifted:
        names = sorted({terminal.one_line(ban.name, 64) for ban in bans.read().values()})
        raise UserError(
            f"Nobody called {terminal.one_line(name, 64)} is banned from {run.name}.",
            why=f"Banned are: {', '.join(names[:20])}." if names else "Nobody is banned from it.",
            fix="Give the name as the run has printed it, or the run with --run.",
        )
    return lifted


@dataclass
class Strikes:
    """Rounds in a row in which each peer's contribution was dropped."""

    counts: dict[str, int] = field(default_factory=dict)

    def note(self, verdicts: Iterable[Verdict], took_part: Iterable[str]) -> dict[str, str]:
        """Take in a round. Peer id -> why, of those for whom it was one too many.

        Args:
            took_part: ids of all who were in the round; who was not neither gains nor loses by it.
        """
        dropped = {verdict.peer: verdict.why for verdict in verdicts if verdict.action == "dropped"}
        for peer in set(took_part) - dropped.keys():
            self.counts.pop(peer, None)
        out: dict[str, str] = {}
        for peer, why in dropped.items():
            self.counts[peer] = self.counts.pop(peer, 0) + 1
            if self.counts[peer] >= STRIKES:
                del self.counts[peer]
                out[peer] = why
        while len(self.counts) > _MOST_SUSPECTS:
            del self.counts[next(iter(self.counts))]
        return out


def _read(file: Path) -> dict[str, Ban]:
    bans: dict[str, Ban] = {}
    for record in jsonl.read(file):
        found = {key: record.get(key) for key in ("id", "name", "why")}
        if not isinstance(found["id"], str):
            continue
        bans.pop(found["id"], None)
        if record.get("lifted") is not True:
            bans[found["id"]] = Ban(found["id"], _text(found, "name"), _text(found, "why"))
    return dict(list(bans.items())[-_MOST_BANS:])


def _text(record: Mapping[str, object], key: str) -> str:
    value = record[key]
    return value if isinstance(value, str) else ""
