"""Loops of users: killed at any moment they end with the weights of one that nobody has disturbed."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.rank_functions import start_script
from trainkit.checkpoint.format import pointed
from trainkit.common.hosts import free_port

PROJECT = Path(__file__).parents[2]
EXAMPLES = PROJECT / "docs" / "examples"
QUICK = ("monitor.loggers=[jsonl]", "launch.gpus_per_node=0", "train.precision=fp32", "checkpoint.every_steps=7")


class Script:
    """A script in a folder of its own, and its one run."""

    def __init__(self, folder: Path, text: str, ranks: int = 1, *settings: str) -> None:
        given = ", ".join(map(repr, (*QUICK, *settings)))
        folder.mkdir()
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


def survives(tmp_path: Path, example: str, kills: int, ranks: int, *settings: str) -> None:
    text = (EXAMPLES / f"{example}.py").read_text()
    expected = undisturbed(tmp_path, text, ranks, *settings)
    killed = Script(tmp_path / "killed", text, ranks, *settings)
    draw = random.Random(example)
    last = pointed(tmp_path / "undisturbed/runs/train-0001/checkpoints", "latest") or 0
    for kill in range(kills):
        killed.kill_after(int(last * kill / kills), draw.uniform(0.0, 0.3))
    killed.to_end()
    assert killed.weights() == expected
    assert killed.events("ended")[-1]["state"] == "COMPLETED"


def test_a_loop_that_is_killed_three_times_on_two_ranks_ends_with_the_same_weights(tmp_path: Path) -> None:
    survives(tmp_path, "diffusion", 3, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("example", ["classifier", "gan", "distillation", "diffusion"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_example_that_is_killed_25_times_ends_with_the_same_weights(
    tmp_path: Path, example: str, ranks: int, strategy: str
) -> None:
    survives(tmp_path, example, 25, ranks, f"strategy.name={strategy}")
