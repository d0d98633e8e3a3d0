"""A student's folder: the data sets with a few images each, unpacked by the command that unpacks the real ones."""

import urllib.request
from pathlib import Path

import pytest

from jobs import prepare
from tests.checkpoint.conftest import s3_port  # noqa: F401
from tests.recipes import tiny
from tests.recipes.student import VIT


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


@pytest.fixture(scope="session")
def vit_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of the ViT that the tests train, as the Hub has them."""
    return tiny.write_vit_weights(tmp_path_factory.mktemp("hub"), VIT)


@pytest.fixture
def bucket(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> str:  # noqa: F811
    """The place in a bucket that a student has, and lets their machines into."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3_port}")
    for name, value in (("ACCESS_KEY_ID", "mine"), ("SECRET_ACCESS_KEY", "mine"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    request = urllib.request.Request(f"http://127.0.0.1:{s3_port}/students", method="PUT")
    urllib.request.urlopen(request, timeout=30).close()
    return "s3://students/vit"
