"""Tiny data sets, in the files of the real ones."""

import importlib
import json
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.conftest import bucket, s3_port  # noqa: F401
from tests.data.shards import CLASSES, PER_SHARD, SHARDS, Place, indexed, picture, write_shard
from tests.recipes import tiny
from trainkit.data import cache
from trainkit.data.registry import prepare_data


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the data sets that come in archives, a few images each, unpacked by the code for the real ones."""
    root = tmp_path_factory.mktemp("prepared")
    for name, archives in tiny.archives(root / "archives").items():
        assert prepare_data(name, root, archives, lambda line: None)
    return root


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six shards to train on and two to validate on, beside them the same images as a folder."""
    folder = tmp_path_factory.mktemp("shards")
    for split, count, seed in (("train", SHARDS, 0), ("val", 2, 1000)):
        for shard in range(count):
            members: dict[str, bytes] = {}
            for number in range(shard * PER_SHARD, (shard + 1) * PER_SHARD):
                label, content = CLASSES[number % 3], picture(number + seed)
                members |= {f"{number:04}.cls": label.encode(), f"{number:04}.png": content}
                file = folder / "same" / split / label / f"{number:04}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            write_shard(folder / "tars" / f"{split}-{shard:03}.tar", members)
    return folder


@pytest.fixture
def place(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """The shards on a web server, indexed in ``tmp_path``; this node's disk is empty."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(cache, "QUIET_SECONDS", 0.3)
    with Place(shards / "tars") as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        indexed(server.url, tmp_path)
        server.asked.clear()
        yield server
        server.shutdown()


@pytest.fixture(scope="session")
def packed(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same images in parquet, as the Hugging Face hub has them: classes by number, and what the numbers mean."""
    pyarrow = pytest.importorskip("pyarrow", reason="the extra hf")
    parquet = importlib.import_module("pyarrow.parquet")
    folder = tmp_path_factory.mktemp("packed")
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": list(CLASSES)}}
    for file in (shards / "tars").iterdir():
        with tarfile.open(file) as tar:
            contents = {name: tar.extractfile(name).read() for name in tar.getnames()}  # type: ignore[union-attr]
        rows = [
            {"image": {"bytes": content, "path": name}, "label": CLASSES.index(contents[f"{name[:4]}.cls"].decode())}
            for name, content in contents.items()
            if name.endswith(".png")
        ]
        table = pyarrow.Table.from_pylist([*rows, {"image": {"bytes": None, "path": "away"}, "label": 0}])
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        parquet.write_table(table, folder / f"{file.stem}-of-9.parquet", row_group_size=4)
    return folder
