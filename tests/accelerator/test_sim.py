"""The simulated device keeps its rules, which rules.py has; they run in child processes, as no other test may have it.

A child runs many rules, since to import torch takes longer than most of them.
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.accelerator import plugin
from tests.accelerator.building import build, extension, why_not

pytestmark = pytest.mark.long


def rules(decorator: str) -> list[str]:
    """The names of the functions of rules.py, which is not imported: it is for processes that have the device."""
    tree = ast.parse(Path(__file__).with_name("rules.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [function.name for function in functions if decorator in map(ast.unparse, function.decorator_list)]


class Child(NamedTuple):
    code: int
    out: str
    error: str


class Children:
    """Processes that have the device."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, **plugin(folder / "plugin")}
        self.env.pop("CUDA_VISIBLE_DEVICES", None)
        self.env["OMP_NUM_THREADS"] = "1"  # threads that spin are slow where other tests run, too

    def run(self, *words: str, **env: str) -> Child:
        done = subprocess.run(
            [sys.executable, *words], env={**self.env, **env}, capture_output=True, text=True, check=False, timeout=200
        )
        return Child(done.returncode, done.stdout, done.stderr)

    def said(self, kind: str) -> list[dict[str, str]]:
        folder = self.folder / kind
        folder.mkdir()
        child = self.run("-m", "tests.accelerator.rules", kind, str(folder))
        found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
        assert found, child.error
        return found


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Children:
    if reason := why_not():
        pytest.skip(reason)
    build()
    return Children(tmp_path_factory.mktemp("sim"))


@pytest.fixture(scope="module")
def of_device(children: Children) -> list[dict[str, str]]:
    return children.said("device")


@pytest.fixture(scope="module")
def of_ranks(children: Children) -> list[dict[str, str]]:
    return children.said("ranks")


@pytest.mark.parametrize("name", rules("rule"))
def test_rule(of_device: list[dict[str, str]], name: str) -> None:
    assert not of_device[0].get(name, "It was not reached."), of_device[0].get(name)


@pytest.mark.parametrize("name", rules("rule_of_ranks"))
def test_rule_of_ranks(of_ranks: list[dict[str, str]], name: str) -> None:
    assert len(of_ranks) == 2
    for said in of_ranks:
        assert not said.get(name, "It was not reached."), said.get(name)


def test_the_environment_says_how_many_devices_there_are_and_how_large(children: Children) -> None:
    script = "import torch; a = torch.accelerator; print(a.is_available(), a.device_count(), a.get_memory_info()[1])"
    some = children.run("-c", script, SIM_DEVICES="4", CUDA_VISIBLE_DEVICES="3,0,9,1", SIM_MEMORY_MB="64")
    assert some.out.split() == ["True", "2", str(64 << 20)], some.error


def test_a_mask_may_leave_no_device(children: Children) -> None:
    script = """
import torch
print(torch.accelerator.is_available(), torch.accelerator.device_count(), torch.ones(2).sum().item())
for make in (lambda: torch.ones(2, device="sim"), lambda: torch.ones(2).pin_memory()):
    try:
        make()
    except RuntimeError as error:
        print(error)
"""
    none = children.run("-c", script, CUDA_VISIBLE_DEVICES="")
    first, *errors = none.out.splitlines()
    assert first.split() == ["False", "0", "2.0"], none.error
    assert len(errors) == 2
    assert all("no device" in error for error in errors)


def test_a_device_is_lost_after_so_many_operators(children: Children) -> None:
    script = """
import torch
x = torch.ones(3, device="sim")  # 1
y = x + 1  # 2
host = torch.empty(3).copy_(y)  # 3
assert host.tolist() == [2, 2, 2]
waits = (lambda: x + 1, lambda: x.cpu(), lambda: y.sum().item(), torch.accelerator.synchronize)
for what in (*waits, torch.accelerator.current_stream().synchronize, torch.accelerator.current_stream().query):
    try:
        what()
    except RuntimeError as error:
        print(error)
"""
    lost = children.run("-c", script, SIM_LOST_AFTER="3")
    assert lost.out.splitlines() == ["sim: the device was lost"] * 6, lost.error


def test_a_seed_decides_what_is_random_in_time(children: Children) -> None:
    script = """
import torch
x, host, found = torch.ones(3, device="sim"), torch.empty(3, pin_memory=True), []
for _ in range(40):
    host.copy_(x, non_blocking=True)
    found.append(torch.accelerator.current_stream().query())
    torch.accelerator.synchronize()
print(found)
"""
    said = [children.run("-c", script, SIM_SEED=seed).out for seed in ("1", "1", "2")]
    assert said[0] == said[1] != said[2]


def test_every_process_has_it_and_this_one_has_not(children: Children) -> None:
    script = """
import torch.multiprocessing as spawning

def child(index):
    import torch
    print(torch.ones(2, device=f"sim:{index}").sum().item())

if __name__ == "__main__":
    spawning.spawn(child, (), 2)
"""
    path = children.folder / "spawning.py"
    path.write_text(script)
    spawned = children.run(str(path))
    assert spawned.out.split() == ["2.0", "2.0"], spawned.error
    here = "import tests.accelerator, sys; print('torch' in sys.modules); import torch; print(hasattr(torch, 'sim'))"
    plain = subprocess.run([sys.executable, "-c", here], capture_output=True, text=True, check=True)
    assert plain.stdout.split() == ["False", "False"]


def test_the_command_says_what_there_is(children: Children) -> None:
    assert children.run("-m", "tests.accelerator.sim").out == "sim: 2 devices, cached\n"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Takes the compiler's place, with an empty cache."""

    def make(body: str) -> Path:
        compiler = tmp_path / "compiler"
        compiler.write_text(f"#!/bin/bash\n{body}\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        return tmp_path

    return make


OUTPUT = 'while [ "$1" != -o ]; do shift; done; out=$2'


def test_two_processes_build_once(elsewhere: Callable[[str], Path]) -> None:
    folder = elsewhere(f"{OUTPUT}\necho built >> {'$(dirname $0)'}/log\nsleep 0.5\necho whole > $out")
    words = [sys.executable, "-c", "from tests.accelerator.building import build; print(build().read_text())"]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].split() for process in both] == [["whole"]] * 2
    assert (folder / "log").read_text() == "built\n"


def test_what_a_build_leaves_half_done_is_never_used(elsewhere: Callable[[str], Path]) -> None:
    elsewhere(f"{OUTPUT}\necho half > $out\necho no memory >&2\nexit 1")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no memory"):
            build()
    assert not extension().exists()


def test_without_a_compiler_the_reason_is_said(
    elsewhere: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere("exit 1")
    assert why_not() is None
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "g++" in (why_not() or "")
