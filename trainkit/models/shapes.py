"""Whether a model takes the data's images and gives a score for each of its classes: asked before training starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from trainkit.data.base import DataInfo


def check_shapes(model: nn.Module, info: DataInfo, name: str) -> None:
    """Refuse a model that cannot map [N, in_chans, image_size, image_size] to [N, num_classes].

    By computing it for two black images, which costs no more than initialising the weights did.
    """
    import torch

    was_training = model.training
    model.eval()  # the running statistics of BatchNorm stay as they are
    try:
        with torch.no_grad():
            # Two images: one would not show a model that mixes up batch and features.
            output = model(torch.zeros(2, info.in_chans, info.image_size, info.image_size))
    except Exception as error:
        wants = getattr(model, "pretrained_cfg", None) or {}
        size = wants.get("input_size", (3, 224, 224))[-1] if isinstance(wants, dict) else 224
        raise UserError(
            f"The model '{name}' cannot take images of {info.in_chans} x {info.image_size} x {info.image_size}.",
            why=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}",
            fix=f"Use data.image_size={size}, or a model for small images such as model.name=fashion_cnn."
            if info.image_size < size
            else "Use another data.image_size, or another model.",
        ) from error
    finally:
        model.train(was_training)
    shape = tuple(output.shape) if isinstance(output, torch.Tensor) else None
    if shape != (2, info.num_classes):
        raise UserError(
            f"The model '{name}' gives no score for each class.",
            why=f"For 2 images of {info.num_classes} classes it returned "
            + (f"a tensor of shape {shape}." if shape is not None else f"{type(output).__name__}, not a tensor."),
            fix=f"It must return a tensor of shape (2, {info.num_classes}); info.num_classes tells the number. "
            "Correct it, and submit again.",
        )
