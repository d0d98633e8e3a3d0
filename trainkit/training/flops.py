"""How much of its arithmetic a GPU is used for: model FLOPs utilisation (MFU), as in PaLM, appendix B.

FLOPs of an image are those that the model needs for it, counted once by torch's own counter, in matrix products,
convolutions and attention, forward and backward. What is computed twice to save memory counts once.
"""

from __future__ import annotations

import re

import torch
from torch import nn

_IMAGES = 2

_TFLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    # Dense (without sparsity), accumulated in fp32, in units of 1e12 a second; fp32 is without tensor cores. From
    # NVIDIA's data sheets and, for GeForce, its architecture white papers ("Ampere GA102", "Ada").
    (r"B200", {"fp32": 75, "tf32": 1100, "bf16": 2250, "fp16": 2250}),
    (r"H100 PCIe", {"fp32": 51, "tf32": 378, "bf16": 756, "fp16": 756}),
    (r"(H100|H200) NVL", {"fp32": 60, "tf32": 418, "bf16": 835, "fp16": 835}),
    (r"(H100|H200|GH200)", {"fp32": 67, "tf32": 495, "bf16": 989, "fp16": 989}),  # SXM
    (r"A100", {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312}),
    (r"A40", {"fp32": 37.4, "tf32": 74.8, "bf16": 149.7, "fp16": 149.7}),
    (r"A30", {"fp32": 10.3, "tf32": 82, "bf16": 165, "fp16": 165}),
    (r"A10", {"fp32": 31.2, "tf32": 62.5, "bf16": 125, "fp16": 125}),
    (r"RTX A6000", {"fp32": 38.7, "tf32": 77.4, "bf16": 154.8, "fp16": 154.8}),
    (r"L40S", {"fp32": 91.6, "tf32": 183, "bf16": 362, "fp16": 362}),
    (r"L40", {"fp32": 90.5, "tf32": 90.5, "bf16": 181, "fp16": 181}),
    (r"L4", {"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121}),
    (r"RTX 4090", {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2}),
    (r"RTX 3090", {"fp32": 35.6, "tf32": 35.6, "bf16": 71, "fp16": 71}),
    (r"V100-PCIE", {"fp32": 14, "fp16": 112}),
    (r"V100", {"fp32": 15.7, "fp16": 125}),
    (r"T4", {"fp32": 8.1, "fp16": 65}),
    (r"P100-PCIE", {"fp32": 9.3, "fp16": 18.7}),
    (r"P100", {"fp32": 10.6, "fp16": 21.2}),
)


def peak_flops(device: str, precision: str) -> float | None:
    """FLOP/s of a device at best, by the name that CUDA gives it; None where that is not known, as of CPUs.

    Args:
        precision: that of the matrix products: fp32, tf32, bf16, fp16 or o2, which is fp16.
    """
    precision = "fp16" if precision == "o2" else precision
    if " MIG " in device:
        return None  # a slice of one
    for pattern, tflops in _TFLOPS:
        if re.search(rf"(?<![\w]){pattern}(?![\w])", device):
            return tflops[precision] * 1e12 if precision in tflops else None
    return None


def flops_per_image(model: nn.Module, chans: int, image_size: int) -> float | None:
    """Of one image's part of an update, forward and backward; None of a model that cannot be traced without data.

    Nothing is computed and no memory taken, and the model stays as it is: its parameters are replaced by tensors that
    have only a shape.
    """
    from torch.func import functional_call
    from torch.utils.flop_counter import FlopCounterMode

    state = {
        name: tensor.detach().to("meta").requires_grad_(tensor.requires_grad)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    images = torch.empty(_IMAGES, chans, image_size, image_size, device="meta")
    was_training = model.training
    model.train()
    try:
        with FlopCounterMode(display=False) as counter:
            trained = [tensor for tensor in state.values() if tensor.requires_grad]
            torch.autograd.grad(functional_call(model, state, (images,)).sum(), trained, allow_unused=True)
        return counter.get_total_flops() / _IMAGES or None
    except Exception:  # code of the user's own may look at values; then there is no MFU, and no harm done
        return None
    finally:
        model.train(was_training)
