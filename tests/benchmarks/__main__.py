"""``python -m tests.benchmarks``: all measurements, one after the other, and the table of their figures.

    python -m tests.benchmarks --only loop_cost    # one of them
    python -m tests.benchmarks --rounds 1          # whether they run; says nothing
    python -m tests.benchmarks --write             # the table into README.md here, its headlines into docs/bench.md
    python -m tests.benchmarks --only X --write    # its rows anew, the others' stay

A measurement is a file here with ``measure(rounds=ROUNDS) -> Sequence[Figure | Table]``. Each runs in a process of its
own, which ends with this one however that ends. Those of `BY_NAME` take long and have a table each.
"""

import argparse
import os
import platform
import time
from collections.abc import Sequence
from datetime import date
from importlib import metadata
from pathlib import Path

import torch

from tests.benchmarks.measuring import Figure, Table
from tests.benchmarks.processes import measured

HERE = Path(__file__).parent
PAGES = (HERE / "README.md", HERE.parents[1] / "docs" / "bench.md")
NOT_MEASUREMENTS = ("__init__", "__main__", "machines", "measuring", "processes", "resident")
BY_NAME = ("deadlines", "recovery", "streams", "swarm_accuracy", "swarm_codecs", "swarm_many", "swarm_matchmaking")
"""Measured only where --only says so."""
BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print; 1 if a measurement failed or is void."""
    names = sorted(file.stem for file in HERE.glob("*.py") if file.stem not in NOT_MEASUREMENTS)
    parser = argparse.ArgumentParser("python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--only", action="append", choices=names, help="one of them; repeatable")
    parser.add_argument("--rounds", type=int, help="how often the arms take turns; otherwise each file's own")
    parser.add_argument("--write", action="store_true", help="put the tables into README.md here and docs/bench.md")
    args = parser.parse_args(argv)
    if args.write and args.rounds:
        parser.error("--write is for figures: without --rounds")
    found, tables, began = list[tuple[str, Figure]](), dict[str, Table](), time.monotonic()
    for name in args.only or [name for name in names if name not in BY_NAME]:
        started = time.monotonic()
        for one in measured(name, args.rounds):
            if isinstance(one, Table):
                tables[name] = one
                print(*one.lines(), sep="\n", flush=True)
            else:
                found.append((name, one))
                print(one.row(name), flush=True)
        print(f"{name} took {time.monotonic() - started:.0f} s", flush=True)
    place = where()
    table = [place, "", "| file | what | figure | control | goal | met |", "|---|---|---|---|---|---|"]
    table += [figure.row(name) for name, figure in found]
    headlines = [place, "", "| | figure | goal | met |", "|---|---|---|---|"]
    headlines += [figure.short_row() for _, figure in found if figure.headline]
    if args.write:
        for name, own in tables.items():
            for file in PAGES:
                if BEGIN.replace("measured", name) in file.read_text():
                    write(file, [place, "", *own.lines()], name)
    if not found:
        return 0
    print("", *table, "", f"All took {time.monotonic() - began:.0f} s", sep="\n")
    if args.write:
        for file, lines in zip(PAGES, (table, headlines), strict=True):
            write(file, merged(file, lines, args.only) if args.only else lines)
    return int(any(figure.void or figure.note.startswith("failed") for _, figure in found))


def where() -> str:
    """Date, machine and versions."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "torchvision", "timm"))
    cores, python = f"{os.cpu_count()} CPU cores ({platform.machine()})", f"Python {platform.python_version()}"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{date.today()}, {cores}, {gpu}, {python}, {versions}"


def write(file: Path, lines: Sequence[str], name: str = "measured") -> None:
    """Put the lines between the file's two marks of that name."""
    before, _, after = _parts(file, name)
    begin, end = (mark.replace("measured", name) for mark in (BEGIN, END))
    file.write_text(f"{before}{begin}\n" + "\n".join(lines) + f"\n\n{end}{after}")


def merged(file: Path, lines: Sequence[str], names: Sequence[str]) -> list[str]:
    """The file's table with these rows in place of those of the measurements ``names``, or of the same headlines.

    Raises SystemExit where the others were measured on another machine or with other versions.
    """
    old_place, _, *old = _parts(file)[1].strip().split("\n")
    place, gap, head, rule, *new = lines
    (old_days, _, old_where), (day, _, where_now) = old_place.partition(", "), place.partition(", ")
    if old_where != where_now:
        raise SystemExit(f"The table is of {old_where}; this is {where_now}. Measure all, without --only.")
    first, last = old_days.split(" to ")[0], max(old_days.split(" to ")[-1], day)
    replaced = {f"`{name}`" for name in names} | {_cell(row) for row in new}
    rows = [row for row in old[2:] if _cell(row) not in replaced]
    ordered = sorted([*rows, *new], key=_cell) if head.startswith("| file") else [*rows, *new]
    return [f"{first if first == last else f'{first} to {last}'}, {where_now}", gap, head, rule, *ordered]


def _parts(file: Path, name: str = "measured") -> tuple[str, str, str]:
    begin, end = (mark.replace("measured", name) for mark in (BEGIN, END))
    before, rest = file.read_text().split(begin)
    inside, after = rest.split(end)
    return before, inside, after


def _cell(row: str) -> str:
    return row.split("|")[1].strip()


if __name__ == "__main__":
    raise SystemExit(main())
