#!/usr/bin/env bash
# Version: pillow 12.3.0, numpy 2.4.6.
# Expected: a gray TIFF file becomes the same 8-bit picture by convert("L"), whatever its depth and whichever number is white.
# Seen, without a warning: 16 bits whose photometric says that 0 is white are not inverted, while 8 bits are; 12 bits are
#   not scaled (4095 where white is 65535); 16 bits are clipped by convert("RGB"), not scaled, so that 256 is white; 32 bits
#   without a sign come as numbers with one; bytes with a sign come as bytes without (-1 is white); floats from 0 to 1 are black.
# Source: Pillow's handbook, "Concepts: modes", and TIFF 6.0, tags PhotometricInterpretation and SampleFormat.
# Exits 0 while that is so, 1 once one of these has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pillow==12.3.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import io
import struct

import numpy
from PIL import Image


def opened(pixels: bytes, bits: int, sample: int = 1, zero_is_black: int = 1):
    """A TIFF file of 4 x 1 pixels; sample 1: whole numbers, 2: with a sign, 3: floats."""
    tags = ((256, 4), (257, 1), (258, bits), (259, 1), (262, zero_is_black), (273, 8), (277, 1), (278, 1),
            (279, len(pixels)), (339, sample))
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    directory = struct.pack("<H", len(tags)) + entries + bytes(4)
    return Image.open(io.BytesIO(b"II*\0" + struct.pack("<I", 8 + len(pixels)) + pixels + directory))


def values(picture) -> list:
    return numpy.asarray(picture).ravel().tolist()


def of(numbers: list, kind: str) -> bytes:
    return numpy.array(numbers, kind).tobytes()


seen = {
    "8 bits, 0 is white: inverted": values(opened(of([0, 1, 128, 255], "u1"), 8, 1, 0)) == [255, 254, 127, 0],
    "16 bits, 0 is white: not": values(opened(of([0, 1, 128, 65535], "<u2"), 16, 1, 0)) == [0, 1, 128, 65535],
    "12 bits: not scaled": values(opened(int("000010800fff", 16).to_bytes(6, "big"), 12)) == [0, 16, 2048, 4095],
    "16 bits to RGB: clipped": values(opened(of([0, 1, 256, 65535], "<u2"), 16).convert("RGB"))[::3] == [0, 1, 255, 255],
    "32 bits: with a sign": values(opened(of([0, 1, 2, 1 << 31], "<u4"), 32))[3] == -(1 << 31),
    "bytes with a sign: without": values(opened(of([0, 1, 2, -1], "i1"), 8, 2))[3] == 255,
    "floats from 0 to 1: black": values(opened(of([0, 0.5, 0.9, 0.99], "<f4"), 32, 3).convert("L")) == [0, 0, 0, 0],
}
for what, is_so in seen.items():
    print(f"{'as seen' if is_so else 'CHANGED'}: {what}")
raise SystemExit(0 if all(seen.values()) else 1)
PYTHON
