"""A peer that has lost the swarm waits for it, and goes on when it is back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainkit.errors import RunFailedError

PATIENCE_SECONDS = 24 * 3600.0
"""How long a peer waits for a swarm that does not answer."""
_SAY_EVERY = 600.0
_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 60.0
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Waiting:
    """How to wait."""

    look: Callable[[Sequence[str]], int]
    """Look for peers at addresses; how many answer."""
    goes_on: Callable[[], bool]
    """Whether they go on with this peer; who has just come back may not be ready for that."""
    stop_requested: Callable[[], bool]
    say: Callable[[str], None]
    patience: float = PATIENCE_SECONDS
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def until_back(self, addresses: Sequence[str]) -> bool:
        """Ask for the swarm at ``addresses``, less and less often. False when told to leave.

        Raises RunFailedError when nobody has answered for so long that nobody will.
        """
        began, said, pause, there = self.now(), self.now(), _FIRST_PAUSE, False
        self.say(
            f"Nobody of the swarm answers. Waiting for it for up to {_in_words(self.patience)}; Ctrl-C leaves for good."
        )
        while not self.stop_requested():
            if self.look(addresses):
                if self.goes_on():
                    return True
                if not there:  # it has just come back, and will be ready soon
                    there, pause = True, _FIRST_PAUSE
            waited = self.now() - began
            if waited >= self.patience:
                raise RunFailedError(
                    f"The swarm has not answered for {_in_words(self.patience)}.",
                    why="Its creator has gone without a word, or this machine has lost its network.",
                    fix="Ask whoever runs `python -m jobs.swarm create`, and join again.",
                )
            if self.now() - said >= _SAY_EVERY:
                said = self.now()
                self.say(f"Still waiting for the swarm, since {_in_words(waited)}.")
            self._rest(min(pause, self.patience - waited))
            pause = min(1.5 * pause, _LONGEST_PAUSE)
        return False

    def _rest(self, seconds: float) -> None:
        until = self.now() + seconds
        while (left := until - self.now()) > 0 and not self.stop_requested():
            self.sleep(min(left, _LOOK_SECONDS))


def _in_words(seconds: float) -> str:
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.0f} hours"
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} s"
