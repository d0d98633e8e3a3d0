from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.conftest import GPU_SITE
from trainkit.cluster.containers import Container, node_command, srun_options
from trainkit.common.errors import UserError
from trainkit.config.loading import Loaded
from trainkit.launch.planning import make_plan

Load = Callable[..., Loaded]


@pytest.mark.parametrize(
    ("image", "runtime", "executor", "chosen"),
    [
        ("t.sif", "auto", "slurm", "apptainer"),
        ("docker://python:3.12", "auto", "slurm", "apptainer"),
        ("/images/torch.sqsh", "auto", "slurm", "pyxis"),
        ("nvcr.io#nvidia/pytorch:25.01-py3", "auto", "slurm", "pyxis"),
        ("python:3.12", "apptainer", "slurm", "apptainer"),
        ("nvcr.io/nvidia/pytorch:25.01-py3", "auto", "local", "docker"),
        ("t.sif", "docker", "slurm", None),
        ("t.sif", "pyxis", "local", None),
    ],
)
def test_who_runs_an_image(loaded: Load, image: str, runtime: str, executor: str, chosen: str | None) -> None:
    config = loaded(container_image=image, container_runtime=runtime, executor=executor, gpus_per_node="auto")
    if chosen is None:
        with pytest.raises(UserError, match=f"container_runtime={runtime} does not run"):
            make_plan(config, GPU_SITE, Path("run"))
        return
    container = make_plan(config, GPU_SITE, Path("run")).container
    assert container is not None
    assert container.runtime == chosen


def test_data_is_mounted_and_what_lies_in_another_mount_only_once(loaded: Load, tmp_path: Path) -> None:
    (tmp_path / "sets").mkdir()
    run, cwd = tmp_path / "home" / "runs" / "ddp-0001", tmp_path / "home"
    for root, mounts in (("sets", [f"{tmp_path}/home", f"{tmp_path}/sets"]), ("nowhere", [f"{tmp_path}/home"])):
        config = loaded(f"data.root={root}", container_image="t.sqsh")
        container = make_plan(config, GPU_SITE, run).container
        assert container is not None
        given = dict(srun_options(container, (run, cwd), cwd))["container-mounts"]
        assert given == ",".join(f"{path}:{path}" for path in mounts)


def test_a_folder_that_mounts_cannot_name_is_refused() -> None:
    with pytest.raises(UserError, match="cannot be mounted"):
        srun_options(Container("pyxis", "x", (), "python3"), (Path("/a,b"),), Path("/a,b"))


def test_docker_is_given_names_of_variables_and_never_their_values() -> None:
    env = {"WANDB_API_KEY": "k-123", "NCCL_DEBUG": "INFO", "HF_HOME": "/home/me/hf", "HOME": "/home/me", "RANK": "3"}
    run = Path("/runs/ddp-0001")
    image, work = Container("docker", "torch:2", (), "python3"), Path("/w")
    line = " ".join(node_command(image, (run, work), work, run / "code", env, gpus=True))
    assert "docker run --rm --gpus all --net=host --ipc=host --pid=host " in line
    for variable in ("WANDB_API_KEY", "NCCL_DEBUG", "TRAINKIT_SECRET", "TRAINKIT_CLIENT"):
        assert f"--env {variable} " in line
    assert "k-123" not in line
    assert "HF_HOME" not in line
    assert line.endswith(f"torch:2 env -u RANK -u LOCAL_RANK -u WORLD_SIZE -u LOCAL_WORLD_SIZE PYTHONNOUSERSITE=1 "
                         f"PYTHONPATH={run}/code python3")  # fmt: skip
