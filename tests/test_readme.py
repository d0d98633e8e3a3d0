"""README.md: what it tells a new user to type is typed here, and what it promises is what comes out."""

import re
import subprocess
from pathlib import Path

import pytest

from tests import readme

PROJECT = readme.README.parent
ACCURACY = r"(val|test) acc1 ([\d.]+) %"
Done = subprocess.CompletedProcess[str]


def section(heading: str) -> str:
    text = readme.README.read_text("utf-8")
    (found,) = (part for part in re.split("^## ", text, flags=re.MULTILINE) if part.startswith(f"{heading}\n"))
    return found


def test_it_is_one_screen() -> None:
    text = readme.README.read_text("utf-8")
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 1300


def test_every_block_says_where_it_is_run() -> None:
    # The first two, the main command and the tests, are what `.ci/run` gives.
    marks = readme.marks()
    assert marks[:2] == [None, None]
    assert set(marks[2:]) == {"laptop", "slurm"}


def test_ci_gives_the_first_two_blocks() -> None:
    script = (PROJECT / ".ci" / "run").read_text()
    assert "for n in 1 2" in script
    assert "README.md" in script


@pytest.fixture(scope="module")
def main_job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """Its folder, and what it said."""
    folder = tmp_path_factory.mktemp("clone")
    (line,) = (line for line in readme.marked()[0][1] if "jobs.submit" in line)
    return folder, readme.type_in(line.removeprefix(".venv/bin/"), folder)


@pytest.mark.nightly
def test_the_numbers_it_promises_are_those_that_the_main_job_prints(main_job: tuple[Path, Done]) -> None:
    _, done = main_job
    assert done.returncode == 0, done.stderr
    promised = dict(re.findall(ACCURACY, readme.README.read_text("utf-8")))
    (last,) = (line for line in done.stdout.splitlines() if line.startswith("val acc1"))
    printed = dict(re.findall(ACCURACY, last))
    assert promised.keys() == printed.keys() == {"val", "test"}
    assert all(abs(float(printed[split]) - float(promised[split])) < 1.0 for split in promised), (printed, promised)


@pytest.mark.nightly
def test_the_commands_after_the_main_job_work_as_they_stand(main_job: tuple[Path, Done]) -> None:
    folder, _ = main_job
    for line in (line for lines in readme.blocks("laptop") for line in lines):
        done = readme.type_in(line, folder)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    assert (folder / "runs" / "ddp-0001" / "report.html").is_file()


def test_every_link_resolves() -> None:
    text = re.sub(r"```.*?```", "", readme.README.read_text("utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", text):
        path, _, anchor = target.partition("#")
        if not re.match(r"[a-z]+:", target):  # else it is elsewhere: tests do without a network
            assert (PROJECT / path).exists() if path else anchor in anchors, target


def test_its_speeds_are_those_of_the_measured_table() -> None:
    table = (readme.DOCS / "bench.md").read_text("utf-8")
    measured = [float(value) for value in re.findall(r"^\| .* \| ([\d.]+)(?: x)? \(", table, re.MULTILINE)]
    named = re.findall(r"(?<!\w)\d+(?:\.\d+)?(?= (?:of|times))", section("How fast it is"))
    assert len(named) == 4
    for number in named:
        decimals = len(number.partition(".")[2])
        assert any(round(value, decimals) == float(number) for value in measured), number


def test_its_pictures_are_small_and_show_the_accuracy_that_the_text_says() -> None:
    text = readme.README.read_text("utf-8")
    shown = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert shown == ["docs/pictures/curves.svg", "docs/pictures/run.svg"]
    curves, way = ((PROJECT / name).read_text("utf-8") for name in shown)
    assert len(curves) + len(way) < 30_000
    assert dict(re.findall(ACCURACY, curves)) == dict(re.findall(ACCURACY, text))
