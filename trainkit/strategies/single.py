"""One process, one device."""

from __future__ import annotations

from trainkit.distributed.process_group import Distributed
from trainkit.strategies.base import AsItIs, require_one_rank

RANKS = "one"


def build(dist: Distributed) -> AsItIs:
    """Raises UserError when there is more than one rank: each would train a model of its own."""
    require_one_rank(dist, "single")
    return AsItIs()
