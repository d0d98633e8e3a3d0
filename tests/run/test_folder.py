import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from trainkit.common.errors import UserError
from trainkit.run import user_lists
from trainkit.run.find import find_run, find_runs, list_runs, next_path, runs_root
from trainkit.run.folder import RunDir

YAML = "seed: 0\n"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# Making


def test_a_new_run_holds_its_settings_and_a_place_for_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir.create(Path("runs/ddp-0001"), YAML)
    assert (run.path, run.config.read_text()) == (tmp_path / "runs" / "ddp-0001", YAML)
    assert sorted(entry.name for entry in run.path.iterdir()) == ["config.yaml", "logs"]
    assert [entry.name for entry in run.path.parent.iterdir()] == ["ddp-0001"]


@pytest.mark.parametrize("kind", ["run", "empty folder", "half a run", "file", "link"])
def test_what_exists_is_never_written_over(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    (tmp_path / "elsewhere").mkdir()
    making: dict[str, Callable[[], object]] = {
        "run": lambda: RunDir.create(path, "seed: 1\n"),
        "empty folder": path.mkdir,
        "half a run": lambda: (path / "logs").mkdir(parents=True),
        "file": lambda: path.write_text("mine"),
        "link": lambda: path.symlink_to(tmp_path / "elsewhere"),
    }
    making[kind]()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="exists already"):
        RunDir.create(path, YAML)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_runs_folder_that_cannot_be_written_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("mine")
    with pytest.raises(UserError, match=r"(?s)Cannot make the run folder.*TRAINKIT_RUNS=FOLDER"):
        RunDir.create(tmp_path / "runs" / "a", YAML)
    assert (tmp_path / "runs").read_text() == "mine"


def test_a_disk_that_is_away_or_has_no_modes_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").symlink_to(tmp_path / "scratch")
    with pytest.raises(UserError, match="Cannot make the run folder"):
        RunDir.create(tmp_path / "runs" / "a", YAML)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(Path, "chmod", lambda path, mode: os.stat(tmp_path / "no such file"))
    with pytest.raises(UserError, match="Cannot make the run folder"):
        RunDir.create(tmp_path / "runs" / "a", YAML)
    assert not (tmp_path / "runs" / "a").exists()


def test_of_several_that_make_the_same_run_one_alone_does(tmp_path: Path) -> None:
    with ProcessPoolExecutor(3, multiprocessing.get_context("spawn")) as processes:
        made = [processes.submit(RunDir.create, tmp_path / "a", YAML) for _ in range(12)]
    errors = [each.exception() for each in made]
    assert errors.count(None) == 1
    assert {type(error) for error in errors} == {type(None), UserError}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_ids_count_up_over_all_runs_and_names_are_safe_in_shells_and_paths(tmp_path: Path) -> None:
    names = {"my run/é": "my-run", "..": "run", "-x-": "x", "a.b_c": "a.b_c"}
    assert [next_path(tmp_path, name).name for name in names] == [f"{safe}-0001" for safe in names.values()]
    for there, following in (("vit-b-0041", "ddp-0042"), ("notes-12", "ddp-0042"), ("ddp-9999", "ddp-10000")):
        (tmp_path / there).mkdir()
        assert next_path(tmp_path, "ddp").name == following


def test_runs_are_in_the_current_folder_or_the_users_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs_root({}) == runs_root({"TRAINKIT_RUNS": ""}) == tmp_path / "runs"
    assert runs_root({"TRAINKIT_RUNS": "~/runs"}) == Path(os.environ["HOME"]) / "runs"


# Finding


@pytest.mark.parametrize(
    ("place", "reference"),
    [
        ("anywhere", "anywhere"),
        ("runs/ddp-0001", "ddp-0001"),
        ("project/runs/ddp-0003", "ddp-0003"),
        ("project/runs/sweep-0001/0", "sweep-0001/0"),
        ("runs/4711", "4711"),
        ("project/runs/4712", "4712"),
    ],
)
def test_a_run_is_found_by_its_path_and_by_its_name(tmp_path: Path, place: str, reference: str) -> None:
    run = RunDir.create(tmp_path / place, YAML)
    assert find_run(reference, {}) == find_run(str(run.path), {}) == run


def test_an_unknown_run_is_answered_with_the_nearest(tmp_path: Path) -> None:
    RunDir.create(tmp_path / "runs" / "ddp-0001", YAML)
    with pytest.raises(UserError) as caught:
        find_run("ddp-001", {})
    assert caught.value.fix == "Did you mean 'ddp-0001'?"


def test_a_sweep_is_no_run_and_no_folder_to_remove(tmp_path: Path) -> None:
    sweep = tmp_path / "runs" / "ddp-0003"
    (sweep / "logs").mkdir(parents=True)
    (sweep / "sweep.json").write_text("{}")
    with pytest.raises(UserError) as caught:
        find_run("ddp-0003", {})
    assert caught.value.fix == "It is a sweep: name one of its runs, such as ddp-0003/0."


def test_runs_and_those_of_sweeps_are_listed_oldest_first(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "runs") == []
    for age, name in enumerate(["c-0003", "sweep-0002/1", "sweep-0002/0", "a-0001"]):
        os.utime(RunDir.create(tmp_path / name, YAML).config, (1000 - age, 1000 - age))
    (tmp_path / "a-0001" / "code").mkdir()
    (tmp_path / "a-0001" / "code" / "config.yaml").touch()
    names = [str(run.path.relative_to(tmp_path)) for run in list_runs(tmp_path)]
    assert names == ["a-0001", "sweep-0002/0", "sweep-0002/1", "c-0003"]


# Who may enter


def mode(path: Path) -> str:
    return oct(path.stat().st_mode & 0o7777)[2:]


@pytest.mark.parametrize("asked", ["700", "750", "2770", "755"])
def test_a_run_is_as_open_as_asked_with_any_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    if asked != "700":
        monkeypatch.setenv("TRAINKIT_RUN_MODE", asked)
    old = os.umask(0o002)  # as on sites where every user has a group of their own
    try:
        assert mode(RunDir.create(tmp_path / "a", "").path) == asked
    finally:
        os.umask(old)


@pytest.mark.parametrize("asked", ["rwx", "070", "7777", "9"])
def test_a_mode_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv("TRAINKIT_RUN_MODE", asked)
    with pytest.raises(UserError, match="TRAINKIT_RUN_MODE"):
        RunDir.create(tmp_path / "a", "")
    assert not (tmp_path / "a").exists(), "submit would take the name for another run's, and try the next"


# What a name means: the run here, and one elsewhere only if there is none here


def sweep(folder: Path, count: int = 2) -> Path:
    for index in range(count):
        RunDir.create(folder / str(index), YAML)
    (folder / "sweep.json").write_text("[]")
    return folder


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runs folder of another project of this user's; the current folder is ``here``, with its own ``runs``."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "elsewhere" / "runs"


def here(name: str) -> Path:
    return RunDir.create(Path("runs") / name, YAML).path


@pytest.mark.parametrize("other", ["run", "sweep", "nothing"])
@pytest.mark.parametrize("kind", ["run", "sweep", "sweep elsewhere"])
def test_what_is_here_is_meant_whatever_there_is_elsewhere(elsewhere: Path, kind: str, other: str) -> None:
    if kind == "sweep elsewhere":
        mine = sweep(elsewhere / "ddp-0001")
    else:
        mine = here("ddp-0001") if kind == "run" else sweep(Path("runs/ddp-0001").absolute())
        if other != "nothing":
            theirs = elsewhere / "ddp-0001"
            RunDir.create(theirs, YAML) if other == "run" else sweep(theirs)
    expected = [mine] if kind == "run" else [mine / "0", mine / "1"]
    for reference in ("ddp-0001", str(mine)):
        assert sorted(run.path for run in find_runs(reference, {})) == expected
    assert find_run("ddp-0001" if kind == "run" else "ddp-0001/1", {}).path == expected[-1]


def test_half_a_run_here_is_not_one_elsewhere(elsewhere: Path) -> None:
    Path("runs/ddp-0001/logs").mkdir(parents=True)
    RunDir.create(elsewhere / "ddp-0001", YAML)
    with pytest.raises(UserError, match="or an incomplete one"):
        find_runs("ddp-0001", {})


@pytest.mark.parametrize("kind", ["run", "sweep", "here"])
def test_of_several_none_is_taken_and_all_are_listed(elsewhere: Path, tmp_path: Path, kind: str) -> None:
    if kind == "here":  # in the current folder, and in the runs folder
        paths = [RunDir.create(Path("ddp-0001"), YAML).path, here("ddp-0001")]
    else:
        paths = [sweep(elsewhere / "ddp-0001"), tmp_path / "third" / "ddp-0001"]
        RunDir.create(paths[1], YAML) if kind == "run" else sweep(paths[1])
    with pytest.raises(UserError) as caught:
        find_runs("ddp-0001", {})
    assert caught.value.why == ", ".join(map(str, paths))


@pytest.mark.parametrize(
    "reference",
    [
        "./ddp-0001", "runs/ddp-0001", "../here/runs/ddp-0001", "~/ddp-0001",  # paths are looked for where they point
        "ddp-*", "[d]dp-0001", "?dp-0001", "DDP-0001",  # a name is no pattern
        "0",  # nor is the number of a run in a sweep a name
    ],
)  # fmt: skip
def test_a_path_or_a_pattern_means_no_run_elsewhere(elsewhere: Path, reference: str) -> None:
    here("ddp-0003")
    RunDir.create(elsewhere / "ddp-0001", YAML)
    sweep(elsewhere / "ddp-0002", count=1)
    with pytest.raises(UserError, match="No run"):
        find_runs(reference, {})


def test_the_name_of_a_waiting_template_means_no_other_job() -> None:
    here("ddp-job4711")
    with pytest.raises(UserError, match="No run") as caught:
        find_run("ddp-job4712", {})
    assert "it creates the run when it starts" in caught.value.why
    assert ("squeue -j 4712" in caught.value.fix, "4711" in caught.value.fix) == (True, False)


@pytest.mark.parametrize("reference", ["./ddp-0001", "../here/ddp-0001"])
def test_a_path_does_not_mean_the_runs_folder(elsewhere: Path, reference: str) -> None:
    mine = RunDir.create(Path("ddp-0001"), YAML).path
    here("ddp-0001")
    assert find_run(reference, {}).path.resolve() == mine


def test_a_folder_of_that_name_that_is_no_run_hides_none(elsewhere: Path) -> None:
    Path("photos").mkdir()
    mine = here("photos")
    assert find_run("photos", {}).path == mine
    (mine / "config.yaml").unlink()
    with pytest.raises(UserError, match="runs/photos is not a run folder"):
        find_run("photos", {})


def test_a_run_that_is_reached_by_two_names_is_one(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = here("ddp-0001")
    Path("ddp-0001").symlink_to(mine)
    assert find_run("ddp-0001", {}).path.resolve() == mine
    monkeypatch.chdir("runs")
    assert find_run("ddp-0001", {"TRAINKIT_RUNS": "."}).path == mine


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
@pytest.mark.parametrize(
    ("mode", "why"), [(0o755, "It belongs to root (mode 700)"), (0o700, "You may not enter a folder")]
)
def test_a_run_of_somebody_else_is_no_run_of_that_name_elsewhere(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, mode: int, why: str
) -> None:
    """And not half of one: what is in it nobody can tell."""
    RunDir.create(elsewhere / "ddp-0001", YAML)
    with tempfile.TemporaryDirectory() as shared:
        root = Path(shared, "runs")
        RunDir.create(root / "ddp-0001", YAML)
        Path(shared).chmod(0o755)
        root.chmod(mode)
        os.seteuid(65534)
        try:
            with pytest.raises(UserError) as caught:
                find_runs("ddp-0001", {"TRAINKIT_RUNS": str(root)})
        finally:
            os.seteuid(0)
    assert caught.value.what == f"Permission denied: {root / 'ddp-0001'}."
    assert caught.value.why.startswith(why)


def made(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.yaml").touch()
    return path


def test_remembered_runs_are_known_once_oldest_first_while_they_are_there(tmp_path: Path) -> None:
    assert user_lists.known() == []
    runs = [made(tmp_path / name) for name in ("b", "a")]
    for run in (*runs, *runs, tmp_path / "gone"):
        user_lists.remember(run)
    assert user_lists.known() == runs


def test_the_state_folder_is_the_desktop_standards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    user_lists.remember(made(tmp_path / "a"))
    (file,) = (Path(os.environ["HOME"]) / ".local/state/trainkit/projects").glob("*/runs")
    assert file.read_text() == f"{tmp_path / 'a'}\n"


def test_a_home_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    user_lists.remember(tmp_path)
    assert user_lists.known() == []


def test_another_clones_runs_are_known_to_who_asks_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = made(tmp_path / "theirs" / "run-0002")
    both = made(tmp_path / "theirs" / "run-0001")
    user_lists.remember(theirs)
    user_lists.remember(both)
    user_lists.mark(theirs, "abc")
    monkeypatch.setattr(user_lists, "__file__", str(tmp_path / "clone" / "trainkit" / "run" / "user_lists.py"))
    ours = made(tmp_path / "ours" / "run-0001")
    user_lists.remember(ours)
    assert user_lists.known() == [ours]
    assert set(user_lists.known(everywhere=True)) == {ours, theirs, both}
    assert user_lists.marked() == []
    assert user_lists.has(theirs), "a command of this user made it"
    assert [find_run(name, {}).path for name in ("run-0001", "run-0002")] == [ours, theirs], "first among its own"


# A folder that a job has written into before its run is made


@pytest.mark.parametrize(
    ("there", "possible"),
    [
        ((), True), (("logs",), True), (("logs", "events.jsonl"), True),
        (("logs", "notes.txt"), False), (("logs", "metrics.jsonl"), False), (("logs", "config.yaml"), False),
    ],
)  # fmt: skip
def test_a_run_is_made_where_a_job_has_written_and_nowhere_else(
    tmp_path: Path, there: tuple[str, ...], *, possible: bool
) -> None:
    """A node that was lost before the run was made is in its events, and the next start makes the run."""
    path = tmp_path / "ddp-job1"
    path.mkdir()
    for name in there:
        (path / name).mkdir() if name == "logs" else (path / name).write_text("{}\n")
    if possible:
        assert RunDir.create(path, YAML, after_logs=True).config.read_text() == YAML
        assert mode(path) == "700"
        return
    with pytest.raises(UserError, match="exists already"):
        RunDir.create(path, YAML, after_logs=True)
    assert sorted(file.name for file in path.iterdir()) == sorted(there)
