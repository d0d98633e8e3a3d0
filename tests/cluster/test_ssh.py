"""Commands for a login node, as a shell there takes them."""

import hashlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.runs import script as program
from trainkit.cluster import ssh
from trainkit.cluster.ssh import BEGIN, NEEDED, SSH, Host, Word, run_there, script
from trainkit.common import terminal
from trainkit.common.errors import SchedulerError, UserError


def test_a_host_is_what_ssh_and_scp_take_and_nothing_else() -> None:
    assert Host.parse("me@login.example.org") == Host("me@login.example.org", "trainkit")
    assert Host.parse("me@login:work/kit") == Host("me@login", "work/kit")
    assert Host.parse("login:/scratch/my folder") == Host("login", "/scratch/my folder")
    for text in ("-oProxyCommand=reboot", "", ":folder", "a b", "login;reboot", "login:a\nb"):
        with pytest.raises(UserError, match="is not a machine"):
            Host.parse(text)


@pytest.fixture
def there(tmp_path: Path) -> Host:
    """A login node whose Python prints what it is told to run, and where."""
    says = 'echo "in $PWD"; shift 3; cat >/dev/null; printf "%s\\n" "$@"'
    program(tmp_path / "work" / ".venv" / "bin" / "python", says)
    return Host("login", str(tmp_path / "work"))


def _run(line: str, content: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    env = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(["sh", "-c", line], input=content, capture_output=True, check=False, env=env)
    begin, _, said = done.stdout.partition(b"\n")
    assert begin.decode() == BEGIN
    return subprocess.CompletedProcess(done.args, done.returncode, said, done.stderr)


def test_every_word_arrives_as_it_was_given_and_a_path_is_made_there(there: Host) -> None:
    words = ["a b", "it's", 'say "x"', "$HOME", "`reboot`", "*", "a;b", "back\\slash", "last"]
    done = _run(script(there, "jobs.status", [*words, Word("my data", before="data.root=")]))
    assert done.stdout.decode().splitlines() == [
        f"in {there.folder}", "", str(there), terminal.PROGRAM, "jobs.status", *words,
        f"data.root={there.folder}/my data",
    ]  # fmt: skip


def test_a_folder_that_is_not_there_is_said_in_three_lines() -> None:
    done = _run(script(Host("login", "/not/there"), "jobs.status", []))
    assert done.returncode == 2
    assert [line.split()[0] for line in done.stderr.decode().splitlines()] == ["login", "why:", "fix:"]


def _packed(tmp_path: Path) -> bytes:
    (tmp_path / "my_model.py").write_text("")
    tar = ["tar", "czf", "-", "-C", str(tmp_path), "my_model.py"]
    return subprocess.run(tar, capture_output=True, check=True).stdout


def test_code_that_is_sent_twice_is_there_once_and_commands_run_in_it(there: Host, tmp_path: Path) -> None:
    code = _packed(tmp_path)
    name = hashlib.sha256(code).hexdigest()[:16]
    line = script(there, "jobs.submit", ["ddp"], sent=code)
    for _ in range(2):
        assert _run(line, code).stdout.decode().splitlines()[0] == f"in {there.folder}/.trainkit/sent/{name}"
    sent = Path(there.folder, ".trainkit/sent")
    assert sorted(path.name for path in sent.iterdir()) == sorted([name, "latest"])
    assert (sent / "latest" / "my_model.py").is_file()
    assert sent.stat().st_mode & 0o077 == 0
    after = _run(script(there, "jobs.status", [])).stdout.decode().splitlines()
    assert after[1] == f"{there.folder}/.trainkit/sent/latest"  # whose packages are imported


def test_code_that_arrives_torn_is_not_run_and_leaves_nothing(there: Host, tmp_path: Path) -> None:
    code = _packed(tmp_path)
    done = _run(script(there, "jobs.submit", ["ddp"], sent=code), code[:20])
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"nothing was submitted" in done.stderr
    assert list(Path(there.folder, ".trainkit/sent").iterdir()) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("", b"there has no pydantic"),
        ("import sys; sys.version_info = (3, 6, 8)", b"there is Python 3.6, and trainkit needs 3.11."),
        ("from importlib import metadata; metadata.version = lambda name: '2.1.0+cu118'", b"there has pydantic 2.1.0"),
    ],
)
def test_a_python_that_lacks_something_or_is_too_old_there_is_said(there: Host, change: str, said: bytes) -> None:
    python = shlex.quote(sys.executable)
    text = f'shift 2; code=$1; shift; exec {python} -c "{change}\n$code" "$@"' if change else f'exec {python} -S "$@"'
    Path(there.folder, ".venv/bin/python").write_text(f"#!/bin/sh\n{text}\n")
    done = _run(script(there, "jobs.status", []))
    what, *more = done.stderr.splitlines()
    assert (done.returncode, said in what, [line.split()[0] for line in more]) == (3, True, [b"why:", b"fix:"])


def test_a_machine_without_python_is_said_in_three_lines(tmp_path: Path) -> None:
    line = script(Host("login", str(tmp_path)), "jobs.status", [])
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, check=False, env={"PATH": "/none"})
    assert (done.returncode, done.stderr.splitlines()[0]) == (3, "login has no Python.")


def test_the_versions_that_are_asked_for_there_are_those_of_the_package() -> None:
    text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text()
    for module, lowest in NEEDED.items():
        assert re.search(rf'"{"pyyaml" if module == "yaml" else module}>={re.escape(lowest)}[",]', text), module


def _env(tmp_path: Path, ssh: str) -> Mapping[str, str]:
    program(tmp_path / "ssh", ssh)
    return {SSH: str(tmp_path / "ssh"), "PATH": "/usr/bin:/bin", "XDG_STATE_HOME": str(tmp_path / "state")}


def _heard(host: Host, line: str, env: Mapping[str, str]) -> tuple[int, str]:
    heard = bytearray()
    return run_there(host, line, env, heard.extend), heard.decode()


@pytest.mark.parametrize(
    ("ssh", "words"),
    [
        ("exit 255", "No connection to login"),
        (f"echo '{BEGIN}'; exit 255", "The connection to login was lost"),
        ("exec yes Welcome", "login does not start the command"),
        ("", "ssh cannot be started here"),
    ],
)
def test_a_connection_that_is_none_or_no_more_is_said_as_such(tmp_path: Path, ssh: str, words: str) -> None:
    with pytest.raises(SchedulerError, match=words):
        _heard(Host("login"), "true", _env(tmp_path, ssh) if ssh else {SSH: "/no/ssh"})


def test_what_a_profile_there_prints_is_no_part_of_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    says = f"printf 'Welcome\\033[2J! '; echo '{BEGIN}'; echo [1]; exit 3"
    assert _heard(Host("login"), "true", _env(tmp_path, says)) == (3, "[1]\n")
    assert capsys.readouterr().err == "Welcome!\n"


def test_a_connection_that_is_deaf_is_killed_when_nobody_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.cluster.ssh._END_SECONDS", 0.2)

    def hear(chunk: bytes) -> None:
        raise KeyboardInterrupt

    deaf = f"case \"$*\" in *-G*) exit 1; esac; trap '' TERM HUP; echo '{BEGIN}'; echo"
    env = _env(tmp_path, f"{deaf}; while :; do read -r line; sleep 0.1; done")
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_there(Host("login"), "true", env, hear)
    assert time.monotonic() - began < 30


def _options(tmp_path: Path, configured: str, **env: str) -> str:
    """The words that ssh is given, for a configuration as ``ssh -G`` tells it."""
    answers = f'case "$*" in *-G*) {configured} ;; *) echo "{BEGIN}"; echo "$@" ;; esac'
    return _heard(Host("login"), "true", {**_env(tmp_path, answers), **env})[1]


@pytest.mark.parametrize(
    ("said", "option", "ours"),
    [
        ("echo controlmaster false", "ControlMaster=auto", True),
        ("echo controlmaster auto", "ControlMaster=auto", False),
        ("echo controlpath /x", "ControlMaster=auto", False),
        ("echo serveraliveinterval 0", "ServerAliveInterval", True),
        ("echo serveraliveinterval 60", "ServerAliveInterval", False),
    ],
)
def test_a_connection_is_shared_and_watched_unless_the_user_says_how(
    tmp_path: Path, said: str, option: str, ours: bool
) -> None:
    assert (option in _options(tmp_path, said)) == ours


def test_a_socket_is_in_a_folder_that_nobody_else_enters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "_SOCKETS", tmp_path)
    folder = tmp_path / f"trainkit-{os.getuid()}"
    assert f"ControlPath={folder}/%C" in _options(tmp_path, "echo controlmaster false")
    folder.chmod(0o755)
    assert str(folder) not in _options(tmp_path, "echo controlmaster false")
