"""The copy of a run's code, shared or its own."""

import errno
import json
import os
import shutil
import stat
import struct
import subprocess
import sys
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from trainkit.common.errors import RefusedError, UserError
from trainkit.common.fileio import create as real_create
from trainkit.run import code_files, run_manifest, secrets, snapshot, user_lists
from trainkit.run.code_files import LARGEST_CODE, read_tree
from trainkit.run.folder import RunDir

pytestmark = pytest.mark.usefixtures("program")


def files(run: RunDir) -> set[str]:
    return {str(file.relative_to(run.code)) for file in run.code.rglob("*") if file.is_file()}


# Code


def test_the_snapshot_runs_without_the_checkout(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_files, "INSTALLED", Path(snapshot.__file__).parents[2])
    snapshot.write_code(run)
    code = "import jobs.submit, trainkit.config.loading as l; print(jobs.submit.__file__); l.load('ddp')"
    env = {**os.environ, "PYTHONPATH": str(run.code)}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert out.strip() == str(run.code / "jobs" / "submit.py")


def test_the_users_own_modules_come_along_and_nothing_else_does(run: RunDir) -> None:
    others = ("runs/x.py", "data/x.py", ".venv/x.py", "venv/site-packages/x.py", "notes.txt")
    for name in ("model.py", "package/model.py", *others):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    Path("gone.py").symlink_to("nowhere.py")
    other = RunDir.create(Path("experiments/ddp-0001"), "seed: 0\n")
    other.manifest.touch()
    other.code.mkdir()
    (other.code / "x.py").touch()
    snapshot.write_code(run)
    assert {name for name in files(run) if not name.startswith(("jobs/", "trainkit/", "configs/"))} == {
        "model.py", "package/model.py"
    }  # fmt: skip
    assert not [name for name in files(run) if "__pycache__" in name]


def test_a_home_folder_is_no_project(run: RunDir) -> None:
    for number in range(2001):
        Path(f"m{number}.py").touch()
    snapshot.write_code(run)
    assert "m0.py" not in files(run)


TOKEN = "xoxb-" + "1234567890-abcdefGHIJ"


def test_a_secret_stays_behind_and_the_manifest_says_why(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    Path("notify.py").write_text(f'import os\nslack = "{TOKEN}"\n')
    Path("credentials.py").write_text("USER = 'me'\n")
    Path(".netrc").write_text("machine x\n")
    Path("innocent.py").symlink_to(".netrc")
    Path("model.py").write_text('REVISION = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b"\n')
    withheld = snapshot.write_code(run)
    run_manifest.write_manifest(run, [], withheld)
    assert {name for name in files(run) if "/" not in name} == {"model.py"}
    slack = {"what": "notify.py", "line": 2, "kind": "Slack token"}
    assert slack in json.loads(run.manifest.read_text())["withheld"]
    told = capsys.readouterr().err
    assert told.startswith("Withheld from the run folder: ")
    assert "notify.py (line 2 looks like a Slack token)" in told
    assert "credentials.py (a file of credentials, judging by its name)" in told


@pytest.mark.parametrize(("mode", "is_believed"), [(0o600, True), (0o620, False)])
def test_a_harmless_text_is_not_searched_again(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, mode: int, is_believed: bool
) -> None:
    text = f'slack = "{TOKEN}"\n'
    monkeypatch.setenv("XDG_STATE_HOME", str(Path("state").resolve()))
    user_lists.note_harmless([secrets.mark_of(text, python=True)])
    user_lists.state_file("harmless").chmod(mode)
    code_files.harmless.cache_clear()
    Path("known.py").write_text(text)
    Path("edited.py").write_text(f"# 1\n{text}")
    Path("model.py").write_text("DEPTH = 1\n")
    withheld = {item.what for item in snapshot.write_code(run)}
    assert withheld == {"edited.py"} | (set() if is_believed else {"known.py"})
    assert secrets.mark_of("DEPTH = 1\n", python=True) in user_lists.harmless() or not is_believed


NAMED = r" \(a file of credentials, judging by its name\)[\s\S]*Give the module another name"


@pytest.mark.parametrize(
    ("file", "name", "why"),
    [
        *((file, name, r" \(line 1 looks like a Slack token\)")
          for file, name in (("m.py", "m:build"), ("p/q.py", "p.q:build"), ("p/__init__.py", "p:build"))),
        ("credentials.py", "credentials:build", NAMED),
    ],
)  # fmt: skip
def test_a_run_whose_own_module_holds_a_secret_is_refused(run: RunDir, file: str, name: str, why: str) -> None:
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_text(f'slack = "{TOKEN}"\n')
    with pytest.raises(RefusedError, match=f"{file}{why}") as caught:
        snapshot.write_code(run, own=("fashion_cnn", name))
    assert TOKEN not in str(caught.value)
    assert not run.code.exists()


def test_a_plugin_in_the_checkout_that_holds_a_secret_is_refused(run: RunDir) -> None:
    """Files that are as they were published are not looked through."""
    (code_files.INSTALLED / "trainkit" / "published.py").write_text(f'a = "{TOKEN}"\n')
    git = ["git", "-C", str(code_files.INSTALLED), "-c", "user.name=me", "-c", "user.email=me@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True)
    assert code_files._changed_own_files() == []
    (code_files.INSTALLED / "trainkit" / "mine.py").write_text(f'a = "{TOKEN}"\n')
    with pytest.raises(RefusedError, match=r"trainkit/mine\.py"):
        snapshot.write_code(run)


def test_credentials_beside_our_own_code_are_not_copied_with_it(run: RunDir) -> None:
    (code_files.INSTALLED / "trainkit" / ".env").write_text("HF_TOKEN=x\n")
    assert [str(item) for item in snapshot.write_code(run)] == [
        "trainkit/.env (a file of credentials, judging by its name)"
    ]
    assert {"trainkit/kept.py"} == {name for name in files(run) if name.startswith("trainkit/")}


# Code that runs share


def shared(run: RunDir) -> Path:
    """Where the code of a run is, after writing it."""
    assert snapshot.write_code(run, store=run.path.parent / ".code") == []
    return run.code.resolve()


def compiled(code: Path) -> None:
    (code / "jobs" / "__pycache__").mkdir()
    (code / "jobs" / "__pycache__" / "cli.pyc").touch()


def another(run: RunDir, name: str = "ddp-0002") -> RunDir:
    return RunDir.create(run.path.parent / name, "seed: 0\n")


def tree(folder: Path) -> dict[str, bytes]:
    found = read_tree(folder)
    assert found is not None
    return found


def test_runs_of_equal_code_share_one_copy_and_others_do_not(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = shared(run), shared(another(run))
    assert first == second
    assert first.parent == run.path.parent / ".code"
    count = [sum(len(files) for _, _, files in os.walk(path)) for path in (run.path, first)]
    assert count[0] < 30 < count[1]
    assert run.code_archive.stat().st_nlink == 3, "of both runs, and of the shared copy"
    monkeypatch.setattr(os, "link", lambda *_: os.stat("no such file"))  # as on a disk without hard links
    Path("model.py").write_text("x = 1\n")
    other = shared(another(run, "ddp-0003"))
    assert other != first
    assert "model.py" not in tree(first)
    assert tree(other)["model.py"] == b"x = 1\n"


def test_shared_code_that_somebody_has_changed_is_not_given_to_a_new_run(run: RunDir) -> None:
    first = shared(run)
    changed = first / "jobs" / "cli.py"
    assert changed.stat().st_mode & 0o222 == 0, "an editor warns"
    changed.chmod(0o644)
    changed.write_text("raise SystemExit\n")
    second = shared(another(run))
    assert second != first
    assert tree(second)["jobs/cli.py"] == (code_files.INSTALLED / "jobs" / "cli.py").read_bytes()


@pytest.mark.parametrize("what", ["moved", "the store is gone", "changed", "a link to elsewhere"])
def test_a_run_has_its_code_from_its_own_archive_when_none_is_shared(run: RunDir, tmp_path: Path, what: str) -> None:
    code = tree(shared(run))
    if what == "moved":
        run = RunDir(run.path.rename(tmp_path / "elsewhere"))
    elif what == "the store is gone":
        shutil.rmtree(run.path.parent / ".code")
    elif what == "changed":
        (run.code.resolve() / "jobs" / "cli.py").unlink()
    else:
        (tmp_path / "private").mkdir()
        (tmp_path / "private" / "key.py").touch()
        run.code.unlink()
        run.code.symlink_to(tmp_path / "private")
    snapshot.restore_code(run)
    assert not run.code.is_symlink()
    assert tree(run.code) == code


def test_what_a_killed_command_has_left_of_code_goes_with_time(run: RunDir) -> None:
    first = shared(run)
    compiled(first)
    left = [place / f".partial-{number * 8}-code" for place in (run.path, first.parent) for number in "01"]
    for place in left:
        (place / "jobs").mkdir(parents=True)
    for old in left[1::2]:
        os.utime(old, (0, 0))
    snapshot.restore_code(run)
    Path("model.py").write_text("x = 1\n")
    shared(another(run))
    assert [place.exists() for place in left] == [True, False] * 2
    assert run.code.resolve() == first, "the code of a run that is whole stays where it is"


def archive_of(*names: str, content: bytes = b"x = 1\n", how: int = zipfile.ZIP_DEFLATED) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        with zipfile.ZipFile(file, "w", how) as archive:
            for name in names:
                archive.writestr(name, content)

    return write


def with_a_link(file: Path) -> None:
    link = zipfile.ZipInfo("trainkit/kept.py")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(link, "/etc/passwd", zipfile.ZIP_DEFLATED)


def cut_short(file: Path) -> None:
    archive_of("a.py", "b.py", content=os.urandom(5000))(file)
    data = file.read_bytes()
    file.write_bytes(data[:5000] + data[6000:])


def damaged_lzma(file: Path) -> None:
    """Other decoders take as much memory as the archive asks for, and have errors of their own."""
    archive_of("a.py", how=zipfile.ZIP_LZMA)(file)
    file.write_bytes(file.read_bytes().replace(b"\x5d\0", b"\xff\xff"))


BAD_ARCHIVES: dict[str, Callable[[Path], None]] = {
    **{f"leads to {name}": archive_of(name) for name in ("../out.py", "/tmp/out.py", "a/../../out.py", "./out.py")},
    **{
        f"makes no folder: {names[-1][:20]}": archive_of(*names)
        for names in (
            ["a.py"] * 2, ["a", "a/b"], ["a/b", "a"], ["a" * 300], ["a/" * 60 + "b"], ["."], ["a/__pycache__/b.pyc"]
        )
    },
    "holds a link": with_a_link,
    "is cut short": cut_short,
    "is compressed otherwise": damaged_lzma,
    "grows beyond all code": archive_of("large.py", content=b"\0" * (LARGEST_CODE + 1)),
}  # fmt: skip


@pytest.mark.parametrize("archive", BAD_ARCHIVES)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_archive_that_no_run_has_written_is_refused(run: RunDir, archive: str) -> None:
    BAD_ARCHIVES[archive](run.code_archive)
    assert run.code_archive.stat().st_size < 1 << 20
    with pytest.raises(UserError, match=r"not a snapshot of code"):
        snapshot.restore_code(run)
    assert not os.path.lexists(run.code)
    assert code_files.unpacked(run.code_archive.read_bytes()) is None  # as it comes over a network


def test_code_nested_beyond_any_program_is_none(run: RunDir) -> None:
    (run.code / ("a/" * 40)).mkdir(parents=True)
    (run.code / ("a/" * 40) / "b.py").touch()
    assert snapshot.read_code(run) is None


def test_an_archive_of_gigabytes_is_not_read(run: RunDir) -> None:
    """Its list of names is read into memory at once, as long as it says to be."""
    end, size = struct.Struct("<4s4H2LH"), 3 << 30
    with run.code_archive.open("wb") as file:
        file.seek(size)
        file.write(end.pack(b"PK\5\6", 0, 0, 9, 9, size - 100, 100, 0))
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=r"not a snapshot of code"):
            snapshot.restore_code(run)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def received(store: Path) -> None:
    """The store comes back from an archive of runs."""
    packed = shutil.copytree(store, store.with_name("packed"))
    shutil.rmtree(store)
    shutil.move(packed, store)


def test_files_that_others_may_have_compiled_go_to_no_new_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python runs them in the place of the sources beside them."""
    first = shared(run)
    compiled(first)
    assert shared(another(run)) == first
    assert list(first.rglob("*.pyc")), "of this user's own runs; without them each start takes a second more"
    received(first.parent)
    assert shared(another(run, "ddp-0003")) == first
    assert not list(first.rglob("*.pyc"))
    compiled(first)
    received(first.parent)

    def refuse(path: Path, ignore_errors: bool = False) -> None:  # as for a folder without write permission
        if not ignore_errors:
            raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    assert snapshot.write_code(other := another(run, "ddp-0004"), store=first.parent) == []
    assert not other.code.is_symlink(), "they could not be removed"


def test_a_link_to_compiled_files_is_not_given_to_a_new_run(run: RunDir, tmp_path: Path) -> None:
    first = shared(run)
    (first / "jobs" / "__pycache__").symlink_to(tmp_path)
    assert shared(another(run)) != first


def test_shared_code_goes_once_no_run_has_it(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    of_sweep = RunDir.create(run.path.parent / "ddp-0002" / "0", "seed: 0\n")
    first = shared(run)
    assert snapshot.write_code(of_sweep, store=first.parent) == []
    for number in (3, 4):
        Path("model.py").write_text(f"x = {number}\n")
        last = shared(another(run, f"ddp-{number:04}"))
    (last.parent / ".partial-0a1b2c3d-of-a-killed-command").mkdir()
    shutil.rmtree(run.path.parent / "ddp-0003")
    shutil.rmtree(run.path)
    before = set(last.parent.iterdir())
    snapshot._remove_unused(last.parent)
    assert set(last.parent.iterdir()) == before, "another command may just be about to use it"
    monkeypatch.setattr(snapshot, "_UNUSED_SECONDS", -1.0)
    Path("model.py").write_text("x = 5\n")
    newest = shared(another(run, "ddp-0005"))
    assert {path.stem for path in last.parent.iterdir()} == {first.name, last.name, newest.name}
    assert of_sweep.code.resolve() == first


def test_code_that_a_command_begins_to_use_no_other_removes(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    first = shared(run)
    shutil.rmtree(run.path)
    make = snapshot.shared_copy
    monkeypatch.setattr(snapshot, "_UNUSED_SECONDS", 0.5)
    time.sleep(0.6)

    def slowly(store: Path, *given: Any) -> Path | None:
        snapshot._remove_unused(store)
        return make(store, *given)

    monkeypatch.setattr(snapshot, "shared_copy", slowly)
    assert shared(another(run)) == first
    assert first.exists()


@pytest.mark.parametrize(
    ("error", "at"), [(KeyboardInterrupt(), 30), (OSError(errno.ENOSPC, "No space left on device"), 0)], ids=repr
)
def test_half_a_copy_is_not_shared(run: RunDir, error: BaseException, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed command leaves it, and a full disk makes it."""
    turns = iter(range(at + 1))

    def create(file: Path, *within: Path) -> BinaryIO:
        if next(turns, None) == at:
            raise error
        return real_create(file, *within)

    monkeypatch.setattr(snapshot, "create", create)
    with suppress(KeyboardInterrupt):
        snapshot.write_code(run, store=run.path.parent / ".code")
        assert not run.code.is_symlink(), "it has a copy of its own"
        assert "jobs/cli.py" in tree(run.code)
    second = another(run)
    code = tree(shared(second))
    assert code["jobs/cli.py"] == (code_files.INSTALLED / "jobs" / "cli.py").read_bytes()
    snapshot.restore_code(second)
    assert tree(second.code) == code


@pytest.mark.parametrize("whose", ["a link", "open to all"])
def test_a_strangers_store_leaves_the_run_a_copy_of_its_own(run: RunDir, tmp_path: Path, whose: str) -> None:
    """Others could put other files in the place of those that were just compared."""
    (tmp_path / "theirs").mkdir()
    store = run.path.parent / ".code"
    store.symlink_to(tmp_path / "theirs") if whose == "a link" else store.mkdir()
    store.chmod(0o700 if whose == "a link" else 0o777)
    snapshot.write_code(run, store=store)
    assert not run.code.is_symlink()
    assert "jobs/cli.py" in tree(run.code)
    assert list((tmp_path / "theirs").iterdir()) == []


def test_commands_that_write_the_same_code_at_once_share_it(run: RunDir) -> None:
    runs = [another(run, f"ddp-{n}") for n in range(4)]
    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(shared, runs))) == 1
    assert sorted(path.suffix for path in (run.path.parent / ".code").iterdir()) == ["", ".zip"], "nothing half-made"


def test_a_run_is_as_open_as_asked_whatever_the_others_are(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    first = shared(run)
    monkeypatch.setenv("TRAINKIT_RUN_MODE", "750")
    second = shared(another(run))
    assert first.parent != second.parent
    assert stat.S_IMODE(second.parent.stat().st_mode) == 0o750
    assert stat.S_IMODE((second / "jobs" / "cli.py").stat().st_mode) == 0o440


def test_what_a_script_writes_beside_itself_is_no_other_version_of_it(tmp_path: Path) -> None:
    """As git tells: a file that it knows is the user's."""
    project = code_files.Project(tmp_path / "project", "train.py")
    project.root.mkdir()

    def write(**texts: str) -> str:
        for name, text in texts.items():
            (project.root / name.replace("_", ".")).write_text(text)
        return code_files.code_digest(code_files.present_code(project))

    first = write(train_py="pass", settings_json="1", notes_txt="a")
    assert write(notes_txt="b") != first, "without git nobody can tell"
    subprocess.run(["git", "init", "-q"], cwd=project.root, check=True)
    subprocess.run(["git", "add", "train.py", "settings.json"], cwd=project.root, check=True)
    known = write()
    assert write(notes_txt="c", results_json="[1]") == known
    assert write(settings_json="2") != known
    assert write(settings_json="1") == known
    assert write(other_py="pass") != known
