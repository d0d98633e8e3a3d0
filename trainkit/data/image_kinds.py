"""The list of what an image is: by the ending of its name if that is a known one, else by its first bytes.

The one list for training, packs, shards and prediction. A folder of a million files is decided by names alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from trainkit.common import fileio, terminal

ENDINGS = {
    "jpg": "JPEG", "jpeg": "JPEG", "jpe": "JPEG", "jfif": "JPEG", "jfi": "JPEG", "jif": "JPEG", "mpo": "JPEG",
    "png": "PNG", "apng": "PNG", "webp": "WebP", "gif": "GIF", "bmp": "BMP", "dib": "BMP",
    "ppm": "PPM", "pgm": "PPM", "pbm": "PPM", "pnm": "PPM", "tif": "TIFF", "tiff": "TIFF",
    "avif": "AVIF", "jp2": "JPEG 2000", "j2k": "JPEG 2000", "j2c": "JPEG 2000", "jpc": "JPEG 2000",
    "jpf": "JPEG 2000", "jpx": "JPEG 2000", "tga": "TGA", "qoi": "QOI", "sgi": "SGI", "pcx": "PCX",
}  # fmt: skip
"""Ending -> kind of image that is read."""

UNREAD = {
    "in a format that is not read": "heic heif heics jxl psd psb svg eps ps ai wmf emf ico cur dds exr hdr pfm xcf "
    "fits fit dcm dicom nii mha nrrd ras xbm xpm jxr wdp djvu bpg flif svs ndpi lsm mrxs pdf webm mp4 m4v mov avi mkv "
    "miff pict pct fli flc jng mng",
    "a camera's raw data": "dng nef nrw cr2 cr3 crw arw srf sr2 orf rw2 raf pef srw 3fr iiq x3f raw",
    "no image": "txt md rst csv tsv json jsonl xml yaml yml toml ini cfg log html htm js css py pyc ipynb sh npy npz "
    "pt pth pkl mat h5 hdf5 parquet arrow db sqlite zip tar gz tgz bz2 xz zst 7z rar doc docx xls xlsx ppt pptx lnk "
    "url part crdownload tmp bak swp lock md5 sha256 sum cls lst idx rec xmp thm aae geojson prj tfw jgw pgw aux",
}
"""Why a file of such an ending is left out -> the endings."""
_WHY = {ending: why for why, endings in UNREAD.items() for ending in endings.split()} | dict.fromkeys(ENDINGS, "")
_OF_SYSTEMS = {"thumbs.db", "desktop.ini", "ehthumbs.db", "icon\r"}
HIDDEN = "hidden"

START = 32
"""First bytes of a file that say what it is."""
_STARTS = (
    (b"\xff\xd8\xff", "JPEG"), (b"\x89PNG\r\n\x1a\n", "PNG"), (b"GIF87a", "GIF"), (b"GIF89a", "GIF"),
    (b"II*\0", "TIFF"), (b"MM\0*", "TIFF"), (b"II+\0", "TIFF"), (b"MM\0+", "TIFF"), (b"qoif", "QOI"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"), (b"\xff\x4f\xff\x51", "JPEG 2000"),
)  # fmt: skip
_FILE_ENDINGS = {kind: end for end, kind in reversed(ENDINGS.items())}
"""Kind -> the first of its endings."""

FIRST_ENDINGS = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "ppm", "pgm", "tif", "tiff")
"""Endings for runs that began before `data.all_kinds`."""
LOOKED_AT = 50
"""Files of an unknown ending that are opened before it is taken for none of images."""

_SHOWN = 8
LeftOut = Mapping[str, tuple[int, str]]
"""Why files are left out -> how many, and one of them."""


def ending(name: str) -> str:
    """The ending of a file's name in small letters, without its dot; empty without one."""
    stem, dot, end = name.rpartition("/")[2].rpartition(".")
    return end.lower() if dot and stem else ""


def is_image(name: str) -> bool:
    """An image by its name."""
    return ending(name) in ENDINGS


def why_not(name: str) -> str | None:
    """Why a file is left out by its name; empty for an image, None where its name does not tell."""
    base = name.rpartition("/")[2]
    if base.startswith("."):
        return HIDDEN
    if base.lower() in _OF_SYSTEMS or base.endswith("~"):
        return "no image"
    return _WHY.get(ending(base))


def kind_of(start: bytes) -> str:
    """The kind of image that begins with these bytes, `START` of them; empty for none that is read.

    TGA, SGI and PCX have no beginning that nothing else has: they go by their names.
    """
    for first, kind in _STARTS:
        if start.startswith(first):
            return kind
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "WebP"
    if start[4:12] in (b"ftypavif", b"ftypavis"):
        return "AVIF"
    if start[:2] == b"BM" and int.from_bytes(start[14:18], "little") in (12, 40, 52, 56, 64, 108, 124):
        return "BMP"
    if start[:1] == b"P" and start[1:2] in b"123456" and start[2:3].isspace():
        return "PPM"
    return ""


def ending_for(start: bytes) -> str:
    """The ending of a file that begins with these bytes; ``png`` where they say nothing."""
    return _FILE_ENDINGS.get(kind_of(start), "png")


class Chooser:
    """Tells the images among the files of a folder, and counts the others by why they are left out.

    What it says depends on the files and the order in which it is asked, which is that of their names.
    """

    def __init__(self, *, all_kinds: bool = True) -> None:
        self.all_kinds = all_kinds
        self._looked = Counter[str]()
        self._found = set[str]()
        """Endings, unknown ones, of which there was an image."""
        self._left_out: dict[str, tuple[int, str]] = {}

    def take_left_out(self, root: Path) -> LeftOut:
        """The files that are no images, by paths below ``root``, and forget them: of a split that is through."""
        taken = {why: (count, example.removeprefix(f"{root}/")) for why, (count, example) in self._left_out.items()}
        self._left_out = {}
        return taken

    def takes(self, folder: str, name: str) -> bool:
        """Return whether a file is an image; opens it only where its name does not tell."""
        if not self.all_kinds:
            return ending(name) in FIRST_ENDINGS and not name.startswith(".")
        why = why_not(name)
        if why is None:
            why = self._by_content(folder, name)
        if not why:
            return True
        count, first = self._left_out.get(why, (0, f"{folder}/{name}"))
        self._left_out[why] = (count + 1, first)
        return False

    def _by_content(self, folder: str, name: str) -> str:
        end = ending(name)
        if not re.fullmatch("[a-z]{1,12}", end):  # img.0001 has none, either
            end = ""
        if self._looked[end] < LOOKED_AT or end in self._found:
            self._looked[end] += 1
            if kind_of(read_start(Path(folder, name))):
                self._found.add(end)
                return ""
        shown = f" (.{end})" if end else ""
        return f"not an image by the first bytes{shown}"


def read_start(file: Path) -> bytes:
    """The first bytes of a file; none of one that cannot be read, or is no regular file."""
    with suppress(OSError), fileio.open_regular(file, buffering=0, follow=True) as opened:
        return opened.read(START)
    return b""


def left_out_in_words(left_out: LeftOut, root: Path | None = None) -> str:
    """One line of what is left out and why; empty where nothing is."""
    parts = []
    for why, (count, example) in sorted(left_out.items(), key=lambda item: -item[1][0]):
        shown = example if root is None else example.removeprefix(f"{root}/")
        parts.append(f"{count:,} {why} ({terminal.one_line(shown, 200)})")
    if len(parts) > _SHOWN:
        parts[_SHOWN:] = [f"and for {len(parts) - _SHOWN} more reasons"]
    return ", ".join(parts)
