"""What a shell completes, in a real one."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.conftest import PROJECT, Command

# As bash calls what `complete -F` has named, for the last of these words.
COMPLETED = r"""
source complete
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
$(complete -p trainkit | sed 's/.*-F \([^ ]*\) .*/\1/') trainkit "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"
echo "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_verbs_flags_presets_runs_and_settings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainkit", "completion", "bash"]
    script = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    (tmp_path / "complete").write_text(script)
    (tmp_path / "runs" / "ddp-0007").mkdir(parents=True)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "thesis.yaml").touch()
    typed = {
        "trainkit subm": "submit",
        "trainkit swarm inv": "invite",
        "trainkit submit ddp --gpus": "--gpus-per-node",
        "trainkit submit thes": "thesis",
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
    command("completion", shell).ok("weight_decay=")
