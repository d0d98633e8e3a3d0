"""A student on a machine without SLURM and without a GPU, who types what a page says.

What is typed is what the page has, but for three things: networks and batches are small, GPUs are ranks on CPUs, and
archives are those of `tiny`.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PROJECT = Path(__file__).parents[2]
TOOLS = ("bash", "cat", "cp", "env", "git", "ls", "mkdir")
VIT = "test_vit.r160_in1k"  # timm's own, for tests
SMALL = {
    "cifar10_fast": "model.width=8 train.global_batch_size=16",
    "cifar10_resnet18": "model.name=test_resnet train.global_batch_size=16",
    "cifar10_vit": f"model.name={VIT} data.image_size=64 train.global_batch_size=16",
    "cinic10_resnet152": "model.name=test_resnet train.global_batch_size=16",
    "fashion_mnist": "model.width=8 train.global_batch_size=16",
    "imagenet_resnet50": "model.name=test_resnet data.image_size=32 train.global_batch_size=16",
}
"""Recipe -> overrides with which it takes seconds."""
_GPUS = re.compile(r"--gpus-per-node (\d+)")
_VERB = re.compile(r"(?:-m jobs\.(?:submit|launch|train|swarm create|bench ([\w-]+))|slurm/\w+\.sbatch) recipes/(\w+)")


def less(line: str) -> str:
    """A line of a page, for little time."""
    found = _VERB.search(line)
    if found is None:
        return line
    return f"{line} {SMALL[found[2]]} {'--rounds 3 --updates 1' if found[1] else 'train.max_steps=2'}"


def small(line: str) -> str:
    """A line of a page, for a machine without GPUs and for little time."""
    if re.search(r"jobs\.prepare (cifar10|fashion_mnist)$", line):  # a course's subset; the official one is downloaded
        return f"{line} --archive fetched/*"
    gpus = _GPUS.search(line)
    if gpus:
        is_one = gpus[1] == "0" or "strategy.name=dp" in line.split() or "bench dp-inference" in line
        line = line.replace(gpus[0], "--gpus-per-node 0" + ("" if is_one else f" --ntasks-per-node {gpus[1]}"))
    return less(line)


@dataclass
class Student:
    """Someone in a folder, with a shell in which the environment is active."""

    home: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tools = self.home / ".tools"
        tools.mkdir(parents=True)
        for name in TOOLS:
            (tools / name).symlink_to(str(shutil.which(name)))

    @property
    def env(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{self.home / '.tools'}"
        own = {"PATH": path, "PYTHONPATH": str(PROJECT), "TRAINKIT_RUNS": "runs", "CUDA_VISIBLE_DEVICES": ""}
        return {**os.environ, **own, **self.variables}

    def types(self, lines: Iterable[str]) -> str:
        """Type these lines, one after the other, until one fails, which is an error; what they said."""
        script = "\n".join(small(line) for line in lines)
        done = subprocess.run(
            ["bash", "-euxo", "pipefail", "-c", script],
            cwd=self.home, env=self.env, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout

    def starts(self, line: str) -> subprocess.Popen[str]:
        """Start one that goes on beside others."""
        return subprocess.Popen(
            ["bash", "-c", small(line)],
            cwd=self.home, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip


def together(nodes: Sequence[tuple[Student, str]], seconds: float = 300) -> list[str]:
    """Run commands of some students at once; return their outputs. They only end together and well."""
    started = [student.starts(line) for student, line in nodes]
    try:
        said = [process.communicate(timeout=seconds)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * len(nodes), said
    return said
