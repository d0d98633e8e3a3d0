"""Which arms a bench has where: pure functions of the configuration and the places of the ranks."""

from pathlib import Path

import pytest

from trainkit.bench.base import Arm, Place, SkippedArm, Where
from trainkit.bench.benches.one_device import batch_size_stops
from trainkit.bench.benches.several_ranks import scaling_counts
from trainkit.bench.catalogue import BENCHES, bench_of
from trainkit.config.loading import load


def where(
    nodes: int = 1, ranks: int = 1, *, gpu: str = "", formats: tuple[str, ...] = ("fp32",), gpus: int = 0
) -> Where:
    places = [
        Place(node * ranks + local, node, local, f"n{node}", gpu or "cpu", formats, gpus or (ranks if gpu else 0), 8)
        for node in range(nodes)
        for local in range(ranks)
    ]
    return Where(tuple(places), train_images=1000, params=1_000_000)


A100, T4 = ("bf16", "tf32", "fp16", "fp32"), ("fp16", "fp32")
AMPERE = where(gpu="A100", formats=A100)
TURING = where(gpu="T4", formats=T4)


def arms(name: str, place: Where, *asked: str, settings: tuple[str, ...] = ()) -> tuple[list[Arm], dict[str, str]]:
    found = bench_of(name).arms(load("ddp", settings).config, place, asked)
    ran = [arm for arm in found if isinstance(arm, Arm)]
    return ran, {one.name: one.why for one in found if isinstance(one, SkippedArm)}


@pytest.mark.parametrize(
    ("place", "asked", "formats"),
    [
        (AMPERE, "", "fp32 tf32 bf16 fp16"),
        (TURING, "", "fp32 fp16"),
        (where(), "", "fp32 bf16"),
        (where(), "fp32 fp16", "fp32 fp16"),  # what crawls is measured if asked for
    ],
)
def test_amp_has_the_formats_of_the_device(place: Where, asked: str, formats: str) -> None:
    expected = [(f"train.precision={name}",) for name in formats.split()]
    assert [arm.overrides for arm in arms("amp", place, *asked.split())[0]] == expected


def test_strategies_do_the_same_updates_on_each_device() -> None:
    ran, left = arms("strategy", where(2, 2), settings=("train.global_batch_size=64",))
    assert [(arm.name, arm.ranks) for arm in ran] == [
        ("single", (0,)), ("ddp", None), ("zero", None), ("fsdp", None), ("hsdp", None)
    ]  # fmt: skip
    assert all("train.micro_batch_size=16" in arm.overrides for arm in ran)
    assert ran[-1].overrides[:2] == ("strategy.name=fsdp", "strategy.shard_within=node")
    assert set(left) == {"dp"}
    ran, left = arms("strategy", where(1, 4, gpu="A100"), settings=("train.global_batch_size=64",))
    assert "hsdp" in left
    (dp,) = [(arm.ranks, arm.overrides[-1]) for arm in ran if arm.name == "dp"]
    assert dp == ((0,), "train.micro_batch_size=64"), "all GPUs of one process, 16 for each"


@pytest.mark.parametrize(
    ("nodes", "ranks", "expected"),
    [(1, 2, [1, 2]), (1, 8, [1, 2, 4, 8]), (2, 4, [1, 2, 4, 8]), (3, 4, [1, 2, 4, 12]), (1, 6, [1, 2, 6])],
)  # fmt: skip
def test_scaling_goes_through_a_node_and_then_by_whole_nodes(nodes: int, ranks: int, expected: list[int]) -> None:
    assert scaling_counts(where(nodes, ranks)) == expected


def test_strong_scaling_keeps_the_batch_and_weak_scaling_that_of_each_rank() -> None:
    ran, _ = arms("scaling", where(1, 4), settings=("train.global_batch_size=64",))
    strong, weak = ran[:3], ran[3:]
    assert [(arm.overrides, arm.ranks) for arm in strong] == [((), (0,)), ((), (0, 1)), ((), (0, 1, 2, 3))]
    assert [arm.overrides for arm in weak] == [
        ("train.global_batch_size=16",), ("train.global_batch_size=32",), ("train.global_batch_size=64",)
    ]  # fmt: skip
    assert {arm.base for arm in weak} == {"1 rank x 16"}
    ran, left = arms("scaling", where(1, 2), "1", "2", "4")
    assert [arm.ranks for arm in ran[:2]] == [(0,), (0, 1)]
    assert "2 ranks are here" in left["4 ranks"]


def test_batches_begin_with_that_of_the_configuration_and_end_with_the_data() -> None:
    ran, _ = arms("batch-size", where(1, 2), settings=("train.global_batch_size=64",))
    assert [arm.name for arm in ran] == ["32", "4", "8", "16", "64", "128", "256"]  # 512 on each of two are too many
    assert ran[-1].overrides == ("train.global_batch_size=512", "train.micro_batch_size=256")
    assert "1000 images" in arms("batch-size", where(), "2000")[1]["2000"]


def test_a_batch_that_should_not_fit_is_not_tried() -> None:
    told = {"updates": 1, "seconds": 0.1}
    trials = {"16": {**told, "memory_mb": [200.0, 180.0]}, "32": {**told, "memory_mb": [300.0, 250.0]}}
    assert batch_size_stops(Arm("64", size=64), trials, 1000.0) == ""  # 300 + 32 * 100 / 16 = 500
    assert batch_size_stops(Arm("128", size=128), trials, 1001.0) == ""  # 900, and a tenth stays free
    assert batch_size_stops(Arm("128", size=128), trials, 999.0) == "does not fit: it would take about 900 of 999 MiB"
    slow = {"32": {"updates": 2, "seconds": 60.0, "memory_mb": [1.0]}}
    assert batch_size_stops(Arm("64", size=64), slow, 1e6) == "not tried: an update of 32 takes 30 s already"


def test_the_network_is_measured_within_a_node_between_nodes_and_over_all() -> None:
    ran, _ = arms("network", where(2, 2))
    assert {arm.series: arm.ranks for arm in ran} == {"within": (0, 1), "between": (0, 2), "all": (0, 1, 2, 3)}
    assert [arm.size for arm in ran if "gradients" in arm.name] == [4_000_000] * 3
    _, left = arms("network", where(1, 2))
    assert left == {"between": "there is one node"}


def test_inference_splits_batches_over_two_gpus_or_more() -> None:
    ran, _ = arms("dp-inference", where(gpu="A100", gpus=2), "16")
    assert [(arm.name, arm.overrides[0], arm.base) for arm in ran] == [
        ("one device, 16", "strategy.name=single", ""),
        ("DataParallel, 16", "strategy.name=dp", "one device, 16"),
    ]
    assert "here is one" in arms("dp-inference", where(gpu="A100", gpus=1))[1]["DataParallel"]


def test_loaders_are_compared_with_the_model_alone_and_with_packs(tmp_path: Path) -> None:
    ran, _ = arms("loader", where(), "0", "2")
    assert [(arm.name, arm.work) for arm in ran] == [
        ("model alone", "ceiling"), ("0 workers", "feed"), ("2 workers", "feed")
    ]  # fmt: skip
    (folder := tmp_path / "imagenet-256.pack").mkdir()
    ran, _ = arms("loader", where(), "2", settings=("data.name=imagenet", f"data.root={folder.parent}"))
    assert [arm.overrides for arm in ran[1:]] == [("data.workers=2",), ("data.workers=2", "data.pack=256")]


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_asks_a_question_and_has_arms(name: str) -> None:
    bench = bench_of(name)
    assert bench.question.endswith("here?")
    assert arms(name, where(2, 2, gpu="A100", formats=A100, gpus=2))[0]
    assert set(bench.dispensable) <= {column for column, _ in bench.columns}


def test_cifar10_is_learnt_on_a_gpu_and_on_a_cpu_only_if_it_is_named() -> None:
    recipe = "cifar10-94"
    assert recipe in arms("proof", where())[1]
    assert [arm.name for arm in arms("proof", where(), recipe)[0]] == [recipe]
    assert recipe in [arm.name for arm in arms("proof", AMPERE)[0]]
