"""A session of tests leaves nothing outside its own folder, and says what it could not help leaving."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import scratch
from tests.runs import wait_until

PROJECT = Path(__file__).resolve().parents[1]
KEEPS = "import sys, tempfile\ndef test(tmp_path):\n    tempfile.mkdtemp(); (tmp_path / 'a').touch()\n"
ENDS: dict[str, tuple[str, int]] = {
    "loses a worker": ("    import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n", 1),
    "leaves a file of ours": ("    tempfile.mkdtemp(prefix='trainkit-')\n", 1),
    "leaves a process": ("    import subprocess; subprocess.Popen(['sleep', '600'])\n", 1),
}


Session = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def session(tmp_path: Path) -> Session:
    """Starts one of a single test, with the suite's own conftest.py, beside an empty folder for temporary files."""
    (tmp_path / "suite" / "tests").mkdir(parents=True)
    for name, more in (("__init__.py", ""), ("conftest.py", ""), ("scratch.py", "\n_PATIENCE_SECONDS = 1.0\n")):
        (tmp_path / "suite" / "tests" / name).write_text((PROJECT / "tests" / name).read_text() + more)
    (tmp_path / "suite" / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\npythonpath = .\n")
    (tmp_path / "T").mkdir()

    def start(code: str, *options: str) -> subprocess.Popen[str]:
        (tmp_path / "suite" / "tests" / "test_it.py").write_text(KEEPS + code)
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "tests"],
            cwd=tmp_path / "suite", env=env | {"TMPDIR": str(tmp_path / "T")},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    return start


@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_left_of_a_session_that(end: str, session: Session, tmp_path: Path) -> None:
    code, status = ENDS[end]
    process = session(code, "-n", "1", "--max-worker-restart", "0")
    said = process.communicate(timeout=120)[0]
    assert process.returncode == status, said
    assert list((tmp_path / "T").iterdir()) == []
    assert ("Left behind by the tests" in said) == end.startswith("leaves")


def test_what_a_killed_session_has_left_the_next_one_removes(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = session("    import time; time.sleep(600)\n")
    folder = wait_until(lambda: list((tmp_path / "T").glob("*/p/*/a")))[0].parents[2]
    monkeypatch.setattr(scratch, "_YOUNG_SECONDS", 0.0)
    scratch.clear(folder.parent)
    assert folder.is_dir(), "its session lives"
    process.kill()
    process.communicate()
    (tmp_path / "T" / "others").mkdir()
    (tmp_path / "T" / "tkt-link").symlink_to(tmp_path / "suite")
    scratch.clear(folder.parent)
    assert {path.name for path in (tmp_path / "T").iterdir()} == {"others", "tkt-link"}
    assert (tmp_path / "suite" / "tests").is_dir()
