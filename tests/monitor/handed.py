"""A logger that has something prepared, and writes down what it was handed."""

from trainkit.config.schema import Config
from trainkit.monitor import Logger, NullLogger, Start
from trainkit.run.folder import RunDir

PREPARES = True


def prepare() -> object:
    """What takes long, done early."""
    return "prepared"


def build(run_dir: RunDir, config: Config, start: Start) -> Logger:
    (run_dir.path / "handed").write_text(str(start.prepared), encoding="utf-8")
    return NullLogger()
