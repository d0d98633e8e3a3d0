"""Programs that tests run to their end: Python with this checkout's packages, and what checks a script of bash."""

import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[1]


def python(*words: str, cwd: Path = PROJECT, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``python WORDS`` in any folder, with the packages of this checkout."""
    own = {**os.environ, "PYTHONPATH": str(PROJECT), **env}
    return subprocess.run([sys.executable, *words], cwd=cwd, env=own, capture_output=True, text=True, check=False)


def faults(script: str) -> str:
    """What shellcheck says of a script; nothing of a good one. Raises CalledProcessError if bash cannot read it."""
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    shellcheck = [str(Path(sys.prefix, "bin", "shellcheck")), "-"]
    done = subprocess.run(shellcheck, input=script, text=True, capture_output=True, check=False)
    return done.stdout + done.stderr
