from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trainkit import fileio


def sparse(path: Path) -> None:
    with path.open("wb") as out:
        out.truncate(300 << 30)


def a_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # its path may be too long for one
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


ODD: dict[str, Callable[[Path], object]] = {
    "sparse": sparse,
    "fifo": os.mkfifo,
    "socket": a_socket,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path),
    "nothing": lambda path: None,
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("read", [fileio.read_bytes, fileio.read_text])
def test_what_is_no_file_or_too_large_is_an_error_at_once(
    tmp_path: Path, odd: str, read: Callable[[Path], object]
) -> None:
    path = tmp_path / "odd"
    ODD[odd](path)
    began = time.monotonic()
    with pytest.raises(OSError, match=r".") as caught:
        read(path)
    assert time.monotonic() - began < 1
    assert caught.value.strerror


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_file_holds_no_object(tmp_path: Path, odd: str) -> None:
    ODD[odd](tmp_path / "odd")
    assert fileio.read_object(tmp_path / "odd") == {}


@pytest.mark.parametrize(
    "read", [fileio.read_bytes, fileio.read_text, lambda path, **how: fileio.read_start(path, 9, **how)]
)
def test_a_link_is_read_only_by_who_says_so(tmp_path: Path, read: Callable[..., object]) -> None:
    (tmp_path / "key").write_text("secret")
    (tmp_path / "log").symlink_to("key")
    with pytest.raises(OSError, match="It is a link"):
        read(tmp_path / "log")
    assert read(tmp_path / "log", follow=True) in ("secret", b"secret")


@pytest.mark.parametrize("size", [0, 1, 70_000, 200_000])
def test_a_file_is_read_whole_up_to_its_limit(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(size))
    assert fileio.read_bytes(path, size) == path.read_bytes()
    if size:
        with pytest.raises(OSError, match=f"{size:,} bytes"):
            fileio.read_bytes(path, size - 1)


def test_a_file_that_does_not_know_its_size_is_read_whole() -> None:
    file = Path("/proc/self/status")
    assert file.stat().st_size == 0
    assert fileio.read_text(file).startswith("Name:")


def test_a_file_that_grows_while_it_is_read_has_an_end(tmp_path: Path) -> None:
    path, over = tmp_path / "file", threading.Event()
    path.write_bytes(b"x" * 200_000)

    def grow() -> None:
        with path.open("ab") as out:
            while not over.wait(0.0001) and out.tell() < 1 << 26:
                out.write(b"x" * 200_000)

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        for _ in range(50):
            with contextlib.suppress(OSError):
                assert len(fileio.read_bytes(path, 1 << 20)) <= 1 << 20
    finally:
        over.set()
        writer.join()


def test_the_end_of_a_long_file_is_read_alone(tmp_path: Path) -> None:
    sparse(tmp_path / "file")
    with (tmp_path / "file").open("ab") as out:
        out.write(b"the end")
    assert fileio.read_end(tmp_path / "file", 7) == "the end"
    assert fileio.read_start(tmp_path / "file", 3) == "\0\0\0"


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, "[" + "[]," * 2_000_000 + "[]]", "", "{", b"\xff"],
    ids=["depth of lists", "depth of objects", "values", "nothing", "torn", "no text"],
)
def test_a_text_that_is_no_json_or_too_much_of_it_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        fileio.parse(text)
    assert fileio.parse_object(text) is None


def test_numbers_that_nobody_can_compute_with_are_null() -> None:
    assert fileio.parse(f"[NaN, -Infinity, {'9' * 5000}, 12]") == [None, None, None, 12]
