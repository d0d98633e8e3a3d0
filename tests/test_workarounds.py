"""What is done to other libraries: with it and without it the same comes out. In processes of their own."""

import importlib.metadata
import inspect
from pathlib import Path

import pytest

from tests.shell import PROJECT, python
from trainkit import workarounds
from trainkit.workarounds import SWITCH, Workaround

ENTRIES = {name: item for name, item in vars(workarounds).items() if isinstance(item, Workaround)}

BEGIN = """
import sys, torch
from torch import nn
from trainkit.workarounds import put_off_torch_compiler
put_off_torch_compiler()
model = nn.Linear(2, 2)
def imported(): return isinstance(getattr(sys.modules.get("torch._dynamo"), "__file__", None), str)
"""
TRAIN = """
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
model(torch.ones(1, 2)).sum().backward(); optimizer.step(); optimizer.zero_grad()
"""
DDP = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.parallel.DistributedDataParallel(model)
"""
LEAVE = "\ndist.destroy_process_group()\n"


def outcome(code: str, **env: str) -> str:
    done = python("-c", code, cwd=PROJECT, **env)
    return done.stdout.strip() or done.stderr


def test_training_with_ddp_imports_no_compiler() -> None:
    assert outcome(BEGIN + DDP + TRAIN + LEAVE + "print(imported())") == "False"


@pytest.mark.parametrize(
    "use",
    [
        'torch.compile(model, backend="eager")(torch.ones(1, 2))',
        pytest.param("from torch._dynamo.utils import counters", marks=pytest.mark.long),  # 3 s each
        pytest.param("assert torch._dynamo.utils.counters is not None", marks=pytest.mark.long),
    ],
    ids=["compile", "a part", "an attribute of a part"],
)
def test_who_uses_the_compiler_gets_it(use: str) -> None:
    assert outcome(BEGIN + TRAIN + use + "\nprint(imported())" + TRAIN) == "True"


def test_a_swarm_is_read_without_torch() -> None:
    code = (
        "import sys; from trainkit.workarounds import hivemind_without_torch; print(hivemind_without_torch());"
        "import hivemind.dht.node, hivemind.dht.validation, trainkit.swarm.view, trainkit.swarm.view;"
        "import trainkit.swarm.access, trainkit.swarm.access, trainkit.swarm.messages; print('torch' in sys.modules)"
    )
    assert outcome(code).split() == ["True", "False"]


def test_a_training_without_workarounds_ends_with_the_same_weights(tmp_path: Path) -> None:
    def trained(switch: str) -> bytes:
        run = tmp_path / switch
        words = ["jobs.train", "single", "--run-dir", str(run), "train.max_steps=3", "monitor.loggers=[tensorboard]"]
        python("-m", *words, cwd=PROJECT, **{SWITCH: switch, "OMP_NUM_THREADS": "1"}).check_returncode()
        assert list((run / "tensorboard" / switch).iterdir())
        return (run / "checkpoints" / "latest" / "model.safetensors").read_bytes()

    assert trained("off") == trained("on")


def test_switched_off_none_is_in_force() -> None:
    code = (
        "import sys; before = dict(sys.modules); from trainkit import workarounds\n"
        f"print(*[getattr(workarounds, name)() for name in {list(ENTRIES)}])\n"
        "print(*{'torch._dynamo', 'hivemind', 'tensorboard.compat.notf'} & sys.modules.keys())"
    )
    assert outcome(code, **{SWITCH: "off"}).split() == ["False"] * len(ENTRIES)


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_says_its_gain_and_was_tried_with_what_is_installed(name: str) -> None:
    """Try a new version with it, measure what it still gains, and extend the range; or delete the entry."""
    entry = ENTRIES[name]
    said = inspect.getdoc(entry.apply) or ""
    assert "instead of" in said
    assert said.splitlines()[-1].startswith("https://")
    lowest, installed, newest = map(
        workarounds._major_minor, (entry.tried[0], importlib.metadata.version(entry.library), entry.tried[1])
    )
    assert lowest <= installed <= newest


@pytest.mark.parametrize(
    ("tried", "library", "applied"),
    [(("0.1", "99.0"), "pytest", 1), (("0.1", "0.2"), "pytest", 0), (("99.0", "99.1"), "pytest", 0),
     (("0.1", "99.0"), "no-such-library", 0)],
)  # fmt: skip
def test_an_entry_is_left_out_for_versions_that_it_was_not_tried_with(
    tried: tuple[str, str], library: str, applied: int
) -> None:
    calls: list[int] = []
    entry = Workaround(lambda: calls.append(1), library=library, tried=tried)
    assert entry() == bool(applied)
    assert len(calls) == applied
    assert not Workaround(lambda: [][0], library="pytest", tried=tried)(), "one that raises"
