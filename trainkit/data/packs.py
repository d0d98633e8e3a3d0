"""A pack: all images of a data set in one file that is mapped into memory, smaller than they were and quick to read.

ROOT/NAME-SIDE.pack/ holds ``images.bin``, the records one after the other; ``index.bin``, one `RECORD` for each;
``files.bin``, the list of the files that they were; and ``pack.json``, which names the hashes of the other two.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import multiprocessing
import os
import platform
import shutil
import signal
import zlib
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, suppress
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from trainkit.common import fileio, terminal
from trainkit.common.errors import RunFailedError, TrainkitError, UserError
from trainkit.common.process import end_with_parent, node_disk
from trainkit.data import decoding, folders, image_files, image_kinds, losses
from trainkit.data.decoding import BrokenImageError, Part, read_content
from trainkit.data.download import Say, complete_folder
from trainkit.data.folders import Layout
from trainkit.data.image_files import Files
from trainkit.data.losses import Counts, SplitCounts

if TYPE_CHECKING:
    from torch import Tensor

    from trainkit.distributed.process_group import Distributed

PackFormat = Literal["jpeg", "raw"]
Stage = bool | Literal["auto"]

LONGEST = 1 << 32
"""Bytes of the index or the list: a hundred million images."""
IMAGES, INDEX, FILES, ABOUT = "images.bin", "index.bin", "files.bin", "pack.json"
FORMAT = 1
_LEFT_OUT = "left_out"
"""Key of ``pack.json``: files of the folder that are no images, by split; older packs do without."""

RECORD = [("start", "<u8"), ("size", "<u4"), ("crc", "<u4"), ("height", "<u2"), ("width", "<u2"), ("kind", "u1")]
"""An index record of numpy: where a record's bytes lie, their CRC-32, the image's size, and one of these kinds:"""
BROKEN, PIXELS, ENCODED = 0, 1, 2
"""Nothing, the file was no image; RGB pixels [H, W, 3]; an image file, as a rule JPEG."""


def pack_folder(root: Path, name: str, side: int) -> Path:
    """Folder of a data set's pack."""
    return root / f"{name}-{side}.pack"


class Pack(Files):
    """The files of a pack. Raises UserError where it is damaged or cut short."""

    def __init__(self, folder: Path) -> None:
        import numpy

        try:
            about: dict[str, Any] = fileio.parse(fileio.read_bytes(folder / ABOUT, follow=True))
            if about["format"] != FORMAT:
                raise ValueError(f"its format is {about['format']}, not {FORMAT}")
            content = {file: fileio.read_bytes(folder / file, LONGEST, follow=True) for file in (INDEX, FILES)}
            for file in content:
                if _sha256(content[file]) != about["sha256"][file]:
                    raise ValueError(f"{file} has another hash")
            super().__init__(folder, *image_files.parse_list(content[FILES]))
            self.exif = about.get("exif") is True
            self.left_out = {split: losses.from_json(told) for split, told in about.get(_LEFT_OUT, {}).items()}
            self._index = numpy.memmap(folder / INDEX, RECORD, mode="r")
            self.size = int(self._index["start"][-1]) + int(self._index["size"][-1])
            if len(self._index) != len(self) or (folder / IMAGES).stat().st_size != self.size:
                raise ValueError(f"{IMAGES} is cut short, or of another pack")
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise broken_pack(folder, str(error)) from None

    def __reduce__(self) -> tuple[type[Pack], tuple[Path]]:
        return Pack, (self.folder,)  # a worker that is not forked maps the files anew

    @cached_property
    def _images(self) -> memoryview:
        """Mapped when it is first read, so that all ranks and workers of a node share its pages."""
        with (self.folder / IMAGES).open("rb") as file:
            if not self.size:
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    @cached_property
    def stacked(self) -> Tensor | None:
        """All images as one mapped tensor, uint8 [N, 3, H, W]; None if they are not pixels of one size."""
        import torch

        index = self._index
        height = int(index["height"][0])
        width = int(index["width"][0])
        size = height * width * 3
        alike = (index["kind"] == PIXELS) & (index["height"] == height) & (index["width"] == width)
        if not size or not alike.all() or self.size != size * len(self):
            return None
        with (self.folder / IMAGES).open("rb") as file:  # a tensor may be written to: that would be ours alone
            pixels = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        return pixels.view(len(self), height, width, 3).permute(0, 3, 1, 2)

    def read(self, position: int, in_chans: int, part: Part | None = None) -> Tensor:
        """The image, or a part of it, as `trainkit.data.decoding.read_image` gives it.

        Raises:
            BrokenImageError: the file was no image when it was packed.
            UserError: the pack is damaged here. Pixels are not checked, which would take longer than all the rest:
                `verify` does that.
        """
        import numpy
        import torch

        start, size, crc, height, width, kind = self._index[position].item()
        if kind == BROKEN:
            file = self.path(position)
            fix = "Replace or delete the file and pack again; or skip some with data.max_broken=10."
            why = "The file was already broken when it was packed."
            raise BrokenImageError(f"Cannot decode the image {file} in {self.folder}.", why=why, fix=fix, file=file)
        data = self._images[start : start + size]
        if kind == ENCODED:
            if zlib.crc32(data) != crc:
                raise self._damaged(position)
            return decoding.decode_image(data, in_chans, self.path(position), exif=self.exif, part=part)
        pixels = numpy.frombuffer(data, numpy.uint8).reshape(height, width, 3)
        if part is not None:
            pixels = decoding.cut(pixels, part.choose(height, width))
        if in_chans == 1:
            return torch.from_numpy(decoding.gray_of(pixels)).permute(2, 0, 1)
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1)  # a tensor could be written to, the mapping not

    def shorter_sides(self) -> list[int]:
        """Shorter sides of some of the images, from all over the pack."""
        some = self._index[folders.evenly(range(len(self)), folders.MEASURED)]
        return [min(sides) for sides in zip(some["height"].tolist(), some["width"].tolist(), strict=True)]

    def counts(self) -> Counts:
        """Count the images of each split; broken ones, and files that were no images, are left out."""
        found = {}
        for split, classes in self.splits.items():
            left = losses.summed([self.left_out.get(split, {})])
            whole: list[int] = []
            for positions in classes.values():
                broken = (self._index["kind"][positions.start : positions.stop] == BROKEN).nonzero()[0].tolist()
                if broken:
                    left.note(losses.NOT_AN_IMAGE, self.path(positions.start + broken[0]), len(broken))
                whole.append(len(positions) - len(broken))
            found[split or "all"] = SplitCounts(sum(whole), sum(map(bool, whole)), left)
        return found

    def verify(self) -> list[str]:
        """Read everything; return the files that were broken already when they were packed.

        Raises UserError for the first record that is not as it was written.
        """
        broken = []
        for position, (start, size, crc, _, _, kind) in enumerate(self._index.tolist()):
            if zlib.crc32(self._images[start : start + size]) != crc:
                raise self._damaged(position)
            if kind == BROKEN:
                broken.append(self.path(position))
        return broken

    def _damaged(self, position: int) -> UserError:
        return broken_pack(self.folder, f"the record of {self.path(position)} has another checksum")


def require_pack(folder: Path, name: str, side: int) -> None:
    """Refuse, without reading it, a pack that is not there."""
    if not (folder / ABOUT).is_file():
        why = f"data.pack={side} reads the images from it."
        fix = terminal.command("prepare", name, "--root", folder.parent, "--pack", side)
        raise UserError(f"There is no pack {folder}.", why=why, fix=fix, key="data.pack")


def require_exif(pack: Pack, name: str, side: int, exif: bool) -> None:
    """Refuse a pack whose photos are not turned as the settings say: its pixels stay as they were packed."""
    if pack.exif != exif:
        turned = ["--exif"] if exif else []
        again = terminal.command("prepare", name, "--root", pack.folder.parent, "--pack", side, *turned)
        what = f"data.exif={str(exif).lower()} does not go with the pack {pack.folder}."
        fix = f"Use data.exif={str(pack.exif).lower()}; or delete the pack, and make it again: {again}"
        raise UserError(what, why="Photos are turned when a pack is made, not later.", fix=fix, key="data.exif")


def broken_pack(folder: Path, why: str) -> UserError:
    """The error for a pack that is not as it was written."""
    fix = "Delete the folder and prepare it again, or copy it again."
    return UserError(f"The pack {folder} is damaged.", why=f"{why}.", fix=fix, key="data.pack")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# Making a pack, without torch, by several processes. A call that was killed goes on where it was.

QUALITY = 90
LARGEST = 65535
"""Pixels of a side: what the index has room for, and JPEG too."""

_BUFFER = 1 << 20
_CHUNK = 8
"""Images that a process gets at once."""
_AT_ONCE = 128
"""Images that are under way for each process."""

PackEntry = tuple[int, int, int, bytes]
"""Kind, height, width and bytes."""


def write_pack(
    final: Path, layout: Layout, side: int, kind: PackFormat, *, workers: int, say: Say, exif: bool = False
) -> Pack:
    """Pack the images of ``layout``, their shorter side at most ``side``, into the folder ``final``.

    ``jpeg`` stores photos anew in quality 90, those that are small enough as they are, and small images of other kinds
    as pixels; ``raw`` stores pixels. A pack that is there already is left, if it is of the same files.

    Args:
        exif: photos are turned upright, as their EXIF data says.

    Raises:
        UserError: for a file that cannot be read, a pack of another kind or of other files, and a damaged one.
        OSError: the disk is full, or not ours.
    """
    listed = Files.walk(*layout)
    files = listed.to_bytes()
    hashes = {FILES: _sha256(files)}
    about: dict[str, Any] = {"format": FORMAT, "side": side, "kind": kind, "sha256": hashes}
    if exif:
        about["exif"] = True
    if final.exists():
        return _verified(final, about, say)
    if not len(listed):
        what = f"{listed.folder} holds no images to pack."
        raise UserError(what, why="Only image files can be packed.", fix="Put some there.")
    words = image_kinds.left_out_in_words(losses.summed(listed.left_out.values()), listed.folder)
    if words:
        say(f"Left out of {listed.folder}: {words}.")
    with complete_folder(final, keep=True) as going:
        if not _belongs(going, about):
            for left in going.iterdir():
                left.unlink()
            fileio.write(going / FILES, files)
            fileio.write(going / ABOUT, json.dumps(about))
        _write_records(going, listed, partial(_record, side=side, kind=kind, exif=exif), workers, say)
        hashes[INDEX] = _sha256(fileio.read_bytes(going / INDEX, LONGEST))
        about[_LEFT_OUT] = {split: losses.to_json(left_out) for split, left_out in listed.left_out.items()}
        fileio.write(going / ABOUT, json.dumps(about, indent=2) + "\n")
    return Pack(final)


def _write_records(going: Path, listed: Files, record_of: Callable[[str], PackEntry], workers: int, say: Say) -> None:
    """Write the records that are not in the folder yet."""
    with ExitStack() as files:
        images = files.enter_context(fileio.append(going / IMAGES, buffering=_BUFFER))
        index = files.enter_context(fileio.append(going / INDEX, buffering=_BUFFER))
        done = _go_on(images, index)
        if done:
            say(f"Continuing after {done} of {len(listed)} images.")
        paths = (str(listed.folder / listed.path(position)) for position in range(done, len(listed)))
        start = images.seek(0, os.SEEK_END)
        records = files.enter_context(closing(_mapped(record_of, paths, workers)))
        for count, record in enumerate(records, start=done + 1):
            start = _append(images, index, start, record)
            if count * 10 // len(listed) > (count - 1) * 10 // len(listed):
                images.flush()
                index.flush()
                say(f"  {count * 100 // len(listed)} % of {len(listed)} images, {start / 1e9:.2f} GB")
        for file in (images, index):
            file.flush()
            os.fsync(file.fileno())


def _verified(final: Path, about: dict[str, Any], say: Say) -> Pack:
    found = Pack(final)
    was = fileio.parse(fileio.read_bytes(final / ABOUT, follow=True))
    if (was["kind"], was["sha256"][FILES], found.exif) != (about["kind"], about["sha256"][FILES], "exif" in about):
        what = f"{final} already exists and is a different pack."
        why = f"It has {was['kind']} images, exif={str(found.exif).lower()}, of the files at that time."
        raise UserError(what, why=why, fix="Delete the folder, and repeat this command.")
    say(f"{final} already exists.")
    return found


def _belongs(going: Path, about: dict[str, Any]) -> bool:
    """Tell whether what a killed call has left is a part of this pack."""
    was = fileio.read_object(going / ABOUT)
    hashes = was.get("sha256")
    if isinstance(hashes, dict):
        hashes.pop(INDEX, None)  # killed when only the name was missing
        was.pop(_LEFT_OUT, None)
    return was == about and (going / FILES).is_file()


def _go_on(images: IO[bytes], index: IO[bytes]) -> int:
    """Count the records that are whole, and cut off the rest: a power cut may have lost what was written first."""
    import numpy

    index.seek(0)
    raw = index.read()
    size_of_one = numpy.dtype(RECORD).itemsize
    done = end = 0
    images.seek(0)
    for start, size, crc, *_ in numpy.frombuffer(raw, RECORD, len(raw) // size_of_one).tolist():
        data = images.read(size)
        if start != end or zlib.crc32(data) != crc or len(data) != size:
            break
        done += 1
        end += size
    images.truncate(end)
    index.truncate(done * size_of_one)
    return done


def _append(images: IO[bytes], index: IO[bytes], start: int, record: PackEntry) -> int:
    import numpy

    kind, height, width, data = record
    images.write(data)
    index.write(numpy.array([(start, len(data), zlib.crc32(data), height, width, kind)], RECORD).tobytes())
    return start + len(data)


def _mapped(
    function: Callable[[str], PackEntry], paths: Iterator[str], workers: int
) -> Generator[PackEntry, None, None]:
    """The entries of ``paths`` in their order, made by several processes."""
    if workers < 2:
        yield from map(function, paths)
        return
    context = multiprocessing.get_context("fork" if platform.system() == "Linux" else None)
    try:
        with ProcessPoolExecutor(workers, context, _become_worker) as pool:
            # Some at a time: all would fill the memory where the disk is slower than the CPUs.
            for first in paths:
                some = [first, *islice(paths, _AT_ONCE * workers - 1)]
                yield from pool.map(function, some, chunksize=_CHUNK)  # which cancels what is left where it ends early
    except BrokenProcessPool:
        why = "The kernel kills processes when memory runs out."
        fix = "Repeat the command with fewer --workers; it continues after the packed images."
        raise RunFailedError("A process that packs images was killed.", why=why, fix=fix) from None


def _become_worker() -> None:
    """End with the process that packs, also when that is killed; and by SIGTERM where that one ignores it."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _record(path: str, *, side: int, kind: PackFormat, exif: bool = False) -> PackEntry:
    """Make the record of an image file. Raises UserError for one that cannot be read at all."""
    import numpy
    import simplejpeg
    from PIL import Image

    data = read_content(Path(path))
    try:
        pixels = decoding.decode_pixels(data, 3, path, exif=exif)
    except BrokenImageError:
        return BROKEN, 0, 0, b""
    height, width = pixels.shape[:2]
    least = min(height, width)
    is_small = least <= side
    if not is_small:
        height = side * height // least  # rounded as for evaluation
        width = side * width // least
        resized = Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR)
        pixels = numpy.ascontiguousarray(resized)
    if max(height, width) > LARGEST:
        return BROKEN, 0, 0, b""  # a strip, not a picture
    if kind == "jpeg" and is_small and data[:3] == b"\xff\xd8\xff":
        return ENCODED, height, width, data
    if kind == "raw" or is_small:  # what is lossless and small stays lossless
        return PIXELS, height, width, pixels.tobytes()
    return ENCODED, height, width, simplejpeg.encode_jpeg(pixels, QUALITY, "RGB", "420")


# A pack on the disk of the node that reads it: copied once a node, whatever ranks and jobs are there. Such a disk is
# shared with other users, so the copies of each are in a folder that nobody else can get at.

SPARE = 1 << 28
"""Bytes that are left to others on the node's disk."""


def staged_folder(pack: Path, disk: Path) -> Path:
    """Folder of a pack's copy on a node's disk. A pack that was made anew has another one."""
    digest = _sha256(fileio.read_bytes(pack / ABOUT, follow=True))[:16]
    return disk / f"trainkit-{os.geteuid()}" / f"{pack.stem}-{digest}.pack"


def staged(pack: Path, disk: Path) -> Pack | None:
    """The copy of a pack on a node's disk, if it is there whole, and of this user's making."""
    with suppress(OSError, TrainkitError):  # there is none, or somebody has cleaned up
        copy = staged_folder(pack, disk)
        is_same = fileio.read_bytes(copy / ABOUT) == fileio.read_bytes(pack / ABOUT, follow=True)
        if is_same and fileio.is_own(copy.parent, private=True):
            return Pack(copy)
    return None


def stage(pack: Path, disk: Path) -> str:
    """Copy ``pack`` to ``disk``, unless it is there already, and verify the copy. Return why not, if it has no room or
    others can write to its folder.

    Of several processes on the node one copies and the others wait, also those of other jobs. A copy has its final name
    once it is complete; what a killed process has left is removed by the next.

    Raises:
        UserError: the pack is damaged, or the disk cannot be written.
    """
    fix = "Name a node-local disk with enough space in TMPDIR, or set data.stage=false."
    with fileio.disk_errors_as(f"The pack {pack} could not be copied to {disk}.", fix=fix, key="data.stage"):
        final = staged_folder(pack, disk)
        if not fileio.make_own(final.parent):
            return f"{final.parent} is not this user's alone"
        with fileio.append(final.with_name(final.name + ".lock"), final.parent) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the system lets go of it when its holder is killed
            if staged(pack, disk) is not None:
                return ""
            shutil.rmtree(final, ignore_errors=True)
            shutil.rmtree(final.with_name(final.name + ".partial"), ignore_errors=True)
            size = sum((pack / file).stat().st_size for file in (IMAGES, INDEX, FILES))
            free = shutil.disk_usage(disk).free
            if size + SPARE > free:
                return f"{disk} has {free / 1e9:.1f} GB left, and the pack takes {size / 1e9:.1f}"
            with complete_folder(final) as going:
                for file in (IMAGES, INDEX, FILES, ABOUT):
                    fileio.copy(pack / file, going / file, final.parent)
                Pack(going).verify()
    return ""


def opened_pack(root: Path, name: str, side: int, staging: Stage, dist: Distributed) -> Pack:
    """The pack of a data set; its copy on this node's disk if ``staging`` says so. One rank of a node copies.

    Raises:
        UserError: on all ranks, where it is missing or damaged on one, and where it must be copied and cannot be.
    """
    folder = pack_folder(root, name, side)
    if staging is False:
        return dist.together(lambda: Pack(folder))
    disk = node_disk()
    dist.together(lambda: _stage(folder, disk, must=staging is True) if dist.env.local_rank == 0 else None)
    return dist.together(lambda: (disk and staged(folder, disk)) or Pack(folder))


def _stage(pack: Path, disk: Path | None, *, must: bool) -> None:
    why_not = "neither SLURM_TMPDIR nor TMPDIR names a folder here"
    if disk is not None:
        why_not = stage(pack, disk)
    if why_not and must:
        what = f"The pack {pack} cannot be copied to this node."
        fix = "Set data.stage=auto: then it is read from its own folder."
        raise UserError(what, why=f"{why_not[0].upper()}{why_not[1:]}.", fix=fix, key="data.stage")
    if why_not:
        terminal.say(f"Note: the pack is read from its own folder: {why_not}.")
    else:
        terminal.say(f"The pack is read from this node's {disk}.")
