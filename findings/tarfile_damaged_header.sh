#!/usr/bin/env bash
# Python's tarfile ends without an error where a header behind the first one is damaged or cut short.
#
# Version:  the standard library of Python==3.11.7
# Expected: ReadError, as where the first header is damaged.
# Seen:     Iteration ends there as at the end of the archive: the members behind it are missing, and nothing says so.
# Source:   Lib/tarfile.py, TarFile.next: InvalidHeaderError and TruncatedHeaderError raise only where self.offset is 0
#
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
python3 -m venv --without-pip env
env/bin/python - <<'PYTHON'
import io
import sys
import tarfile

out = io.BytesIO()
with tarfile.open(fileobj=out, mode="w") as tar:
    for name in ("a", "b", "c"):
        member = tarfile.TarInfo(name)
        member.size = 512
        tar.addfile(member, io.BytesIO(bytes(512)))
whole = out.getvalue()
damaged = bytearray(whole)
damaged[1024] ^= 1


def names(content):
    with tarfile.open(fileobj=io.BytesIO(content), mode="r|") as tar:
        return [member.name for member in tar]


found = [names(whole), names(bytes(damaged)), names(whole[: 1024 + 300])]
print(found)
sys.exit(found != [["a", "b", "c"], ["a"], ["a"]])
PYTHON
