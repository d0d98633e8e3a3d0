"""Text of others on a terminal, in a shell, in a table and in Markdown: shown as it was written, and obeyed by nothing.

Of Markdown a parser of CommonMark and GitHub's tables is the judge.
"""

import io
import os
import random
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from trainkit.common import markdown, terminal

PROJECT = Path(__file__).parents[1]


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain \u00fcmlaut \U0001f600", "plain \u00fcmlaut \U0001f600"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("a\x1b]0;title\x07b", "ab"),
        ("a\x1bP1$r\x1b\\b", "ab"),
        ("a\x9b2Jb", "ab"),
        ("a\x1b(0b", "ab"),
        ("one\ntwo\r\nthree\tfour", "one two three four"),
        ("back\x08\x7f\x00", "back"),
        ("a\u202eb\u2028c", "a\ufffdb\ufffdc"),
        ("x" * 600, "x" * 500 + "..."),
        ("\x1b]unfinished", ""),
    ],
)
def test_a_remark_is_one_line_of_plain_text(text: str, shown: str) -> None:
    assert terminal.one_line(text) == shown


def test_a_log_on_a_terminal_keeps_lines_colours_and_progress_only() -> None:
    assert terminal.lines("a\n  b\t\x1b[2Jc\r\nd") == "a\n  b\tc\nd"
    log = "\x1b[1;31mred\x1b[0m\r 50%\n\x1b]0;t\x07\x1b[2J\x1b[H\x9b31mx\x07\tend\x1b[38;5;1mc"
    assert terminal.log_text(log, Screen()) == "\x1b[1;31mred\x1b[0m\r 50%\nx\tend\x1b[38;5;1mc"
    assert terminal.log_text(log, io.StringIO()) == log, "a pipe gets what it is"


def test_a_command_says_control_characters_by_their_bytes() -> None:
    name = "it's \\ \x1b]0;title\x07\n\u202eevil\udcff"
    told = terminal.command("status", name)
    assert told.isprintable()
    word = told.removeprefix("python -m jobs.status ")
    done = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True)
    assert done.stdout == os.fsencode(name)
    assert terminal.path(f"/runs/{name}") == terminal.word_for_shell(f"/runs/{name}")
    assert terminal.path("/my runs/it's") == "/my runs/it's"


@pytest.mark.parametrize(
    ("columns", "lines"),
    [
        (None, ["run            state    epoch", "ddp-0001       RUNNING  1.5",
                "a-longer-name  FAILED   -      the disk is full"]),
        (30, ["run            state    epoch", "ddp-0001       RUNNING  1.5", "a-longer-name  FAILED   -",
              "    the disk is full"]),
        (15, ["run            state", "ddp-0001       RUNNING", "a-longer-name  FAILED", "    the disk is",
              "    full"]),
    ],
    ids=["pipe", "narrow", "very narrow"],
)  # fmt: skip
def test_a_narrow_terminal_does_without_columns_and_never_cuts_a_name(
    columns: int | None, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if columns is not None:
        monkeypatch.setattr("sys.stdout", Screen())
        monkeypatch.setenv("COLUMNS", str(columns))
    rows = (("ddp-0001", "RUNNING", "1.5"), ("a-longer-name", "FAILED", "-"))
    header, notes = ("run", "state", "epoch"), ["", "the disk is full"]
    assert terminal.table(header, rows, notes, dispensable=["epoch"]) == lines


def test_columns_stand_below_each_other_whatever_is_written_in_them() -> None:
    # A CJK character takes two columns, a combining accent none.
    found = terminal.table(("name", "n"), [("日本", "1"), ("e\u0301t", "2"), ("abcd", "3")])
    assert found == ["name  n", "日本  1", "e\u0301t    2", "abcd  3"]


def test_a_command_in_a_message_is_quoted_whatever_the_names_in_it_are() -> None:
    """By one function: a folder may be called ``my runs``. The causes have fields that are quoted already."""
    command = re.compile(r"""python -m jobs\.\w+ [^`"'\n]*\{""")
    files = [file for room in ("jobs", "trainkit") for file in (PROJECT / room).rglob("*.py")]
    found = {str(file.relative_to(PROJECT)) for file in files if command.search(file.read_text(encoding="utf-8"))}
    assert {name for name in found if not name.startswith("trainkit/diagnosis/")} == set()
    assert (
        terminal.command("logs", "/my runs/it's", "--rank", 3) == """python -m jobs.logs '/my runs/it'"'"'s' --rank 3"""
    )


@pytest.mark.parametrize(
    ("said", "text"),
    [
        *((terminal.age(seconds), text) for seconds, text in (
            (-1, "0 s"), (59, "59 s"), (60, "1 min"), (119 * 60, "2 h"), (3 * 3600 + 5, "3 h"), (90000, "1 d"))),
        *((terminal.size(number), text) for number, text in (
            (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (123_456, "123 kB"), (4_510_000_000, "4.5 GB"))),
    ],
)  # fmt: skip
def test_ages_and_sizes_are_given_in_the_largest_unit_that_fits(said: str, text: str) -> None:
    assert said == text


def test_a_listing_cuts_no_name_and_no_value_on_any_terminal() -> None:
    long = "file " + "/a/long/path" * 9
    rows = [("seed", "0", "default"), ("monitor.loggers", "['console', 'jsonl', 'wandb']", "default"), ("x", "1", long)]
    assert terminal.listing(rows, 200)[0] == "seed             0           default"
    for room in (30, 40, 80):
        lines = terminal.listing(rows, room)
        assert max(map(len, lines)) <= room
        told = "".join("".join(lines).split())
        assert all("".join(word.split()) in told for row in rows for word in row)
    assert terminal.listing([], 80) == []


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("cat.png", "cat.png"),
        ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"),
        ("\uff1d1", "'\uff1d1"),
        ("'x", "''x"),
        ("\t=1", r"\x09=1"),
        ("a;=1", r"a\x3b=1"),
        (r"a\x41", r"a\x5cx41"),
        ("\x1b]0;x\x07", r"\x1b]0\x3bx\x07"),
        ("\u202egpj.exe", r"\xe2\x80\xaegpj.exe"),
        ("caf\udce9.png", r"caf\xe9.png"),
    ],
)
def test_a_foreign_name_in_a_table_runs_nothing_and_can_be_had_back(name: str, cell: str) -> None:
    assert terminal.cell(name) == cell
    assert terminal.name_of(cell) == name


@pytest.mark.parametrize("seed", range(5))
def test_every_name_that_linux_allows_can_be_had_back(seed: int) -> None:
    chosen = random.Random(seed)
    for _ in range(300):
        name = os.fsdecode(bytes(chosen.choice(b"=+-@';\\x41\t\n\x1b\xff\xc3\xa4a/") for _ in range(8)))
        cell = terminal.cell(name)
        assert cell.isprintable()
        assert cell[0] not in "=+-@"
        assert terminal.name_of(cell) == name


PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
ODD = [
    "a|b", "a\\|b", "a\\", "<b>x</b>", "<script>alert(1)</script>", "<!-- hidden", "`code`", "a ` b `` c", "**loud**",
    "_soft_", "fashion_cnn", "a*b", "~~gone~~", "~", "[text](http://example.org)", "![x](http://example.org/x.png)",
    "[0.9, 0.999]", "[a][b]", "&lt;", "R&D", "<http://example.org>", "lr=1e-3, seed=1", "# no heading", "C:\\runs",
    "x\\`y", "a] (b)", "--- | ---",
]  # fmt: skip


def cells(text: str) -> list[list[str]]:
    """What a reader sees in each cell of each row."""
    rows: list[list[str]] = []
    for before, token in zip((tokens := PARSER.parse(text))[:], tokens[1:], strict=False):
        if before.type == "tr_open":
            rows.append([])
        if before.type in ("td_open", "th_open"):
            assert {child.type for child in token.children or ()} <= {"text", "text_special"}, token.content
            rows[-1].append("".join(child.content for child in token.children or ()))
    return rows


def test_a_cell_of_a_table_shows_what_was_written() -> None:
    text = markdown.markdown_table(("name", "value"), [(odd, "7") for odd in ODD], numbers_from=1)
    assert cells(text) == [["name", "value"], *([odd, "7"] for odd in ODD)]
    assert text.splitlines()[1] == "| --- | ---: |"
    assert cells(markdown.markdown_table(("a\nb",), [("c\r\nd",)])) == [["a b"], ["c d"]]
    assert markdown.markdown_table(("name", "value"), [("a", "b")], numbers_from=99).splitlines()[1] == "| --- | --- |"


@pytest.mark.parametrize("text", ["resnet18, 11,699,132 parameters", "[0.9, 0.999]", "model_a=1e-3", "85.0 % (x)"])
def test_usual_text_stays_as_it_is_for_the_source_is_read_too(text: str) -> None:
    assert markdown.literal(text) == text


@pytest.mark.parametrize("odd", [odd for odd in ODD if "\\" not in odd] + ["a `b` ``c`` d", "```"])
def test_code_shows_what_was_written(odd: str) -> None:
    (_, line, _) = PARSER.parse(f"x: {markdown.code(odd)}")
    assert line.children
    code = line.children[-1]
    assert (code.type, code.content) == ("code_inline", odd)
    (block,) = PARSER.parse(markdown.block(f"{odd}\n```\n# x"))
    assert (block.type, block.content) == ("fence", f"{odd}\n```\n# x\n")


@pytest.mark.parametrize("write", [markdown.literal, markdown.code, markdown.block])
def test_markdown_moves_no_terminal_and_turns_no_text_round(write: Callable[[str], str]) -> None:
    """A model card is read with cat, and names of classes are whoever's who made the data."""
    text = write("cat\x1b]0;title\x07 \x1b[2Jdog\x9b31m e\u202egpj.exe\u2066 x\u061c \U000e0041 \x00\x7f\x85end")
    assert all(character.isprintable() or character == "\n" for character in text)
    assert ("title" in text, "cat" in text, "dog" in text) == (False, True, True)


def test_a_block_of_code_keeps_its_lines_and_tabs() -> None:
    assert markdown.block("a\n\tb\x1b[31m") == "```\na\n\tb\n```"
