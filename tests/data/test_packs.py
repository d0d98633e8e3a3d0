import hashlib
import json
import os
import pickle
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from PIL import ExifTags, Image

from jobs import prepare
from tests.data.samples import build, choice, write_images
from tests.fork_server import server
from tests.rank_functions import run_ranks
from trainkit.cluster.ranks import RankEnv
from trainkit.common import fileio
from trainkit.common.errors import RunFailedError, UserError
from trainkit.config.loading import load
from trainkit.config.schema import DataConfig
from trainkit.data import packs as data_pack
from trainkit.data.base import Batch, EvalBatch, Splits
from trainkit.data.datasets import image_folder
from trainkit.data.decoding import BrokenImageError, read_content, read_image
from trainkit.data.download import Say
from trainkit.data.loader import Loading, eval_batches, resolve_workers, train_batches
from trainkit.data.losses import BrokenImages
from trainkit.data.packs import Pack, PackFormat, stage, staged, staged_folder, write_pack
from trainkit.data.registry import build_data, check_data, guessed, pack_data
from trainkit.data.tensors import TensorSamples
from trainkit.distributed.process_group import distributed


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    coarse = numpy.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=numpy.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def root_pack(tmp_path: Path) -> Path:
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


def pack_pack(
    root: Path, kind: PackFormat = "jpeg", *, side: int = 64, workers: int = 1, say: Say = lambda line: None
) -> Pack:
    layout = image_folder.layout(root)
    return write_pack(root / f"image_folder-{side}.pack", layout, side, kind, workers=workers, say=say)


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def config(root: Path, **more: object) -> DataConfig:
    return choice("image_folder", root, **{"pack": 64, "image_size": 56, **more})


@pytest.mark.parametrize(("kind", "least"), [("jpeg", 30), ("raw", 1e9)])
def test_a_packed_photo_is_the_photo_with_its_shorter_side_resized(
    root_pack: Path, kind: PackFormat, least: float
) -> None:
    packed = pack_pack(root_pack, kind)
    for name, found in packed.splits["val"].items():
        for position in found:  # small already: as it is
            whole = read_image(root_pack / "val" / name / packed.name(position), 3)
            assert torch.equal(packed.read(position, 3), whole)
    for name, found in packed.splits["train"].items():
        for position in found:
            if (name, packed.name(position)) == ("dog", "2.jpg"):
                continue
            picture = Image.open(root_pack / "train" / name / packed.name(position)).convert("RGB")
            width, height = 64 * picture.width // picture.height, 64
            resized = picture.resize((width, height), Image.Resampling.BILINEAR)
            expected = torch.from_numpy(numpy.array(resized)).permute(2, 0, 1).double()
            error = (packed.read(position, 3).double() - expected).square().mean().item()
            assert 10 * numpy.log10(255**2 / max(error, 1e-10)) > least or error == 0


def batches_of(data: Splits) -> list[Batch | EvalBatch]:
    second = Loading(rank=1, world_size=2, broken=BrokenImages(1))
    with (
        train_batches(data, second, seed=3, steps=range(1, 5), global_batch_size=4, micro_batch_size=2) as trained,
        eval_batches(data.val, data.eval_transform, Loading(), batch_size=3) as evaluated,
    ):
        return [*trained, *evaluated]


def test_training_on_a_pack_sees_the_same_images_in_the_same_order(root_pack: Path) -> None:
    pack_pack(root_pack, "raw", side=4096)
    # No photo is twice as large, so that files are decoded at their whole size, as they were for the pack.
    names = {"augment": True, "image_size": 80, "max_broken": 1}
    both = (batches_of(build_data(config(root_pack, **names, pack=pack))) for pack in (4096, None))
    for one, other in zip(*both, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_pack_of_photos_turned_upright_is_read_by_those_who_turn_them(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    write_images(tmp_path, {"cat": 8, "dog": 8}, size=(40, 30))
    for file, size in (("0small.jpg", (40, 30)), ("1large.jpg", (160, 120))):  # kept as it is, and made smaller
        Image.new("RGB", size).save(tmp_path / "cat" / file, exif=exif)
    pack_data("image_folder", tmp_path, 64, "jpeg", workers=1, say=lambda _: None, exif=True)
    with pytest.raises(UserError, match=r"data\.exif=false does not go with the pack[\s\S]*Use data\.exif=true"):
        build_data(config(tmp_path))
    data = build_data(config(tmp_path, exif=True))
    parts = (data.train, data.val, data.test)
    assert {part[at][0].shape for part in parts for at in range(len(part))} == {(3, 30, 40), (3, 40, 30), (3, 85, 64)}
    with pytest.raises(UserError, match="already exists and is a different pack"):
        pack_data("image_folder", tmp_path, 64, "jpeg", workers=1, say=lambda _: None)
    assert guessed(choice("image_folder", tmp_path, pack=64))["image_size"][0] == 32


@pytest.fixture
def small_root(tmp_path: Path) -> Path:
    for split, count in (("train", 3), ("valid", 2), ("test", 1)):
        folder = tmp_path / "cinic10" / split
        write_images(folder, {"airplane": count, "cat": count}, suffix="png", size=(32, 32))
    return tmp_path


def small(root: Path) -> Splits:
    pack_data("cinic10", root, 32, "raw", workers=1, say=lambda line: None)
    return build("cinic10", root, pack=32)


def test_a_pack_of_images_of_one_size_is_a_tensor_and_gives_the_very_batches(small_root: Path) -> None:
    packed = small(small_root)
    assert isinstance(packed.train, TensorSamples)
    assert resolve_workers("auto", packed, cpus=8) == 0
    for one, other in zip(batches_of(build("cinic10", small_root)), batches_of(packed), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    before = packed.train[0][0].clone()
    packed.train[0][0].add_(1)  # does not reach the file
    assert torch.equal(small(small_root).train[0][0], before)
    shutil.rmtree(small_root / "cinic10-32.pack")
    write_images(small_root / "cinic10" / "test", {"cat": 1}, suffix="png", size=(30, 32))
    assert not isinstance(small(small_root).train, TensorSamples), "images of several sizes are read one by one"


def test_an_image_that_was_broken_when_it_was_packed_is_one_in_training(root_pack: Path) -> None:
    packed = pack_pack(root_pack)
    assert packed.verify() == ["train/dog/2.jpg"]
    again = pickle.loads(pickle.dumps(packed))  # for a worker that is not forked
    assert again.read(0, 1).shape[0] == 1
    with pytest.raises(BrokenImageError, match=r"train/dog/2\.jpg"):
        again.read(packed.splits["train"]["dog"][2], 3)


@pytest.mark.parametrize("file", ["index.bin", "files.bin", "pack.json", "images.bin"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_pack_is_named(root_pack: Path, file: str, damage: str) -> None:
    path = pack_pack(root_pack).folder / file
    path.unlink() if damage == "gone" else path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match=r"(The pack|There is no pack) .*image_folder-64\.pack"):
        build_data(config(root_pack))


@pytest.mark.parametrize(
    "content",
    [b"", b"{}\nx.jpg\0", b'{"train": {"a": 2}}\nx.jpg\0', b'{"train": {"a": 1}}\n../../x.jpg\0', b"[1]\n",
     b'{"train": {"a": 1}}\n/etc/x.jpg\0', b'{"train": {"a": "x"}}\n', b"[" * 100_000],
)  # fmt: skip
def test_a_pack_whose_list_of_files_is_odd_or_leads_out_is_named(root_pack: Path, content: bytes) -> None:
    folder = pack_pack(root_pack).folder
    about = json.loads((folder / "pack.json").read_text())
    about["sha256"]["files.bin"] = hashlib.sha256(content).hexdigest()
    (folder / "files.bin").write_bytes(content)
    (folder / "pack.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match=r"The pack .*image_folder-64\.pack is damaged"):
        build_data(config(root_pack))


def test_a_bit_that_flipped_is_found_by_reading_and_by_preparing_again(root_pack: Path) -> None:
    packed = pack_pack(root_pack)
    flip(packed.folder / "images.bin", 100)
    with pytest.raises(UserError, match=r"pack .*image_folder-64\.pack is damaged[\s\S]*train/cat/0\.jpg"):
        Pack(packed.folder).read(0, 3)
    with pytest.raises(UserError, match=r"is damaged[\s\S]*train/cat/0\.jpg"):
        pack_data("image_folder", root_pack, 64, "jpeg", workers=1, say=lambda line: None)


def test_the_command_packs_and_a_second_call_verifies(root_pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["image_folder", "--root", str(root_pack), "--pack", "64", "--workers", "2"]
    (root_pack / "val" / "cat" / "notes.txt").touch()
    assert [prepare.main(command, {}), prepare.main(command, {})] == [0, 0]
    out, err = capsys.readouterr()
    assert out.count("image_folder-64.pack is complete and verified.") == 2
    assert "data.pack=64" in out
    assert "val: 4 images of 2 classes; left out: 1 no image (val/cat/notes.txt).\n" in out
    assert "1 images are broken; data.max_broken=1 skips them: train/dog/2.jpg" in err
    assert len(build_data(config(root_pack)).train) == 8
    with pytest.raises(UserError, match=r"already exists and is a different pack[\s\S]*It has raw images"):
        pack_pack(root_pack)
    (root_pack / "train" / "cat" / "9.jpg").write_bytes((root_pack / "train" / "cat" / "0.jpg").read_bytes())
    with pytest.raises(UserError, match="already exists and is a different pack"):
        pack_pack(root_pack, "raw")


def test_who_is_deaf_to_sigterm_packs_as_well(root_pack: Path) -> None:
    """`multiprocessing.Pool` would wait for ever for workers that have inherited it: they are ended by that signal."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for side in (40, 41, 42):
        assert len(pack_pack(root_pack, side=side, workers=2).verify()) == 1


def test_a_killed_worker_is_said_and_the_next_call_goes_on(root_pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(root_pack / "train", {"cat": 60, "dog": 60}, size=(90, 90))

    def killed(path: Path) -> Any:
        if path.name == "050.jpg":
            os.kill(os.getpid(), signal.SIGKILL)
        return read_content(path)

    with monkeypatch.context() as patch:
        patch.setattr(data_pack, "read_content", killed)
        with pytest.raises(RunFailedError, match=r"A process that packs images was killed[\s\S]*fewer --workers"):
            pack_pack(root_pack, workers=2)
    assert len(pack_pack(root_pack, workers=2).splits["train"]) == 2


def test_a_pack_that_is_not_there_or_cannot_be_is_refused_before_the_run(root_pack: Path) -> None:
    with pytest.raises(UserError, match="'digits' cannot be packed"):
        check_data(DataConfig(name="digits", pack=64))
    with pytest.raises(UserError, match=r"There is no pack .*[\s\S]*jobs\.prepare image_folder --root .* --pack 64"):
        check_data(config(root_pack))


def slowly(root: Path, after: int) -> None:
    """Pack, and be killed after so many images."""
    seen = 0

    def count(line: str) -> None:
        nonlocal seen
        seen += line.startswith("  ")
        if seen == after:
            os.kill(os.getpid(), signal.SIGKILL)

    pack_pack(root, say=count)


@pytest.mark.parametrize("torn", [False, True])
def test_a_call_that_was_killed_leaves_no_pack_and_the_next_goes_on(root_pack: Path, torn: bool) -> None:
    write_images(root_pack / "train", {"cat": 60, "dog": 60}, size=(90, 90))
    child = server().start(slowly, root_pack, 4)
    child.join()
    assert child.exitcode == -signal.SIGKILL
    final = root_pack / "image_folder-64.pack"
    going = final.with_name(final.name + ".partial")
    assert (going.is_dir(), final.exists()) == (True, False)
    if torn:
        for file in ("images.bin", "index.bin"):
            with (going / file).open("ab") as out:
                out.write(b"half a record")
    said: list[str] = []
    pack_pack(root_pack, say=said.append)
    whole = [(final / file).read_bytes() for file in ("images.bin", "index.bin")]
    assert said[0] == "Continuing after 53 of 132 images."
    final.rename(root_pack / "other.pack")
    pack_pack(root_pack)
    assert [(final / file).read_bytes() for file in ("images.bin", "index.bin")] == whole


def test_a_full_disk_is_said_and_the_next_call_goes_on(root_pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append, made = data_pack._append, 0

    def full(*args: Any) -> int:
        nonlocal made
        made += 1
        if made == 6:
            raise OSError(28, "No space left on device")
        return append(*args)

    monkeypatch.setattr(data_pack, "_append", full)
    final, said = root_pack / "image_folder-64.pack", list[str]()
    with pytest.raises(
        UserError, match=r"(?s)No space left.*image_folder-64\.pack\.partial; the same command continues"
    ):
        pack_data("image_folder", root_pack, 64, "raw", workers=1, say=said.append)
    assert not final.exists()
    assert pack_data("image_folder", root_pack, 64, "raw", workers=1, say=said.append) == final
    assert any(line.startswith("Continuing after 5 of") for line in said)


@pytest.fixture
def pack_staging(tmp_path: Path) -> Pack:
    root = tmp_path / "images"
    for split in ("train", "val"):
        write_images(root / split, {"cat": 3, "dog": 3})
    return pack_pack(root, "raw", side=8)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def test_a_copy_is_the_pack_and_is_made_once(pack_staging: Pack, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stage(pack_staging.folder, disk) == ""
    monkeypatch.setattr(fileio, "copy", None)
    assert stage(pack_staging.folder, disk) == ""
    copy = Pack(staged_folder(pack_staging.folder, disk))
    assert all(torch.equal(copy.read(at, 3), pack_staging.read(at, 3)) for at in range(len(pack_staging)))
    about = pack_staging.folder / "pack.json"
    about.write_text(about.read_text() + " ")
    assert staged(pack_staging.folder, disk) is None, "a copy of an older pack is not taken for the new"


def test_processes_of_several_jobs_copy_one_after_the_other(pack_staging: Pack, disk: Path) -> None:
    jobs = [server().start(stage, pack_staging.folder, disk) for _ in range(3)]
    for job in jobs:
        job.join()
    assert [job.exitcode for job in jobs] == [0, 0, 0]
    assert [found.suffix for found in sorted(disk.glob("*/*"))] == [".pack", ".lock"]
    assert Pack(staged_folder(pack_staging.folder, disk)).verify() == []


def test_what_a_killed_job_has_left_is_no_copy(pack_staging: Pack, disk: Path) -> None:
    final = staged_folder(pack_staging.folder, disk)
    going = final.with_name(final.name + ".partial")
    going.mkdir(mode=0o700, parents=True)
    going.parent.chmod(0o700)
    (going / "images.bin").write_bytes(b"half")
    assert stage(pack_staging.folder, disk) == ""
    assert not going.exists()
    (final / "images.bin").unlink()  # and somebody cleans up
    assert stage(pack_staging.folder, disk) == ""
    assert Pack(final).verify() == []


def test_a_disk_without_room_is_left_alone(pack_staging: Pack, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda disk: SimpleNamespace(free=1000))
    assert "0.0 GB left" in stage(pack_staging.folder, disk)
    assert not staged_folder(pack_staging.folder, disk).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user")
def test_a_copy_that_another_user_has_laid_out_is_never_read(pack_staging: Pack, disk: Path) -> None:
    disk.chmod(0o1777)
    final = staged_folder(pack_staging.folder, disk)
    shutil.copytree(pack_staging.folder, final)
    flip(final / "images.bin", 5)
    final.parent.chmod(0o700)
    for path in (final.parent, final, *final.iterdir()):
        os.chown(path, 65534, 65534)
    assert "not this user's alone" in stage(pack_staging.folder, disk)
    assert staged(pack_staging.folder, disk) is None


@pytest.mark.parametrize("spoil", ["link", "open folder", "disk without sticky bit"])
def test_no_copy_is_made_where_others_get_at_it(spoil: str, pack_staging: Pack, disk: Path, tmp_path: Path) -> None:
    own = staged_folder(pack_staging.folder, disk).parent
    if spoil == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        own.symlink_to(tmp_path / "elsewhere")
    elif spoil == "open folder":
        own.mkdir()
        own.chmod(0o770)
    else:
        disk.chmod(0o777)
    assert "not this user's alone" in stage(pack_staging.folder, disk)
    assert staged(pack_staging.folder, disk) is None
    assert not list(disk.glob("*/*"))


def test_a_damaged_pack_is_not_staged(pack_staging: Pack, disk: Path) -> None:
    flip(pack_staging.folder / "images.bin", 5)
    with pytest.raises(UserError, match=r"damaged[\s\S]*train/cat/000\.jpg"):
        stage(pack_staging.folder, disk)
    assert [found.suffix for found in disk.glob("*/*")] == [".lock"]


def test_staging_what_is_no_pack_is_refused_when_the_settings_are_loaded() -> None:
    with pytest.raises(UserError, match=r"data\.stage=true without data\.pack"):
        load("single", ["data.stage=true"])


def read_staged(env: RankEnv, root: str, disk: str, stage: bool | str) -> str:
    """The folder that this rank reads, or the error that it gets."""
    with pytest.MonkeyPatch.context() as patch, distributed(env, use_gpu=False) as dist:
        patch.setenv("SLURM_TMPDIR", disk) if disk else patch.delenv("SLURM_TMPDIR", raising=False)
        patch.delenv("TMPDIR", raising=False)
        try:
            made = build_data(choice("image_folder", root, pack=8, stage=stage, image_size=8), dist)
        except UserError as error:
            return f"{error.what} {error.why}"
        made.train[0]
        return str(made.train.files.folder)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("stage", "is_there"), [("auto", True), ("auto", False), (True, False)])
def test_a_nodes_ranks_read_its_copy_or_none(pack_staging: Pack, disk: Path, stage: bool | str, is_there: bool) -> None:
    one, other = run_ranks(2, read_staged, str(pack_staging.folder.parent), str(disk) if is_there else "", stage)
    assert one == other
    if is_there:
        assert one == str(staged_folder(pack_staging.folder, disk))
    elif stage == "auto":
        assert one == str(pack_staging.folder)
    else:
        assert "cannot be copied to this node. Neither SLURM_TMPDIR nor TMPDIR" in one
