"""The project's papers: who cites, contributes and reads what changed finds what is true."""

import datetime
import re

import pytest
import yaml

from tests import check, readme

PROJECT = readme.README.parent
VERSION = str(re.findall(r'^version = "(.+)"', (PROJECT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)[0])
RELEASES = re.findall(r"^## (\S+) - (\S+)$", (PROJECT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)


def test_the_citation_is_of_this_version() -> None:
    """With what version 1.2.0 of the format requires."""
    cff = yaml.safe_load((PROJECT / "CITATION.cff").read_text("utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= cff.keys()
    assert cff["cff-version"] == "1.2.0"
    assert cff["type"] == "software"
    assert all(author.keys() & {"name", "family-names"} for author in cff["authors"])
    assert cff["version"] == VERSION
    assert cff["license"] == "MIT"
    assert cff["date-released"] == dict(RELEASES)[VERSION]


def test_the_newest_change_is_of_this_version() -> None:
    assert RELEASES[0][0] == VERSION
    dates = [datetime.date.fromisoformat(date) for _, date in RELEASES]
    assert dates == sorted(dates, reverse=True)


@pytest.mark.long
def test_a_contributor_checks_a_room_as_the_page_says() -> None:
    ((install, command),) = readme.blocks("contributor", PROJECT / "CONTRIBUTING.md")
    assert install == "pip install --quiet -e '.[dev]'"  # which CI does, with the README's second block
    done = readme.type_in(command, PROJECT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("== config: all passed\n")


def test_what_a_check_leaves_to_the_whole_suite_is_there() -> None:
    assert [name for name in check.SLOW if not (PROJECT / name).is_file()] == []


@pytest.mark.parametrize("room", check.rooms())
def test_a_room_is_checked_with_its_own_tests(room: str) -> None:
    code, tests = check.folders(room)
    assert code or room == "docs"
    assert tests
    for path in (*code, *tests):
        assert (PROJECT / path).exists(), path
