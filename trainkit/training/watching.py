"""A rank that hangs is ended: by whom and when."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainkit.distributed.watchdog import Place, watchdog
from trainkit.run.events import Attempt
from trainkit.training.parts import Parts


@contextmanager
def watched(
    parts: Parts, node: Attempt | None, hosts: list[str], beat: Callable[[], None]
) -> Iterator[Callable[[], None]]:
    """A rank that somebody has started in a job ends if it hangs; one that a person looks at may stand still."""
    if node is None or (sys.stdin is not None and sys.stdin.isatty()):
        yield beat
        return
    place = Place(parts.dist.rank, hosts, node.logs)
    passes = parts.grad_accum_steps + 2  # of `Updater`
    with watchdog(node, place, hang_seconds=parts.config.launch.hang_seconds, beats_per_step=passes) as own:
        made = 0

        def both() -> None:
            nonlocal made
            made += 1
            if made >= passes:  # until its first update is made, which may compile the model, it still starts
                beat()
            own()

        yield both
