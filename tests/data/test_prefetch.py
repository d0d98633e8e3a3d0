from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from trainkit.data.base import Batch
from trainkit.data.loader import on_gpu
from trainkit.errors import UserError


def test_batches_for_a_gpu_are_copied_a_step_ahead_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stream that only notes: what must be in order is in order, and no batch is lost."""
    log: list[str] = []

    class Stream:
        def wait_stream(self, other: Any) -> None:
            log.append("wait")

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        log.append("copy")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", on)
    batches = [Batch(torch.full((1,), number), torch.ones(1), torch.zeros(1)) for number in range(3)]
    error = UserError("Broken.", why="It is.", fix="Mend it.")
    seen = []
    for batch in on_gpu(iter([*batches, error]), torch.device("cpu")):
        log.append("compute")
        seen.append(batch)
    assert [int(batch.images) for batch in seen[:3]] == [0, 1, 2]
    assert seen[3] is error
    assert log[:6] == ["copy", "wait", "copy", "compute", "wait", "copy"]
