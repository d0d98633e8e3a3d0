import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from jobs import cli, submit
from jobs.__main__ import verbs
from jobs.flags import RESOURCES, launch_flags
from tests.jobs.conftest import PROJECT, Command, make_run
from trainkit.common.errors import RefusedError, UserError
from trainkit.config.schema import LaunchConfig
from trainkit.run.find import find_run

pytestmark = pytest.mark.usefixtures("no_slurm")


# Resource flags


def test_every_resource_flag_has_a_key() -> None:
    assert {flag.replace("-", "_") for flag in RESOURCES} <= LaunchConfig.model_fields.keys()


def test_a_flag_sets_its_key_as_text_in_either_spelling() -> None:
    words = "ddp -N 2 --time 1:00:00 -A 0123 --sbatch comment=a=b --sbatch exclusive --srun cpu-bind=cores"
    assert launch_flags(submit.parser().parse_intermixed_args(words.split())) == {
        "launch.nodes": ("2", "--nodes"),
        "launch.time": ("1:00:00", "--time"),
        "launch.account": ("0123", "--account"),
        "launch.sbatch": ({"comment": "a=b", "exclusive": ""}, "--sbatch"),
        "launch.srun": ({"cpu-bind": "cores"}, "--srun"),
    }


# Running


def test_a_command_gets_arguments_and_environment_and_its_end_is_a_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error for users is on stderr; a bug of ours keeps its traceback."""
    monkeypatch.setattr(sys, "argv", ["x", "y"])

    def ended(outcome: int | BaseException) -> int:
        def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
            assert (argv, env["OMP_NUM_THREADS"]) == (["y"], "1")
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        return cli.call(main)

    assert ended(7) == 7
    assert ended(KeyboardInterrupt()) == 130
    assert ended(RefusedError("No GPUs.", why="There are none.", fix="Ask for none.")) == 3
    assert capsys.readouterr() == ("", "No GPUs.\n  why: There are none.\n  fix: Ask for none.\n")
    with pytest.raises(KeyError):
        ended(KeyError("bug"))


OF_TWO_WORDS = [
    f"{verb} {word}" for verb in ("swarm", "cluster") for word in importlib.import_module(f"jobs.{verb}").VERBS
]


@pytest.mark.parametrize("verb", [*verbs(PROJECT / "jobs"), *OF_TWO_WORDS])
def test_every_verb_has_help_that_fits_eighty_columns(
    command: Command, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = command(*verb.split(), "--help")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"usage: python -m jobs.{verb} ")
    assert [line for line in done.out.splitlines() if len(line) > 80] == []
    assert "``" not in done.out


@pytest.mark.parametrize("verb", ["submit", "train", "launch", "swarm create", "join"])
def test_a_line_break_cannot_get_into_the_name_of_a_run_folder(command: Command, verb: str, tmp_path: Path) -> None:
    """It would become a line of the script that is submitted."""
    done = command(*verb.split(), "single", "--run-dir", "a\n#SBATCH --wrap=id").refused(2)
    assert done.err.startswith("'a\\n#SBATCH --wrap=id' cannot be the name of a folder.")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["status", "logs", "why", "cancel", "resume", "report", "evaluate", "submit", "train"])
def test_an_empty_name_is_not_the_current_folder(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a shell's variable that is not set: nobody is told to remove the folder that they are in."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"The name of the (run|preset) is empty\.") as caught:
        importlib.import_module(f"jobs.{verb}").main([""], {})
    assert "emove" not in caught.value.fix


def test_a_folder_whose_job_may_live_is_never_called_spare(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "half" / "logs").mkdir(parents=True)
    for name in ("data", "half"):
        with pytest.raises(UserError, match="is not a run folder") as caught:
            find_run(str(tmp_path / name), {})
        assert "emove" not in caught.value.fix


@pytest.mark.parametrize("verb", ["status", "logs", "why", "resume", "cancel", "report", "tag"])
def test_a_job_that_has_not_come_to_its_run_is_starting_or_has_died(
    command: Command, tmp_path: Path, verb: str
) -> None:
    """Copies of an older template leave such a folder: their ranks make the run only once they have loaded torch."""
    logs = tmp_path / "runs" / "ddp-job42" / "logs" / "0"
    logs.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    words = ["ddp-job42"] + ["paper"] * (verb == "tag")
    done = command(verb, *words).refused(
        2, "ddp-job42 is not a run yet: its job is starting, or died before it started"
    )
    assert str(logs) in done.err
    assert "emove" not in done.err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_python_without_pydantic_is_told_where_the_environment_is(tmp_path: Path) -> None:
    home = tmp_path / "my clone"
    for package in ("jobs", "trainkit"):
        shutil.copytree(PROJECT / package, home / package, ignore=shutil.ignore_patterns("__pycache__"))
    bare = [sys.executable, "-S", "-m", "jobs.submit", "ddp"]  # as the system's: nothing is installed

    def said() -> tuple[int, str]:
        done = subprocess.run(bare, cwd=home, capture_output=True, text=True, check=False, env={})
        return done.returncode, done.stderr

    code, error = said()
    assert code == RefusedError.exit_code
    assert "has no pydantic" in error
    assert "fix: In the clone's folder: python3 -m venv .venv" in error
    (home / ".venv" / "bin").mkdir(parents=True)
    (home / ".venv" / "bin" / "activate").touch()
    assert said()[1].splitlines()[-1] == f"  fix: source '{home}/.venv/bin/activate'"


def test_a_name_of_a_preset_and_of_a_run_in_this_folder_is_neither(command: Command, tmp_path: Path) -> None:
    make_run(tmp_path / "ddp")
    done = command("submit", "ddp", "--dry-run")
    assert (done.code, done.err.splitlines()[0]) == (2, "'ddp' is both a preset and a run.")
    assert "run folder" in command("submit", "./ddp", "--dry-run", "--executor", "local").out


@pytest.mark.parametrize("verb", ["submit", "bench", "launch", "train"])
def test_a_folder_that_is_no_run_hides_no_run_from_a_verb(command: Command, tmp_path: Path, verb: str) -> None:
    """Of those that take a preset or a run."""
    make_run(tmp_path / "runs" / "photos")
    (tmp_path / "photos").mkdir()
    words = ["--show-lr" if verb == "train" else "--dry-run"]
    done = command(verb, *(["amp"] if verb == "bench" else []), "photos", "no.such=1", *words).refused(2)
    assert re.search("runs/photos is a run|Unknown (key|section) 'no", done.err), "it is found; it has no such setting"


@pytest.mark.parametrize(
    ("flags", "fix"),
    [
        ("-g --gpus --ngpus --num_gpus --gpus-per-task --devices", "Did you mean '--gpus-per-node'?"),
        ("--num-nodes --nnodes", "Did you mean '--nodes'?"),
        ("-n --ntasks", "Ranks are counted per node: --nodes N --ntasks-per-node N."),
        ("--lr --optim.lr --optim.learning_rate", "Settings are written without dashes: optim.lr=7."),
        ("--batch-size --batch_size --bs", "train.global_batch_size=7."),
        ("--run-name", "--name NAME is the name of the run, --job-name NAME the name of its job."),
        ("--device --cpu", "--gpus-per-node 0 trains on the CPU"),
        ("--resume", "`python -m jobs.resume RUN`"),
        ("--config", "is the first word, without a flag"),
        ("--amp --bf16", "train.precision=bf16"),
        ("--debug", "--executor debug"),
    ],
)
def test_flags_of_other_programs_are_answered_with_ours(flags: str, fix: str) -> None:
    for flag in flags.split():
        with pytest.raises(UserError) as caught:
            submit.main(["ddp", flag, "7"], {})
        assert fix in caught.value.fix, flag


def test_a_mistake_is_told_as_what_it_is(command: Command) -> None:
    command("submit", "ddp", "--optim", "lr=3").refused(2, "without dashes: optim.lr=3.")
    command("submit", "ddp", "--lr=3").refused(2, "without dashes: optim.lr=3.")
    assert "fix: `python -m jobs.status --help` lists the flags." in command("status", "--lr", "7").err
    for flag in ("--nodes", "--name", "--time"):
        command("train", "ddp", flag, "2").refused(2, f"`python -m jobs.submit` takes {flag}")
    command("launch", "ddp", "--time", "2").refused(2, "`python -m jobs.submit` takes --time")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_closed_checkpoints_of_somebody_else_are_told_as_a_closed_run_is() -> None:
    with tempfile.TemporaryDirectory() as shared:
        run = make_run(Path(shared, "ddp-0001"))
        run.checkpoints.mkdir(mode=0o700)
        for path in (Path(shared), run.path, *run.path.glob("*.yaml")):
            path.chmod(0o755)
        os.seteuid(65534)
        try:
            with (
                pytest.raises(UserError, match=r"Permission denied: .*checkpoints") as caught,
                cli.run_to_read(str(run.path), {}) as found,
            ):
                list(found.checkpoints.iterdir())
        finally:
            os.seteuid(0)
    assert caught.value.why.startswith("It belongs to root (mode 700)")
