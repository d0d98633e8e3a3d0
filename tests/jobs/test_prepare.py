from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import struct
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy
import pytest
from PIL import Image

from jobs import prepare
from trainkit.data.datasets import cifar10, cinic10, fashion_mnist, imagenet
from trainkit.errors import UserError

WNIDS = ["n01440764", "n01443537", "n01484850"]


def run(*arguments: object) -> int:
    return prepare.main([str(argument) for argument in arguments], {})


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def picture(kind: str, colour: int = 0) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (32, 32), (colour, 0, 0)).save(out, kind)
    return out.getvalue()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Path:
    folder = tmp_path / "served"
    folder.mkdir()
    return folder


@pytest.fixture
def mirror(served: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(served))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


def write_cifar_archive(path: Path) -> str:
    """A tiny cifar-10-python.tar.gz; gives its MD5."""
    with tarfile.open(path, "w:gz") as tar:
        for file in (*cifar10.TRAIN_FILES, *cifar10.TEST_FILES):
            batch = {"data": numpy.zeros((10, 3072), dtype=numpy.uint8), "labels": list(range(10))}
            add(tar, f"{cifar10.FOLDER}/{file}", pickle.dumps(batch, protocol=2))
        meta = {"label_names": [f"class {number}" for number in range(10)]}
        add(tar, f"{cifar10.FOLDER}/batches.meta", pickle.dumps(meta, protocol=2))
        add(tar, f"{cifar10.FOLDER}/readme.html", b"hello")
    return hashlib.md5(path.read_bytes()).hexdigest()


def write_cinic_archive(path: Path, splits: tuple[str, ...] = cinic10.SPLITS) -> None:
    with tarfile.open(path, "w:gz") as tar:
        add(tar, "README.md", b"hello")
        for split in splits:
            for name in ("airplane", "cat"):
                add(tar, f"./{split}/{name}/cifar10-train-1.png", picture("PNG"))


def write_imagenet_archives(root: Path, *, per_class: int = 2, wnids: list[str] = WNIDS) -> None:
    from scipy.io import savemat  # type: ignore[import-untyped]

    with tarfile.open(root / imagenet.TRAIN, "w") as outer:
        for wnid in wnids:
            inner_bytes = io.BytesIO()
            with tarfile.open(fileobj=inner_bytes, mode="w") as inner:
                for number in range(per_class):
                    add(inner, f"{wnid}_{number}.JPEG", picture("JPEG"))
            add(outer, f"{wnid}.tar", inner_bytes.getvalue())
    with tarfile.open(root / imagenet.VAL, "w") as tar:
        for number in range(1, 5):
            add(tar, f"ILSVRC2012_val_{number:08}.JPEG", picture("JPEG", 10 * number))
    fields = [
        ("ILSVRC2012_ID", object),
        ("WNID", object),
        ("words", object),
        ("gloss", object),
        ("num_children", object),
    ]
    rows = [(number, wnid, "fish, animal", "swims", 0) for number, wnid in enumerate(wnids, start=1)]
    synsets = numpy.array([*rows, (99, "n00001740", "entity", "all", 3)], dtype=fields)
    meta = io.BytesIO()
    savemat(meta, {"synsets": synsets.reshape(-1, 1)})
    with tarfile.open(root / imagenet.DEVKIT, "w:gz") as tar:
        add(tar, "ILSVRC2012_devkit_t12/data/meta.mat", meta.getvalue())
        add(tar, "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt", b"3\n1\n1\n2\n")


def test_cifar10_is_downloaded_verified_and_ready_to_train_on(
    tmp_path: Path, served: Path, mirror: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cifar10, "MD5", write_cifar_archive(served / cifar10.ARCHIVE))
    monkeypatch.setattr(cifar10, "URL", mirror + cifar10.ARCHIVE)
    assert run("cifar10", "--root", tmp_path / "data") == 0
    assert len(cifar10.build(tmp_path / "data", val_fraction=0.2).train) == 40
    assert f"data.name=cifar10 data.root={tmp_path / 'data'}" in capsys.readouterr().out


def test_fashion_mnist_is_downloaded_verified_and_ready_to_train_on(
    tmp_path: Path, served: Path, mirror: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    md5s = {}
    for name in fashion_mnist.MD5S:
        shape = (20, 28, 28) if "images" in name else (20,)
        dims = len(shape)
        content = struct.pack(f">HBB{dims}I", 0, 8, dims, *shape) + bytes(numpy.zeros(shape, dtype=numpy.uint8))
        (served / name).write_bytes(gzip.compress(content))
        md5s[name] = hashlib.md5((served / name).read_bytes()).hexdigest()
    monkeypatch.setattr(fashion_mnist, "MD5S", md5s)
    monkeypatch.setattr(fashion_mnist, "MIRROR", mirror)
    assert run("fashion_mnist", "--root", tmp_path) == 0
    assert len(fashion_mnist.build(tmp_path, val_fraction=0.5).val) == 10


def test_a_second_call_says_that_it_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_cifar_archive(tmp_path / cifar10.ARCHIVE)
    archive = tmp_path / cifar10.ARCHIVE
    assert run("cifar10", "--root", tmp_path / "data", "--archive", archive) == 0
    archive.unlink()
    assert run("cifar10", "--root", tmp_path / "data") == 0
    assert "is already there" in capsys.readouterr().err


@pytest.mark.parametrize("dataset", ["cifar10", "fashion_mnist"])
def test_without_internet_it_names_the_file_and_where_to_put_it(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar10, "URL", f"http://127.0.0.1:9/{cifar10.ARCHIVE}")
    monkeypatch.setattr(fashion_mnist, "MIRROR", "http://127.0.0.1:9/")
    with pytest.raises(UserError, match=rf"could not be downloaded[\s\S]*copy it to {tmp_path}"):
        run(dataset, "--root", tmp_path)
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_an_archive_of_cifar10_that_lacks_a_file_leaves_nothing(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / cifar10.ARCHIVE, "w:gz") as tar:
        add(tar, f"{cifar10.FOLDER}/data_batch_1", b"x")
    with pytest.raises(UserError, match=r"It has no cifar-10-batches-py/data_batch_2"):
        run("cifar10", "--root", tmp_path / "data", "--archive", tmp_path / cifar10.ARCHIVE)
    assert not (tmp_path / "data" / cifar10.FOLDER).exists()


def test_cinic10_is_unpacked_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_cinic_archive(tmp_path / cinic10.ARCHIVE)
    assert run("cinic10", "--root", tmp_path) == 0
    assert len(cinic10.build(tmp_path).val) == 2
    said = capsys.readouterr().err
    assert "not the official archive" in said
    assert "2 train, 2 valid, 2 test" in said


def test_half_an_archive_of_cinic10_leaves_nothing(tmp_path: Path) -> None:
    write_cinic_archive(tmp_path / cinic10.ARCHIVE, ("train", "valid"))
    with pytest.raises(UserError, match="is no archive of CINIC-10"):
        run("cinic10", "--root", tmp_path)
    assert not (tmp_path / "cinic10").exists()


def test_cinic10_without_an_archive_says_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"https://datashare[\s\S]*{tmp_path}/CINIC-10\.tar\.gz"):
        run("cinic10", "--root", tmp_path)


def test_imagenet_is_unpacked_with_the_classes_of_the_development_kit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_imagenet_archives(tmp_path)
    assert run("imagenet", "--root", tmp_path) == 0
    data = imagenet.build(tmp_path, image_size=32)
    assert (len(data.train), len(data.val), data.info.class_names) == (6, 4, tuple(WNIDS))
    val = sorted(str(file.relative_to(tmp_path / "imagenet" / "val")) for file in tmp_path.rglob("*val_0*.JPEG"))
    assert val == [
        f"{WNIDS[0]}/ILSVRC2012_val_00000002.JPEG",
        f"{WNIDS[0]}/ILSVRC2012_val_00000003.JPEG",
        f"{WNIDS[1]}/ILSVRC2012_val_00000004.JPEG",
        f"{WNIDS[2]}/ILSVRC2012_val_00000001.JPEG",
    ]
    assert "is not the official ILSVRC2012_img_train.tar" in capsys.readouterr().err


def test_imagenet_interrupted_goes_on_with_the_next_class(tmp_path: Path) -> None:
    write_imagenet_archives(tmp_path)
    whole = (tmp_path / imagenet.TRAIN).read_bytes()
    (tmp_path / imagenet.TRAIN).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="cannot be read as a tar archive"):
        run("imagenet", "--root", tmp_path)
    assert not (tmp_path / "imagenet" / "train").exists()
    done = tmp_path / "imagenet" / "train.partial" / WNIDS[0]
    before = done.stat().st_mtime_ns
    (tmp_path / imagenet.TRAIN).write_bytes(whole)
    assert run("imagenet", "--root", tmp_path) == 0
    assert (tmp_path / "imagenet" / "train" / WNIDS[0]).stat().st_mtime_ns == before
    assert len(imagenet.build(tmp_path).train) == 6


def test_imagenet_names_the_archives_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"img_train\.tar and no ILSVRC2012_img_val\.tar and no ILSVRC2012_devkit"):
        run("imagenet", "--root", tmp_path)


def test_a_development_kit_of_something_else_is_refused_before_the_long_work(tmp_path: Path) -> None:
    write_imagenet_archives(tmp_path)
    with tarfile.open(tmp_path / imagenet.DEVKIT, "w:gz") as tar:
        add(tar, "README", b"x")
    with pytest.raises(UserError, match="is no development kit"):
        run("imagenet", "--root", tmp_path)
    assert not (tmp_path / "imagenet").exists()


@pytest.mark.parametrize("dataset", ["digits", "synthetic", "image_folder"])
def test_nothing_to_fetch_is_no_error(dataset: str, tmp_path: Path) -> None:
    assert run(dataset, "--root", tmp_path) == 0
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_data_set_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"Did you mean 'imagenet'\?"):
        run("imagnet")


def test_an_archive_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"There is no file .*x\.tar"):
        run("cifar10", "--archive", tmp_path / "x.tar")


def test_a_root_that_cannot_be_written_is_an_error_for_the_user(tmp_path: Path) -> None:
    write_cinic_archive(tmp_path / cinic10.ARCHIVE)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="could not be written"):
        run("cinic10", "--root", tmp_path / "file", "--archive", tmp_path / cinic10.ARCHIVE)


def test_as_a_command_an_error_has_three_lines_and_exit_code_two() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "jobs.prepare", "imagnet"], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert [line.split(":")[0].strip() for line in ended.stderr.splitlines()][1:] == ["why", "fix"]


def test_preparing_never_imports_torch(tmp_path: Path) -> None:
    write_cinic_archive(tmp_path / cinic10.ARCHIVE)
    script = f"import sys; from jobs import prepare; prepare.main(['cinic10', '--root', {str(tmp_path)!r}], {{}}); "
    script += "print([name for name in ('torch', 'torchvision', 'sklearn', 'numpy') if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).splitlines()[-1] == "[]"


def test_an_archive_that_is_given_is_taken_whatever_its_name_and_whatever_else_is_there(tmp_path: Path) -> None:
    (tmp_path / cinic10.ARCHIVE).write_bytes(b"torn")
    write_cinic_archive(tmp_path / "from-the-course.tgz")
    assert run("cinic10", "--root", tmp_path, "--archive", tmp_path / "from-the-course.tgz") == 0
    assert (tmp_path / "cinic10" / "train").is_dir()
