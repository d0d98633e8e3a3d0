"""DistributedDataParallel: every rank holds the whole model; gradients are averaged while they are computed."""

from functools import wraps
from typing import Any

from trainkit.distributed.strategies.replicated import (
    EXCLUDES,
    GLOBAL_BATCHNORM,
    LESS_TRAFFIC,
    LOST_WHEN_RESIZED,
    Replicated,
    replicated,
)

__all__ = ["EXCLUDES", "GLOBAL_BATCHNORM", "LESS_TRAFFIC", "LOST_WHEN_RESIZED", "build"]


IMPORTS = ("torch._dynamo",)
"""Modules that torch imports only when a model is wrapped."""


@wraps(replicated)
def build(*args: Any, **options: Any) -> Replicated:
    return replicated(*args, **options)
