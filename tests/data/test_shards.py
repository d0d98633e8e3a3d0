"""Shards: what is in them, as an index of them says, which may be a stranger's."""

import importlib
import importlib.util
import io
import json
import os
import random
import shutil
import sys
import tarfile
import threading
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.checkpoint.conftest import Trouble
from tests.data.samples import build, choice, hub
from tests.data.shards import (
    CLASSES,
    PNG,
    SHARDS,
    Place,
    add,
    indexed,
    options,
    picture,
    read,
    same,
    tar_file,
    write_shard,
)
from tests.shell import python
from trainkit.common.errors import UserError
from trainkit.common.object_store import Store
from trainkit.config.loading import load
from trainkit.data import cache, parquet
from trainkit.data.base import Splits
from trainkit.data.datasets.stream import _Source
from trainkit.data.losses import BrokenImages
from trainkit.data.registry import check_data, guessed, prepare_data, train_size
from trainkit.data.shards import RECORD, Piece, ShardImages, index, read_index, write_index
from trainkit.launch.preparation import check


@pytest.mark.parametrize(
    ("members", "says"),
    [({"1.png": PNG}, r"1 without a label \(1\)"), ({"readme.txt": b"x"}, "no image in it"), ({}, "no image in it"),
     ({"a/1.cls": b"x" * 300}, "has 300 bytes")],
)  # fmt: skip
def test_a_shard_without_images_of_classes_is_refused(members: dict[str, bytes], says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says):
        index("x.tar", iter([tar_file(members)]), "x.tar")


def test_cut_or_random_bytes_are_no_shard(tmp_path: Path) -> None:
    content = tar_file({"a/1.png": picture(1)})
    for broken in (content[:700], random.Random(0).randbytes(5000)):
        with pytest.raises(UserError, match=r"cannot be read as a tar archive|no image in it"):
            index("x.tar", iter([broken]), "x.tar")


def test_a_broken_image_is_named_by_its_shard_and_may_be_skipped(tmp_path: Path) -> None:
    for name in ("train-0", "val-0"):
        images = {f"{label}/{at}.png": picture(at) for at in range(8) for label in CLASSES[:2]}
        write_shard(tmp_path / "tars" / f"{name}.tar", {**images, "cat/5.png": PNG[:60]})
    root = indexed(tmp_path / "tars", tmp_path / "data")
    data = build("stream", root, **options(str(tmp_path / "tars")))
    with pytest.raises(UserError, match="Cannot decode the image"):
        read(data, 0, 1, size=16)
    broken = BrokenImages(1)
    read(data, 0, 1, size=16, broken=broken)
    assert set(broken.met) == {"train-0.tar/cat/5.png"}


# Parquet


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_parquet_are_those_of_tar_files(
    shards: Path, place: Place, packed: Path, tmp_path: Path, workers: int
) -> None:
    from_tar = read(build("stream", indexed(shards / "tars", tmp_path), **options(str(shards / "tars"))))
    place.folder = packed
    index_of = tmp_path / "other"
    prepare_data("stream", index_of, [], lambda line: None, {"url": f"{place.url}/", "max_broken": 8})
    data = build("stream", index_of, **options(f"{place.url}/"))
    place.asked.clear()
    assert same(read(data, workers=workers), from_tar)
    assert place.asked_for("train") == {f"train-{at:03}-of-9.parquet": 1 for at in range(SHARDS)}
    assert isinstance(data.train, ShardImages)
    kept = sorted(data.train.cache.folder.glob("*.shard"))
    assert [file.stat().st_size for file in kept] == [shard.kept for shard in sorted_by_hash(data)]
    for file in kept:
        file.write_bytes(bytes(file.stat().st_size))
    assert same(read(data, 3, 7, workers=workers), from_tar[3:7]), "a damaged copy is fetched and unpacked again"


def sorted_by_hash(data: Splits) -> list[cache.Shard]:
    shards = {shard for part in (data.train, data.val) for shard in part.shards}  # type: ignore[attr-defined]
    here = data.train.cache.folder  # type: ignore[attr-defined]
    return sorted((each for each in shards if (here / f"{each.sha256[:40]}.shard").exists()), key=lambda it: it.sha256)


def test_parquet_in_a_folder_is_unpacked_too(place: Place, packed: Path, tmp_path: Path) -> None:
    root = indexed(packed, tmp_path / "data", max_broken=8)
    assert train_size(choice("stream", root, url=str(packed))) == 60
    data = build("stream", root, **options(str(packed)))
    assert same(read(data, 2, 9), read(build("stream", tmp_path, **options(place.url)), 2, 9))


def test_a_broken_image_of_parquet_is_named_by_its_number(packed: Path, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), importlib.import_module("pyarrow.parquet")
    for name in ("train-0", "val-0"):
        rows = [{"photo": PNG[:60] if at == 5 else picture(at), "kind": f"{at % 2}"} for at in range(16)]
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    with pytest.raises(UserError, match=r"train-0\.parquet has no column of labels"):
        indexed(tmp_path, tmp_path / "data")
    columns = {"image": "photo", "label": "kind"}
    root = indexed(tmp_path, tmp_path / "data", **columns)
    data, broken = build("stream", root, **options(str(tmp_path), **columns)), BrokenImages(1)
    read(data, 0, 1, size=16, broken=broken)
    assert set(broken.met) == {"train-0.parquet/image 5"}


@pytest.mark.parametrize("content", [b"", b"PAR1 torn", random.Random(0).randbytes(500)])
def test_a_torn_file_is_no_parquet(packed: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "train-0.parquet").write_bytes(content)
    with pytest.raises(UserError, match=r"train-0\.parquet is not a parquet file of images"):
        indexed(tmp_path, tmp_path / "data")


# Kinds of stores


@pytest.mark.nightly
def test_shards_of_a_bucket_are_those_of_a_folder(
    shards: Path, place: Place, bucket: tuple[str, Trouble], tmp_path: Path
) -> None:
    here, (url, trouble) = shards / "tars", bucket
    from_folder = read(build("stream", indexed(here, tmp_path), **options(str(here))))
    there = Store(url)
    for file in here.iterdir():
        there.put(file, file.name)
    root = tmp_path / "of the bucket"
    prepare_data("stream", root, [], lambda line: None, {"url": url})
    data = build("stream", root, **options(url))
    trouble.refuse = True
    threading.Timer(1.0, trouble.over).start()
    assert same(read(data), from_folder)


IN_THE_HUB = """
import sys
from pathlib import Path
from tests.data.samples import build
from tests.data.shards import options, prepare_data, read
import torch
root, url = Path(sys.argv[1]), "hf://datasets/me/pets/data"
prepare_data("stream", root, [], print, {"url": url, "max_broken": 8})
torch.save(read(build("stream", root, **options(url)), 2, 9), root / "read.pt")
"""


@pytest.mark.nightly
def test_shards_in_the_hub_are_those_of_a_folder(place: Place, packed: Path, tmp_path: Path) -> None:
    files = {f"data/{file.name}": file.read_bytes() for file in packed.iterdir()}
    with hub(files) as url:
        (tmp_path / "disk").mkdir()
        done = python(
            *("-c", IN_THE_HUB, str(tmp_path / "hub")),
            HF_ENDPOINT=url, HF_HOME=str(tmp_path / "hf"), TMPDIR=str(tmp_path / "disk"),
            PYTHONPATH=os.pathsep.join(filter(None, sys.path)),
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    data = build("stream", indexed(packed, tmp_path / "near", max_broken=8), **options(str(packed)))
    assert same(torch.load(tmp_path / "hub" / "read.pt", weights_only=True), read(data, 2, 9))


# What a user meets


def test_a_store_is_not_waited_for_until_ranks_count_as_hung(place: Place, tmp_path: Path) -> None:
    words = ["data.name=stream", f"data.url={place.url}", f"data.root={tmp_path}"]
    loaded = load("single", [*words, "launch.hang_seconds=300", "train.global_batch_size=12"])
    with pytest.raises(UserError, match=r"data\.patience.*300") as caught:
        check(loaded)
    assert "less than launch.hang_seconds=300" in str(caught.value)
    check(load("single", [*words, "launch.hang_seconds=301", "train.global_batch_size=12"]))


def test_a_new_run_takes_the_size_of_the_images(place: Place, tmp_path: Path) -> None:
    size, why = guessed(choice("stream", tmp_path, url=place.url))["image_size"]
    assert size == 16
    assert "images are 16 pixels" in why


def test_shards_without_an_index_are_refused_with_the_command(tmp_path: Path) -> None:
    config = choice("stream", tmp_path, url="s3://bucket/x")
    with pytest.raises(UserError, match=r"jobs\.prepare stream data\.url=s3://bucket/x --root"):
        check_data(config)


def test_a_kind_of_store_whose_package_is_missing_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gcsfs" else find(name))
    with pytest.raises(UserError, match="gs:// needs the package gcsfs") as caught:
        prepare_data("stream", tmp_path, [], lambda line: None, {"url": "gs://bucket/pets"})
    assert (caught.value.key, caught.value.fix) == ("data.url", 'pip install "trainkit-vision[gcs]"')


@pytest.mark.parametrize(
    "url",
    ["https://me:key@host/x", "s3://b/x?key=1", "ftp://host/x", "https://host/{0..9}.tar?sig=key", "s3://b/{0..9}#key"],
)
def test_a_url_with_a_key_or_of_no_known_kind_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.url is not an address of shards") as caught:
        check_data(choice("stream", tmp_path, url=url))
    assert "key" not in str(caught.value).replace("without keys", "")


def test_indexing_that_was_cut_short_goes_on(place: Place, tmp_path: Path) -> None:
    said: list[str] = []
    url = f"{place.url}/train-{{000..006}}.tar"
    with pytest.raises(UserError, match="cannot be read"):  # there are six of them
        prepare_data("stream", tmp_path / "other", [], said.append, {"url": url})
    first = place.asked_for("train")
    shutil.copy(place.folder / "train-000.tar", place.folder / "train-006.tar")
    try:
        prepare_data("stream", tmp_path / "other", [], said.append, {"url": url})
    finally:
        (place.folder / "train-006.tar").unlink()
    again = place.asked_for("train") - first
    assert first.keys() - {"train-006.tar"} == {f"train-{at:03}.tar" for at in range(SHARDS)}
    assert again == {"train-006.tar": 1}


# An index that somebody else has written


def entry(**changes: Any) -> bytes:
    """The index of one shard, as `Piece.to_bytes` gives it, with some of it changed."""
    facts: dict[str, Any] = {"name": "train-0.tar", "size": 4096, "sha256": "0" * 64, "kept": 4096, "columns": None}
    about = ["jpg", "folder", False, {}, {"that are hidden": [2, "._0.jpg"]}]
    told = {"labels": ["cat"], "sides": [16], "about": about, "records": [(512, 100, 0, 0)]}
    shard = [changes.get(key, value) for key, value in facts.items()]
    labels, sides, about, records = (changes.get(key, value) for key, value in told.items())
    return json.dumps([shard, labels, sides, about]).encode() + b"\n" + numpy.array(records, RECORD).tobytes()


def test_an_index_of_ours_is_read_as_it_was_written() -> None:
    assert Piece.from_bytes(entry()).to_bytes() == entry()
    named = entry(name="data/train 0.parquet", kept=700, columns=["image", "label"])
    assert Piece.from_bytes(named).to_bytes() == named


ODD: dict[str, list[Any]] = {
    "name": ["/etc/passwd", "../x.tar", "a/../../x.tar", "a//x.tar", ".", "", "a\0b", 7, None],
    "sha256": ["/tmp/mine/a", "../../mine/a", "0" * 63, "G" * 64, "A" * 64, 7],
    "size": [-1, 1 << 36, 1.5, True, "4096"],
    "kept": [5000],
    "columns": [["image"], ["image", 7], 7, [["image"], "label"]],
    "labels": [[], ["cat", 7], "cat", [""] * 100_001],
    "sides": [[-1], ["16"], 16],
    "about": [["", "", True, {}, {}], ["", "", False, {"lost": 7}, {}], ["", "", False, {}, {"a": [-1, ""]}],
              ["", "", False, ["a"], {}]],
    # The second has no room for a header in front of it.
    "records": [[], [(0, 100, 0, 0)], [(4000, 100, 0, 0)], [((1 << 64) - 50, 100, 0, 0)], [(512, 100, 0, 1)],
                [(512, 100, 0, -1)]],
}  # fmt: skip
LARGE = {"records": [(512, (1 << 28) + 1, 0, 0)], "size": 1 << 30, "kept": 1 << 30}


@pytest.mark.parametrize("changes", [LARGE, *({name: odd} for name, odds in ODD.items() for odd in odds)],
                         ids=lambda changes: ascii(changes)[:60])  # fmt: skip
def test_an_index_that_nobody_writes_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Piece.from_bytes(entry(**changes))


def test_a_strangers_index_touches_no_file_of_the_users_and_asks_nobody(place: Place, tmp_path: Path) -> None:
    """The hash was a path of a file to be removed, and one of a lock to be made."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.shard").write_text("a thesis")
    (index_file,) = tmp_path.glob("stream/*/shards.index")
    write_index(index_file, [entry(sha256=str(tmp_path / "mine" / "a"))] * 2)
    for _ in range(2):
        with pytest.raises(UserError, match=r"shards\.index cannot be read"):
            build("stream", tmp_path, **options(place.url))
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["a.shard"]
    assert place.asked == []


def test_a_file_that_is_no_shard_is_not_quoted(tmp_path: Path) -> None:
    """A stranger's index may call any bytes an image that this user can read."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "key.tar").write_bytes(b"hunter2 " * 512)
    folder = _Source(tmp_path, str(tmp_path / "home"), None, None, 0.15).folder
    folder.mkdir(parents=True)
    records = [(512, 100, zlib.crc32((b"hunter2 " * 512)[512:612]), 0)]
    piece = entry(name="key.tar", records=records, labels=["cat", "dog"])
    write_index(folder / "shards.index", [piece, entry(name="val-0.tar", sha256="1" * 64)])
    data = build("stream", tmp_path, **options(str(tmp_path / "home")))
    with pytest.raises(UserError) as caught:
        data.train[0]
    assert "hunter2" not in str(caught.value)
    assert caught.value.file == "key.tar/image 0"  # type: ignore[attr-defined]


# What a shard may take of memory


def test_a_compressed_shard_is_refused_by_its_first_bytes(tmp_path: Path) -> None:
    """A megabyte of it makes a thousand."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        add(tar, {f"cat/{number}.jpg": bytes(20 << 20) for number in range(3)})
    content, taken = packed.getvalue(), list[int]()

    def blocks() -> Iterator[bytes]:
        for start in range(0, len(content), 1000):
            taken.append(start)
            yield content[start : start + 1000]

    with pytest.raises(UserError, match="It is compressed"):
        index("train-0.tar", blocks(), "here")
    assert taken == [0]


def test_no_image_of_a_tar_file_is_in_memory_as_a_whole() -> None:
    """Four shards are indexed at once, and in each an image may have 256 MB."""
    start, size = picture(0), 100 << 20

    def blocks() -> Iterator[bytes]:
        for number in range(2):
            member = tarfile.TarInfo(f"cat/{number}.png")
            member.size = size
            yield member.tobuf()
            yield start + bytes((1 << 20) - len(start))
            for _ in range((size >> 20) - 1):
                yield bytes(1 << 20)
        yield bytes(10240)

    tracemalloc.start()
    try:
        piece = index("train-0.tar", blocks(), "here")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert piece.records["size"].tolist() == [size] * 2
    assert piece.records["crc"].tolist() == [zlib.crc32(start + bytes(size - len(start)))] * 2
    assert piece.sides == [16, 16]
    assert peak < 40 << 20


def test_one_image_that_stands_for_many_rows_of_parquet_is_read_row_by_row(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as writer

    image = picture(0) + random.Random(0).randbytes(1000) * 4000
    table = pyarrow.table({"image": pyarrow.array([{"bytes": image, "path": "x"}] * 32), "label": [0] * 32})
    writer.write_table(table, tmp_path / "x.parquet", compression="zstd", dictionary_pagesize_limit=1 << 30)
    assert (tmp_path / "x.parquet").stat().st_size < 20_000
    del table
    before = pyarrow.total_allocated_bytes()
    count = most = 0
    with parquet.opened(tmp_path / "x.parquet", "x.parquet") as (_, rows):
        for data, _ in rows:
            assert data == image
            most = max(most, pyarrow.total_allocated_bytes() - before)
            count += 1
    assert count == 32
    assert most < 8 * len(image)


def test_parquet_whose_images_are_larger_than_the_index_says_fills_no_disk(
    place: Place, packed: Path, tmp_path: Path
) -> None:
    """The index may be a stranger's, and the server too."""
    indexed(packed, tmp_path, max_broken=8)
    (file,) = [file for file in tmp_path.glob("stream/*/shards.index") if packed.name in file.parent.name]
    lies = []
    for piece in read_index(file):
        shard = piece.shard._replace(kept=piece.shard.kept - 1)
        lies.append(piece._replace(shard=shard, records=piece.records[:-1]).to_bytes())
    write_index(file, lies)
    data = build("stream", tmp_path, **options(str(packed)), max_broken=8)
    with pytest.raises(UserError, match="differs from the indexed file"):
        data.train[0]
