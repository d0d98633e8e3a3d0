"""Tells the client of a logger in a thread what is recorded, so that training waits for no server, and each point once.

A run that is requeued goes on in the same run there. What an earlier attempt has recorded and not sent is sent first,
up to the update from which this one goes on; an update that is made again after a kill keeps the point that it has.
"""

import math
import re
import sys
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

from trainkit.monitor import NOT_CURVES
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics

PATIENCE_SECONDS = 10.0
"""At the end of an attempt, for what is not sent yet: it stays in ``metrics.jsonl``."""
_MOST_AT_ONCE = 200


class Client(Protocol):
    """What a sender tells. All of it is called in the sender's thread."""

    def begin(self) -> set[tuple[str, int]]:
        """Open the run; the splits and steps that are there already."""

    def send(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add these points."""

    def end(self, *, failed: bool) -> None:
        """Close the run once all is sent."""


class Sender:
    """A logger.

    Args:
        until: the update up to which what ``metrics.jsonl`` has is sent as well.
    """

    def __init__(self, client: Client, run_dir: RunDir, *, until: float) -> None:
        self._client, self._run_dir, self._until = client, run_dir, until
        self._waiting: SimpleQueue[Mapping[str, Any] | bool] = SimpleQueue()
        self._error: RuntimeError | None = None
        self._thread = Thread(target=self._work, name=type(client).__name__, daemon=True)
        self._thread.start()

    def log(self, record: Mapping[str, Any]) -> None:
        if self._error is not None:
            raise self._error
        self._waiting.put(record)

    def close(self, patience: float = PATIENCE_SECONDS) -> None:
        self._waiting.put(sys.exc_info()[0] is not None)  # closed while an exception passes: the run has failed
        self._thread.join(patience)
        if self._thread.is_alive():
            raise TimeoutError(f"not all was taken within {patience:.0f} s of the end; metrics.jsonl has it")
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            there = self._client.begin()
            earlier: list[Mapping[str, Any]] = [
                record for record in read_metrics(self._run_dir) if record["step"] <= self._until
            ]
            failed = self._send(earlier, there)
            while failed is None:
                taken = [self._waiting.get()]
                while not self._waiting.empty():
                    taken.append(self._waiting.get())
                failed = self._send(taken, there)
            self._client.end(failed=failed)
        except Exception as error:  # of a client, which has several kinds, and names its server with user and password
            self._error = RuntimeError(re.sub(r"//[^/\s]*@", "//", str(error)) or type(error).__name__)

    def _send(self, taken: Sequence[Mapping[str, Any] | bool], there: set[tuple[str, int]]) -> bool | None:
        """Send what is not there; at the end whether the training has failed."""
        new = {(item["split"], item["step"]): item for item in taken if not isinstance(item, bool)}
        records = [record for where, record in new.items() if where not in there]
        for first in range(0, len(records), _MOST_AT_ONCE):
            self._client.send(records[first : first + _MOST_AT_ONCE])
        there |= new.keys()
        return next((item for item in taken if isinstance(item, bool)), None)


def curves(record: Mapping[str, Any]) -> dict[str, float]:
    """What a record measures, as ``loss/train``; what is no number, null in a record, is NaN."""
    return {
        f"{key}/{record['split']}": math.nan if value is None else value
        for key, value in record.items()
        if key not in NOT_CURVES and (value is None or (isinstance(value, int | float) and not isinstance(value, bool)))
    }
