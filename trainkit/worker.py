"""One rank of a run, or of a bench: every task of a job runs this, however it was started."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.cluster.job_states import require_no_job
from trainkit.cluster.ranks import RankEnv, Secret
from trainkit.cluster.scheduler import around
from trainkit.cluster.signals import KeeperLink, StopFlag, heartbeat, stop_on_signal
from trainkit.common import terminal
from trainkit.common.errors import TrainkitError, UserError
from trainkit.common.process import leave, leave_if_failing
from trainkit.config.checks import strategy_traits
from trainkit.config.loading import load, settled_by, to_yaml
from trainkit.config.schema import Config, ScriptConfig
from trainkit.recovery.keeper import keep
from trainkit.recovery.preload import load_torch, preload
from trainkit.run.events import Attempt, job_of, submitted, writing
from trainkit.run.find import find_run, list_runs, next_path, runs_root
from trainkit.run.folder import BenchDir, RunDir, as_open_as
from trainkit.run.history import history_of
from trainkit.run.run_lease import Holder, ProcessId, lease_of, lease_on
from trainkit.run.run_manifest import write_manifest

if TYPE_CHECKING:
    from trainkit.training.user_rank import Rank

CONTINUE = "TRAINKIT_CONTINUE"
"""Names a run for a script that no launcher of ours has started to go on with."""


def run_rank(folder: str) -> str:
    """Run this rank's share of the training, or bench, in ``folder``, and return its outcome.

    The signal handlers come first: until they are in place, the signal of a time limit would kill the task.
    """
    with stop_on_signal() as stop, ExitStack() as held:
        try:
            run = RunDir.open(Path(folder))
            held.enter_context(as_open_as(run.path))
            config = load(str(run.config)).config
            env: Mapping[str, str] = dict(os.environ)
            if not BenchDir(run.path).request.exists():
                env = keep_rank(config, env, stop)
            attempt = Attempt.named_in(env)

            def open_run() -> Attempt:
                return held.enter_context(writing(own_attempt(attempt, run, env), job_id=job_of(env)))

            if BenchDir(run.path).request.exists():
                from trainkit.bench.job import run as run_bench  # and with it torch

                return run_bench(
                    BenchDir(run.path), config, RankEnv.from_mapping(env), stop,
                    open_run=open_run, secret=Secret.from_mapping(env), beat=heartbeat(env),
                )  # fmt: skip
            outcome, _ = train(config, env, stop, attempt, open_run)
        except TrainkitError as error:
            terminal.warn(str(error))
            leave(error.exit_code)
    return outcome


def keep_rank(config: Config, env: Mapping[str, str], stop: StopFlag) -> Mapping[str, str]:
    """Become the keeper of this rank, where a launcher of ours has started it. Returns in the rank, with its
    environment."""
    leave_if_failing()
    is_swarm = strategy_traits(config.strategy.name).loop == "collaborative"
    if is_swarm or not (config.launch.requeue and config.launch.restart_in_place):
        return env
    if config.script is not None:
        return keep(env, stop, lambda: None)
    return keep(env, stop, partial(preload, config, env))


def train(
    config: Config, env: Mapping[str, str], stop: StopFlag, node: Attempt | None, open_run: Callable[[], Attempt]
) -> tuple[str, RunDir | None]:
    """Train as the rank that ``env`` says. Returns the outcome and, on rank 0, the run.

    Args:
        node: the attempt as this node's supervisor has begun it, if any; it need not share rank 0's folder.
        open_run: called on rank 0 alone, when there is something to write.
    """
    beat = heartbeat(env)
    if config.script is not None:
        from trainkit.script.script_rank import run_script

        return run_script(config, env, stop, node, beat, open_run)
    rank_env = RankEnv.from_mapping(env)
    secret = Secret.from_mapping(env)
    if strategy_traits(config.strategy.name).loop == "collaborative":  # each rank is a peer with a loop of its own
        from trainkit.swarm.peer.entry_points import run_swarm_rank

        writer = open_run() if rank_env.is_main else None
        ends = run_swarm_rank(config, rank_env, stop, writer=writer, node=node, beat=beat, env=env)
        return ends, writer.run if writer is not None else None
    from trainkit.training.startup import Reports, Starting  # whoever submits imports this file, and trains nothing

    starting = Starting(speaks=rank_env.is_main, attempt=node)
    starting.at("load torch")
    load_torch(config)
    from trainkit.training import experiment

    reports = Reports(node, beat, KeeperLink.named_in(env), starting)
    outcome, run_dir = experiment.run(config, rank_env, stop, open_run=open_run, secret=secret, reports=reports)
    return outcome, run_dir if rank_env.is_main else None


def rank(*settings: str) -> "Rank":
    """Be one rank of a loop of your own, started by whatever launcher or by none: with a device, a process group, a
    seed, a run folder, and saved when it is told to stop.

    It ends with its ``with`` block or, where it stands in none, with the program.

    Without a launcher of ours a new run is made in the runs folder, called after the script; ``TRAINKIT_CONTINUE=RUN``
    goes on with that one.

    Args:
        settings: ``section.key=value`` of ``seed``, ``strategy``, ``checkpoint``, ``monitor`` and ``train.precision``,
            where neither the command that has submitted the run nor the run itself says otherwise.

    Raises:
        UserError: a setting is wrong, or somebody else writes that run.

    Example:
        >>> import torch
        >>> with trainkit.rank("monitor.loggers=[jsonl]") as rank:
        ...     model = rank.wrap(torch.nn.Linear(4, 2))
        >>> rank.rank, rank.world_size
        (0, 1)
    """
    from trainkit.training.user_rank import close_waiting, stay_open

    close_waiting()
    stack = ExitStack()
    return stay_open(stack.enter_context(_opened(settings)), stack)


@contextmanager
def _opened(settings: Sequence[str]) -> Iterator["Rank"]:
    env = dict(os.environ)
    try:
        with ExitStack() as held:
            stop = held.enter_context(stop_on_signal(leaves_process=False))
            yield held.enter_context(_rank(settings, env, stop, held))
    except TrainkitError as error:
        if "ipykernel" in sys.modules or hasattr(sys, "ps1"):  # where the process goes on
            raise
        terminal.warn(f"{error}\n   at: {_line_of(error)}")
        raise SystemExit(error.exit_code) from None


def _rank(
    settings: Sequence[str], env: Mapping[str, str], stop: StopFlag, held: ExitStack
) -> AbstractContextManager["Rank"]:
    attempt = Attempt.named_in(env)
    rank_env = RankEnv.from_mapping(env)
    path = _path_of(env, attempt)
    stored = Config(script=script_of_this_process())
    if (path / "config.yaml").is_file():
        stored = load(str(path)).config
    config = settled_by(stored, settings)
    if strategy_traits(config.strategy.name).loop == "collaborative":
        why = "Its peers train by rounds, in a loop of its own."
        fix = "Use ddp, fsdp, zero or single."
        raise UserError(f"strategy.name={config.strategy.name} is none for trainkit.rank().", why=why, fix=fix)
    held.enter_context(as_open_as(path))

    def open_run() -> Attempt:
        if (path / "config.yaml").is_file():
            run = RunDir.open(path)
        else:
            run = RunDir.create(path, to_yaml(config), after_logs=attempt is not None)
            write_manifest(run, sys.orig_argv)
        if attempt is None:  # no launcher has checked this before
            require_no_job(run, force=False)
        else:
            lease = lease_of(run, attempt.number)
            if lease is not None:
                return replace(attempt, may_write=lease.check)
        return held.enter_context(writing(own_attempt(attempt, run, env), job_id=job_of(env)))

    from trainkit.monitor.hardware import SAMPLED
    from trainkit.training.startup import Reports, Starting
    from trainkit.training.user_rank import rank_of

    starting = Starting(speaks=rank_env.is_main, attempt=attempt)
    reports = Reports(attempt, heartbeat(env), KeeperLink.named_in(env), starting, is_sampled=SAMPLED in env)
    secret = Secret.from_mapping(env)
    return rank_of(config, rank_env, stop, open_run=open_run, secret=secret, reports=reports)


def _path_of(env: Mapping[str, str], attempt: Attempt | None) -> Path:
    """Folder of the run that this process is to train: that of its launcher, one to go on with, or a new one."""
    if attempt is not None:
        return attempt.run.path
    if env.get(CONTINUE):
        return find_run(env[CONTINUE], env).path
    if env.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":  # torchrun starts its ranks again
        for run in reversed(list_runs(runs_root(env))):
            if history_of(run).started.get("parent") == ProcessId.of(os.getppid()).word():
                return run.path
    script = script_of_this_process()
    name = script.name.removesuffix(".py") if script.module is None else script.name.rpartition(".")[2]
    return next_path(runs_root(env), name)


def script_of_this_process() -> ScriptConfig:
    """The script that Python runs, with its arguments: a file, a module, or a notebook."""
    main = sys.modules["__main__"]
    words = tuple(word.replace("{", "{{").replace("}", "}}") for word in sys.argv[1:])
    spec = getattr(main, "__spec__", None)
    if spec is not None:  # python -m
        return ScriptConfig(module=spec.name.removesuffix(".__main__"), arguments=words, root=os.getcwd())
    file = Path(getattr(main, "__file__", None) or "notebook").absolute()
    return ScriptConfig(path=str(file), arguments=words, root=str(file.parent))


def _line_of(error: TrainkitError) -> str:
    """File and line of the user's own that has led to an error."""
    ours = str(Path(__file__).parent) + os.sep
    lines = ["?"]
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith(ours) and "contextlib" not in file:
            lines.append(f"{file}:{line}")
    return lines[-1]


def own_attempt(attempt: Attempt | None, run: RunDir, env: Mapping[str, str]) -> Attempt:
    """Return the attempt that rank 0 writes down; a new one where nobody has begun one for it."""
    if attempt is None:
        with lease_on(run, Holder.me()):  # or it is refused before an attempt is made
            return Attempt.begin(run)
    record_job(run, env, attempts_before=attempt.number)
    return attempt


def record_job(run: RunDir, env: Mapping[str, str], *, attempts_before: int) -> None:
    """Write down the job around this process, if nobody has: one of a template, or one whose submitter was killed.

    So `status` and `cancel` find it.
    """
    job_id = job_of(env)
    life = history_of(run)
    is_known = any(item.job_id == job_id for item in life.submissions)
    if job_id and not is_known and ("SUBMITIT_EXECUTOR" not in env or life.cut_short is not None):
        submitted(run, around(env)[0].name, job_id, attempts_before=attempts_before)
