"""Tiny data sets, in the files of the real ones."""

from pathlib import Path

import pytest

from tests.checkpoint.conftest import bucket, s3_port  # noqa: F401
from tests.recipes import tiny
from trainkit.data import prepare_data


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the data sets that come in archives, a few images each, unpacked by the code for the real ones."""
    root = tmp_path_factory.mktemp("prepared")
    for name, archives in tiny.archives(root / "archives").items():
        assert prepare_data(name, root, archives, lambda line: None)
    return root
