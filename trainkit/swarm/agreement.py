"""What every peer of a run must have alike, beyond the settings: without it their averages mean nothing.

The creator publishes it with the run, and a peer that joins compares it with its own before it averages with anybody.
Peers that differ do not even look for each other in the same place (see `meeting_place`).
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from torch import nn

from trainkit import fileio
from trainkit.config.schema import Config
from trainkit.data.base import Samples, Splits
from trainkit.errors import RefusedError
from trainkit.plugins import find_module

_PACKAGE = Path(__file__).resolve().parents[1]
# Samples, evenly spaced, that tell one data set from another.
_SAMPLES = 16
# The third digit of their versions mends errors, and does not change what is computed.
_LIBRARIES = ("torch", "hivemind")
_MODEL_LIBRARIES = ("timm", "torchvision")
_DATA = "data"
_CODE = "code of "
# The code that makes updates, and the code that averages them.
_ROOMS = ("data", "models", "tasks", "training")
_ROUNDS = ("exchange", "link", "messages", "sync_diloco", "sync_gradients")
# Of a module's syntax tree.
_HAS_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_MEANS_NOTHING = ("type_comment", "kind", "ctx")
_MENDS = {
    _DATA: "Give data.root the folder of the very same data set.",
    "settings": "Take the run's settings as they are.",
}


def facts_of(config: Config, splits: Splits, model: nn.Module) -> dict[str, str]:
    """One line for each, as the user sees it."""
    found = {
        "model": _model(model),
        _DATA: _data(splits),
        "seed": str(config.seed),
        **code_facts(_PACKAGE, [getattr(config, section).name for section in ("model", "data", "task")]),
    }
    libraries = {type(part).__module__.partition(".")[0] for part in model.modules()}
    found |= installed()
    for name in _MODEL_LIBRARIES:
        if name in libraries:
            found[name] = metadata.version(name).split("+")[0]
    return found


def without_data(ours: Mapping[str, str], theirs: Mapping[str, str], config: Config) -> dict[str, str]:
    """``ours`` of a peer that does not train: what only says which data set it is, is the run's."""
    module = config.data.name.partition(":")[0]
    about = {_DATA, *([_CODE + module] if module != config.model.name.partition(":")[0] else [])}
    taken = {key: theirs[key] for key in about if key in theirs}
    return {**{key: value for key, value in ours.items() if key not in about}, **taken}


def installed() -> dict[str, str]:
    """Versions of the libraries that every run needs, by which what is computed may change."""
    return {name: ".".join(metadata.version(name).split("+")[0].split(".")[:2]) for name in _LIBRARIES}


def in_words(versions: Mapping[str, str]) -> str:
    """``hivemind 1.1, torch 2.6``"""
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))


def parameters_in(facts: Mapping[str, str]) -> int:
    """How many the run's model has; 0 if that is not said."""
    number = facts.get("model", "").partition(" ")[0].replace(",", "")
    return int(number) if number.isdecimal() else 0


def require_same(theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Refuse to take part with something else than the run has.

    Raises RefusedError that names everything in which they differ.
    """
    different = [key for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key)]
    if not different:
        return
    libraries = [key for key in different if key in theirs and key in (*_LIBRARIES, *_MODEL_LIBRARIES)]
    mends = [_MENDS[key] for key in different if key in _MENDS]
    if any(key.startswith(_CODE) for key in different):
        mends.append("Use the creator's version of trainkit, and of code of one's own.")
    if libraries:
        mends.append(f"Install {', '.join(f'{key} {theirs[key]}' for key in libraries)}.")
    raise RefusedError(
        f"This peer differs from the run in: {', '.join(different)}.",
        why="; ".join(f"{key}: {ours.get(key, 'none')} here, {theirs.get(key, 'none')} in the run" for key in different)
        + ".",
        fix=" ".join(mends) or "Use what the creator of the run uses.",
    )


def meeting_place(run_id: str, facts: Mapping[str, str]) -> str:
    """Where peers of a run look for each other: those that differ in what matters never meet."""
    return f"{run_id}-{_hash([json.dumps(dict(facts), sort_keys=True).encode()])}"


def _model(model: nn.Module) -> str:
    shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in model.state_dict().items()]
    size = sum(parameter.numel() for parameter in model.parameters())
    return f"{size:,} parameters in {len(shapes)} tensors ({_hash([repr(shapes).encode()])})"


def _data(splits: Splits) -> str:
    info = splits.info
    about = [repr((info.class_names, info.num_classes, info.in_chans, info.image_size)).encode()]
    for samples in (splits.train, splits.val, splits.test):
        about.append(str(len(samples)).encode())
        about.extend(_some(samples))
    return f"{info.name}, {len(splits.train):,} samples to train on, {info.num_classes} classes ({_hash(about)})"


def _some(samples: Samples) -> Iterable[bytes]:
    size = len(samples)
    for index in sorted({place * size // _SAMPLES for place in range(_SAMPLES)} if size else ()):
        try:
            image, label = samples[index]
        except (OSError, ValueError):  # an image that cannot be decoded is so everywhere
            yield b"broken"
            continue
        yield str(int(label)).encode()
        # Decoders of JPEG differ in the last bit; bytes count only where nothing was decoded.
        yield image.numpy().tobytes() if hasattr(image, "numpy") else repr(image.size).encode()


def code_facts(package: Path, plugins: Iterable[str]) -> dict[str, str]:
    """Hashes of the code that decides what is computed: in the kit, and in a user's modules that the run names.

    The rest of the kit may differ: what peers say to one another has a version of its own, `messages.PROTOCOL`.
    """
    found = {_CODE + room: sorted((package / room).rglob("*.py")) for room in _ROOMS}
    found[f"{_CODE}swarm"] = [package / "swarm" / f"{name}.py" for name in _ROUNDS]
    for module in sorted(name.partition(":")[0] for name in plugins if ":" in name):
        if (file := find_module(module)) is not None:
            found[_CODE + module] = [file]
    return {
        key: _hash([meaning_of(fileio.read_bytes(file, follow=True)) for file in files]) for key, files in found.items()
    }


def meaning_of(source: bytes) -> bytes:
    """What a module does: without comments, docstrings and layout, and alike for every version of Python."""
    words: list[str] = []
    _add_words(ast.parse(source), words)
    return "\0".join(words).encode()


def _add_words(node: object, words: list[str]) -> None:
    if isinstance(node, ast.AST):
        words.append(type(node).__name__)
        for name in node._fields:
            value = getattr(node, name, None)
            # Later versions of Python have more fields; of older code these are empty.
            if value is None or value == [] or name in _MEANS_NOTHING:
                continue
            if isinstance(node, ast.JoinedStr):  # of Python 3.12 some end with an empty text
                value = [part for part in value if not (isinstance(part, ast.Constant) and part.value == "")]
            if name == "body" and isinstance(node, _HAS_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
                value = value[1:]
            words.append(name)
            _add_words(value, words)
        words.append(")")
    elif isinstance(node, list):
        for item in node:
            _add_words(item, words)
        words.append("]")
    else:
        words.append(repr(node))


def _hash(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "big"))
        found.update(part)
    return found.hexdigest()[:12]
