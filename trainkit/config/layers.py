"""Where a value came from, and what outranks what: layers of dotted keys, merged from the lowest to the highest."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainkit.config import yaml
from trainkit.config.schema import SECTIONS, field_of
from trainkit.config.section import PluginSection, Section
from trainkit.errors import UserError


@dataclass(frozen=True)
class Source:
    """Where a value came from: a kind and, for a person, the place."""

    kind: str  # flag, override, environment, file, cluster profile, default; in a plan also discovered, derived, ...
    where: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.where}".strip()

    @classmethod
    def parse(cls, text: str) -> Source:
        """The source that `str` wrote. The kind is one word, but for ``cluster profile``."""
        kind, where = re.fullmatch(r"(cluster profile|\w*) ?(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
        return cls(kind, where)


DEFAULT = Source("default")

Layer = dict[str, tuple[Any, Source]]
"""Dotted key -> its value and where that was written."""

# Mappings whose keys are the user's own: merged and validated as one value.
OPEN_MAPPINGS = ("launch.sbatch", "launch.srun")


def override_layer(overrides: Iterable[str]) -> Layer:
    """The layer of overrides, ``section.key=value``. The last one of a key counts."""
    layer: Layer = {}
    texts = list(overrides)
    for index, text in enumerate(texts):
        key, equals, value = text.partition("=")
        shown = text if text.isprintable() else repr(text)
        meant = _meant(text, texts[index + 1 : index + 3])
        if not equals or not key or key.startswith("-") or meant:
            raise UserError(
                f"'{shown}' is not an override.",
                why="Overrides are written section.key=value.",
                fix=f"Write {meant}." if meant else "For example optim.lr=3e-4.",
            )
        parsed = {key: _typed(key, value)}
        for mapping in OPEN_MAPPINGS:
            if key.startswith(f"{mapping}."):  # launch.sbatch.comment=thesis
                parsed = {mapping: {key.removeprefix(f"{mapping}."): value}}
        layer = merge(layer, {item: (given, Source("override", shown)) for item, given in flatten(parsed)})
    return layer


def _meant(text: str, following: Sequence[str]) -> str:
    """What a setting with spaces, a colon or two signs was to be: of ``optim.lr = 3``, ``optim.lr:3``; else empty."""
    match = re.match(r"([\w.]+)( ?==? ?|:=?)(\S+)", " ".join([text, *following]))
    if match is None or match[2] == "=" or "=" in match[3] or match[1] in SECTIONS or field_of(match[1]) is None:
        return ""
    return f"{match[1]}={match[3]}"


def _typed(key: str, text: str) -> Any:
    """The value of an override. What must be text stays as it was typed: account 0123 is no number."""
    value, field = yaml.parse_value(text), field_of(key)
    is_text = field is not None and field.annotation in (str, str | None)
    return value if value is None or not is_text or text[0] in "'\"" else text


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Nested mappings as dotted keys and values."""
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict) and dotted not in OPEN_MAPPINGS and (value or not prefix):
            yield from flatten(value, f"{dotted}.")
        else:
            yield dotted, value


def merge(low: Layer, high: Layer) -> Layer:
    """``low`` with everything that ``high`` says."""
    merged = dict(low)
    for key, (value, source) in high.items():
        # Another plugin has other options: those of the one it replaces must not follow it.
        section, _, name = key.partition(".")
        if name == "name" and issubclass(SECTIONS.get(section, Section), PluginSection):
            fields = SECTIONS[section].model_fields
            if low.get(key, (fields["name"].default,))[0] != value:
                for other in [item for item in merged if item.startswith(f"{section}.")]:
                    if other.split(".")[1] not in fields and other not in high:
                        del merged[other]
        if key in OPEN_MAPPINGS and isinstance(value, dict) and isinstance(low.get(key, (None,))[0], dict):
            value = {**low[key][0], **value}
        merged[key] = (value, source)
    return merged


def moved(layer: Layer, before: Layer, there: Layer) -> Layer:
    """``layer`` at another site: what the profile of the one ``before`` has said gives way to what is said ``there``.

    What differs from that profile, its user has said, of a mapping each entry. It stays.
    """
    kept: Layer = {}
    for key, (value, source) in layer.items():
        said = before[key][0] if key in before else None
        if key in OPEN_MAPPINGS and isinstance(value, dict) and isinstance(said, dict):
            kept[key] = ({name: item for name, item in value.items() if str(said.get(name)) != str(item)}, source)
        elif key not in before or str(said) != str(value):
            kept[key] = (value, source)
    return merge(kept, there)
