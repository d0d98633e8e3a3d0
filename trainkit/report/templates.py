"""Templates of pages, log books and charts; all text in them is escaped."""

from __future__ import annotations

from pathlib import Path

import jinja2
from markupsafe import Markup

from trainkit.common import fileio, terminal
from trainkit.common.markdown import block, code, literal


class Code(str):
    """A command, a path or an output: shown as it is typed."""

    __slots__ = ()


def source(name: str) -> str:
    """The text of a file beside this one."""
    return fileio.read_text(Path(__file__).parent / name, follow=True)


def _plain(value: object) -> object:
    """Prepare a value for a template: text loses control characters and marks that reorder it."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return terminal.plain(value)
    return f"{value:.6g}" if isinstance(value, float) else value


STYLE = source("chart.css")
TEMPLATES = jinja2.Environment(
    loader=jinja2.FunctionLoader(source),
    autoescape=lambda name: not str(name).endswith(".md"),
    undefined=jinja2.StrictUndefined,
    finalize=_plain,
)
TEMPLATES.tests["code"] = lambda word: isinstance(word, Code)
TEMPLATES.filters |= {"literal": literal, "code": code, "block": block}
