"""A swarm: every rank is a peer of its own, with the whole model; peers average the progress of each round.

The averaging is no part of an update, so that it is not here but in `trainkit.swarm`, with its own loop.
"""

from trainkit.distributed.process_group import Distributed
from trainkit.distributed.strategies.base import AsItIs

LOOP = "collaborative"


def build(dist: Distributed) -> AsItIs:
    """Its settings are the section ``collaborative``."""
    return AsItIs()
