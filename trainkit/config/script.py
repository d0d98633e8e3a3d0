"""Words of a user's script: its command line as it was typed, and the placeholders in it."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from trainkit.common.errors import UserError

PLACEHOLDERS = ("run", "node_rank", "num_nodes", "gpus_per_node", "master_addr", "master_port")
"""Names that each rank fills in: the run's folder, its node, all nodes, GPUs of a node, and where the ranks meet."""
SECTIONS_OF_SCRIPTS = ("launch", "monitor", "script")
"""Sections that mean something to every script."""
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}|(?<![$\w{])\{([A-Za-z_]\w*)\}")
_CLOSE = 0.85
"""Likeness of a misspelled section, such as `lunch`; `trainer` is no misspelled `train`."""
_PYTHONS = ("python", "python3")


def filled(text: str, values: Mapping[str, str]) -> str:
    """Fill in placeholders. ``{{name}}`` is the text ``{name}``; braces around anything else stay as they are."""

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return f"{{{match[1]}}}"
        return values.get(match[2], match[0])

    return _PLACEHOLDER.sub(value, text)


def named_in(texts: Iterable[str]) -> list[str]:
    """List names of placeholders, each once."""
    found = dict[str, None]()
    for text in texts:
        for match in _PLACEHOLDER.finditer(text):
            if match[2]:
                found[match[2]] = None
    return list(found)


def is_script(word: str) -> bool:
    """True for the name of a Python file."""
    return word.endswith(".py")


def split(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Split a command line at its first ``--``: our words, and those of a script; None where there is no ``--``."""
    words = list(argv)
    if "--" not in words:
        return words, None
    at = words.index("--")
    return words[:at], words[at + 1 :]


class Named(NamedTuple):
    """Names on a command line: a preset, and settings of a script."""

    preset: str | None
    overrides: list[str]
    settings: dict[str, tuple[Any, str]]
    """Key -> value and the word that gave it; empty for a preset alone."""


def named(preset: str | None, module: str | None, overrides: Sequence[str], words: Sequence[str] | None) -> Named:
    """Tell a script from a preset.

    Args:
        preset: the first word of the command line, which may be a Python file.
        module: that of ``-m``.
        overrides: the other words.
        words: those after ``--``; without a preset or a module the first of them is the program.

    Raises:
        UserError: it names two programs, or none, or arguments without ``--``.
    """
    overrides = list(overrides)
    rest = list(words or ())
    if preset is not None and "=" in preset and (module or words):
        overrides.insert(0, preset)
        preset = None
    given = [item for item in (f"-m {module}" if module else "", preset, *filter(is_script, overrides)) if item]
    if words and preset is not None and not is_script(preset) and is_script(words[0]):
        given.append(f"-- {words[0]}")
    if len(given) > 1:
        why = "A run is one of them; the script's own arguments stand behind `--`."
        raise UserError(f"{' and '.join(given)} are two programs.", why=why, fix=f"Give one: {given[0]} -- ARGUMENTS.")
    if module is not None:
        settings = _settings("module", module, rest, "-m")
    elif preset is not None and not is_script(preset):
        return Named(preset, overrides, {"script.arguments": (tuple(rest), "--")} if words is not None else {})
    elif preset is not None:
        settings = _settings("path", preset, rest, preset)
    elif words is None:
        return Named(None, overrides, {})
    else:
        settings = _after_dashes(rest)
    for word in overrides:
        if not _may_be_setting(word):
            raise without_dashes(word, given[0] if given else "--")
    return Named("script", overrides, settings)


def _may_be_setting(word: str) -> bool:
    """False for `lr=1`, `model=resnet` and `trainer.devices=2`, as for Hydra; true for misspelled keys."""
    from trainkit.config.schema import SECTIONS  # `--help` does without it

    key, equals, _ = word.partition("=")
    section, dot, _ = key.partition(".")
    is_key = bool(dot) and bool(difflib.get_close_matches(section, SECTIONS, cutoff=_CLOSE))
    return bool(equals) and (is_key or key == "seed")


def without_dashes(word: str, program: str) -> UserError:
    """The error for an argument of a script among our own words."""
    why = "What follows `--` is the script's; what stands before it is for this command."
    return UserError(f"{word} is no flag and no setting of ours.", why=why, fix=f"{program} -- {word} ...")


def _after_dashes(words: Sequence[str]) -> dict[str, tuple[Any, str]]:
    if not words:
        fix = "For example: -- train.py --lr 3e-4, or train.py -- --lr 3e-4."
        raise UserError("No program is named.", why="Nothing stands behind `--`.", fix=fix)
    first, *arguments = words
    if first in _PYTHONS and arguments[:1] == ["-m"] and len(arguments) > 1:
        return _settings("module", arguments[1], arguments[2:], "--")
    if first in _PYTHONS and arguments and is_script(arguments[0]):
        return _settings("path", arguments[0], arguments[1:], "--")
    return _settings("path" if is_script(first) else "program", first, arguments, "--")


def _settings(kind: str, program: str, arguments: Sequence[str], flag: str) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {f"script.{name}": (None, flag) for name in ("path", "module", "program")}
    return found | {f"script.{kind}": (program, flag), "script.arguments": (tuple(arguments), "--")}


def as_values(sweep: Iterable[str]) -> list[str]:
    """Axes of a sweep over placeholders: ``lr=1,2`` is ``script.values.lr=1,2``; others stay."""
    found = []
    for text in sweep:
        key = text.partition("=")[0]
        found.append(text if "." in key else f"script.values.{text}")
    return found
