"""What is gathered from any number of ranks and scattered to any other is the same, bit for bit."""

import argparse
import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from jobs import export as export_command
from tests.checkpoint.reading import DIST, flip, tensors, write
from tests.rank_functions import run_ranks, train_run
from trainkit.checkpoint import format, safetensors_files
from trainkit.checkpoint.format import BrokenCheckpointError, CheckpointManifest, file_name
from trainkit.checkpoint.safetensors_files import Stored, TensorEntry, export
from trainkit.checkpoint.save import Checkpoints
from trainkit.checkpoint.state import start_from, weights_of
from trainkit.checkpoint.uploads import send_rest
from trainkit.cluster.ranks import RankEnv
from trainkit.common.errors import UserError
from trainkit.common.image_input import DataInfo
from trainkit.distributed.process_group import Distributed, distributed
from trainkit.models.library import timm_model
from trainkit.run.folder import RunDir


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
        Checkpoints(folder, keep=3, dist=dist).save(model, optimizer, step=1, state={})


def _restore_and_save_again(env: RankEnv, folder: Path, kind: str, copy: Path) -> None:
    with distributed(env, use_gpu=False) as dist:
        model, optimizer = make(dist, kind, seed=2)
        # Only rank 0 needs to see the folder.
        checkpoints = Checkpoints(folder if dist.is_main else Path("/nowhere"), keep=3, dist=dist)
        restored = checkpoints.restore(model, optimizer)
        assert restored is not None
        assert restored.step == 1
        Checkpoints(copy, keep=3, dist=dist).save(model, optimizer, step=1, state={})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for kind, world_size in (("single", 1), ("fsdp", 3)):
        folders[kind] = tmp_path_factory.mktemp(kind)
        run_ranks(world_size, _save, folders[kind], kind)
    return folders


@pytest.mark.nightly
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


def _restore_another(env: RankEnv, folder: Path) -> tuple[str, str]:
    with distributed(env, use_gpu=False) as dist:
        model = nn.Linear(3, 2 if dist.is_main else 4)  # fits on rank 0 and not on rank 1
        try:
            Checkpoints(folder, keep=3, dist=dist).restore(model, torch.optim.SGD(model.parameters()))
        except UserError as error:
            return error.what, error.why
    return "", ""


def test_a_checkpoint_that_does_not_fit_one_ranks_model_is_refused_by_all(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters())
    Checkpoints(tmp_path, keep=3, dist=DIST).save(model, optimizer, step=1, state={})
    why = "'bias' is (2,) in the checkpoint and (4,) in the model."
    assert run_ranks(2, _restore_another, tmp_path) == [("The checkpoint does not fit the model.", why)] * 2


def test_what_compiling_and_wrapping_put_into_names_is_left_out() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    inner = nn.Module()
    inner._orig_mod = model  # as torch.compile wraps a module
    for wrapped in (inner, nn.DataParallel(model, [])):
        assert set(weights_of(wrapped)) == {"0.weight", "0.bias"}


# A tensor in several files: whole in the end, or refused.

WHOLE = torch.arange(24.0).view(6, 4)


def part(rows: slice, columns: slice = slice(0, 4), whole: tuple[int, ...] = (6, 4)) -> tuple[TensorEntry, Tensor]:
    value = WHOLE[rows, columns].contiguous()
    return TensorEntry("w", value.dtype, tuple(value.shape), whole, (rows.start, columns.start)), value


def written(folder: Path, *parts: tuple[TensorEntry, Tensor]) -> CheckpointManifest:
    """A checkpoint with each part in a file of its own."""
    partial, facts = format.begin(folder, 1), {}
    for index, (entry, value) in enumerate(parts):
        name = file_name("model", index, len(parts))
        with format.new_file(partial, name) as out:
            facts[name] = safetensors_files.write(out.write, [entry], {entry: value}.__getitem__)
    format.commit(folder, CheckpointManifest(1, {}, facts))
    return format.verified(folder, 1)


def test_parts_make_a_whole_or_any_part_of_it(tmp_path: Path) -> None:
    record = written(tmp_path, part(slice(0, 2)), part(slice(2, 6), slice(0, 1)), part(slice(2, 6), slice(1, 4)))
    assert torch.equal(Stored(tmp_path, record, "model").read_all()["w"], WHOLE)
    assert torch.equal(Stored(tmp_path, record, "model").read("w", (1, 0), (4, 2)), WHOLE[1:5, 0:2])
    (format.path_of(tmp_path, 1) / file_name("model", 1, 3)).unlink()
    with pytest.raises(BrokenCheckpointError, match="No such file"):
        format.verified(tmp_path, 1)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([part(slice(0, 2)), part(slice(3, 6))], "the parts of 'w' in model are incomplete"),
        ([part(slice(0, 2)), part(slice(0, 2)), part(slice(2, 4))], "are incomplete"),
        ([part(slice(0, 3)), part(slice(3, 6), whole=(7, 4))], "are incomplete"),
        ([part(slice(4, 6), whole=(5, 4)), part(slice(0, 3), whole=(5, 4))], "lies outside of it"),
        ([part(slice(0, 3), whole=(-6, 4)), part(slice(3, 6))], "-6 is not a size"),
    ],
    ids=["a gap", "one twice", "of another", "outside", "odd"],
)
def test_parts_of_no_whole_break_a_checkpoint(
    tmp_path: Path, parts: list[tuple[TensorEntry, Tensor]], words: str
) -> None:
    record = written(tmp_path, *parts)
    with pytest.raises(BrokenCheckpointError, match=words):
        Stored(tmp_path, record, "model")


def test_safetensors_own_library_reads_what_is_written(tmp_path: Path) -> None:
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
    assert all(one.dtype == tensors[name].dtype and torch.equal(one, tensors[name]) for name, one in found.items())


# A checkpoint's weights in one file, as other libraries take them.

INFO = DataInfo("x", 7, 3, 32, tuple("abcdefg"), (0.5,) * 3, (0.5,) * 3)


def exported(tmp_path: Path, model: nn.Module) -> Path:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1, dist=DIST)
    checkpoints.best = 1
    checkpoints.save(model, None, step=1, state={})
    export(tmp_path / "checkpoints", "best", ("model",), tmp_path / "file.safetensors", {})
    return tmp_path / "file.safetensors"


def test_a_library_loads_what_is_exported(tmp_path: Path) -> None:
    model = timm_model("resnet10t", INFO, {}).eval()
    file = str(exported(tmp_path, model))
    other: nn.Module = timm.create_model("resnet10t", num_classes=7, checkpoint_path=file)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(images), other.eval()(images))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two ranks that share a model and its average."""
    folder = tmp_path_factory.mktemp("export") / "run"
    run_ranks(2, train_run, folder, "fsdp", ("train.max_steps=3", "train.ema_decay=0.9"))
    return folder


@pytest.mark.parametrize(("arguments", "stem"), [((), "ema"), (("--weights", "raw"), "model")])
def test_what_two_ranks_wrote_is_one_file(run: Path, tmp_path: Path, arguments: tuple[str, ...], stem: str) -> None:
    file, there = tmp_path / "out.safetensors", tmp_path / "there.safetensors"
    assert export_command.main([str(run), str(file), *arguments], {}) == 0
    expected: dict[str, Tensor] = tensors(run / "checkpoints", stem, "best")
    found = load_file(file)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    with safe_open(file, framework="pt") as opened:
        notes = opened.metadata()
    assert json.loads(notes.pop("trainkit"))["classes"] == [str(digit) for digit in range(10)]
    assert notes == {"format": "pt", "step": "3", "run": "run", "model": "fashion_cnn", "data": "digits"}
    url = send_rest(RunDir(run), f"file://{tmp_path}/bucket")
    assert export_command.main([url, str(there), *arguments], {}) == 0
    assert there.read_bytes() == file.read_bytes(), "a run's copy elsewhere is exported from its URL"


def test_an_export_that_fails_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = exported(tmp_path, nn.Linear(2, 2))
    before, write = file.read_bytes(), safetensors_files.write

    def half(*args: object) -> None:
        write(*args)  # type: ignore[arg-type]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_files, "write", half)
    with pytest.raises(UserError, match="No space left"):
        export(tmp_path / "checkpoints", "best", ("model",), file, {})
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_what_is_absent_or_has_changed_on_the_disk_is_not_exported(tmp_path: Path) -> None:
    exported(tmp_path, nn.Linear(2, 2))
    flip(format.path_of(tmp_path / "checkpoints", 1) / "model.safetensors")
    for stem, says in (("ema", "it has no ema"), ("model", "the content of model")):
        with pytest.raises(UserError, match=rf"{says}\.safetensors"):
            export(tmp_path / "checkpoints", "best", (stem,), tmp_path / "other.safetensors", {})
    assert not (tmp_path / "other.safetensors").exists()


def test_a_name_that_libraries_would_not_know_is_refused(run: Path) -> None:
    with pytest.raises(UserError, match=r"weights\.safetensors"):
        export_command.main([str(run), "weights.pt"], {})


# Fine-tuning: weights of a file, whatever trained them, for a network that may have another head.


def network(classes: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, classes))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def started(file: Path, model: nn.Module) -> tuple[str, ...]:
    with distributed(RankEnv.single(), use_gpu=False) as dist:
        return start_from(file, model, dist)


def same(model: nn.Module, there: dict[str, Tensor]) -> set[str]:
    return {name for name, value in model.state_dict().items() if name in there and torch.equal(value, there[name])}


@pytest.mark.parametrize(
    ("inside", "prefix"),
    [("", ""), ("model", "_orig_mod."), ("state_dict_ema", "module._orig_mod."), ("model_ema", "module.")],
)
def test_a_file_of_torch_save_is_read_however_it_was_wrapped(tmp_path: Path, inside: str, prefix: str) -> None:
    there = weights(network())
    named = {f"{prefix}{name}": value for name, value in there.items()}
    content: dict[str, object] = {inside: named, "epoch": 3, "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.99))}
    if inside == "model_ema":  # as AveragedModel's state in torchvision's references
        named["n_averaged"] = torch.tensor(5)
    if "ema" in inside:  # which is preferred
        content["state_dict"] = weights(network())
    torch.save(content if inside else named, tmp_path / "a.pth")
    model = network()
    assert started(tmp_path / "a.pth", model) == ()
    assert same(model, there) == set(there)


def test_a_head_for_other_classes_starts_anew(tmp_path: Path) -> None:
    there = weights(network(classes=7))
    save_file(there, tmp_path / "a.safetensors")
    model = network()
    before = weights(model)
    assert started(tmp_path / "a.safetensors", model) == ("2.weight", "2.bias")
    assert same(model, before) >= {"2.weight", "2.bias"}
    assert same(model, there) >= {"0.weight", "0.bias", "1.running_mean"}


def test_half_precision_of_a_safetensors_file_becomes_the_models_own(tmp_path: Path) -> None:
    there = {name: value.half() if value.is_floating_point() else value for name, value in weights(network()).items()}
    save_file(there, tmp_path / "a.safetensors")
    model = network()
    started(tmp_path / "a.safetensors", model)
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    assert torch.equal(model.get_parameter("0.weight").half(), there["0.weight"])


def test_another_network_is_refused_by_name_and_size(tmp_path: Path) -> None:
    save_file({"0.weight": torch.zeros(5, 9), "extra": torch.zeros(1)}, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="another network") as refusal:
        started(tmp_path / "a.safetensors", network())
    assert "0.weight is (5, 9) there, (5, 4) here" in refusal.value.why


class Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('a stranger ran code')",)


@pytest.mark.parametrize("name", ["a.pth", "a.safetensors"])
@pytest.mark.parametrize("content", ["code", "nothing", "noise", "no weights"])
def test_what_is_no_file_of_weights_is_refused_and_runs_nothing(tmp_path: Path, name: str, content: str) -> None:
    file = tmp_path / name
    if content == "code":
        torch.save({"model": Trap()}, file)
    elif content == "no weights":
        torch.save({"epoch": 3}, file)
    else:
        file.write_bytes(b"" if content == "nothing" else b"\x80\x02noise" * 100)
    with pytest.raises(UserError, match=r"cannot be read|no weights") as caught:
        started(file, network())
    assert "weights_only" not in str(caught.value)  # torch's own words advise to run what is in there


def _sharded_like(env: RankEnv, file: str) -> set[str]:
    with distributed(env, use_gpu=False) as dist:
        model = network()
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.world_size,)))
        start_from(Path(file) if dist.is_main else Path("nowhere"), model, dist)
        there = load_file(file)
        spread = {name: value for name, value in model.state_dict().items() if hasattr(value, "full_tensor")}
        return {name for name, value in spread.items() if torch.equal(value.full_tensor(), there[name])}


def test_a_sharded_model_starts_from_the_same_and_only_rank_0_reads(tmp_path: Path) -> None:
    save_file(weights(network()), tmp_path / "a.safetensors")
    parameters = set(dict(network().named_parameters()))
    assert run_ranks(2, _sharded_like, str(tmp_path / "a.safetensors")) == [parameters] * 2
