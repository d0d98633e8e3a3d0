"""Models: one file a model of our own, beside timm's, torchvision's, and the user's.

The file of a model has ``build(info, *, <options>)`` and, where some values make no network, ``check(<options>)``,
which refuses them without torch.

A name is looked up in this order: a file here with a ``build``; ``package.module:function``; timm; torchvision.
``timm/NAME`` and ``torchvision/NAME`` say which of the two is meant.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from trainkit.common.errors import TrainkitError, UserError, did_you_mean, require
from trainkit.config import plugin_options, plugins
from trainkit.config.libraries import timm_models, torchvision_models

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from trainkit.common.image_input import DataInfo, ModelInput
    from trainkit.config.schema import ModelConfig


# timm's own ways to name a model outside its zoo. They hold a colon, as the user's functions do: look here first.
TIMM_SOURCES = ("hf-hub:", "hf_hub:", "local-dir:")
LIBRARIES = ("timm", "torchvision")
_FROM_THE_DATA = ("num_classes", "in_chans")
_BRINGS_WEIGHTS = ("pretrained", "checkpoint_path")


def check_model(config: ModelConfig) -> None:
    """Refuse, without importing torch, a model that does not exist and options that it cannot have."""
    home, name = resolve(config.name)
    if home in LIBRARIES:
        _check_library_options(config.options)
        return
    plugins.check_options(__package__, name, config.options, where="model")
    if home == "trainkit":
        module = importlib.import_module(f"{__package__}.{name}")
        if hasattr(module, "check"):
            module.check(**plugin_options.fill(plugins.load(__package__, name), config.options, where="model"))


def build_model(config: ModelConfig, info: DataInfo, seed: int, *, pretrained: bool = True) -> nn.Module:
    """The model of a configuration for the data ``info`` describes, on the CPU, its weights a function of ``seed``.

    Args:
        pretrained: False: a library's model without the weights that it was to begin with, for others come into it.

    Raises UserError for what `check_model` refuses, for options that the model does not take, for weights that cannot
    be downloaded, and where the model cannot take images of the data's size. Leaves global random numbers as they were.
    """
    import torch

    check_model(config)
    home, name = resolve(config.name)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if home not in LIBRARIES:
            build = plugins.load(__package__, name)
            model: nn.Module = build(info, **plugin_options.fill(build, config.options, where="model"))
        else:
            create = {"timm": timm_model, "torchvision": torchvision_model}[home]
            model = create(name, info, dict(config.options), pretrained=pretrained)
    if not isinstance(model, torch.nn.Module):
        why = f"It returned {type(model).__name__}, not a torch.nn.Module."
        fix = "Return the module that maps images to scores, one per class. Then submit again."
        raise UserError(f"{name} returned no model.", why=why, fix=fix)
    check_shapes(model, info, config.name)
    return model


def expected_input(config: ModelConfig, model: nn.Module, info: DataInfo) -> ModelInput | None:
    """Return the input that the weights of ``model`` expect; None: images as the data set has them."""
    home, name = resolve(config.name)
    if not (config.options.get("pretrained") or config.options.get("weights")):
        return None
    if home == "timm":
        return timm_input(model, info)
    if home == "torchvision":
        return torchvision_input(name, info, dict(config.options))
    return None


def resolve(name: str) -> tuple[str, str]:
    """Return a model's home (``trainkit``, ``user``, ``timm`` or ``torchvision``) and its name there."""
    library, slash, rest = name.partition("/")
    if not slash or library not in LIBRARIES:
        library = ""
        rest = name
    if rest.startswith(TIMM_SOURCES) and library != "torchvision":
        return "timm", rest
    if not library and name in plugins.available(__package__):
        return "trainkit", name
    if not library and ":" in name:
        return "user", name
    base, _, tag = rest.partition(".")
    tags = timm_models().get(base)
    if library != "torchvision" and tags is not None and (not tag or not tags or tag in tags):
        return "timm", rest
    if library != "timm" and rest in torchvision_models():
        return "torchvision", rest
    raise _unknown(name, [library] if library else LIBRARIES, [f"{base}.{known}" for known in tags or ()])


def _unknown(name: str, libraries: Sequence[str], tagged: Sequence[str]) -> UserError:
    """No library has that name. ``tagged``: pretrained weights of its model, where the tag alone is wrong."""
    what = f"Unknown model '{name}'."
    for package in libraries:
        if importlib.util.find_spec(package) is None:
            why = f"{package} is not installed here."
            fix = f"pip install {package}"
            return UserError(what, why=why, fix=fix, key="model.name")
    names = {"timm": timm_models(), "torchvision": torchvision_models()}
    why = f"There is none in {' or '.join(libraries)}."
    if tagged:
        known = list(tagged)
        why = f"There are: {', '.join(tagged)}."
    elif len(libraries) == 1:
        known = [f"{libraries[0]}/{item}" for item in names[libraries[0]]]
    else:
        known = [*plugins.available(__package__), *names["timm"], *names["torchvision"]]
    otherwise = "Use a name of timm or torchvision, or package.module:function for a model of your own."
    return UserError(what, why=why, fix=did_you_mean(name, known, otherwise=otherwise), key="model.name")


def _check_library_options(given: Mapping[str, Any]) -> None:
    for option in _FROM_THE_DATA:
        if option in given:
            why = "The data determines it."
            fix = "Remove it; data.num_classes and data.in_chans are options of some data sets."
            raise UserError(f"model.{option} cannot be set.", why=why, fix=fix, key=f"model.{option}")
    asked = given.get("pretrained", False)
    must_be = "true or false: which weights is part of a timm name, or model.weights=NAME of torchvision's"
    require(isinstance(asked, bool), "model.pretrained", asked, must_be)


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Stop training every parameter whose name fits one of ``patterns`` (shell wildcards, ``blocks.[0-5].*``).

    A norm all of whose parameters are frozen keeps its running statistics too, or the frozen layers would change under
    the others.

    Raises:
        UserError: a pattern that fits nothing, or nothing would be left to train.
    """
    named = dict(model.named_parameters())
    for pattern in patterns:
        fitting = [name for name in named if fnmatchcase(name, pattern)]
        if not fitting:
            what = f"model.freeze: no parameter matches '{pattern}'."
            why = f"Its parameters have names like {', '.join(list(named)[:3])}."
            fix = 'Use shell wildcards over whole names, for example model.freeze=["blocks.[0-5].*"].'
            raise UserError(what, why=why, fix=fix, key="model.freeze")
        for name in fitting:
            named[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in named.values()):
        why = f"Its patterns match all {len(named)} parameters."
        fix = "Exclude the head: its name is the last one of the model's parameters."
        raise UserError("model.freeze leaves nothing to train.", why=why, fix=fix, key="model.freeze")
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own and hasattr(module, "running_mean") and not any(parameter.requires_grad for parameter in own):
            module.eval()  # and `model.train()` passes it by from now on
            module.train = lambda mode=True, module=module: module  # type: ignore[method-assign, misc]


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
        what = f"The model '{name}' cannot take images of {info.in_chans} x {info.image_size} x {info.image_size}."
        why = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
        fix = "Use data.image_size=224 or another one, or a model for small images such as model.name=fashion_cnn."
        if ":" in name:
            fix = "Correct the model: it gets float32 [N, in_chans, image_size, image_size]. Then submit again."
        raise UserError(what, why=why, fix=fix) from error
    finally:
        model.train(was_training)
    gave = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
    if gave != (2, info.num_classes):
        why = f"For 2 images of {info.num_classes} classes it returned {gave}."
        fix = f"Return a tensor of shape (2, {info.num_classes}); info.num_classes is the number. Submit again."
        raise UserError(f"The model '{name}' does not return one score per class.", why=why, fix=fix)


def timm_model(name: str, info: DataInfo, options: dict[str, Any], *, pretrained: bool = True) -> nn.Module:
    """``timm.create_model`` with the data's classes and channels.

    Where the input has a fixed size (vision transformers): smaller images are enlarged to it on the device, see
    `Enlarged`; for larger ones the model is built for theirs. ``img_size`` among the options sets it by hand.
    """
    import timm

    settings: dict[str, Any] = {"num_classes": info.num_classes, "in_chans": info.in_chans, **options}
    if not pretrained:
        for key in _BRINGS_WEIGHTS:
            settings.pop(key, None)
    try:
        model: nn.Module = timm.create_model(name, **settings)
        size = _fixed_size(model, options)
        if size is not None and size < info.image_size and "img_size" not in options:
            del model  # or both are in memory
            model = timm.create_model(name, **settings, img_size=info.image_size)
    except Exception as error:
        raise _explain(error, name, options, "timm") from error
    if size is not None and size > info.image_size:
        is_bicubic = options.get("pretrained") and timm_input(model, info).interpolation == "bicubic"
        model.register_forward_pre_hook(Enlarged(size, "bicubic" if is_bicubic else "bilinear"))
    return model


def _fixed_size(model: nn.Module, options: Mapping[str, Any]) -> int | None:
    """Pixels of the images that a model of timm takes; None: it takes others, too."""
    known: dict[str, Any] = getattr(model, "pretrained_cfg", {})
    if options.get("img_size") or not known.get("fixed_input_size"):
        return options.get("img_size")
    return known["input_size"][-1]  # type: ignore[no-any-return]


def timm_input(model: nn.Module, info: DataInfo) -> ModelInput:
    """Return timm's facts about the images that the weights of ``model`` were trained on."""
    from timm.data.config import resolve_model_data_config

    known: dict[str, Any] = resolve_model_data_config(model)
    cfg = getattr(model, "pretrained_cfg", {})
    source = ".".join(filter(None, (cfg.get("architecture"), cfg.get("tag"))))
    how = known["interpolation"]
    return info.as_input(source, mean=known["mean"], std=known["std"], interpolation=how, crop=known["crop_pct"])


def torchvision_input(name: str, info: DataInfo, options: dict[str, Any]) -> ModelInput:
    """Return torchvision's facts about the images that the weights were trained on."""
    import torchvision

    weights = torchvision.models.get_model_weights(name).verify(options.get("weights") or "DEFAULT")
    known = weights.transforms()
    crop = known.crop_size[0] / known.resize_size[0]
    how = known.interpolation.value
    return info.as_input(str(weights), mean=known.mean, std=known.std, interpolation=how, crop=crop)


def torchvision_model(name: str, info: DataInfo, options: dict[str, Any], *, pretrained: bool = True) -> nn.Module:
    """``torchvision.models.get_model`` with the data's classes; ``pretrained`` takes the library's default weights.

    Vision transformers get images of their size as in `timm_model`.
    """
    import torchvision

    must_be = f"3 (gray thrice) for {name} of torchvision; models of timm take any number"
    require(info.in_chans == 3, "data.in_chans", info.in_chans, must_be)
    settings = dict(options)
    has_weights = settings.pop("pretrained", False) or settings.get("weights") is not None
    defaults: dict[str, Any] = {"weights": "DEFAULT"} if has_weights else {"num_classes": info.num_classes}
    if name in ("googlenet", "inception_v3"):
        # Their auxiliary heads make the output a tuple in training only; modern recipes do without.
        defaults["init_weights"] = not has_weights
        if not has_weights:  # with weights torchvision refuses it
            defaults["aux_logits"] = False
    if name.startswith("vit_") and info.image_size > 224 and not has_weights:
        defaults["image_size"] = info.image_size
    settings = defaults | settings
    if has_weights and not pretrained:
        settings = _without_weights(name, info, settings)
        has_weights = False
    try:
        model: nn.Module = torchvision.models.get_model(name, **settings)
    except Exception as error:
        raise _explain(error, name, options, "torchvision") from error
    if has_weights:
        _replace_head(model, info.num_classes)
    if name == "inception_v3" and not settings.get("aux_logits"):
        model.aux_logits = False  # type: ignore[assignment]
        model.AuxLogits = None  # type: ignore[assignment]
    size = getattr(model, "image_size", None)  # vision transformers have one
    if isinstance(size, int) and size > info.image_size:
        model.register_forward_pre_hook(Enlarged(size, "bilinear"))
    return model


def _without_weights(name: str, info: DataInfo, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments for the network that torchvision builds for weights: some decide on more than numbers."""
    import torchvision

    weights = torchvision.models.get_model_weights(name).verify(settings["weights"])
    decided: dict[str, Any] = {"num_classes": info.num_classes}
    if name.startswith("vit_"):
        decided["image_size"] = weights.meta["min_size"][0]
    if name.startswith("maxvit"):
        decided["input_size"] = weights.meta["min_size"]
    if name in ("googlenet", "inception_v3"):
        decided |= {"transform_input": True, "aux_logits": False}
    arguments = {**decided, **settings}
    del arguments["weights"]
    return arguments


@dataclass(frozen=True)
class Enlarged:
    """Has a model enlarge images before it sees them: 32x32 bytes travel, and 224x224 exist on the device only.

    A ViT with patches of 32 would see a photo of CIFAR as one single patch, and weights trained at 224 know objects at
    that scale. A hook and not a module around the model, so that the names in checkpoints are the library's own.
    """

    size: int
    mode: str

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        import torch.nn.functional as F

        size = (self.size, self.size)
        return F.interpolate(args[0], size=size, mode=self.mode, align_corners=False), *args[1:]


def told_model(config: ModelConfig, info: DataInfo, model: nn.Module | None = None) -> dict[str, Any]:
    """Describe the network for use without trainkit: ``library``, ``name``, ``arguments`` of the library's builder (or
    ``options`` of one of ours or the user's), and to how many pixels images are ``enlarged`` before, else null.

    Args:
        model: of `build_model`; it may be left out where no library builds it.
    """
    home, name = resolve(config.name)
    if home not in LIBRARIES or model is None:
        return {"library": home, "name": name, "options": dict(config.options), "enlarged": None}
    left_out = (*_BRINGS_WEIGHTS, "weights", "pretrained_cfg_overlay", "cache_dir")
    given = {key: value for key, value in config.options.items() if key not in left_out}
    arguments: dict[str, Any] = {"num_classes": info.num_classes}
    if home == "timm":
        arguments["in_chans"] = info.in_chans
        if (_fixed_size(model, given) or info.image_size) < info.image_size and "img_size" not in given:
            arguments["img_size"] = info.image_size
    else:
        for key in ("image_size", "aux_logits", "transform_input"):
            if hasattr(model, key):
                arguments[key] = getattr(model, key)
        if "aux_logits" in arguments:
            arguments["init_weights"] = False  # or it warns
    enlarged = None
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, Enlarged):
            enlarged = {"size": hook.size, "interpolation": hook.mode}
    return {"library": home, "name": name, "arguments": {**arguments, **given}, "enlarged": enlarged}


def _replace_head(model: nn.Module, num_classes: int) -> None:
    """A new last layer for other classes than the weights were trained on."""
    from torch import nn

    if num_classes == 1000:
        return
    path = ""
    new = model
    for place, head in model.named_modules():  # the last of them
        if isinstance(head, nn.Linear) and head.out_features == 1000:
            path = place
            new = nn.Linear(head.in_features, num_classes, bias=head.bias is not None)
        elif isinstance(head, nn.Conv2d) and head.out_channels == 1000:  # SqueezeNet's
            path = place
            new = nn.Conv2d(head.in_channels, num_classes, kernel_size=1)
    parent, _, last = path.rpartition(".")
    setattr(model.get_submodule(parent), last, new)


def _explain(error: Exception, name: str, options: dict[str, Any], library: str) -> TrainkitError:
    message = str(error).strip().split("\n")[0] or type(error).__name__
    unexpected = re.search(r"unexpected keyword argument '(\w+)'", message)
    if unexpected:
        key = f"model.{unexpected[1]}"
        why = f"{library}'s {name} takes no '{unexpected[1]}'."
        return UserError(f"Unknown key '{key}'.", why=why, fix=f"Remove '{key}'.")
    is_of_hub = name.startswith(("hf-hub:", "hf_hub:"))
    if (options.get("pretrained") or options.get("weights") or is_of_hub) and _is_download(error):
        load = f"import torchvision; torchvision.models.get_model({name!r}, weights='DEFAULT')"
        bring = ""
        if library == "timm":
            load = f"import timm; timm.create_model({name!r}, pretrained=True)"
            if not is_of_hub:  # there its configuration is as well
                bring = " Or bring their file: model.pretrained_cfg_overlay='{file: model.safetensors}'."
        what = f"The pretrained weights of {library}'s {name} could not be downloaded."
        fix = f'On a machine that has, run: python -c "{load}"; and make its ~/.cache visible to the nodes.{bring}'
        return UserError(what, why=f"{message} (compute nodes often have no internet).", fix=fix)
    what = f"{library} cannot build {name}."
    fix = "Choose another model.name, or another data.image_size."
    if options:
        given = ", ".join([f"model.{key}={value}" for key, value in options.items()])
        what = f"{library} cannot build {name} with {given}."
        fix = "Correct these options."
    return UserError(what, why=f"{type(error).__name__}: {message}", fix=fix)


def _is_download(error: BaseException | None) -> bool:
    """True if an error, or what caused it, came from the network or from a library that fetches from it."""
    while error is not None:
        home = type(error).__module__.split(".")[0]
        if isinstance(error, OSError) or home in ("huggingface_hub", "httpx", "httpcore", "requests", "urllib3"):
            return True
        error = error.__cause__ or error.__context__
    return False
