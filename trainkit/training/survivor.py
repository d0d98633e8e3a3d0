"""Survivor of a failure: a rank whose peer has died saves what all have trained, up to their last finished update.

Where each rank has the whole state, nothing of it is lost with one of them. A survivor fails in its next exchange with
the dead one, or waits in it for ever, and Python cannot interrupt that: so a thread waits beside for the keeper's order
to save. An update is finished or not: its weights change between `Survivor.changes` and `Survivor.finished`, with a
lock held in between, and nothing is saved meanwhile. What training changes outside of it (BatchNorm's statistics in a
forward pass) and what it counts come from copies, made when the update was finished.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil
from torch import Tensor, nn

from trainkit.checkpoint.alone import Stems, save_alone
from trainkit.cluster.signals import KeeperLink
from trainkit.common import fileio, terminal
from trainkit.diagnosis.rank_log import is_lost_connection
from trainkit.distributed.device import cgroup_free
from trainkit.distributed.process_group import Distributed
from trainkit.distributed.strategies.base import HasTensors, SharesBuffers, SharesOptimizer, Strategy

STEP_SECONDS = 2.0
"""Longest wait for the end of an update that is being finished."""
_SHARE = 0.5
"""Share of a node's free memory that a state may take."""


Collect = Callable[[], tuple[Stems, Mapping[str, Any]] | None]
"""Gives the tensors and plain values of a checkpoint as of a finished update; None where this rank does not know them.
It may be called from a thread, and asks no other rank."""


def is_whole(dist: Distributed, strategies: Sequence[Strategy]) -> bool:
    """Return whether a rank that is left alone has all that they train: nothing of it is spread over the ranks."""
    # On a GPU the program runs ahead of the device, whose weights may be those of any update before.
    if dist.world_size == 1 or dist.device.type != "cpu":
        return False
    for strategy in strategies:
        if not isinstance(strategy, SharesBuffers) or isinstance(strategy, SharesOptimizer):
            return False
        if isinstance(strategy, HasTensors) and strategy.tensors():
            return False
    return True


def copies_of(model: nn.Module) -> dict[int, Tensor]:
    """Copy the buffers of a model, each by its address."""
    return {buffer.data_ptr(): buffer.detach().clone() for buffer in model.buffers() if buffer.numel()}


class Survivor:
    """Saves the state as of the last finished update, once, when another rank is no more; until `arm` it does nothing.

    The main thread alone calls all but `save`.
    """

    def __init__(self) -> None:
        self._link: KeeperLink | None = None
        self._finished: tuple[int, Collect] | None = None
        self._whole = threading.Lock()
        """Held while the state is not that of a finished update."""
        self._saving = threading.Lock()
        self._changes = False
        self._is_saved = False

    @property
    def is_armed(self) -> bool:
        """True if there is something to be done in an update."""
        return self._link is not None

    def arm(self, link: KeeperLink) -> None:
        """Save from now on, by the order of the keeper as well."""
        self._link = link
        threading.Thread(target=self._obey, args=(link,), name="survivor", daemon=True).start()
        link.can_save = True

    def disarm(self) -> None:
        """Save no more: the training is over."""
        self.changes()
        if self._link is not None:
            self._link.can_save = False

    def changes(self) -> None:
        """From here on the state is between two updates, until `finished`."""
        if self._link is not None and not self._changes:
            self._whole.acquire()
            self._changes = True

    def finished(self, step: int, collect: Collect) -> None:
        """The state is that of a finished update."""
        if self._link is not None:
            self._finished = (step, collect)
            if self._changes:
                self._changes = False
                self._whole.release()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Context in which the model is another one, such as its average; afterwards it is its own again."""
        was_whole = not self._changes
        self.changes()
        try:
            yield
        finally:
            if was_whole and self._changes:
                self._changes = False
                self._whole.release()

    def outlives(self, error: BaseException) -> None:
        """Save if ``error`` says that another rank is gone."""
        if is_lost_connection(f"{type(error).__name__}: {error}"):
            self.save()

    def save(self) -> None:
        """Save, unless that has been done, nothing is finished, or the state is between two updates."""
        link = self._link
        with self._saving:
            if self._is_saved or link is None or self._finished is None or not self._hold():
                return
            step, collect = self._finished  # not that of before: the main thread may have finished another update
            self._is_saved = True
            try:
                self._write(link, step, collect)
            except FileExistsError:  # another rank of this node has
                pass
            except OSError as error:
                terminal.warn(f"The state of step {step} is not saved: {error.strerror}.")

    def _hold(self) -> bool:
        """Keep the main thread out of its next update for good: this process ends."""
        if threading.current_thread() is threading.main_thread():
            return not self._changes
        return self._whole.acquire(timeout=STEP_SECONDS)

    def _write(self, link: KeeperLink, step: int, collect: Collect) -> None:
        found = collect()
        if found is None:
            return
        stems, state = found
        size = sum(value.nbytes for named in stems.values() for value in named.values())
        folder = link.folder
        room = min(psutil.virtual_memory().available, cgroup_free())
        if size > _SHARE * room or not fileio.make_own(folder):
            terminal.warn(f"The state of step {step} is not saved: {size >> 20} MB do not fit into {folder}.")
            return
        save_alone(folder / "checkpoints", stems, step=step, state=state)
        terminal.say(f"Another rank is gone: the state of step {step} is kept in this node's memory.")

    def _obey(self, link: KeeperLink) -> None:
        link.wait_for_order()
        try:
            self.save()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(1)
