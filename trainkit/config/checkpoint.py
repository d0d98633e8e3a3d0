"""The section ``checkpoint``: when a run is saved, what is kept, and where else."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import PositiveFloat, PositiveInt, field_validator

from trainkit.config.section import SENDS, ImpossibleError, Section


class CheckpointConfig(Section):
    every_steps: PositiveInt | None = None
    """Save after every so many updates as well."""
    every_epochs: PositiveInt | None = 1
    """Save after every so many epochs."""
    every_minutes: PositiveFloat | None = 15.0
    """Save when so many minutes have passed since the last time: what a power cut may cost at most."""
    keep: PositiveInt = 3
    """How many checkpoints to keep besides the best."""
    asynchronous: bool = True
    """Train on while a checkpoint is written: a copy of each rank's share of it stays in memory for that."""
    best: Literal["val/acc1", "val/acc5", "val/loss", "val/ema_acc1", "val/ema_acc5", "val/ema_loss"] = "val/acc1"
    """What `best` is judged by; ema_: of the averaged weights (train.ema_decay)."""
    remote: Annotated[str | None, SENDS] = None
    """Send `best` and `latest` there behind the training, below the run's name: s3://bucket/prefix, gs://bucket/prefix
    or file:///folder. Credentials come from the environment only."""

    @field_validator("remote")
    @classmethod
    def _place_without_secrets(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if "@" in value or "?" in value or "#" in value:
            raise ImpossibleError(
                "checkpoint.remote holds more than a place",
                keys=("checkpoint.remote",),
                why="Configurations are kept, so that no key and no password may be in them.",
                fix="Use s3://bucket/prefix, and put credentials into the environment.",
                secret=True,
            )
        if re.fullmatch(r"(s3|gs)://[a-z0-9][\w.-]+(/(?!\.\.?(/|$))[\w.=+-]+)*/?|file:///[^\x00-\x1f]*", value) is None:
            raise ValueError("s3://bucket/prefix, gs://bucket/prefix or file:///folder")
        return value
