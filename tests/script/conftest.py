"""What the tests of scripts as ranks share: one rank in this process, with a script that is a small program."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.runs import wait_until
from trainkit.cluster.signals import StopFlag
from trainkit.config.loading import load, to_yaml
from trainkit.config.schema import Config
from trainkit.run.events import Attempt
from trainkit.run.folder import RunDir
from trainkit.script.script_rank import run_script

PYTHON = [sys.executable, "-S", "-c"]
"""A script that begins at once, without packages."""


@dataclass
class Rank:
    """A rank in this process; `told` are the signals that it gets once its script has written ``ready``."""

    run: RunDir
    config: Config
    told: list[int] = field(default_factory=list)

    def __call__(self, body: str = "", *, env: dict[str, str] | None = None) -> str | int:
        """Run the rank to its end. Returns its outcome, or the exit code of a failure."""
        attempt = Attempt.begin(self.run)
        stop = StopFlag()
        ready = self.run.path / "ready"
        ready.unlink(missing_ok=True)
        command = self.config.script
        assert command is not None
        if body:
            command = command.model_copy(update={"program": PYTHON[0], "arguments": (*PYTHON[1:], body, "{run}")})
        config = self.config.model_copy(update={"script": command})

        def tell() -> None:
            wait_until(ready.exists, 20)
            for number in self.told:
                stop._handle(number, None)
                time.sleep(0.3)

        teller = threading.Thread(target=tell, daemon=True)
        if self.told:
            teller.start()
        try:
            outcome, _ = run_script(config, env or dict(os.environ), stop, attempt, lambda: None, lambda: attempt)
            return outcome
        except SystemExit as error:
            return int(str(error.code))
        finally:
            if self.told:
                teller.join()


@pytest.fixture
def rank(tmp_path: Path) -> Callable[..., Rank]:
    """Makes a rank: settings, and the signals that it is told."""

    def make(*settings: str, told: tuple[int, ...] = (), **script: Any) -> Rank:
        words = {f"script.{key}": (value, "test") for key, value in {"program": "true", "path": None, **script}.items()}
        config = load("script", settings, flags=words).config
        run = RunDir(tmp_path / "run")
        with suppress(FileExistsError):
            run = RunDir.create(tmp_path / "run", to_yaml(config))
        return Rank(run, config, list(told))

    return make


USR2 = signal.SIGUSR2
TERM = signal.SIGTERM
