"""YAML as people write it, with the line of every key.

PyYAML follows YAML 1.1, where `3e-4` is text, `no` is False, `010` is 8 and `1:00:00` is 3600. Everybody writes these
and means something else, so scalars are resolved by the core schema of YAML 1.2, plus numbers like `3e-4`.
"""

import re
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer

from trainkit.common import fileio
from trainkit.common.errors import UserError

LONGEST = 1 << 20
"""Bytes of a file. A weight for each of ImageNet's 21,841 classes takes a fifth of it."""
MOST_VALUES = 50_000
"""Keys and values of a file, those counted again that an alias repeats."""
DEEPEST = 32
MOST_DIGITS = 100
_PLAIN_TAGS = {None, "!", *(f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map"))}


class _Odd(yaml.MarkedYAMLError):
    """YAML, but no settings."""

    def __init__(self, why: str, at: yaml.Event | yaml.Node) -> None:
        super().__init__(problem=why, problem_mark=at.start_mark)  # type: ignore[arg-type]  # or the C reader's mark


if yaml.__with_libyaml__:  # three times as fast

    class _Base(Composer, yaml.CSafeLoader):
        """libyaml's events, composed in Python."""

        def __init__(self, text: str) -> None:
            yaml.CSafeLoader.__init__(self, text)
            Composer.__init__(self)

else:

    class _Base(yaml.SafeLoader):  # type: ignore[no-redef]
        """PyYAML's own parser."""


class _Loader(_Base):
    """Counts what it composes: ten lines of aliases can stand for more values than any memory holds."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  PyYAML's own class attribute, emptied

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values = self._depth = 0
        self._values_of: dict[yaml.Node | None, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()
        before = self._values
        self._values += 1
        self._depth += 1
        if self._depth > DEEPEST:
            raise _Odd(f"It is nested more than {DEEPEST} deep.", event)
        if getattr(event, "tag", None) not in _PLAIN_TAGS:
            raise _Odd(f"{event.tag:.80} is not a valid setting.", event)
        node = super().compose_node(parent, index)
        if isinstance(event, yaml.AliasEvent):
            if node not in self._values_of:
                raise _Odd(f"*{event.anchor:.80} contains itself.", event)
            self._values += self._values_of[node]
        if self._values > MOST_VALUES:
            raise _Odd(
                f"It holds more than {MOST_VALUES:,} values; an alias counts as everything that it repeats.", event
            )
        self._values_of[node] = self._values - before
        self._depth -= 1
        return node


def _int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    if len(node.value) > MOST_DIGITS:
        raise _Odd(f"It is a number of {len(node.value):,} digits.", node)
    return int(node.value)


_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
for _tag, _pattern, _first in (
    ("tag:yaml.org,2002:null", re.compile(r"~|null|Null|NULL|"), ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", re.compile(r"true|True|TRUE|false|False|FALSE"), list("tTfF")),
    ("tag:yaml.org,2002:int", _INT, list("-+0123456789")),
    ("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(_tag, re.compile(f"(?:{_pattern.pattern})$"), _first)
# YAML 1.1 reads 010 as octal; here it is ten.
_Loader.add_constructor("tag:yaml.org,2002:int", _int)


def parse_value(text: str) -> Any:
    """The value of an override: ``3e-4``, ``true``, ``[a, b]``, ``null`` or plain text."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        return text


def read(path: Path, *, follow: bool = True) -> tuple[dict[str, Any], dict[str, int]]:
    """The mapping in a YAML file, and the line (from 1) of every dotted key in it. ``follow``: it may be a link."""
    with fileio.disk_errors_as(f"Cannot read {path}.", fix="Check the path and its permissions."):
        content = fileio.read_bytes(path, LONGEST, follow=follow)
    try:
        text = content.decode("utf-8-sig")  # some editors begin a file with a mark
    except UnicodeDecodeError as error:
        why = f"It is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}."
        raise UserError(f"Cannot read {path}.", why=why, fix="Give a YAML file, or save this one as UTF-8.") from None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        lines: dict[str, int] = {}
        value = None if node is None else _construct(loader, node, "", lines, path)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        what = (
            f"{where} is not a value that settings can have."
            if isinstance(error, _Odd)
            else f"{where} is not valid YAML."
        )
        why = getattr(error, "problem", None) or str(error)
        raise UserError(what, why=why, fix="Correct that line, or give another file.") from None
    if value is None:  # empty, or nothing but comments
        return {}, {}
    if not isinstance(value, dict):
        why = f"It is a {type(value).__name__}."
        raise UserError(f"{path} has no settings.", why=why, fix="Write `section: {key: value}`.")
    return value, lines


@cache
def packaged(name: str) -> dict[str, Any]:
    """A table of this package: the YAML file of that name beside this module."""
    text = fileio.read_text(Path(__file__).with_name(f"{name}.yaml"), follow=True)
    table: dict[str, Any] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return table


def _construct(loader: _Loader, node: yaml.Node, prefix: str, lines: dict[str, int], path: Path) -> Any:
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node, deep=True)
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = str(loader.construct_object(key_node))
        dotted = f"{prefix}{key}"
        line = key_node.start_mark.line + 1
        if key in result:
            why = f"Lines {lines[dotted]} and {line}; the second would win silently."
            raise UserError(f"'{dotted}' occurs twice in {path}.", why=why, fix="Remove one of them.")
        lines[dotted] = line
        result[key] = _construct(loader, value_node, f"{dotted}.", lines, path)
    return result


@lru_cache(4096)  # a sweep writes the same words a thousand times
def _is_plain(text: str) -> bool:
    return bool(parse_value(text) == text)


class _Dumper(yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:
        return True


# Quoted where our own reader would see something else than this text.
_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if _is_plain(text) else "'"),
)


def dump(value: Mapping[str, Any]) -> str:
    """YAML text of plain values, keys in their order, short lists on one line."""
    return yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=100)
