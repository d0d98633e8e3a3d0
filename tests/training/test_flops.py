from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.training.parts import parts_of
from trainkit.training import costs
from trainkit.training.flops import flops_per_image, peak_flops


def model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.Dropout(), nn.Flatten(), nn.Linear(320, 7)
    )


def test_the_flops_of_an_image_are_those_of_its_products_forward_and_backward() -> None:
    conv, linear = 2 * 64 * 5 * 3 * 9, 2 * 320 * 7
    # Backward: gradients by weights and by inputs, of which the first layer's inputs, the images, need none.
    assert flops_per_image(model(), 3, 8) == conv * 2 + linear * 3


def test_what_is_frozen_needs_no_gradient() -> None:
    part_frozen = model()
    for parameter in part_frozen[0].parameters():  # type: ignore[index]
        parameter.requires_grad_(False)
    assert flops_per_image(part_frozen, 3, 8) == 2 * 64 * 5 * 3 * 9 + 2 * 320 * 7 * 3


def test_counting_changes_nothing() -> None:
    counted = model().eval()
    before = {name: value.clone() for name, value in counted.state_dict().items()}
    random = torch.get_rng_state()
    flops_per_image(counted, 3, 8)
    assert all(torch.equal(value, before[name]) for name, value in counted.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not counted.training
    assert all(parameter.grad is None and not parameter.is_meta for parameter in counted.parameters())


def test_a_model_that_looks_at_values_has_none() -> None:
    class Looks(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images if images.sum().item() > 0 else -images

    assert flops_per_image(Looks(), 3, 8) is None


@pytest.mark.parametrize(
    ("device", "precision", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A10", "fp16", 125),
        ("NVIDIA A10G", "fp16", None),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H200", "tf32", 495),
        ("NVIDIA H100 NVL", "fp32", 60),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362),
        ("Tesla T4", "fp16", 65),
        ("Tesla T4", "o2", 65),
        ("Tesla T4", "bf16", None),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("Tesla V100-PCIE-16GB", "fp16", 112),
        ("NVIDIA RTX A4000", "fp16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("cpu", "fp32", None),
    ],
)
def test_the_peak_of_a_gpu_goes_by_its_name_and_the_precision(
    device: str, precision: str, tflops: float | None
) -> None:
    assert peak_flops(device, precision) == (None if tflops is None else tflops * 1e12)


def test_utilisation_is_what_all_gpus_do_of_what_they_could(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: Any = replace(parts_of(), flops_per_image=24.3e9)
    assert costs.mfu(parts, 2500.0) is None  # a CPU's peak is not known
    monkeypatch.setattr(costs, "device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    assert costs.mfu(parts, 2500.0) == pytest.approx(100 * 24.3e9 * 2500 / 19.5e12, abs=0.01)  # in fp32
    assert costs.mfu(replace(parts, flops_per_image=None), 2500.0) is None
    assert costs.mfu(parts, None) is None
