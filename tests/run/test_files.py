from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainkit import fileio
from trainkit.errors import UserError
from trainkit.fileio import append, copy, create, is_own, link, make_folder, replacing, write


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir(mode=0o700)
    return tmp_path / "run"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    (tmp_path / "victim").write_text("precious")
    return tmp_path / "victim"


@pytest.fixture(params=[0o000, 0o002, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_file_is_as_it_was_until_the_new_one_is_whole(run: Path) -> None:
    file = run / "summary.json"
    file.write_text("old")
    with replacing(file) as out:
        out.write(b"new")
        assert file.read_text() == "old"
    assert file.read_text() == "new"
    assert [*run.iterdir()] == [file]


def test_where_it_cannot_be_finished_nothing_of_it_is_left(run: Path) -> None:
    file = run / "summary.json"
    file.write_text("old")

    def fail() -> None:
        with replacing(file) as out:
            out.write(b"ne")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk is full"):
        fail()
    assert file.read_text() == "old"
    assert [*run.iterdir()] == [file]


def test_what_killed_processes_have_left_goes_after_an_hour(run: Path) -> None:
    old, new, other = (run / f".partial-0123456{n}-{name}" for n, name in enumerate(("a.md", "a.md", "b.md")))
    for left in (old, new, other):
        left.touch()
    hours_ago = time.time() - 7200
    for left in (old, other):
        os.utime(left, (hours_ago, hours_ago))
    write(run / "a.md", "new")
    assert sorted(run.iterdir()) == sorted([new, other, run / "a.md"])


def test_a_partial_file_has_a_name_that_nobody_foresees(run: Path) -> None:
    with replacing(run / "a.png") as one, replacing(run / "a.png") as other:
        assert one.name != other.name
        assert Path(one.name).parent == run
        assert one.name.endswith(".png")  # what writes by name goes by its ending


def test_a_private_file_is_never_readable_for_others(umask: int, run: Path) -> None:
    run.chmod(0o755)
    with replacing(run / "owner.key", run, private=True) as out:
        assert mode(Path(out.name)) == 0o600
    assert mode(run / "owner.key") == 0o600


def test_a_link_is_replaced_and_what_it_leads_to_stays(run: Path, victim: Path) -> None:
    (run / "report.html").symlink_to(victim)
    write(run / "report.html", "new")
    assert (victim.read_text(), (run / "report.html").read_text()) == ("precious", "new")
    assert not (run / "report.html").is_symlink()


def test_a_dangling_link_creates_nothing_where_it_leads(run: Path, tmp_path: Path) -> None:
    (run / "logbook.md").symlink_to(tmp_path / "authorized_keys")
    write(run / "logbook.md", "new")
    assert not (tmp_path / "authorized_keys").exists()


def test_a_hard_link_is_replaced_and_the_other_name_stays(run: Path, victim: Path) -> None:
    os.link(victim, run / "plan.json")
    write(run / "plan.json", "new")
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("leads_to", ["victim", "nowhere"])
def test_nothing_is_appended_through_a_link(leads_to: str, run: Path, victim: Path) -> None:
    (run / "events.jsonl").symlink_to(victim.with_name(leads_to))
    with pytest.raises(UserError, match=r"is a link to .*\n.*through a link"):
        fileio.append_jsonl(run / "events.jsonl", {"event": "saved"})
    assert victim.read_text() == "precious"
    assert not victim.with_name("nowhere").exists()


def test_what_is_appended_to_a_second_name_of_a_file_leaves_the_first(run: Path, victim: Path) -> None:
    victim.write_text('{"a": 1}\n')
    victim.chmod(0o600)
    os.link(victim, run / "events.jsonl")
    fileio.append_jsonl(run / "events.jsonl", {"b": 2})
    assert victim.read_text() == '{"a": 1}\n'
    assert (run / "events.jsonl").read_text() == '{"a": 1}\n{"b": 2}\n'
    assert mode(run / "events.jsonl") == 0o600


def test_a_long_second_name_is_refused(run: Path, victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fileio, "_LONGEST_COPY", 4)
    os.link(victim, run / "events.jsonl")
    with pytest.raises(UserError, match="has a second name"):
        append(run / "events.jsonl")
    assert sorted(run.iterdir()) == [run / "events.jsonl"]


def test_a_pipe_in_the_place_of_a_record_is_refused_at_once(run: Path) -> None:
    os.mkfifo(run / "events.jsonl")
    with pytest.raises(UserError, match="no regular file"):
        append(run / "events.jsonl")


def test_a_new_file_is_never_one_that_is_there(run: Path, victim: Path) -> None:
    (run / "node-0").symlink_to(victim.with_name("nowhere"))
    with pytest.raises(FileExistsError):
        create(run / "node-0", run)
    assert not victim.with_name("nowhere").exists()


WRITES: dict[str, Callable[[Path, Path], object]] = {
    "write": lambda file, run: write(file, "x", run),
    "append": lambda file, run: append(file, run).close(),
    "create": lambda file, run: create(file, run).close(),
    "copy": lambda file, run: copy(Path(__file__), file, run),
    "link": lambda file, run: link(file, "step-1", run),
    "make_folder": lambda file, run: make_folder(file, run),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("inside", ["checkpoints", "logs/0"])
def test_no_folder_of_a_run_is_a_link_to_elsewhere(how: str, inside: str, run: Path, tmp_path: Path) -> None:
    (tmp_path / "home" / "0").mkdir(parents=True)
    (run / inside.split("/")[0]).symlink_to(tmp_path / "home")
    with pytest.raises(UserError, match="is a link to"):
        WRITES[how](run / inside / "file", run)
    assert [path.name for path in (tmp_path / "home").rglob("*")] == ["0"]


def test_the_run_itself_may_be_reached_by_a_link(run: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").symlink_to(run)
    write(tmp_path / "scratch" / "summary.json", "x", tmp_path / "scratch")
    assert (run / "summary.json").read_text() == "x"


@pytest.mark.parametrize("run_mode", [0o700, 0o750, 0o2770], ids=oct)
def test_what_is_in_a_run_is_as_open_as_the_run_whatever_the_umask(run_mode: int, umask: int, run: Path) -> None:
    run.chmod(run_mode)
    make_folder(run / "logs" / "0", run)
    for how in sorted(set(WRITES) - {"make_folder", "link"}):
        WRITES[how](run / "logs" / "0" / how, run)
    assert {mode(run / "logs"), mode(run / "logs" / "0")} == {run_mode}
    assert {mode(file) for file in (run / "logs" / "0").iterdir()} == {run_mode & 0o666}


def test_what_is_no_run_goes_by_the_umask(umask: int, run: Path) -> None:
    write(run / "predictions.csv", "x")
    assert mode(run / "predictions.csv") == 0o666 & ~umask


def test_a_folder_is_ones_own_if_nobody_else_can_get_at_it(tmp_path: Path, run: Path) -> None:
    (tmp_path / "link").symlink_to(run)
    tmp_path.chmod(0o1777)
    assert is_own(run, private=True)
    assert not is_own(tmp_path / "link")
    run.chmod(0o750)
    assert is_own(run)
    assert not is_own(run, private=True)
    run.chmod(0o700)
    tmp_path.chmod(0o777)  # others can put theirs in its place
    assert not is_own(run, private=True)
