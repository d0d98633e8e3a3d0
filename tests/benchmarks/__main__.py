"""``python -m tests.benchmarks``: all measurements, one after the other, and the table of their figures.

    python -m tests.benchmarks --only loop_cost
    python -m tests.benchmarks --peers PYTHON      # that has tests/benchmarks/requirements.txt

A measurement is a file here with ``measure() -> list[Figure]``; it may take ``peers``, the python of the others. One
that has only a ``main`` says in its own words what it has found.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import date
from pathlib import Path

NOT_MEASUREMENTS = ("__init__", "__main__", "measuring")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print; 1 if a measurement failed or is void."""
    names = sorted(file.stem for file in Path(__file__).parent.glob("*.py") if file.stem not in NOT_MEASUREMENTS)
    parser = argparse.ArgumentParser("python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--only", action="append", choices=names, help="one of them; repeatable")
    parser.add_argument("--peers", help="the python of an environment that has the peers")
    args = parser.parse_args(argv)
    rows, failed = [], False
    for name in args.only or names:
        began = time.monotonic()
        module = importlib.import_module(f"tests.benchmarks.{name}")
        if not hasattr(module, "measure"):
            done = subprocess.run([sys.executable, "-m", module.__name__])
            failed |= done.returncode != 0
            print(f"{name} took {time.monotonic() - began:.0f} s", flush=True)
            continue
        takes_peers = "peers" in inspect.signature(module.measure).parameters
        try:
            figures = module.measure(peers=args.peers) if takes_peers else module.measure()
        except Exception:
            traceback.print_exc()
            failed = True
            continue
        for figure in figures:
            rows.append(figure.row())
            failed |= figure.note.startswith("void")
            print(f"{name}: {figure.what}: {figure.figure} {figure.note}", flush=True)
        print(f"{name} took {time.monotonic() - began:.0f} s", flush=True)
    print(f"\n{where(args.peers)}\n\n| what | figure | goal | |\n|---|---|---|---|", *rows, sep="\n")
    return int(failed)


def where(peers: str | None) -> str:
    """Date, machine and versions."""
    packages = ["torch"] if peers is None else ["torch", "lightning", "accelerate"]
    ask = f"import importlib.metadata as m; print(', '.join(f'{{p}} {{m.version(p)}}' for p in {packages}))"
    versions = subprocess.run([peers or sys.executable, "-c", ask], capture_output=True, text=True).stdout.strip()
    cores, python = f"{os.cpu_count()} CPU cores ({platform.machine()})", f"Python {platform.python_version()}"
    return f"{date.today()}, {cores}, {python}, {versions}"


if __name__ == "__main__":
    raise SystemExit(main())
