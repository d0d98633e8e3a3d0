from pathlib import Path

import pytest

from tests.diagnosis.runs import make_run
from trainkit.run.folder import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "runs" / "ddp-0001")
