"""The site is built from docs/ without a warning, and is complete by itself."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.docs.__main__ import BUILD
from tests.docs.reference import DOCS, PROJECT, pages


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a link to a page or a heading that is not there is an error."""
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(DOCS, folder / "docs")
    shutil.copy(PROJECT / ".mkdocs.yml", folder)
    done = subprocess.run(BUILD, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def test_every_page_is_in_the_navigation() -> None:
    def files(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        items = entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else []
        return [file for item in items for file in files(item)]

    listed = files(yaml.safe_load((PROJECT / ".mkdocs.yml").read_text("utf-8"))["nav"])
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


@pytest.mark.nightly
def test_the_site_needs_nobody_elses_server(site: Path) -> None:
    html = list(site.rglob("*.html"))
    assert len(html) == len(list(DOCS.rglob("*.md"))) + 1  # and 404.html
    for file in html:
        loaded = re.findall(
            r"""<(?:script|link|img)\b[^>]*(?:src|href)=["']?(https?:[^"' >]+)""", file.read_text("utf-8")
        )
        assert loaded == [], file.name


def test_what_is_generated_from_the_code_is_current() -> None:
    old = [str(file.relative_to(PROJECT)) for file, text in pages().items() if file.read_text("utf-8") != text]
    assert old == [], "`python -m tests.docs` writes them anew"
