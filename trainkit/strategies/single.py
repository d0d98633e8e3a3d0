"""One process, one device."""

from __future__ import annotations

from trainkit.distributed.process_group import Distributed
from trainkit.strategies import AsItIs

RANKS = "one"


def build(dist: Distributed) -> AsItIs:
    """No options."""
    return AsItIs()
