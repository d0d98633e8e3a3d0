from __future__ import annotations

import pytest
import torch

from trainkit.config.loading import load
from trainkit.distributed.device import gpu_is_here
from trainkit.errors import RefusedError
from trainkit.experiment import wants_gpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA sees a GPU here")
GRANTED = [
    {"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1"},
    {"SLURM_STEP_GPUS": "3", "CUDA_VISIBLE_DEVICES": "0"},
    {"TRAINKIT_ATTEMPT": "0", "CUDA_VISIBLE_DEVICES": "0,1"},  # by a supervisor of ours
]


@pytest.fixture
def granted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    env: dict[str, str] = request.param
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return env


@pytest.mark.parametrize("granted", GRANTED, indirect=True, ids=lambda env: next(iter(env)))
def test_granted_gpus_that_cuda_does_not_see_are_refused_and_never_trained_without(granted: dict[str, str]) -> None:
    with pytest.raises(RefusedError) as caught:
        wants_gpu(load("ddp").config)
    assert caught.value.exit_code == 3
    assert "driver" in caught.value.why
    assert f"torch {torch.__version__} is built" in caught.value.why
    assert f"CUDA_VISIBLE_DEVICES='{granted['CUDA_VISIBLE_DEVICES']}'" in caught.value.why


@pytest.mark.parametrize("granted", GRANTED[:1], indirect=True)
def test_who_asks_for_no_gpu_or_for_the_cpu_gets_it(granted: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not wants_gpu(load("ddp", ["launch.gpus_per_node=0"]).config)
    monkeypatch.setenv("TRAINKIT_DEVICE", "cpu")
    assert not gpu_is_here()


@pytest.mark.parametrize("mask", ["", "0,1"])
def test_a_mask_in_a_users_profile_is_no_grant(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert not gpu_is_here()


def test_a_job_without_gpus_trains_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "0")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    assert not gpu_is_here()
