from __future__ import annotations

from pathlib import Path

import pytest

from tests.rank_functions import run_ranks
from trainkit.config.schema import DataConfig
from trainkit.data import build_data
from trainkit.data.folders import Listing, Tree, class_folders, image_files
from trainkit.distributed.process_group import distributed
from trainkit.errors import RunFailedError, UserError
from trainkit.ranks.env import RankEnv


def fill(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_classes_are_the_visible_folders_in_order(tmp_path: Path) -> None:
    for name in ("b", "a", ".ipynb_checkpoints", "images-256.pack", "images-256.pack.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes.txt").touch()
    assert class_folders(tmp_path) == ["a", "b"]


def test_a_missing_folder_has_no_classes(tmp_path: Path) -> None:
    assert class_folders(tmp_path / "no") == []


def test_images_are_found_below_and_sorted(tmp_path: Path) -> None:
    fill(tmp_path, "2.JPEG", "1.png", "deep/0.jpg", ".hidden.jpg", "notes.txt", ".trash/9.jpg")
    assert image_files(tmp_path) == ["1.png", "2.JPEG", "deep/0.jpg"]


def test_a_listing_is_the_same_after_its_way_to_another_rank(tmp_path: Path) -> None:
    fill(tmp_path, "train/b/1.jpg", "train/b/0.jpg", "train/a/x/Grüße.png", "train/d/7.gif", "val/a/9.jpg")
    (tmp_path / "train" / "c").mkdir()
    walked = Listing.walk(tmp_path, ("train", "val", "test"))
    told = Listing.from_bytes(walked.to_bytes())
    assert told.splits == walked.splits == {
        "train": {"a": range(1), "b": range(1, 3), "c": range(3, 3), "d": range(3, 4)}, "val": {"a": range(4, 5)},
        "test": {},
    }  # fmt: skip
    files = ["train/a/x/Grüße.png", "train/b/0.jpg", "train/b/1.jpg", "train/d/7.gif", "val/a/9.jpg"]
    assert [str(Tree(tmp_path, told).path(position).relative_to(tmp_path)) for position in range(len(told))] == files
    assert [told.name(position) for position in (0, 4)] == ["x/Grüße.png", "9.jpg"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{}\nx.jpg\0", b'{"train": {"a": 2}}\nx.jpg\0', b'{"train": {"a": 1}}\n../../x.jpg\0', b"[1]\n",
     b'{"train": {"a": 1}}\n/etc/x.jpg\0', b'{"train": {"a": "x"}}\n'],
)  # fmt: skip
def test_a_damaged_listing_is_refused(content: bytes) -> None:
    with pytest.raises(RunFailedError, match="list of the data's files is damaged"):
        Listing.from_bytes(content)


def build_and_count(env: RankEnv, root: str) -> tuple[int, list[int], str]:
    """How often this rank walks; the sizes of the splits that it has; the error, if it gets one."""
    walks = 0
    walk = Listing.walk

    def counted(folder: Path, splits: tuple[str, ...]) -> Listing:
        nonlocal walks
        walks += 1
        return walk(folder, splits)

    with pytest.MonkeyPatch.context() as patch, distributed(env, use_gpu=False) as dist:
        patch.setattr(Listing, "walk", counted)
        try:
            made = build_data(DataConfig(name="image_folder", root=root if env.rank == 0 else root + "/."), dist)
        except UserError as error:
            return walks, [], error.what
    return walks, [len(split) for split in (made.train, made.val, made.test)], ""


def test_one_rank_walks_the_folders_for_all(tmp_path: Path) -> None:
    for number in range(3):
        fill(tmp_path, f"train/a/{number}.jpg", f"train/b/{number}.jpg", f"val/a/{number}.jpg")
    assert run_ranks(2, build_and_count, str(tmp_path)) == [(1, [6, 3, 3], ""), (0, [6, 3, 3], "")]


def test_what_is_wrong_with_the_data_is_said_on_all_ranks(tmp_path: Path) -> None:
    fill(tmp_path, "train/a/0.jpg", "train/b/x.txt")
    (_, _, one), (_, _, other) = run_ranks(2, build_and_count, str(tmp_path))
    assert one == other
    assert one.endswith("train/b holds no images.")
