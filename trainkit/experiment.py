"""Composition: configuration + run folder + ranks -> everything built, loop called, results written."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from trainkit import plugins
from trainkit.checkpoint import files
from trainkit.checkpoint.saving import Checkpoints
from trainkit.config.loading import to_yaml
from trainkit.config.schema import Config
from trainkit.data import build_data
from trainkit.data.base import Splits
from trainkit.data.loader import resolve_workers
from trainkit.data.order import steps_per_epoch
from trainkit.distributed.device import cpus_of_rank, device_name, peak_memory_mb
from trainkit.distributed.process_group import Distributed, distributed
from trainkit.distributed.stop import StopFlag
from trainkit.errors import TrainkitError, UserError
from trainkit.models import build_model
from trainkit.monitor.base import open_loggers
from trainkit.monitor.hardware import sample_hardware
from trainkit.ranks.env import RankEnv
from trainkit.ranks.secret import NO_SECRET, Secret
from trainkit.records.events import append_event
from trainkit.records.rundir import RunDir
from trainkit.strategies.base import Strategy
from trainkit.training.evaluate import evaluate
from trainkit.training.loop import Progress, Training, train
from trainkit.training.optim import build_optimizer
from trainkit.training.precision import Precision, choose_precision

Outcome = Literal["finished", "preempted"]


def run(
    config: Config,
    env: RankEnv,
    stop: StopFlag,
    *,
    open_run: Callable[[], RunDir],
    attempt: int | None,
    secret: Secret = NO_SECRET,
) -> tuple[Outcome, RunDir]:
    """Train one rank's share of a run to its end, or until all ranks have been told to stop and have saved.

    Args:
        open_run: makes or opens the run folder; called on rank 0 only, once the ranks have met.
        attempt: number of this start of the run, for its events; null: the next.
        secret: what the ranks of this run know and nobody else.

    Raises:
        TrainkitError: what a user can mend. It has been written to the run's events.
    """
    splits = build_data(config.data)
    with distributed(env, use_gpu=wants_gpu(config), secret=secret) as dist:
        _check_batch_sizes(config, dist.world_size, splits)
        run_dir = _meet(config, dist, open_run)
        attempt = dist.broadcast_json(attempt if attempt is not None else len(run_dir.attempts()))
        with _failures_recorded(run_dir, dist):
            outcome = _run(config, dist, stop, splits, run_dir, attempt)
    return outcome, run_dir


def wants_gpu(config: Config) -> bool:
    """Train on GPU: there is one, and the configuration does not say zero."""
    return config.launch.gpus_per_node != 0 and torch.cuda.is_available()


def _run(config: Config, dist: Distributed, stop: StopFlag, splits: Splits, run_dir: RunDir, attempt: int) -> Outcome:
    model, strategy, precision = build_parts(config, dist, splits)
    optimizer = build_optimizer(model, config.optim)
    checkpoints = Checkpoints(run_dir.checkpoints, keep=config.checkpoint.keep, dist=dist)
    restored = checkpoints.restore(model, optimizer)
    progress = Progress(**restored.state["progress"]) if restored else Progress()
    if restored:
        precision.load_state_dict(restored.state["precision"])
    training = Training(
        config=config,
        dist=dist,
        splits=splits,
        model=model,
        strategy=strategy,
        optimizer=optimizer,
        precision=precision,
        workers=resolve_workers(config.data.workers, splits, cpus_of_rank(dist.env)),
        metrics=None,  # type: ignore[arg-type]  # opened below, with what only `training` knows
        progress=progress,
        save=lambda: _save(training, checkpoints, run_dir),
        stop_requested=lambda: stop.requested,
    )
    params = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    hosts = dist.gather_json(socket.gethostname())
    if dist.is_main:
        append_event(
            run_dir,
            "started",
            attempt=attempt,
            step=progress.step,
            total_steps=training.total_steps,
            steps_per_epoch=training.steps_per_epoch,
            world_size=dist.world_size,
            hosts=list(dict.fromkeys(hosts)),
            device=device_name(dist.device),
            precision=precision.name,
            params=params,
        )
    loggers = open_loggers(
        config,
        run_dir,
        total_steps=training.total_steps,
        params=params,
        world_size=dist.world_size,
        resumed_step=progress.step,
        is_main=dist.is_main,
    )
    with loggers as metrics, _hardware(config, run_dir, dist):
        training.metrics = metrics
        if not train(training):
            _hand_back(run_dir, dist, stop, progress.step, attempt, requeue=config.launch.requeue)
            return "preempted"
        test = _test(training, checkpoints)
        metrics.log({"step": progress.step, "epoch": progress.step / training.steps_per_epoch, "split": "test", **test})
    if dist.is_main:
        _write_summary(training, run_dir, test, params)
        append_event(run_dir, "finished", attempt=attempt, step=progress.step)
    return "finished"


def build_parts(config: Config, dist: Distributed, splits: Splits) -> tuple[nn.Module, Strategy, Precision]:
    """The model as its strategy makes it, the strategy, and the number format, on this rank's device."""
    name = config.strategy.name
    plugins.check_options("trainkit.strategies", name, config.strategy.options, where="strategy")
    strategy: Strategy = plugins.load("trainkit.strategies", name)(dist, **config.strategy.options)
    precision = Precision(choose_precision(config.train.precision, dist.device), dist)
    model = build_model(config.model, splits.info, config.seed).to(dist.device)
    return strategy.parallelize(model), strategy, precision


def _meet(config: Config, dist: Distributed, open_run: Callable[[], RunDir]) -> RunDir:
    """Rank 0 opens the run folder and all ranks learn its path, or all fail alike."""
    # Where it is launched and where its data lies may differ: machines need not share a folder.
    data = config.data.model_copy(update={"root": ""})
    settings = to_yaml(config.model_copy(update={"launch": type(config.launch)(), "data": data}))
    others = dist.gather_json(settings)
    if any(other != settings for other in others):
        different = [rank for rank, other in enumerate(others) if other != others[0]]
        raise UserError(
            f"The ranks were started with different settings: rank {different[0]} differs from rank 0.",
            why="One run has one configuration.",
            fix="Give the same preset and overrides on every node.",
        )
    opened, failed = "", None
    if dist.is_main:
        try:
            opened = str(open_run().path)
        except TrainkitError as error:
            failed = error
    dist.raise_together(failed)
    path = Path(dist.broadcast_json(opened))
    path.mkdir(parents=True, exist_ok=True)  # on a node that does not share rank 0's disk: for its own samples
    return RunDir(path)


@contextmanager
def _failures_recorded(run_dir: RunDir, dist: Distributed) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if not isinstance(error, SystemExit):
            words = error.what if isinstance(error, TrainkitError) else f"{type(error).__name__}: {error}"
            append_event(run_dir, "failed", rank=dist.rank, host=socket.gethostname(), error=words)
        raise


@contextmanager
def _hardware(config: Config, run_dir: RunDir, dist: Distributed) -> Iterator[None]:
    """Samples of this host, by its first rank."""
    if dist.env.local_rank != 0 or (dist.env.node_rank != 0 and dist.env.launcher == "submitit-local"):
        yield
        return
    with sample_hardware(run_dir, socket.gethostname(), config.monitor.hardware_every_seconds, str(dist.device)):
        yield


def _save(t: Training, checkpoints: Checkpoints, run_dir: RunDir) -> None:
    progress = t.progress
    checkpoints.save(
        t.model,
        t.optimizer,
        step=progress.step,
        state={"progress": asdict(progress), "precision": t.precision.state_dict(), "world_size": t.dist.world_size},
        best_step=progress.best_step,
    )
    if t.dist.is_main:
        append_event(run_dir, "saved", step=progress.step)


def _hand_back(run_dir: RunDir, dist: Distributed, stop: StopFlag, step: int, attempt: int, *, requeue: bool) -> None:
    """Say that this attempt ended on request, and ask whoever started it for another."""
    signals = sorted({name for names in dist.gather_json(stop.signals) for name in names})
    if dist.is_main:
        append_event(run_dir, "signalled", attempt=attempt, step=step, signals=signals)
        if requeue:
            run_dir.attempt_logs(attempt).mkdir(parents=True, exist_ok=True)
            run_dir.requeue_marker(attempt).write_text(f"step {step}\n", encoding="utf-8")


def _test(t: Training, checkpoints: Checkpoints) -> dict[str, float]:
    """Test metrics of the best weights."""
    best = t.progress.best_step
    if best is not None and best != t.progress.step:
        checkpoints.load_weights(t.model, best, or_newest=True)
    result = evaluate(
        t.model,
        t.splits.test,
        t.splits,
        batch_size=t.micro_batch_size,
        workers=t.workers,
        precision=t.precision,
        dist=t.dist,
    )
    assert result is not None
    return result


def _write_summary(t: Training, run_dir: RunDir, test: dict[str, float], params: int) -> None:
    progress = t.progress
    seconds = progress.train_seconds
    summary: dict[str, Any] = {
        "outcome": "finished",
        "steps": progress.step,
        "epochs": round(progress.step / t.steps_per_epoch, 4),
        "best": {t.config.checkpoint.best: progress.best},
        "best_step": progress.best_step,
        "val": progress.val,
        "test": test,
        "train_seconds": round(seconds, 3),
        "images_per_sec": round(progress.images / seconds, 2) if seconds else None,
        "world_size": t.dist.world_size,
        "grad_accum_steps": t.grad_accum_steps,
        "micro_batch_size": t.micro_batch_size,
        "precision": t.precision.name,
        "skipped_steps": t.precision.skipped_steps,
        "device": device_name(t.dist.device),
        "params": params,
        "max_memory_mb": peak_memory_mb(t.dist.device),
    }
    partial = run_dir.summary.with_name(".summary.json.partial")
    partial.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    partial.replace(run_dir.summary)


def _check_batch_sizes(config: Config, world_size: int, splits: Splits) -> None:
    size, micro = config.train.global_batch_size, config.train.micro_batch_size
    steps_per_epoch(len(splits.train), size)  # refuses data of less than one batch
    one = world_size * (micro or 1)
    if size % one:
        low = size // one * one
        raise UserError(
            f"train.global_batch_size={size} cannot be split evenly over {world_size} ranks"
            + (f" of train.micro_batch_size={micro}." if micro else "."),
            why=f"One pass over all ranks takes a multiple of {one} samples.",
            fix=f"Use train.global_batch_size={f'{low} or ' if low else ''}{low + one}.",
        )


def evaluate_checkpoint(config: Config, run_dir: RunDir, which: str, split: str) -> dict[str, float]:
    """Metrics of a checkpoint (``best``, ``latest`` or a step) of a run on ``split``, in this process.

    A checkpoint is the same whatever trained it, so a model trained with FSDP on many nodes is evaluated by one.

    Where ``best`` or ``latest`` is broken, the newest whole one is taken, and said so.

    Raises:
        UserError: no such checkpoint, or it is broken.
    """
    step = files.resolve(run_dir.checkpoints, which)
    single = config.model_copy(update={"strategy": type(config.strategy)(name="single")})
    splits = build_data(config.data)
    with distributed(RankEnv.single(), use_gpu=wants_gpu(config)) as dist:
        model, _, precision = build_parts(single, dist, splits)
        checkpoints = Checkpoints(run_dir.checkpoints, keep=config.checkpoint.keep, dist=dist)
        step = checkpoints.load_weights(model, step, or_newest=which in ("best", "latest"))
        result = evaluate(
            model,
            {"train": splits.train, "val": splits.val, "test": splits.test}[split],
            splits,
            batch_size=min(config.train.global_batch_size, 256),
            workers=resolve_workers(config.data.workers, splits),
            precision=precision,
            dist=dist,
        )
    assert result is not None
    return {"step": step, **result}
