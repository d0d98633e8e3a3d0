"""A user's own model for light_experiment.py: slow, or without luck, in a run's first attempt only; or on one rank."""

import os
import time
from collections.abc import Callable


def build(info: object, *, seconds: float = 0.0, luck: int = 0, bad_rank: int = -1) -> Callable[[], None]:
    """Make an update that takes so many seconds. Raises RuntimeError in the first attempt with luck above zero,
    and ValueError on the bad rank."""
    is_first = os.environ["TRAINKIT_ATTEMPT"] == "0"
    if luck > 0 and is_first:
        raise RuntimeError("no luck")
    if (os.environ.get("RANK") or os.environ["SLURM_PROCID"]) == str(bad_rank):  # torchrun's, or srun's
        raise ValueError("bad labels")
    return lambda: time.sleep(seconds if is_first else 0.0)
