"""Nursery that a controller has forked before it had anything to start."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.runs import wait_until
from trainkit.common.imports import PROGRAM

CONTROLLER = """
import json, os, sys, time
from pathlib import Path
from trainkit.recovery import nursery
from trainkit.run.folder import RunDir

words = nursery.stand_by()
if words is not None:
    nursery.run_words(words)
    sys.exit(0)
run, log, kind = RunDir(Path(sys.argv[1])), Path(sys.argv[1], "log"), sys.argv[2]
if kind == "nothing to start":
    print(nursery._STANDBY[0].pid)
    sys.exit(0)
memory = os.memfd_create("memory")
os.write(memory, b"counts")
os.set_inheritable(memory, False)
ours = nursery.Nursery.of(run, ["-P"], os.environ, log, cwd=Path(sys.argv[3]), inherited=[memory])
program = "import json, os, signal, sys; signal.pthread_sigmask(signal.SIG_SETMASK, []); "
program += "read = os.pread(MEMORY, 6, 0).decode(); "
program += "print(json.dumps([sys.argv, os.getcwd(), dict(os.environ), read, os.getppid()])); "
program += "sys.stdout.flush(); ENDS"
ranks = []
for index, ends in enumerate(["sys.exit(3)", "signal.pause()"]):
    words = [sys.executable, "-c", program.replace("MEMORY", str(memory)).replace("ENDS", ends), f"word-{index}"]
    ranks.append(ours.start(words, {"OWN": str(index)}, log.with_name(f"rank-{index}"), is_alone=True))
ours.complete()
first = ranks[0].wait()
ranks[1].send_signal(15)
print(json.dumps([first, ranks[1].wait(), len(nursery._STANDBY)]))
"""


def controlled(folder: Path, kind: str, code: Path) -> list[str]:
    """Run the controller for a run with that code. Returns the lines that it prints."""
    (folder / "code").symlink_to(code)
    (folder / "elsewhere").mkdir()
    words = [sys.executable, "-c", CONTROLLER, str(folder), kind, str(folder / "elsewhere")]
    env = os.environ | {"PYTHONPATH": PROGRAM}
    return subprocess.run(words, env=env, check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.parametrize("is_own", [True, False], ids=["the run's code", "other code"])
def test_ranks_of_a_nursery_are_as_if_a_launcher_had_started_them(tmp_path: Path, is_own: bool) -> None:
    """Where the run has other code than the controller, the one that waits is not taken."""
    code = tmp_path / "other"
    code.mkdir()
    first, second, waiting = json.loads(controlled(tmp_path, "two ranks", Path(PROGRAM) if is_own else code)[0])
    assert (first, second, waiting) == (3, -15, 0 if is_own else 1)
    parents = set()
    for rank in (0, 1):
        said: list[Any] = json.loads((tmp_path / f"rank-{rank}.out").read_text())
        assert said[:4] == [["-c", f"word-{rank}"], str(tmp_path / "elsewhere"), {"OWN": str(rank)}, "counts"]
        parents.add(said[4])
    assert len(parents) == 1


def test_one_that_has_nothing_to_start_ends_with_its_controller(tmp_path: Path) -> None:
    pid = int(controlled(tmp_path, "nothing to start", Path(PROGRAM))[0])
    assert wait_until(lambda: not psutil.pid_exists(pid) or None, what="its end")


def test_a_controller_has_loaded_nothing_that_reads_the_environment_of_ranks() -> None:
    """OpenMP and BLAS read it once, when they are loaded; it is each rank's own."""
    program = (
        "import sys, trainkit.launch.controller; print([name for name in ('numpy', 'torch') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"
