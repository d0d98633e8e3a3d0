"""Text of others in Markdown: names of runs, hosts and classes, notes and settings stand there as they were written.

Escaped is what GitHub, GitLab and CommonMark would take for something else; the rest is left, for the source is read
as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_MEANT = re.compile(
    r"[`<|*]"
    r"|~(?=~)"
    r"|\](?=[(\[:])"  # of a link or a picture: brackets alone, as of [0.9, 0.999], are none
    r"|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])"  # within a word, as in fashion_cnn, it is a letter
    r"|&(?=#?\w+;)"
    r"|\\(?=[!-/:-@\[-`{-~])"
)


def literal(text: str) -> str:
    """As one line of text: no markup, no HTML, no link."""
    return _MEANT.sub(r"\\\g<0>", " ".join(text.splitlines()))


def code(text: str) -> str:
    """As a span of code, in which nothing is escaped: its fence is longer than what of that kind is in it."""
    text = " ".join(text.splitlines())
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if len(fence) > 1 else f"`{text}`"


def block(text: str) -> str:
    """As lines of code."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"


def table(header: Iterable[str], rows: Iterable[Iterable[str]], *, numbers_from: int | None = None) -> str:
    """A table of such texts; columns from ``numbers_from`` on are aligned to the right."""
    names = [literal(name) for name in header]
    right = len(names) if numbers_from is None else numbers_from
    rule = ["---:" if column >= right else "---" for column in range(len(names))]
    return "\n".join(f"| {' | '.join(line)} |" for line in [names, rule, *(map(literal, row) for row in rows)])
