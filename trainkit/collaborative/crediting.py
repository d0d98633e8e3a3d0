"""Who has contributed how much: counted by whoever answers for the run, of what its own reducer has averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from trainkit.records.contributions import Contribution, Contributions, Counted
from trainkit.records.writer import Writer


class Credits:
    """The account of one run, in its folder; it goes on over restarts."""

    def __init__(
        self, writer: Writer, seconds: Callable[[], float], publish: Callable[[Sequence[Contribution]], None]
    ) -> None:
        """
        Args:
            seconds: length of the round that is counted.
            publish: tells the swarm.
        """
        self._writer, self._seconds, self._publish = writer, seconds, publish
        self._known = Contributions.of(writer.run)

    def count(self, counted: Iterable[Counted]) -> None:
        """Count one round."""
        self._known.add(self._seconds(), counted)
        self._writer.check()
        with suppress(OSError):  # a full disk; the next round writes all of it again
            self._known.write(self._writer.run)
        self._publish(self._known.best_first())
