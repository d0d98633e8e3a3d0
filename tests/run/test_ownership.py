"""Whose a run and a file of settings are: by modes on the whole way, and by digests of what was submitted."""

import grp
import json
import os
import pwd
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainkit.common.errors import RefusedError
from trainkit.config.loading import load, to_yaml
from trainkit.launch.resume import first_folder
from trainkit.run import ownership, user_lists
from trainkit.run.folder import RunDir
from trainkit.run.ownership import READS, TRAINS, ImportableCode, require_own_code, vouch
from trainkit.run.snapshot import restore_code

GROUP = 4711
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to a group or a user")


@pytest.fixture(autouse=True)
def _no_copies_stay() -> Iterator[None]:
    """They last as long as the process, which in a command is short."""
    yield
    while ownership._COPIES:
        ownership._COPIES.pop().cleanup()


@pytest.fixture
def mine(tmp_path: Path) -> RunDir:
    """A run of the user's own that names a module of its snapshot."""
    made = RunDir.create(tmp_path / "lab" / "ddp-0001", to_yaml(load("ddp", ["data.name=mine:build"]).config))
    made.code.mkdir()
    (made.code / "mine.py").write_text("def build(root): ...\n")
    return made


def asked(mine: RunDir, *overrides: str, starts: bool = False) -> ImportableCode:
    """As `resume` asks, which starts the snapshot, or as `evaluate`."""
    loaded = load(str(mine.path), overrides)
    return require_own_code(
        mine.path, loaded, allow_code=False, starts_snapshot=starts, use=TRAINS if starts else READS
    )


def why(mine: RunDir) -> str:
    with pytest.raises(RefusedError, match="would run code") as caught:
        asked(mine)
    return str(caught.value.why)


@ROOT
@pytest.mark.parametrize("place", [".", "config.yaml", "code", "code/mine.py", ".."])
def test_what_a_group_may_write_to_or_another_user_has_is_not_ones_own(mine: RunDir, place: str) -> None:
    """The files, the folder and every folder above it: who may rename one of these can put another in its place."""
    path = mine.path / place
    os.chown(path, -1, GROUP)
    path.chmod(path.stat().st_mode | 0o020)
    assert f"The members of group {GROUP} may write to {path.resolve()}." in why(mine)
    os.chown(path, GROUP, -1)
    assert f"belongs to user {GROUP}" in why(mine)


def test_what_anybody_may_write_to_is_not_ones_own_but_in_a_sticky_folder(mine: RunDir) -> None:
    mine.path.parent.chmod(0o777)
    assert "Anybody may write to" in why(mine)
    mine.path.parent.chmod(0o1777)
    assert asked(mine).own
    link = mine.path.parent.with_name("link")
    link.symlink_to(mine.path.parent)
    assert require_own_code(link / mine.name, load(str(mine.path)), allow_code=False).own, "also through a link"
    (mine.code / "mine.py").chmod(0o666)
    assert "Anybody may write to" in why(mine)


def test_a_link_in_the_snapshot_leads_to_nothing_that_others_may_write(mine: RunDir, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(mode=0o777)
    (tmp_path / "shared").chmod(0o777)
    (tmp_path / "shared" / "more.py").write_text("")
    (mine.code / "more.py").symlink_to(tmp_path / "shared" / "more.py")
    assert "Anybody may write to" in why(mine)


@pytest.fixture
def user_private(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """This user's primary group becomes one of their own name, with these members and those whose primary one it is."""

    def make(name: str = "me", members: tuple[str, ...] = (), primary: tuple[str, ...] = ("me",)) -> None:
        ownership._is_private.cache_clear()
        users = [SimpleNamespace(pw_name=user, pw_gid=GROUP) for user in primary]
        monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="me", pw_gid=GROUP))
        monkeypatch.setattr(pwd, "getpwall", lambda: users)
        monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name=name, gr_mem=list(members)))

    yield make
    ownership._is_private.cache_clear()


@ROOT
@pytest.mark.parametrize(
    ("group", "own"),
    [
        ({}, True), ({"members": ("me",)}, True), ({"members": ("me", "eve")}, False),
        ({"primary": ("me", "eve")}, False), ({"name": "students"}, False),
    ],
    ids=str,
)  # fmt: skip
def test_a_group_of_which_only_the_user_is_a_member_locks_nobody_out(
    mine: RunDir,
    user_private: Callable[..., None],
    group: dict[str, object],
    own: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Debian and Fedora give each user one, and a umask of 002 with it."""
    user_private(**group)
    os.chown(mine.code, -1, GROUP)
    mine.code.chmod(0o775)
    if not own:
        assert "may write to" in why(mine)
        return
    assert asked(mine).own
    monkeypatch.setattr(os, "listxattr", lambda path: ["system.posix_acl_access"])
    assert "may write to" in why(mine), "an access list counts all the same"


# What was submitted, by its digest


def shared(mine: RunDir) -> None:
    """As in a project's folder with TRAINKIT_RUN_MODE=2770."""
    for path in (mine.path, mine.code, mine.config, mine.code / "mine.py"):
        os.chown(path, -1, GROUP)
        path.chmod(path.stat().st_mode | 0o020)


@ROOT
def test_a_run_that_a_group_may_write_to_is_ones_own_as_it_was_submitted(mine: RunDir) -> None:
    vouch(mine, load(str(mine.path)).config)
    shared(mine)
    assert asked(mine).own
    found = asked(mine, starts=True)
    assert (found.code, found.own) == (None, True), "which imports nothing itself"
    assert found.content == {"mine.py": b"def build(root): ...\n"}
    user_lists.state_file("vouched").chmod(0o660)  # a list of digests that others may write says nothing
    assert "may write to" in why(mine)


@ROOT
@pytest.mark.parametrize("what", ["code", "another file", "a setting", "a destination"])
def test_a_run_that_a_group_has_changed_is_not_ones_own(mine: RunDir, what: str) -> None:
    vouch(mine, load(str(mine.path)).config)
    shared(mine)
    if what == "code":
        (mine.code / "mine.py").write_text("def build(root): ... # more\n")
    elif what == "another file":
        (mine.code / "torch.py").write_text("")
    else:
        setting = "data.name=json:loads" if what == "a setting" else "checkpoint.remote=s3://eve/all"
        mine.config.write_text(to_yaml(load(str(mine.path), [setting]).config))
    with pytest.raises(RefusedError, match=r"json:loads|s3://eve|mine:build"):
        asked(mine, starts=True)


@pytest.mark.parametrize("how", [shutil.move, shutil.copytree], ids=["moved", "copied"])
def test_a_moved_or_copied_run_is_ones_own(mine: RunDir, tmp_path: Path, how: Callable[[Path, Path], object]) -> None:
    vouch(mine, load(str(mine.path)).config)
    there = RunDir(tmp_path / "elsewhere" / "best-run")
    there.path.parent.mkdir()
    how(mine.path, there.path)
    assert asked(there, starts=True).own


@ROOT
def test_what_was_looked_at_is_what_is_imported(mine: RunDir) -> None:
    """A member of the group changes the file after the look: what is imported is a copy of what was seen."""
    vouch(mine, load(str(mine.path)).config)
    shared(mine)
    (mine.code / "__pycache__").mkdir()  # which Python would run in place of the source beside it
    (mine.code / "__pycache__" / "mine.cpython-311.pyc").write_bytes(b"evil")
    found = asked(mine)
    (mine.code / "mine.py").write_text("raise SystemExit\n")
    assert found.code is not None
    assert found.code != mine.code
    assert not list(found.code.rglob("*.pyc"))
    assert (found.code / "mine.py").read_text() == "def build(root): ...\n"
    assert found.code.stat().st_mode & 0o777 == 0o700


@ROOT
def test_a_shared_record_does_not_say_where_a_resumed_job_finds_modules(mine: RunDir, tmp_path: Path) -> None:
    """Its `cwd` is where the job works; a member of the group could name a folder of theirs."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    mine.manifest.write_text(json.dumps({"cwd": str(theirs)}))
    assert first_folder(mine) == theirs
    theirs.chmod(0o777)
    assert first_folder(mine) == theirs, "the user's own word, for a folder that they share"
    mine.manifest.chmod(0o666)
    assert first_folder(mine) == Path.cwd()


def packed(mine: RunDir, content: dict[str, str]) -> None:
    """Its code is in an archive, and the copy that it shared is gone."""
    shutil.rmtree(mine.code)
    mine.code.symlink_to("../.code/gone")
    with zipfile.ZipFile(mine.code_archive, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in content.items():
            archive.writestr(name, text)


def test_what_a_run_is_restarted_with_is_what_was_looked_at(mine: RunDir, tmp_path: Path) -> None:
    """Compiled files stand in no digest, and Python runs them in the place of the sources beside them."""
    vouch(mine, load(str(mine.path)).config)
    there = RunDir(tmp_path / "received")
    shutil.copytree(mine.path, there.path)
    (there.code / "__pycache__").mkdir()
    (there.code / "__pycache__" / "mine.cpython-311.pyc").write_bytes(b"evil")
    found = asked(there, starts=True)
    assert found.own
    restore_code(there, found.content)
    assert [file.name for file in there.code.rglob("*")] == ["mine.py"]
    assert sorted(file.name for file in there.path.iterdir()) == sorted(file.name for file in mine.path.iterdir())


def test_an_archive_of_code_that_others_may_write_is_not_ones_own(mine: RunDir) -> None:
    """Runs have it in common, by hard links: who may write to it in one of them, writes to that of all."""
    packed(mine, {"mine.py": "raise SystemExit\n"})
    assert asked(mine).own
    mine.code_archive.chmod(0o666)
    assert f"Anybody may write to {mine.code_archive}." in why(mine)


def test_a_run_is_looked_at_and_read_without_being_written(mine: RunDir) -> None:
    """It may be on a disk that is mounted to be read only, or another user's."""
    vouch(mine, load(str(mine.path)).config)
    packed(mine, {"mine.py": (mine.code / "mine.py").read_text()})
    before = {file: file.lstat().st_mtime_ns for file in (mine.path, *mine.path.iterdir())}
    found = asked(mine)
    assert found.code is not None
    assert (found.code / "mine.py").read_text().startswith("def build")
    assert {file: file.lstat().st_mtime_ns for file in (mine.path, *mine.path.iterdir())} == before


def test_what_this_user_remembers_is_written_by_them_alone(mine: RunDir) -> None:
    """Whatever the umask: who could add to these lists would be trusted."""
    before = os.umask(0)
    try:
        vouch(mine, load(str(mine.path)).config)
        user_lists.remember(mine.path)
    finally:
        os.umask(before)
    for file in (user_lists.state_file("vouched"), user_lists.own_file("runs")):
        assert file.stat().st_mode & 0o777 == 0o600
        assert not file.parent.stat().st_mode & 0o022


@pytest.mark.parametrize("whose", ["file", "folder"])
def test_a_list_of_runs_that_others_may_write_makes_no_run_ones_own(mine: RunDir, whose: str) -> None:
    """Of a time when the umask let a group in; the next run makes it private again."""
    file = user_lists.own_file("runs")
    folder = user_lists.state_file("runs").parent
    (file if whose == "file" else folder).chmod(0o775)
    if whose == "file":
        assert "None of your commands" in why(mine)
    user_lists.remember(mine.path)
    assert not (file.stat().st_mode | folder.stat().st_mode) & 0o022
    assert asked(mine).own


# Files of settings


@pytest.mark.parametrize("setting", ["launch: {setup: [evil]}", "checkpoint: {remote: s3://eve/all}"])
def test_a_file_of_settings_that_others_may_write_starts_and_sends_nothing(
    tmp_path: Path, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "configs" / "theirs.yaml"
    file.parent.mkdir()
    file.write_text(setting)
    assert require_own_code(file, load(str(file)), allow_code=False).own
    file.chmod(0o666)
    with pytest.raises(RefusedError, match=r"evil|eve"):
        require_own_code(file, load(str(file)), allow_code=False)
    assert require_own_code(file, load(str(file)), allow_code=True).own
    assert require_own_code(Path("theirs"), load("theirs"), allow_code=False).own, "a preset of the current folder"


def test_a_file_counts_for_what_it_says_itself_and_said_when_it_was_loaded(tmp_path: Path) -> None:
    base, file = tmp_path / "base.yaml", tmp_path / "mine.yaml"
    base.write_text("train: {epochs: 3}")
    file.write_text("extends: base\nlaunch: {setup: [mine]}")
    base.chmod(0o666)
    assert require_own_code(file, load(str(file)), allow_code=False).own
    base.write_text("launch: {modules: [evil]}")
    loaded = load(str(file))
    file.write_text("extends: ddp")
    with pytest.raises(RefusedError) as caught:
        require_own_code(file, loaded, allow_code=False)
    assert "launch.modules=['evil']" in caught.value.what
    assert "mine" not in caught.value.what.partition("would")[2]


def test_a_profile_that_the_user_names_is_their_word(mine: RunDir, tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("launch: {setup: [module load cuda]}")
    file = tmp_path / "theirs.yaml"
    file.write_text("train: {epochs: 3}")
    file.chmod(0o666)
    loaded = load(str(file), [f"launch.cluster={site}"])
    assert require_own_code(file, loaded, allow_code=False).own
    file.write_text(f"launch: {{cluster: {site}}}")
    with pytest.raises(RefusedError, match=r"launch\.setup"):
        require_own_code(file, load(str(file)), allow_code=False)


def test_an_option_of_ones_own_beside_a_strangers_makes_it_no_less_theirs(tmp_path: Path) -> None:
    """The mapping has a source of its own, which was that of the flag, or of a variable for sbatch."""
    config = to_yaml(load("ddp", ["launch.sbatch.prolog=/tmp/theirs"]).config)
    theirs = tmp_path / "ddp-0001"
    theirs.mkdir()
    (theirs / "config.yaml").write_text(config)
    for flags, env in (({"launch.sbatch": ({"nice": "3"}, "--sbatch")}, {}), ({}, {"SBATCH_WCKEY": "mine"})):
        with pytest.raises(RefusedError, match="prolog"):
            require_own_code(theirs, load(str(theirs), flags=flags, env=env), allow_code=False)
