"""Loops of users: killed at any moment they end with the weights of one that nobody has disturbed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
        (folder / "train.py").write_text(text.replace("trainkit.rank()", f"trainkit.rank({given})"))
        self.folder = folder
        self.ranks = ranks

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "train-0001"

    def start(self, *arguments: str) -> list[subprocess.Popen[str]]:
        """Start its ranks, on the run that is there, if there is one."""
        port = str(free_port())
        env = os.environ | {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
        if self.run.exists():
            env["TRAINKIT_CONTINUE"] = "train-0001"
        started = []
        for rank in range(self.ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(self.ranks)}
            place |= {"WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            started.append(
                subprocess.Popen(
                    [sys.executable, "train.py", *arguments], cwd=self.folder, text=True,
                    env=env | (place if self.ranks > 1 else {}), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                )
            )  # fmt: skip
        return started

    def wait(self, started: list[subprocess.Popen[str]]) -> list[str]:
        """Wait for the end of all, which must be a good one, and return what they said."""
        said = [process.communicate(timeout=300)[0] for process in started]
        assert [process.returncode for process in started] == [0] * len(started), "\n".join(said)
        return said

    def to_end(self) -> None:
        self.wait(self.start())

    def kill_after(self, step: int, seconds: float) -> None:
        """Kill all ranks by SIGKILL so long after a record of ``step``, or a later one, unless they end before."""
        started = self.start()
        while self.step() < step and any(process.poll() is None for process in started):
            time.sleep(0.01)
        time.sleep(seconds)
        for process in started:
            process.kill()
        for process in started:
            process.communicate()

    def step(self) -> int:
        records = self.records()
        return int(records[-1]["step"]) if records else 0

    def records(self, split: str = "train") -> list[dict[str, object]]:
        file = self.run / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [record for record in map(json.loads, lines) if record["split"] == split]

    def weights(self) -> dict[str, bytes]:
        """Content of the files of the last checkpoint, and its plain values."""
        folder = self.run / "checkpoints" / "latest"
        found = {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))}
        state = json.loads((folder / "state.json").read_text())["state"]
        return found | {"plain": json.dumps(state["objects"], sort_keys=True).encode()}

    def events(self, kind: str) -> list[dict[str, object]]:
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


@pytest.mark.nightly
@pytest.mark.parametrize("example", ["classifier", "gan", "distillation", "diffusion"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_example_that_is_killed_25_times_ends_with_the_same_weights(
    tmp_path: Path, example: str, ranks: int, strategy: str
) -> None:
    survives(tmp_path, example, 25, ranks, f"strategy.name={strategy}")
