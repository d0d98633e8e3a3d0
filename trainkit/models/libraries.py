"""Models of timm and torchvision, fitted to the data: its classes, channels and image size."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from trainkit.errors import TrainkitError, UserError

if TYPE_CHECKING:
    from torch import nn

    from trainkit.data.base import DataInfo, ModelInput


def timm_model(name: str, info: DataInfo, options: dict[str, Any]) -> nn.Module:
    """``timm.create_model`` with the data's classes and channels.

    Where the input has a fixed size (vision transformers): smaller images are enlarged to it on the device, see
    `_Enlarge`; for larger ones the model is built for theirs. ``img_size`` among the options sets it by hand.
    """
    import timm
    from timm.models import get_pretrained_cfg, is_model

    settings: dict[str, Any] = {"num_classes": info.num_classes, "in_chans": info.in_chans, **options}
    known = get_pretrained_cfg(name) if is_model(name) else None
    size = options.get("img_size") or (_fixed_size(vars(known)) if known is not None else None)
    if size is not None and size < info.image_size:
        settings.setdefault("img_size", info.image_size)
    try:
        model: nn.Module = timm.create_model(name, **settings)
        if known is None and size is None:  # models from the Hub bring their input size along
            size = _fixed_size(getattr(model, "pretrained_cfg", {}))
            if size is not None and size < info.image_size:
                model = timm.create_model(name, **settings, img_size=info.image_size)
    except Exception as error:
        raise _explain(error, name, options, "timm") from error
    if size is not None and size > info.image_size:
        model.register_forward_pre_hook(_Enlarge(size, timm_input(model, info) if options.get("pretrained") else None))
    return model


def timm_input(model: nn.Module, info: DataInfo) -> ModelInput:
    """What timm says of the images that the weights of ``model`` were trained on."""
    from timm.data.config import resolve_model_data_config

    known: dict[str, Any] = resolve_model_data_config(model)
    cfg = getattr(model, "pretrained_cfg", {})
    return info.as_input(
        ".".join(cfg[key] for key in ("architecture", "tag") if cfg.get(key)),
        mean=known["mean"],
        std=known["std"],
        interpolation=known["interpolation"],
        crop=known["crop_pct"],
    )


def torchvision_input(name: str, info: DataInfo, options: dict[str, Any]) -> ModelInput:
    """What torchvision says of the images that the weights were trained on."""
    import torchvision

    weights = options.get("weights") or "DEFAULT"
    if isinstance(weights, str):
        weights = torchvision.models.get_model_weights(name)[weights.rpartition(".")[2]]
    known = weights.transforms()
    return info.as_input(
        str(weights),
        mean=known.mean,
        std=known.std,
        interpolation=known.interpolation.value,
        crop=known.crop_size[0] / known.resize_size[0],
    )


def torchvision_model(name: str, info: DataInfo, options: dict[str, Any]) -> nn.Module:
    """``torchvision.models.get_model`` with the data's classes; ``pretrained`` takes the library's default weights.

    Vision transformers get images of their size as in `timm_model`.
    """
    import torchvision

    if info.in_chans != 3:
        raise UserError(
            f"torchvision's {name} takes images of 3 channels, not {info.in_chans}.",
            why=f"The data set '{info.name}' has data.in_chans={info.in_chans}; torchvision's models are made for RGB.",
            fix="Use data.in_chans=3 (gray thrice), or a model of timm, which takes any number.",
        )
    settings = dict(options)
    pretrained = settings.pop("pretrained", False) or settings.get("weights") is not None
    if pretrained:
        settings.setdefault("weights", "DEFAULT")
    else:
        settings["num_classes"] = info.num_classes
    if name in ("googlenet", "inception_v3"):
        # Their auxiliary heads make the output a tuple in training only; modern recipes do without.
        settings.setdefault("aux_logits", False)
        settings.setdefault("init_weights", not pretrained)
    if name.startswith("vit_") and info.image_size > 224 and not pretrained:
        settings.setdefault("image_size", info.image_size)
    try:
        model: nn.Module = torchvision.models.get_model(name, **settings)
    except Exception as error:
        raise _explain(error, name, options, "torchvision") from error
    if pretrained:
        _replace_head(model, info.num_classes)
    size = getattr(model, "image_size", None)  # vision transformers have one
    if isinstance(size, int) and size > info.image_size:
        model.register_forward_pre_hook(_Enlarge(size))
    return model


def _fixed_size(pretrained_cfg: dict[str, Any]) -> int | None:
    return int(pretrained_cfg["input_size"][-1]) if pretrained_cfg.get("fixed_input_size") else None


class _Enlarge:
    """Enlarges images before a model sees them: 32x32 bytes travel, and 224x224 exist on the device only.

    A ViT with patches of 32 would see a photo of CIFAR as one single patch, and weights trained at 224 know objects at
    that scale. A hook and not a module around the model, so that the names in checkpoints are the library's own.
    """

    def __init__(self, size: int, expected: ModelInput | None = None) -> None:
        self.size = size
        self.mode = "bicubic" if expected is not None and expected.interpolation == "bicubic" else "bilinear"

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        import torch.nn.functional as F

        images, *others = args
        size = (self.size, self.size)
        return F.interpolate(images, size=size, mode=self.mode, align_corners=False), *others


def _replace_head(model: nn.Module, num_classes: int) -> None:
    """A new last layer for other classes than the weights were trained on."""
    from torch import nn

    heads = [
        (path, module)
        for path, module in model.named_modules()
        if (isinstance(module, nn.Linear) and module.out_features == 1000)
        or (isinstance(module, nn.Conv2d) and module.out_channels == 1000)  # SqueezeNet's
    ]
    path, head = heads[-1]
    if num_classes == 1000:
        return
    new: nn.Module
    if isinstance(head, nn.Linear):
        new = nn.Linear(head.in_features, num_classes, bias=head.bias is not None)
    else:
        assert isinstance(head, nn.Conv2d)
        new = nn.Conv2d(head.in_channels, num_classes, kernel_size=1)
    parent, _, last = path.rpartition(".")
    setattr(model.get_submodule(parent), last, new)


def _explain(error: Exception, name: str, options: dict[str, Any], library: str) -> TrainkitError:
    message = str(error).strip().split("\n")[0] or type(error).__name__
    unexpected = re.search(r"unexpected keyword argument '(\w+)'", message)
    if unexpected:
        option = unexpected[1]
        return UserError(
            f"Unknown key 'model.{option}'.",
            why=f"{library}'s {name} takes no '{option}'.",
            fix=f"Remove 'model.{option}'.",
        )
    wants_weights = options.get("pretrained") or options.get("weights") or name.startswith(("hf-hub:", "hf_hub:"))
    if wants_weights and _is_download(error):
        cache = "$HF_HOME (~/.cache/huggingface)" if library == "timm" else "~/.cache/torch/hub"
        load = (
            f"import timm; timm.create_model({name!r}, pretrained=True)"
            if library == "timm"
            else f"import torchvision; torchvision.models.get_model({name!r}, weights='DEFAULT')"
        )
        bring = ""
        if library == "timm" and not name.startswith(("hf-hub:", "hf_hub:")):
            bring = " Or bring their file: model.pretrained_cfg_overlay='{file: model.safetensors}'."
        return UserError(
            f"The pretrained weights of {library}'s {name} could not be downloaded.",
            why=f"{message} (compute nodes often have no internet).",
            fix=f'On a machine that has, run: python -c "{load}"; it keeps them in {cache}, which the nodes must see.'
            + bring,
        )
    given = ", ".join(f"model.{key}={value}" for key, value in options.items())
    return UserError(
        f"{library} cannot build {name}{f' with {given}' if given else ''}.",
        why=f"{type(error).__name__}: {message}",
        fix="Correct these options." if given else "Choose another model.name, or another data.image_size.",
    )


def _is_download(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, came from the network or from a library that fetches from it."""
    while error is not None:
        home = type(error).__module__.split(".")[0]
        if isinstance(error, OSError) or home in ("huggingface_hub", "httpx", "httpcore", "requests", "urllib3"):
            return True
        error = error.__cause__ or error.__context__
    return False
