import hashlib
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import prepare
from tests.data.samples import serving
from tests.recipes import tiny
from trainkit.common.errors import UserError
from trainkit.config.schema import DataConfig
from trainkit.data.datasets import cifar10, cinic10, fashion_mnist, imagenet
from trainkit.data.registry import build_data


def run(*arguments: object) -> int:
    return prepare.main([str(argument) for argument in arguments], {})


def without(archive: Path, part: str) -> None:
    """Write the archive anew without the members whose names contain ``part``."""
    with tarfile.open(archive) as tar:
        kept = [(member, tar.extractfile(member)) for member in tar if part not in member.name]
        with tarfile.open(archive.with_name("less"), "w:gz") as less:
            for member, content in kept:
                less.addfile(member, content)
    archive.with_name("less").rename(archive)


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server on this machine, in place of those that have CIFAR-10 and Fashion-MNIST."""
    served = tmp_path / "served"
    served.mkdir()
    cifar = tiny.write_cifar10(served)
    md5s = {file.name: hashlib.md5(file.read_bytes()).hexdigest() for file in tiny.write_fashion_mnist(served)}
    with serving(served) as url:
        monkeypatch.setattr(cifar10, "URL", f"{url}/{cifar10.ARCHIVE}")
        monkeypatch.setattr(cifar10, "MD5", hashlib.md5(cifar.read_bytes()).hexdigest())
        monkeypatch.setattr(fashion_mnist, "MIRROR", f"{url}/")
        monkeypatch.setattr(fashion_mnist, "MD5S", md5s)
        yield


@pytest.mark.usefixtures("mirror")
@pytest.mark.parametrize(("name", "count"), [("cifar10", 90), ("fashion_mnist", 70)])
def test_a_data_set_is_downloaded_verified_and_ready_to_train_on(
    name: str, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "data"
    assert run(name, "--root", root) == 0
    out, err = capsys.readouterr()
    assert "Downloading http://127.0.0.1:" in err
    assert f"Train on it: data.name={name} data.root={root}" in out
    assert len(build_data(DataConfig(name=name, root=str(root))).train) == count


@pytest.mark.parametrize("name", ["cifar10", "cinic10", "fashion_mnist", "imagenet"])
def test_given_archives_are_unpacked_and_a_second_call_needs_none(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archives = tiny.archives(tmp_path / "archives")[name]
    assert run(name, "--root", tmp_path / "data", "--archive", *archives) == 0
    assert "is not the official" in capsys.readouterr().err
    for archive in archives:
        archive.unlink()
    assert run(name, "--root", tmp_path / "data") == 0
    assert "already exists." in capsys.readouterr().err
    assert len(build_data(DataConfig(name=name, root=str(tmp_path / "data"))).val) > 0


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("cifar10", r"could not be downloaded[\s\S]*copy it to {root}/cifar-10-python"),
        ("fashion_mnist", r"could not be downloaded[\s\S]*copy it to {root}/FashionMNIST"),
        ("cinic10", r"no CINIC-10[\s\S]*https://datashare[\s\S]*{root}/CINIC-10\.tar\.gz"),
        ("imagenet", r"img_train\.tar and no ILSVRC2012_img_val\.tar and no ILSVRC2012_devkit[\s\S]*{root}"),
    ],
)
def test_without_internet_it_names_the_file_and_where_to_put_it(
    name: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar10, "URL", f"http://127.0.0.1:9/{cifar10.ARCHIVE}")
    monkeypatch.setattr(fashion_mnist, "MIRROR", "http://127.0.0.1:9/")
    with pytest.raises(UserError, match=fix.replace("{root}", str(tmp_path))):
        run(name, "--root", tmp_path)
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


@pytest.mark.parametrize(
    ("name", "archive", "part", "says"),
    [
        ("cifar10", cifar10.ARCHIVE, "data_batch_2", r"It has no cifar-10-batches-py/data_batch_2"),
        ("cinic10", cinic10.ARCHIVE, "/test/", "is not the archive of CINIC-10"),
        ("imagenet", imagenet.DEVKIT, "meta.mat", "is not the development kit"),
        ("imagenet", imagenet.VAL, "val_", "contains no images, unlike the official ILSVRC2012_img_val"),
    ],
)
def test_half_an_archive_is_refused_and_leaves_nothing(
    name: str, archive: str, part: str, says: str, tmp_path: Path
) -> None:
    archives = tiny.archives(tmp_path / "archives")[name]
    without(tmp_path / "archives" / archive, part)
    with pytest.raises(UserError, match=says):
        run(name, "--root", tmp_path / "data", "--archive", *archives)
    folders = {"cifar10": cifar10.FOLDER, "cinic10": "cinic10", "imagenet": "imagenet/val"}
    assert not (tmp_path / "data" / folders[name]).exists()
    if archive == imagenet.DEVKIT:  # it is read before the long work
        assert not (tmp_path / "data" / "imagenet").exists()


def test_imagenets_validation_images_get_the_classes_of_the_kit(tmp_path: Path) -> None:
    tiny.write_imagenet(tmp_path, per_class=1)
    assert run("imagenet", "--root", tmp_path) == 0
    val = sorted(str(file.relative_to(tmp_path / "imagenet" / "val")) for file in tmp_path.rglob("*val_0*.JPEG"))
    wnids = [tiny.WNIDS[number % 4] for number in range(8)]
    assert val == sorted(f"{wnid}/ILSVRC2012_val_{number:08}.JPEG" for number, wnid in enumerate(wnids, start=1))


def test_a_kit_that_knows_fewer_images_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write_imagenet(tmp_path, per_class=1)
    read = imagenet.read_devkit
    monkeypatch.setattr(imagenet, "read_devkit", lambda *given: read(*given)[:3])
    with pytest.raises(UserError, match=r"val_00000004\.JPEG is image 4; the kit knows 3"):
        run("imagenet", "--root", tmp_path)


def test_imagenet_interrupted_goes_on_with_the_next_class(tmp_path: Path) -> None:
    train, *_ = tiny.write_imagenet(tmp_path, per_class=2)
    whole = train.read_bytes()
    train.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="cannot be read as a tar archive"):
        run("imagenet", "--root", tmp_path)
    assert not (tmp_path / "imagenet" / "train").exists()
    before = (tmp_path / "imagenet" / "train.partial" / tiny.WNIDS[0]).stat().st_mtime_ns
    train.write_bytes(whole)
    assert run("imagenet", "--root", tmp_path) == 0
    assert (tmp_path / "imagenet" / "train" / tiny.WNIDS[0]).stat().st_mtime_ns == before
    assert len(build_data(DataConfig(name="imagenet", root=str(tmp_path))).train) == 8


@pytest.mark.parametrize("name", ["digits", "synthetic", "image_folder", "image_csv"])
def test_nothing_to_fetch_is_no_error(name: str, tmp_path: Path) -> None:
    assert run(name, "--root", tmp_path) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    archive = tiny.write_cinic10(tmp_path, per_class=1)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="could not be written"):
        run("cinic10", "--root", tmp_path / "file", "--archive", archive)


def test_a_given_archive_is_taken_whatever_its_name_and_what_else_is_there(tmp_path: Path) -> None:
    given: Any = tiny.write_cinic10(tmp_path, per_class=1).rename(tmp_path / "from-the-course.tgz")
    (tmp_path / cinic10.ARCHIVE).write_bytes(b"torn")
    assert run("cinic10", "--root", tmp_path, "--archive", given) == 0
    assert (tmp_path / "cinic10" / "train").is_dir()
