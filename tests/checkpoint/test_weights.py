"""Fine-tuning: weights of a file, whatever trained them, for a network that may have another head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.rank_functions import run_ranks
from trainkit.checkpoint.weights import start_from
from trainkit.distributed.process_group import distributed
from trainkit.errors import UserError
from trainkit.ranks.env import RankEnv


def network(classes: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, classes))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def started(file: Path, model: nn.Module) -> tuple[str, ...]:
    with distributed(RankEnv.single(), use_gpu=False) as dist:
        return start_from(file, model, dist)


def same(model: nn.Module, there: dict[str, Tensor]) -> set[str]:
    return {name for name, value in model.state_dict().items() if name in there and torch.equal(value, there[name])}


@pytest.mark.parametrize("inside", ["", "state_dict", "model", "state_dict_ema"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_a_file_of_torch_save_is_read_however_it_was_wrapped(tmp_path: Path, inside: str, prefix: str) -> None:
    there = weights(network())
    named = {f"{prefix}{name}": value for name, value in there.items()}
    torch.save({inside: named, "epoch": 3, "args": {"lr": 0.1}} if inside else named, tmp_path / "a.pth")
    model = network()
    assert started(tmp_path / "a.pth", model) == ()
    assert same(model, there) == set(there)


def test_a_safetensors_file_is_read(tmp_path: Path) -> None:
    there = weights(network())
    save_file(there, tmp_path / "a.safetensors")
    model = network()
    started(tmp_path / "a.safetensors", model)
    assert same(model, there) == set(there)


def test_averaged_weights_are_preferred(tmp_path: Path) -> None:
    averaged, last = weights(network()), weights(network())
    torch.save({"state_dict": last, "state_dict_ema": averaged}, tmp_path / "a.pth")
    model = network()
    started(tmp_path / "a.pth", model)
    assert same(model, averaged) == set(averaged)


def test_a_head_for_other_classes_starts_anew(tmp_path: Path) -> None:
    there = weights(network(classes=7))
    save_file(there, tmp_path / "a.safetensors")
    model = network()
    before = weights(model)
    assert started(tmp_path / "a.safetensors", model) == ("2.weight", "2.bias")
    assert same(model, before) >= {"2.weight", "2.bias"}
    assert same(model, there) >= {"0.weight", "0.bias", "1.running_mean"}


def test_half_precision_becomes_the_models_own(tmp_path: Path) -> None:
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
    assert "0.weight is 5x9 there, 5x4 here" in refusal.value.why


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
        full = {
            name: value.full_tensor() for name, value in model.state_dict().items() if hasattr(value, "full_tensor")
        }
        return {name for name, value in full.items() if torch.equal(value, there[name])}


def test_a_sharded_model_starts_from_the_same_and_only_rank_0_reads(tmp_path: Path) -> None:
    save_file(weights(network()), tmp_path / "a.safetensors")
    parameters = set(dict(network().named_parameters()))
    assert run_ranks(2, _sharded_like, str(tmp_path / "a.safetensors")) == [parameters] * 2
