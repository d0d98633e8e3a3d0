"""Which rank of its peer this process is; starts the others where nobody else has."""

from __future__ import annotations

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
    size = known.world_size if number is None else number
    why, fix = "A peer has one rank for each of its GPUs, 1 to 64.", "Use --nproc 2 for two GPUs."
    if known.world_size > 1:
        why, fix = f"{known.launcher} has started {known.world_size} ranks already.", "Leave --nproc out."
    if size != known.world_size and (known.world_size > 1 or not 0 < size <= 64):
        raise UserError(f"--nproc {number} is not possible here.", why=why, fix=fix)
    if size == known.world_size:
        yield known, Secret.from_mapping(env)
        return
    secret = Secret.generate()
    common = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "NODE_RANK": "0",
        VARIABLE: secret.text,
    }
    variables = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for own in variables[1:]:
            process = subprocess.Popen(
                [sys.executable, "-u", "-m", "trainkit", verb, *arguments],
                env={**env, **own},
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is rank 0's
                preexec_fn=end_with_parent,
            )
            started.append(process)
        yield RankEnv.from_mapping(variables[0]), secret
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
