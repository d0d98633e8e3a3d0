"""Shards that lie elsewhere: fetched once, in an order of their own, whatever goes wrong."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.samples import build, choice
from tests.data.shards import CLASSES, SHARDS, Place, indexed, joined, options, read, same
from tests.rank_functions import run_ranks
from tests.runs import wait_until
from trainkit.cluster.ranks import RankEnv
from trainkit.common.errors import RunFailedError, UserError
from trainkit.data import cache
from trainkit.data.loader import Loading, eval_batches
from trainkit.data.losses import BrokenImages
from trainkit.data.registry import build_data, train_size
from trainkit.data.shards import ShardImages
from trainkit.distributed.process_group import distributed


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
    assert place.asked_for("train") == {f"train-{at:03}.tar": 1 for at in range(SHARDS)}
    with eval_batches(far.val, far.eval_transform, Loading(workers=workers), batch_size=8) as batches:
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


def test_a_run_that_goes_on_reads_only_what_is_to_come(shards: Path, place: Place, tmp_path: Path) -> None:
    here = shards / "tars"
    whole = read(build("stream", indexed(here, tmp_path), **options(str(here))), 0, 5)
    data = build("stream", tmp_path, **options(place.url))
    assert same(read(data, 4, 5), whole[4:])
    assert isinstance(data.train, ShardImages)
    last = data.train.blocks(5, 0)[-1]
    assert place.asked_for("train") == {data.train.shards[at].name: 1 for at in last}


def _read_on_rank(env: RankEnv, root: str, url: str) -> None:
    with distributed(env, use_gpu=False) as dist:
        data = build_data(choice("stream", root, **options(url)), dist)
        torch.save(read(data, rank=dist.rank, ranks=2), f"{root}/rank-{dist.rank}.pt")


@pytest.mark.nightly
def test_two_ranks_see_what_one_sees_and_fetch_no_shard_twice(place: Place, tmp_path: Path) -> None:
    run_ranks(2, _read_on_rank, str(tmp_path), place.url)
    assert place.asked_for("train") == {f"train-{at:03}.tar": 1 for at in range(SHARDS)}
    alone = read(build("stream", tmp_path, **options(place.url)))
    assert same(joined([torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1)]), alone)


def test_there_may_be_more_ranks_than_shards(place: Place, tmp_path: Path) -> None:
    url = f"{place.url}/train-{{000..002}}.tar"
    data = build("stream", indexed(url, tmp_path), **options(url))
    assert isinstance(data.train, ShardImages)
    assert (len(data.train.shards), train_size(choice("stream", tmp_path, **options(url)))) == (2, 20), "one is val"
    assert same(joined([read(data, rank=rank, ranks=3) for rank in range(3)]), read(data))


def test_shards_take_no_more_room_than_they_may(place: Place, shards: Path, tmp_path: Path) -> None:
    near = indexed(shards / "tars", tmp_path / "near")
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
    near = build("stream", indexed(shards / "tars", tmp_path / "near"), **options(str(shards / "tars")))
    left = iter(range(2))
    place.trouble = lambda content: content if next(left, None) is None else trouble(content)
    assert same(read(data, 0, 5), read(near, 0, 5))


@pytest.mark.parametrize("trouble", [lie, stop_short, go_on], ids=lambda trouble: trouble.__name__)
def test_a_shard_that_stays_wrong_is_named(
    place: Place, tmp_path: Path, trouble: Callable[[bytes], bytes | None]
) -> None:
    data = build("stream", tmp_path, **options(place.url))
    place.trouble = trouble
    with pytest.raises(UserError, match=r"/train-00\d\.tar differs from the indexed file"):
        read(data, 0, 5)


def test_a_store_that_is_away_is_waited_for_and_said_then_given_up(
    place: Place, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = build("stream", tmp_path, **options(place.url, patience=2.0))
    tells: list[dict[str, Any]] = []
    data.train.cache.tell = lambda **told: tells.append(told)  # type: ignore[attr-defined]
    place.trouble = away
    for _ in ("the run", "the run that goes on at once"):
        with pytest.raises(RunFailedError, match=r"/train-00\d\.tar does not arrive") as caught:
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
    monkeypatch.setattr("trainkit.common.object_store._PART", 4 << 10)  # a shard in eight, longer than patience
    place.seconds = 0.8
    assert len(read(data, 0, 2)) == 2


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


def test_a_folder_that_others_get_at_keeps_no_shards(place: Place, tmp_path: Path) -> None:
    (tmp_path / f"trainkit-{os.geteuid()}").mkdir(mode=0o777)
    (tmp_path / f"trainkit-{os.geteuid()}").chmod(0o777)
    with pytest.raises(UserError, match="can be written by others"):
        build("stream", tmp_path, **options(place.url))
