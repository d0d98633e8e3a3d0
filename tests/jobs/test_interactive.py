"""The verbs as notebooks and scripts call them."""

from pathlib import Path
from typing import Any

import pytest

import trainkit
from tests.shell import python
from trainkit.cluster.plan import Plan
from trainkit.common.errors import RunFailedError, UserError
from trainkit.config.loading import load
from trainkit.run.folder import RunDir

QUICK = ("train.max_steps=20", "monitor.loggers=[jsonl]")


@pytest.fixture
def here(no_slurm: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.nightly
def test_a_run_is_submitted_waited_for_and_read(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trainkit.submit("single", ["optim.lr=1e-3", *QUICK], executor="local")
    assert isinstance(run, trainkit.Run)
    assert run.path == here / "runs" / "single-0001"
    assert run.wait() == "COMPLETED"
    assert repr(run) == "<single-0001: COMPLETED at step 20>"
    assert trainkit.submit("single", ["optim.lr=1e-3", *QUICK], executor="local") == run, "it is there already"
    again = trainkit.open("single-0001")
    assert again == run
    assert [record["step"] for record in again.metrics("train")] == [10, 20]
    assert again.summary["val"]["acc1"] == again.metrics("val")[-1]["acc1"]
    assert again.report().read_text().startswith("<!-- Written by")
    with pytest.raises(UserError, match=r"is COMPLETED|finished"):
        again.resume()
    again.resume(["train.max_steps=30"], schedule="restart")
    assert (again.wait(), again.metrics("train")[-1]["step"]) == ("COMPLETED", 30)


@pytest.mark.long
def test_one_that_fails_raises_why(here: Path) -> None:
    (here / "broken_model.py").write_text("def build(info):\n    raise RuntimeError('no such layer')\n")
    run = trainkit.submit("single", ["model.name=broken_model:build", *QUICK], executor="local")
    assert isinstance(run, trainkit.Run)
    with pytest.raises(RunFailedError, match="no such layer"):
        run.wait()
    assert run.status == "FAILED"
    assert run.summary == {}


@pytest.mark.usefixtures("here")
def test_flags_are_the_commands_own_and_a_sweep_is_a_list(fake_slurm: Path) -> None:
    runs = trainkit.submit(
        "ddp", nodes=2, gpus_per_node=4, time="2:00:00", sbatch=["comment=thesis"], sweep={"optim.lr": [1e-3, 3e-3]}
    )
    assert isinstance(runs, list)
    assert [run.path.name for run in runs] == ["0", "1"]
    plan = Plan.read(runs[0].path / "plan.json")
    assert (plan.nodes, plan.gpus_per_node) == (2, 4)
    script = (fake_slurm / "submitted.sbatch").read_text()
    assert "#SBATCH --time=2:00:00" in script
    assert "#SBATCH --comment=thesis" in script
    run = trainkit.submit("ddp", nodes=2, requeue=False, join=False, srun={"hint": "nomultithread"})
    assert isinstance(run, trainkit.Run)
    assert Plan.read(run.path / "plan.json").requeue is False
    launch = load(str(run.path / "config.yaml"), []).config.launch
    assert launch.srun == {"hint": "nomultithread"}
    assert run.status == "PENDING"
    run.cancel()
    assert "4711" in (fake_slurm / "cancelled").read_text()


@pytest.mark.parametrize(
    ("preset", "flags", "says"),
    [
        ("dpp", {}, "dpp"),
        ("ddp", {"wait": True}, r"`run\.wait\(\)`"),
        ("ddp", {"nods": 2}, "'nodes'"),
        ("ddp", {"sampel": 2}, "'sampler'"),
    ],
)
def test_what_is_wrong_is_raised_and_leaves_nothing(here: Path, preset: str, flags: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        trainkit.submit(preset, **flags)
    assert list(here.iterdir()) == []


def test_the_package_itself_stays_light() -> None:
    code = "import sys, trainkit; print([it for it in sys.modules if it.startswith(('trainkit.', 'jobs', 'torch'))])"
    assert python("-c", code).stdout == "['trainkit.common', 'trainkit.common.imports']\n", "which loads nothing itself"
    with pytest.raises(AttributeError, match="no attribute 'sumbit'"):
        trainkit.sumbit  # noqa: B018


def test_a_path_object_is_a_path_though_it_has_lost_its_dot(here: Path) -> None:
    """`Path("./x")` is written ``x``, which as a name means the run in the runs folder."""
    RunDir.create(here / "runs" / "x", "seed: 0\n")
    assert trainkit.open("x").path == here / "runs" / "x"
    with pytest.raises(UserError, match="No run"):
        trainkit.open(Path("./x"))
