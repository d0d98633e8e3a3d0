"""Making a pack. Without torch, by several processes; one that is killed goes on where it was."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import platform
import shutil
import signal
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal

from trainkit import lifetime, reading
from trainkit.data.images import BrokenImageError, decode_pixels, read_content
from trainkit.data.pack import (
    ABOUT,
    BROKEN,
    ENCODED,
    FILES,
    FORMAT,
    IMAGES,
    INDEX,
    LONGEST,
    PIXELS,
    RECORD,
    Pack,
    smaller,
)  # fmt: skip
from trainkit.data.tree import Listing, Place
from trainkit.errors import RunFailedError, UserError
from trainkit.records.files import append, is_own, make_folder, write

Say = Callable[[str], None]
Kind = Literal["jpeg", "raw"]

QUALITY = 90
LARGEST = 65535
"""Of a side: what the index has room for, and JPEG too."""

_BUFFER = 1 << 20
_CHUNK = 8
"""Images that a process gets at once."""

Made = tuple[int, int, int, bytes]
"""Kind, height, width and bytes of a record."""


def write_pack(final: Path, place: Place, side: int, kind: Kind, *, workers: int, say: Say) -> Pack:
    """Pack the images of ``place``, their shorter side at most ``side``, into the folder ``final``.

    ``jpeg`` stores photos anew in quality 90, those that are small enough as they are, and small images of other kinds
    as pixels; ``raw`` stores pixels. A pack that is there already is left, if it is of the same files.

    Raises:
        UserError: for a file that cannot be read, a pack of another kind or of other files, and a damaged one.
        OSError: the disk is full, or not ours.
    """
    folder, splits = place
    listing = Listing.walk(folder, splits)
    files = listing.to_bytes()
    about = {"format": FORMAT, "side": side, "kind": kind, "sha256": {FILES: hashlib.sha256(files).hexdigest()}}
    if final.exists():
        return _verified(final, about, say)
    if not len(listing):
        raise UserError(f"{folder} holds no images to pack.", why="Packs are of image files.", fix="Put some there.")
    going = final.with_name(final.name + ".partial")
    if not _belongs(going, about):
        shutil.rmtree(going, ignore_errors=True)
        make_folder(going)
        write(going / FILES, files)
        write(going / ABOUT, json.dumps(about))
    with append(going / IMAGES, buffering=_BUFFER) as images, append(going / INDEX, buffering=_BUFFER) as index:
        done = _go_on(images, index)
        if done:
            say(f"Going on after {done} of {len(listing)} images.")
        paths = (str(folder / listing.path(position)) for position in range(done, len(listing)))
        start = images.seek(0, os.SEEK_END)
        with _mapped(partial(_made, side=side, kind=kind), paths, workers) as records:
            for position, record in enumerate(records, start=done):
                start += _append(images, index, start, record)
                if (position + 1) * 10 // len(listing) > position * 10 // len(listing):
                    images.flush()
                    index.flush()
                    say(f"  {(position + 1) * 100 // len(listing)} % of {len(listing)} images, {start / 1e9:.2f} GB")
        for file in (images, index):
            file.flush()
            os.fsync(file.fileno())
    about["sha256"] |= {INDEX: hashlib.sha256(reading.read_bytes(going / INDEX, LONGEST)).hexdigest()}  # type: ignore[operator]
    write(going / ABOUT, json.dumps(about, indent=2) + "\n")
    os.replace(going, final)
    return Pack(final)


def _verified(final: Path, about: dict[str, Any], say: Say) -> Pack:
    there = Pack(final)
    was = reading.parse(reading.read_bytes(final / ABOUT, follow=True))
    if was["kind"] != about["kind"]:
        raise UserError(
            f"{final} is there already, with --pack-format {was['kind']}.",
            why=f"--pack-format {about['kind']} was asked for.",
            fix="Delete the folder, or leave it as it is.",
        )
    if was["sha256"][FILES] != about["sha256"][FILES]:
        raise UserError(
            f"{final} is a pack of other files than are there now.",
            why="Images were added, removed or renamed after it was made.",
            fix="Delete the folder, and give this command again.",
        )
    say(f"{final} is already there.")
    return there


def _belongs(going: Path, about: dict[str, Any]) -> bool:
    """Whether what a killed call has left is a part of this pack."""
    try:
        was = reading.parse(reading.read_bytes(going / ABOUT))
        was["sha256"].pop(INDEX, None)  # killed when only the name was missing
        return bool(was == about and (going / FILES).is_file() and is_own(going))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _go_on(images: IO[bytes], index: IO[bytes]) -> int:
    """How many records are whole; what is behind them is cut off. A power cut may have lost what was written first."""
    import numpy

    index.seek(0)
    raw, size_of_one = index.read(), numpy.dtype(RECORD).itemsize
    records = numpy.frombuffer(raw[: len(raw) // size_of_one * size_of_one], RECORD)
    done = end = 0
    images.seek(0)
    for start, size, crc, _, _, _ in records.tolist():
        if start != end or zlib.crc32(data := images.read(size)) != crc or len(data) != size:
            break
        done, end = done + 1, end + size
    images.truncate(end)
    index.truncate(done * size_of_one)
    return done


def _append(images: IO[bytes], index: IO[bytes], start: int, made: Made) -> int:
    import numpy

    kind, height, width, data = made
    images.write(data)
    index.write(numpy.array([(start, len(data), zlib.crc32(data), height, width, kind)], RECORD).tobytes())
    return len(data)


@contextmanager
def _mapped(function: Callable[[str], Made], paths: Iterator[str], workers: int) -> Iterator[Iterator[Made]]:
    """In order, by so many processes."""
    if workers < 2:
        yield map(function, paths)
        return
    context = multiprocessing.get_context("fork" if platform.system() == "Linux" else None)
    pool = ProcessPoolExecutor(workers, context, _become_worker)
    try:
        yield _in_order(pool, function, paths, most_ahead=4 * workers)
    except BrokenProcessPool:
        raise RunFailedError(
            "A process that packs images was killed.",
            why="The kernel does so when memory runs out.",
            fix="Give the same command again, with fewer --workers: it goes on from what is packed.",
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(
    pool: Executor, function: Callable[[str], Made], paths: Iterator[str], *, most_ahead: int
) -> Iterator[Made]:
    """``most_ahead``: how many chunks may be under way, or memory would fill where the disk is slower than the CPUs."""
    under_way: deque[Any] = deque()
    while chunk := [*islice(paths, _CHUNK)]:
        under_way.append(pool.submit(_all_made, function, chunk))
        if len(under_way) > most_ahead:
            yield from under_way.popleft().result()
    while under_way:
        yield from under_way.popleft().result()


def _all_made(function: Callable[[str], Made], paths: list[str]) -> list[Made]:
    return [function(path) for path in paths]


def _become_worker() -> None:
    """Ended by whoever packs: at once if that is killed, and by SIGTERM where that itself is deaf to it."""
    lifetime.end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _made(path: str, *, side: int, kind: Kind) -> Made:
    """The record of an image file. Raises UserError for one that cannot be read at all."""
    data = read_content(Path(path))
    try:
        pixels = decode_pixels(data, 3, path)
    except BrokenImageError:
        return BROKEN, 0, 0, b""
    height, width = pixels.shape[:2]
    resized = smaller(pixels, side)
    if max(resized.shape[:2]) > LARGEST:
        return BROKEN, 0, 0, b""  # a strip, not a picture
    is_jpeg = data[:3].tobytes() == b"\xff\xd8\xff"
    if kind == "jpeg" and resized is pixels and is_jpeg:
        return ENCODED, height, width, data.tobytes()
    if kind == "raw" or resized is pixels:  # what is lossless and small stays lossless
        return PIXELS, *resized.shape[:2], resized.tobytes()
    import numpy
    import simplejpeg

    encoded = simplejpeg.encode_jpeg(numpy.ascontiguousarray(resized), QUALITY, "RGB", "420")
    return ENCODED, *resized.shape[:2], encoded
