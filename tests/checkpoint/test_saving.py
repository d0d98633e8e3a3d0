from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.checkpoint.reading import tensors
from tests.rank_functions import run_ranks, train_run
from trainkit.checkpoint import format
from trainkit.checkpoint.save import Checkpoints
from trainkit.config.loading import load
from trainkit.data import build_data
from trainkit.distributed.process_group import Distributed, distributed
from trainkit.errors import RunFailedError, UserError
from trainkit.models import build_model
from trainkit.ranks.env import RankEnv


def save(folder: Path, model: nn.Module, step: int = 1) -> None:
    with distributed(RankEnv.single(), use_gpu=False) as dist:
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        Checkpoints(folder, keep=3, dist=dist).save(model, optimizer, step=step, state={}, best_step=None)


def test_every_strategy_and_world_size_writes_the_same_names_and_shapes(tmp_path: Path) -> None:
    layouts = {}
    for preset, world_size in (("single", 1), ("ddp", 2), ("fsdp", 2)):
        folder = tmp_path / preset
        run_ranks(world_size, train_run, folder, preset, ("train.max_steps=1",))
        for stem in ("model", "optimizer"):
            found = tensors(folder / "checkpoints", stem)
            layouts[preset, stem] = {name: tuple(tensor.shape) for name, tensor in found.items()}
    for stem in ("model", "optimizer"):
        assert layouts["single", stem] == layouts["ddp", stem] == layouts["fsdp", stem]


def test_data_parallel_leaves_no_trace_in_the_names(tmp_path: Path) -> None:
    with distributed(RankEnv.single(), use_gpu=False) as dist:
        wrapped = nn.DataParallel(nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(wrapped.parameters())
        wrapped(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        checkpoints = Checkpoints(tmp_path, keep=3, dist=dist)
        checkpoints.save(wrapped, optimizer, step=1, state={}, best_step=None)
        assert set(load_file(tmp_path / "latest/model.safetensors")) == {"weight", "bias"}
        other = nn.DataParallel(nn.Linear(4, 2))
        assert checkpoints.restore(other, torch.optim.AdamW(other.parameters())) is not None
        assert torch.equal(other.module.weight, wrapped.module.weight)


def test_the_weights_load_into_the_plain_model(tmp_path: Path) -> None:
    run_ranks(2, train_run, tmp_path / "run", "fsdp", ("train.max_steps=1",))
    config = load("fsdp").config
    model = build_model(config.model, build_data(config.data).info, 0)
    weights = tensors(tmp_path / "run/checkpoints")
    model.load_state_dict(weights)
    assert torch.equal(dict(model.named_parameters())["0.weight"], weights["0.weight"])


def test_the_state_of_another_model_is_refused(tmp_path: Path) -> None:
    save(tmp_path, nn.Linear(4, 2))
    with distributed(RankEnv.single(), use_gpu=False) as dist:
        other = nn.Linear(4, 3)
        with pytest.raises(UserError, match="does not fit"):
            Checkpoints(tmp_path, keep=3, dist=dist).restore(other, torch.optim.AdamW(other.parameters()))


def _save_where_there_is_no_room(env: RankEnv, folder: Path) -> str:
    with distributed(env, use_gpu=False) as dist:
        model = nn.Linear(4, 2)
        try:
            Checkpoints(folder, keep=3, dist=dist).save(
                model, torch.optim.AdamW(model.parameters()), step=1, state={}, best_step=None
            )
        except RunFailedError as error:
            return error.what
    return "saved"


def test_a_save_that_fails_is_raised_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    told = run_ranks(2, _save_where_there_is_no_room, tmp_path / "checkpoints")
    assert told == ["The checkpoint of step 1 could not be written."] * 2


def _save_on_a_full_disk(env: RankEnv, folder: Path) -> tuple[str, list[str]]:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with distributed(env, use_gpu=False) as dist:
        checkpoints, model = Checkpoints(folder, keep=3, dist=dist), nn.Linear(200, 200)
        optimizer = torch.optim.AdamW(model.parameters())
        checkpoints.save(model, optimizer, step=1, state={}, best_step=None)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # no file may hold the 160 kB of the weights
        try:
            checkpoints.save(model, optimizer, step=2, state={}, best_step=None)
        except RunFailedError as error:
            return str(error), sorted(entry.name for entry in folder.iterdir())
    return "saved", []


def test_a_full_disk_is_said_so_and_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    ((said, left),) = run_ranks(1, _save_on_a_full_disk, tmp_path)
    assert "The checkpoint of step 2 could not be written." in said
    assert f"Make room, then `python -m jobs.resume {tmp_path.parent}`" in said
    assert "/model" in said.split("why: ")[1].split("\n")[0], "the file is named"
    assert left == ["latest", "step-00000001"]
    format.verified(tmp_path, 1)


def test_nothing_is_restored_from_nothing(tmp_path: Path) -> None:
    dist = Distributed(RankEnv.single(), torch.device("cpu"))
    model = nn.Linear(4, 2)
    assert Checkpoints(tmp_path, keep=3, dist=dist).restore(model, torch.optim.AdamW(model.parameters())) is None
