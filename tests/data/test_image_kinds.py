import io
import os
from pathlib import Path

import pytest
from PIL import Image

from tests.data.samples import write_images
from trainkit.data import image_kinds
from trainkit.data.image_files import Files
from trainkit.data.image_kinds import Chooser

MADE = {"JPEG": "jpg", "PNG": "png", "WebP": "webp", "GIF": "gif", "BMP": "bmp", "PPM": "ppm", "TIFF": "tif",
        "AVIF": "avif", "JPEG 2000": "jp2", "QOI": "qoi"}  # fmt: skip


@pytest.mark.parametrize(("kind", "ending"), MADE.items())
def test_each_kind_is_known_by_its_ending_and_by_its_first_bytes(kind: str, ending: str) -> None:
    out = io.BytesIO()
    Image.new("RGB", (16, 16), (200, 30, 40)).save(out, kind.replace(" ", ""))
    start = out.getvalue()[: image_kinds.START]
    assert image_kinds.kind_of(start) == kind == image_kinds.ENDINGS[ending]
    assert image_kinds.ending_for(start) == ending


@pytest.mark.parametrize(
    ("name", "why"),
    [("a.jpg", ""), ("a.JFIF", ""), ("a/b.c/x.jp2", ""), ("x.tar.avif", ""), ("Thumbs.db", "no image"),
     (".DS_Store", "hidden"), ("._a.jpg", "hidden"), (".jpg", "hidden"), ("a.json", "no image"), ("a.jpg~", "no image"),
     ("a.HEIC", "in a format that is not read"), ("a.nef", "a camera's raw data"), ("a", None), ("a.", None),
     ("a.b/c", None), ("jpg", None), ("photo.jpg_large", None)],
)  # fmt: skip
def test_a_name_tells_an_image_or_why_it_is_none_or_nothing(name: str, why: str | None) -> None:
    assert image_kinds.why_not(name) == why


@pytest.mark.parametrize("start", [b"", b"BMW and others are cars, not images", b"P1zza", b"RIFF\0\0\0\0WAVEfmt ",
                                   b"\0\0\0\x20ftypheic\0\0\0\0", b"II*", b"%PDF-1.7"])  # fmt: skip
def test_what_begins_like_an_image_only_at_a_glance_is_none(start: bytes) -> None:
    assert image_kinds.kind_of(start) == ""


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Two classes: of the dogs some have other endings, or none; and among the cats is what is not an image."""
    write_images(tmp_path, {"cat": 5, "dog": 5})
    for number, end in enumerate((".jfif", ".jpe", "", ".jpg_large")):
        os.rename(tmp_path / f"dog/00{number}.jpg", tmp_path / f"dog/00{number}{end}")
    for name in ("Thumbs.db", "notes.txt", "a.heic", ".b.jpg", "x.unknown", "y.unknown"):
        (tmp_path / "cat" / name).write_bytes(b"not one")
    os.mkfifo(tmp_path / "cat" / "pipe")
    (tmp_path / "cat" / "up").symlink_to("..")
    return tmp_path


def test_every_image_is_taken_and_every_other_file_counted_with_its_reason(mixed: Path) -> None:
    files = Files.walk(mixed, ("",))
    assert files.splits[""] == {"cat": range(5), "dog": range(5, 10)}
    assert files.left_out[""] == {
        "hidden": (1, "cat/.b.jpg"),
        "no image": (2, "cat/Thumbs.db"),
        "in a format that is not read": (1, "cat/a.heic"),
        "not an image by the first bytes": (1, "cat/pipe"),
        "not an image by the first bytes (.unknown)": (2, "cat/x.unknown"),
    }
    assert "2 no image (cat/Thumbs.db)" in image_kinds.left_out_in_words(files.left_out[""])


def test_a_run_that_began_before_sees_the_files_that_it_began_with(mixed: Path) -> None:
    files = Files.walk(mixed, ("",), all_kinds=False)
    assert [files.path(at) for at in range(len(files))] == [*(f"cat/00{number}.jpg" for number in range(5)),
                                                           "dog/004.jpg"]  # fmt: skip


def test_a_million_files_are_decided_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []

    def read_start(file: Path) -> bytes:
        opened.append(file)
        return b"nothing"

    monkeypatch.setattr(image_kinds, "read_start", read_start)
    chooser = Chooser()
    for number in range(1000):
        assert chooser.takes("some", f"{number}.png")
        assert not chooser.takes("some", f"{number}.label")
    assert len(opened) == image_kinds.LOOKED_AT
    assert chooser.take_left_out(tmp_path)["not an image by the first bytes (.label)"][0] == 1000
