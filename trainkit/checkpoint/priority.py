"""Threads that work behind training."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

_NICE = 10


def give_way() -> None:
    """Let threads that train go first where a core has both: the calling thread is in no hurry."""
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        with suppress(OSError):
            nice = max(os.getpriority(os.PRIO_PROCESS, 0), _NICE)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
