"""Models and optimizers of timm, torchvision and torch: their names, and the optimizers that a run can have."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.common import fileio
from trainkit.common.errors import UserError, require, unknown
from trainkit.config import plugin_options, plugins, yaml

if TYPE_CHECKING:  # the schema takes a tenth of a second, and what only reads records does without it
    from trainkit.config.schema import Config


@dataclass(frozen=True)
class Listed:
    """An optimizer of a library."""

    library: str
    name: str
    """Name in timm's registry; for torch's the class."""
    kind: type | str
    """Its class; the dotted path of one in a package that timm would import."""
    defaults: Mapping[str, Any] | None = None
    """Arguments that timm's registry gives to the class."""

    @property
    def class_name(self) -> str:
        return self.kind if isinstance(self.kind, str) else self.kind.__name__

    @property
    def signature(self) -> plugin_options.Signature:
        """The options of its class."""
        if isinstance(self.kind, str):
            return plugin_options.Signature()
        return plugin_options.class_signature(self.kind)


def find_optimizer(name: str) -> Listed:
    """The optimizer of that name: ``adan``, ``timm/adafactor``, ``torch/adafactor``.

    Raises UserError for one that neither has.
    """
    from trainkit.config.schema import OptimConfig

    known = library_optimizers()
    for key in (name, f"timm/{name}", f"torch/{name}"):
        if key in known:
            return known[key]
    raise unknown("optimizer", name, [*OptimConfig.OURS, *usable_names()], own=True, key="optim.name")


def usable_names() -> list[str]:
    """Names of timm's and torch's optimizers that are not refused whatever their options, beside ours."""
    from trainkit.config.schema import OptimConfig

    usable = set[str]()
    for name, listed in library_optimizers().items():
        if not any(objection(listed, {}, sharded=False)):
            usable.add(name.partition("/")[2])
    return sorted(usable - OptimConfig.OURS.keys())


def check_optimizer(config: Config) -> None:
    """Refuse an optimizer that does not exist or cannot be used, and options that it does not have.

    Raises UserError.
    """
    from trainkit.config.checks import strategy_traits

    optim = config.optim
    if optim.name == "airbench":
        must_be = "0 with optim.name=airbench, which has a decay of its own"
        require(optim.weight_decay == 0, "optim.weight_decay", f"{optim.weight_decay:g}", must_be)
    if optim.name in optim.OURS:
        return
    given = optim.given()
    if optim.is_own:
        if "lr" in plugins.signature("trainkit.optim", optim.name).options:  # which is given by name in any case
            given["lr"] = optim.lr
        plugins.check_options("trainkit.optim", optim.name, given, where="optim")
        return
    listed = find_optimizer(optim.name)
    signature = listed.signature
    sharded = strategy_traits(config.strategy.name).sharded
    why, fix = objection(listed, {**(listed.defaults or {}), **given}, sharded=sharded)
    if why:
        raise UserError(f"optim.name={optim.name} is not possible.", why=why, fix=fix, key="optim.name")
    if "weight_decay" not in signature.options and optim.weight_decay:
        what = f"optim.weight_decay={optim.weight_decay:g} does not go with optim.name={optim.name}."
        raise UserError(
            what, why="This optimizer has no weight decay.", fix="Use optim.weight_decay=0.", key="optim.weight_decay"
        )
    usual = signature.defaults.get("betas") or (0.9, 0.999)
    if optim.betas is not None and "betas" in signature.options and len(optim.betas) != len(usual):
        what = f"optim.name={optim.name} does not take {len(optim.betas)} numbers as optim.betas."
        fix = f"Give {len(usual)}, or omit optim.betas."
        raise UserError(what, why=f"It has {len(usual)}.", fix=fix, key="optim.betas")
    plugin_options.check_against(signature, optim.name, given, where="optim")


def objection(listed: Listed, given: Mapping[str, Any], *, sharded: bool) -> tuple[str, str]:
    """Why an optimizer cannot be used, and what to do instead; empty if it can."""
    told = yaml.packaged("optimizers")
    other = "Use another one: adamw, sgd, lamb, muon."
    if isinstance(listed.kind, str):
        return f"It is {listed.class_name}: checkpoints cannot hold its state, which has its own formats.", other
    for name in (listed.class_name, f"{listed.library}.{listed.class_name}"):
        if name in told["refused"]:
            return told["refused"][name], other
    if given.get("max_grad_norm"):
        return "optim.max_grad_norm would be compared with the norm of one rank's shard.", "Use train.grad_clip_norm."
    by_norms = listed.class_name in told["whole_only"] or given.get("caution") or given.get("algo") == "adamuon"
    if sharded and by_norms:
        why = "It uses norms or means of whole weights, which torch does not compute over the shards of the ranks."
        return why, "Use it with a strategy that holds whole weights, such as strategy.name=zero."
    return "", ""


@cache
def library_optimizers() -> dict[str, Listed]:
    """``timm/NAME`` and ``torch/NAME`` -> optimizer, as both libraries list them. Imports them, which takes seconds."""
    from timm.optim import get_optimizer_info, list_optimizers  # type: ignore[attr-defined]
    from torch import optim

    found = {}
    for name in map(str, list_optimizers()):
        info = get_optimizer_info(name)
        found[f"timm/{name}"] = Listed("timm", name, info.opt_class, info.defaults)
    for name, kind in vars(optim).items():
        if isinstance(kind, type) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer:
            found[f"torch/{name.lower()}"] = Listed("torch", name, kind)
    return found


# Names of models, read from the source. Importing timm costs seconds of CPU; `submit` has half of one. A model is
# registered by a decorator above its function, so that the files say what there is.

_TIMM_MODEL = re.compile(r"^@register_model\b[^\n]*\n(?:@[^\n]*\n)*def (\w+)\(", re.MULTILINE)
_TIMM_RENAMED = re.compile(r"^register_model_deprecations\(__name__, \{(.*?)^\}\)", re.MULTILINE | re.DOTALL)
_TIMM_TAG = re.compile(r"""['"](\w+)\.(\w+)['"]\s*:""")
_TORCHVISION_MODEL = re.compile(r"^@register_model\(\)\n(?:@[^\n]*\n)*def (\w+)\(", re.MULTILINE)


@cache
def timm_models() -> dict[str, tuple[str, ...]]:
    """timm's models and the tags of their pretrained weights; empty where timm is not installed."""
    tags: dict[str, list[str]] = {}
    names: set[str] = set()
    for source in _sources("timm"):
        if "register_model" not in source:
            continue
        names.update(_TIMM_MODEL.findall(source))
        for renamed in _TIMM_RENAMED.findall(source):
            names.update(re.findall(r"'([^']+)':", renamed))
        for name, tag in _TIMM_TAG.findall(source):
            tags.setdefault(name, []).append(tag)
    return {name: tuple(tags.get(name, ())) for name in sorted(names)}


@cache
def torchvision_models() -> tuple[str, ...]:
    """torchvision's classification models; empty where torchvision is not installed."""
    return tuple(sorted(set(_TORCHVISION_MODEL.findall("\n".join(_sources("torchvision"))))))


def _sources(package: str) -> Iterator[str]:
    spec = importlib.util.find_spec(package)  # finds, does not import: the package is a top-level one
    if spec is None:
        return
    for folder in spec.submodule_search_locations or []:
        # Files of subfolders are detection, segmentation and video models, or helpers.
        for file in sorted(Path(folder, "models").glob("*.py")):
            yield fileio.read_text(file, follow=True)
