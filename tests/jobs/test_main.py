"""``python -m jobs``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.__main__ import verbs
from trainkit.config.loading import described

JOBS = Path(__file__).parents[2] / "jobs"


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_the_verbs_are_listed_with_what_each_says_of_itself(command: Callable[..., Any], arguments: Any) -> None:
    done = command("__main__", *arguments)
    assert (done.code, done.err) == (0, "")
    listed = {line.split()[0]: line for line in done.out.splitlines() if line.startswith("  ")}
    assert {"submit", "train", "launch", "evaluate", "status", "prepare", "report", "swarm"} <= set(listed)
    assert listed["submit"] == "  submit      plan, validate, write the run folder, queue."


def test_every_verb_has_a_sentence_for_the_list() -> None:
    said = verbs(JOBS)
    assert {file.stem for file in JOBS.glob("*.py") if "cli.run(main)" in file.read_text()} == {*said, "__main__"}
    assert [verb for verb, words in said.items() if not words or "`" in words.split()[0]] == []


def test_submit_alone_lists_the_presets_each_on_a_line_of_eighty(command: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.yaml").write_text(
        "# yaml-language-server: $schema=x\n# My own. For CIFAR.\nextends: ddp\n"
    )
    done = command("submit")
    assert (done.code, done.err) == (0, "")
    assert [line.split()[0] for line in done.out.splitlines() if line.startswith("  ")] == list(described())
    assert ["mine", "My", "own"] in [line.split() for line in done.out.splitlines()]
    assert [line for line in done.out.splitlines() if len(line) > 80] == []
    assert command("submit", "--nodes", "2").err.startswith("PRESET|RUN missing.")


def test_submit_lists_what_can_be_set(command: Callable[..., Any]) -> None:
    done = command("submit", "--settings", "optim")
    assert (done.code, done.err) == (0, "")
    assert "optim.lr=0.002  (float > 0)  Peak learning rate.\n" in done.out
    assert {line.partition(".")[0] for line in done.out.splitlines()} == {"optim"}
    command("submit", "--settings").ok("strategy.comm_hook=none  (none | fp16 | bf16 | powersgd)  ddp, zero: ")
    assert command("submit", "--settings", "optm").code == 2
