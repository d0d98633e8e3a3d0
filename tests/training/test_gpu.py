"""What only a GPU can show; `pytest -m gpu` on a machine that has one."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.reading import tensors
from tests.rank_functions import run_ranks, train_run
from tests.training import hungry
from tests.training.parts import parts_of
from tests.training.poisoned import train_and_tell
from trainkit.checkpoint.save import Checkpoints
from trainkit.config.checks import micro_batch_sizes
from trainkit.data.augment import operations
from trainkit.data.loader import TensorSamples, train_batches
from trainkit.distributed.process_group import Distributed
from trainkit.ranks import RankEnv
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics
from trainkit.training.build import TrainState
from trainkit.training.recorder import Progress
from trainkit.training.timing import DATA, FORWARD, OTHER, clock_of, peak_flops
from trainkit.training.update import Updater

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    ("preset", "precision"),
    [(preset, name) for preset in ("single", "ddp", "fsdp") for name in ("fp32", "tf32", "bf16", "fp16", "o2")][:-1],
)
def test_a_gpu_trains_in_every_format_and_its_memory_is_recorded(tmp_path: Path, preset: str, precision: str) -> None:
    folder = tmp_path / "run"
    settings = ("launch.gpus_per_node=1", f"train.precision={precision}", "train.max_steps=19")
    assert run_ranks(1, train_run, folder, preset, settings) == ["finished"]
    records = read_metrics(RunDir(folder), "train")
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[-1]["max_memory_mb"] > 0


def test_a_checkpoint_of_the_gpu_goes_on_on_the_cpu(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_ranks(1, train_run, folder, "fsdp", ("launch.gpus_per_node=1", "train.max_steps=30"), 8)
    assert run_ranks(1, train_run, folder, "single", ("launch.gpus_per_node=0", "train.max_steps=30")) == ["finished"]


LARGE = ("model.name=tests.training.hollow_models:large", "train.max_steps=5")


@pytest.mark.parametrize(
    ("preset", "settings", "one", "other", "rel"),
    [
        ("fsdp", ("train.precision=bf16", "train.max_steps=19", "train.grad_clip_norm=1.0"),
         "strategy.cpu_offload=false", "strategy.cpu_offload=true", 1e-3),
        ("ddp", ("train.max_steps=20", "model.norm=batch"), "train.precision=fp32", "train.precision=o2", 5e-3),
        *(
            (preset, LARGE, "train.compile=off", f"train.compile={how}", 1e-2)
            for preset in ("single", "ddp", "fsdp") for how in ("model", "blocks")
        ),
    ],
)  # fmt: skip
def test_two_ways_to_compute_on_the_gpu_learn_the_same(
    tmp_path: Path, preset: str, settings: tuple[str, ...], one: str, other: str, rel: float
) -> None:
    traces = []
    for way in (one, other):
        folder = tmp_path / way
        assert run_ranks(1, train_run, folder, preset, ("launch.gpus_per_node=1", *settings, way)) == ["finished"]
        traces.append([record["loss"] for record in read_metrics(RunDir(folder), "train")])
    assert traces[1] == pytest.approx(traces[0], rel=rel)


@pytest.mark.parametrize("precision", ["fp16", "o2"])
def test_an_overflow_on_the_gpu_skips_the_update_and_is_an_event(tmp_path: Path, precision: str) -> None:
    settings = ("launch.gpus_per_node=1", f"train.precision={precision}", "train.max_steps=6", "data.positions='3'")
    assert run_ranks(1, train_and_tell, tmp_path / "run", "ddp", settings) == ["finished"]
    (event,) = read_events(RunDir(tmp_path / "run"), "skipped")
    told = (event["step"], event["scale_before"], event["scale_after"], event["parameter"])
    assert told == (3, 65536.0, 32768.0, "layers.2.weight")


ALL = (
    "augment.mixup_alpha=0.8", "augment.cutmix_alpha=1", "augment.rand_augment_ops=2",
    "augment.random_erasing_prob=0.5", "augment.random_erasing_mode=pixel",
    "data.augment=true", "data.image_size=8", "launch.gpus_per_node=1", "strategy.name=single",
)  # fmt: skip


SHARPNESS = 9
"""The operation of RandAugment that waits: torchvision copies its kernel to the GPU for each call."""


def batches_of(parts: TrainState, steps: int) -> Any:
    how: Any = {"global_batch_size": 8, "micro_batch_size": 4, "rank": 0, "world_size": 1, "workers": 0}
    return train_batches(parts.splits, seed=0, start_step=0, stop_step=steps, device=parts.dist.device, **how)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("where", ["auto", "cpu"])
def test_no_update_waits_for_the_gpu(where: str) -> None:
    gpu = Distributed(RankEnv.single(), torch.device("cuda", 0))
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(7))
    model(torch.zeros(1, 3, 8, 8))
    own = (f"data.device={where}", "augment.rand_augment_ops=0")  # whose operations are tried below
    parts = parts_of(*ALL, *own, dist=gpu, model=model)
    assert isinstance(parts.splits.train, TensorSamples)
    assert parts.splits.train.images.is_cuda == (where == "auto")
    update, batches = Updater(parts), batches_of(parts, 3)
    update(batches, lr=0.1, seed=0)
    if where == "cpu":  # memory of the host is pinned for the first time: that waits
        update(batches, lr=0.1, seed=1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        update(batches, lr=0.1, seed=2)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("number", [number for number in range(14) if number != SHARPNESS])
def test_rand_augment_does_not_wait_for_the_gpu(number: int) -> None:
    (operation, signed), images = operations(9)[number], torch.randint(0, 256, (8, 3, 16, 12), dtype=torch.uint8)
    for way in (1, -1) if signed else (1,):
        there, here = images.cuda(), operation(images, way)
        operation(there, way)  # the first call brings what the others need
        torch.cuda.set_sync_debug_mode("error")
        try:
            made = operation(there, way)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(made.cpu(), here)


def test_a_batch_is_the_same_wherever_the_data_lies() -> None:
    gpu = Distributed(RankEnv.single(), torch.device("cuda", 0))
    there, here = (parts_of(*ALL, f"data.device={where}", dist=gpu) for where in ("auto", "cpu"))
    for one, other in zip(batches_of(there, 3), batches_of(here, 3), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_what_a_save_copies_from_the_gpu_is_the_model_as_it_was(tmp_path: Path) -> None:
    """The copies are the GPU's, into pinned memory, and are awaited before they are written."""
    device = torch.device("cuda", 0)
    model = nn.Linear(4096, 4096, device=device)
    checkpoints = Checkpoints(tmp_path, keep=1, dist=Distributed(RankEnv.single(), device), asynchronous=True)
    with torch.no_grad():
        for value in (1.0, 2.0):  # the second time into the memory of the first
            model.weight.fill_(value)
            checkpoints.save(model, None, step=int(value), state={}, best_step=None)
            model.weight.fill_(9.0)
            checkpoints.settle()
            assert bool((tensors(tmp_path)["weight"] == value).all())
    assert all(buffer.is_pinned() for named in checkpoints._copies.values() for buffer in named.values())


def _timed(env: RankEnv) -> tuple[float, float, dict[str, float]]:
    """Seconds of the host for many matrix products, until they were queued and until they were done,
    and what the clock makes of them."""
    device = torch.device("cuda")
    clock, progress = clock_of(device), Progress()
    matrix = torch.randn(4096, 4096, device=device)
    (matrix @ matrix).sum().item()
    clock.lap(progress)
    began = time.perf_counter()
    for _ in range(100):
        clock.to(FORWARD)
        matrix @ matrix
        clock.to(OTHER)
    queued = time.perf_counter() - began
    torch.cuda.synchronize()
    done = time.perf_counter() - began
    clock.to(DATA)
    time.sleep(0.1)
    lap = clock.lap(progress)
    return queued, done, {"forward": lap.seconds[FORWARD], "other": lap.seconds[OTHER], "data": lap.seconds[DATA]}


def test_time_is_that_of_the_gpu_and_not_of_queueing() -> None:
    ((queued, done, spent),) = run_ranks(1, _timed)
    assert queued < 0.5 * done
    assert spent["forward"] == pytest.approx(done, rel=0.1)
    assert spent["other"] < 0.1 * done
    assert spent["data"] == pytest.approx(0.1, abs=0.02)


def test_a_run_on_a_gpu_tells_its_time_its_memory_its_energy_and_its_use(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = ("launch.gpus_per_node=1", "train.max_steps=30", "monitor.profile_steps=[10,12]")
    run_ranks(1, train_run, folder, "single", settings)
    summary = json.loads(RunDir(folder).summary.read_text())
    assert summary["seconds"]["forward"] > 0
    assert summary["max_memory_reserved_mb_of_ranks"][0] >= summary["max_memory_mb_of_ranks"][0] > 0
    assert summary["energy"]["gpu_kwh"] > 0
    known = peak_flops(summary["device"], summary["precision"]) is not None
    assert (summary["mfu"] is not None) == known == (summary["flops_per_image"] is not None)
    assert list(folder.glob("nvidia-smi-*.txt"))
    assert [file.name for file in (folder / "profile").glob("*.json.gz")] == ["steps-00000010-00000012-rank-0.json.gz"]


@pytest.mark.parametrize("preset", ["single", "ddp", "fsdp"])
def test_auto_is_the_largest_micro_batch_within_nine_tenths_of_memory(tmp_path: Path, preset: str) -> None:
    settings = (
        "launch.gpus_per_node=1", "train.precision=fp32", "train.max_steps=2", "model.name=resnet18",
        "data.name=synthetic", "data.train_size=720", "data.val_size=8", "data.test_size=8", "data.image_size=64",
        "train.global_batch_size=720", "monitor.loggers=[jsonl]",
    )  # fmt: skip
    auto = (*settings, "train.micro_batch_size=auto", "train.memory_limit_mb=2000")
    assert run_ranks(1, train_run, tmp_path / "auto", preset, auto) == ["finished"]
    (probed,) = read_events(RunDir(tmp_path / "auto"), "probed")
    size, sizes = probed["micro_batch_size"], micro_batch_sizes(720)
    assert probed["peak_mb"] <= 0.9 * probed["room_mb"] <= 0.9 * 2000
    following = sizes[sizes.index(size) + 1]
    run_ranks(1, train_run, tmp_path / "next", preset, (*settings, f"train.micro_batch_size={following}"))
    told = json.loads((tmp_path / "next/summary.json").read_text())["max_memory_mb"]
    # Sizes lie up to a fifth apart; what the allocator takes is up to a twentieth more than what tensors take.
    assert told * 1.05 > 0.9 * 2000, "the next size would not have fitted"


def _with_little_memory(env: RankEnv, folder: Path) -> str:
    """Trains a model that takes 64 MiB and more for each sample with 8 of them, in 256 MiB."""
    torch.cuda.set_per_process_memory_fraction(2**28 / torch.cuda.get_device_properties(0).total_memory)
    settings = ("launch.gpus_per_node=1", "train.micro_batch_size=8", "monitor.memory_history=true")
    return hungry.train_and_tell(env, folder, "single", settings)


def test_a_gpu_without_memory_says_what_to_change_and_leaves_a_snapshot(tmp_path: Path) -> None:
    (told,) = run_ranks(1, _with_little_memory, tmp_path / "run")
    assert told.startswith("1: Rank 0 on ")
    assert "ran out of GPU memory with micro batches of 8." in told
    assert "Use train.micro_batch_size=4 (the result stays the same) or auto" in told
    assert (tmp_path / "run/profile/oom-rank-0.pickle").stat().st_size > 0


@pytest.mark.parametrize("preset", ["ddp", "fsdp", "zero"])
def test_all_gpus_together_train_as_one_does(tmp_path: Path, preset: str) -> None:
    gpus, traces = torch.cuda.device_count(), []
    settings = ("train.max_steps=20", f"train.global_batch_size={24 * gpus}")
    for name, ranks in (("single", 1), (preset, gpus)):
        own = (*settings, f"launch.gpus_per_node={ranks}")
        assert run_ranks(ranks, train_run, tmp_path / name, name, own) == ["finished"] * ranks
        traces.append([record["loss"] for record in read_metrics(RunDir(tmp_path / name), "train")])
    assert traces[1] == pytest.approx(traces[0], rel=5e-3)
