from pathlib import Path

import pytest
import torch

from trainkit.config.loading import load
from trainkit.distributed.device import gpu_driver, gpu_is_here
from trainkit.errors import RefusedError
from trainkit.training.build import wants_gpu

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
