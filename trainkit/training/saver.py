"""Saving, recording and stopping, for every loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainkit.checkpoint.save import Checkpoints
from trainkit.common import fileio, jsonl, terminal
from trainkit.config.schema import Config
from trainkit.distributed.process_group import Distributed, StopVote
from trainkit.run.events import Attempt, Remark


class Saver:
    """Saves, records and agrees on stopping, for any loop. Every rank calls every method."""

    writer: Attempt
    checkpoints: Checkpoints

    @property
    def config(self) -> Config:
        raise NotImplementedError

    @property
    def dist(self) -> Distributed:
        raise NotImplementedError

    def remark(self, kind: Remark, **facts: Any) -> None:
        """Write an event, once for all ranks."""
        if self.dist.is_main:
            self.writer.remark(kind, **facts)

    def say(self, words: object) -> None:
        """Print a line, once for all ranks."""
        if self.dist.is_main:
            terminal.say(str(words))

    def minutes_are_over(self) -> bool:
        """``checkpoint.every_minutes``, by rank 0's clock: the ranks have yet to agree."""
        minutes = self.config.checkpoint.every_minutes
        return minutes is not None and self.dist.is_main and self.checkpoints.seconds_since_save() >= minutes * 60

    def poll(
        self, vote: StopVote, requested: bool, *, news: bool = False, tell: Callable[[], None] | None = None
    ) -> bool:
        """Vote on stopping, saving and news, and go on with a checkpoint that is under way.

        Args:
            tell: called on all ranks where one of them has had news.
        """
        stop = vote.poll(requested, save=self.minutes_are_over(), news=news, over=self.checkpoints.over())
        if vote.news and tell is not None:
            tell()
        self.checkpoints.go_on(vote.over)
        return stop

    def write(self, file: Path, content: Mapping[str, Any], indent: int | None = None) -> None:
        """Write a file of the run that is complete or absent."""
        text = json.dumps(jsonl.finite(content), indent=indent, allow_nan=False) + "\n"
        self.writer.may_write()
        with fileio.replacing(file, self.writer.run.path) as out:
            out.write(text.encode())
            self.writer.may_write()
