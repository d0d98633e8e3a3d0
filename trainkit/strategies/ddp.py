"""DistributedDataParallel: every rank holds the whole model; gradients are averaged while they are computed."""

from __future__ import annotations

from functools import wraps
from typing import Any

from trainkit.strategies.replicated import Replicated, replicated


@wraps(replicated)
def build(*args: Any, **options: Any) -> Replicated:
    return replicated(*args, **options)
