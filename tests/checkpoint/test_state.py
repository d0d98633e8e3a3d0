"""What is gathered from any number of ranks and scattered to any other is the same, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from tests.checkpoint.reading import tensors, write
from tests.rank_functions import run_ranks
from trainkit.checkpoint import format
from trainkit.checkpoint import tensors as checkpoint_tensors
from trainkit.checkpoint.format import BrokenCheckpointError, Record, file_name, stem_of
from trainkit.checkpoint.save import Checkpoints
from trainkit.checkpoint.state import weights_of
from trainkit.checkpoint.tensors import Entry, Stored, read_tensors
from trainkit.distributed.process_group import Distributed, distributed
from trainkit.errors import UserError
from trainkit.ranks.env import RankEnv


class Odd(nn.Module):
    """Sizes that no number of ranks divides, tied and frozen weights, buffers of all kinds."""

    rough: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 1, bias=False))
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.frozen = nn.Parameter(torch.arange(3.0), requires_grad=False)
        self.tied = nn.Linear(5, 7, bias=False)
        self.tied.weight = self.body[0].weight  # type: ignore[assignment]
        self.register_buffer("rough", torch.full((3,), 0.1, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x) * self.scale + self.tied(x).sum(1, keepdim=True) * self.rough.float().sum()
        return y + self.frozen.sum()


def make(dist: Distributed, kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = Odd()
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.world_size,)))
    elif kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return model, torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])


def _save(env: RankEnv, folder: Path, kind: str) -> None:
    with distributed(env, use_gpu=False) as dist:
        model, optimizer = make(dist, kind, seed=1)
        for _ in range(2):
            model(torch.randn(4, 5)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        Checkpoints(folder, keep=3, dist=dist).save(model, optimizer, step=1, state={}, best_step=None)


def _restore_and_save_again(env: RankEnv, folder: Path, kind: str, copy: Path) -> None:
    with distributed(env, use_gpu=False) as dist:
        model, optimizer = make(dist, kind, seed=2)
        # Only rank 0 needs to see the folder.
        checkpoints = Checkpoints(folder if dist.is_main else Path("/nowhere"), keep=3, dist=dist)
        restored = checkpoints.restore(model, optimizer)
        assert restored is not None
        assert restored.step == 1
        Checkpoints(copy, keep=3, dist=dist).save(model, optimizer, step=1, state={}, best_step=None)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for kind, world_size in (("single", 1), ("fsdp", 3)):
        folders[kind] = tmp_path_factory.mktemp(kind)
        run_ranks(world_size, _save, folders[kind], kind)
    return folders


@pytest.mark.parametrize(
    ("source", "kind", "world_size"),
    [("single", "fsdp", 3), ("single", "hsdp", 4), ("fsdp", "single", 1), ("fsdp", "ddp", 2), ("fsdp", "fsdp", 2)],
)
def test_a_checkpoint_is_the_same_after_any_strategy_and_world_size(
    tmp_path: Path, saved: dict[str, Path], source: str, kind: str, world_size: int
) -> None:
    run_ranks(world_size, _restore_and_save_again, saved[source], kind, tmp_path)
    for stem in ("model", "optimizer"):
        before, after = tensors(saved[source], stem), tensors(tmp_path, stem)
        assert before.keys() == after.keys()
        for name, value in before.items():
            assert value.dtype == after[name].dtype, name
            assert torch.equal(value, after[name]), name


def test_names_and_kinds_are_those_of_the_plain_model(saved: dict[str, Path]) -> None:
    weights = tensors(saved["fsdp"])
    moments = tensors(saved["fsdp"], "optimizer")
    assert set(weights) == set(Odd().state_dict())
    assert "scratch" not in weights
    assert weights["rough"].dtype == torch.bfloat16
    trained = {name for name, parameter in Odd().named_parameters() if parameter.requires_grad}
    kinds = ("step", "exp_avg", "exp_avg_sq")
    assert set(moments) == {f"state.{name}.{kind}" for name in trained for kind in kinds}


def _restore_another(env: RankEnv, folder: Path) -> tuple[str, str]:
    with distributed(env, use_gpu=False) as dist:
        model = nn.Linear(3, 2 if dist.is_main else 4)  # fits on rank 0 and not on rank 1
        try:
            Checkpoints(folder, keep=3, dist=dist).restore(model, torch.optim.SGD(model.parameters()))
        except UserError as error:
            return error.what, error.why
    return "", ""


def test_a_checkpoint_that_does_not_fit_one_ranks_model_is_refused_by_all(tmp_path: Path) -> None:
    dist, model = Distributed(RankEnv.single(), torch.device("cpu")), nn.Linear(3, 2)
    Checkpoints(tmp_path, keep=3, dist=dist).save(
        model, torch.optim.SGD(model.parameters()), step=1, state={}, best_step=None
    )
    why = "'bias' is (2,) in the checkpoint and (4,) in the model."
    assert run_ranks(2, _restore_another, tmp_path) == [("The checkpoint does not fit the model.", why)] * 2


def test_what_compiling_and_wrapping_put_into_names_is_left_out() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    inner = nn.Module()
    inner._orig_mod = model  # as torch.compile wraps a module
    assert set(weights_of(inner)) == {"0.weight", "0.bias"}


def _save_further_tensors(env: RankEnv, folder: Path) -> None:
    with distributed(env, use_gpu=False) as dist:
        mesh = init_device_mesh("cpu", (dist.world_size,))
        spread = distribute_tensor(torch.arange(14.0).view(7, 2), mesh, [Shard(0)])
        named = {"spread": spread, "same": torch.ones(2), f"of rank {dist.rank}": torch.full((3,), float(dist.rank))}
        model = nn.Linear(1, 1)
        Checkpoints(folder, keep=3, dist=dist).save(
            model, None, step=1, state={}, best_step=None, extra={"further": named}
        )


def _restore_further_tensors(env: RankEnv, folder: Path) -> tuple[list[float], ...]:
    with distributed(env, use_gpu=False) as dist:
        mesh = init_device_mesh("cpu", (dist.world_size,))
        spread = distribute_tensor(torch.zeros(7, 2), mesh, [Shard(0)])
        named = {
            "spread": spread,
            "same": torch.zeros(2),
            "unknown": torch.zeros(1),
            f"of rank {2 - dist.rank}": torch.zeros(3),
        }
        found = Checkpoints(folder if dist.is_main else Path("/nowhere"), keep=3, dist=dist).restore(
            nn.Linear(1, 1), None, into={"further": named, "absent": {"x": torch.zeros(1)}}
        )
        assert found is not None
        return tuple(getattr(value, "full_tensor", value.clone)().flatten().tolist() for value in named.values())


def test_further_tensors_come_back_to_other_ranks_however_spread(tmp_path: Path) -> None:
    run_ranks(3, _save_further_tensors, tmp_path)
    whole = [float(number) for number in range(14)]
    same = (whole, [1.0, 1.0], [0.0])
    assert run_ranks(2, _restore_further_tensors, tmp_path) == [(*same, [2.0] * 3), (*same, [1.0] * 3)]


# A tensor in several files: whole in the end, or refused.

WHOLE = torch.arange(24.0).view(6, 4)


def part(rows: slice, columns: slice = slice(0, 4), whole: tuple[int, ...] = (6, 4)) -> tuple[Entry, Tensor]:
    value = WHOLE[rows, columns].contiguous()
    return Entry("w", value.dtype, tuple(value.shape), whole, (rows.start, columns.start)), value


def written(folder: Path, *parts: tuple[Entry, Tensor]) -> Record:
    """A checkpoint with each part in a file of its own."""
    partial, facts = format.begin(folder, 1), {}
    for index, (entry, value) in enumerate(parts):
        name = file_name("model", index, len(parts))
        held = checkpoint_tensors.as_bytes(value)
        with format.new_file(partial, name) as out:
            facts[name] = checkpoint_tensors.write(out, [entry], lambda _, held=held: held)  # type: ignore[misc]
    format.commit(folder, Record(1, {}, facts))
    return format.verified(folder, 1)


def test_parts_make_a_whole(tmp_path: Path) -> None:
    record = written(tmp_path, part(slice(0, 2)), part(slice(2, 6), slice(0, 1)), part(slice(2, 6), slice(1, 4)))
    assert torch.equal(read_tensors(tmp_path, record, "model")["w"], WHOLE)


def test_a_part_is_read_from_whatever_files_have_some_of_it(tmp_path: Path) -> None:
    record = written(tmp_path, part(slice(0, 2)), part(slice(2, 5)), part(slice(5, 6)))
    found = Stored(tmp_path, record, "model").read("w", (1, 2), (4, 2))
    assert torch.equal(found, WHOLE[1:5, 2:4])


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([part(slice(0, 2)), part(slice(3, 6))], "the parts of 'w' in model are no whole"),
        ([part(slice(0, 2)), part(slice(0, 2)), part(slice(2, 4))], "are no whole"),
        ([part(slice(0, 3)), part(slice(3, 6), whole=(7, 4))], "are no whole"),
        ([part(slice(4, 6), whole=(5, 4)), part(slice(0, 3), whole=(5, 4))], "lies outside of it"),
        ([part(slice(0, 3), whole=(-6, 4)), part(slice(3, 6))], "-6 is no size"),
    ],
    ids=["a gap", "one twice", "of another", "outside", "odd"],
)
def test_parts_that_make_no_whole_are_a_broken_checkpoint(
    tmp_path: Path, parts: list[tuple[Entry, Tensor]], words: str
) -> None:
    record = written(tmp_path, *parts)
    with pytest.raises(BrokenCheckpointError, match=words):
        Stored(tmp_path, record, "model")


def test_a_file_that_is_missing_is_a_broken_checkpoint(tmp_path: Path) -> None:
    written(tmp_path, part(slice(0, 2)), part(slice(2, 6)))
    (format.path_of(tmp_path, 1) / file_name("model", 1, 2)).unlink()
    with pytest.raises(BrokenCheckpointError, match="No such file"):
        format.verified(tmp_path, 1)


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("model.safetensors", "model"), ("model-00002-of-00016.safetensors", "model"),
        ("a-00002-of-3.safetensors", "a-00002-of-3"), ("x-00001-of-00002-y.safetensors", "x-00001-of-00002-y"),
    ],
)  # fmt: skip
def test_a_name_says_what_a_file_holds(name: str, stem: str) -> None:
    assert stem_of(name) == stem


def test_safetensors_own_library_reads_what_is_written(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = {
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "number": torch.tensor(3),
        "none": torch.zeros(0, 4),
        "mask": torch.tensor([[True], [False]]),
        "turned": torch.arange(6.0).view(2, 3).t(),
    }
    write(tmp_path, 1, {"model": tensors}, {})
    found = load_file(format.path_of(tmp_path, 1) / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(
        value.dtype == tensors[name].dtype and torch.equal(value, tensors[name]) for name, value in found.items()
    )
