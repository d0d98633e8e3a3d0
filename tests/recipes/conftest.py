"""A student's folder: the data sets with a few images each, unpacked by the command that unpacks the real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import prepare
from tests.recipes import tiny


@pytest.fixture(scope="session")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Data set -> its archives, as a student has fetched them."""
    return tiny.archives(tmp_path_factory.mktemp("fetched") / "archives")


@pytest.fixture(scope="session")
def data(fetched: dict[str, list[Path]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the data sets, all of them prepared."""
    root = tmp_path_factory.mktemp("data")
    for name, files in fetched.items():
        assert prepare.main([name, "--root", str(root), "--archive", *map(str, files)], {}) == 0
    return root
