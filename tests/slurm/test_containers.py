"""A run whose ranks are in a container, on a real SLURM: of apptainer's, and where they are installed of pyxis's."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import containers
from tests.slurm.conftest import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.long]

EIGHT_STEPS = ("train.epochs=2", "data.name=synthetic", "data.train_size=256", "data.val_size=16", "data.workers=0")


def _pyxis() -> Path | None:
    """Return the place of pyxis's plugin for SLURM, if this machine has all of it; PYXIS_PLUGIN names it elsewhere."""
    usual = [*Path("/usr/lib").glob("*/slurm*/spank_pyxis.so"), Path("/usr/local/lib/slurm/spank_pyxis.so")]
    plugins = [Path(os.environ["PYXIS_PLUGIN"])] if "PYXIS_PLUGIN" in os.environ else usual
    programs = shutil.which("enroot") and shutil.which("mksquashfs")
    return next((plugin for plugin in plugins if programs and plugin.is_file()), None)


@pytest.fixture
def pyxis(devcluster: Cluster) -> Iterator[None]:
    """Adds pyxis to the cluster for one test."""
    place = Path(devcluster.env["DEVCLUSTER_DIR"])
    settings = place / "etc" / "plugstack.conf"
    (place / "pyxis").mkdir(exist_ok=True)
    settings.write_text(f"required {_pyxis()} runtime_path={place}/pyxis\n")
    yield
    settings.unlink()


def _image(runtime: str, folder: Path) -> Path:
    """For a real runtime: names and nowhere a program, for these are mounted."""
    root = containers.bare_root(folder / "root")
    image = folder / ("bare.sif" if runtime == "apptainer" else "bare.sqsh")
    build = ["apptainer", "build", image, root] if runtime == "apptainer" else ["mksquashfs", root, image]
    subprocess.run([str(word) for word in build], capture_output=True, check=True)
    return image


@pytest.mark.skipif(shutil.which("apptainer") is None, reason="no apptainer")
def test_a_run_goes_on_in_a_container_of_apptainers(devcluster: Cluster, tmp_path: Path) -> None:
    # Root without all of its capabilities, as here, is refused what it would not need.
    env = {"APPTAINER_USERNS": "1"}
    run = tmp_path / "apptainer"
    step = _requeued_from_outside(devcluster, run, _image("apptainer", tmp_path), env, to_the_end=True)
    assert [event["step"] for event in devcluster.events(run, "started")] == [0, step]
    assert devcluster.events(run, "ended")[-1]["state"] == "COMPLETED"


@pytest.mark.skipif(_pyxis() is None, reason="no pyxis, or no enroot")
@pytest.mark.usefixtures("pyxis")
def test_a_run_goes_on_in_a_container_of_pyxis(devcluster: Cluster, tmp_path: Path) -> None:
    run = tmp_path / "pyxis"
    step = _requeued_from_outside(devcluster, run, _image("pyxis", tmp_path), {}, to_the_end=True)
    assert [event["step"] for event in devcluster.events(run, "started")] == [0, step]
    assert devcluster.events(run, "ended")[-1]["state"] == "COMPLETED"


@pytest.mark.skipif(not containers.can_run(), reason="this machine does not let us mount")
def test_ranks_in_a_container_save_and_are_requeued_from_outside(devcluster: Cluster, tmp_path: Path) -> None:
    tools = devcluster.home / "tools"  # beside the folder of the submission
    tools.mkdir()
    path = f"{tools}:{devcluster.env['PATH']}"
    run = tmp_path / "contained"
    step = _requeued_from_outside(devcluster, run, containers.install(tools), {"PATH": path})
    assert step > 0
    assert len(devcluster.events(run, "requeued")) == 1


def _requeued_from_outside(
    devcluster: Cluster, run: Path, image: Path, env: dict[str, str], *, to_the_end: bool = False
) -> int:
    """Tell a run to stop, and wait until it is queued again; return the step that it has saved."""
    # The cluster's own folder: its prolog of tasks begins where they do, inside.
    own = f"{devcluster.env['DEVCLUSTER_DIR']}/etc"
    mounts = containers.mounts().removesuffix("]") + f",{own}:{own}:ro]" if to_the_end else ""
    inside = ["--container-image", str(image), f"launch.container_python={sys.executable}", *filter(None, [mounts])]
    slow = ("model.name=own_models:slow", "model.seconds=2", "monitor.loggers=[jsonl]")
    arguments = ("ddp", "--again", *EIGHT_STEPS, "--run-dir", str(run), "--nodes", "2", "--gpus-per-node", "0")
    said = devcluster.job("submit", *arguments, "--time", "5", *inside, *slow, env=env).stdout
    job_id = said.split()[2].rstrip(":")
    devcluster.wait_for("the start", lambda: bool(devcluster.events(run, "started")))
    devcluster.run("scancel", "--signal=USR2", job_id)
    pending = ("squeue", "-h", "-j", job_id, "-t", "PD", "-o", "%T")
    devcluster.wait_for("its way back into the queue", lambda: bool(devcluster.run(*pending).stdout.strip()))
    assert len(devcluster.events(run, "requeued")) == 1
    (started,) = devcluster.events(run, "started")
    saved, _ = devcluster.events(run, "handed_back")  # by the first rank of each node
    assert (started["world_size"], saved["signals"]) == (2, ["SIGUSR2"])
    if not to_the_end:
        devcluster.run("scancel", job_id)  # that a requeued run goes on is seen elsewhere
    else:
        assert devcluster.wait(job_id, timeout=240) == "COMPLETED"
    step: int = saved["step"]
    return step
