"""What can be set: every key of the configuration with its type, its default and a sentence about it.

For people: `submit --settings`, and the reference among the documents. Options of plugins are among them, read from
their source as `trainkit.plugins` does.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trainkit import plugins
from trainkit.config.schema import SECTIONS, Config, PluginSection
from trainkit.errors import UserError, did_you_mean

_NAMES: dict[Any, str] = {int: "int", float: "float", bool: "bool", str: "text", NoneType: "null", Any: "any"}
# Options that mean the same in every plugin that has them and says nothing else.
_SHARED = {
    "augment": "Augment the training images.",
    "dropout": "Dropout before the head.",
    "image_size": "Pixels of a side of the images that the model gets.",
    "in_chans": "Colour channels: 1 or 3.",
    "num_classes": "Number of classes.",
    "shift": "Pixels by which augmentation shifts an image at most.",
    "test_fraction": "The part of the images that becomes test, where there is no such folder.",
    "test_size": "Number of test images.",
    "train_size": "Number of training images.",
    "val_fraction": "The part of the training images that becomes val.",
    "val_size": "Number of validation images.",
    "width": "Channels of the first stage.",
}
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


@dataclass(frozen=True)
class Setting:
    """One key that a preset or a command line may give."""

    key: str
    type: str
    default: str
    text: str
    of: str = ""
    """The plugin whose option it is; empty for a key that is always there."""

    @property
    def sentence(self) -> str:
        """The first sentence of what is said about it."""
        return re.split(r"(?<=[.])\s", self.text, maxsplit=1)[0]


def settings(section: str | None = None) -> list[Setting]:
    """All settings, or those of a section, in the order in which the configuration has them.

    Raises UserError where there is no such section.
    """
    if section is not None and section not in SECTIONS:
        raise UserError(
            f"Unknown section '{section}'.",
            why=f"There are: {', '.join(SECTIONS)}.",
            fix=did_you_mean(section, list(SECTIONS), otherwise=f"Use {next(iter(SECTIONS))}."),
        )
    found: list[Setting] = []
    if section is None:
        own = {name: field for name, field in Config.model_fields.items() if name not in SECTIONS}
        found += [_of_field(name, field, field_docs(Config).get(name, "")) for name, field in own.items()]
    for name, model in SECTIONS.items():
        if section in (None, name):
            docs = field_docs(model)
            found += [_of_field(f"{name}.{key}", it, docs.get(key, "")) for key, it in model.model_fields.items()]
            if issubclass(model, PluginSection):
                found += _of_plugins(name)
    return found


def field_docs(model: type[BaseModel]) -> dict[str, str]:
    """The docstring below each field of a section.

    pydantic can do this (`use_attribute_docstrings`), but then does it for every command, a tenth of its start.
    """
    body = ast.parse(inspect.getsource(model)).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        before.target.id: inspect.cleandoc(after.value.value)
        for before, after in zip(body.body, body.body[1:], strict=False)
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
    }


def _of_field(key: str, field: FieldInfo, text: str) -> Setting:
    return Setting(key, _type(field.annotation, field.metadata), _written(field.get_default()), " ".join(text.split()))


def _of_plugins(section: str) -> Iterator[Setting]:
    """The options of all plugins that may be named in a section; one that several share stands once."""
    package = plugins.package_of(f"{section}.name")
    options: dict[tuple[str, str, str, str], list[str]] = {}
    for plugin in plugins.available(package):
        signature = plugins.signature(package, plugin)
        for option in signature.options:
            default = _written(signature.defaults[option]) if option in signature.defaults else "(no default)"
            kind = _of_annotation(signature.annotations.get(option, ""))
            options.setdefault((option, kind, default, _said(signature.doc, option)), []).append(plugin)
    for (option, kind, default, text), names in options.items():
        yield Setting(f"{section}.{option}", kind, default, text, of=", ".join(names))


def _said(doc: str, option: str) -> str:
    """What the docstring of a plugin's function says of an option: the sentence that names it, from its name on."""
    for paragraph in re.split(r"\n\s*\n", doc):
        text = " ".join(paragraph.split())
        if found := re.search(rf"(?:^|[.;:] )(``{option}(?:=[^`]*)?``)(:)?", text):
            rest = text[found.end(2) :] if found[2] else text[found.start(1) :]
            sentence = re.split(r"(?<=[.])\s(?=[A-Z`])", rest.strip(), maxsplit=1)[0].replace("``", "")
            return f"{sentence[:1].upper()}{sentence[1:]}" if found[2] else sentence
    return _SHARED.get(option, "")


def _of_annotation(text: str) -> str:
    """An annotation as it stands in a plugin's source."""
    if literal := re.fullmatch(r"Literal\[(.*)\]", text):
        return " | ".join(str(value) for value in ast.literal_eval(f"({literal[1]},)"))
    return " | ".join({"str": "text", "None": "null"}.get(part.strip(), part.strip()) for part in text.split("|"))


def _type(annotation: Any, metadata: Any = ()) -> str:
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(inside[0], inside[1:])
    if origin is Literal:
        return " | ".join(str(item) for item in inside)
    if origin in (Union, UnionType):
        return " | ".join(_type(item) for item in inside)
    if origin is tuple:
        return f"[{', '.join('...' if item is Ellipsis else _type(item) for item in inside)}]"
    if origin is dict:
        return "{name: " + _type(inside[1]) + "}"
    bounds = [
        f"{sign} {value}"
        for item in metadata
        for word, sign in _BOUNDS.items()
        if (value := getattr(item, word, None)) is not None
    ]
    return " ".join([_NAMES.get(annotation, getattr(annotation, "__name__", "any")), ", ".join(bounds)]).strip()


def _written(value: Any) -> str:
    """A default as it is written on a command line."""
    if isinstance(value, tuple):
        return f"[{','.join(map(_written, value))}]"
    return value if isinstance(value, str) else json.dumps(value)
