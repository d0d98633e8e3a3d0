"""A verb that refuses changes no byte of the runs that are there; of several runs, not of one."""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.jobs.conftest import Command, make_run
from tests.runs import script
from trainkit.run.events import Attempt, append_event, submitted, writing
from trainkit.run.folder import RunDir
from trainkit.run.labels import say
from trainkit.run.run_lease import ProcessId


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with runs of every kind, and files that a verb might replace; and what their user knows of them."""
    tmp_path = tmp_path_factory.mktemp("made")
    runs = tmp_path / "runs"
    with ExitStack() as held, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path.with_name("state")))
        stopped = make_run(runs / "stopped", job="17")
        append_event(stopped, "ended", state="CANCELLED", job_id="17")
        finished = make_run(runs / "finished", job="18")
        append_event(finished, "started", attempt=0, total_steps=380, steps_per_epoch=19)
        append_event(finished, "ended", attempt=0, state="COMPLETED", step=380, job_id="18")
        (finished.checkpoints / "step-00000380").mkdir(parents=True)
        for number in (0, 1):
            make_run(runs / "sweep" / str(number), f"seed={number}")
        points = [{"run": str(number), "overrides": [f"seed={number}"]} for number in (0, 1)]
        (runs / "sweep" / "sweep.json").write_text(json.dumps(points))
        say(RunDir(runs / "sweep" / "0"), tags=["paper"], notes=["first"])
        held.enter_context(writing(Attempt.begin(make_run(runs / "written"))))
        alive = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        held.callback(alive.wait)
        held.callback(alive.kill)
        submitted(make_run(runs / "running"), "local", str(alive.pid), ProcessId.of(alive.pid))
        submitted(make_run(runs / "elsewhere"), "local", "99", ProcessId("elsewhere", 99, "1"))
        for name in ("model.safetensors", "there.tar", "table.csv"):
            (tmp_path / name).write_text("not to be replaced")
        for folder in ("pictures", "card/README.md", "folder/report.html", "book", "comparison"):
            (tmp_path / folder).mkdir(parents=True)
        (tmp_path / "book" / "report.html").write_text("of somebody else")
        (tmp_path / "comparison" / "report.html").write_text("of somebody else")
        far = make_run(tmp_path / "far" / "sent")
        (far.path / "remote.json").write_text(json.dumps({"id": "0" * 32, "url": f"file://{far.path}"}))
        yield tmp_path


@pytest.fixture
def here(command: Command, made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of `made`, in which this test stands; only the last one changes it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(made.with_name("state")))
    monkeypatch.setenv("TRAINKIT_RUNS", str(made / "runs"))
    monkeypatch.chdir(made)
    return made


def everything(folder: Path) -> dict[Path, bytes | None]:
    """Every file below a folder with its content, but for the leases, which their holders renew."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("resume stopped optim.lr=1", 2, "optim.lr cannot change"),
        ("resume stopped --restart-schedule", 2, "changes nothing of stopped"),
        ("resume stopped --executor slurm", 3, "no SLURM on this machine"),
        ("resume stopped --container-image img --executor local", 3, "A container is for SLURM"),
        ("resume stopped --nodes 0", 2, "--nodes"),
        ("resume finished", 2, "finished has finished"),
        ("resume finished train.epochs=30", 2, "which depends on its length"),
        ("resume finished train.epochs=30 --restart-schedule --executor slurm", 3, "no SLURM on this machine"),
        ("resume finished train.epochs=3 --restart-schedule", 2, "has nothing left to train"),
        ("resume written --executor local", 2, "written is being written"),
        ("resume written train.epochs=30 --executor local", 2, "written is being written"),
        ("resume running --executor local", 2, "running is PENDING"),
        ("resume sweep seed=3", 2, "seed is varied by the sweep"),
        ("submit stopped optim.wieght_decay=1", 2, "Did you mean"),
        ("submit stopped --run-dir runs/finished", 2, "exists already"),
        ("submit stopped --sweep seed=1,2 --executor debug", 2, "A sweep does not run with --executor debug"),
        ("train stopped --run-dir other", 2, "stopped is a run, and trains in its own folder"),
        ("train single --run-dir runs/stopped", 2, "was started with other settings"),
        ("train written", 2, "written is being written"),
        ("launch stopped seed=1", 2, "its settings are its own"),
        ("launch stopped --container-image img --gpus-per-node 0", 3, "Cannot start docker."),
        ("launch single --container-image img --gpus-per-node 0", 3, "Cannot start docker."),
        ("launch single --gpus-per-node 900", 3, "900 GPUs per node"),
        ("cancel running elsewhere", 3, "elsewhere runs on elsewhere"),
        ("clean stopped --weights-only --yes", 2, "needs --keep-best"),
        ("tag sweep paper --remove", 2, "1 has no tag paper"),
        ("tag stopped paper -o", 2, "-o"),
        ("note sweep second --remove 1", 2, "1 has no note 1"),
        ("note stopped ''", 2, "The note has 0 characters"),
        ("sync stopped written", 2, "written is being trained"),
        ("pack stopped there.tar", 2, "exists already"),
        ("pack stopped new.tar --checkpoint 7", 2, "7"),
        ("unpack nosuch.tar --run-dir a/b/c", 2, "Cannot unpack"),
        ("unpack table.csv --run-dir a/b/c", 2, "is not a file of"),
        ("export stopped model.safetensors --checkpoint 7", 2, "No checkpoint"),
        ("export stopped model.safetensors --to-hub me/net", 2, "There is no token for the Hugging Face Hub"),
        ("export stopped model.safetensors --to-hub a/b/c", 2, "is not a repository name of the Hub"),
        ("evaluate stopped --checkpoint 7 --confusion table.csv", 2, "No checkpoint"),
        ("evaluate stopped --confusion pictures", 2, "pictures cannot be written"),
        ("evaluate stopped --confusion nosuch/table.csv", 2, "nosuch/table.csv cannot be written"),
        ("export stopped card/model.safetensors --card", 2, "README.md was not written by this command"),
        ("predict stopped pictures --out table.csv", 2, "no image"),
        ("report stopped --compare", 2, "--compare needs two runs"),
        ("report finished --out book", 2, "report.html was not written by this command"),
        ("report finished --out folder", 2, "It is a folder"),
        ("report finished stopped --compare --out comparison", 2, "report.html was not written by this command"),
        ("resume {far} --allow-code optim.lr=1", 2, "optim.lr cannot change when sent continues"),
        ("resume {far} --allow-code train.epoch=9", 2, "Did you mean"),
        ("resume {far} --allow-code data.root=nosuch data.name=image_folder", 2, "data.name cannot change"),
        ("resume {far} --allow-code --nodes 0", 2, "nodes"),
        ("resume {far} --allow-code --executor slurm", 3, "no SLURM on this machine"),
        ("resume {far} --allow-code --container-image img --executor local", 3, "A container is for SLURM"),
        ("bench amp hivemind --run-dir new", 2, "cannot measure"),
        ("swarm create ddp --run-dir new", 2, "is not a collaborative run"),
        ("swarm create --resume finished", 2, "finished has finished"),
        ("swarm invite anna stopped", 2, "stopped"),
        ("prepare digits seed=1", 2, "seed has no effect on prepare"),
        ("prepare image_folder --root nosuch --pack 64", 2, "nosuch"),
        ("join nonsense --run-dir new", 2, "There is no token"),
    ],
)  # fmt: skip
def test_what_is_refused_changes_nothing(
    command: Command, here: Path, monkeypatch: pytest.MonkeyPatch, words: str, code: int, says: str
) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(here / "nosuch"))
    before = everything(here)
    command(*shlex.split(words.format(far=f"file://{here}/far/sent"))).refused(code, says)
    assert everything(here) == before


def test_a_dry_run_of_a_run_in_a_bucket_leaves_nothing_of_it_here(command: Command, here: Path) -> None:
    before = everything(here)
    command("resume", f"file://{here}/far/sent", "--allow-code", "--executor", "local", "--dry-run").ok(
        "# local: 1 x 1"
    )
    assert everything(here) == before


def test_an_array_that_sbatch_refuses_leaves_its_sweep_as_it_was(
    command: Command, fake_slurm: Path, here: Path
) -> None:
    """All runs of a prolonged sweep get their settings back, and are as finished as before."""
    runs = [RunDir(here / "runs" / "sweep" / str(number)) for number in (0, 1)]
    for run in runs:
        run.config.write_text(run.config.read_text().replace("name: onecycle", "name: constant"))
        append_event(run, "started", attempt=0, total_steps=380, steps_per_epoch=19)
        append_event(run, "ended", attempt=0, state="COMPLETED", step=380)
        (run.checkpoints / "step-00000380").mkdir(parents=True)
    before = [run.config.read_bytes() for run in runs]
    script(fake_slurm / "sbatch", "echo 'sbatch: error: Batch job submission failed: Invalid qos' >&2; exit 1")
    command("resume", "sweep", "train.epochs=30").refused(4, "sbatch refused the job")
    assert [run.config.read_bytes() for run in runs] == before
    command("resume", "sweep/0").refused(2, "has finished")
