"""Which rank of its peer this process is; starts the others where nobody else has."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainkit import fileio
from trainkit.config.schema import Config
from trainkit.errors import UserError
from trainkit.process import end_with_parent
from trainkit.ranks.env import VARIABLE, RankEnv, Secret, free_port

_LEAVE_SECONDS = 20.0


@contextmanager
def ranks_of_peer(
    number: int | None, verb: str, arguments: Sequence[str], env: Mapping[str, str]
) -> Iterator[tuple[RankEnv, Secret]]:
    """This process's place among the ranks of its peer, and what they know.

    A launcher (torchrun, srun) has started all of them and says so in ``env``; or this process is rank 0 and starts the
    others, by the command that it was started with itself. They end with it, however it ends.

    Args:
        number: of ranks, as the user has asked; None: as many as a launcher has started, else 1.
        verb, arguments: ``python -m jobs.VERB ARGUMENTS``.

    Raises UserError when user and launcher disagree.
    """
    known = RankEnv.from_mapping(env)
    if number not in (None, known.world_size) and (known.world_size > 1 or not 0 < (number or 0) <= 64):
        raise UserError(
            f"--nproc {number} is not possible here.",
            why=f"{known.launcher} has started {known.world_size} ranks already."
            if known.world_size > 1
            else "A peer has one rank for each of its GPUs, 1 to 64.",
            fix="Leave --nproc out." if known.world_size > 1 else "Use --nproc 2 for two GPUs.",
        )
    if known.world_size > 1 or number in (None, 1):
        yield known, Secret.from_mapping(env)
        return
    assert number is not None
    port, secret = free_port(), Secret.generate()
    common = {
        "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NODE_RANK": "0",
        VARIABLE: secret.text,
    }
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(1, number):
            variables = {**env, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(
                subprocess.Popen(
                    [sys.executable, "-u", "-m", "trainkit", verb, *arguments],
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is rank 0's
                    preexec_fn=end_with_parent,
                )
            )
        yield RankEnv.from_mapping({**common, "RANK": "0", "LOCAL_RANK": "0"}), secret
        for process in started:
            process.wait(_LEAVE_SECONDS)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()


def follow_rank_0(env: RankEnv, secret: Secret, *, use_gpu: bool, beat: Callable[[], None] = lambda: None) -> None:
    """Be another rank of a peer: train with rank 0, as it says, and leave when it does.

    Raises RunFailedError when rank 0 has died.
    """
    from trainkit.config.loading import load
    from trainkit.data import build_data
    from trainkit.data.base import Splits
    from trainkit.distributed.process_group import distributed
    from trainkit.models import build_model
    from trainkit.swarm.team import PATIENCE, follow

    def make(yaml: str) -> tuple[Config, Splits, Any]:
        # Rank 0, who knows the secret, has asked whether its code may be run.
        with tempfile.TemporaryDirectory(prefix="trainkit-") as folder:
            file = Path(folder) / "rank-0.yaml"
            fileio.write(file, yaml)
            config = load(str(file)).config
        splits = build_data(config.data)
        return config, splits, build_model(config.model, splits.info, config.seed)

    with distributed(env, use_gpu=use_gpu, secret=secret, collective_timeout=PATIENCE) as dist:
        follow(dist, make=make, beat=beat)


def deaf_to_signals() -> None:
    """Signals to all processes of a peer are rank 0's business."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
