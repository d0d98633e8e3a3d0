"""Text for people: made safe for a terminal, for a CSV file and for Markdown, and laid out in tables.

Others may have written the records and logs of a run, and a terminal obeys escape sequences: they set its title, erase
earlier output, fill the clipboard, or type an answer. So nothing from a run folder is printed as it is.
"""

import re
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, NoReturn, TextIO

if TYPE_CHECKING:
    from rich.console import RenderableType


# ESC and its C1 twin open CSI (colours, cursor), OSC, DCS, SOS, PM, APC (strings up to BEL or ST), and short sequences.
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)(?P<csi>[0-?]*[ -/]*[@-~])"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
# Characters that reorder text or break lines and are no control characters: U+202E shows "gpj.exe" as "exe.jpg".
_INVISIBLE = re.compile("[\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
_ESCAPED = {"'": "\\'", "\\": "\\\\"}
_COLOUR = re.compile(r"[\d;:]*m")


def one_line(value: object, longest: int = 500) -> str:
    """A name or a remark from a record, as one line of plain text."""
    text = str(value)[: 4 * longest]
    if not (text.isascii() and text.isprintable()):  # most texts are both, and a list of runs has many
        text = _plain(text)
    text = " ".join(text.split())
    return text if len(text) <= longest else f"{text[:longest]}..."


def long_line(value: object) -> str:
    """The same, of what is shown alone and must not be cut: a path, a cause with its fix."""
    return one_line(value, 5000)


_FORMULA = "=+-@'\uff1d\uff0b\uff0d\uff20"


def cell(name: str) -> str:
    """A foreign name as a cell of a CSV file; `name_of` gives it back.

    A backslash, a semicolon (which separates cells in half of Europe), and every byte of a character that cannot be
    printed or is not UTF-8 become ``\\xNN``. Spreadsheets run a cell that begins with = + - or @ as a formula, so it
    gets a ``'`` in front, as OWASP advises; so does a name that itself begins with ``'``.
    """
    text = "".join(one if one.isprintable() and one not in "\\;" else _in_bytes(one) for one in name)
    return f"'{text}" if text.startswith(tuple(_FORMULA)) else text


def name_of(cell: str) -> str:
    """The name that `cell` was made of."""
    raw = re.sub(rb"\\x([0-9a-f]{2})", lambda match: bytes.fromhex(match[1].decode()), cell.removeprefix("'").encode())
    return raw.decode(errors="surrogateescape")


def _in_bytes(one: str) -> str:
    errors = "surrogateescape" if "\udc80" <= one <= "\udcff" else "replace"
    return "".join(f"\\x{byte:02x}" for byte in one.encode("utf-8", errors))


LONGEST_NAME = 64
"""Of somebody who takes part in a collaborative run."""


def name(text: str) -> str:
    """Such a name as one line of plain text."""
    return one_line(text, LONGEST_NAME)


def _plain(text: str) -> str:
    text = _SEQUENCE.sub("", text)
    return _INVISIBLE.sub("\N{REPLACEMENT CHARACTER}", _CONTROL.sub(" ", text))


HOST = ""
"""The login node, as ``--host`` takes it, if the reader sits at another machine (`trainkit.site.ssh`)."""
_OVER_SSH = re.compile(r"python -m jobs\.(?:submit|bench|status|logs|cancel|resume|report|why)(?= )")


PROGRAM = "python -m jobs."
"""How this user starts commands: the text before the verb. The script ``trainkit`` sets it to its own name."""


def command(verb: str, *words: object) -> str:
    """A command of ours as it can be typed: ``python -m jobs.VERB WORDS``, each word quoted where a shell needs it."""
    return for_reader(" ".join([f"python -m jobs.{verb}", *(word_for_shell(str(word)) for word in words)]))


def word_for_shell(word: str) -> str:
    """A word quoted for a shell; what cannot be printed becomes ``$'\\xNN'``, which bash, zsh and ksh read."""
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(_in_bytes(one) if not one.isprintable() else _ESCAPED.get(one, one) for one in word) + "'"


def path(path: object) -> str:
    """A path for a line of its own: as it is if it can be printed, else quoted for a shell."""
    text = str(path)
    return text if text.isprintable() else word_for_shell(text)


def for_reader(command: str) -> str:
    """A command that does the same where it is read: on a laptop it gets ``--host``."""
    return as_started(f"{command} --host {shlex.quote(HOST)}" if HOST and _OVER_SSH.match(command) else command)


def as_started(text: str) -> str:
    """A text in which every command is written as this user starts it (`PROGRAM`)."""
    if PROGRAM == "python -m jobs.":
        return text
    return re.sub(r"python -m jobs\.(?=\w)", PROGRAM, text).replace("python -m jobs`", f"{PROGRAM.strip()}`")


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str] = (),
    *,
    dispensable: Sequence[str] = (),
    indent: int = 0,
) -> list[str]:
    """Lines of a table. No cell is cut, because nobody can type a name that is cut.

    On a narrow terminal the ``dispensable`` columns are left out one by one, in their order, and a note that does not
    fit at the end of its row is put below it. A pipe or a file gets everything, one line a row.

    Args:
        header: names of the columns.
        rows: cells as `one_line` gives them.
        notes: one for each row; may be empty.
        indent: width of what the caller will put before every line.
    """
    widths = [max(_width(row[column]) for row in [header, *rows]) for column in range(len(header))]
    room = shutil.get_terminal_size().columns - indent if sys.stdout.isatty() else sys.maxsize
    shown = list(range(len(header)))
    for name in dispensable:
        if sum(widths[column] + 2 for column in shown) - 2 > room:
            shown.remove(header.index(name))
    text = []
    for row, note in zip_longest([header, *rows], ["", *notes], fillvalue=""):
        line = "  ".join(row[column] + " " * (widths[column] - _width(row[column])) for column in shown)
        if _width(line) + 2 + _width(note) <= room:
            text.append(f"{line}  {note}".rstrip())
        else:
            text += [line.rstrip(), *textwrap.wrap(note, room, initial_indent="    ", subsequent_indent="    ")]
    return text


_VALUE = 10
"""Width of the values, so that the remarks are aligned; a longer value moves its remark to the right."""


def listing(rows: Sequence[tuple[str, str, str]], room: int) -> list[str]:
    """Lines of names with a value and a remark, for a terminal of ``room`` columns. No name and no value is cut: what
    does not fit on the line is put below it, indented."""
    first = max((len(name) for name, _, _ in rows), default=0)
    text: list[str] = []
    for name, value, remark in rows:
        line = f"{name:{first}}  {value:{_VALUE}}"
        if len(line) + 2 + len(remark) <= room:
            text.append(f"{line}  {remark}".rstrip())
        else:
            text += textwrap.wrap(line, room, subsequent_indent=" " * min(first + 2, room // 2))
            text += textwrap.wrap(remark, room, initial_indent="    ", subsequent_indent="    ")
    return text


def wrapped(line: str) -> list[str]:
    """A line, wrapped to the terminal's width, all lines but the first indented; a pipe or a file gets one line."""
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    return textwrap.wrap(line, room, subsequent_indent="    ") if len(line) > room else [line]


def _width(text: str) -> int:
    """Columns that a text takes: a Chinese character or an emoji takes two, a combining accent none."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def watch(text: Callable[[], str], *, every: float, view: "Callable[[int], RenderableType] | None" = None) -> NoReturn:
    """Show ``text`` again each ``every`` seconds, until Ctrl-C; a pipe gets it only when it has changed.

    Args:
        view: makes what a terminal shows instead, from its number of lines; called after ``text``.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console, before = Console(), ""
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            now = text()
            if console.is_terminal:
                # `Text`, because Rich would read a name like [red] as markup.
                live.update(Text(now) if view is None else view(console.height), refresh=True)
            elif now != before:
                print(now, flush=True)
                before = now
            time.sleep(every)


def age(seconds: float) -> str:
    """Seconds in the largest unit that fits, rounded: ``40 s``, ``12 min``, ``5 h``, ``3 d``."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(int(seconds), 0)} s"


def duration(seconds: float) -> str:
    """``40 ms``, ``12.3 s``, ``4 min 05 s``, ``1 h 30 min``."""
    if seconds < 59.95:
        return f"{seconds * 1000:.2g} ms" if 0 < seconds < 0.05 else f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours} h {minute:02} min" if hours else f"{minute} min {second:02} s"


def plural(count: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"1 {noun}" if count == 1 else f"{count} {noun}s"


def size(number: int) -> str:
    """Bytes in the largest unit that fits, by thousands: ``4.5 MB``."""
    value = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def lines(text: str) -> str:
    """Text of several lines, such as a traceback, without anything that a terminal would obey."""
    return _INVISIBLE.sub("", _CONTROL.sub("", _SEQUENCE.sub("", text)).replace("\r", ""))


def log_text(text: str, out: TextIO | None = None) -> str:
    """A log as it may be shown on ``out`` (stdout).

    A terminal gets colours, and carriage returns, which progress bars need and which affect only their own line; other
    sequences and control characters are removed. A pipe or a file gets every byte: it obeys nothing, and a search needs
    the log as it was written.
    """
    if not (sys.stdout if out is None else out).isatty():
        return text

    def colour(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith("\x1b[") and _COLOUR.fullmatch(match["csi"]) else ""

    parts = enumerate(re.split(r"(\x1b\[[\d;:]*m)", _SEQUENCE.sub(colour, text)))
    return "".join(part if index % 2 else _CONTROL.sub("", part) for index, part in parts)


# Markdown

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
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.splitlines()))


def code(text: str) -> str:
    """A text as a span of code. It has no escapes, so its fence is longer than any run of backticks in it."""
    text = " ".join(text.splitlines())
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if len(fence) > 1 else f"`{text}`"


def block(text: str) -> str:
    """A text as a block of code."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[str]], *, numbers_from: int | None = None) -> str:
    """A table whose cells are `literal`; columns from ``numbers_from`` on are aligned to the right."""
    names = [literal(name) for name in header]
    right = len(names) if numbers_from is None else numbers_from
    rule = ["---:" if column >= right else "---" for column in range(len(names))]
    return "\n".join(f"| {' | '.join(line)} |" for line in [names, rule, *(map(literal, row) for row in rows)])
