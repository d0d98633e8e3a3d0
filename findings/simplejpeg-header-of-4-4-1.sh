#!/usr/bin/env bash
# Version: simplejpeg 1.9.0, pillow 12.3.0, numpy 2.4.6.
# Expected: decode_jpeg_header tells the size of each JPEG file that decode_jpeg decodes, or raises ValueError.
# Seen: for chroma subsampling 4:4:1 (luma sampled 1x4, as after a quarter turn of a 4:1:1 photo by jpegtran) it raises
#   KeyError: 6, while decode_jpeg and Pillow decode the file. Who catches ValueError alone ends with a traceback.
# Source: libjpeg-turbo's TJSAMP_441 (added in 3.0) has the value 6; README of simplejpeg, "decode_jpeg_header".
# Exits 0 while that is so, 1 once it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet simplejpeg==1.9.0 pillow==12.3.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import io

import numpy
import simplejpeg
from PIL import Image

out = io.BytesIO()
Image.new("RGB", (32, 32)).save(out, "JPEG", subsampling=2)
data = bytearray(out.getvalue())
frame, scan = data.index(b"\xff\xc0"), data.index(b"\xff\xda")
data[frame + 11] = 1 << 4 | 4  # luma 1x4
bits = ("001010" * 4 + "0000" * 2) * 4  # four rounds of four gray luma blocks and two chroma blocks
bits += "1" * (-len(bits) % 8)
body = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
data = bytes(data[: scan + 14]) + body + b"\xff\xd9"

assert simplejpeg.decode_jpeg(data).shape == (32, 32, 3)
assert numpy.array(Image.open(io.BytesIO(data))).shape == (32, 32, 3)
try:
    print("changed:", simplejpeg.decode_jpeg_header(data))
    raise SystemExit(1)
except KeyError as error:
    print(f"as seen: KeyError: {error}")
PYTHON
