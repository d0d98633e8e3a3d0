"""Text for people: made safe for a terminal and for a CSV file, and laid out in tables.

Others may have written the records and logs of a run, and a terminal obeys escape sequences: they set its title, erase
earlier output, fill the clipboard, or type an answer. So nothing from a run folder is printed as it is.
"""

import re
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import NoReturn, TextIO

# ESC and its C1 twin open CSI (colours, cursor), OSC, DCS, SOS, PM, APC (strings up to BEL or ST), and short sequences.
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
# Characters that reorder text or break lines and are no control characters: U+202E shows "gpj.exe" as "exe.jpg".
_INVISIBLE = re.compile("[\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]")
_COLOUR = re.compile(r"[\d;:]*m")


def one_line(value: object, longest: int = 500) -> str:
    """A name or a remark from a record, as one line of plain text."""
    text = str(value)[: 4 * longest]
    if not (text.isascii() and text.isprintable()):  # most texts are both, and a list of runs has many
        text = plain(text)
    text = " ".join(text.split())
    if len(text) > longest:
        return f"{text[:longest]}..."
    return text


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
    text = _escaped(name, {"\\": "\\x5c", ";": "\\x3b"})
    if text.startswith(tuple(_FORMULA)):
        return f"'{text}"
    return text


def name_of(cell: str) -> str:
    """The name that `cell` was made of."""
    raw = re.sub(rb"\\x([0-9a-f]{2})", lambda match: bytes.fromhex(match[1].decode()), cell.removeprefix("'").encode())
    return raw.decode(errors="surrogateescape")


def _escaped(text: str, instead: Mapping[str, str]) -> str:
    """A text with ``instead`` of some characters, and the bytes of those that cannot be printed."""
    found = ""
    for one in text:
        if one.isprintable():
            found += instead.get(one, one)
            continue
        errors = "surrogateescape" if "\udc80" <= one <= "\udcff" else "replace"
        for byte in one.encode("utf-8", errors):
            found += f"\\x{byte:02x}"
    return found


LONGEST_NAME = 64
"""Name of somebody who takes part in a collaborative run."""


def name(text: str) -> str:
    """Such a name as one line of plain text."""
    return one_line(text, LONGEST_NAME)


def plain(text: str) -> str:
    """A text, of several lines too, without anything that a terminal or a reader of it would obey."""
    text = _SEQUENCE.sub("", text)
    return _INVISIBLE.sub("\N{REPLACEMENT CHARACTER}", _CONTROL.sub(" ", text))


HOST = ""
"""The login node, as ``--host`` takes it, if the reader sits at another machine (`trainkit.cluster.ssh`)."""
_OVER_SSH = re.compile(r"python -m jobs\.(?:submit|bench|status|logs|cancel|resume|report|why)(?= )")


PROGRAM = "python -m jobs."
"""Text before the verb in this user's commands. The script ``trainkit`` sets it to its own name."""


def command(verb: str, *words: object) -> str:
    """A command of ours as it can be typed: ``python -m jobs.VERB WORDS``, each word quoted where a shell needs it."""
    return for_reader(" ".join([f"python -m jobs.{verb}", *(word_for_shell(str(word)) for word in words)]))


def word_for_shell(word: str) -> str:
    """A word quoted for a shell; what cannot be printed becomes ``$'\\xNN'``, which bash, zsh and ksh read."""
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + _escaped(word, {"'": "\\'", "\\": "\\\\"}) + "'"


def path(path: object) -> str:
    """A path for a line of its own: as it is if it can be printed, else quoted for a shell."""
    text = str(path)
    if text.isprintable():
        return text
    return word_for_shell(text)


def for_reader(command: str) -> str:
    """A command that does the same where it is read: on a laptop it gets ``--host``."""
    if HOST and _OVER_SSH.match(command):
        command += f" --host {shlex.quote(HOST)}"
    return as_started(command)


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
    widths = [max(map(_width, column)) for column in zip(header, *rows, strict=True)]
    room = _columns() - indent
    shown = list(range(len(header)))
    for name in dispensable:
        if sum(widths[column] + 2 for column in shown) - 2 > room:
            shown.remove(header.index(name))
    text: list[str] = []
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
    if len(line) > _columns():
        return textwrap.wrap(line, _columns(), subsequent_indent="    ")
    return [line]


def _columns() -> int:
    """Width of the terminal; a pipe or a file has no end."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize


def _width(text: str) -> int:
    """Columns that a text takes: a Chinese character or an emoji takes two, a combining accent none."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def say(text: str) -> None:
    """Print what a person follows while it happens, on stdout. Library modules say nothing in another way."""
    print(text, flush=True)


def warn(text: str) -> None:
    """Print a doubt or a warning, on stderr."""
    print(text, file=sys.stderr, flush=True)


def fitting(text: str, height: int) -> str:
    """A text of at most so many lines: its first line and the last ones."""
    first, *rest = text.split("\n")
    return "\n".join([first, *rest[1 - height :]])


def watch(text: Callable[[], str], *, every: float) -> NoReturn:
    """Show ``text`` again each ``every`` seconds, until Ctrl-C; a pipe gets it only when it has changed.

    Of a text that is longer than the terminal is high, the first line and the last ones are shown.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    before = ""
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            now = text()
            if console.is_terminal:
                # Rich would read a name like [red] in a str as markup.
                live.update(Text(fitting(now, console.height - 1)), refresh=True)
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
        if 0 < seconds < 0.05:
            return f"{seconds * 1000:.2g} ms"
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minute:02} min"
    return f"{minute} min {second:02} s"


def plural(count: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"1 {noun}" if count == 1 else f"{count} {noun}s"


def size(number: int) -> str:
    """Bytes in the largest unit that fits, by thousands: ``4.5 MB``."""
    if number < 1000:
        return f"{number} B"
    value = float(number)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 1000:
            return f"{value:.{int(value < 100)}f} {unit}"
    return f"{value / 1000:,.1f} TB"


def lines(text: str) -> str:
    """Text of several lines, such as a traceback, without anything that a terminal would obey."""
    return _INVISIBLE.sub("", _CONTROL.sub("", _SEQUENCE.sub("", text)).replace("\r", ""))


def log_text(text: str, out: TextIO | None = None) -> str:
    """A log as it may be shown on ``out`` (stdout).

    A terminal gets colours, and carriage returns, which progress bars need and which affect only their own line; other
    sequences and control characters are removed. A pipe or a file gets every byte: it obeys nothing, and a search needs
    the log as it was written.
    """
    if not (out or sys.stdout).isatty():
        return text

    def shown(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith("\x1b[") and _COLOUR.fullmatch(match[0][2:]) else ""

    text = _SEQUENCE.sub(shown, text)
    return re.sub(r"(\x1b\[[\d;:]*m)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", lambda match: match[1] or "", text)
