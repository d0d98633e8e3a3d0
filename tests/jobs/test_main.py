"""``python -m jobs``, and what a shell completes."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.__main__ import verbs
from tests.jobs.conftest import PROJECT, Command
from trainkit.config.presets import preset_descriptions


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_the_verbs_are_listed_with_what_each_says_of_itself(command: Command, arguments: tuple[str, ...]) -> None:
    done = command("__main__", *arguments)
    assert (done.code, done.err) == (0, "")
    listed = {line.split()[0]: line for line in done.out.splitlines() if line.startswith("  ")}
    assert {"submit", "train", "launch", "evaluate", "status", "prepare", "report", "swarm"} <= set(listed)
    assert listed["submit"] == "  submit      plan, validate, write the run folder, queue."


def test_every_verb_has_a_sentence_for_the_list() -> None:
    said = verbs(PROJECT / "jobs")
    assert {file.stem for file in (PROJECT / "jobs").glob("*.py") if "cli.run(main)" in file.read_text()} == {
        *said,
        "__main__",
    }
    assert [verb for verb, words in said.items() if not words or "`" in words.split()[0]] == []


def test_submit_alone_lists_the_presets_each_on_a_line_of_eighty(command: Command, tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.yaml").write_text(
        "# yaml-language-server: $schema=x\n# My own. For CIFAR.\nextends: ddp\n"
    )
    done = command("submit")
    assert (done.code, done.err) == (0, "")
    assert [line.split()[0] for line in done.out.splitlines() if line.startswith("  ")] == list(preset_descriptions())
    assert ["mine", "My", "own"] in [line.split() for line in done.out.splitlines()]
    assert [line for line in done.out.splitlines() if len(line) > 80] == []
    assert command("submit", "--nodes", "2").err.startswith("PRESET|RUN missing.")


def test_submit_lists_what_can_be_set(command: Command) -> None:
    done = command("submit", "--settings", "optim")
    assert (done.code, done.err) == (0, "")
    assert "optim.lr=0.002  (float > 0)  Peak learning rate.\n" in done.out
    assert {line.partition(".")[0] for line in done.out.splitlines()} == {"optim"}
    command("submit", "--settings").ok("strategy.comm_hook=none  (none | fp16 | bf16 | powersgd)  ddp, zero: ")
    assert command("submit", "--settings", "optm").code == 2


# As bash calls what `complete -F` has named, for the last of these words.
COMPLETED = r"""
source complete
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
$(complete -p trainkit | sed 's/.*-F \([^ ]*\) .*/\1/') trainkit "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"
echo "${COMPREPLY[@]}"
"""


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_verbs_flags_presets_runs_and_settings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainkit", "completion", "bash"]
    script = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    (tmp_path / "complete").write_text(script)
    (tmp_path / "runs" / "ddp-0007").mkdir(parents=True)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "thesis.yaml").touch()
    (tmp_path / "fit.py").touch()
    typed = {
        "trainkit subm": "submit",
        "trainkit swarm inv": "invite",
        "trainkit submit ddp --gpus": "--gpus-per-node",
        "trainkit submit thes": "thesis",
        "trainkit submit fi": "fit.py",
        "trainkit submit recipes/imag": "recipes/imagenet_resnet50",
        "trainkit logs ddp-": "ddp-0007",
        "trainkit submit ddp optim.weig": "optim.weight_decay=",
        "trainkit submit --settings sch": "schedule",
    }

    def completed(line: str) -> str:
        bash = ["bash", "--norc", "-c", COMPLETED, "bash", *line.split()]
        return subprocess.run(bash, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    assert {line: completed(line) for line in typed} == typed


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script(command: Command, shell: str) -> None:
    script = command("completion", shell).ok().out
    assert "weight_decay=" in script
    assert "gpus-per-node" in script
