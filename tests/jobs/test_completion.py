"""What a shell completes, in a real one."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.conftest import PROJECT

Type = Callable[[str, str], str]


@pytest.fixture(scope="module")
def script() -> str:
    command = [sys.executable, "-m", "trainkit", "completion", "bash"]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def terminal(script: str, tmp_path: Path) -> Iterator[Type]:
    """``terminal(keys, until)``: what an interactive bash shows after these keys, Tab among them."""
    (tmp_path / "complete").write_text(script)
    (tmp_path / "runs" / "ddp-0007").mkdir(parents=True)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "thesis.yaml").touch()
    child, line = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], {**os.environ, "PS1": "READY>", "TERM": "dumb"})

    def read(until: str, seconds: float) -> str:
        text, end = "", time.monotonic() + seconds
        while not re.search(until, text) and time.monotonic() < end:
            if select.select([line], [], [], 0.1)[0]:
                text += os.read(line, 4096).decode()
        return text

    def keys(text: str, until: str) -> str:
        os.write(line, text.encode())
        shown = read(re.escape(until), 5.0)
        os.write(line, b"\x15\n")  # clear the line
        read("READY>$", 10.0)
        return shown.replace("\x07", "").rpartition("READY>")[2].rpartition("\n")[2]

    read("READY>$", 30.0)
    os.write(line, b"bind 'set bell-style none'; source complete\n")
    read("READY>$", 30.0)
    yield keys
    os.close(line)
    os.waitpid(child, 0)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_verbs_flags_presets_runs_and_settings(terminal: Type) -> None:
    typed = {
        "trainkit subm\t": "trainkit submit ",
        "trainkit swarm inv\t": "trainkit swarm invite ",
        "trainkit submit ddp --gpus\t": "trainkit submit ddp --gpus-per-node ",
        "trainkit submit thes\t": "trainkit submit thesis ",
        "trainkit submit recipes/imag\t": "trainkit submit recipes/imagenet_resnet50 ",
        "trainkit logs ddp-\t": "trainkit logs ddp-0007 ",
        "trainkit submit ddp optim.weig\t": "trainkit submit ddp optim.weight_decay=",
        "trainkit submit --settings sch\t": "trainkit submit --settings schedule ",
    }
    assert {keys: terminal(keys, shown) for keys, shown in typed.items()} == typed


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script(command: Callable[..., Any], shell: str) -> None:
    command("completion", shell).ok("weight_decay=")
