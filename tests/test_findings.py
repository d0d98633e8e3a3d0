"""Rules of the scripts in findings/. CI does not run them: each installs packages of its own."""

import os
import re
from pathlib import Path

import pytest

from tests.shell import faults

FOLDER = Path(__file__).parents[1] / "findings"
SCRIPTS = sorted(FOLDER.glob("*"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_finding_stands_alone(script: Path) -> None:
    text = script.read_text()
    assert script.suffix == ".sh"
    assert os.access(script, os.X_OK)
    assert "trainkit" not in text, "a finding is about others' software"
    assert "mktemp -d" in text, "it leaves nothing behind"
    assert re.search(r"=\d", text), "it says which version it is about"
    head = re.match(r"#!/usr/bin/env bash\n(?:#.*\n){4,}", text)
    assert head, "its head says version, what one expects, what is seen, and the source"
    assert faults(text) == "", "bash or shellcheck finds a fault"
