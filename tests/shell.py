"""What bash and shellcheck, which comes with the tests' own packages, say of a script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def faults(script: str) -> str:
    """Empty for a good one. Raises CalledProcessError where bash cannot even read it."""
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    shellcheck = [str(Path(sys.prefix, "bin", "shellcheck")), "-"]
    done = subprocess.run(shellcheck, input=script, text=True, capture_output=True, check=False)
    return done.stdout + done.stderr
