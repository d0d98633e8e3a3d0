"""Runs tests on a mutated copy of the project, each time in a fork of a process that has imported torch already.

A fresh process would spend 3 to 8 seconds on imports for each mutant; a fork takes a tenth of one.
"""

from __future__ import annotations

import compileall
import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.modules import ROOT
from tests.mutation.reached import Reached


def warm_up() -> None:
    """Import what the tests need and what no mutant changes. Nothing of the project itself."""
    import numpy  # noqa: F401
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import safetensors.torch  # noqa: F401
    import timm  # noqa: F401
    import torch._dynamo
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.utils.data

    torch.set_num_threads(1)
    gc.freeze()  # or the first collection in each fork would touch, and so copy, all of it


def make_copy(folder: Path) -> Path:
    """The project as it is now, with bytecode: importing it costs a fork little."""
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    compileall.compile_dir(folder, quiet=2)
    return folder


@dataclass
class AverageTrial:
    """Tests that are running on one copy."""

    pid: int
    copy: Path
    file: Path
    original: bytes
    deadline: float

    @classmethod
    def start(cls, copy: Path, module: str, source: str | None, tests: tuple[str, ...], seconds: float) -> AverageTrial:
        """Run ``tests`` with ``module`` replaced by ``source`` for at most ``seconds``.

        Without a ``source`` the module stays as it is, and which test reaches which line is noted in the copy.
        """
        file = copy / module
        original = file.read_bytes()
        if source is not None:
            file.write_text(source, encoding="utf-8")
            for old in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
                old.unlink()
        pid = os.fork()
        if pid == 0:
            _run_tests(copy, tests, noted=module if source is None else None)
        return cls(pid, copy, file, original, time.monotonic() + seconds)

    def ended(self) -> int | None:
        """pytest's exit code, -1 where the time was up, or None while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        timed_out = pid == 0 and time.monotonic() > self.deadline
        if pid == 0 and not timed_out:
            return None
        with suppress(ProcessLookupError):  # its ranks too, should a test have left some
            os.killpg(self.pid, signal.SIGKILL)
        if timed_out:
            os.waitpid(self.pid, 0)
        self.file.write_bytes(self.original)
        return -1 if timed_out else os.waitstatus_to_exitcode(status)


def _run_tests(copy: Path, tests: tuple[str, ...], noted: str | None) -> None:
    """In the fork: become a fresh test process in ``copy``, and never return."""
    code = 70
    try:
        os.setsid()
        output = os.open(copy / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(copy)
        os.environ.update(
            PYTHONPATH=str(copy), PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"
        )
        sys.dont_write_bytecode = True
        sys.path[:] = [str(copy)] + [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "trainkit", "jobs")]:
            del sys.modules[name]

        import pytest

        # Failed first: the test that noticed the last mutant often notices the next one, some lines below.
        options = ["-x", "-q", "--tb=line", "--ff", "-p", "pytest_timeout"]  # pyproject.toml sets its limit
        options += ["-s"]  # or what forks print would go to pytest's own files, and not where they redirect it
        options += ["-m", "not long"]  # the second list too
        plugins = [Reached(copy, noted)] if noted else []
        code = int(pytest.main([*options, *tests], plugins=plugins))
    except BaseException as error:  # the mutant cannot even be imported
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = 71
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
