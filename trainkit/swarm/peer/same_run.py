"""Settings and facts that every peer of a run must have alike, and what one machine makes of the settings."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.common import fileio
from trainkit.common.errors import RefusedError, UserError
from trainkit.common.image_input import DataInfo
from trainkit.config import plugins
from trainkit.config.checks import check_strategy, strategy_traits
from trainkit.config.layers import flatten
from trainkit.config.loading import Loaded, load
from trainkit.config.schema import SECTIONS, Config, reach
from trainkit.data.base import Samples, Splits
from trainkit.run import run_manifest
from trainkit.swarm.identity.invitations import pack
from trainkit.swarm.protocol.messages import CODE, Manifest

if TYPE_CHECKING:
    from torch import nn

_PACKAGE = Path(__file__).resolve().parents[2]
# Samples, evenly spaced, that tell one data set from another.
_SAMPLES = 16
# The third digit of their versions mends errors, and does not change what is computed.
_LIBRARIES = ("torch", "hivemind")
_MODEL_LIBRARIES = ("timm", "torchvision")
TRIED = frozenset(("torch", *_MODEL_LIBRARIES))
"""Facts that may differ where an audit by replay shows whether that matters."""
_DATA = "data"
# The code that makes updates, and the code that averages them.
ROOMS = ("data", "models", "training")
ROUNDS = (
    "swarm/protocol/codecs.py", "swarm/protocol/messages.py", "swarm/protocol/outer_step.py", "swarm/trust/accounts.py",
    "swarm/trust/replay.py", "swarm/trust/auditor.py", "swarm/network/averager.py", "swarm/network/groups.py",
    "swarm/network/exchange.py", "swarm/network/states.py", "swarm/peer/same_run.py",
)  # fmt: skip


def facts_of(config: Config, splits: Splits, model: nn.Module) -> dict[str, str]:
    """One line for each, as the user sees it."""
    shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in model.state_dict().items()]
    size = sum(parameter.numel() for parameter in model.parameters())
    libraries = {type(part).__module__.partition(".")[0] for part in model.modules()}
    return {
        "model": f"{size:,} parameters in {len(shapes)} tensors ({_hash([repr(shapes).encode()])})",
        _DATA: _data(splits),
        "seed": str(config.seed),
        **code_facts(_PACKAGE, [config.model.name, config.data.name, config.task.name]),
        **installed(),
        **{name: metadata.version(name).split("+")[0] for name in _MODEL_LIBRARIES if name in libraries},
    }


def without_data(ours: Mapping[str, str], theirs: Mapping[str, str], config: Config) -> dict[str, str]:
    """``ours`` of a peer that does not train: what only says which data set it is, is the run's."""
    about = {_DATA, CODE + config.data.name.partition(":")[0]} - {CODE + config.model.name.partition(":")[0]}
    kept = {key: value for key, value in ours.items() if key not in about}
    return kept | {key: value for key, value in theirs.items() if key in about}


def installed() -> dict[str, str]:
    """Versions of the libraries that every run needs, by which what is computed may change."""
    return {name: _minor(name) for name in _LIBRARIES}


def _minor(library: str) -> str:
    return ".".join(metadata.version(library).split("+")[0].split(".")[:2])


def provenance(facts: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return which trainkit this is, in words; and what pip installs elsewhere so that a peer there has these
    ``facts``.
    """
    words, kit = run_manifest.origin([f"{_PACKAGE.name}/{name}" for name in (*ROOMS, *ROUNDS)])
    # A release of torchvision fits one of torch.
    libraries = {name: f"{_minor(name)}.*" for name in (*_LIBRARIES, "torchvision")}
    libraries |= {name: facts[name] for name in _MODEL_LIBRARIES if name in facts}
    return words, [*filter(None, [kit]), *(f"{name}=={it}" for name, it in libraries.items())]


def parameters_in(facts: Mapping[str, str]) -> int:
    """Return how many the run's model has; 0 if that is not said."""
    number = facts.get("model", "").partition(" ")[0].replace(",", "")
    return int(number) if number.isdecimal() else 0


def untried(manifest: Manifest, *, is_volunteer: bool) -> str:
    """Why no audit can show that a peer's other libraries train as the run's do; empty if one can."""
    if not manifest.trains:
        return "the run's creator does not train"
    return "" if is_volunteer else "only the work of volunteers is audited"


def require_same(
    theirs: Mapping[str, str], ours: Mapping[str, str], manifest: Manifest | None = None, why_not: str | None = None
) -> str:
    """Refuse to take part with something else than the run has.

    Args:
        manifest: the run's, which says how to have the same.
        why_not: empty: other versions of torch and of libraries of models are no reason, for audits look at what they
            compute; else why they are, see `untried`.

    Returns such versions, in words; empty if they are the same.

    Raises RefusedError that names everything in which they differ.
    """
    different = [key for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key)]
    said = "; ".join(f"{key}: {ours.get(key, 'none')} here, {theirs.get(key, 'none')} in the run" for key in different)
    if not different or (why_not == "" and TRIED.issuperset(different)):
        return said
    if why_not and not TRIED.isdisjoint(different):
        said += f". Whether other libraries train alike cannot be checked here: {why_not}"
    way = manifest.way_to(different) if manifest is not None else ""
    fix = way or "Use the run's data set (data.root), trainkit, libraries and code of the creator's own."
    why = f"{said}.{manifest.runs() if manifest is not None else ''}"
    raise RefusedError(f"This peer differs from the run in: {', '.join(different)}.", why=why, fix=fix)


def meeting_place(run_id: str, facts: Mapping[str, str]) -> str:
    """Return where peers of a run look for each other: those that differ in what matters never meet."""
    return f"{run_id}-{_hash([json.dumps(dict(facts), sort_keys=True).encode()])}"


def _data(splits: Splits) -> str:
    info = splits.info
    about = [repr((info.class_names, info.num_classes, info.in_chans, info.image_size)).encode()]
    for samples in (splits.train, splits.val, splits.test):
        about += [str(len(samples)).encode(), *_some(samples)]
    return f"{info.name}, {len(splits.train):,} samples to train on, {info.num_classes} classes ({_hash(about)})"


def _some(samples: Samples) -> Iterator[bytes]:
    for index in sorted({place * len(samples) // _SAMPLES for place in range(_SAMPLES)} if len(samples) else ()):
        try:
            image, label = samples[index]
        except (OSError, ValueError):  # an image that cannot be decoded is so everywhere
            yield b"broken"
            continue
        yield str(int(label)).encode()
        # Decoders of JPEG differ in the last bit; bytes count only where nothing was decoded.
        yield image.numpy().tobytes() if hasattr(image, "numpy") else repr(image.size).encode()


def code_facts(package: Path, names: Iterable[str]) -> dict[str, str]:
    """Hashes of the code that decides what is computed: in the kit, and in a user's modules that the run ``names``.

    The rest of the kit may differ: what peers say to one another has a version of its own, `messages.PROTOCOL`.
    """
    kit = [file for room in ROOMS for file in sorted((package / room).rglob("*.py"))]
    found = {f"{CODE}trainkit": [*kit, *map(package.joinpath, ROUNDS)]}
    for module in sorted(name.partition(":")[0] for name in names if ":" in name):
        file = plugins.find_module(module)
        if file is not None:
            found[CODE + module] = [file]
    return {key: _hash(fileio.read_bytes(file, follow=True) for file in files) for key, files in found.items()}


def _hash(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(pack(list(parts))).hexdigest()[:12]


# A joining peer decides these for itself; everything else is the run's.
_OF_A_MACHINE = ("data.root", "data.workers", "train.micro_batch_size", "train.precision", "launch.gpus_per_node")
OWN_KEYS = (*_OF_A_MACHINE, "monitor.")
_NOT_COMMON = (*OWN_KEYS, "launch.", "checkpoint.", "collaborative.initial_peers", "collaborative.port")


def require_collaborative(config: Config) -> None:
    """Refuse a configuration that cannot be trained by a swarm. Raises UserError."""
    strategy = config.strategy
    if strategy_traits(strategy.name).loop != "collaborative":
        why = "Peers of a swarm train with strategy.name=hivemind."
        fix = "Use the preset hivemind, or add strategy.name=hivemind."
        raise UserError(f"strategy.name={strategy.name} is not a collaborative run.", why=why, fix=fix)
    plugins.check_options("trainkit.distributed.strategies", strategy.name, strategy.options, where="strategy")
    check_strategy(config)


def check_own(overrides: Sequence[str]) -> None:
    """Refuse overrides of what all peers must have in common. Raises UserError."""
    for text in overrides:
        key = text.partition("=")[0]
        if not key.startswith(OWN_KEYS):
            why = "It comes from the run's creator, for all peers alike."
            fix = f"Yours are: {', '.join(OWN_KEYS)}*."
            raise UserError(f"'{key}' cannot be set by a peer that joins.", why=why, fix=fix)


def load_text(text: str, overrides: Sequence[str] = (), **layers: Any) -> Loaded:
    """Load, as `trainkit.config.loading.load` does, a configuration that somebody has sent."""
    with tempfile.TemporaryDirectory(prefix="trainkit-") as folder:
        file = Path(folder) / "hivemind-peer.yaml"  # a run is named after it
        fileio.write(file, text)
        return load(str(file), overrides, **layers)


def adapted(config_yaml: str, overrides: Sequence[str], *, allow_code: bool) -> Config:
    """The manifest's configuration for this machine, with data and resources of its own.

    What the creator starts, and where they send something, is left out: a peer has places of its own, or none.

    Raises UserError when it needs code of the creator's own and that is not allowed.
    """
    # The creator's folder and machine are not this one's.
    own = ["data.root=data", "data.workers=auto", "launch.gpus_per_node=auto", *overrides]
    config = load_text(config_yaml, own).config
    given = {text.partition("=")[0] for text in overrides}
    for key, value in flatten(config.model_dump(mode="json")):
        if reach(key, value).does == "imports" and key not in given and not allow_code:
            why = "Joining would run that function on this machine."
            fix = "If you have that code and trust it, add --allow-code."
            raise UserError(f"The run uses code of its creator's own: {key}={value}.", why=why, fix=fix)
    sections: dict[str, object] = {"script": None}  # whoever joins trains, and starts no program of the creator's
    for name in SECTIONS.keys() - {"collaborative", "script"}:
        section = getattr(config, name)
        reset = dict[str, object]()
        for key, info in SECTIONS[name].model_fields.items():
            where = f"{name}.{key}"
            if where not in given and reach(where, getattr(section, key)).does in ("starts", "sends"):
                reset[key] = info.get_default(call_default_factory=True)
        sections[name] = section.model_copy(update=reset)
    config = config.model_copy(update=sections)
    require_collaborative(config)
    return config


def same_settings(config: Config, manifest_yaml: str) -> Config:
    """``config``, if it says about the run what the manifest says.

    Raises UserError that names the first key in which they differ.
    """
    theirs = dict(flatten(adapted(manifest_yaml, (), allow_code=True).model_dump(mode="json")))
    ours = dict(flatten(config.model_dump(mode="json")))
    for key in sorted(ours.keys() | theirs.keys()):
        if not key.startswith(_NOT_COMMON) and ours.get(key) != theirs.get(key):
            what = f"{key} is {ours.get(key)} here and {theirs.get(key)} in the swarm."
            why = "All peers of a run have the same settings."
            raise UserError(what, why=why, fix=f"Submit with {key}={theirs.get(key)}.")
    return config


def _untouched(image: Any) -> Any:
    raise AssertionError("an anchor has no images")


def no_data(name: str, manifest: Manifest) -> Splits:
    """The run's data set ``name`` without a sample, for a peer that does not train.

    Class names are numbers and means are zero: an anchor takes its weights from the run, so they decide about nothing.
    Where they decide about shapes nonetheless, the model is refused as another one.
    """
    channels = manifest.in_chans
    names = tuple(map(str, range(manifest.num_classes)))
    info = DataInfo(name, len(names), channels, manifest.image_size, names, (0.0,) * channels, (1.0,) * channels)
    return Splits(info, (), (), (), _untouched, _untouched, in_memory=True)
