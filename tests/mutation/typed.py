"""Whether the type checker notices a change: README's command for the tests runs it as well."""

import subprocess
import sys
from pathlib import Path


class Types:
    """mypy's daemon in one copy of the project; it ends with ``stop``."""

    def __init__(self, copy: Path) -> None:
        self._copy = copy

    def notice(self, module: str, source: str) -> bool:
        """Whether ``module`` is refused with this ``source`` in place of its own."""
        file = self._copy / module
        original = file.read_bytes()
        file.write_text(source, encoding="utf-8")
        try:
            return self._run("run", "--", module) == 1
        finally:
            file.write_bytes(original)

    def stop(self) -> None:
        self._run("stop")

    def _run(self, *arguments: str) -> int:
        """The exit code of the daemon's command; of ``run`` 1 where there are errors of types."""
        command = [sys.executable, "-m", "mypy.dmypy", *arguments]
        return subprocess.run(command, cwd=self._copy, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
