"""A training script of the user's own, submitted unchanged: without torch, for its environment tells all."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trainkit
from tests import readme
from tests.jobs.conftest import Command
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of
from trainkit.run.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("no_slurm")
Script = Callable[..., Path]
TELL = """
import json, os, sys
from pathlib import Path
from typing import Any
here = {"argv": sys.argv, "cwd": os.getcwd(), "path": sys.path[0], "file": __file__, **os.environ}
Path(f"said-{os.environ['RANK']}.out").write_text(json.dumps(here))
"""


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Writes a script into the test's folder."""

    def make(body: str, name: str = "train.py") -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(body)
        return file

    return make


@pytest.fixture
def captured(capfd: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    """Also what a script prints."""
    return capfd


def said(folder: Path, rank: int = 0) -> dict[str, Any]:
    """What `TELL` has left in the folder of submission."""
    found: dict[str, Any] = json.loads((folder / f"said-{rank}.out").read_text())
    return found


def newest(folder: Path, name: str = "train-0001") -> RunDir:
    return RunDir.open(folder / "runs" / name)


def test_a_script_runs_from_its_snapshot_in_the_folder_of_submission(
    command: Command, script: Script, tmp_path: Path
) -> None:
    script("VALUE = 7\n", "src/helper.py")
    script("lr: 1\n", "conf/own.yaml")
    script(f"import helper\nassert helper.VALUE == 7\n{TELL}", "src/train.py")
    command("submit", "src/train.py", "--executor", "debug", "--", "--lr", "3e-4", "{run}/last.pt", "{{run}}").ok()
    run = newest(tmp_path)
    found = said(tmp_path)
    assert found["argv"][1:] == ["--lr", "3e-4", f"{run.path}/last.pt", "{run}"]
    assert found["cwd"] == str(tmp_path)
    assert Path(found["path"]) == (run.code / "project" / "src").resolve()
    assert (run.code / "project" / "conf" / "own.yaml").is_file()
    assert history_of(run).outcome == "COMPLETED"


def test_it_has_the_variables_of_torchrun(command: Command, script: Script, tmp_path: Path) -> None:
    script(TELL)
    command("submit", "train.py", "--executor", "debug").ok()
    found = said(tmp_path)
    wanted = {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1", "ROLE_RANK": "0", "ROLE_WORLD_SIZE": "1", "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "train-0001", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }  # fmt: skip
    assert {name: found.get(name) for name in wanted} == wanted
    assert int(found["MASTER_PORT"]) > 0
    assert not [name for name in found if name.startswith("SUBMITIT")]


def test_its_exit_code_and_its_own_traceback_are_those_of_the_run(
    command: Command, script: Script, tmp_path: Path
) -> None:
    """Nothing of the kit stands above it."""
    script("def train():\n    raise ValueError('mistake')\n\ntrain()\n")
    done = command("submit", "train.py", "--executor", "debug").refused(1, "ValueError: mistake")
    frames = [line.strip() for line in done.err.splitlines() if line.startswith("  File ")]
    assert [frame.partition("/project/")[2] for frame in frames] == [
        'train.py", line 4, in <module>', 'train.py", line 2, in train'
    ]  # fmt: skip
    assert history_of(newest(tmp_path)).outcome == "FAILED"
    script("raise SystemExit(7)\n")
    assert command("submit", "train.py", "--executor", "debug").code == 7


def test_records_of_a_script_are_those_of_its_run(command: Command, script: Script, tmp_path: Path) -> None:
    """By rank 0 alone, and a process that nobody has started for a run writes none."""
    script("""
import os, trainkit
trainkit.log(step=1, loss=0.5, psnr=31.5)
trainkit.log(step=1, split="val", psnr=30.0, loss=float("nan"))
os.environ["RANK"] = "1"
trainkit.log(step=2, loss=0.1)
os.environ["RANK"] = "0"
del os.environ["TRAINKIT_RUN_DIR"]
trainkit.log(step=3, loss=0.1)
""")
    command("submit", "train.py", "--executor", "debug").ok()
    train, val = read_metrics(newest(tmp_path))
    assert (train["step"], train["loss"], train["psnr"]) == (1, 0.5, 31.5)
    assert (val["split"], val["psnr"], val["loss"]) == ("val", 30.0, None)


def test_what_a_script_validates_is_shown_also_without_a_loss(command: Command, script: Script, tmp_path: Path) -> None:
    script("""
import trainkit
trainkit.log(step=1, loss=0.5)
trainkit.log(step=1, split="val", acc1=91.5, ema_acc1=92.5)
""")
    said = command("submit", "train.py", "--executor", "debug").ok()
    assert said.out.splitlines()[-1].startswith("val acc1 91.5000 (step 1) · loss 0.5000")
    assert "acc1 91.5000" in command("status").ok().out


def test_a_script_that_could_not_even_write_its_error_had_a_full_disk(
    command: Command, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.common.fileio.full", lambda folder: f"No space left on the disk of {folder}")
    script("raise SystemExit(1)")
    assert command("submit", "train.py", "--executor", "debug").code == 1
    assert "No space left on the disk of" in command("why", "train-0001").ok().out


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "package.train", "--executor", "debug", "--", "a"),
        ("--executor", "debug", "--", "package/train.py", "a"),
        ("--executor", "debug", "--", "python", "package/train.py", "a"),
        ("--executor", "debug", "--", "python3", "-m", "package.train", "a"),
    ],
)
def test_a_script_is_named_in_many_ways(
    command: Command, script: Script, tmp_path: Path, words: tuple[str, ...]
) -> None:
    script("", "package/__init__.py")
    script(TELL, "package/train.py")
    command("submit", *words).ok()
    found = said(tmp_path)
    assert found["argv"][1:] == ["a"]
    assert Path(found["file"]).resolve() == (newest(tmp_path).code / "project/package/train.py").resolve()


BAD = {
    "no such file": (("nothing.py",), ("There is no script nothing.py", "train.py")),
    "no such module": (("-m", "nothing.there"), ("There is no module nothing.there",)),
    "no such program": (("--", "no-such-program"), ("There is no program no-such-program",)),
    "nothing": (("--executor", "debug", "--"), ("No program is named",)),
    "no Python": (("broken.py",), ("broken.py:1 is not valid Python",)),
    "an import": (("importing.py",), ("importing.py:2 imports 'nowhere'",)),
    "an import of its own": (("follows.py",), ("importing.py:2 imports 'nowhere'",)),
    "a placeholder": (("train.py", "--", "--lr", "{lr}"), ("Nobody fills in {lr}", "{{lr}}")),
    "a sweep": (("train.py", "--sweep", "lr=1,2", "--", "--x", "1"), ("'lr' is used by no argument",)),
    "a setting": (("train.py", "optim.lr=1"), ("optim.lr means nothing to a script", "launch, monitor, script")),
    "no dashes": (("train.py", "--lr", "3"), ("--lr is no flag", "train.py -- --lr")),
    "no dashes, a word": (("train.py", "cifar"), ("cifar is no flag", "train.py -- cifar")),
    "Hydra's words": (("train.py", "trainer.devices=2"), ("no setting of ours", "train.py -- trainer.devices=2 ...")),
    "Hydra's group": (("train.py", "model=resnet"), ("no setting of ours", "train.py -- model=resnet ...")),
    "a misspelled section": (("train.py", "lunch.nodes=2"), ("Did you mean 'launch.nodes'?",)),
    "two scripts": (("train.py", "broken.py"), ("train.py and broken.py are two programs",)),
    "two programs": (("ddp", "--", "train.py"), ("ddp and -- train.py are two programs",)),
    "two ways": (("train.py", "-m", "package"), ("-m package and train.py are two programs",)),
    "a preset with arguments": (("ddp", "--", "--lr", "3"), ("A script is one program",)),
    "a secret": (("train.py", "--", "--wandb-api-key", "0123456789abcdef0123456789abcdef01234567"), ("like a secret",)),
    "a key": (("train.py", "--", "--wandb-key", "0123456789abcdef0123456789abcdef01234567"), ("like a secret",)),
    "a password": (("train.py", "--", "--db-password=hunter2hunter2"), ("like a secret",)),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_could_not_run_is_refused_before_anything_is_written(
    case: str, command: Command, script: Script, tmp_path: Path
) -> None:
    script("print(1)\n")
    script("def x(:\n", "broken.py")
    script("import os\nimport nowhere\n", "importing.py")
    script("import importing\n", "follows.py")
    words, told = BAD[case]
    done = command("submit", *words)
    assert done.code in (2, 3)
    done.refused(done.code, *told)
    assert len(done.err.splitlines()) == 3
    assert not (tmp_path / "runs").exists()


def test_a_project_is_copied_without_its_data(
    command: Command, script: Script, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever lies beside a script, and wherever that is: in a folder with blanks, by a link, out of this one."""
    project = tmp_path_factory.mktemp("else where") / "my project"
    script(TELL, f"{project}/train it.py")
    script("", f"{project}/data/loader.py")
    (project / "data" / "images.bin").write_bytes(b"0" * 1000)
    for index in range(300):
        (project / "data" / f"{index}.txt").write_text("label")
    (tmp_path / "here.py").symlink_to(project / "train it.py")
    command("submit", "here.py", "--executor", "debug").ok()
    run = newest(tmp_path, "here-0001")
    copied = sorted(str(file.relative_to(run.code / "project")) for file in (run.code / "project").rglob("*.*"))
    assert copied == ["data/loader.py", "train it.py"]
    assert Path(said(tmp_path)["path"]) == (run.code / "project").resolve()


@pytest.mark.nightly
def test_ranks_of_a_script_on_simulated_nodes(command: Command, script: Script, tmp_path: Path) -> None:
    script(f"""{TELL}
if os.environ["RANK"] == "1" and "--fail" in sys.argv:
    raise ValueError("mistake of one")
""")
    words = ("submit", "train.py", "--executor", "local", "--nodes", "2", "--ranks-per-node", "1", "--")
    command(*words, "{node_rank}/{num_nodes}/{gpus_per_node}", "{master_addr}:{master_port}").ok()
    ranks = [said(tmp_path, rank) for rank in (0, 1)]
    port = ranks[0]["MASTER_PORT"]
    assert [rank["argv"][1:] for rank in ranks] == [
        ["0/2/1", f"127.0.0.1:{port}"], ["1/2/1", f"127.0.0.1:{port}"]
    ]  # fmt: skip
    assert [(rank["GROUP_RANK"], rank["LOCAL_RANK"]) for rank in ranks] == [("0", "0"), ("1", "0")]
    command(*words, "{node_rank}/{num_nodes}/{gpus_per_node}", "{master_addr}:{master_port}").ok("is up to date")
    command(*words, "--fail").refused(1, "mistake of one")
    line = TELL.count("\n") + 3
    command("why", "train-0002").ok("mistake of one", f"train.py:{line}")
    command("status").ok("train-0001", "COMPLETED", "train-0002", "FAILED")
    assert [event["state"] for event in read_events(newest(tmp_path), "ended")] == ["COMPLETED"]


VERBS = {
    "evaluate": ("evaluate", "train-0001"),
    "export": ("export", "train-0001", "model.safetensors"),
    "predict": ("predict", "train-0001", "."),
    "prolong": ("resume", "train-0001", "train.epochs=3"),
    "rates": ("train", "train.py", "--show-lr"),
    "peers": ("submit", "train.py", "--join", "TOKEN"),
    "bench": ("bench", "amp", "train-0001"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_what_only_a_training_of_ours_has_is_refused(
    verb: str, command: Command, script: Script, tmp_path: Path
) -> None:
    script("raise SystemExit(1)\n")
    command("submit", "train.py", "--executor", "debug")
    done = command(*VERBS[verb]).refused(2, "script")
    assert len(done.err.splitlines()) == 3


def test_a_script_that_was_trained_alone_has_a_run_too(command: Command, script: Script, tmp_path: Path) -> None:
    """By `train`, as the templates call it: from the files that are there, and the same command goes on."""
    script(f"import trainkit\ntrainkit.log(step=1, loss=1)\n{TELL}")
    words = ("train", "--run-dir", "own", "train.py", "launch.on_restart=--resume", "--", "a")
    command(*words).ok()
    assert said(tmp_path)["argv"] == [str(tmp_path / "train.py"), "a"]
    command(*words).ok()
    assert said(tmp_path)["argv"][1:] == ["a", "--resume"]
    run = RunDir.open(tmp_path / "own")
    assert history_of(run).finished
    assert read_metrics(run)[0]["loss"] == 1


@pytest.mark.nightly
def test_a_notebook_submits_a_script(command: Command, script: Script, tmp_path: Path) -> None:
    script(TELL)
    run = trainkit.submit("train.py", args=["--lr", 3e-4], executor="local")
    assert isinstance(run, trainkit.Run)
    assert (run.wait(), said(tmp_path)["argv"][1:]) == ("COMPLETED", ["--lr", "0.0003"])


@pytest.mark.nightly
def test_the_commands_of_the_page_work_as_they_stand(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script("import trainkit, sys\ntrainkit.log(step=1, loss=1.0)\nassert sys.argv[1:] == ['--lr', '3e-4']\n")
    (lines,) = readme.blocks("laptop", readme.DOCS / "script.md", typed=True)
    for line in lines:
        done = readme.type_in(line, tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "runs" / "train-0001" / "logbook.md").is_file()


@pytest.mark.nightly
def test_following_a_script_shows_what_its_rank_0_prints(
    command: Command, script: Script, captured: pytest.CaptureFixture[str]
) -> None:
    script("import os, sys; print('out of', os.environ['RANK']); print('words', file=sys.stderr)")
    done = command("submit", "train.py", "--executor", "local", "--nodes", "2", "--follow")
    assert done.code == 0
    assert "out of 0" in done.out
    assert "out of 1" not in done.out
    assert "words" in done.err
    assert "No results" not in done.out


def test_a_script_is_planned_queued_and_estimated_as_any_run(
    command: Command, script: Script, fake_slurm: Path, tmp_path: Path
) -> None:
    script("print(1)\n")
    words = ("submit", "train.py", "--nodes", "2", "--gpus-per-node", "2", "--", "--lr", "1")
    dry = command(*words[:-3], "--dry-run", *words[-3:]).ok("#SBATCH --job-name=train", "--ntasks-per-node=2")
    assert "begin anew" in dry.err
    assert "total_steps" not in dry.err
    command(*words).ok("Submitted job 4711: 2 nodes x 2 ranks")
    assert (fake_slurm / "submitted.sbatch").read_bytes() == dry.out.encode()
    command(*words).ok("is the same run")
    script("print(2)\n")
    command(*words).ok("train-0002")
    estimate = command(*words[:-3], "--estimate", *words[-3:])
    assert "main" in estimate.out + estimate.err


MEET = """
import sys, torch, torch.distributed as dist, trainkit

def train(index, place):
    dist.init_process_group("gloo", **place(index))
    total = torch.ones(1)
    dist.all_reduce(total)
    trainkit.log(step=1, loss=total)
    dist.destroy_process_group()
"""
SPAWNS = f"""{MEET}
class Place:
    def __init__(self, nodes, node, meet):
        self.nodes, self.node, self.meet = int(nodes), int(node), meet

    def __call__(self, index):
        return dict(init_method=self.meet, rank=2 * self.node + index, world_size=2 * self.nodes)

if __name__ == "__main__":
    torch.multiprocessing.spawn(train, args=(Place(*sys.argv[1:]),), nprocs=2)
"""
STYLES = {
    "env": (MEET + "train(0, lambda index: {})", ("train.py", "--"), 2),
    "spawn": (
        SPAWNS,
        ("train.py", "--", "{num_nodes}", "{node_rank}", "tcp://{master_addr}:{master_port}"),
        4,
    ),
    "torchrun": (
        MEET + "train(0, lambda index: {})",
        (
            "--", "torchrun", "--nnodes", "{num_nodes}", "--node-rank", "{node_rank}", "--nproc-per-node", "2",
            "--master-addr", "{master_addr}", "--master-port", "{master_port}", "train.py",
        ),
        4,
    ),
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("style", STYLES)
def test_ranks_meet_in_every_style(style: str, command: Command, script: Script, tmp_path: Path) -> None:
    """By torchrun's variables, spawned by the script, or started by torchrun itself: one record, by rank 0 of all."""
    body, words, ranks = STYLES[style]
    script(body)
    at = words.index("--")
    flags = ("--executor", "local", "--nodes", "2", "--ranks-per-node", "1", "--name", style)
    command("submit", *words[:at], *flags, *words[at:]).ok()
    assert [record["loss"] for record in read_metrics(newest(tmp_path, style))] == [float(ranks)]
