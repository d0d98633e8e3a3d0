import errno
import hashlib
import importlib
import io
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.samples import serving
from trainkit.common.errors import UserError
from trainkit.data import download as downloads
from trainkit.data.download import complete_folder, download, extract, opened_tar, regular

CONTENT = bytes(range(256)) * 100
MD5 = hashlib.md5(CONTENT).hexdigest()


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[str]:
    """URL of a server on this machine that has `file.bin`."""
    served = tmp_path / "served"
    served.mkdir()
    (served / "file.bin").write_bytes(CONTENT)
    with serving(served) as url:
        yield url


def silent(line: str) -> None:
    pass


def test_a_download_is_complete_verified_and_not_fetched_again(tmp_path: Path, mirror: str) -> None:
    said: list[str] = []
    target = tmp_path / "new" / "file.bin"
    download(f"{mirror}/file.bin", target, MD5, said.append)
    assert target.read_bytes() == CONTENT
    assert any("100 %" in line for line in said)
    download("http://127.0.0.1:9/file.bin", target, MD5, said.append)
    assert said[-1] == f"{target} already exists."
    target.write_bytes(CONTENT[:100])  # cut short
    download(f"{mirror}/file.bin", target, MD5, silent)
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize(("md5", "longest", "says"), [("0" * 32, 1 << 20, "Its MD5 is"), (MD5, 100, "100 bytes")])
def test_another_file_than_the_known_one_is_refused_and_removed(
    tmp_path: Path, mirror: str, monkeypatch: pytest.MonkeyPatch, md5: str, longest: int, says: str
) -> None:
    monkeypatch.setattr(downloads, "LONGEST_DOWNLOAD", longest)
    with pytest.raises(UserError, match=rf"file\.bin (returned a different|could not be)[\s\S]*{says}"):
        download(f"{mirror}/file.bin", tmp_path / "new" / "file.bin", md5, silent)
    assert list((tmp_path / "new").iterdir()) == []


def stop_half_way(final: Path, *, keep: bool) -> None:
    with complete_folder(final, keep=keep) as folder:
        (folder / "half").touch()
        raise RuntimeError


@pytest.mark.parametrize(("keep", "left"), [(False, []), (True, ["half"])])
def test_a_folder_has_its_name_only_when_it_is_complete(tmp_path: Path, keep: bool, left: list[str]) -> None:
    with pytest.raises(RuntimeError):
        stop_half_way(tmp_path / "data", keep=keep)
    assert [file.name for file in tmp_path.iterdir()] == ["data.partial"] * keep
    if not keep:
        (tmp_path / "data.partial").mkdir()
        (tmp_path / "data.partial" / "of a killed process").touch()
    with complete_folder(tmp_path / "data", keep=keep) as folder:
        assert [file.name for file in folder.iterdir()] == left
        (folder / "whole").touch()
    assert (tmp_path / "data" / "whole").exists()
    with pytest.raises(UserError, match=f"mv {tmp_path}/data {tmp_path}/data.old"), complete_folder(tmp_path / "data"):
        pass  # it has lost files since


def tar_of(path: Path, member: tarfile.TarInfo, content: bytes = b"x") -> Path:
    with tarfile.open(path, "w") as tar:
        member.size = len(content) if member.isfile() else 0
        tar.addfile(member, io.BytesIO(content))
    return path


def unpack(archive: Path, folder: Path, name: str | None = None) -> None:
    with opened_tar(archive) as tar:
        for item in tar:
            extract(tar, item, folder, name or item.name)


def link(name: str, target: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    return member


@pytest.mark.parametrize(
    "member",
    [tarfile.TarInfo("../outside"), tarfile.TarInfo("a/../../outside"), link("inside", "/etc"), link("inside", "file"),
     "an absolute path"],
)  # fmt: skip
def test_what_leads_out_of_an_archive_is_refused(tmp_path: Path, member: tarfile.TarInfo | str) -> None:
    outside = str(tmp_path / "outside")
    archive = tar_of(tmp_path / "evil.tar", tarfile.TarInfo(outside) if isinstance(member, str) else member)
    with pytest.raises(UserError, match=r"evil\.tar is refused"):
        unpack(archive, tmp_path / "into", outside if isinstance(member, str) else None)
    assert [file.name for file in tmp_path.iterdir()] == ["evil.tar"]


def test_an_archive_of_more_bytes_than_its_data_set_has_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "evil.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for number in range(5):
            member = tarfile.TarInfo(f"{number}\x1b[2J")
            member.size = 1 << 20
            tar.addfile(member, io.BytesIO(bytes(1 << 20)))
    assert archive.stat().st_size < 20_000
    with (
        pytest.raises(UserError, match=r"(?s)evil.tar.gz is refused.*beyond 3,145,728 bytes") as caught,
        opened_tar(archive) as tar,
    ):
        list(regular(tar, 3 << 20))
    assert "\x1b" not in str(caught.value)
    with opened_tar(archive) as tar:
        assert len(list(regular(tar, 5 << 20))) == 5


def test_of_an_archive_regular_files_alone_are_given(tmp_path: Path) -> None:
    kinds = (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.REGTYPE)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number, kind in enumerate(kinds):
            member = tarfile.TarInfo(str(number))
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)
    with opened_tar(tmp_path / "a.tar") as tar:
        assert [member.name for member in regular(tar, 1)] == ["5"]


@pytest.mark.parametrize("name", ["cifar10", "cinic10"])
def test_a_data_set_in_a_sparse_archive_is_refused_and_not_written(tmp_path: Path, name: str) -> None:
    """Ten kilobytes that ask for 50 GB, as GNU tar writes them."""
    module = importlib.import_module(f"trainkit.data.datasets.{name}")
    archive = tmp_path / "given" / module.ARCHIVE
    archive.parent.mkdir()
    with (tmp_path / "hole").open("wb") as out:
        out.truncate(50 << 30)
    subprocess.run(["tar", "--sparse", "-cf", str(archive), "-C", str(tmp_path), "hole"], check=True)
    (tmp_path / "hole").unlink()
    with pytest.raises(UserError, match=r"(?s)is refused.*sparse"):
        module.prepare(tmp_path / "data", [archive], silent)
    assert sum(file.stat().st_size for file in (tmp_path / "data").rglob("*")) < 1 << 20


def pax(*records: bytes) -> bytes:
    """A header that says more of the member after it."""
    said = b"".join(records)
    return header("pax", tarfile.XHDTYPE, len(said)) + said + bytes(-len(said) % 512)


def header(name: str, kind: bytes, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.type, member.size = kind, size
    return member.tobuf(tarfile.GNU_FORMAT)


_SPARSE = pax(b"22 GNU.sparse.major=1\n", b"22 GNU.sparse.minor=0\n")
HOSTILE = {
    "names of names": header("name", tarfile.GNUTYPE_LONGNAME, 0) * 3000,
    "a length of 5,000 digits": pax(b"1" * 5000, b" a=b\n"),
    "a sparse file without a map": _SPARSE + header("file", tarfile.REGTYPE, 512) + b"no number\n".ljust(512, b"\0"),
    "a changed byte": header("second", tarfile.REGTYPE, 0).replace(b"second", b"sacond"),
    "letters that are none": pax(b"26 hdrcharset=\xff\xff\xff\xff\xff\xff\n"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("what", HOSTILE)
def test_headers_made_to_break_their_reader_are_an_error_for_the_user(tmp_path: Path, what: str, stream: bool) -> None:
    archive = tar_of(tmp_path / "plain.tar", tarfile.TarInfo("file"))
    archive.write_bytes(header("first", tarfile.REGTYPE, 0) + HOSTILE[what] + archive.read_bytes())
    with (
        archive.open("rb") as file,
        pytest.raises(UserError, match="cannot be read as a tar archive") as caught,
        opened_tar(file if stream else archive) as tar,
    ):
        list(regular(tar, 1 << 20))
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, b"g", b"X"])
def test_a_header_longer_than_any_path_is_not_read(tmp_path: Path, kind: bytes) -> None:
    archive = tmp_path / "long.tar"
    archive.write_bytes(header("first", tarfile.REGTYPE, 0) + header("long", kind, 300 << 20))
    with pytest.raises(UserError, match="a header of 314,572,800 bytes"), opened_tar(archive) as tar:
        list(regular(tar, 1 << 20))


@pytest.mark.parametrize(
    ("name", "why"),
    [("a", "cannot be made: File exists"), ("a/1", "cannot be made: Not a directory"),
     ("a" * 300, "cannot be made: File name too long"), ("a\0b", "leads out of"), ("/", "leads out of")],
)  # fmt: skip
def test_a_member_that_cannot_be_made_is_the_archives_fault(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "into").mkdir()
    (tmp_path / "into" / "a").touch()
    archive = tar_of(tmp_path / "odd.tar", tarfile.TarInfo("file"))
    with opened_tar(archive) as tar, pytest.raises(UserError, match=why):
        extract(tar, tar.getmembers()[0], tmp_path / "into", name)


@pytest.mark.parametrize("keep", [0, 100, 700])
def test_an_archive_cut_short_is_an_error_for_the_user(tmp_path: Path, keep: int) -> None:
    archive = tar_of(tmp_path / "half.tar", tarfile.TarInfo("file"), CONTENT)
    archive.write_bytes(archive.read_bytes()[:keep])
    with pytest.raises(UserError, match="cannot be read as a tar archive"):
        unpack(archive, tmp_path / "into")


def test_a_full_disk_is_not_blamed_on_the_archive(tmp_path: Path) -> None:
    archive = tar_of(tmp_path / "good.tar", tarfile.TarInfo("file"))
    with pytest.raises(OSError, match="No space left"), opened_tar(archive):
        raise OSError(errno.ENOSPC, "No space left on device")
