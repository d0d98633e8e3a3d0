"""``python -m tests.pictures [RUN]``: the pictures of README.md, drawn anew into docs/pictures.

The curves are those of README's main job, which is run for them, or of RUN, where it was run before.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from markupsafe import Markup

from trainkit.monitor.follow import summary_lines
from trainkit.report import document, figures
from trainkit.report.document import Charts, tag
from trainkit.report.facts import collect
from trainkit.run.folder import RunDir

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
MAIN_JOB = ("-m", "jobs.submit", "ddp", "--nodes", "2")
STEPS = (
    ("trainkit submit", "a preset and", "what differs"),
    ("checked", "settings, data,", "your code, the site"),
    ("a run is a folder", "config, plan,", "script, code"),
    ("queued", "by SLURM, or", "started here"),
    ("ranks train", "in one loop,", "saving as they go"),
    ("report", "page, log book,", "weights"),
)
"""What becomes of a command, in three lines each."""
BACK = "time limit, preemption, lost node: saved, queued again, and continued to the same weights"
_WIDE, _TALL, _APART = 128, 72, 22
_STYLE = """text{font:13px system-ui,sans-serif;fill:#334155;text-anchor:middle}.name{font-weight:600;fill:#1e1b4b}
.box{fill:#eef2ff;stroke:#a5b4fc}.way{fill:none;stroke:#64748b;stroke-width:1.5;marker-end:url(#tip)}"""


def way_of_a_run() -> str:
    """From the command to the report, as SVG."""
    width = len(STEPS) * (_WIDE + _APART) + 10
    tip = tag("path", d="M0 0L8 4L0 8z", fill="#64748b")
    marker = tag("marker", tip, id="tip", markerWidth=8, markerHeight=8, refX=7, refY=4, orient="auto")
    first, last = _middle(3), _middle(4)
    back = f"M{last} {_TALL + 16}v22H{first}v-20"
    return (
        tag(
            "svg", tag("style", Markup(_STYLE)), tag("defs", marker),
            tag("rect", width="100%", height="100%", fill="#ffffff"), *_boxes(), tag("path", class_="way", d=back),
            tag("text", BACK, x=(first + last) // 2, y=_TALL + 58), xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {width} {_TALL + 74}", width=width, height=_TALL + 74, role="img",
            aria_label="the way of a run",
        )
        + "\n"
    )  # fmt: skip


def _middle(step: int) -> int:
    return 16 + step * (_WIDE + _APART) + _WIDE // 2


def _boxes() -> Iterator[Markup]:
    for number, lines in enumerate(STEPS):
        x = _middle(number) - _WIDE // 2
        yield tag("rect", class_="box", x=x, y=14, width=_WIDE, height=_TALL, rx=8)
        for row, line in enumerate(lines):
            yield tag("text", line, class_=None if row else "name", x=_middle(number), y=36 + 20 * row)
        if number:
            yield tag("path", class_="way", d=f"M{x - _APART + 2} {14 + _TALL // 2}h{_APART - 4}")


def curves(run: RunDir) -> str:
    """Loss and accuracy of a run, as its report draws them, with the line that it ended with."""
    (drawn,) = (part for part in figures.curves(collect([run])).parts if isinstance(part, Charts))
    pictures = [picture for picture in drawn.pictures if picture is not None][:2]
    return document.drawing(pictures, legend=drawn.legend, foot=" · ".join(summary_lines(run)[0].split(" · ")[:2]))


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "run.svg").write_text(way_of_a_run())
    with TemporaryDirectory() as folder:
        if not sys.argv[1:]:
            env = {**os.environ, "TRAINKIT_RUNS": folder}
            subprocess.run([sys.executable, *MAIN_JOB], cwd=folder, env=env, check=True)
        run = RunDir.open(Path(sys.argv[1] if sys.argv[1:] else f"{folder}/ddp-0001"))
        (FOLDER / "curves.svg").write_text(curves(run))


if __name__ == "__main__":
    main()
