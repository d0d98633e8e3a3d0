"""Many small peers of one run on one machine: each is forked from a process that has imported everything already.

So they share its memory, and start in a second. What they do is the kit's own: they join as `jobs.join` does, train a
model of 19,000 weights in the run's rounds, and average with the others; only records are kept by nobody.

    python -m tests.benchmarks.arms.light_peers FOLDER

reads names from FOLDER/names, a line each, and starts a peer for each as it comes, with the token in the environment.
It says ``NAME PID`` at the start of a peer, and ``NAME: ...`` for whatever that says.
"""

import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from torch import Tensor, nn

from tests.benchmarks.processes import end_with
from trainkit.common.image_input import DataInfo

PAUSE = 0.5


class Light(nn.Sequential):
    """Sleeps for most of the time that a pass takes."""

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            time.sleep(PAUSE)
        return super().forward(images)


def model(info: DataInfo) -> nn.Module:
    """What is averaged: 38 kB in fp16."""
    return Light(nn.Flatten(), nn.Linear(info.image_size**2, 256), nn.GELU(), nn.Linear(256, info.num_classes))


def locks_of_its_own() -> None:
    """hivemind makes locks when it is imported, for a process and its helpers.

    Peers that are forks of one process would share them: they would wait for one another, and one that is killed while
    it holds one would stop all others.
    """
    from hivemind.utils import asyncio as contexts
    from hivemind.utils.mpfuture import MPFuture

    MPFuture.reset_backend()
    contexts._AsyncContextWrapper.EXECUTOR_LOCK = multiprocessing.Lock()


def main(folder: Path) -> None:
    from trainkit.swarm.network import processes

    processes.require_hivemind()
    # Everything that a peer needs, before the first is forked.
    from trainkit.swarm.identity.invitations import with_token
    from trainkit.swarm.peer import guest
    from trainkit.swarm.peer.place import Hooks, PeerSpec
    from trainkit.swarm.peer.same_run import adapted

    token = os.environ["TRAINKIT_TOKEN"]

    def peer(name: str) -> None:
        def say(line: str) -> None:
            print(f"{name}: {line}", flush=True)

        hooks = Hooks(lambda: False, say)
        adapt = lambda manifest: adapted(manifest.config, (), allow_code=True)  # noqa: E731
        ending, _ = guest.join(with_token(token), PeerSpec(name), hooks, adapt=adapt)
        say(ending)

    gc.collect()
    gc.freeze()
    started = 0
    (folder / "names").touch()
    while True:
        names = (folder / "names").read_text().split()
        for name in names[started:]:
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                end_with(parent)
                locks_of_its_own()
                try:
                    peer(name)
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    os.kill(os.getpid(), signal.SIGKILL)
            print(f"{name} {pid}", flush=True)
        started = len(names)
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                break
        time.sleep(0.1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
