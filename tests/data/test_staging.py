from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.rank_functions import run_ranks
from trainkit import fileio
from trainkit.config.loading import load
from trainkit.config.schema import DataConfig
from trainkit.data import build_data
from trainkit.data import pack as data_pack
from trainkit.data.datasets import image_folder
from trainkit.data.pack import Pack, scratch, stage, staged, staged_folder, write_pack
from trainkit.distributed.process_group import distributed
from trainkit.errors import UserError
from trainkit.ranks.env import RankEnv


@pytest.fixture
def pack(tmp_path: Path, write_images: Callable[..., None]) -> Pack:
    root = tmp_path / "images"
    for split in ("train", "val"):
        write_images(root / split, {"cat": 3, "dog": 3})
    return write_pack(
        root / "image_folder-8.pack", image_folder.where(root), 8, "raw", workers=1, say=lambda line: None
    )


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


@pytest.mark.parametrize(
    ("env", "found"),
    [({"SLURM_TMPDIR": "{}", "TMPDIR": "/"}, True), ({"TMPDIR": "{}"}, True), ({}, False), ({"TMPDIR": "/no"}, False)],
)
def test_the_nodes_disk_is_what_the_job_says(env: dict[str, str], found: bool, tmp_path: Path) -> None:
    assert scratch({key: value.format(tmp_path) for key, value in env.items()}) == (tmp_path if found else None)


def test_a_copy_is_the_pack(pack: Pack, disk: Path) -> None:
    assert stage(pack.folder, disk) == ""
    copy = Pack(staged_folder(pack.folder, disk))
    assert all(torch.equal(copy.read(position, 3), pack.read(position, 3)) for position in range(len(pack)))


def test_a_second_job_on_the_node_copies_nothing(pack: Pack, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage(pack.folder, disk)
    monkeypatch.setattr(fileio, "copy", None)
    assert stage(pack.folder, disk) == ""


def test_processes_of_several_jobs_copy_one_after_the_other(pack: Pack, disk: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    jobs = [context.Process(target=stage, args=(pack.folder, disk)) for _ in range(3)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert [job.exitcode for job in jobs] == [0, 0, 0]
    assert [found.suffix for found in sorted(disk.glob("*/*"))] == [".pack", ".lock"]
    assert Pack(staged_folder(pack.folder, disk)).verify() == []


def test_what_a_killed_job_has_left_is_no_copy(pack: Pack, disk: Path) -> None:
    final = staged_folder(pack.folder, disk)
    going = final.with_name(final.name + ".partial")
    going.mkdir(mode=0o700, parents=True)
    going.parent.chmod(0o700)
    (going / "images.bin").write_bytes(b"half")
    assert stage(pack.folder, disk) == ""
    assert not going.exists()
    (final / "images.bin").unlink()  # and somebody cleans up
    assert stage(pack.folder, disk) == ""
    assert Pack(final).verify() == []


def test_a_copy_of_an_older_pack_is_not_taken_for_the_new(pack: Pack, disk: Path) -> None:
    stage(pack.folder, disk)
    old = staged_folder(pack.folder, disk)
    about = pack.folder / "pack.json"
    about.write_text(about.read_text() + " ")
    assert stage(pack.folder, disk) == ""
    assert staged_folder(pack.folder, disk) != old


def test_a_disk_without_room_is_left_alone(pack: Pack, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_pack, "free_bytes", lambda disk: 1000)
    assert "0.0 GB left" in stage(pack.folder, disk)
    assert not staged_folder(pack.folder, disk).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user")
def test_a_copy_that_another_user_has_laid_out_is_never_read(pack: Pack, disk: Path) -> None:
    disk.chmod(0o1777)
    final = staged_folder(pack.folder, disk)
    shutil.copytree(pack.folder, final)
    poisoned = bytearray((final / "images.bin").read_bytes())
    poisoned[5] ^= 1
    (final / "images.bin").write_bytes(poisoned)
    final.parent.chmod(0o700)
    for path in (final.parent, final, *final.iterdir()):
        os.chown(path, 65534, 65534)
    assert "not this user's alone" in stage(pack.folder, disk)
    assert staged(pack.folder, disk) is None


@pytest.mark.parametrize("spoil", ["link", "open folder", "disk without sticky bit"])
def test_no_copy_is_made_where_others_get_at_it(spoil: str, pack: Pack, disk: Path, tmp_path: Path) -> None:
    own = staged_folder(pack.folder, disk).parent
    if spoil == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        own.symlink_to(tmp_path / "elsewhere")
    elif spoil == "open folder":
        own.mkdir()
        own.chmod(0o770)
    else:
        disk.chmod(0o777)
    assert "not this user's alone" in stage(pack.folder, disk)
    assert staged(pack.folder, disk) is None
    assert not list(disk.glob("*/*"))


def test_a_damaged_pack_is_not_staged(pack: Pack, disk: Path) -> None:
    content = bytearray((pack.folder / "images.bin").read_bytes())
    content[5] ^= 1
    (pack.folder / "images.bin").write_bytes(content)
    with pytest.raises(UserError, match=r"damaged[\s\S]*train/cat/000\.jpg"):
        stage(pack.folder, disk)
    assert [found.suffix for found in disk.glob("*/*")] == [".lock"]


def test_staging_what_is_no_pack_is_refused_when_the_settings_are_loaded() -> None:
    with pytest.raises(UserError, match=r"data\.stage=true without data\.pack"):
        load("single", ["data.stage=true"])


def read_staged(env: RankEnv, root: str, disk: str, stage: bool | str) -> str:
    """The folder that this rank reads, or the error that it gets."""
    with pytest.MonkeyPatch.context() as patch, distributed(env, use_gpu=False) as dist:
        patch.setenv("SLURM_TMPDIR", disk) if disk else patch.delenv("SLURM_TMPDIR", raising=False)
        patch.delenv("TMPDIR", raising=False)
        settings = {"name": "image_folder", "root": root, "pack": 8, "stage": stage, "image_size": 8}
        try:
            made = build_data(DataConfig.model_validate(settings), dist)
        except UserError as error:
            return f"{error.what} {error.why}"
        made.train[0]
        return str(made.train.files.folder)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("stage", "is_there"), [(True, True), ("auto", True), ("auto", False), (True, False)])
def test_all_ranks_of_a_node_read_its_copy_or_none_does(
    pack: Pack, disk: Path, stage: bool | str, is_there: bool
) -> None:
    one, other = run_ranks(2, read_staged, str(pack.folder.parent), str(disk) if is_there else "", stage)
    assert one == other
    if is_there:
        assert one == str(staged_folder(pack.folder, disk))
    elif stage == "auto":
        assert one == str(pack.folder)
    else:
        assert "cannot be copied to this node. Neither SLURM_TMPDIR nor TMPDIR" in one
