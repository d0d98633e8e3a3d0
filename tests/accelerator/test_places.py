"""Places of tensors, a GPU's memory or the host's, and waits for them, in each part of a training."""

import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.rank_functions import run_ranks
from tests.training.parts import Linear, parts_of
from trainkit.checkpoint.safetensors_files import TensorEntry
from trainkit.checkpoint.save import Checkpoints
from trainkit.checkpoint.state import Held, Sent, moments_of, weights_of
from trainkit.cluster.ranks import RankEnv
from trainkit.common.hosts import free_port
from trainkit.data import loader
from trainkit.data.base import Batch
from trainkit.distributed.device import MemoryGauge, device_of_rank, open_group
from trainkit.distributed.health import _timed_all_reduce
from trainkit.distributed.process_group import Distributed, distributed
from trainkit.swarm.protocol.outer_step import Average, OuterState, flatten, put_away
from trainkit.swarm.trust.accounts import digest_of_tensors
from trainkit.training.clock import DATA, FORWARD, clock_of
from trainkit.training.precision import Precision
from trainkit.training.progress import Progress
from trainkit.training.tasks.base import Task
from trainkit.training.tasks.meter import Mistakes, Pool
from trainkit.training.update import Updater

pytestmark = pytest.mark.gpu
IS_REAL = torch.accelerator.is_available()
SIMULATED = pytest.mark.skipif(IS_REAL, reason="a real GPU is done when it likes")
TWO = pytest.mark.skipif(IS_REAL and torch.accelerator.device_count() < 2, reason="it takes 2 GPUs")
Gpu = dict[str, str]


def one() -> Distributed:
    """A rank alone with its GPU."""
    return Distributed(RankEnv.single(), device_of_rank(0))


# Checkpoints: what a rank that sees none is sent.


class Counts(torch.optim.Optimizer):
    """An optimizer of a user's own: each weight moves, and each row has a count of its own."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros(())
                state["rows"] = torch.zeros(len(parameter), dtype=torch.int32, device=parameter.device)
            state["step"] += 1
            state["rows"] += 1
            parameter.sub_(0.1 * parameter.grad)


def model_and_optimizer(dist: Distributed, kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(6, 4).to(dist.device)
    if kind == "counts":
        return model, Counts(model.parameters())
    return model, torch.optim.AdamW(model.parameters(), fused=kind == "fused")


def _saved(env: RankEnv, folder: Path, kind: str) -> None:
    with distributed(env, use_gpu=True) as dist:
        model, optimizer = model_and_optimizer(dist, kind, seed=1)
        for _ in range(2):
            model(torch.ones(3, 6, device=dist.device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        Checkpoints(folder, keep=1, dist=dist).save(model, optimizer, step=1, state={})


Lying = dict[str, tuple[str, Any]]


def _taken_up(env: RankEnv, folder: Path, kind: str, all_see: bool) -> Lying:
    with distributed(env, use_gpu=True) as dist:
        model, optimizer = model_and_optimizer(dist, kind, seed=2)
        there = folder if dist.is_main or all_see else folder / "nowhere"
        assert Checkpoints(there, keep=1, dist=dist).restore(model, optimizer) is not None
        found = {**weights_of(model), **moments_of(model, optimizer)}
        return {name: (value.device.type, value.tolist()) for name, value in found.items()}


@TWO
@pytest.mark.parametrize("kind", ["plain", "fused", "counts"])
def test_a_rank_that_sees_no_checkpoint_goes_on_as_one_that_reads_it(tmp_path: Path, gpu: Gpu, kind: str) -> None:
    """The same numbers in the same places: counts of updates stay with the host, but for fused optimizers."""
    run_ranks(1, _saved, tmp_path, kind, gpu=gpu)
    (read, _), (_, sent) = (run_ranks(2, _taken_up, tmp_path, kind, all_see, gpu=gpu) for all_see in (True, False))
    assert read.keys() == sent.keys()
    for name, (place, value) in read.items():
        assert sent[name] == (place, value), name
        assert (place == "cpu") == (name.endswith(".step") and kind != "fused"), name


def _sent(env: RankEnv) -> list[str]:
    with distributed(env, use_gpu=True) as dist:
        held = Held({"weight": torch.ones(3), "count": torch.ones(())} if dist.is_main else {})
        sent = Sent(held, dist)
        told = [sent.take("weight", torch.zeros(3, device=dist.device))]
        told.append(sent.take("count", torch.empty((), device="meta")))
        return ["cpu" if value.device.type == "cpu" else "GPU" for value in told]


@TWO
def test_weights_are_sent_from_gpu_to_gpu_and_counts_to_the_host(gpu: Gpu) -> None:
    assert run_ranks(2, _sent, gpu=gpu) == [["GPU", "cpu"]] * 2


# Metrics.


class Scores(Task):
    """A task of a user's own, which knows numpy."""

    def loss(self, output: Tensor, target: Tensor, reduction: str) -> Tensor:
        return nn.functional.cross_entropy(output, target, reduction=reduction)

    def sums(self, output: Tensor, target: Tensor) -> Tensor:
        return torch.zeros(len(output), 1, device=output.device)

    def metrics(self, sums: Any, samples: int) -> dict[str, float]:
        return {}

    def pooled(self, output: Tensor, target: Tensor) -> dict[str, float]:
        return {"sum": float(numpy.sum(output.numpy()))}

    def wrong(self, output: Tensor, target: Tensor) -> Tensor:
        return (output.argmax(1) != target).float()

    def words(self, output: Tensor, target: Tensor) -> tuple[str, str]:
        return str(target.numpy()), str(output.argmax().numpy())


def _read(env: RankEnv) -> tuple[float, list[str]]:
    dist = one()
    images = torch.zeros(4, 3, 8, 8, dtype=torch.uint8, device=dist.device)
    output, target = torch.eye(4, device=dist.device), torch.zeros(4, dtype=torch.int64, device=dist.device)
    mask = torch.tensor([True, True, True, False]).to(dist.device)
    pool, mistakes = Pool(Scores(), dist), Mistakes(Scores(), dist)
    for kept in (pool, mistakes):
        kept.add(images, output, target, mask)
    return pool.read()["sum"], sorted(one["told"] for one in mistakes.read())


def test_what_a_task_gets_at_the_end_of_a_pass_lies_with_the_host(gpu: Gpu) -> None:
    assert run_ranks(1, _read, gpu=gpu) == [(3.0, ["1", "2"])]


# An update.


def _norm_of_nothing(env: RankEnv) -> str:
    dist = one()
    empty = nn.Parameter(torch.empty(0, device=dist.device))
    empty.grad = torch.empty(0, device=dist.device)
    stepped = Precision("fp32", dist).step(torch.optim.SGD([empty]), [empty], None)
    return stepped.nonfinite.device.type


def test_a_rank_without_a_share_of_any_gradient_answers_from_its_gpu(gpu: Gpu) -> None:
    """With the other ranks, over the GPUs' own network: on another one they would wait for ever."""
    assert run_ranks(1, _norm_of_nothing, gpu=gpu) != ["cpu"]


# Batches on their way.


def _under_way(env: RankEnv) -> bool:
    """Return True if the GPU was still copying when the loop had a batch."""
    device = device_of_rank(0)
    labels = torch.ones(2, dtype=torch.int64)
    made = (Batch(torch.ones(2, 3, 4, 4), labels, labels) for _ in range(20))
    batches = loader.on_gpu(made, device)
    return any(not torch.accelerator.current_stream(device).query() for _ in batches)


@SIMULATED
def test_the_loop_goes_on_while_a_batch_is_copied(gpu: Gpu) -> None:
    assert run_ranks(1, _under_way, gpu=gpu) == [True]


class Numbered:
    def __getitems__(self, keys: tuple[int, list[int]]) -> Any:
        return Batch(*(torch.tensor(keys[1]) for _ in range(3))), {}


def _is_pinned(env: RankEnv) -> bool:
    (batch, _) = next(iter(loader._loader(Numbered(), [(0, [1, 2])], workers=1, device=device_of_rank(0))))
    return bool(batch.images.is_pinned() and batch.labels.is_pinned())


def test_a_loader_with_processes_pins_its_batches_beside_the_loop(gpu: Gpu) -> None:
    assert run_ranks(1, _is_pinned, gpu=gpu) == [True]


def _moved(env: RankEnv) -> bool:
    device, batch = device_of_rank(0), Batch(*(torch.ones(2) for _ in range(3)))
    (moved,) = loader._each_moved(iter([batch]), device)
    return {moved.images.device, moved.labels.device} == {device}


def test_a_batch_gets_to_a_gpu_for_which_nothing_can_be_pinned(gpu: Gpu) -> None:
    """Apple's: others would do without that."""
    assert run_ranks(1, _moved, gpu=gpu) == [True]


def _copied_later(env: RankEnv, folder: Path) -> bool:
    dist = one()
    checkpoints = Checkpoints(folder, keep=1, dist=dist, asynchronous=True)
    weight = torch.ones(64, device=dist.device)
    entry = TensorEntry.of("weight", weight.dtype, weight.shape)
    copied = [checkpoints._copy({"model.safetensors": {entry: weight}}) for _ in range(20)]
    return any(event is not None and not event.query() for event in copied)


@SIMULATED
def test_training_goes_on_while_a_save_copies(tmp_path: Path, gpu: Gpu) -> None:
    assert run_ranks(1, _copied_later, tmp_path, gpu=gpu) == [True]


# Memory and time.

MB = 1 << 20


def _peaks(env: RankEnv) -> tuple[float, float, float]:
    """MiB of a gauge: after a large trial, after a small one that followed, and of what stays."""
    dist = one()
    gauge = MemoryGauge(dist.device, 1)
    held, found = gauge.held(), []
    for size in (300, 60):
        gauge.start()
        torch.empty(size * MB, dtype=torch.uint8, device=dist.device)
        found.append((gauge.peak() - held) / MB)
    gauge.start()
    return found[0], found[1], (gauge.held() - held) / MB


def test_a_trial_of_memory_does_not_count_what_a_larger_one_took(gpu: Gpu) -> None:
    assert run_ranks(1, _peaks, gpu=gpu) == [(pytest.approx(300, abs=4), pytest.approx(60, abs=4), 0.0)]


def _lapped(env: RankEnv) -> tuple[float, float]:
    """Seconds of a clock that has more marks than it keeps, and those that the host counts."""
    dist, progress = one(), Progress()
    clock, began = clock_of(dist.device), time.perf_counter()
    clock.lap(progress)
    for _ in range(2500):
        clock.to(FORWARD)
        clock.to(DATA)
    seconds = time.perf_counter() - began
    lap = clock.lap(progress)
    return lap.seconds[FORWARD] + lap.seconds[DATA], seconds


def test_a_clock_asks_the_gpu_and_loses_no_time(gpu: Gpu) -> None:
    ((told, passed),) = run_ranks(1, _lapped, gpu=gpu)
    assert 0.5 * passed < told < 1.5 * passed


LATE = 0.5


def _timed(env: RankEnv, port: int, use_gpu: bool) -> float:
    """Seconds of a transfer to which rank 1 comes late."""
    device = device_of_rank(env.local_rank) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.accelerator.set_device_index(device)
    store = TCPStore("127.0.0.1", port, 2, env.rank == 0)
    group = open_group(device, store, env.rank, 2, timedelta(seconds=20))
    _timed_all_reduce(group, 1 << 10, device)
    if env.rank == 1:
        time.sleep(LATE)
    return _timed_all_reduce(group, 1 << 10, device)


@TWO
@pytest.mark.parametrize("use_gpu", [True, False], ids=["GPU", "CPU"])
def test_a_transfer_is_timed_until_it_is_over(gpu: Gpu, use_gpu: bool) -> None:
    one, other = run_ranks(2, _timed, free_port(), use_gpu, gpu=gpu if use_gpu else None)
    assert one == other
    assert one > 0.8 * LATE


# Swarms: what the peers have in common lies in the host's memory, the model on the GPU.


class Normed(nn.Module):
    """A model with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = Linear().layer, nn.BatchNorm1d(7)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.norm(self.layer(images.flatten(1)))
        return scores


def _agreed(env: RankEnv, use_gpu: bool) -> tuple[list[float], list[float], str, str]:
    """Common weights and the model's after two rounds, the digest of a snapshot, and what a trial says of an average.

    Half of what the peer gives arrives; then one round is taken back.
    """
    # It loads hivemind, which wants processes started in its own way.
    from trainkit.swarm.peer.trial import AverageTrial

    dist = one() if use_gpu else Distributed(RankEnv.single(), torch.device("cpu"))
    torch.manual_seed(0)
    model = Normed()
    common = OuterState(model, lr=0.7, momentum=0.9)
    state = parts_of("strategy.name=single", dist=dist, model=model)
    update, harm = Updater(state), ""
    with state.batches(0, 4, workers=0) as batches:
        for number in range(2):
            for seed in range(2):
                update(batches, lr=0.1, seed=seed)
            given = common.give(8)
            everything = [True] * len(given.weights)
            average = Average(given.vector / 2, common.round + 1, everything, everything)
            worse = Average(torch.full_like(given.vector, 1e3), common.round + 1, everything, everything)
            harm = AverageTrial(state, common, 1e9).harm(worse, average)
            common.step(average, given, trained_on=number == 0)
    common.undo(given.moved)
    with common.in_model():
        digest = digest_of_tensors(put_away(weights_of(state.model)))
    return common.theta.tolist(), flatten([*weights_of(state.model).values()]).tolist(), digest, harm


def test_a_peer_with_a_gpu_agrees_with_one_without(gpu: Gpu) -> None:
    (there,) = run_ranks(1, _agreed, True, gpu=gpu)
    (here,) = run_ranks(1, _agreed, False)
    for one, other in zip(there[:2], here[:2], strict=True):
        assert one == (pytest.approx(other, rel=1e-3, abs=1e-4) if IS_REAL else other)
    assert IS_REAL or there[2:] == here[2:]
    assert there[3]
