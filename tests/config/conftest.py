import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trainkit.config import plugins

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """``write("mine.py", text)`` makes a file of the user's own, in the folder that they start from."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(name: str, text: str) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        importlib.invalidate_caches()
        plugins.parse.cache_clear()
        return file

    return call
