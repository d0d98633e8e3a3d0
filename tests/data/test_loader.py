"""Batches of files and of data in memory."""

import gc
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional

from tests.fork_server import server
from tests.runs import wait_until
from trainkit.common.errors import UserError
from trainkit.common.image_input import DataInfo
from trainkit.data import draws, loader, tensors
from trainkit.data.base import Batch, Splits
from trainkit.data.loader import Batches, Loading, default_workers, resolve_workers
from trainkit.data.order import epoch_order, repeated
from trainkit.data.tensors import TensorSamples, TensorTransform, tensor_splits

SIZE = 50
INFO = DataInfo("numbers", 2, 1, 6, ("even", "odd"), (0.5,), (0.5,))


class Numbers:
    """Sample i is one pixel of value i; the transform adds a random second one."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
        return torch.full((1, 1, 1), index, dtype=torch.uint8), index % 2


class Broken(Numbers):
    def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
        raise UserError("Cannot decode 7.jpg.", why="It is damaged.", fix="Delete it.")


class Hanging(Numbers):
    def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
        if index >= 8:
            time.sleep(600)
        return super().__getitem__(index)


def add_noise(image: Tensor) -> Tensor:
    return torch.cat([image, torch.randint(0, 256, (1, 1, 1), dtype=torch.uint8)])


def same(image: Any) -> Tensor:
    return torch.as_tensor(image)


def splits(train: Numbers | None = None, **changes: Any) -> Splits:
    samples = train or Numbers()
    return Splits(INFO, samples, samples, samples, add_noise, same, **changes)


PICTURES = TensorSamples(
    torch.arange(SIZE, dtype=torch.uint8).view(-1, 1, 1, 1).repeat(1, 1, 6, 6) * 5
    + torch.arange(36, dtype=torch.uint8).view(6, 6),
    torch.arange(SIZE) % 2,
)
IN_MEMORY = tensor_splits(INFO, [PICTURES] * 3, augment=True, shift=2)
LOADING = [item.name for item in fields(Loading)]
SETTINGS: dict[str, Any] = {"seed": 0, "start_step": 0, "stop_step": 10}
SETTINGS |= {"global_batch_size": 16, "micro_batch_size": 16}


def batches(data: Splits | None = None, **changes: Any) -> Batches[Batch]:
    how = {**SETTINGS, **changes}
    steps = range(how.pop("start_step"), how.pop("stop_step"))
    loading = Loading(**{name: how.pop(name) for name in LOADING if name in how})
    return loader.train_batches(data or splits(), loading, steps=steps, **how)


def joined(found: Iterable[Any]) -> list[Tensor]:
    """Images, labels and keys of all batches, one after the other."""
    return [torch.cat(column) for column in zip(*found, strict=True)]


def assert_same(one: Iterable[Any], other: Iterable[Any]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(joined(one), joined(other), strict=True))


@pytest.fixture(scope="module", params=["sample by sample", "in memory"])
def data(request: pytest.FixtureRequest) -> Splits:
    return IN_MEMORY if request.param == "in memory" else splits()


@pytest.fixture(scope="module")
def reference(data: Splits) -> list[Batch]:
    return [*batches(data)]


def test_steps_walk_through_one_permutation_after_the_other(reference: list[Batch]) -> None:
    epochs = [epoch_order(SIZE, 0, epoch)[:48] for epoch in range(4)]
    images, labels, keys = joined(reference)
    assert (images.dtype, labels.dtype, keys.dtype) == (torch.uint8, torch.int64, torch.int64)
    assert torch.equal(labels, torch.cat(epochs)[:160] % 2)
    expected = torch.cat([draws.keys(0, epoch, indices.long()) for epoch, indices in enumerate(epochs)])
    assert torch.equal(keys, expected[:160])


@pytest.mark.parametrize("start", [1, 3, 7])
def test_a_resumed_run_sees_what_the_uninterrupted_one_sees(start: int, data: Splits, reference: list[Batch]) -> None:
    assert_same(batches(data, start_step=start), reference[start:])


def test_augmentation_differs_from_epoch_to_epoch_and_from_seed_to_seed(data: Splits, reference: list[Batch]) -> None:
    def by_sample(found: Iterable[Batch], seed: int, epoch: int) -> dict[int, Tensor]:
        images = joined(found)[0]
        return dict(zip(epoch_order(SIZE, seed, epoch)[:48].tolist(), images, strict=True))

    first = by_sample(reference[:3], 0, 0)
    for other in (by_sample(reference[3:6], 0, 1), by_sample(batches(data, seed=1, stop_step=3), 1, 0)):
        both = first.keys() & other.keys()
        assert sum(torch.equal(first[index], other[index]) for index in both) < len(both) / 4


@pytest.mark.parametrize(("world", "micro", "workers"), [(1, 16, 0), (2, 4, 0), (4, 4, 1)])
def test_repeated_images_are_augmented_anew_alike_on_any_ranks(
    world: int, micro: int, workers: int, data: Splits, reference: list[Batch]
) -> None:
    how: dict[str, Any] = {"repeats": 4, "start_step": 1, "stop_step": 5, "micro_batch_size": micro, "workers": workers}
    per_rank = [[*batches(data, rank=rank, world_size=world, **how)] for rank in range(world)]
    images, labels, keys = joined(batch for micro_step in zip(*per_rank, strict=True) for batch in micro_step)
    both = [repeated(epoch_order(SIZE, 0, epoch), 4, 16) for epoch in (0, 1)]
    order = torch.cat([both[0][16:], both[1][:32]])
    assert torch.equal(labels, order % SIZE % 2)
    assert torch.equal(keys[:32], draws.keys(0, 0, order[:32]))
    for update, made in zip(order.view(4, 16) % SIZE, images.view(4, 16, *images.shape[1:]), strict=True):
        differ = [len(made[update == image].unique(dim=0)) for image in update.unique()]
        assert sum(differ) > 12, "of 16 no more than a few came out alike"
    first = dict(zip(order[:4].tolist(), images[:4], strict=True))  # copies that a run without repeats sees as well
    plain = dict(zip(epoch_order(SIZE, 0, 0)[:48].tolist(), joined(reference[:3])[0], strict=True))
    assert first.keys() <= plain.keys()
    assert all(torch.equal(image, plain[index]) for index, image in first.items())


@pytest.mark.parametrize(("world", "micro", "workers"), [(1, 4, 0), (2, 8, 0), (4, 2, 0), (1, 16, 2), (2, 4, 1)])
def test_neither_ranks_nor_accumulation_nor_workers_change_anything(
    world: int, micro: int, workers: int, data: Splits, reference: list[Batch]
) -> None:
    how = {"world_size": world, "micro_batch_size": micro, "workers": workers}
    per_rank = [[*batches(data, rank=rank, **how)] for rank in range(world)]
    assert_same((batch for micro_step in zip(*per_rank, strict=True) for batch in micro_step), reference)


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_leaves_the_global_random_numbers_alone(workers: int, data: Splits, reference: list[Batch]) -> None:
    torch.manual_seed(99)
    before = torch.get_rng_state()
    assert_same(batches(data, workers=workers, stop_step=2), reference[:2])
    assert torch.equal(before, torch.get_rng_state())


def started_by(found: Iterator[Any], before: set[int]) -> list[psutil.Process]:
    """The workers behind ``found``, once its first batch is there."""
    next(found)
    return [child for child in psutil.Process().children() if child.pid not in before]


@pytest.fixture
def before() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def test_workers_end_with_the_loop_and_not_by_a_stop_signal(before: set[int]) -> None:
    with batches(workers=2) as found:
        workers = started_by(found, before)
        assert len(workers) == 2
        for worker in workers:
            for signum in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
                os.kill(worker.pid, signum)
        assert_same((next(found), next(found)), [*batches()][1:3])
    assert not any(worker.is_running() for worker in workers), "they outlive a loop left half way"
    assert list(found) == []


def test_a_worker_that_hangs_is_killed(before: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.data.loader.SHUTDOWN_SECONDS", 0.3)
    found = loader.eval_batches(Hanging(), same, Loading(workers=1), batch_size=4)
    (worker,) = started_by(found, before)
    found.close()
    assert not worker.is_running()


class Garbage:
    """An object that the garbage collector alone frees; it notes the process that does."""

    def __init__(self, freed_in: list[int]) -> None:
        self.freed_in, self.circle = freed_in, self

    def __del__(self) -> None:
        self.freed_in.append(os.getpid())


def test_a_worker_frees_nothing_that_is_garbage_of_its_parent() -> None:
    """A process group that is freed there waits for ever, for a thread that a fork has not."""
    freed_in: list[int] = []

    class Collecting(Numbers):
        def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
            gc.collect()
            return torch.tensor([[[len(freed_in)]]]), 0

    gc.freeze()  # as commands do once torch is imported: a loop that looks through all of it is slow
    Garbage(freed_in)
    with loader.eval_batches(Collecting(4), same, Loading(workers=1), batch_size=4) as found:
        (batch,) = found
    assert not batch.images.any()
    assert (gc.get_freeze_count() > 0, gc.isenabled()) == (True, True)
    gc.collect()
    assert freed_in == [os.getpid()]


def _start_and_die(told: Path) -> None:
    found = batches(workers=1)
    next(found)
    (child,) = psutil.Process().children()
    told.write_text(str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_is_killed_leaves_no_worker(tmp_path: Path) -> None:
    rank = server().start(_start_and_die, told := tmp_path / "worker")
    rank.join()
    assert rank.exitcode == -signal.SIGKILL
    worker = int(told.read_text())
    wait_until(lambda: not psutil.pid_exists(worker))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_for_the_user_crosses_from_the_worker_whole(workers: int) -> None:
    with pytest.raises(UserError) as caught, batches(splits(Broken()), workers=workers) as found:
        next(found)
    assert str(caught.value).splitlines() == ["Cannot decode 7.jpg.", "  why: It is damaged.", "  fix: Delete it."]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 7, 12, 50])
def test_evaluation_counts_every_sample_once_in_equal_batches(size: int, world: int) -> None:
    places = [Loading(rank, world) for rank in range(world)]
    per_rank = [[*loader.eval_batches(Numbers(size), same, place, batch_size=4)] for place in places]
    assert len({len(of_rank) for of_rank in per_rank}) == 1
    everything = [batch for of_rank in per_rank for batch in of_rank]
    assert all(tuple(images.shape) == (4, 1, 1, 1) and mask.dtype == torch.bool for images, _, mask in everything)
    counted = torch.cat([images.flatten()[mask] for images, _, mask in everything])
    assert sorted(counted.tolist()) == list(range(size))


@pytest.mark.parametrize(("world", "size"), [(1, 4), (2, 4), (3, 16)])
def test_neither_workers_nor_memory_change_what_evaluation_sees(world: int, size: int) -> None:
    for rank in range(world):
        whole = loader.eval_batches(PICTURES, IN_MEMORY.eval_transform, Loading(rank, world), batch_size=size)
        one_by_one = Loading(rank, world, workers=rank)
        single = loader.eval_batches(PICTURES, partial(IN_MEMORY.eval_transform), one_by_one, batch_size=size)
        assert_same(whole, single)


@pytest.mark.parametrize(("cpus", "workers"), [(1, 0), (2, 1), (8, 7), (64, 16)])
def test_a_rank_keeps_one_cpu_for_itself(cpus: int, workers: int) -> None:
    assert default_workers(cpus) == resolve_workers("auto", splits(), cpus) == workers
    assert resolve_workers("auto", splits(in_memory=True), cpus) == 0
    assert resolve_workers(3, splits(in_memory=True), cpus) == 3


def test_slurms_share_counts_where_it_is_less_than_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = default_workers()
    for granted, workers in (("1", 0), ("512", whole), ("0", whole)):
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", granted)
        assert default_workers() == workers


def test_the_first_batch_after_a_resume_is_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data has ImageNet's size: a byte cannot hold an index."""
    samples, read = Numbers(1_281_167), list[int]()

    def note(_: Numbers, index: int) -> tuple[Tensor, int]:
        read.append(index)
        return torch.zeros((1, 1, 1), dtype=torch.uint8), 0

    monkeypatch.setattr(Numbers, "__getitem__", note)
    where: Any = {"global_batch_size": 256, "micro_batch_size": 32, "rank": 3, "world_size": 8}
    with batches(splits(samples), start_step=4500, stop_step=9000, **where) as found:
        next(found)
    position = 4500 * 256 + 3 * 32
    assert read == epoch_order(len(samples), 0, 0)[position : position + 32].tolist()


class Gpu:
    """Names a GPU where there is none."""

    type = "cuda"


@pytest.mark.parametrize(
    ("free", "where", "workers", "there"),
    [(10, "auto", 0, True), (9, "auto", 0, False), (10, "cpu", 0, False), (10, "auto", 1, False)],
)
def test_data_goes_to_a_gpu_if_it_takes_a_tenth_of_what_is_free_there(
    monkeypatch: pytest.MonkeyPatch, free: int, where: Any, workers: int, there: bool
) -> None:
    size = PICTURES.images.nbytes + PICTURES.labels.nbytes
    monkeypatch.setattr(tensors, "free_memory", lambda device: 3 * size * free)
    monkeypatch.setattr(Tensor, "to", lambda tensor, device: tensor)
    gpu: Any = Gpu()
    found: Any = tensors.to_device(IN_MEMORY, where, gpu, workers=workers)
    assert all((part is not PICTURES) == there for part in (found.train, found.val, found.test))
    assert tensors.to_device(IN_MEMORY, where, torch.device("cpu"), workers=workers) is IN_MEMORY


def test_batches_for_a_gpu_are_copied_a_step_ahead_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stream that only notes: what must be in order is in order, and no batch is lost."""
    log: list[str] = []

    class Stream:
        def wait_stream(self, other: Any) -> None:
            log.append("wait")

        def __enter__(self) -> None:
            log.append("copy")

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(torch, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream())
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: True)
    three = [Batch(torch.full((1,), number), torch.ones(1), torch.zeros(1)) for number in range(3)]
    error = UserError("Broken.", why="It is.", fix="Mend it.")
    seen = []
    for batch in loader.on_gpu(iter([*three, error]), torch.device("cpu")):
        log.append("compute")
        seen.append(batch)
    assert [int(batch.images) for batch in seen[:3]] == [0, 1, 2]
    assert seen[3] is error
    assert log[:6] == ["copy", "wait", "copy", "compute", "wait", "copy"]


KEYS = draws.keys(0, 0, torch.arange(400))


def gradient(size: int = 8) -> torch.Tensor:
    return torch.arange(1, size * size + 1, dtype=torch.uint8).reshape(1, size, size)


def noise(count: int, channels: int, height: int, width: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8, generator=random)


@pytest.mark.parametrize("padding_mode", ["constant", "reflect"])
@pytest.mark.parametrize(("shift", "flip"), [(4, True), (2, False), (0, True), (1, True)])
def test_each_image_is_what_torchvision_makes_of_it(shift: int, flip: bool, padding_mode: str) -> None:
    images = noise(400, 3, 12, 9)
    transform = TensorTransform(12, shift, flip, padding_mode == "reflect")
    drawn = transform.draw(KEYS)
    expected, before = [], images.clone()
    for image, (top, left, mirror) in zip(images, drawn.tolist(), strict=True):
        cropped = functional.crop(functional.pad(image, [shift] * 4, padding_mode=padding_mode), top, left, 12, 9)
        cropped = functional.horizontal_flip(cropped) if mirror else cropped
        expected.append(functional.resize(cropped, [12, 12], antialias=True))
    assert torch.equal(transform.batch(images, drawn), torch.stack(expected))
    assert torch.equal(images, before), "the images themselves are not changed"


def test_one_image_alone_is_what_a_batch_of_one_gives() -> None:
    transform = TensorTransform(8, 2, True)
    torch.manual_seed(3)
    key = torch.randint(1 << 62, (1,))
    torch.manual_seed(3)
    assert torch.equal(transform(gradient()), transform.batch(gradient()[None], transform.draw(key))[0])


def test_every_window_comes_up_as_often_and_half_are_mirrored() -> None:
    drawn = TensorTransform(8, 2, True).draw(draws.keys(1, 1, torch.arange(10_000)))
    counts = torch.bincount(drawn @ torch.tensor([10, 2, 1]), minlength=50)
    assert len(counts) == 50
    assert ((counts - 200).abs() < 80).all()
