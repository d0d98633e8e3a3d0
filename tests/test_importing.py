"""Libraries, and our own packages, are imported before files of the same name in the user's folders."""

from pathlib import Path

import pytest

from tests.shell import PROJECT, python
from trainkit.cluster.pickles import BEGIN, PYTHON_FLAGS
from trainkit.config.loading import load, to_yaml
from trainkit.run.folder import RunDir
from trainkit.run.snapshot import write_code

STRAY = ("torch", "yaml", "typing", "numpy", "argparse", "json", "sitecustomize")
IMPORTED = "of the folder was imported"
FIRST = "from trainkit.common import imports; imports.installed_first(); "


def write_stray(folder: Path) -> None:
    """Files that are called as libraries are."""
    for name in STRAY:
        (folder / f"{name}.py").write_text(f"import sys; sys.exit('{name}.py {IMPORTED}')\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with such files, and a module of the user's own."""
    write_stray(tmp_path)
    (tmp_path / "my_net.py").write_text("import my_layers\ndef net(info): ...\n")
    (tmp_path / "my_layers.py").write_text("")
    return tmp_path


def test_a_command_is_given_in_a_folder_with_files_named_as_libraries(folder: Path) -> None:
    done = python("-m", "jobs.submit", "ddp", "model.name=my_net:net", "--dry-run", cwd=folder)
    assert done.returncode == 0, done.stderr


def test_a_job_takes_the_users_modules_from_its_snapshot_and_no_libraries(folder: Path) -> None:
    for package in ("trainkit", "jobs"):
        (folder / package).symlink_to(PROJECT / package)
    (folder / "sitecustomize.py").unlink()  # which no snapshot has
    code = f"{BEGIN}import yaml, my_net; from importlib.util import find_spec; print(find_spec('torch').origin); "
    done = python(*PYTHON_FLAGS, "-c", f"{code}print(my_net.__file__)", cwd=PROJECT, PYTHONPATH=str(folder))
    torch, mine = done.stdout.splitlines() or ["", done.stderr]
    assert (Path(torch).parts[-3:], mine) == (("site-packages", "torch", "__init__.py"), str(folder / "my_net.py"))


def test_a_program_of_the_users_own_that_imports_trainkit_is_left_as_it_is(folder: Path) -> None:
    (folder / "script.py").write_text("import trainkit, json\n")
    assert f"json.py {IMPORTED}" in python("script.py", cwd=folder).stderr


def test_a_library_elsewhere_on_pythonpath_comes_before_the_installed_one(folder: Path, tmp_path: Path) -> None:
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "yaml.py").write_text("")
    (folder / "sitecustomize.py").unlink()
    done = python("-c", f"{FIRST}import yaml; print(yaml.__file__)", cwd=folder, PYTHONPATH=f"{PROJECT}:{newer}")
    assert done.stdout.strip() == str(newer / "yaml.py"), done.stderr


def test_the_snapshot_has_no_file_that_python_would_start_with(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    run = RunDir.create(tmp_path / "runs" / "one-0001", "")
    write_code(run)
    assert {path.stem for path in run.code.glob("*.py")} == {"my_net", "my_layers", "torch", "yaml", "numpy"}


# A folder with packages called as ours are


TRAINKIT = "import sys; from trainkit.__main__ import main; sys.exit(main())\n"
"""What pip makes of `[project.scripts]`; Python puts its folder first on the module path."""
SCRIPT, MODULE = ("bin/trainkit",), ("-m", "trainkit")
QUICK = ("model.name=my_net:net", "train.max_steps=2", "monitor.loggers=[jsonl]")


NET = """
import sys
import my_layers
from torch import nn
class Net(nn.Sequential):
    def forward(self, images):
        assert "torch._dynamo" not in sys.modules, "the compiler, which nobody asked for, takes a second"
        return super().forward(images)
def net(info): return Net(nn.Flatten(), nn.Linear(info.image_size**2, info.num_classes))
"""


@pytest.fixture
def thesis(folder: Path) -> Path:
    """The same folder with jobs/, tests/, configs/ and slurm/, all of the user's own."""
    for name in ("jobs", "tests", "configs", "slurm"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise RuntimeError('{name} {IMPORTED}')\n")
    (folder / "jobs" / "submit.py").touch()
    (folder / "my_net.py").write_text(NET)
    (folder / "bin").mkdir()
    (folder / "bin" / "trainkit").write_text(TRAINKIT)
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("command", "verb", "own"),
    [(SCRIPT, "submit", "jobs/"), (MODULE, "launch", "jobs.py")],
    ids=["submit", "launch"],
)
def test_trainkit_trains_in_a_folder_with_its_own_jobs(
    thesis: Path, command: tuple[str, ...], verb: str, own: str
) -> None:
    if own == "jobs.py":
        (thesis / "jobs").rename(thesis / "old_jobs")
        (thesis / own).write_text(f"raise RuntimeError('{own} {IMPORTED}')\n")
    words = (verb, "single", "--gpus-per-node", "0", *QUICK)
    done = python(*command, *words, cwd=thesis, PATH="", TRAINKIT_RUNS="runs")
    assert done.returncode == 0, done.stderr
    run = thesis / "runs" / "single-0001"
    assert (run / "summary.json").is_file()
    assert (run / "code" / "jobs" / "submit.py").read_bytes(), "ours"
    assert not (run / "code" / "jobs.py").exists()
    assert "python -m jobs" not in done.stdout, "which would not work here"


@pytest.mark.parametrize(("model", "line"), [("my_net:net", "import jobs.util"), ("jobs.util:net", "")])
def test_who_imports_a_jobs_of_their_own_is_told_what_it_is_behind(thesis: Path, model: str, line: str) -> None:
    (thesis / "jobs" / "util.py").touch()
    (thesis / "my_net.py").write_text(f"{line}\ndef net(info): ...\n")
    done = python(*SCRIPT, "submit", "single", f"model.name={model}", "--dry-run", cwd=thesis)
    what, why, fix = done.stderr.splitlines()
    assert done.returncode == 2
    assert "which would be trainkit's own package 'jobs'" in what
    assert f"{thesis / 'jobs'} has the name" in why
    assert "my_jobs" in fix


@pytest.mark.parametrize("name", ["trainkit.py", "trainkit/__init__.py"])
def test_a_trainkit_of_the_users_own_is_named_before_it_runs(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("raise RuntimeError('it ran')\n")
    done = python("-m", "jobs.submit", "single", cwd=tmp_path)
    what, why, fix = done.stderr.splitlines()
    assert done.returncode == 2
    assert what == f"{tmp_path / name} would be imported in place of trainkit's own package."
    assert (why[:7], fix[:7]) == ("  why: ", "  fix: ")


# A run whose snapshot has such files


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that names no code of its own."""
    run = RunDir.create(tmp_path / "ddp-0001", to_yaml(load("ddp").config))
    run.code.mkdir()
    write_stray(run.code)
    return run


@pytest.mark.nightly
@pytest.mark.parametrize(("whose", "flags"), [("mine", ()), ("theirs", ("--allow-code",))], ids=["mine", "allowed"])
def test_no_file_of_a_snapshot_is_imported_in_place_of_a_library(
    run: RunDir, tmp_path: Path, whose: str, flags: tuple[str, ...]
) -> None:
    state = {} if whose == "mine" else {"XDG_STATE_HOME": str(tmp_path / "another-user")}
    done = python("-m", "jobs.evaluate", str(run.path), *flags, cwd=tmp_path, **state)
    assert (done.returncode, "No checkpoint 'best'" in done.stderr) == (2, True), done.stderr


@pytest.mark.nightly
def test_a_strangers_run_shadows_no_library_from_a_bucket_or_from_within(run: RunDir, tmp_path: Path) -> None:
    """`python -m` puts the current folder first on the module path."""
    (run.code / "sitecustomize.py").unlink()  # which Python itself imports
    (run.path / "pictures").mkdir()
    stranger = {"XDG_STATE_HOME": str(tmp_path / "another-user")}
    copy = ("-m", "jobs.predict", f"file://{run.path}", str(run.path / "pictures"))
    for words, cwd in ((copy, tmp_path), (("-m", "jobs.evaluate", str(run.path)), run.code)):
        done = python(*words, cwd=cwd, **stranger)
        assert done.returncode in (1, 2)
        assert IMPORTED not in done.stderr
        assert "Traceback" not in done.stderr
