from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from jobs import prepare
from trainkit.config.schema import DataConfig
from trainkit.data import build_data, check_data, pack_data
from trainkit.data import pack as data_pack
from trainkit.data.datasets import image_folder
from trainkit.data.folders import Broken, BrokenImageError, read_content, read_image
from trainkit.data.loader import train_batches
from trainkit.data.pack import Kind, Pack, write_pack
from trainkit.errors import RunFailedError, UserError


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    coarse = numpy.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=numpy.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Photos of several shapes and kinds, one of which is broken."""
    root = tmp_path / "images"
    for label, name in enumerate(("cat", "dog")):
        (root / "train" / name).mkdir(parents=True)
        (root / "val" / name).mkdir(parents=True)
        for number in range(4):
            photo(120 + 10 * number, 200, label * 10 + number).save(root / "train" / name / f"{number}.jpg", quality=95)
        photo(80, 64, label).save(root / "val" / name / "0.jpg")
        photo(40, 50, label).save(root / "val" / name / "1.png")
    (root / "train" / "dog" / "2.jpg").write_bytes(b"nothing")
    return root


def pack(root: Path, kind: Kind = "jpeg", *, side: int = 64, workers: int = 1) -> Pack:
    place = image_folder.where(root)
    return write_pack(root / f"image_folder-{side}.pack", place, side, kind, workers=workers, say=lambda line: None)


def config(root: Path, **more: object) -> DataConfig:
    return DataConfig.model_validate({"name": "image_folder", "root": str(root), "pack": 64, "image_size": 56, **more})


@pytest.mark.parametrize(("kind", "least"), [("jpeg", 30), ("raw", 1e9)])
def test_a_packed_photo_is_the_photo_with_its_shorter_side_resized(root: Path, kind: Kind, least: float) -> None:
    packed = pack(root, kind)
    for name, found in packed.splits["train"].items():
        for position in found:
            if (name, packed.name(position)) == ("dog", "2.jpg"):
                continue
            picture = Image.open(root / "train" / name / packed.name(position)).convert("RGB")
            width, height = 64 * picture.width // picture.height, 64
            resized = picture.resize((width, height), Image.Resampling.BILINEAR)
            expected = torch.from_numpy(numpy.array(resized)).permute(2, 0, 1).double()
            error = (packed.read(position, 3).double() - expected).square().mean().item()
            assert 10 * numpy.log10(255**2 / max(error, 1e-10)) > least or error == 0


def test_what_is_small_already_stays_as_it_is(root: Path) -> None:
    packed = pack(root)
    for name, found in packed.splits["val"].items():
        for position in found:
            whole = read_image(root / "val" / name / packed.name(position), 3)
            assert torch.equal(packed.read(position, 3), whole)


def test_training_on_a_pack_sees_the_same_images_in_the_same_order(root: Path) -> None:
    pack(root, "raw", side=4096)
    names = {"augment": True, "image_size": 32, "max_broken": 1}
    one, other = build_data(config(root, **names, pack=4096)), build_data(config(root, **names, pack=None))
    batches = []
    for data in (one, other):
        with train_batches(data, seed=3, start_step=1, stop_step=5, global_batch_size=4, micro_batch_size=4, rank=0,
                           world_size=1, workers=0, broken=Broken(1)) as found:  # fmt: skip
            batches.append(list(found))
    for (images, labels, keys), (images_too, labels_too, keys_too) in zip(*batches, strict=True):
        assert torch.equal(images, images_too)
        assert torch.equal(labels, labels_too)
        assert torch.equal(keys, keys_too)


def test_an_image_that_was_broken_when_it_was_packed_is_one_in_training(root: Path) -> None:
    packed = pack(root)
    assert packed.verify() == ["train/dog/2.jpg"]
    with pytest.raises(BrokenImageError, match=r"train/dog/2\.jpg"):
        packed.read(packed.splits["train"]["dog"][2], 3)


def test_a_pack_is_read_by_workers_that_are_not_forked(root: Path) -> None:
    packed = pack(root)
    again = pickle.loads(pickle.dumps(packed))
    assert torch.equal(again.read(0, 1), packed.read(0, 1))
    assert again.read(0, 1).shape[0] == 1


@pytest.mark.parametrize("file", ["index.bin", "files.bin", "pack.json", "images.bin"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_pack_is_named(root: Path, file: str, damage: str) -> None:
    path = pack(root).folder / file
    path.unlink() if damage == "gone" else path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match=r"(The pack|There is no pack) .*image_folder-64\.pack"):
        build_data(config(root))


def test_a_bit_that_flipped_is_found_by_reading_and_by_preparing_again(root: Path) -> None:
    packed = pack(root)
    content = bytearray((packed.folder / "images.bin").read_bytes())
    content[100] ^= 1
    (packed.folder / "images.bin").write_bytes(content)
    with pytest.raises(UserError, match=r"pack .*image_folder-64\.pack is damaged[\s\S]*train/cat/0\.jpg"):
        Pack(packed.folder).read(0, 3)
    with pytest.raises(UserError, match=r"is damaged[\s\S]*train/cat/0\.jpg"):
        pack_data("image_folder", root, 64, "jpeg", workers=1, say=lambda line: None)


def test_the_command_packs_and_a_second_call_verifies(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["image_folder", "--root", str(root), "--pack", "64", "--workers", "2"]
    assert [prepare.main(command, {}), prepare.main(command, {})] == [0, 0]
    out, err = capsys.readouterr()
    assert out.count("image_folder-64.pack is complete and verified.") == 2
    assert "data.pack=64" in out
    assert "1 images are broken, which data.max_broken=1 lets pass: train/dog/2.jpg" in err
    assert len(build_data(config(root)).train) == 8


def test_who_is_deaf_to_sigterm_packs_as_well(root: Path) -> None:
    """`multiprocessing.Pool` would wait for ever for workers that have inherited it: they are ended by that signal."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for side in (40, 41, 42):
        assert len(pack(root, side=side, workers=2).verify()) == 1


def test_a_worker_that_is_killed_is_said_and_the_next_call_goes_on(
    root: Path, monkeypatch: pytest.MonkeyPatch, write_images: Callable[..., None]
) -> None:
    write_images(root / "train", {"cat": 60, "dog": 60}, size=(90, 90))

    def killed(path: Path) -> Any:
        if path.name == "050.jpg":
            os.kill(os.getpid(), signal.SIGKILL)
        return read_content(path)

    with monkeypatch.context() as patch:
        patch.setattr(data_pack, "read_content", killed)
        with pytest.raises(RunFailedError, match=r"A process that packs images was killed[\s\S]*fewer --workers"):
            pack(root, workers=2)
    assert len(pack(root, workers=2).splits["train"]) == 2


def test_other_files_than_before_are_no_longer_that_pack(root: Path) -> None:
    pack(root)
    (root / "train" / "cat" / "9.jpg").write_bytes((root / "train" / "cat" / "0.jpg").read_bytes())
    with pytest.raises(UserError, match="pack of other files than are there now"):
        pack(root)


def test_a_set_that_is_not_of_files_and_a_pack_that_is_not_there_are_refused_before_the_run(root: Path) -> None:
    with pytest.raises(UserError, match="'digits' cannot be packed"):
        check_data(DataConfig(name="digits", pack=64))
    with pytest.raises(UserError, match=r"There is no pack .*[\s\S]*jobs\.prepare image_folder --root .* --pack 64"):
        check_data(config(root))


def slowly(root: Path, after: int) -> None:
    """Pack, and be killed after so many images."""
    seen = 0

    def count(line: str) -> None:
        nonlocal seen
        seen += line.startswith("  ")
        if seen == after:
            os.kill(os.getpid(), signal.SIGKILL)

    write_pack(root / "image_folder-64.pack", image_folder.where(root), 64, "jpeg", workers=1, say=count)


@pytest.mark.parametrize("torn", [False, True])
def test_a_call_that_was_killed_leaves_no_pack_and_the_next_goes_on(
    root: Path, torn: bool, write_images: Callable[..., None]
) -> None:
    write_images(root / "train", {"cat": 60, "dog": 60}, size=(90, 90))
    child = multiprocessing.get_context("forkserver").Process(target=slowly, args=(root, 4))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    final = root / "image_folder-64.pack"
    going = final.with_name(final.name + ".partial")
    assert (going.is_dir(), final.exists()) == (True, False)
    if torn:
        for file in ("images.bin", "index.bin"):
            with (going / file).open("ab") as out:
                out.write(b"half a record")
    said: list[str] = []
    write_pack(final, image_folder.where(root), 64, "jpeg", workers=1, say=said.append)
    whole = [(final / file).read_bytes() for file in ("images.bin", "index.bin")]
    assert said[0] == "Going on after 53 of 132 images."
    final.rename(root / "other.pack")
    pack(root)
    assert [(final / file).read_bytes() for file in ("images.bin", "index.bin")] == whole


def test_a_full_disk_says_what_stays_and_once_there_is_room_the_next_call_goes_on(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, made = data_pack._append, 0

    def full(*args: Any) -> int:
        nonlocal made
        made += 1
        if made == 6:
            raise OSError(28, "No space left on device")
        return append(*args)

    monkeypatch.setattr(data_pack, "_append", full)
    final, said = root / "image_folder-64.pack", list[str]()
    with pytest.raises(
        UserError, match=r"No space left[\s\S]*image_folder-64\.pack\.partial: the same command goes on"
    ):
        pack_data("image_folder", root, 64, "raw", workers=1, say=said.append)
    assert not final.exists()
    assert pack_data("image_folder", root, 64, "raw", workers=1, say=said.append) == final
    assert any(line.startswith("Going on after 5 of") for line in said)
