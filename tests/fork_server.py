"""Processes forked from the tests' own process, as that was when it had collected its tests.

Torch, the kit and the modules of the tests are imported by then, so a process costs a twentieth of a second instead of
the seconds of a fresh one. And none inherits what an earlier test has left: threads, locks, patches.
"""

import atexit
import gc
import importlib
import importlib.metadata
import multiprocessing
import os
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

_FORK: Any = multiprocessing.get_context("fork")
_PRELOADED = (
    *("trainkit.training.experiment", "trainkit.training.user_rank", "trainkit.distributed.strategies.ddp"),
    *("trainkit.distributed.strategies.fsdp", "trainkit.models.fashion_cnn", "sklearn.datasets", "safetensors.torch"),
    "torch._dynamo",  # DDP and the optimizers ask it
    "torchvision.transforms.v2",  # RandAugment
    "timm.optim",  # a second and a half in each rank with an optimizer of timm's
    *("trainkit.data.datasets.digits", "trainkit.training.tasks.classification", "trainkit.monitor.jsonl"),
    "trainkit.distributed.strategies.single",
)
"""What every rank would import anyway, once for all."""


@cache
def _prepare() -> None:
    """Do once, before the first fork, what every rank would find out anyway: a third of what a short run costs."""
    for name in _PRELOADED:
        importlib.import_module(name)
    from PIL import Image

    from trainkit.config.loading import load
    from trainkit.training.clock import peak_flops

    Image.preinit()
    peak_flops("cpu", "fp32")
    load("ddp")
    # Torch looks for them among all installed packages, for as long as the start of a process group takes otherwise.
    importlib.metadata.entry_points = cache(importlib.metadata.entry_points)  # type: ignore[assignment]
    importlib.metadata.entry_points(group="torch.distributed.backends")


class Fork:
    """A process that calls a function; its exit code is 0, 1 after an exception, or -N after signal N."""

    def __init__(self, server: "ForkServer", pid: int) -> None:
        self._server = server
        self.pid = pid

    @property
    def exitcode(self) -> int | None:
        self._server.look(0)
        return self._server.ended.get(self.pid)

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float = 1e6) -> None:
        deadline = time.monotonic() + timeout
        while self.is_alive() and time.monotonic() < deadline:
            self._server.look(deadline - time.monotonic())

    def kill(self) -> None:
        if self.is_alive():
            os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """A process that waits for calls, and forks for each."""

    def __init__(self) -> None:
        self.ended: dict[int, int] = {}
        self.calls = 0
        self._line, theirs = multiprocessing.Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the thread that pytest-xdist listens with
            self.pid = os.fork()
        if self.pid == 0:
            self._line.close()
            _serve(theirs)
        theirs.close()

    def start(self, function: Callable[..., Any], *args: Any) -> Fork:
        """Call a function of a module in a process with this one's output, folder, variables and module path."""
        self.calls += 1
        self._line.send_bytes(pickle.dumps((sys.path, os.getcwd(), dict(os.environ), function, args)))
        for stream in (1, 2):
            send_handle(self._line, stream, self.pid)
        while (message := self._line.recv())[0] != "started":
            self.ended[message[1]] = message[2]
        return Fork(self, message[1])

    def look(self, seconds: float) -> None:
        """Note who has ended, waiting for at most so long until somebody has."""
        while self._line.poll(max(0.0, seconds)):
            _, pid, code = self._line.recv()
            self.ended[pid] = code
            seconds = 0

    def stop(self) -> None:
        """End the server, and with it every process that is left."""
        self._line.close()
        os.waitpid(self.pid, 0)


_servers: list[ForkServer] = []


def server() -> ForkServer:
    """The server of this process, which `tests.conftest` starts once the tests are collected."""
    if not _servers:
        _servers.append(ForkServer())
    return _servers[0]


def stop() -> None:
    """End the server, if there is one."""
    while _servers:
        _servers.pop().stop()


def _serve(line: Connection) -> None:
    """Fork for each call that comes on the line, and tell the ends, until the line is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, which close the line
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/dev/fd"):  # pytest-xdist's channels, or their other ends would never see an end
        number = int(name)
        if number not in (1, 2, line.fileno(), null):
            try:
                os.dup2(null, number)
            except OSError:
                continue
    children: dict[Any, Any] = {}
    while True:
        for source in wait([line, *children]):
            if source is not line:
                process = children.pop(source)
                process.join()
                line.send(("ended", process.pid, process.exitcode))
                continue
            try:
                call = line.recv_bytes()
            except EOFError:
                for process in children.values():
                    process.kill()
                os._exit(0)
            out, err = recv_handle(line), recv_handle(line)
            _prepare()
            process = _FORK.Process(target=_call, args=(call, out, err))
            process.start()
            os.close(out)
            os.close(err)
            children[process.sentinel] = process
            line.send(("started", process.pid))


def _call(call: bytes, out: int, err: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()  # what is imported need not be looked through when the process ends
    atexit._clear()  # wandb's temporary folder is the tests' own, and is to outlive this process
    os.dup2(out, 1)
    os.dup2(err, 2)
    # pytest's own are in their place. A function may put others there, and must not close the descriptors by that.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    path, folder, variables, function, args = pickle.loads(call)
    sys.path[:] = path
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    function(*args)
