"""What the guides tell a user to type is typed here, word for word; what they mention is read by its parser."""

import os
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests import readme
from tests.data.samples import write_images
from tests.docs import commands
from tests.docs.reference import GENERATED
from tests.rank_functions import run_command
from tests.runs import last_event
from trainkit.common.hosts import free_port
from trainkit.run.folder import RunDir

PROJECT = readme.README.parent
ASSIGNMENTS = "tests/recipes/test_page.py"
ON_A_CLUSTER = "tests/slurm/test_pages.py"
HERE = "tests/docs/test_commands.py"
RUN_BY = {
    ("first-steps", "install"): ".ci/run",
    **{(page, "laptop"): HERE for page in ("first-steps", "report", "training", "machines", "model", "runs")},
    ("own", "laptop"): HERE,
    ("script", "laptop"): "tests/jobs/test_script.py",
    ("training", "sampler"): "tests/launch/test_sampler.py",
    ("own", "hub"): "tests/data/test_named.py",
    ("own", "shards"): HERE,
    ("machines", "two machines"): HERE,
    ("runs", "logged in"): "tests/jobs/test_sync.py",
    **{("report", name): f"tests/monitor/test_{name}.py" for name in ("mlflow", "trackio")},
    ("bench", "slurm"): "tests/slurm/test_guide.py",
    ("slurm", "slurm"): "tests/slurm/test_guide.py",
    ("slurm", "sbatch"): ON_A_CLUSTER,
    ("slurm", "devcluster"): ON_A_CLUSTER,
    ("slurm", "login node"): "tests/slurm/test_remote.py",
    ("slurm", "laptop"): ASSIGNMENTS,
    ("swarm", "swarm"): "tests/swarm/test_swarm.py",
    **{(page, "laptop"): ASSIGNMENTS for page in ("cinic10", "imagenet", "fashion-mnist", "vit", "cifar10-fast")},
    **{(page, "two machines"): ASSIGNMENTS for page in ("cinic10", "vit")},
    **{(page, "after the jobs"): ASSIGNMENTS for page in ("cinic10", "imagenet", "vit")},
    **{("imagenet", mark): ASSIGNMENTS for mark in ("container", "in the container", "in both containers")},
    **{(page, "slurm"): ON_A_CLUSTER for page in ("cinic10", "imagenet", "vit")},
    ("imagenet", "sbatch"): ON_A_CLUSTER,
    **{("volunteers", mark): "tests/swarm/test_recipe.py" for mark in ("swarm", "after the swarm")},
}
"""Page and mark of a block -> the test file that types it."""
PAPERS = [PROJECT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "README.md")]
HAND_WRITTEN = [page for page in readme.PAGES if GENERATED not in page.read_text("utf-8")] + PAPERS
IN_ORDER = ("first-steps", "report", "training", "machines", "model", "runs")
QUICK_FIRST_RUN = ("train.epochs=1", "monitor.loggers=[jsonl]")


def page(name: str) -> Path:
    (found,) = (page for page in readme.PAGES if page.stem == name)
    return found


def name_of(page: Path) -> str:
    return page.stem


def test_every_block_is_typed_by_a_test() -> None:
    assert {(page.stem, mark) for page in readme.PAGES for mark in readme.marks(page)} == RUN_BY.keys()
    for (name, mark), file in RUN_BY.items():
        text = (PROJECT / file).read_text("utf-8")
        assert file == ".ci/run" or f'"{mark}"' in text, f"{name}.md, {mark}: {file} does not type it"


@pytest.mark.parametrize("page", HAND_WRITTEN, ids=name_of)
def test_flags_and_settings_of_every_command_exist(page: Path) -> None:
    lines = [line for _, lines in readme.marked(page, typed=True) for line in lines]
    wrong = {line: commands.mistake_in(line) for line in [*lines, *commands.inline(page)]}
    assert [f"{page.name}: {line}\n{mistake}" for line, mistake in wrong.items() if mistake] == []


def test_a_flag_a_setting_and_a_verb_that_do_not_exist_are_mistakes() -> None:
    """Else the test of the pages would prove nothing."""
    assert commands.mistake_in("trainkit submit ddp --nodes 2 optim.lr=1e-3") == ""
    assert "Unrecognized arguments: --nods" in commands.mistake_in("trainkit submit ddp --nods 2")
    assert "Unknown key 'optim.lrr'" in commands.mistake_in("trainkit submit ddp optim.lrr=1")
    assert "jobs.submitt" in commands.mistake_in("trainkit submitt ddp")


def test_every_setting_that_a_page_names_exists() -> None:
    known = {*re.findall(r"`([a-z]+\.[a-z_]+)`", page("settings").read_text("utf-8")), "model.pretrained_cfg_overlay"}
    sections = "|".join({name.partition(".")[0] for name in known if "." in name})
    named = {
        (page.name, key)
        for page in HAND_WRITTEN
        for key in re.findall(rf"`((?:{sections})\.[a-z_]+)\b(?!\w|[/:(])", page.read_text("utf-8"))
    }
    assert len(named) > 30
    files = {"model.safetensors", "model.onnx", "labels.jsonl", "train.py"}
    assert {(page, key) for page, key in named if key not in known | files} == set()


def test_every_file_of_the_project_that_a_page_names_is_there() -> None:
    pattern = r"(?<![\w/.])(?:slurm|configs|jobs|trainkit|tests|docs)/[\w./-]*\w"
    named = {(page.name, name) for page in HAND_WRITTEN for name in re.findall(pattern, page.read_text("utf-8"))}
    gone = {(page, name) for page, name in named if not (PROJECT / name).exists()}
    assert {
        (page, name) for page, name in gone if not re.search(r"\b(ROOM|MODULE|NAME)\b", name.replace("_", " "))
    } == set()


@pytest.mark.long  # the README's are typed by tests/test_readme.py in any case
def test_the_commands_for_a_laptop_work_as_they_stand(tmp_path: Path) -> None:
    (first,), *more = (lines for name in IN_ORDER for lines in readme.blocks("laptop", page(name), typed=True))
    done = readme.type_in(f"{first} {' '.join(QUICK_FIRST_RUN)}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "simulating 2 nodes x 1 rank" in done.stdout
    assert "no SLURM on this machine" in done.stdout
    assert "val acc1" in done.stdout
    run = RunDir(tmp_path / "runs" / "ddp-0001")
    assert str(run.path) in done.stdout.splitlines()[-1]
    assert (last_event(run, "started") or {})["world_size"] == 2
    assert (last_event(run, "ended") or {})["state"] == "COMPLETED"
    assert not run.path.joinpath("submit.sbatch").exists()
    for line in (line for block in more for line in block):
        done = readme.type_in(line, tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, line
    assert (run.path / "logbook.md").exists()
    of_ddp = [RunDir(path) for path in sorted((tmp_path / "runs").glob("ddp-0*"))]  # by submit, by torchrun, alone
    assert [(last_event(run, "started") or {})["world_size"] for run in of_ddp] == [2, 2, 1]
    listed = re.findall(r"^\| `([^`/]+)", page("files").read_text("utf-8"), re.MULTILINE)
    known = [re.sub(r"<\w+>", ".*", name.replace(".", r"\.")) for name in listed]
    assert [file.name for file in run.path.iterdir() if not any(re.fullmatch(name, file.name) for name in known)] == []


@pytest.mark.long
def test_the_commands_for_images_of_ones_own_work_as_they_stand(tmp_path: Path) -> None:
    write_images(tmp_path / "photos", {"cat": 60, "dog": 60})
    rows = [f"{file.parent.name}/{file.name},{file.parent.name}" for file in sorted(tmp_path.glob("photos/*/*.jpg"))]
    (tmp_path / "photos" / "labels.csv").write_text("\n".join(["path,label", *rows]))
    of_photos, rehearsed = readme.blocks("laptop", page("own"), typed=True)
    for line in of_photos:
        assert "Guessed: data.image_size=16;" in typed(line, tmp_path).stderr
    planned, updated = (typed(f"{line} train.global_batch_size=16", tmp_path) for line in rehearsed)
    assert re.search(r"\nimages +made up ", planned.stderr)
    assert "made-up images" in updated.stdout
    assert "Memory of a rank: weights 97." in updated.stdout


@pytest.mark.nightly
def test_the_commands_for_shards_work_as_they_stand(tmp_path: Path) -> None:
    write_images(tmp_path / "photos", {"cat": 48, "dog": 48})
    (tmp_path / "shards").mkdir()
    for number in range(6):
        with tarfile.open(tmp_path / "shards" / f"train-{number:03}.tar", "w") as shard:
            for file in sorted(tmp_path.glob("photos/*/*.jpg"))[number::6]:
                shard.add(file, f"{file.parent.name}/{file.name}")
    ((prepare, train),) = readme.blocks("shards", page("own"), typed=True)
    assert "data.url=shards" in typed(prepare, tmp_path).stdout
    assert "val acc1" in typed(f"{train} train.global_batch_size=16", tmp_path).stdout


def typed(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    done = readme.type_in(line, folder)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.mark.nightly
def test_the_commands_for_two_machines_work_as_they_stand(tmp_path: Path) -> None:
    (lines,) = readme.blocks("two machines", page("machines"), typed=True)
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    nodes = []
    port = free_port()
    for rank, line in enumerate(lines):
        home = tmp_path / f"node{rank}"
        home.mkdir()
        (home / "run.secret").write_text("known to this test only")
        (home / "run.secret").chmod(0o600)
        # Both machines are this one, so the name stands for it and the default port may be taken.
        here = f"{line} --master-port {port} model.width=8".replace("node0.example.org", "127.0.0.1")
        words, own = shlex.split(here), {**env, "TRAINKIT_RUNS": str(home / "runs")}
        nodes.append(
            subprocess.Popen(words, cwd=home, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    said = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert "val acc1" in said[0], "node 0 shows rank 0's console and what the run came to"
    for rank in (0, 1):
        run = RunDir(tmp_path / f"node{rank}" / "runs" / "ddp-0001")
        assert (last_event(run, "ended") or {})["state"] == "COMPLETED"


@pytest.mark.nightly
def test_the_code_of_a_page_trains(tmp_path: Path) -> None:
    """By the command that names it, in one process."""
    text = page("own").read_text("utf-8")
    blocks = re.findall(r"```python\n(# (\w+\.py), used by: trainkit submit ([^\n]*)\n.*?)```", text, re.DOTALL)
    assert [file for _, file, _ in blocks] == ["my_data.py", "my_models.py", "my_task.py", "my_optim.py"]
    for code, file, words in blocks:
        (tmp_path / file).write_text(code)
        quick = ("monitor.loggers=[jsonl]", "launch.gpus_per_node=0", "--executor", "debug")
        done = run_command("submit", *shlex.split(words), *quick, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "val " in done.stdout
