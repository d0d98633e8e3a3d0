"""TensorBoard's event files, written without TensorBoard: its import takes seconds, on the way to the first update.

A file is a TFRecord: for each event its length, the length's checksum, the event, its checksum. An event is a message
of ``tensorboard/compat/proto/event.proto``, in the wire format of protocol buffers.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

_FLUSH_SECONDS = 10.0


class EventFile:
    """A new file of events in ``folder``; on disk after 10 seconds, or once it is closed.

    Args:
        purge_step: points of earlier files from that step on are not drawn any more.
        layout: title of each plot of the Custom Scalars tab, and the tags that it shows.
    """

    def __init__(self, folder: Path, *, purge_step: int | None, layout: Mapping[str, Iterable[str]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        # The name orders the files of several attempts, which may begin in the same second in the same process.
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file = (folder / name).open("xb")
        self._flushed = time.monotonic()
        self._write(_double(1, now) + _bytes(3, b"brain.Event:2"))
        if purge_step is not None:
            self._write(_double(1, now) + _integer(2, purge_step) + _bytes(7, _integer(1, 1)))  # SessionLog: START
        self._write(_double(1, now) + _bytes(5, _bytes(1, _layout(layout))))
        self._file.flush()

    def add(self, values: Mapping[str, float], step: int, wall_time: float) -> None:
        """A point of each tag."""
        points = b"".join(_bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in values.items())
        self._write(_double(1, wall_time) + _integer(2, step) + _bytes(5, points))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Write what is still held back."""
        self._file.close()

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(length + struct.pack("<I", _masked(length)) + event + struct.pack("<I", _masked(event)))


def _layout(plots: Mapping[str, Iterable[str]]) -> bytes:
    """A value that says which tags the Custom Scalars plugin shows together: `custom_scalar/layout.proto`."""
    charts = b"".join(
        _bytes(2, _bytes(1, title.encode()) + _bytes(2, b"".join(_bytes(1, tag.encode()) for tag in tags)))
        for title, tags in plots.items()
    )
    category = _bytes(2, _bytes(1, b"train and val") + charts)
    tensor = _integer(1, 7) + _bytes(2, b"") + _bytes(8, category)  # DT_STRING, a scalar, its one element
    metadata = _bytes(1, _bytes(1, b"custom_scalars"))
    return _bytes(1, b"custom_scalars__config__") + _bytes(8, tensor) + _bytes(9, metadata)


def _varint(number: int) -> bytes:
    digits = bytearray()
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes([*digits, number])


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    try:
        return _varint(field << 3 | 5) + struct.pack("<f", value)
    except OverflowError:  # larger than float32 has numbers for
        return _varint(field << 3 | 5) + struct.pack("<f", float("inf") if value > 0 else float("-inf"))


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)  # CRC-32C, Castagnoli's polynomial
        table.append(crc)
    return table


_CRC = _crc_table()


def _masked(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
