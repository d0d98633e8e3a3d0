"""Tiny data sets, in the files of the real ones."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.recipes import tiny
from trainkit.data import prepare_data


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tests run side by side: more threads than one would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the data sets that come in archives, a few images each, unpacked by the code for the real ones."""
    root = tmp_path_factory.mktemp("prepared")
    for name, archives in tiny.archives(root / "archives").items():
        assert prepare_data(name, root, archives, lambda line: None)
    return root
