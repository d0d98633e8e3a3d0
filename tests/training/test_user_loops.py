"""Loops of users: killed at any moment they end with the weights of one that nobody has disturbed."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.rank_functions import start_script
from trainkit.checkpoint.format import pointed
from trainkit.common.hosts import free_port
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of

PROJECT = Path(__file__).parents[2]
EXAMPLES = PROJECT / "docs" / "examples"
QUICK = ("monitor.loggers=[jsonl]", "launch.gpus_per_node=0", "train.precision=fp32", "checkpoint.every_steps=7")


class Script:
    """A script in a folder of its own, and its one run."""

    def __init__(self, folder: Path, text: str, ranks: int = 1, *settings: str) -> None:
        given = ", ".join(map(repr, (*QUICK, *settings)))
        folder.mkdir()
        self.text = text
        self.file = folder / "train.py"
        self.file.write_text(text.replace("trainkit.rank()", f"trainkit.rank({given})"))
        self.folder = folder
        self.ranks = ranks

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "train-0001"

    def start(self, *arguments: str, **variables: str) -> list[Any]:
        """Start its ranks, on the run that is there, if there is one."""
        port = str(free_port())
        env = os.environ | {"OMP_NUM_THREADS": "1", "TRAINKIT_RUNS": str(self.folder / "runs")} | variables
        if self.run.exists():
            env["TRAINKIT_CONTINUE"] = str(self.run)
        started = []
        for rank in range(self.ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(self.ranks)}
            place |= {"WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            own = env | (place if self.ranks > 1 else {})
            started.append(start_script(self.file, arguments, own, self.folder / f"{rank}.out"))
        return started

    def wait(self, started: list[Any], *codes: int) -> list[str]:
        """Wait for the end of all ranks, with these exit codes, or 0, and return what each has said so far."""
        for process in started:
            process.join(120)
            process.kill()
            process.join()
        said = [(self.folder / f"{rank}.out").read_text() for rank in range(len(started))]
        assert [process.exitcode for process in started] == list(codes or [0] * len(started)), "\n".join(said)
        return said

    def to_end(self) -> None:
        self.wait(self.start())

    def kill_after(self, step: int, seconds: float) -> None:
        """Kill all ranks by SIGKILL so long after a record of ``step``, or a later one, unless they end before."""
        started = self.start()
        while self.step() < step and all(process.is_alive() for process in started):
            time.sleep(0.01)
        time.sleep(seconds)
        for process in started:
            process.kill()
        for process in started:
            process.join()

    def step(self) -> int:
        records = self.records()
        return records[-1]["step"] if records else 0

    def records(self, split: str = "train") -> list[dict[str, Any]]:
        file = self.run / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [record for record in map(json.loads, lines) if record["split"] == split]

    def weights(self) -> dict[str, bytes]:
        """Content of the files of the last checkpoint, and its plain values."""
        folder = self.run / "checkpoints" / "latest"
        found = {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))}
        state = json.loads((folder / "state.json").read_text())["state"]
        return found | {"plain": json.dumps(state["objects"], sort_keys=True).encode()}

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.run / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]


def undisturbed(tmp_path: Path, text: str, ranks: int, *settings: str) -> dict[str, bytes]:
    script = Script(tmp_path / "undisturbed", text, ranks, *settings)
    script.to_end()
    return script.weights()


def killed_and_undisturbed(
    tmp_path: Path, example: str, kills: int, ranks: int, *settings: str
) -> tuple[Script, dict[str, bytes]]:
    """A script that was killed so often and went on to its end, and the weights of one that nobody has disturbed."""
    text = (EXAMPLES / f"{example}.py").read_text()
    expected = undisturbed(tmp_path, text, ranks, *settings)
    killed = Script(tmp_path / "killed", text, ranks, *settings)
    draw = random.Random(example)
    last = pointed(tmp_path / "undisturbed/runs/train-0001/checkpoints", "latest") or 0
    for kill in range(kills):
        killed.kill_after(int(last * kill / kills), draw.uniform(0.0, 0.3))
    killed.to_end()
    return killed, expected


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("example", "ranks", "strategy"),
    [("diffusion", 2, "ddp"), ("gan", 2, "fsdp"), ("distillation", 1, "ddp"), ("classifier", 3, "ddp")],
)
def test_a_loop_killed_three_times_ends_with_the_same_weights(
    tmp_path: Path, example: str, ranks: int, strategy: str
) -> None:
    killed, expected = killed_and_undisturbed(tmp_path, example, 3, ranks, f"strategy.name={strategy}")
    assert killed.weights() == expected
    assert killed.events("ended")[-1]["state"] == "COMPLETED"


@pytest.mark.long
@pytest.mark.parametrize("example", ["classifier", "gan", "distillation", "diffusion"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_example_killed_25_times_ends_with_the_same_weights(
    tmp_path: Path, example: str, ranks: int, strategy: str
) -> None:
    killed, expected = killed_and_undisturbed(tmp_path, example, 25, ranks, f"strategy.name={strategy}")
    assert killed.weights() == expected
    assert killed.events("ended")[-1]["state"] == "COMPLETED"


# A loop that is small, tells the samples of each step, and can be changed by a word.
LOOP = """
import signal, sys, os
import torch, trainkit
from torch.utils.data import TensorDataset

SIZE, BATCH, EPOCHS = 40, 12, 3
with trainkit.rank() as rank:
    model = rank.wrap(torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    data = TensorDataset(torch.arange(float(SIZE))[:, None])
    batches = rank.batches(data, global_batch_size=BATCH, epochs=EPOCHS)
    with rank.saved(model=model, optimizer=optimizer, batches=batches, schedule=schedule, seen=[]) as state:
        for epoch in batches.epochs():
            for (numbers,) in epoch:
                loss = (model(numbers / SIZE) - 1).square().mean()
                rank.backward(loss)
                rank.update(optimizer)
                rank.log(loss=loss)
                print("samples", state.steps, sorted(numbers.flatten().int().tolist()), flush=True)
                # HERE
                state.step()
            schedule.step()
            rank.log("val", loss=1 / (1 + epoch.number))
            state.seen.append((epoch.number, optimizer.param_groups[0]["lr"]))
print("over", state.steps, state.seen)
"""
STOP = (  # of the first rank alone, as two could find no file and then make it both
    "if rank.rank == 0 and state.steps == 4 and not os.path.exists('told'): "
    "open('told', 'x'); os.kill(os.getpid(), signal.SIGUSR2)"
)


def loop(tmp_path: Path, here: str = "pass", *, ranks: int = 1, changes: dict[str, str] | None = None) -> Script:
    """`LOOP` with a line of its own before ``state.step()``, and other ``changes``."""
    text = LOOP.replace("# HERE", here)
    for old, new in (changes or {}).items():
        assert old in text
        text = text.replace(old, new)
    return Script(tmp_path / f"loop-{len(list(tmp_path.iterdir()))}", text, ranks)


def samples(said: list[str]) -> dict[int, list[int]]:
    """Samples of each step, over all ranks."""
    found: dict[int, list[int]] = {}
    for text in said:
        for line in text.splitlines():
            if line.startswith("samples "):
                _, step, numbers = line.split(" ", 2)
                found[int(step)] = sorted([*found.get(int(step), []), *json.loads(numbers)])
    return found


def test_a_stopped_loop_goes_on_in_mid_epoch(tmp_path: Path) -> None:
    whole = loop(tmp_path)
    expected = whole.wait(whole.start())
    stopped = loop(tmp_path, STOP)
    (said,) = stopped.wait(stopped.start())
    assert "over" not in said
    assert stopped.events("handed_back")[0]["step"] == 5
    (said,) = stopped.wait(stopped.start())
    assert said.endswith("over 9 [(0, 0.005), (1, 0.0025), (2, 0.00125)]\n")
    assert stopped.weights() == whole.weights()
    assert samples([said]) == samples(expected)
    assert [record["step"] for record in whole.records("val")] == [3, 6, 9]


def test_a_kill_between_two_epochs_repeats_what_follows_the_last_batch(tmp_path: Path) -> None:
    """The schedule has made its step by then, and the checkpoint has not."""
    whole = loop(tmp_path)
    whole.to_end()
    crash = "schedule.step(); os.path.exists('told') or (open('told', 'x'), os.kill(os.getpid(), signal.SIGKILL))"
    killed = loop(tmp_path, changes={"schedule.step()": crash, "import signal": "import time, signal"})
    killed.wait(killed.start(), -9)
    killed.to_end()
    assert killed.weights() == whole.weights()


@pytest.mark.nightly
def test_three_ranks_go_on_with_the_samples_that_one_would_have_taken(tmp_path: Path) -> None:
    whole = loop(tmp_path)
    expected = samples(whole.wait(whole.start()))
    stopped = loop(tmp_path, STOP)
    stopped.ranks = 2
    first = samples(stopped.wait(stopped.start()))
    stopped.ranks = 3
    for file in stopped.folder.glob("*.out"):
        file.unlink()
    second = samples(stopped.wait(stopped.start()))
    assert first | second == expected
    assert min(second) == max(first) + 1


def test_an_error_on_one_rank_ends_all_and_its_traceback_is_the_users(tmp_path: Path) -> None:
    failing = loop(tmp_path, "if rank.rank == 1 and state.steps == 2: raise ValueError('bad luck')", ranks=2)
    started = failing.start()
    for process in started:
        process.join(60)
    assert [process.exitcode for process in started] == [1, 1]
    said = (failing.folder / "1.out").read_text()
    frames = [line for line in said.splitlines() if "  File" in line and "train.py" in line]
    assert said.endswith("ValueError: bad luck\n")
    assert frames
    after_the_users = said[said.rindex("train.py") :]
    assert "trainkit" not in after_the_users
    assert failing.events("failed")[0]["error"] == "ValueError: bad luck"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seen=[]": "seen={1, 2}"}, "seen cannot be saved: it is a set"),
        ({"seen=[]": "seen=[lambda: 1]"}, "seen.0 cannot be saved: it is a function"),
        ({"batches=batches, ": "batches=batches, other=torch.nn.Linear(2, 2).weight.detach().to_sparse(), "}, "other"),
        ({"model=model, ": ""}, "optimizer updates a parameter (4, 1) of no module that is saved"),
        ({"BATCH, EPOCHS = 40, 12": "BATCH, EPOCHS = 40, 80"}, "global_batch_size=80 is larger than the data"),
        ({"loss=loss)\n                print": "loss=numbers)\n                print"}, "loss cannot be logged"),
        ({"state.seen.append": "state.other = 1; state.seen.append"}, "state.other is not saved"),
        ({"trainkit.rank(": "trainkit.rank('strategy.name=hivemind', "}, "is none for trainkit.rank()"),
        ({"trainkit.rank(": "trainkit.rank('checkpoint.evry_steps=1', "}, "checkpoint.evry_steps"),
    ],
)
def test_what_cannot_be_is_refused_in_three_lines_that_name_it(
    tmp_path: Path, changes: dict[str, str], words: str
) -> None:
    script = loop(tmp_path, changes=changes)
    (said,) = script.wait(script.start(), 2)
    assert words in said
    assert "  fix: " in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rank.saved(model=model": "rank.saved(net=model"}, "It lacks net, and has model besides"),
        ({"SIZE, BATCH, EPOCHS = 40": "SIZE, BATCH, EPOCHS = 41"}, "samples is 41, and was 40"),
        ({"EPOCHS = 40, 12": "EPOCHS = 40, 10"}, "global batch size is 10, and was 12"),
    ],
)
def test_a_run_does_not_go_on_with_other_objects_or_data(tmp_path: Path, changes: dict[str, str], words: str) -> None:
    script = loop(tmp_path, STOP)
    script.to_end()
    text = script.file.read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    script.file.write_text(text)
    (said,) = script.wait(script.start(), 2)
    assert words in said


def test_a_loop_without_steps_is_told_so(tmp_path: Path) -> None:
    script = loop(tmp_path, changes={"                state.step()\n": "                pass\n"})
    (said,) = script.wait(script.start())
    assert "state.step() was not called" in said


@pytest.mark.parametrize("indented", [True, False])
def test_two_loops_in_one_process_are_two_runs(tmp_path: Path, indented: bool) -> None:
    script = loop(tmp_path) if indented else plain(tmp_path)
    script.file.write_text(script.file.read_text() * 2)
    script.to_end()
    assert sorted(path.name for path in (script.folder / "runs").iterdir()) == ["train-0001", "train-0002"]


@pytest.mark.nightly
def test_a_cell_of_a_notebook_runs_it_again_and_shows_errors_as_they_are(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    text = LOOP.replace("trainkit.rank()", f"trainkit.rank({', '.join(map(repr, QUICK))})")
    v4: Any = nbformat.v4
    cells = [v4.new_code_cell(source) for source in (text, text, text.replace("seen=[]", "seen={1}"))]
    notebook = v4.new_notebook(cells=cells)
    env = os.environ | {"TRAINKIT_RUNS": str(tmp_path / "runs"), "PYTHONPATH": str(EXAMPLES.parents[1])}
    client = NotebookClient(notebook, timeout=300, allow_errors=True, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=env)
    outputs = [cell["outputs"][-1] for cell in cells]
    assert [output.get("text", "").splitlines()[-1:] for output in outputs[:2]] == [
        ["over 9 [(0, 0.005), (1, 0.0025), (2, 0.00125)]"]
    ] * 2
    assert outputs[2]["ename"] == "UserError"
    assert sorted(path.name for path in (tmp_path / "runs").iterdir())[:2] == ["notebook-0001", "notebook-0002"]


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["zero", "fsdp"])
def test_a_sharded_loop_goes_on_whole_on_one_rank(tmp_path: Path, strategy: str) -> None:
    """A checkpoint of any strategy fits every other, optimizer included."""
    adam = {"torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)": "torch.optim.AdamW(model.parameters())"}
    whole = loop(tmp_path, changes={**adam, "torch.nn.Dropout(0.5)": "torch.nn.Tanh()"})
    whole.to_end()
    stopped = Script(tmp_path / strategy, whole.text.replace("pass", STOP), 2, f"strategy.name={strategy}")
    stopped.to_end()
    stopped.ranks = 1
    stopped.to_end()
    expected = load_file(whole.run / "checkpoints/latest/model.safetensors")
    found = load_file(stopped.run / "checkpoints/latest/model.safetensors")
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)
    losses = [[record["loss"] for record in script.records("train")] for script in (whole, stopped)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.nightly
def test_a_full_disk_ends_the_loop_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    full = "if state.steps == 4: import trainkit.checkpoint.format as f; f.new_file = no_room"
    at_once = {"trainkit.rank(": "trainkit.rank('checkpoint.asynchronous=false', "}
    script = loop(tmp_path, full, changes={"SIZE, BATCH, EPOCHS": f"{NO_ROOM}\nSIZE, BATCH, EPOCHS", **at_once})
    (said,) = script.wait(script.start(), 1)
    assert "checkpoint of step 6" in said
    assert "No space left on device" in said
    assert pointed(script.run / "checkpoints", "latest") == 3
    assert "checkpoint of step 6" in script.events("failed")[0]["error"]


NO_ROOM = """
def no_room(*_):
    raise OSError(28, "No space left on device")
"""


# Without `with`, which ends with the batches and with the program

PLAIN = """
import os, signal, sys
import torch, trainkit
from torch.utils.data import DataLoader, TensorDataset

rank = trainkit.rank()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
loader = DataLoader(TensorDataset(torch.arange(40.0)[:, None]), batch_size=12, shuffle=True)
model, optimizer, loader = rank.wrap(model, optimizer, loader)
state = rank.saved(model=model, optimizer=optimizer, loader=loader)
for epoch in loader.epochs(3):
    for (numbers,) in loader:
        loss = (model(numbers / 40) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rank.log(loss=loss)
        # HERE
        state.step()
    rank.log("val", loss=1 / (1 + epoch.number))
print("over", state.steps, rank.world_size)
"""


def plain(tmp_path: Path, here: str = "pass", *settings: str, ranks: int = 1) -> Script:
    return Script(tmp_path / f"plain-{len(list(tmp_path.iterdir()))}", PLAIN.replace("# HERE", here), ranks, *settings)


def test_a_script_that_is_not_indented_goes_on_and_ends_like_any_other(tmp_path: Path) -> None:
    whole = plain(tmp_path, "pass", "monitor.loggers=[jsonl, console]")
    (said,) = whole.wait(whole.start())
    assert said.endswith("over 9 1\n")
    assert [event["state"] for event in whole.events("ended")] == ["COMPLETED"]
    assert [record["step"] for record in whole.records("val")] == [3, 6, 9]
    assert "step 3/9  " in said, "the lines show what the loop has said of its epochs"
    assert history_of(RunDir(whole.run)).started["total_steps"] == 9
    stopped = plain(tmp_path, STOP)
    (said,) = stopped.wait(stopped.start())
    assert "over" not in said
    assert stopped.events("handed_back")[0]["step"] == 5
    stopped.to_end()
    assert stopped.weights() == whole.weights()


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", "zero", "fsdp"])
def test_an_optimizer_that_came_along_trains_the_sharded_parameters(tmp_path: Path, strategy: str) -> None:
    whole = plain(tmp_path)
    whole.to_end()
    shared = plain(tmp_path, "pass", f"strategy.name={strategy}", ranks=2)
    shared.to_end()
    files = [script.run / "checkpoints/latest/model.safetensors" for script in (whole, shared)]
    expected, found = map(load_file, files)
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)


@pytest.mark.parametrize(
    ("here", "code", "words"),
    [
        ("rank.log(loss=numbers)", 2, "loss cannot be logged: It has the shape"),
        ("if state.steps == 4: raise ValueError('bad luck')", 1, "ValueError: bad luck"),
        ("if state.steps == 4: sys.exit(3)", 3, "has left its loop before the batches were over"),
    ],
)
def test_a_plain_script_that_ends_early_says_so_by_words_and_code(
    tmp_path: Path, here: str, code: int, words: str
) -> None:
    script = plain(tmp_path, here)
    (said,) = script.wait(script.start(), code)
    assert words.partition(":")[0] in said
    assert not (script.run / "summary.json").exists()
    assert ("Traceback" in said) == (code == 1)
    assert bool(script.events("failed")) == (code in (1, 2))
    assert "trainkit" not in said[said.find("Traceback") :] or code != 1


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("for epoch in loader.epochs(3)", "for epoch in range(3)", "Nobody has said how many epochs there are"),
        ("batch_size=12", "batch_size=None", "A data loader with a sampler of its own, or without batches"),
        ("wrap(model, optimizer", "wrap(model.weight, optimizer", "rank.wrap() takes no Parameter"),
        ("trainkit.rank(", "trainkit.rank('train.precision=fp16', ", "optimizer.step() is not enough in fp16"),
    ],
)
def test_what_would_go_wrong_in_a_plain_script_is_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    script = plain(tmp_path)
    text = script.file.read_text()
    assert old in text
    text = text.replace(old, new)
    if "fp16" in new:
        text = text.replace("'train.precision=fp32', ", "")
    script.file.write_text(text)
    (said,) = script.wait(script.start(), 2)
    assert words in said


# A validation that not all ranks log


def test_one_rank_may_validate_between_epochs_and_all_in_their_middle(tmp_path: Path) -> None:
    """And nobody waits for ranks that have not."""
    script = plain(tmp_path, 'if state.steps == 4: rank.log("val", loss=rank.rank)', ranks=2)
    script.file.write_text(script.file.read_text().replace('    rank.log("val"', '    if rank.is_main: rank.log("val"'))
    script.to_end()
    assert [(record["step"], record["loss"]) for record in script.records("val")] == [
        (3, 1.0), (5, 0.5), (6, 0.5), (9, pytest.approx(1 / 3))
    ]  # fmt: skip
    (best,) = [folder for folder in (script.run / "checkpoints").iterdir() if folder.name == "best"]
    assert pointed(best.parent, "best") == 9


def test_a_validation_of_one_rank_in_mid_epoch_is_refused_at_once(tmp_path: Path) -> None:
    script = plain(tmp_path, 'if state.steps == 4 and rank.rank == 1: rank.log("val", loss=1)', ranks=2)
    said = script.wait(script.start(), 2, 2)
    assert "Only 1 rank of 2 logged a validation: [1]" in said[0]
    assert "Only 1 rank of 2 logged a validation: [1]" in said[1]
