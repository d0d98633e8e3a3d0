"""``python -m tests.pictures [RUN]``: the curves of README.md, drawn anew into docs/pictures.

They are those of README's main job, which is run for them, or of RUN, where it was run before.
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from trainkit.report import chart_sections, charts
from trainkit.report.collection import collect
from trainkit.report.document import Charts
from trainkit.report.end_lines import summary_lines
from trainkit.run.folder import RunDir

FILE = Path(__file__).parents[1] / "docs" / "pictures" / "curves.svg"
MAIN_JOB = ("-m", "jobs.submit", "ddp", "--nodes", "2")


def curves(run: RunDir) -> str:
    """Loss and accuracy of a run, as its report draws them, with the line that it ended with."""
    (drawn,) = (part for part in chart_sections.curves(collect([run])).parts if isinstance(part, Charts))
    pictures = [picture for picture in drawn.pictures if picture is not None][:2]
    return charts.drawing(pictures, legend=drawn.legend, foot=" · ".join(summary_lines(run)[-1].split(" · ")[:2]))


def main() -> None:
    with TemporaryDirectory() as folder:
        if not sys.argv[1:]:
            env = {**os.environ, "TRAINKIT_RUNS": folder}
            subprocess.run([sys.executable, *MAIN_JOB], cwd=folder, env=env, check=True)
        run = RunDir.open(Path(sys.argv[1] if sys.argv[1:] else f"{folder}/ddp-0001"))
        FILE.write_text(curves(run))


if __name__ == "__main__":
    main()
