"""HTML and SVG by calls: what is not made by these functions is text, and is escaped. A run may be a stranger's."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from trainkit.report.tables import Row


class Html(str):
    """Markup. Everything else is text."""

    __slots__ = ()


NOTHING = Html()
_LONG = 60
"""Letters from which on a cell is broken into lines: one long name would push the other columns off the page."""
_ATTRIBUTES = {"class_": "class", "name_": "name", "viewBox": "viewBox"}
_VOID = {"br", "img", "meta", "link"}


def tag(name: str, *content: object, **attributes: object) -> Html:
    """An element. Of the content what is no `Html` is escaped, None is left out.

    Args:
        attributes: ``class_`` is class, ``name_`` name, ``data_x`` data-x; None and False: left out, True: no value.
    """
    written = "".join(
        f" {_ATTRIBUTES.get(key, key.replace('_', '-'))}" + ("" if value is True else f'="{html.escape(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Html(f"<{name}{written}>" + ("" if name in _VOID else f"{join(content)}</{name}>"))


def join(parts: Iterable[object]) -> Html:
    """All of it, in a row; what is no `Html` is escaped."""
    there = (part for part in parts if part is not None)
    return Html("".join(part if isinstance(part, Html) else html.escape(str(part), quote=False) for part in there))


def table(header: Row, rows: Sequence[Row], *, numbers_from: int | None = None, caption: str = "") -> Html:
    """A table that scrolls by itself where it is wider than the page. Columns from ``numbers_from`` on are numbers."""
    first_number = len(header) if numbers_from is None else numbers_from

    def cells(row: Row) -> list[Html]:
        head = tag("th", row[0], scope="row", class_="long" if len(row[0]) > _LONG else None)
        others = enumerate(row[1:], start=1)
        return [head, *(tag("td", text, class_=style(at, text)) for at, text in others)]

    def style(at: int, text: str) -> str | None:
        return "long" if len(text) > _LONG else "number" if at >= first_number else None

    top = [
        tag("th", text, scope="col", class_="number" if at >= first_number else None) for at, text in enumerate(header)
    ]
    body = [tag("tr", *cells(row)) for row in rows]
    head = tag("thead", tag("tr", *top)) if any(header) else None
    name = tag("caption", caption) if caption else None
    whole = tag("table", name, head, tag("tbody", *body))
    return tag("div", whole, class_="scroll", tabindex=0, role="region", aria_label=caption or header[0] or "table")


def with_code(text: str) -> Html:
    """Text with spans of code in it, as `trainkit.terminal.code` writes them."""
    parts = re.split(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", text)  # text, fence, code, text, ...
    return join(tag("code", part.strip()) if at % 3 == 2 else part for at, part in enumerate(parts) if at % 3 != 1)


def section(name: str, title: str, *content: object, note: str = "") -> Html:
    """A part of the page; nothing where it has no content."""
    if not any(content):
        return NOTHING
    said = tag("p", note, class_="note") if note else None
    heading = tag("h2", title, id=f"{name}-title")
    return tag("section", heading, said, *content, id=name, aria_labelledby=f"{name}-title")
