"""DistributedDataParallel: every rank holds the whole model; gradients are averaged while they are computed."""

from __future__ import annotations

from functools import wraps
from typing import Any

from trainkit.strategies.replicated import (
    EXCLUDES as EXCLUDES,
)
from trainkit.strategies.replicated import (
    GLOBAL_BATCHNORM as GLOBAL_BATCHNORM,
)
from trainkit.strategies.replicated import (
    LESS_TRAFFIC as LESS_TRAFFIC,
)
from trainkit.strategies.replicated import (
    LOST_WHEN_RESIZED as LOST_WHEN_RESIZED,
)
from trainkit.strategies.replicated import (
    Replicated,
    replicated,
)


@wraps(replicated)
def build(*args: Any, **options: Any) -> Replicated:
    return replicated(*args, **options)
