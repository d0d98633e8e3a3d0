"""The worker processes behind a loader: they outlive stop signals, and never outlive the run."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import signal
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from trainkit.data.broken import Broken, noted
from trainkit.data.prefetch import on_gpu
from trainkit.errors import TrainkitError

if TYPE_CHECKING:
    import torch

Batch = TypeVar("Batch")

SHUTDOWN_SECONDS = 3.0
"""How long a worker that is asked to end may still take for what it is doing."""


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class Batches(Generic[Batch]):
    """An iterator over batches that owns its worker processes: ``with train_batches(...) as batches``.

    ``close`` ends the workers, also half way; running to the end closes by itself. For a GPU they come from a loader
    that pins them, or from a data set that lies there already. Images that are broken are noted in ``broken``.
    """

    def __init__(self, loader: Any, device: torch.device | None = None, broken: Broken | None = None) -> None:
        with warnings.catch_warnings(), _stop_signals_held():
            # Python 3.12 warns of fork in a process with threads. torch forks nevertheless, and so do we: its workers
            # run no code that takes the parent's locks, and starting them anew would import torch in each.
            warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
            self._iterator: Any = iter(loader)
        self._batches: Iterator[Any] = self._iterator if broken is None else noted(self._iterator, broken)
        if device is not None and device.type == "cuda":
            self._batches = on_gpu(self._batches, device)
        # At exit Python ends and joins its child processes, but ours ignore SIGTERM: it would wait for ever.
        self._at_exit = partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._iterator is None:
            raise StopIteration
        try:
            batch = next(self._batches)
        except BaseException:  # StopIteration too
            self.close()
            raise
        if isinstance(batch, TrainkitError):
            self.close()
            raise batch
        return batch  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the worker processes; those that hang in a read are killed after a few seconds."""
        iterator, self._iterator = self._iterator, None
        self._batches = iter(())  # it holds the last ones
        atexit.unregister(self._at_exit)
        shutdown = getattr(iterator, "_shutdown_workers", None)
        if shutdown is None:
            return  # no workers, or closed before
        workers = list(iterator._workers)
        # torch waits for one after the other, and then sends the SIGTERM that they ignore. Kill them all at once.
        timer = threading.Timer(SHUTDOWN_SECONDS, lambda: [worker.kill() for worker in workers])
        timer.start()
        try:
            shutdown()
        except RuntimeError:
            pass  # torch saw a worker die: by our hand
        finally:
            timer.cancel()
        for worker in workers:
            worker.kill()
            worker.join()

    def __enter__(self) -> Batches[Batch]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_iterator", None) is not None:
            self.close()


def _close_at_exit(reference: weakref.ref[Batches[Any]]) -> None:
    batches = reference()
    if batches is not None:
        batches.close()


def init_worker(worker: int) -> None:
    """A stop signal goes to every process of the step; workers must outlive it, for the loop still finishes its step.

    They end when the loop closes them, or when they notice that their parent is gone.
    """
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    faulthandler.register(signal.SIGUSR1)  # a rank that hangs asks for this
    gc.enable()  # the rank that it was forked from collects at moments of its own


@contextmanager
def _stop_signals_held() -> Iterator[None]:
    """Processes started meanwhile begin with stop signals held back, until they have said what to do with them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
