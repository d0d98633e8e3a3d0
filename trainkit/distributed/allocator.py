"""C's allocator, told to do as that of GPUs does: what a training has freed it needs again in the next update.

glibc gives free memory at the end of its heap back to the kernel, and takes it again as new pages, each of which is a
fault and is zeroed: a thousand an update for a small convolutional network, a fifth of its time. Whether that happens
is chance, for it takes a single small tensor to be in the way.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # <malloc.h>
_LARGEST_IN_HEAP = 32 << 20
"""The most that glibc takes for it. What is larger is mapped by itself, and given back when it is freed."""
_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed() -> None:
    """Give nothing back while this process lives, unless by `give_freed_back`; where its user has said something else
    by the environment, or the C library is another one, nothing changes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name in os.environ for name in _USERS):
        mallopt(_TRIM_THRESHOLD, -1)
        mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP)  # either of the two fixes both: the other would be small


def give_freed_back() -> None:
    """Once."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
