"""Real ranks for tests: processes that meet over gloo on loopback.

They are forked from a server that has imported torch and the kit once (`tests.fork_server`), so that starting four of
them takes a fraction of a second.
"""

import atexit
import importlib
import os
import pickle
import runpy
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.fork_server import Fork, server
from trainkit.cluster.ranks import NO_SECRET, RankEnv, Secret
from trainkit.cluster.signals import StopFlag
from trainkit.common.hosts import free_port
from trainkit.config.loading import load, to_yaml
from trainkit.run.events import Attempt, writing
from trainkit.run.folder import RunDir

# On the CPU also where there is a GPU: four ranks are more than one GPU has room for.
QUICK = (
    "train.precision=fp32",
    "launch.gpus_per_node=0",
    "monitor.loggers=[jsonl]",
    "monitor.log_every=1",
    "monitor.hardware_every_seconds=60",
)


WORDS_SECONDS = 30.0
"""Time for other ranks to end after one that has died without a word."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 240,
    nodes: int = 1,
    gpu: Mapping[str, str] | None = None,
) -> list[Any]:
    """``function(env, *args)`` on ``world_size`` ranks, as if on ``nodes`` nodes; their results in order of rank.

    A rank's exception fails the test with that rank's traceback.

    Args:
        gpu: variables of the simulated accelerator, which the ranks have where there is no real one.
    """
    port = free_port()
    with TemporaryDirectory() as folder:
        files = [Path(folder, str(rank)) for rank in range(world_size)]
        ranks = []
        for rank, file in enumerate(files):
            ranks.append(server().start(_rank, file, rank_env(rank, world_size, port, nodes), function, args, gpu))
        try:
            return _results(ranks, files, timeout)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _results(ranks: list[Fork], files: list[Path], timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    died: dict[int, float] = {}
    while len(results) < len(ranks):
        assert time.monotonic() < deadline, f"no result within {timeout:g} s of {len(ranks) - len(results)} ranks"
        server().look(1.0)
        for rank, process in enumerate(ranks):
            if rank in results or process.is_alive():
                continue
            if not files[rank].exists():
                died.setdefault(rank, time.monotonic())
                continue
            results[rank], failure = pickle.loads(files[rank].read_bytes())
            if failure is not None:
                raise AssertionError(f"rank {rank} failed:\n{failure}")
            assert process.exitcode == 0, f"a rank ended with {process.exitcode} after its work was done"
        others_speak = any(process.is_alive() for process in ranks)  # of what the death did to them
        for rank, since in died.items():
            is_over = not others_speak or time.monotonic() - since > WORDS_SECONDS
            assert not is_over, f"rank {rank} ended with {ranks[rank].exitcode} and without a result"
    return [results[rank] for rank in range(len(ranks))]


def rank_env(rank: int, world_size: int, port: int, nodes: int = 1) -> RankEnv:
    """A rank on this machine, which may stand for several nodes."""
    per_node = world_size // nodes
    return RankEnv(
        rank=rank, world_size=world_size, local_rank=rank % per_node, local_world_size=per_node,
        node_rank=rank // per_node, num_nodes=nodes, master_addr="127.0.0.1", master_port=port, launcher="manual",
    )  # fmt: skip


def _rank(
    file: Path, env: RankEnv, function: Callable[..., Any], args: tuple[Any, ...], gpu: Mapping[str, str] | None
) -> None:
    import torch

    if gpu is not None:
        os.environ.update(gpu)
        if not torch.accelerator.is_available():
            importlib.import_module("tests.accelerator.sim")
    torch.set_num_threads(1)
    try:
        result = pickle.dumps((function(env, *args), None))
    except BaseException:
        result = pickle.dumps((None, traceback.format_exc()))
    file.write_bytes(result)


def run_command(verb: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """``python -m jobs.<verb>`` in a process of its own, where the start of one, and its imports, are not the point."""
    with TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = server().start(_command, verb, arguments, cwd, out, err)
        process.join(timeout=120)
        process.kill()
        process.join()
        assert process.exitcode is not None
        return subprocess.CompletedProcess((verb, *arguments), process.exitcode, out.read_text(), err.read_text())


def _command(verb: str, arguments: tuple[str, ...], cwd: Path, out: Path, err: Path) -> None:
    import torch

    from jobs import cli

    torch.set_num_threads(1)
    for stream, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
    os.chdir(cwd)
    sys.argv = [f"jobs/{verb}.py", *arguments]
    raise SystemExit(cli.call(importlib.import_module(f"jobs.{verb}").main))


def start_script(file: Path, arguments: tuple[str, ...], env: Mapping[str, str], out: Path) -> Fork:
    """Start ``python file arguments`` in the folder of the file, without the seconds that its imports take."""
    return server().start(_script, file, arguments, dict(env), out)


def _script(file: Path, arguments: tuple[str, ...], env: dict[str, str], out: Path) -> None:
    import torch

    torch.set_num_threads(1)
    for stream in (1, 2):
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.chdir(file.parent)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [str(file), *arguments]
    try:  # and do at its end what an interpreter does that this process does not end
        runpy.run_path(str(file), run_name="__main__")
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()


class StopAfter(StopFlag):
    """A stop request that comes when the loop looks for one the ``reads``-th time: at the same place in every run."""

    def __init__(self, reads: int) -> None:
        self._left = reads
        self.signals = ["SIGUSR2"]

    @property
    def requested(self) -> bool:  # type: ignore[override]
        self._left -= 1
        return self._left <= 0


def train_run(
    env: RankEnv,
    folder: Path,
    preset: str,
    overrides: tuple[str, ...],
    stop_after: int | None = None,
    secret: Secret = NO_SECRET,
) -> str:
    """Train a preset in ``folder``, which may hold an interrupted run; how it ended. Only rank 0 is told to stop."""
    from trainkit.training import experiment

    # A 16th of the work: what is trained is not the point, and in bf16 and fp16 a CPU is slow.
    narrow = () if any(word.startswith("model.name=") for word in overrides) else ("model.width=8",)
    few = ("data.val_size=64", "data.test_size=64") if "data.name=synthetic" in overrides else ()
    config = load(preset, (*QUICK, *narrow, *few, *overrides)).config
    stop = StopAfter(stop_after) if stop_after is not None and env.rank == 0 else StopFlag()

    with ExitStack() as held:

        def open_run() -> Attempt:
            run = RunDir.open(folder) if folder.exists() else RunDir.create(folder, to_yaml(config))
            return held.enter_context(writing(Attempt.begin(run)))

        outcome, _ = experiment.run(config, env, stop, open_run=open_run, secret=secret)
    return outcome
