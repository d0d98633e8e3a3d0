"""What an error's own words say must be changed: the settings of the command that trains again."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from trainkit.config.schema import SECTIONS

_KEY = rf"(?<![\w.])(?P<section>{'|'.join(SECTIONS)})\.(?P<key>(?!py\b)[a-z_][a-z0-9_]*)"
_GIVEN = re.compile(rf"{_KEY}=(?P<value>\[(?:\"[^\"]*\"|[^\]\"])*\]|[^\s,;`]+)")
_LEFT_OUT = re.compile(rf"[Ll]eave (?:out )?{_KEY}")
_NAMED = re.compile(rf"{_KEY}\b(?!\.py\b)")
_EXAMPLE = re.compile(r"\b(?:[Ff]or example|such as|e\.g\.)")
TO_FILL_IN = "..."
"""Stands for a value that only the user knows; every setting that can be meant refuses it."""


def settings_of(what: str, fix: str) -> list[str]:
    """``section.key=value`` of the change that ``fix`` tells of, the first one where it offers several.

    A setting that it names without a value gets its default where it is to be left out, else ``...``; so does the one
    that ``what`` complains of. Empty where the words are of no setting: the machine or the data is to be mended then.
    """
    advice = _EXAMPLE.split(fix)[0]
    given = [match for match in _GIVEN.finditer(advice) if not re.fullmatch(r"[A-Z_]+\.?", match["value"])]
    if given:
        chosen = given[:1]
        for before, after in pairwise(given):
            if advice[before.end() : after.start()].strip() not in ("", "and"):
                break  # from here on it is another way
            chosen.append(after)
        return [f"{match['section']}.{match['key']}={match['value'].rstrip('.')}" for match in chosen]
    if (match := _LEFT_OUT.search(advice)) and match["key"] in SECTIONS[match["section"]].model_fields:
        default = SECTIONS[match["section"]].model_fields[match["key"]].default
        return [f"{match['section']}.{match['key']}={_text(default)}"]
    match = _NAMED.search(fix) or _NAMED.search(what)
    return [f"{match['section']}.{match['key']}={TO_FILL_IN}"] if match else []


def _text(value: Any) -> str:
    return {None: "null", True: "true", False: "false"}.get(value, str(value))
