"""hivemind's helper processes: started by fork, gone when their peer is gone.

A peer has three of them: the DHT, libp2p's daemon (a child of the DHT), the averager. Killed with -9, a peer used to
leave the last two behind for ever, accepting work that nobody does. Linux sends each of them SIGKILL as soon as its
parent dies, if asked to.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import platform
import signal
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import update_wrapper
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import psutil

from trainkit.common import fileio
from trainkit.common.errors import RefusedError, RunFailedError
from trainkit.common.process import end_with_parent, set_variables, sleep_while_waiting


@contextmanager
def private_sockets() -> Iterator[None]:
    """libp2p's daemon started in the block, and its clients, are controlled by this user alone.

    hivemind puts their sockets into /tmp, and takes no other place: any user who may write to one may use it. Processes
    that are forked in the block keep to this for all their life.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def require_hivemind() -> None:
    """Prepare this process for hivemind, before it is imported for the first time.

    Raises RefusedError where there is no hivemind.
    """
    if platform.system() != "Linux":
        fix = "Join from a Linux machine, or from the notebook jobs/notebooks/join_colab.ipynb."
        why = f"hivemind does not exist for {platform.system()}."
        raise RefusedError("Collaborative runs need Linux.", why=why, fix=fix)
    # hivemind hands locks and pipes to its processes, which only fork can do: with `spawn` and `forkserver` (Python
    # 3.14's default) it raises, and then hangs at exit.
    multiprocessing.set_start_method("fork", force=True)
    # Its loggers print tracebacks for what is normal here, such as a round without others.
    set_variables({"HIVEMIND_LOGLEVEL": "CRITICAL"}, unless_set=True)
    # Peers share their cores with helpers, and with other peers when somebody tries it on a laptop. Threads that wait
    # by spinning take the cores from those that work: 30 images/s instead of 1,900 with three peers on two cores.
    sleep_while_waiting()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside hivemind that no user of ours can mend
            import hivemind  # noqa: F401

            _start_memory_manager()
    except ImportError as error:
        why = f"It cannot be imported: {error}."
        raise RefusedError("Collaborative runs need hivemind.", why=why, fix="pip install hivemind") from None


def _start_memory_manager() -> None:
    """Start torch's manager of shared memory, deaf to stop signals.

    hivemind's messages need it to the end, and a stop signal goes to every process of a job step. It ends by itself
    when the last process that it serves is gone. Signals that are blocked when a program starts stay blocked in it.
    """
    import torch

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        torch.empty(1).share_memory_()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def become_helper(parent: int) -> None:
    """Prepare a forked process of hivemind's, first of all: die with ``parent``, and leave signals to it."""
    end_with_parent()
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)
    # Ctrl-C goes to the whole terminal group, USR2 to every process of a SLURM step: the peer decides what they mean.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    # The peer's own handler, inherited by fork, only sets a flag that nobody reads here.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


P = ParamSpec("P")
T = TypeVar("T")
_TASKS: set[asyncio.Task[Any]] = set()


def hold_tasks() -> None:
    """Keep this task, and all that the running loop makes from now on, alive until they are done.

    asyncio itself holds tasks weakly, and hivemind does what its peer asks in tasks that it does not hold either: the
    garbage collector ended one that waited, and the peer was never answered.
    """
    loop = asyncio.get_running_loop()
    own = asyncio.current_task()
    if loop.get_task_factory() is None and own is not None:
        loop.set_task_factory(lambda loop, work, **options: _hold(asyncio.Task(work, loop=loop, **options)))
        _hold(own)


def _hold(task: asyncio.Task[Any]) -> asyncio.Task[Any]:
    _TASKS.add(task)
    task.add_done_callback(_TASKS.discard)
    return task


def family(pid: int | None) -> list[psutil.Process]:
    """A helper process and what it has started; empty if it is gone."""
    with suppress(psutil.NoSuchProcess):
        if pid is not None:
            helper = psutil.Process(pid)
            return [helper, *helper.children(recursive=True)]
    return []


def all_alive(processes: list[psutil.Process]) -> bool:
    """Return whether there are some, and none has ended."""
    with suppress(psutil.NoSuchProcess):
        return bool(processes) and all(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes)
    return False


# A limit is longer by this much at most.
_MOST_PATIENT = 20.0


def at_load(seconds: float) -> float:
    """Return how long to wait for what takes at most so long where enough cores are free: limits that do not know the
    load take a busy machine for one that is not there.
    """
    with suppress(OSError):
        return seconds * slowness(fileio.read_text(Path("/proc/loadavg")), len(os.sched_getaffinity(0)))
    return seconds


def slowness(loadavg: str, cores: int) -> float:
    """Return by how much everything takes longer, by Linux's words on its load: of the last minute, and of this
    moment.
    """
    of_a_minute, _, _, now, _ = loadavg.split()
    return min(max(1.0, float(of_a_minute) / cores, int(now.partition("/")[0]) / cores), _MOST_PATIENT)


# A helper answers in milliseconds; on a machine with much too much to do it takes longer.
_ANSWER_SECONDS = 180.0


def answer_of(asked: Any, helper: str, pid: int | None) -> Any:
    """Return what a helper process answers, by the future of it.

    Raises RunFailedError when the process is gone, or is silent for too long.
    """
    began = time.monotonic()
    while True:
        with suppress(OSError, FutureTimeoutError):
            return asked.result(0.5)
        if asked.done():
            if asked.exception() is None:  # it has come since
                continue
            # What the helper has started itself, libp2p's daemon, is out of its reach.
            raise HelperDiedError(helper)
        if not all_alive(family(pid)[:1]):
            raise HelperDiedError(helper)
        silent = time.monotonic() - began
        if silent > _ANSWER_SECONDS:
            what = f"The {helper} of this peer has not answered for {silent:.0f} s."
            why = f"Its process {pid} is alive, but hangs or gets no CPU time: load {os.getloadavg()[0]:.0f}."
            raise RunFailedError(what, why=why, fix="Start the peer again when fewer other programs are running.")


def asked(work: Callable[Concatenate[Any, P], Awaitable[T]]) -> Callable[Concatenate[Any, P], T]:
    """Return what the averager's process does, for the peer's own to call and wait for."""

    def ask(averager: Any, /, *of: P.args, **by_name: P.kwargs) -> T:
        from hivemind.utils.mpfuture import MPFuture

        answer: Any = MPFuture()
        averager._outer_pipe.send(("_answer", [answer, work.__name__, *of], by_name))
        found: T = answer_of(answer, "averager", averager.pid)
        return found

    update_wrapper(ask, work)
    return ask


class HelperDiedError(RunFailedError):
    """A peer has lost one of its helpers, and with it all others."""

    def __init__(self, helper: str) -> None:
        why = "Without it this peer reaches nobody; usually memory ran out."
        what = f"A helper process of this peer died: its {helper}."
        super().__init__(what, why=why, fix="Start the peer again.")


def end(processes: list[psutil.Process], *, patience: float = 1.0) -> None:
    """Kill those of ``processes`` that are still alive, each by its id, and wait until they are gone."""
    _, alive = psutil.wait_procs(processes, timeout=patience)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=2.0)


_TCP_SECONDS = 3.0
_GREETING = b"\x13/multistream/1.0.0\n"


async def listens(item: str) -> bool:
    """Return whether libp2p greets at this address; behind an anchor, there is nobody without the creator."""
    _, _, host, _, port, *_ = item.split("/")
    with suppress(OSError):
        async with asyncio.timeout(_TCP_SECONDS):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(_GREETING)
                return bool(await reader.read(1))
            finally:
                writer.close()
    return False


async def answers_at(item: str, seconds: float) -> bool:
    """Return whether a libp2p daemon that knows nobody yet comes through to the peer, and finds its key there."""
    with suppress(Exception):  # of libp2p's daemon: it does not
        async with daemon_at([item], seconds):
            return True
    return False


@asynccontextmanager
async def daemon_at(peers: Sequence[str], seconds: float) -> AsyncIterator[Any]:
    """A libp2p daemon that is connected to these peers, and ends with the block."""
    from hivemind.p2p import P2P

    seconds = at_load(seconds)
    options = {"dht_mode": "client", "auto_nat": False, "nat_port_map": False, "startup_timeout": seconds}
    with private_sockets():
        p2p = await asyncio.wait_for(P2P.create(initial_peers=peers, **options), seconds + 2.0)
    try:
        yield p2p
    finally:
        await p2p.shutdown()
