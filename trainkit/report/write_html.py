"""``report.html``: one file that shows one run or compares several; it needs no network, and no script to be read.

What a run says is escaped (`charts.tag`), for a run may be a stranger's. Should something slip through all the same,
the page's policy runs no script but its own and loads nothing from anywhere.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from trainkit import fileio, terminal
from trainkit.report import document as doc
from trainkit.report.charts import COLOURS, STYLE, Html, Picture, join, tag
from trainkit.report.comparison import outcome
from trainkit.report.document import NONE, duration, memory, number, rate, text
from trainkit.report.facts import Facts
from trainkit.report.sections import headline, is_sweep, of_runs, of_several
from trainkit.report.write_markdown import written_to
from trainkit.run.folder import run_at

FILE = "report.html"
MARK = "<!-- Written by `python -m jobs.report`, which replaces it the next time. -->"
_HERE = Path(__file__).parent
_LONG = 60
"""Letters from which on a cell is broken into lines: one long name would push the other columns off the page."""
_MOST_LINES = 12


def write_page(runs: Sequence[Facts], out: Path) -> Path:
    """Write ``out/report.html``; its path.

    Works for runs that are going on, were interrupted or lack files: the page says what is missing.

    Raises:
        UserError: it cannot be written, or a ``report.html`` there is somebody else's.
    """
    with written_to(out / FILE) as path:
        fileio.write(path, page(runs).encode(errors="replace"), run_at(out))
    return path


def page(runs: Sequence[Facts]) -> str:
    """The whole document."""
    title = runs[0].label if len(runs) == 1 else f"{len(runs)} runs"
    sweep = is_sweep(runs)
    if sweep:
        title = f"Sweep {terminal.one_line(runs[0].run_dir.path.parent.name)}: {title}"
        runs = sorted(runs, key=lambda facts: facts.rank)
    every = (*of_several(runs), *of_runs(runs[:COLOURS] if sweep else runs))
    sections = [each for each in every if any(each.parts)]
    style, script = (fileio.read_text(_HERE / name, follow=True) for name in ("page.css", "page.js"))
    style += STYLE
    policy = f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=f"{policy}; base-uri 'none'; form-action 'none'"),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="referrer", content="no-referrer"),
        tag("title", f"{title} · trainkit"),
        Html(f"<style>{style}</style>"),
    )
    links = [tag("li", tag("a", each.title, href=f"#{each.name}")) for each in sections]
    figures = _figures(runs[0]) if len(runs) == 1 else None
    body = tag(
        "body",
        tag("header", tag("h1", title), *_lead(runs, sweep), figures),
        tag("nav", tag("ul", *links), aria_label="parts of this report"),
        tag("main", *map(_section, sections)),
        tag("footer", tag("p", f"Made by trainkit, {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}.")),
        Html(f"<script>{script}</script>"),
    )
    return f"<!doctype html>\n{MARK}\n{tag('html', head, body, lang='en')}\n"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _lead(runs: Sequence[Facts], sweep: bool) -> list[Html]:
    if sweep:
        more = [f"Below the results are the best {COLOURS} of them."] * (len(runs) > COLOURS)
        return [tag("p", sentence, class_="lead") for sentence in [*outcome(runs), *more]]
    lines = []
    for facts in runs[:_MOST_LINES]:
        name = f"{facts.label}: " if len(runs) > 1 else ""
        named = (facts.setting(f"{key}.name") for key in ("model", "data", "strategy"))
        about = ", ".join(str(item) for item in named if item)
        told, alarm = headline(facts)
        said = tag("span", f" {alarm}", class_="alarm c1") if alarm else None
        lines.append(tag("p", f"{name}{about}{'. ' if about else ''}{told}", said, class_="lead"))
    return lines


def _figures(facts: Facts) -> Html:
    name, metric, loss = facts.described.headline, facts.headline, (facts.test or {}).get("loss")
    unit = f" {metric.unit}".rstrip()
    pairs = [
        (f"best val {name}", number(facts.best, metric.spec, unit)),
        (f"test {name}", number(facts.tested, metric.spec, unit)),
        ("test loss", number(loss, ".4f") if name != "loss" else NONE),
        ("training time", duration(facts.train_seconds)),
        ("images/s, median", rate(facts.images_per_sec)),
        ("peak memory", memory(facts.max_memory_mb)),
        ("processors", text(facts.processors)),
        ("attempts", text(facts.attempts or None)),
    ]
    shown = [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs if value != NONE]
    return tag("dl", *shown, class_="figures")


def _section(section: doc.Section) -> Html:
    note = tag("p", section.note, class_="note") if section.note else None
    heading = tag("h2", section.title, id=f"{section.name}-title")
    parts = map(_part, section.parts)
    return tag("section", heading, note, *parts, id=section.name, aria_labelledby=f"{section.name}-title")


def _part(part: doc.Part) -> Html | None:
    if not part:
        return None
    if isinstance(part, doc.Table):
        return table(part)
    if isinstance(part, doc.Charts):
        block = " block" * part.wide
        keys = [tag("li", tag("span", class_=f"swatch c{c}{block}"), name) for name, c in part.legend]
        legend = tag("ul", *keys, class_="legend", aria_label="colours") if keys else None
        pictures = [_figure(picture) for picture in part.pictures if picture is not None]
        return join([legend, tag("div", *pictures, class_="lanes" if part.wide else "charts")])
    if isinstance(part, doc.Items):
        return tag("ul", *(tag("li", *map(_word, words)) for words in part.lines))
    if isinstance(part, doc.Text):
        return tag("p", *map(_word, part.words), class_="note")
    if isinstance(part, doc.Block):
        return tag("pre", part.text, tabindex=0)
    if isinstance(part, doc.Heading):
        return tag("h3", part.text)
    if isinstance(part, doc.Fold):
        return tag("details", tag("summary", part.title), *map(_part, part.parts))
    return tag("div", *map(_photo, part.photos), class_="gallery")


def _word(word: str) -> Html | str:
    return tag("code", word) if isinstance(word, doc.Code) else word


def _figure(picture: Picture) -> Html:
    unit = tag("span", picture.unit, class_="unit") if picture.unit else None
    caption = tag("figcaption", picture.title, " ", unit) if picture.title or unit else None
    has_readout = "data_plot" in picture.data
    return tag("figure", caption, tag("div", picture.svg(), class_="plot"), class_="chart" if has_readout else None)


def table(part: doc.Table) -> Html:
    """A table that scrolls by itself where it is wider than the page."""

    def style(at: int, cell: str) -> str | None:
        return "long" if len(cell) > _LONG else "number" if at >= part.numbers_from else None

    top = [tag("th", cell, scope="col", class_=style(at, "")) for at, cell in enumerate(part.header)]
    body = []
    for first, *others in part.rows:
        head = tag("th", first, scope="row", class_="long" if len(first) > _LONG else None)
        body.append(tag("tr", head, *(tag("td", cell, class_=style(at, cell)) for at, cell in enumerate(others, 1))))
    name = tag("caption", part.caption) if part.caption else None
    whole = tag("table", name, tag("thead", tag("tr", *top)), tag("tbody", *body))
    label = part.caption or part.header[0] or "table"
    return tag("div", whole, class_="scroll", tabindex=0, role="region", aria_label=label)


def _photo(photo: doc.Photo) -> Html:
    sure = f"{100 * photo.confidence:.1f} %"
    words = f"{photo.label}, taken for {photo.told} with {sure}"
    style = "photo" if photo.is_large else None
    picture = tag("img", src=f"data:image/png;base64,{photo.png}", alt=words, class_=style)
    said = tag("span", photo.label, " ", tag("span", "taken for", class_="muted"), " ", tag("b", photo.told))
    return tag("figure", picture, tag("figcaption", said, tag("br"), tag("span", f"{sure} sure", class_="muted")))
