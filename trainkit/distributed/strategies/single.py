"""One process, one device."""

from trainkit.distributed.process_group import Distributed
from trainkit.distributed.strategies.base import AsItIs

RANKS = "one"


def build(dist: Distributed) -> AsItIs:
    """No options."""
    return AsItIs()
