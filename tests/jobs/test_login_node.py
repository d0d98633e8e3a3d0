"""Verbs with ``--host``: the ssh here runs its command in another home folder of this machine, as sshd would."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil
import pytest

from tests.jobs.conftest import PROJECT, Command, make_run
from tests.runs import script, wait_until
from trainkit.cluster.ssh import BEGIN
from trainkit.config.loading import load
from trainkit.run.folder import RunDir
from trainkit.run.run_lease import ProcessId

HOST = ("--host", "me@login")
SECRET = "api_key: sk-ant-REDACTED"  # pragma: allowlist secret


@pytest.fixture
def there(tmp_path: Path, no_slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder ``~/trainkit`` of a login node, whose shell greets whoever comes."""
    home = tmp_path / "there"
    (home / "trainkit").mkdir(parents=True)
    (home / "trainkit" / ".venv").symlink_to(sys.prefix)
    (home / ".bash_profile").write_text("echo Welcome\n")
    script(
        tmp_path / "ssh",
        'case " $* " in *" -G "*) exit 1 ;; esac\n'
        'while [ "$1" != -- ]; do shift; done\n'
        f"cd {shlex.quote(str(home))} && shift 2 && unset TRAINKIT_RUNS PYTHONPATH\n"
        f'PATH=/usr/bin:/bin HOME=$PWD XDG_STATE_HOME=$PWD/.state exec sh -c "$*"',
    )
    monkeypatch.setenv("TRAINKIT_SSH", str(tmp_path / "ssh"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return home / "trainkit"


def sent(there: Path) -> Path:
    return there / ".trainkit" / "sent" / "latest"


def run_there(there: Path, name: str = "ddp-0001") -> RunDir:
    """A run of the login node, which another of its processes trains."""
    run = make_run(there / "runs" / name, executor="local", job_id="1", **ProcessId.of(os.getpid()).fields())
    run.attempt_logs(0).mkdir()
    (run.attempt_logs(0) / "rank-0.out").write_text("words of rank 0\n")
    return run


@pytest.fixture
def captured(capfd: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    """With what ssh says."""
    return capfd


@pytest.fixture
def command(there: Path, command: Command) -> Command:
    """``command("status", ...)`` is ``python -m jobs.status ... --host me@login`` in the test's folder."""
    return lambda *words: command(*map(os.fsdecode, words), *(() if "--host" in words else HOST))


@pytest.mark.nightly
def test_a_benchs_preset_and_a_run_that_lies_there_are_submitted_from_here(
    command: Command, there: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text("extends: single\noptim: {lr: 0.5}\n")
    bench = ("bench", "amp", "mine.yaml", "data.root=photos", "--nodes", "1", "--executor", "local", "--dry-run")
    shown = command(*bench).ok().err.splitlines()
    told = dict(line.split()[:2] for line in shown if line.startswith(("optim.lr ", "data.root ")))
    assert (told["optim.lr"], told["data.root"]) == ("0.5", str(there / "photos"))
    run_there(there)
    assert f"{there}/runs/ddp-0002" in command("submit", "runs/ddp-0001", "train.epochs=3", "--dry-run").ok().out


@pytest.mark.nightly
def test_a_preset_stands_alone_there_wherever_the_files_are_that_it_extends(
    command: Command, there: Path, tmp_path: Path
) -> None:
    (tmp_path / "base.yaml").write_text("extends: single\noptim: {lr: 0.5}\nlaunch: {sbatch: {comment: thesis}}\n")
    mine = tmp_path / "mine" / "mine.yaml"
    mine.parent.mkdir()
    mine.write_text("extends: ../base.yaml\nseed: 7\n")
    # The same word stands for something else too.
    words = ("mine/mine.yaml", "train.epochs=2", "--dry-run")
    said = command("submit", "--run-dir", "mine/mine.yaml", *words).ok()
    config = load(str(sent(there) / "configs" / "mine.yaml")).config
    assert (config.seed, config.optim.lr, config.launch.sbatch) == (7, 0.5, {"comment": "thesis"})
    assert f"run folder {there}/mine/mine.yaml\n" in said.out
    assert ["data.root", f"{there}/data"] in [line.split()[:2] for line in said.err.splitlines()]


@pytest.mark.nightly
def test_presets_with_secrets_and_what_is_no_preset_are_not_sent(command: Command, there: Path, tmp_path: Path) -> None:
    (tmp_path / "configs" / "clusters").mkdir(parents=True)
    (tmp_path / "configs" / "clusters" / "site.yaml").write_text("launch: {partition: main}\n")
    (tmp_path / "configs" / "mine.yaml").write_text("extends: single\nseed: 3\n")
    (tmp_path / "configs" / "other.yaml").write_text(f"extends: single\n# {SECRET}\n")
    (tmp_path / "configs" / "notes.txt").write_text("mine\n")
    said = command("submit", "mine", "--cluster", "site", "--executor", "local", "--dry-run").ok()
    assert (sent(there) / "configs" / "clusters" / "site.yaml").is_file()
    assert "Not sent: configs/other.yaml (line 2" in said.err
    assert load(str(sent(there) / "configs" / "mine.yaml")).config.seed == 3
    assert not {"other.yaml", "notes.txt"} & {path.name for path in (sent(there) / "configs").iterdir()}


def test_what_is_needed_and_has_a_secret_is_refused_here(command: Command, there: Path, tmp_path: Path) -> None:
    profile = tmp_path / "site.yaml"
    profile.write_text(f"launch: {{partition: main}}\n# {SECRET}\n")
    needed = "The run needs configs/clusters/site.yaml (line 2"
    command("submit", "single", "--cluster", str(profile)).refused(3, needed)
    secret = command("submit", "single", f"launch.setup=['export {SECRET}']")
    assert (secret.code, "Welcome" in secret.err) == (3, False), "it is on no command line there"


def test_answers_are_clean_and_commands_in_them_are_for_the_reader(command: Command, there: Path) -> None:
    run = run_there(there, "it's $HOME*")
    said = command("status", "--json")
    assert (said.code, said.out[:2], said.err) == (0, "[\n", "Welcome\n")
    cancel = f"`python -m jobs.cancel {shlex.quote(str(run.path))} --host me@login` first."
    command("resume", run.name).refused(2, cancel)  # with its own exit code


def test_the_results_of_a_sweep_there_are_printed_here(command: Command, there: Path) -> None:
    for index in "01":
        run_there(there, f"ddp-0001/{index}")
    points = [{"run": index, "overrides": [f"seed={index}"]} for index in "01"]
    (there / "runs" / "ddp-0001" / "sweep.json").write_text(json.dumps(points))
    said = command("report", "ddp-0001").ok("| folder | seed |")
    assert {"results.md", "logbook.md"} <= {Path(line).name for line in said.out.splitlines()}


@pytest.mark.parametrize("name", ["torch.py", ".bashrc", "a/..", "logbook.md", "a\x1b[2J.png", "link.png"])
def test_a_report_from_there_replaces_no_file_of_the_users(
    command: Command, there: Path, tmp_path: Path, name: str
) -> None:
    packed, mine = tmp_path / "packed", {"torch.py": "import sys\n", ".bashrc": "PS1=x\n", "logbook.md": "by hand\n"}
    for file, text in mine.items():
        (tmp_path / file).write_text(text)
    with packed.open("wb") as out:
        out.write(f"{BEGIN}\nfiles\n".encode())
        with tarfile.open(fileobj=out, mode="w") as archive:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = (tarfile.SYMTYPE if "link" in name else tarfile.REGTYPE), "/etc/passwd"
            archive.addfile(member)
    (tmp_path / "ssh").write_text(f'#!/bin/sh\ncase " $* " in *" -G "*) exit 1 ;; esac\ncat {packed}\n')
    said = command("report", "ddp-0001", "--out", ".")
    assert said.code == (2 if name == "logbook.md" else 0 if "link" in name else 1), said.err
    assert (said.out, len(said.err.splitlines()), "\x1b" in said.err) == ("", 3 * (said.code > 0), False)
    assert {file: (tmp_path / file).read_text() for file in mine} == mine
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.nightly
def test_folders_and_words_reach_the_other_side_as_they_were_typed(
    command: Command, there: Path, tmp_path: Path
) -> None:
    (there.parent / ".bash_profile").write_text("export CDPATH=/usr; cd /usr; echo Welcome\n")
    run_there(there)
    for folder in ("~/trainkit", "trainkit", str(there)):
        said = command("status", "ddp-0001", "--json", "--host", f"me@login:{folder}")
        assert [run["run"] for run in json.loads(said.out)] == ["ddp-0001"], said.err
    said = command("status", b"no \xff run")
    assert (said.code, len(said.err.splitlines())) == (2, 4), said.err  # Welcome, and three lines
    for odd in (b"\xff", b"a\x1b[2Jb", b"a\xc2\x9bb"):
        said = command("status", "--host", b"me@login:" + odd)
        assert (said.code, "is not a machine" in said.err, "\x1b" in said.err) == (2, True, False)


def test_an_older_version_there_is_told(command: Command, there: Path) -> None:
    (there / ".venv").unlink()
    packages = ":".join(folder for folder in sys.path if folder.endswith("site-packages"))
    # Without -S it would know the kit that is installed for these tests.
    script(there / ".venv" / "bin" / "python", f'PYTHONPATH={packages} exec {sys.executable} -S "$@"')
    for package in ("trainkit", "jobs"):
        (there / package).mkdir()
        (there / package / "__init__.py").touch()
    (there / "jobs" / "status.py").touch()
    for words in (("status",), ("why", "ddp-0001")):
        said = command(*words)
        assert (said.code, len(said.err.splitlines())) == (3, 4), said.err  # Welcome, and three lines
        assert "The trainkit there is older than the one here." in said.err


def _as_at_a_terminal() -> None:
    """What runs the tests in the background, or under nohup, ignores these, and so would all that it starts."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def at_a_terminal(folder: Path, verb: str, *words: str) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A verb that goes on, and what it prints."""
    line, env = [sys.executable, "-m", f"jobs.{verb}", *words, *HOST], {**os.environ, "PYTHONPATH": str(PROJECT)}
    with subprocess.Popen(
        line, cwd=folder, env=env, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        preexec_fn=_as_at_a_terminal,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        yield process, process.stdout


def test_who_follows_there_ends_with_who_asked_here(there: Path, tmp_path: Path) -> None:
    run_there(there)
    with at_a_terminal(tmp_path, "logs", "ddp-0001", "-f") as (process, out):
        assert out.readline() == "words of rank 0\n"
        below = psutil.Process(process.pid).children(recursive=True)
        (far,) = (child.pid for child in below if "jobs.logs ddp-0001" in " ".join(child.cmdline()))
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{far}").exists())


def test_ctrl_c_leaves_what_was_submitted_and_says_so(there: Path, tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text(
        "#!/bin/sh\ncase $* in *-G*) exit 1;; esac; echo '--- trainkit speaks ---'; echo Submitted; exec sleep 60\n"
    )
    with at_a_terminal(tmp_path, "submit", "single", "--wait") as (process, out):
        assert out.readline() == "Submitted\n"
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=30)[0]
    told = ["Detached; what was submitted goes on.", "  state   python -m jobs.status --host me@login"]
    assert (process.returncode, said.splitlines()[1:]) == (130, told)


@pytest.mark.nightly
def test_a_script_goes_along_with_its_project(command: Command, there: Path, tmp_path: Path) -> None:
    project = tmp_path / "mine"
    (project / "src").mkdir(parents=True)
    (project / "src" / "helper.py").write_text("VALUE = 7\n")
    (project / "src" / "train.py").write_text("import helper, sys\nprint(helper.VALUE, sys.argv[1:])\n")
    (project / "conf.yaml").write_text("lr: 1\n")
    os.chdir(project)
    flags = ("--executor", "local", "--wait", "--host", "me@login", "--name", "mine", "--", "--lr", "a b")
    command("submit", "src/train.py", *flags).ok()
    assert (sent(there) / "conf.yaml").is_file()
    assert "7 ['--lr', 'a b']" in (there / "runs" / "mine" / "logs" / "0" / "rank-0.out").read_text()
