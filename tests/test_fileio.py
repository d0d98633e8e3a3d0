"""Files are read with bounds, written whole, and never through a link that somebody else has put there."""

import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from trainkit.common import fileio, jsonl
from trainkit.common.errors import UserError
from trainkit.common.fileio import append, copy, create, is_own, link, make_folder, replacing, write


def sparse(path: Path) -> None:
    with path.open("wb") as out:
        out.truncate(300 << 30)


def a_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # its path may be too long for one
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


ODD: dict[str, Callable[[Path], object]] = {
    "sparse": sparse,
    "fifo": os.mkfifo,
    "socket": a_socket,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path),
    "nothing": lambda path: None,
}


@pytest.mark.parametrize("odd", ODD)
def test_what_is_no_file_or_too_large_is_an_error_at_once(tmp_path: Path, odd: str) -> None:
    path = tmp_path / "odd"
    ODD[odd](path)
    began = time.monotonic()
    with pytest.raises(OSError, match=r".") as caught:
        fileio.read_text(path)
    assert fileio.read_object(path) == {}
    assert time.monotonic() - began < 1
    assert caught.value.strerror


def test_a_link_is_read_only_by_who_says_so(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    (tmp_path / "log").symlink_to("key")
    reads: tuple[Callable[..., str], ...] = (fileio.read_text, lambda path, **how: fileio.read_start(path, 9, **how))
    for read in reads:
        with pytest.raises(OSError, match="It is a link"):
            read(tmp_path / "log")
        assert read(tmp_path / "log", follow=True) == "secret"


def test_a_file_is_read_whole_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for size in (0, 1, 200_000):
        path.write_bytes(os.urandom(size))
        assert fileio.read_bytes(path, size) == path.read_bytes()
    with pytest.raises(OSError, match="200,000 bytes"):
        fileio.read_bytes(path, 199_999)
    assert fileio.read_text(Path("/proc/self/status")).startswith("Name:"), "although its size is said to be 0"


def test_a_file_that_grows_while_it_is_read_has_an_end(tmp_path: Path) -> None:
    path, over = tmp_path / "file", threading.Event()
    path.write_bytes(b"x" * 200_000)

    def grow() -> None:
        with path.open("ab") as out:
            while not over.wait(0.0001) and out.tell() < 1 << 26:
                out.write(b"x" * 200_000)

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        for _ in range(50):
            with suppress(OSError):
                assert len(fileio.read_bytes(path, 1 << 20)) <= 1 << 20
    finally:
        over.set()
        writer.join()


def test_the_end_of_a_long_file_is_read_alone(tmp_path: Path) -> None:
    sparse(tmp_path / "file")
    with (tmp_path / "file").open("ab") as out:
        out.write(b"the end")
    assert (fileio.read_end(tmp_path / "file", 7), fileio.read_start(tmp_path / "file", 3)) == ("the end", "\0\0\0")


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, "[" + "[]," * 2_000_000 + "[]]", "", "{", b"\xff"],
    ids=["depth of lists", "depth of objects", "values", "nothing", "torn", "no text"],
)
def test_a_text_that_is_no_json_or_too_much_of_it_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        fileio.parse(text)
    assert fileio.parse_object(text) is None
    assert fileio.parse(f"[NaN, -Infinity, {'9' * 5000}, 12]") == [None, None, None, 12], "nobody can compute with them"
    assert fileio.parse(f"[-{'9' * 19}, -{'9' * 20}]") == [-(10**19 - 1), None]


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


@pytest.mark.parametrize("fails", [False, True])
def test_a_file_is_as_it_was_until_the_new_one_is_whole(run: Path, fails: bool) -> None:
    file = run / "summary.json"
    file.write_text("old")
    with suppress(KeyboardInterrupt), replacing(file) as out:
        out.write(b"new")
        assert file.read_text() == "old"
        if fails:
            raise KeyboardInterrupt
    assert file.read_text() == ("old" if fails else "new")
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


@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link"])
def test_a_link_is_replaced_and_what_it_leads_to_stays(run: Path, victim: Path, kind: str) -> None:
    name = run / "report.html"
    os.link(victim, name) if kind == "hard link" else name.symlink_to(
        victim if kind == "link" else victim.with_name("authorized_keys")
    )
    write(name, "new")
    assert (victim.read_text(), name.read_text(), name.is_symlink()) == ("precious", "new", False)
    assert not victim.with_name("authorized_keys").exists()


@pytest.mark.parametrize("leads_to", ["victim", "nowhere"])
def test_nothing_is_appended_through_a_link_nor_a_new_file_one_that_is_there(
    leads_to: str, run: Path, victim: Path
) -> None:
    (run / "events.jsonl").symlink_to(victim.with_name(leads_to))
    with pytest.raises(UserError, match=r"is a link to .*\n.*through no link"):
        jsonl.append_jsonl(run / "events.jsonl", {"event": "saved"})
    with pytest.raises(FileExistsError):
        create(run / "events.jsonl", run)
    assert victim.read_text() == "precious"
    assert not victim.with_name("nowhere").exists()


@pytest.mark.parametrize(("kind", "words"), [("second name", "has a second name"), ("pipe", "is not a regular file")])
def test_what_cannot_be_appended_to_is_refused_at_once(run: Path, victim: Path, kind: str, words: str) -> None:
    os.link(victim, run / "events.jsonl") if kind == "second name" else os.mkfifo(run / "events.jsonl")
    with pytest.raises(UserError, match=words):
        append(run / "events.jsonl")
    assert victim.read_text() == "precious"
    assert sorted(run.iterdir()) == [run / "events.jsonl"]


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


@pytest.mark.parametrize("run_mode", [0o700, 0o750, 0o2770], ids=oct)
def test_what_is_in_a_run_is_as_open_as_the_run_whatever_the_umask(
    run_mode: int, umask: int, run: Path, tmp_path: Path
) -> None:
    run.chmod(run_mode)
    (tmp_path / "scratch").symlink_to(run)  # a run may be reached by a link
    make_folder(tmp_path / "scratch" / "logs" / "0", tmp_path / "scratch")
    for how in sorted(set(WRITES) - {"make_folder", "link"}):
        WRITES[how](run / "logs" / "0" / how, run)
    assert {mode(run / "logs"), mode(run / "logs" / "0")} == {run_mode}
    assert {mode(file) for file in (run / "logs" / "0").iterdir()} == {run_mode & 0o666}
    write(tmp_path / "predictions.csv", "x")
    assert mode(tmp_path / "predictions.csv") == 0o666 & ~umask, "what is of no run goes by the umask"


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


def test_records_come_back_in_order_as_json_can_say_them(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    assert list(jsonl.read_jsonl(file)) == []
    nan, inf = float("nan"), float("inf")
    jsonl.append_jsonl(file, {"a": 1, "path": Path("x/y")})
    jsonl.append_jsonl(file, {"b": [1.5, None, "x"], "lost": [nan, inf, -inf]})
    expected = [{"a": 1, "path": "x/y"}, {"b": [1.5, None, "x"], "lost": [None] * 3}]
    assert list(jsonl.read_jsonl(file)) == [json.loads(line) for line in file.read_text().splitlines()] == expected


@pytest.mark.parametrize("torn", ['{"a": 2, "b', "{", "3\n", "[1]\n", "\n", "\xff\n"])
def test_a_line_that_is_no_record_is_passed_over_and_swallows_none(tmp_path: Path, torn: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"a": 1}\n' + torn.encode("latin-1"))
    jsonl.append_jsonl(file, {"a": 3})
    assert list(jsonl.read_jsonl(file)) == [{"a": 1}, {"a": 3}]


def test_records_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    code = (
        "import sys; from pathlib import Path; from trainkit.common import jsonl\n"
        "for n in range(50): jsonl.append_jsonl(Path(sys.argv[1]), {'who': sys.argv[2], 'n': n, 'text': 'x' * 500})"
    )
    command = [sys.executable, "-c", code, str(file)]
    writers = [subprocess.Popen([*command, who], cwd=Path(__file__).parents[2]) for who in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    records = list(jsonl.read_jsonl(file))
    assert [[r["n"] for r in records if r["who"] == who] for who in "ab"] == [list(range(50))] * 2


@pytest.mark.parametrize("name", ["a", "a b/c.tar", "...", "a/..b", "\N{LATIN SMALL LETTER E WITH ACUTE}"])
def test_a_path_that_a_file_names_lies_below_its_folder(tmp_path: Path, name: str) -> None:
    assert fileio.inside(tmp_path, name) == tmp_path / name


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/etc/passwd", "a/../b", "a/..", "./a", "a//b", "a/", "a\0b", "a\nb", "a" * 1001, 7, None]
)
def test_a_path_that_leads_elsewhere_is_refused(tmp_path: Path, name: object) -> None:
    with pytest.raises(ValueError, match="is not a path below a folder"):
        fileio.inside(tmp_path, name)
