"""What others wrote is read in Markdown as they wrote it. A parser of CommonMark and GitHub's tables is the judge."""

from __future__ import annotations

import pytest
from markdown_it import MarkdownIt

from trainkit import terminal

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
    text = terminal.markdown_table(("name", "value"), [(odd, "7") for odd in ODD], numbers_from=1)
    assert cells(text) == [["name", "value"], *([odd, "7"] for odd in ODD)]
    assert text.splitlines()[1] == "| --- | ---: |"


def test_lines_become_one() -> None:
    assert cells(terminal.markdown_table(("a\nb",), [("c\r\nd",)])) == [["a b"], ["c d"]]


@pytest.mark.parametrize("text", ["resnet18, 11,699,132 parameters", "[0.9, 0.999]", "model_a=1e-3", "85.0 % (x)"])
def test_usual_text_stays_as_it_is_for_the_source_is_read_too(text: str) -> None:
    assert terminal.literal(text) == text


@pytest.mark.parametrize("odd", [odd for odd in ODD if "\\" not in odd] + ["a `b` ``c`` d", "```"])
def test_code_shows_what_was_written(odd: str) -> None:
    (_, line, _) = PARSER.parse(f"x: {terminal.code(odd)}")
    assert line.children
    code = line.children[-1]
    assert (code.type, code.content) == ("code_inline", odd)
    (block,) = PARSER.parse(terminal.block(f"{odd}\n```\n# x"))
    assert (block.type, block.content) == ("fence", f"{odd}\n```\n# x\n")
