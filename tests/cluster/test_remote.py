"""Commands for a login node, as a shell there takes them."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from trainkit.cluster.remote import SSH, Host, Word, connected, script
from trainkit.errors import SchedulerError, UserError


@pytest.mark.parametrize(
    ("text", "name", "folder"),
    [
        ("login", "login", "trainkit"),
        ("me@login.example.org", "me@login.example.org", "trainkit"),
        ("me@login:work/kit", "me@login", "work/kit"),
        ("login:/scratch/my folder", "login", "/scratch/my folder"),
    ],
)
def test_a_host_is_what_ssh_and_scp_take(text: str, name: str, folder: str) -> None:
    assert Host.parse(text) == Host(name, folder)


@pytest.mark.parametrize("text", ["-oProxyCommand=reboot", "", ":folder", "a b", "login;reboot", "login:a\nb"])
def test_what_ssh_would_take_for_something_else_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is not a machine"):
        Host.parse(text)


@pytest.fixture
def there(tmp_path: Path) -> Host:
    """A login node whose Python prints what it is told to run, and where."""
    python = tmp_path / "work" / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "in $PWD"; shift 3; printf "%s\\n" "$@"\n')
    python.chmod(0o755)
    return Host("login", str(tmp_path / "work"))


def _run(line: str, content: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["sh", "-c", line], input=content, capture_output=True, check=False, env={"PATH": "/usr/bin:/bin"}
    )


@pytest.mark.parametrize("word", ["a b", "it's", 'say "x"', "$HOME", "`reboot`", "*", "a;b", "back\\slash"])
def test_every_word_arrives_as_it_was_given(there: Host, word: str) -> None:
    done = _run(script(there, "jobs.status", [word, "last"]))
    assert done.stdout.decode().splitlines() == [f"in {there.folder}", "", "jobs.status", word, "last"]


def test_a_path_below_the_folder_is_made_there(there: Host) -> None:
    done = _run(script(there, "jobs.report", [Word("my data", before="data.root=")]))
    assert done.stdout.decode().splitlines()[-1] == f"data.root={there.folder}/my data"


def test_a_folder_that_is_not_there_is_said_in_three_lines() -> None:
    done = _run(script(Host("login", "/not/there"), "jobs.status", []))
    assert done.returncode == 2
    assert [line.split()[0] for line in done.stderr.decode().splitlines()] == ["login", "why:", "fix:"]


def _packed(tmp_path: Path) -> bytes:
    (tmp_path / "my_model.py").write_text("")
    return subprocess.run(
        ["tar", "czf", "-", "-C", str(tmp_path), "my_model.py"], capture_output=True, check=True
    ).stdout


def test_code_that_is_sent_twice_is_there_once_and_commands_run_in_it(there: Host, tmp_path: Path) -> None:
    line = script(there, "jobs.submit", ["ddp"], snapshot="abc")
    for _ in range(2):
        done = _run(line, _packed(tmp_path))
        assert done.stdout.decode().splitlines()[0] == f"in {there.folder}/.trainkit/sent/abc"
    sent = Path(there.folder, ".trainkit/sent")
    assert sorted(path.name for path in sent.iterdir()) == ["abc", "latest"]
    assert (sent / "latest" / "my_model.py").is_file()
    assert sent.stat().st_mode & 0o077 == 0
    after = _run(script(there, "jobs.status", [])).stdout.decode().splitlines()
    assert after[1] == f"{there.folder}/.trainkit/sent/latest"  # whose packages are imported


def test_code_that_arrives_torn_is_not_run(there: Host, tmp_path: Path) -> None:
    done = _run(script(there, "jobs.submit", ["ddp"], snapshot="abc"), _packed(tmp_path)[:20])
    assert (done.returncode, done.stdout) == (1, b"")
    assert not Path(there.folder, ".trainkit/sent/abc").exists()


def test_a_python_without_the_packages_is_told_what_to_install(tmp_path: Path) -> None:
    bare = tmp_path / ".venv" / "bin" / "python"
    bare.parent.mkdir(parents=True)
    bare.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n')  # no site-packages
    bare.chmod(0o755)
    done = _run(script(Host("login", str(tmp_path)), "jobs.status", []))
    assert done.returncode == 1
    assert b"there has no pydantic" in done.stderr
    assert b"Traceback" not in done.stderr


def _env(tmp_path: Path, ssh: str) -> Mapping[str, str]:
    (tmp_path / "ssh").write_text(f"#!/bin/sh\n{ssh}\n")
    (tmp_path / "ssh").chmod(0o755)
    return {SSH: str(tmp_path / "ssh"), "PATH": "/usr/bin:/bin", "XDG_STATE_HOME": str(tmp_path / "state")}


def test_no_connection_is_said_as_such(tmp_path: Path) -> None:
    with (
        pytest.raises(SchedulerError, match="No connection to login"),
        connected(Host("login"), "true", _env(tmp_path, "exit 255")),
    ):
        pass


def test_a_machine_without_ssh_says_so() -> None:
    with pytest.raises(SchedulerError, match="no ssh here"), connected(Host("login"), "true", {SSH: "/no/ssh"}):
        pass


@pytest.mark.parametrize(
    ("said", "shared"), [("controlmaster false", True), ("controlmaster auto\necho controlpath /x", False)]
)
def test_a_connection_is_shared_unless_the_users_configuration_says_how(
    tmp_path: Path, said: str, shared: bool
) -> None:
    answers = f'case "$*" in *-G*) echo {said} ;; *) echo "$@" ;; esac'
    with (
        tempfile.TemporaryDirectory() as short,  # as the path of a socket must be
        connected(Host("login"), "true", {**_env(tmp_path, answers), "XDG_STATE_HOME": short}) as process,
    ):
        assert process.stdout is not None
        options = process.stdout.read().decode()
    assert ("ControlMaster=auto" in options) == shared
