"""In processes of their own: what is imported stays imported."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from trainkit.training import compiler

BEGIN = """
import sys, torch
from torch import nn
from trainkit.training import compiler
compiler.put_off()
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
LEAVE = """
dist.destroy_process_group()
"""


def outcome(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True)
    return done.stdout.strip() or done.stderr


def test_training_with_ddp_imports_no_compiler() -> None:
    assert outcome(DDP + TRAIN + LEAVE + "print(imported())") == "False"


@pytest.mark.parametrize(
    "use",
    [
        'torch.compile(model, backend="eager")(torch.ones(1, 2))',
        *(
            pytest.param(code, marks=pytest.mark.long)  # 3 s each
            for code in (
                "import torch._dynamo.config",
                "from torch._dynamo.utils import counters",
                "assert torch._dynamo.utils.counters is not None",
                "assert torch.compiler.disable(lambda: 1)() == 1",
            )
        ),
    ],
    ids=["compile", "a part", "from a part", "an attribute of a part", "disable"],
)
def test_who_uses_the_compiler_gets_it(use: str) -> None:
    assert outcome(TRAIN + use + "\nprint(imported())" + TRAIN) == "True"


@pytest.mark.parametrize(("planted", "given"), [(False, ""), (True, ""), (True, "/scratch/mine")])
def test_compiled_code_is_kept_where_nobody_else_writes(
    planted: bool, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch would run the code that it finds in a folder of that name in /tmp, whoever has laid it there."""
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", given)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    own = shared / f"trainkit-{os.geteuid()}"
    if planted:
        own.mkdir()
        own.chmod(0o777)
    compiler.use_own_cache()
    state = tmp_path / "state" / "trainkit" / "cache"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == (given or f"{state if planted else own}/torchinductor")
