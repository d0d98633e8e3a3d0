"""Copies of a rank, which train beside it while it is measured, as runs do that share a GPU.

All train the same, so what they come to together is the rate of one, times their number.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from trainkit import fileio, terminal
from trainkit.config.loading import load
from trainkit.distributed.process_group import distributed
from trainkit.errors import RunFailedError
from trainkit.process import end_with_parent, share_of_cpus
from trainkit.ranks import RankEnv
from trainkit.schedulers.base import BEGIN
from trainkit.training.build import wants_gpu

_COPY = BEGIN + "from trainkit.bench.beside import main; from trainkit.process import run_program; run_program(main)"
_READY = "ready\n"
_MOST_SAID = 1000
"""Characters of why a copy has failed."""


@contextlib.contextmanager
def beside(run: Path, overrides: Sequence[str], copies: int) -> Iterator[None]:
    """Have so many copies train the arm of a bench; when they do so, this process may, too. Each has its share of the
    CPUs.

    Raises RunFailedError if a copy cannot train, as where the GPU's memory is full.
    """
    threads, count = torch.get_num_threads(), copies + 1
    own_threads = max(threads // count, 1)
    words = [sys.executable, "-u", "-c", _COPY, str(run), json.dumps(list(overrides)), str(own_threads)]
    others = list[subprocess.Popen[str]]()
    try:
        for index in range(1, count):
            with share_of_cpus(index, count):  # which a new process inherits
                others.append(subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, errors="replace",
                    start_new_session=True, preexec_fn=end_with_parent,
                ))  # fmt: skip
        torch.set_num_threads(own_threads)
        for other in others:
            assert other.stdout is not None
            why = "One has ended without a word."
            while (line := other.stdout.readline(_MOST_SAID)) != _READY:
                if not line:
                    fix = "Try fewer side by side, or a smaller train.micro_batch_size."
                    raise RunFailedError(f"{count} do not train side by side.", why=why, fix=fix)
                why = line.strip() or why
        with share_of_cpus(0, count):
            yield
        if any(other.poll() is not None for other in others):
            what, fix = "One of those side by side has ended early.", "Try fewer, or a smaller train.micro_batch_size."
            raise RunFailedError(what, why="The log of the rank has its last words.", fix=fix)
    finally:
        for other in others:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(other.pid, signal.SIGKILL)  # and its loader's processes
            other.communicate()
        torch.set_num_threads(threads)


def main(arguments: Sequence[str], env: Mapping[str, str]) -> int:
    """Train without end, and say when it has warmed up."""
    from trainkit.bench.run import WARM_UP, Worker

    run, overrides, threads = arguments
    made = itertools.count()

    def beat() -> None:
        if next(made) == 2 * WARM_UP:
            print(_READY, end="", flush=True)

    order = {"overrides": fileio.parse(overrides), "updates": 1 << 40}
    try:
        with distributed(RankEnv.single(), use_gpu=wants_gpu(load(run).config)) as dist:
            torch.set_num_threads(int(threads))
            worker = Worker(Path(run), RankEnv.single(), beat)
            worker.do_data(dist, order)
            worker.do_train(dist, order)
    except Exception as error:
        print(terminal.one_line(str(error) or repr(error), _MOST_SAID), flush=True)
        raise
    return 0
