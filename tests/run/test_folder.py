from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from trainkit.errors import UserError
from trainkit.run import folder
from trainkit.run.folder import RunDir, find_run, find_runs, list_runs, next_path, runs_root

YAML = "seed: 0\n"


# Making


def test_a_new_run_holds_its_configuration_and_a_place_for_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
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


def test_a_folder_in_which_only_logs_were_opened_becomes_the_run(tmp_path: Path) -> None:
    (tmp_path / "a" / "logs" / "0").mkdir(parents=True)
    run = RunDir.create(tmp_path / "a", YAML, after_logs=True)
    assert (run.config.read_text(), mode(run.path)) == (YAML, "700")


def test_a_file_where_the_runs_folder_should_be_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("mine")
    with pytest.raises(UserError, match="Cannot make the run folder"):
        RunDir.create(tmp_path / "runs" / "a", YAML)
    assert (tmp_path / "runs").read_text() == "mine"


@pytest.mark.skipif(not Path("/proc/sys").is_dir(), reason="needs a folder that not even root may write to")
def test_a_runs_folder_that_cannot_be_written_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match=r"(?s)Cannot make the run folder.*TRAINKIT_RUNS=FOLDER"):
        RunDir.create(Path("/proc/sys/runs/a"), YAML)


def test_of_two_that_make_the_same_run_one_is_refused(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from trainkit.run.folder import RunDir; sys.stdin.read()\n"
        "try: RunDir.create(Path(sys.argv[1]), sys.argv[2])\n"
        "except Exception as error: print(type(error).__name__)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a")]
    makers = [
        subprocess.Popen(
            [*command, who], cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for who in "xyz"
    ]
    for maker in makers:
        assert maker.stdin is not None
        maker.stdin.close()
        maker.stdin = None
    answers = sorted(maker.communicate()[0].strip() for maker in makers)
    assert answers == ["", "UserError", "UserError"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("there", "found"),
    [((), "ddp-0001"), (("ddp-0001", "vit-b-0041", "notes-12"), "ddp-0042"), (("ddp-9999",), "ddp-10000")],
)
def test_ids_count_up_over_all_runs_of_the_folder(tmp_path: Path, there: tuple[str, ...], found: str) -> None:
    for name in there:
        (tmp_path / name).mkdir()
    assert next_path(tmp_path, "ddp").name == found


@pytest.mark.parametrize(("name", "safe"), [("my run/é", "my-run"), ("..", "run"), ("-x-", "x"), ("a.b_c", "a.b_c")])
def test_a_runs_name_is_safe_in_shells_and_paths(tmp_path: Path, name: str, safe: str) -> None:
    assert next_path(tmp_path, name).name == f"{safe}-0001"


def test_runs_are_in_the_current_folder_or_where_the_user_wants_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert runs_root({}) == runs_root({"TRAINKIT_RUNS": ""}) == tmp_path / "runs"
    assert runs_root({"TRAINKIT_RUNS": "~/runs"}) == Path(os.environ["HOME"]) / "runs"


# Finding


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.chdir(tmp_path)
    return {"TRAINKIT_RUNS": str(tmp_path / "runs")}


@pytest.mark.parametrize(
    ("place", "reference"),
    [
        ("anywhere", "anywhere"),
        ("runs/ddp-0001", "ddp-0001"),
        ("project/runs/ddp-0003", "ddp-0003"),
        ("project/runs/sweep-0001/0", "sweep-0001/0"),
    ],
)
def test_a_run_is_found_by_its_path_and_by_its_name(
    tmp_path: Path, env: dict[str, str], place: str, reference: str
) -> None:
    run = RunDir.create(tmp_path / place, YAML)
    assert find_run(reference, env) == find_run(str(run.path), {}) == run


def test_an_unknown_run_is_answered_with_the_nearest(tmp_path: Path, env: dict[str, str]) -> None:
    RunDir.create(tmp_path / "runs" / "ddp-0001", YAML)
    with pytest.raises(UserError) as caught:
        find_run("ddp-001", env)
    assert caught.value.fix == "Did you mean 'ddp-0001'?"


def test_a_sweep_is_no_run_and_no_folder_to_remove(tmp_path: Path, env: dict[str, str]) -> None:
    sweep = tmp_path / "runs" / "ddp-0003"
    (sweep / "logs").mkdir(parents=True)
    (sweep / "sweep.json").write_text("{}")
    with pytest.raises(UserError) as caught:
        find_run("ddp-0003", env)
    assert caught.value.fix == "It is a sweep: name one of its runs, such as ddp-0003/0."


def test_a_half_written_run_is_refused(tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "runs" / "ddp-0001" / "logs").mkdir(parents=True)
    with pytest.raises(UserError, match="only half of one"):
        find_run("ddp-0001", env)


def test_runs_and_those_of_sweeps_are_listed_oldest_first(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "runs") == []
    for age, name in enumerate(["c-0003", "sweep-0002/1", "sweep-0002/0", "a-0001"]):
        os.utime(RunDir.create(tmp_path / name, YAML).config, (1000 - age, 1000 - age))
    (tmp_path / "a-0001" / "code").mkdir()
    (tmp_path / "a-0001" / "code" / "config.yaml").touch()
    names = [str(run.path.relative_to(tmp_path)) for run in list_runs(tmp_path)]
    assert names == ["a-0001", "sweep-0002/0", "sweep-0002/1", "c-0003"]


def test_attempts_are_the_numbered_log_folders_in_order(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "a", YAML)
    for name in ("10", "2", "0", "notes"):
        (run.logs / name).mkdir()
    assert run.attempts() == [0, 2, 10]


def test_every_name_in_a_run_folder_is_the_designs(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    paths = [
        run.config, run.plan, run.script, run.manifest, run.code, run.logs, run.metrics, run.events, run.checkpoints,
        run.tensorboard, run.wandb, run.summary, run.hardware("n1"), run.lease,
    ]  # fmt: skip
    assert [str(path.relative_to(tmp_path)) for path in paths] == [
        "config.yaml", "plan.json", "submit.sbatch", "manifest.json", "code", "logs", "metrics.jsonl", "events.jsonl",
        "checkpoints", "tensorboard", "wandb", "summary.json", "system-n1.jsonl", "lease.json",
    ]  # fmt: skip


# Who may enter


def mode(path: Path) -> str:
    return oct(path.stat().st_mode & 0o7777)[2:]


def test_a_run_folder_is_the_users_alone(tmp_path: Path) -> None:
    old = os.umask(0o002)  # as on sites where every user has a group of their own
    try:
        assert mode(RunDir.create(tmp_path / "runs" / "a", "").path) == "700"
    finally:
        os.umask(old)


@pytest.mark.parametrize("asked", ["750", "2770", "755"])
def test_a_group_that_shares_its_runs_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv("TRAINKIT_RUN_MODE", asked)
    assert mode(RunDir.create(tmp_path / "a", "").path) == asked


@pytest.mark.parametrize("asked", ["rwx", "070", "7777", "9"])
def test_a_mode_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv("TRAINKIT_RUN_MODE", asked)
    with pytest.raises(UserError, match="TRAINKIT_RUN_MODE"):
        RunDir.create(tmp_path / "a", "")


# What a name means: the run here, and one elsewhere only if there is none here


def sweep(folder: Path, count: int = 2) -> Path:
    for index in range(count):
        RunDir.create(folder / str(index), YAML)
    (folder / "sweep.json").write_text("[]")
    return folder


@pytest.fixture
def elsewhere(tmp_path: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runs folder of another project of this user's; the current folder is ``here``, with its own ``runs``."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    env.pop("TRAINKIT_RUNS")
    return tmp_path / "elsewhere" / "runs"


def here(name: str) -> Path:
    return RunDir.create(Path("runs") / name, YAML).path


@pytest.mark.parametrize("other", ["run", "sweep"])
@pytest.mark.parametrize("kind", ["run", "sweep"])
def test_what_is_here_is_meant_whatever_there_is_elsewhere(
    elsewhere: Path, env: dict[str, str], kind: str, other: str
) -> None:
    mine = here("ddp-0001") if kind == "run" else sweep(Path("runs/ddp-0001").absolute())
    RunDir.create(elsewhere / "ddp-0001", YAML) if other == "run" else sweep(elsewhere / "ddp-0001")
    found = sorted(run.path for run in find_runs("ddp-0001", env))
    assert found == ([mine] if kind == "run" else [mine / "0", mine / "1"])
    assert find_run("ddp-0001" if kind == "run" else "ddp-0001/1", env).path == found[-1]


def test_half_a_run_here_is_not_one_elsewhere(elsewhere: Path, env: dict[str, str]) -> None:
    Path("runs/ddp-0001/logs").mkdir(parents=True)
    RunDir.create(elsewhere / "ddp-0001", YAML)
    with pytest.raises(UserError, match="only half of one"):
        find_runs("ddp-0001", env)


def test_a_sweep_elsewhere_is_found_where_there_is_none_here(elsewhere: Path, env: dict[str, str]) -> None:
    theirs = sweep(elsewhere / "ddp-0001")
    for reference in ("ddp-0001", str(theirs)):
        assert sorted(run.path for run in find_runs(reference, env)) == [theirs / "0", theirs / "1"]
    assert find_run("ddp-0001/0", env).path == theirs / "0"


@pytest.mark.parametrize("kind", ["run", "sweep"])
def test_of_several_elsewhere_none_is_taken_and_all_are_listed(
    elsewhere: Path, env: dict[str, str], tmp_path: Path, kind: str
) -> None:
    one = sweep(elsewhere / "ddp-0001")
    two = tmp_path / "third" / "ddp-0001"
    RunDir.create(two, YAML) if kind == "run" else sweep(two)
    with pytest.raises(UserError) as caught:
        find_runs("ddp-0001", env)
    assert caught.value.why == f"{one}, {two}"


@pytest.mark.parametrize(
    "reference",
    [
        "./ddp-0001", "runs/ddp-0001", "../here/runs/ddp-0001", "~/ddp-0001",  # paths are looked for where they point
        "ddp-*", "[d]dp-0001", "?dp-0001", "DDP-0001",  # a name is no pattern
        "0",  # nor is the number of a run in a sweep a name
    ],
)  # fmt: skip
def test_a_path_or_a_pattern_means_no_run_elsewhere(elsewhere: Path, env: dict[str, str], reference: str) -> None:
    here("ddp-0003")
    RunDir.create(elsewhere / "ddp-0001", YAML)
    sweep(elsewhere / "ddp-0002", count=1)
    with pytest.raises(UserError, match="No run"):
        find_runs(reference, env)


@pytest.mark.parametrize("reference", ["./ddp-0001", "../here/ddp-0001"])
def test_a_path_does_not_mean_the_runs_folder(elsewhere: Path, env: dict[str, str], reference: str) -> None:
    mine = RunDir.create(Path("ddp-0001"), YAML).path
    here("ddp-0001")
    assert find_run(reference, env).path.resolve() == mine


def test_a_folder_of_that_name_that_is_no_run_hides_none(elsewhere: Path, env: dict[str, str]) -> None:
    Path("photos").mkdir()
    mine = here("photos")
    assert find_run("photos", env).path == mine
    (mine / "config.yaml").unlink()
    with pytest.raises(UserError, match="runs/photos is not a run folder"):
        find_run("photos", env)


def test_a_run_in_the_current_folder_and_one_in_the_runs_folder_are_two(elsewhere: Path, env: dict[str, str]) -> None:
    paths = [RunDir.create(Path("ddp-0001"), YAML).path, here("ddp-0001")]
    with pytest.raises(UserError) as caught:
        find_run("ddp-0001", env)
    assert caught.value.why == ", ".join(map(str, paths))


def test_a_run_that_is_reached_by_two_names_is_one(
    elsewhere: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = here("ddp-0001")
    Path("ddp-0001").symlink_to(mine)
    assert find_run("ddp-0001", env).path.resolve() == mine
    monkeypatch.chdir("runs")
    assert find_run("ddp-0001", {"TRAINKIT_RUNS": "."}).path == mine


def test_a_run_may_be_called_by_a_number(elsewhere: Path, env: dict[str, str]) -> None:
    mine, theirs = here("4711"), RunDir.create(elsewhere / "4712", YAML).path
    assert [find_run(name, env).path for name in ("4711", "4712")] == [mine, theirs]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
@pytest.mark.parametrize(("mode", "why"), [(0o755, "It belongs to root (mode 700)"), (0o700, "A folder on the way")])
def test_a_run_of_somebody_else_is_no_run_of_that_name_elsewhere(
    elsewhere: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch, mode: int, why: str
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
    assert folder.known() == []
    runs = [made(tmp_path / name) for name in ("b", "a")]
    for run in (*runs, *runs, tmp_path / "gone"):
        folder.remember(run)
    assert folder.known() == runs


def test_the_state_folder_is_the_desktop_standards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    folder.remember(made(tmp_path / "a"))
    (file,) = (Path(os.environ["HOME"]) / ".local/state/trainkit/projects").glob("*/runs")
    assert file.read_text() == f"{tmp_path / 'a'}\n"


def test_a_home_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    folder.remember(tmp_path)
    assert folder.known() == []


def other_installation(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on it is another clone that looks."""
    monkeypatch.setattr(folder, "__file__", str(path / "trainkit" / "run" / "folder.py"))


def test_what_another_clone_has_started_is_known_to_who_asks_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.remember(made(tmp_path / "theirs"))
    folder.mark(tmp_path / "theirs", "abc")
    other_installation(tmp_path / "clone", monkeypatch)
    folder.remember(made(tmp_path / "ours"))
    assert folder.known() == [tmp_path / "ours"]
    assert set(folder.known(everywhere=True)) == {tmp_path / "ours", tmp_path / "theirs"}
    assert folder.marked() == []
    assert folder.has(tmp_path / "theirs")  # a command of this user made it


def test_the_list_of_before_each_clone_had_its_own_is_not_forgotten(tmp_path: Path) -> None:
    folder.state_file().parent.mkdir(parents=True)
    folder.state_file().write_text(f"{made(tmp_path / 'old')}\n")
    assert folder.known() == []
    assert folder.known(everywhere=True) == [tmp_path / "old"]
    assert folder.has(tmp_path / "old")


def test_a_name_is_looked_for_here_first_and_then_among_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("run-0001", "run-0002"):
        folder.remember(made(tmp_path / "theirs" / name))
    other_installation(tmp_path / "clone", monkeypatch)
    folder.remember(made(tmp_path / "ours" / "run-0001"))
    assert find_run("run-0001", {}).path == tmp_path / "ours" / "run-0001"
    assert find_run("run-0002", {}).path == tmp_path / "theirs" / "run-0002"
