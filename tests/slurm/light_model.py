"""A user's own model for light_experiment.py: slow, or without luck, in a run's first attempt only."""

from __future__ import annotations

import os
import time
from collections.abc import Callable


def build(info: object, *, seconds: float = 0.0, luck: int = 0) -> Callable[[], None]:
    """What an update does: it takes so many seconds. Raises RuntimeError where ``luck`` is above zero."""
    is_first = os.environ["TRAINKIT_ATTEMPT"] == "0"
    if luck > 0 and is_first:
        raise RuntimeError("no luck")
    return lambda: time.sleep(seconds if is_first else 0.0)
