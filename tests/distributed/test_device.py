import os
from pathlib import Path

import pytest
import torch

from trainkit.cluster.ranks import RankEnv
from trainkit.common.errors import RefusedError, UserError
from trainkit.config.loading import load
from trainkit.distributed.device import (
    backends,
    copies_later,
    formats_of,
    gpu_driver,
    gpu_is_here,
    kind_of,
    require_exchanges,
)
from trainkit.distributed.process_group import Distributed
from trainkit.training import train_state
from trainkit.training.placement import wants_gpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA sees a GPU here")
GRANTED = [
    {"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1"},
    {"SLURM_STEP_GPUS": "3", "CUDA_VISIBLE_DEVICES": "0"},
    {"TRAINKIT_ATTEMPT": "0", "CUDA_VISIBLE_DEVICES": "0,1"},  # by a supervisor of ours
]


@pytest.mark.parametrize("env", GRANTED, ids=lambda env: next(iter(env)))
def test_granted_gpus_that_cuda_does_not_see_are_refused(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RefusedError) as caught:
        wants_gpu(load("ddp").config)
    assert caught.value.exit_code == 3
    assert "driver" in caught.value.why
    assert f"torch {torch.__version__} is built" in caught.value.why
    assert f"CUDA_VISIBLE_DEVICES='{env['CUDA_VISIBLE_DEVICES']}'" in caught.value.why
    assert not wants_gpu(load("ddp", ["launch.gpus_per_node=0"]).config)


@pytest.mark.parametrize(
    "env",
    [
        {"CUDA_VISIBLE_DEVICES": ""},  # in a user's profile
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"TRAINKIT_ATTEMPT": "0", "CUDA_VISIBLE_DEVICES": "-1"},
        {"SLURM_GPUS_ON_NODE": "0", "SLURM_JOB_ID": "4711"},
        {**GRANTED[0], "TRAINKIT_DEVICE": "cpu"},
    ],
)
def test_a_mask_or_a_job_without_gpus_is_no_grant(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert not gpu_is_here()


def test_the_driver_of_a_node_is_read_from_its_kernel(tmp_path: Path) -> None:
    assert gpu_driver(tmp_path) == ""
    (tmp_path / "sys/module/amdgpu").mkdir(parents=True)
    assert gpu_driver(tmp_path) == "amdgpu"
    (tmp_path / "sys/module/nvidia").mkdir()
    (tmp_path / "sys/module/nvidia/version").write_text("550.54.15\n")
    assert gpu_driver(tmp_path) == "550.54.15"


@pytest.mark.parametrize(
    ("device", "expected", "pins"),
    [("cuda", "cpu:gloo,cuda:nccl", True), ("xpu", "cpu:gloo,xpu:xccl", True), ("mps", "gloo", False),
     ("cpu", "gloo", False)],
)  # fmt: skip
def test_tensors_between_ranks_are_carried_by_the_backend_of_their_device(
    device: str, expected: str, pins: bool
) -> None:
    assert backends(torch.device(device, 0)) == expected
    assert copies_later(torch.device(device, 0)) == pins


def test_gpus_of_other_makers_have_bf16_first_and_apples_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert formats_of(torch.device("xpu", 0)) == ("bf16", "fp16", "fp32")
    assert formats_of(torch.device("mps", 0))[0] == "fp32"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert kind_of(torch.device("cuda", 0)).maker == "AMD"
    assert formats_of(torch.device("cuda", 0))[0] == "bf16"


def test_what_a_kind_lacks_is_refused_before_training() -> None:
    apple = torch.device("mps", 0)
    require_exchanges(apple, 1)
    with pytest.raises(RefusedError, match="2 ranks cannot train together on GPUs by Apple"):
        require_exchanges(apple, 2)
    config = load("single", ["train.compile=model"]).config
    with pytest.raises(UserError, match=r"train\.compile=model"):
        train_state.build(config, Distributed(RankEnv.single(), apple), None)  # type: ignore[arg-type]


def test_slurms_mask_in_two_variables_hides_no_gpu_of_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "1")
    assert not gpu_is_here()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not gpu_is_here()
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
