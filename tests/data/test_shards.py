"""Shards that lie elsewhere: the images of a folder, in an order of their own, fetched once, whatever goes wrong."""

import fcntl
import gzip
import importlib.util
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from tests.checkpoint.conftest import Trouble
from tests.data.samples import build, choice, hub
from tests.rank_functions import run_ranks
from tests.runs import wait_until
from tests.shell import python
from trainkit.config.loading import load
from trainkit.data import build_data, cache, check_data, guessed, prepare_data, train_size
from trainkit.data.base import Splits
from trainkit.data.folders import BrokenImages
from trainkit.data.loader import eval_batches, train_batches
from trainkit.data.shards import ShardImages, index
from trainkit.distributed.process_group import distributed
from trainkit.errors import RunFailedError, UserError
from trainkit.ranks import RankEnv
from trainkit.start import check
from trainkit.store import Store

CLASSES = ("cat", "dog", "emu")
PER_SHARD, SHARDS = 10, 6


class Place(ThreadingHTTPServer):
    """A web server that has the files of a folder; it may be slow, be away, cut its answers and lie."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.asked: list[str] = []
        """Names of the files whose content was asked for."""
        self.seconds = 0.0
        self.trouble: Callable[[bytes], bytes | None] = lambda content: content
        """What becomes of an answer; None: it is broken off."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def asked_for(self, split: str) -> Counter[str]:
        return Counter(name for name in self.asked if name.startswith(split))


class _Handler(BaseHTTPRequestHandler):
    server: Place

    def log_message(self, *words: Any) -> None:
        pass

    def _answer(self, code: int, content: bytes, length: int | None = None) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)

    def do_HEAD(self) -> None:
        file = self.server.folder / self.path.lstrip("/")
        self._answer(200, b"", file.stat().st_size) if file.is_file() else self._answer(404, b"")

    def do_GET(self) -> None:
        name, server = self.path.lstrip("/"), self.server
        if not name:
            links = "".join(f'<a href="{file.name}">x</a>' for file in sorted(server.folder.iterdir()))
            self._answer(200, links.encode())
            return
        server.asked.append(name)
        time.sleep(server.seconds)
        if not (server.folder / name).is_file():
            self._answer(404, b"")
            return
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
        assert found is not None
        content = (server.folder / name).read_bytes()[int(found[1]) : int(found[2]) + 1]
        told = server.trouble(content)
        if told is None:  # half of it, and no more
            self._answer(206, content[: len(content) // 2], len(content))
            self.connection.close()
            return
        self._answer(206, told) if told else self._answer(503, b"")


def write_shard(file: Path, members: dict[str, bytes]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file


def picture(number: int) -> bytes:
    out = io.BytesIO()
    pixels = numpy.random.default_rng(number).integers(0, 255, (16, 16, 3), dtype=numpy.uint8)
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six shards to train on and two to validate on, beside them the same images as a folder."""
    folder = tmp_path_factory.mktemp("shards")
    for split, count in (("train", SHARDS), ("val", 2)):
        for shard in range(count):
            members: dict[str, bytes] = {}
            for number in range(shard * PER_SHARD, (shard + 1) * PER_SHARD):
                label, content = CLASSES[number % 3], picture(number + 1000 * (split == "val"))
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
        prepare_data("stream", tmp_path, [], lambda line: None, {"url": server.url})
        server.asked.clear()
        yield server
        server.shutdown()


def options(url: str, **more: Any) -> dict[str, Any]:
    return {"url": url, "image_size": 16, "augment": False, "shuffle_block": 2, "patience": 20.0, **more}


def read(data: Splits, start: int = 0, stop: int = 15, *, rank: int = 0, ranks: int = 1, **more: Any) -> list[Any]:
    """Images and labels of the batches of 12 from ``start`` to ``stop``, five an epoch."""
    how: dict[str, Any] = {"global_batch_size": 12, "micro_batch_size": 12 // ranks, "workers": 0, **more}
    with train_batches(data, seed=5, start_step=start, stop_step=stop, rank=rank, world_size=ranks, **how) as batches:
        return [(batch.images.clone(), batch.labels.tolist()) for batch in batches]


def same(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(
        torch.equal(images, others) and labels == named
        for (images, labels), (others, named) in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_the_images_in_a_folder_in_the_same_order(
    shards: Path, place: Place, tmp_path: Path, workers: int
) -> None:
    far = build("stream", tmp_path, **options(place.url))
    near = build("image_folder", shards / "same", image_size=16, augment=False)
    assert far.info.class_names == near.info.class_names == CLASSES
    order = {number: at for at, number in enumerate(sorted(range(60), key=lambda number: (number % 3, number)))}
    assert isinstance(far.train, ShardImages)
    taken = [order[number] for epoch in range(3) for number in far.train.order(5, epoch).tolist()]
    images = [near.eval_transform(near.train[at][0]) for at in taken]
    read_now = read(far, workers=workers)
    assert torch.equal(torch.cat([found for found, _ in read_now]), torch.stack(images))
    assert [label for _, labels in read_now for label in labels] == [near.train[at][1] for at in taken]
    with eval_batches(far.val, far.eval_transform, batch_size=8, rank=0, world_size=1, workers=workers) as batches:
        assert sum(int(batch.mask.sum()) for batch in batches) == 20


def test_an_epoch_has_each_sample_once_and_few_shards_at_a_time(place: Place, tmp_path: Path) -> None:
    train = build("stream", tmp_path, **options(place.url)).train
    assert isinstance(train, ShardImages)
    first, second = train.order(5, 0).tolist(), train.order(5, 1).tolist()
    assert sorted(first) == sorted(second) == list(range(60))
    assert first != second
    assert first == train.order(5, 0).tolist()
    for at in range(0, 60, 20):
        block = first[at : at + 20]
        assert len({train.shard_of(index) for index in block}) == 2
        assert block != sorted(block)


def test_a_shard_is_fetched_once_while_there_is_room(place: Place, tmp_path: Path) -> None:
    read(build("stream", tmp_path, **options(place.url)), workers=2)
    assert place.asked_for("train") == {f"train-{at:03}.tar": 1 for at in range(SHARDS)}


def test_a_run_that_goes_on_reads_only_what_is_to_come(shards: Path, place: Place, tmp_path: Path) -> None:
    here = shards / "tars"
    whole = read(build("stream", _indexed(here, tmp_path), **options(str(here))), 0, 5)
    data = build("stream", tmp_path, **options(place.url))
    assert same(read(data, 4, 5), whole[4:])
    assert isinstance(data.train, ShardImages)
    last = data.train.blocks(5, 0)[-1]
    assert place.asked_for("train") == {data.train.shards[at].name: 1 for at in last}


def _read_on_rank(env: RankEnv, root: str, url: str) -> None:
    with distributed(env, use_gpu=False) as dist:
        data = build_data(choice("stream", root, **options(url)), dist)
        torch.save(read(data, rank=dist.rank, ranks=2), f"{root}/rank-{dist.rank}.pt")


def test_two_ranks_see_what_one_sees_and_fetch_no_shard_twice(place: Place, tmp_path: Path) -> None:
    run_ranks(2, _read_on_rank, str(tmp_path), place.url)
    assert place.asked_for("train") == {f"train-{at:03}.tar": 1 for at in range(SHARDS)}
    alone = read(build("stream", tmp_path, **options(place.url)))
    both = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1)]
    joined = [
        (torch.cat([mine, other]), labels + others) for (mine, labels), (other, others) in zip(*both, strict=True)
    ]
    assert same(joined, alone)


def test_there_may_be_more_ranks_than_shards(place: Place, tmp_path: Path) -> None:
    url = f"{place.url}/train-{{000..002}}.tar"
    prepare_data("stream", tmp_path, [], lambda line: None, {"url": url})
    data = build("stream", tmp_path, **options(url))
    assert isinstance(data.train, ShardImages)
    assert len(data.train.shards) == 2
    parts = [read(data, rank=rank, ranks=3) for rank in range(3)]
    joined = [
        (torch.cat([images for images, _ in step]), [label for _, labels in step for label in labels])
        for step in zip(*parts, strict=True)
    ]
    assert same(joined, read(data))


def test_shards_take_no_more_room_than_they_may(place: Place, shards: Path, tmp_path: Path) -> None:
    near = _indexed(shards / "tars", tmp_path / "near")
    whole = read(build("stream", near, **options(str(shards / "tars"), shuffle_block=1)))
    limit = 3 * max(file.stat().st_size for file in (shards / "tars").iterdir())
    data = build("stream", tmp_path, **options(place.url, shuffle_block=1, cache_gb=limit / 1e9))
    assert isinstance(data.train, ShardImages)
    folder, most, over = data.train.cache.folder, 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not over.is_set():
            with suppress(FileNotFoundError), (folder / "room.lock").open("ab") as room:
                fcntl.flock(room, fcntl.LOCK_EX)  # or one that goes would be counted beside the one that comes
                most = max(most, sum((folder / name).stat().st_size for name in os.listdir(folder) if ".shard" in name))

    watch = threading.Thread(target=look)
    watch.start()
    try:
        assert same(read(data), whole)
    finally:
        over.set()
        watch.join()
    assert limit / 2 < most <= limit
    with pytest.raises(UserError, match=r"data\.cache_gb=.* is too little"):
        build("stream", tmp_path, **options(place.url, cache_gb=limit / 1e9))


def test_a_shard_that_becomes_whole_while_room_is_made_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    kept = cache.Cache("http://host", 25, 1.0, unpacks=False)
    partial, whole = kept.folder / ".partial-1-abc.shard", kept.folder / "abc.shard"
    partial.write_bytes(bytes(20))
    listed = os.listdir

    def then_named(folder: Path) -> list[str]:
        names = listed(folder)
        with suppress(FileNotFoundError):
            partial.rename(whole)
        return names

    monkeypatch.setattr(os, "listdir", then_named)
    kept._make_room(20)
    assert not whole.exists()


def cut(content: bytes) -> None:
    return None


def away(content: bytes) -> bytes:
    return b""


def lie(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def stop_short(content: bytes) -> bytes:
    return content[:-100]


def go_on(content: bytes) -> bytes:
    return content + b"more"


@pytest.mark.parametrize("trouble", [cut, away, lie, stop_short, go_on], ids=lambda trouble: trouble.__name__)
def test_what_comes_wrong_is_fetched_again(
    shards: Path, place: Place, tmp_path: Path, trouble: Callable[[bytes], bytes | None]
) -> None:
    data = build("stream", tmp_path, **options(place.url))
    near = build("stream", _indexed(shards / "tars", tmp_path / "near"), **options(str(shards / "tars")))
    left = iter(range(2))
    place.trouble = lambda content: content if next(left, None) is None else trouble(content)
    assert same(read(data, 0, 5), read(near, 0, 5))


def _indexed(shards: Path, root: Path, **columns: str) -> Path:
    prepare_data("stream", root, [], lambda line: None, {"url": str(shards), **columns})
    return root


@pytest.mark.parametrize("trouble", [lie, stop_short, go_on], ids=lambda trouble: trouble.__name__)
def test_a_shard_that_stays_wrong_is_named(
    place: Place, tmp_path: Path, trouble: Callable[[bytes], bytes | None]
) -> None:
    data = build("stream", tmp_path, **options(place.url))
    place.trouble = trouble
    with pytest.raises(UserError, match=r"/train-00\d\.tar is not what was indexed"):
        read(data, 0, 5)


def test_a_store_that_is_away_is_waited_for_and_said_then_given_up(
    place: Place, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = build("stream", tmp_path, **options(place.url, patience=2.0))
    tells: list[dict[str, Any]] = []
    data.train.cache.tell = lambda **told: tells.append(told)  # type: ignore[attr-defined]
    place.trouble = away
    for _ in ("the run", "the run that goes on at once"):
        with pytest.raises(RunFailedError, match=r"/train-00\d\.tar does not come") as caught:
            read(data, 0, 5)
        assert "503" in caught.value.why
        said = re.findall(r"Training waits for http://.*/train-00\d\.tar since .*", capfd.readouterr().err)
        assert len(said) == 1
        assert [told.keys() for told in tells] == [{"file", "seconds", "why"}]
        tells.clear()


@pytest.mark.parametrize("workers", [0, 1])
def test_what_was_waited_for_is_noted_for_the_events(place: Place, tmp_path: Path, workers: int) -> None:
    data, broken = build("stream", tmp_path, **options(place.url)), BrokenImages()
    until = time.monotonic() + 1.0
    place.trouble = lambda content: content if time.monotonic() > until else b""
    read(data, 0, 5, broken=broken, workers=workers)
    assert set(broken.waited) <= {f"{place.url}/train-{at:03}.tar" for at in range(SHARDS)}
    assert max(broken.waited.values()) >= 0.3


def test_a_store_that_is_slow_is_none_that_is_away(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = build("stream", tmp_path, **options(place.url, patience=5.0))
    monkeypatch.setattr("trainkit.store._PART", 4 << 10)  # a shard comes in eight, longer than patience lasts
    place.seconds = 0.8
    assert len(read(data, 0, 2)) == 2


def test_a_damaged_copy_on_the_disk_is_fetched_again(place: Place, tmp_path: Path) -> None:
    data = build("stream", tmp_path, **options(place.url))
    whole = read(data, 0, 5)
    assert isinstance(data.train, ShardImages)
    for file in data.train.cache.folder.glob("*.shard"):
        file.write_bytes(bytes(file.stat().st_size))
    assert same(read(data, 0, 5), whole)


_FETCHING = """
import sys
from trainkit.data.cache import Cache, Shard
size = int(sys.argv[3])
Cache(sys.argv[1], 1 << 30, 60.0, unpacks=False).fetch(Shard(sys.argv[2], size, sys.argv[4], size))
"""


def test_a_process_that_is_killed_while_it_fetches_leaves_nothing_broken(place: Place, tmp_path: Path) -> None:
    data = build("stream", tmp_path, **options(place.url))
    assert isinstance(data.train, ShardImages)
    shard, folder = data.train.shards[0], data.train.cache.folder
    place.seconds = 60.0
    words = [sys.executable, "-c", _FETCHING, place.url, shard.name, str(shard.size), shard.sha256]
    with subprocess.Popen(words) as process:
        wait_until(lambda: any(folder.glob(".partial-*")))
        process.send_signal(signal.SIGKILL)
    place.seconds = 0.0
    assert len(read(data)) == 15
    assert not any(folder.glob(".partial-*"))


# What a stranger's shard may hold


def indexed(members: dict[str, bytes], tmp_path: Path) -> Any:
    content = write_shard(tmp_path / "x.tar", members).read_bytes()
    return index("x.tar", iter([content]), "x.tar")


def test_a_class_is_a_member_or_a_folder_and_other_members_are_left_out(tmp_path: Path) -> None:
    piece = indexed(
        {"a/1.png": b"png", "a/1.json": b"{}", "2.jpg": b"jpg", "2.cls": b" 7\n", "b/._3.png": b"", "b/4.seg.png": b"4",
         "b/4.png": b"no"}, tmp_path,
    )  # fmt: skip
    assert piece.labels == ["a", "7", "b"]
    assert piece.records["size"].tolist() == [3, 3, 1]


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"1.png": b"x"}, "has no class"), ({"readme.txt": b"x"}, "no image in it"), ({}, "no image in it"),
        ({"a/1.cls": b"x" * 300}, "has 300 bytes"),
    ],
)  # fmt: skip
def test_a_shard_without_images_of_classes_is_refused(members: dict[str, bytes], says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says):
        indexed(members, tmp_path)


def test_compressed_or_cut_or_random_bytes_are_no_shard(tmp_path: Path) -> None:
    content = write_shard(tmp_path / "x.tar", {"a/1.png": picture(1)}).read_bytes()
    with pytest.raises(UserError, match="It is compressed"):
        index("x.tar", iter([gzip.compress(content)]), "x.tar")
    with pytest.raises(UserError, match="cannot be read as a tar archive"):
        index("x.tar", iter([content[:700]]), "x.tar")
    with pytest.raises(UserError, match=r"cannot be read as a tar archive|no image in it"):
        index("x.tar", iter([random.Random(0).randbytes(5000)]), "x.tar")


def test_a_broken_image_is_named_by_its_shard_and_may_be_skipped(tmp_path: Path) -> None:
    for name in ("train-0", "val-0"):
        images = {f"{label}/{at}.png": picture(at) for at in range(8) for label in CLASSES[:2]}
        write_shard(tmp_path / "tars" / f"{name}.tar", {**images, "cat/5.png": b"no image"})
    root = _indexed(tmp_path / "tars", tmp_path / "data")
    data = build("stream", root, **options(str(tmp_path / "tars")))
    with pytest.raises(UserError, match="Cannot decode the image"):
        read(data, 0, 1, global_batch_size=16, micro_batch_size=16)
    broken = BrokenImages(1)
    read(data, 0, 1, global_batch_size=16, micro_batch_size=16, broken=broken)
    assert set(broken.met) == {"train-0.tar/cat/5.png"}


# Parquet


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


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_parquet_are_those_of_tar_files(
    shards: Path, place: Place, packed: Path, tmp_path: Path, workers: int
) -> None:
    from_tar = read(build("stream", _indexed(shards / "tars", tmp_path), **options(str(shards / "tars"))))
    place.folder = packed
    index_of = tmp_path / "other"
    prepare_data("stream", index_of, [], lambda line: None, {"url": f"{place.url}/"})
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
    root = _indexed(packed, tmp_path / "data")
    assert train_size(choice("stream", root, url=str(packed))) == 60
    data = build("stream", root, **options(str(packed)))
    assert same(read(data, 2, 9), read(build("stream", tmp_path, **options(place.url)), 2, 9))


def test_a_broken_image_of_parquet_is_named_by_its_number(packed: Path, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), importlib.import_module("pyarrow.parquet")
    for name in ("train-0", "val-0"):
        rows = [{"photo": b"none" if at == 5 else picture(at), "kind": f"{at % 2}"} for at in range(16)]
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    with pytest.raises(UserError, match=r"train-0\.parquet has no column of labels"):
        _indexed(tmp_path, tmp_path / "data")
    columns = {"image": "photo", "label": "kind"}
    root = _indexed(tmp_path, tmp_path / "data", **columns)
    data, broken = build("stream", root, **options(str(tmp_path), **columns)), BrokenImages(1)
    read(data, 0, 1, global_batch_size=16, micro_batch_size=16, broken=broken)
    assert set(broken.met) == {"train-0.parquet/image 5"}


@pytest.mark.parametrize("content", [b"", b"PAR1 torn", random.Random(0).randbytes(500)])
def test_a_torn_file_is_no_parquet(packed: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "train-0.parquet").write_bytes(content)
    with pytest.raises(UserError, match=r"train-0\.parquet is no parquet file of images"):
        _indexed(tmp_path, tmp_path / "data")


# Kinds of stores


def test_shards_of_a_bucket_are_those_of_a_folder(
    shards: Path, place: Place, bucket: tuple[str, Trouble], tmp_path: Path
) -> None:
    here, (url, trouble) = shards / "tars", bucket
    from_folder = read(build("stream", _indexed(here, tmp_path), **options(str(here))))
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
from tests.data.test_shards import build, options, prepare_data, read
import torch
root, url = Path(sys.argv[1]), "hf://datasets/me/pets/data"
prepare_data("stream", root, [], print, {"url": url})
torch.save(read(build("stream", root, **options(url)), 2, 9), root / "read.pt")
"""


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
    data = build("stream", _indexed(packed, tmp_path / "near"), **options(str(packed)))
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


@pytest.mark.parametrize("url", ["https://me:key@host/x", "s3://b/x?key=1", "ftp://host/x"])
def test_a_url_with_a_key_or_of_no_known_kind_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.url is no place of shards") as caught:
        check_data(choice("stream", tmp_path, url=url))
    assert "key" not in str(caught.value).replace("without keys", "")


def test_a_pattern_names_shards_where_a_folder_cannot_be_listed(place: Place, tmp_path: Path) -> None:
    url = f"{place.url}/train-{{000..004}}.tar"
    prepare_data("stream", tmp_path, [], lambda line: None, {"url": url})
    config = choice("stream", tmp_path, **options(url))
    assert train_size(config) == 40, "of five shards one is held out"
    assert len(build_data(config).val) == 10


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


def test_a_number_beside_a_number_is_a_class_by_its_number(tmp_path: Path) -> None:
    for name, labels in (("train-0", (0, 3, 10)), ("val-0", (3,))):
        members = {f"{label}.{end}": picture(label) if end == "png" else str(label).encode()
                   for label in labels for end in ("png", "cls")}  # fmt: skip
        write_shard(tmp_path / "tars" / f"{name}.tar", members)
    data = build("stream", _indexed(tmp_path / "tars", tmp_path), **options(str(tmp_path / "tars")))
    assert data.info.num_classes == 11
    assert [data.train[at][1] for at in range(3)] == [0, 3, 10]


def test_a_folder_that_others_get_at_keeps_no_shards(place: Place, tmp_path: Path) -> None:
    (tmp_path / f"trainkit-{os.geteuid()}").mkdir(mode=0o777)
    (tmp_path / f"trainkit-{os.geteuid()}").chmod(0o777)
    with pytest.raises(UserError, match="is not yours alone"):
        build("stream", tmp_path, **options(place.url))
