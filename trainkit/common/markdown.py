"""Text of others inside Markdown, and tables."""

import re
from collections.abc import Iterable

from trainkit.common.terminal import plain

# What GitHub, GitLab or CommonMark would read as markup. Nothing else is escaped: people read the source as well.
_MARKUP = re.compile(
    r"[`<|*]"
    r"|~(?=~)"
    r"|\](?=[(\[:])"  # the end of a link's text; brackets alone, as in [0.9, 0.999], are no markup
    r"|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])"  # within a word, as in fashion_cnn, an underscore is no markup
    r"|&(?=#?\w+;)"
    r"|\\(?=[!-/:-@\[-`{-~])"
)


def literal(text: str) -> str:
    """A text as one line of Markdown that shows exactly it: no markup, no HTML, no link."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(plain(text).splitlines()))


def code(text: str) -> str:
    """A text as a span of code. It has no escapes, so its fence is longer than any run of backticks in it."""
    text = " ".join(plain(text).splitlines())
    fence = _fence(text)
    if len(fence) > 1:
        text = f" {text} "
    return f"{fence}{text}{fence}"


def block(text: str) -> str:
    """A text as a block of code."""
    text = plain(text)
    fence = _fence(text).rjust(3, "`")
    return f"{fence}\n{text}\n{fence}"


def _fence(text: str) -> str:
    return "`" + max(re.findall("`+", text), key=len, default="")


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[str]], *, numbers_from: int | None = None) -> str:
    """A table whose cells are `literal`; columns from ``numbers_from`` on are aligned to the right."""
    names = list(map(literal, header))
    left = len(names[:numbers_from])
    lines = [names, ["---"] * left + ["---:"] * (len(names) - left)]
    for row in rows:
        lines.append(list(map(literal, row)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
