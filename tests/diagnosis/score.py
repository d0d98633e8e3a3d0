"""Score of `jobs.why` on the fresh failure texts.

Each text becomes the run folder that a failed job leaves; the scheduler's answer is that of its exit code.
"""

import functools
import re
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.diagnosis.runs import make_run
from trainkit.cluster.scheduler import JobState
from trainkit.diagnosis.causes import cause_of
from trainkit.run.events import append_event
from trainkit.run.folder import RunDir


def read_yaml(path: Path) -> Any:
    return yaml.load(path.read_text("utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


CORPUS = Path(__file__).with_name("corpus")
FRAMES: dict[str, str] = read_yaml(CORPUS / "frames.yaml")
"""Real tracebacks by name, without the line of the exception."""
NO_CAUSE = {"", "failed", "no-words", "lost-connection"}
"""Names of answers that say that nothing tells why."""
_WORDS = {
    signal.SIGILL: "Illegal instruction (core dumped)",
    signal.SIGABRT: "Aborted (core dumped)",
    signal.SIGKILL: "Killed",
    signal.SIGTERM: "Terminated",
}
"""Words of srun for the signals."""


@dataclass(frozen=True)
class Answer:
    """An answer of `jobs.why` to a text."""

    id: str
    verdict: str
    name: str
    what: str
    fix: str


def texts() -> list[dict[str, Any]]:
    items = [item for path in sorted((CORPUS / "fresh").glob("*.yaml")) for item in read_yaml(path)]
    return [{**item, "text": with_frames(item["text"])} for item in items]


def with_frames(text: str) -> str:
    """Put the traceback ``name`` for each line ``<<name>>``, with what stands before it on every line."""

    def frames(line: re.Match[str]) -> str:
        return "\n".join(line["before"] + frame for frame in FRAMES[line["name"]].splitlines())

    return re.sub(r"^(?P<before>.*)<<(?P<name>\w+)>>$", frames, text, flags=re.MULTILINE)


def run_of(item: dict[str, Any], folder: Path) -> RunDir:
    """The folder of a run of two ranks on n1 and n2 of which rank 1 printed the text; or the batch script did."""
    run = make_run(folder / item["id"], nodes=2, directives=[{"name": "mem", "value": "64G"}])
    batch = item["text"]
    if item.get("log") != "batch":
        append_event(run, "started", attempt=0, hosts=["n1", "n2"], world_size=2)
        for rank, text in ((0, ""), (1, item["text"])):
            (run.attempt_logs(0) / f"rank-{rank}.err").write_text(text, "utf-8")
        code = item["exit"]
        ended = f"Exited with exit code {code}" if code > 0 else _WORDS[-code]
        batch = f"{item.get('batch', '')}srun: error: n2: task 1: {ended}"
    heading = f"Attempt 0 on n[1-2]: the ranks' output is in {run.attempt_logs(0)}"
    (run.logs / "batch.out").write_text(f"{heading}\n{batch}\n", "utf-8")
    return run


def answer_to(item: dict[str, Any], folder: Path) -> Answer:
    run = run_of(item, folder)
    reason = f"exit code {max(item['exit'], 0)}:{max(-item['exit'], 0)}"
    cause = cause_of(run, JobState(item.get("state", "FAILED"), "4711", "slurm", reason, "n[1-2]"))
    said = str(cause or "").replace(str(run.path), "RUN").replace(str(folder), "RUNS")
    what = re.split(r"\n  (?:why|fix): ", said)[0]
    _, _, fix = said.rpartition("\n  fix: ")
    name = cause.name if cause else ""
    return Answer(item["id"], _verdict(item, name, what, fix), name, what, fix)


def _verdict(item: dict[str, Any], name: str, what: str, fix: str) -> str:
    def has(pattern: str, text: str) -> bool:
        return re.search({**item, "mend": "mend "}.get(pattern, r"(?!)"), text, re.IGNORECASE) is not None

    raised = name == "exception" and item["kind"] != "user code"
    never = has("never_re", fix)
    if has("cause_re", what) and not (raised or never or name in NO_CAUSE):
        return "right" if has("fix_re", fix) else "half"
    return "wrong" if name in NO_CAUSE or (raised and not has("mend", fix)) else "confidently wrong"


@functools.cache
def answers() -> list[Answer]:
    with tempfile.TemporaryDirectory() as folder:
        return [answer_to(item, Path(folder)) for item in texts()]
