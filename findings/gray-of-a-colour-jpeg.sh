#!/usr/bin/env bash
# Version: simplejpeg 1.9.0, pillow 12.3.0, numpy 2.4.6.
# Expected: gray pixels of one colour JPEG are the same by every decoder, or one level apart by rounding.
# Seen: a decoder that is asked for gray gives the luma that the file stores (simplejpeg "GRAY"; Pillow after draft("L")).
#   convert("L") computes it of RGB pixels that were clipped to 0..255. Saturated colours are tens of levels apart, so a
#   model that was trained on one kind of gray is tested on another. Photos: rounding, mostly.
# Source: JFIF 1.02, conversion to and from RGB, "values are clipped"; Pillow's documentation of Image.convert and draft.
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

pixels = numpy.random.default_rng(0).integers(0, 2, (64, 64, 3), numpy.uint8) * 255
out = io.BytesIO()
Image.fromarray(pixels).save(out, "JPEG")
data = out.getvalue()
stored = simplejpeg.decode_jpeg(data, "GRAY")[..., 0].astype(int)
computed = numpy.array(Image.open(io.BytesIO(data)).convert("L")).astype(int)
drafted = Image.open(io.BytesIO(data))
drafted.draft("L", drafted.size)
assert numpy.array_equal(stored, numpy.array(drafted)), "libjpeg's own gray, twice"
most = abs(stored - computed).max()
print(f"the two kinds of gray are up to {most} levels apart")
raise SystemExit(0 if most > 16 else 1)
PYTHON
