"""Copies of a rank, which train beside it while it is measured, as runs do that share a GPU.

All train the same, so what they come to together is the rate of one, times their number.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from trainkit.cluster.pickles import BEGIN, PYTHON_FLAGS
from trainkit.common.errors import RunFailedError
from trainkit.common.process import end_with_parent, share_of_cpus

_COPY = (
    BEGIN + "from trainkit.bench.rank import main; from trainkit.common.process import run_program; run_program(main)"
)
READY = "ready"
MOST_SAID = 1000
"""Characters of why a copy has failed."""


@contextlib.contextmanager
def beside(run: Path, overrides: Sequence[str], copies: int) -> Iterator[None]:
    """Have so many copies train the arm of a bench; when they do so, this process may, too. Each has its share of the
    CPUs.

    Raises RunFailedError if a copy cannot train, as where the GPU's memory is full.
    """
    threads = torch.get_num_threads()
    count = copies + 1
    own_threads = max(threads // count, 1)
    words = [sys.executable, *PYTHON_FLAGS, "-c", _COPY, str(run), json.dumps(list(overrides)), str(own_threads)]
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
            why = "One of them ended without a message."
            said = ""
            while said != READY:
                line = other.stdout.readline(MOST_SAID)
                if not line:
                    fix = "Try fewer at a time, or a smaller train.micro_batch_size."
                    raise RunFailedError(f"{count} do not train side by side.", why=why, fix=fix)
                said = line.strip()
                why = said or why
        with share_of_cpus(0, count):
            yield
        if any(other.poll() is not None for other in others):
            what = "One of the processes side by side has ended early."
            fix = "Try fewer, or a smaller train.micro_batch_size."
            raise RunFailedError(what, why="The log of the rank has its last output.", fix=fix)
    finally:
        for other in others:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(other.pid, signal.SIGKILL)  # and its loader's processes
            other.communicate()
        torch.set_num_threads(threads)
