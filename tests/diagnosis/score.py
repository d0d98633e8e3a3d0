"""How many of the fresh failure texts `jobs.why` explains.

Each text becomes the run folder that a failed job leaves; the scheduler's answer is that of its exit code.
"""

import functools
import json
import re
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainkit.config.loading import load, to_yaml
from trainkit.diagnosis.causes import cause_of
from trainkit.run.events import append_event
from trainkit.run.folder import RunDir
from trainkit.schedulers.base import JobState

FRESH = Path(__file__).with_name("corpus") / "fresh"
NO_CAUSE = {"", "failed", "no-words", "lost-connection"}
"""Names of answers that say that nothing tells why."""


@dataclass(frozen=True)
class Answer:
    """What `jobs.why` said of a text."""

    id: str
    verdict: str
    name: str
    what: str
    fix: str


def texts() -> list[dict[str, Any]]:
    return [item for path in sorted(FRESH.glob("*.yaml")) for item in yaml.safe_load(path.read_text("utf-8"))]


def run_of(item: dict[str, Any], folder: Path, config: str) -> RunDir:
    """The folder of a run of two ranks on n1 and n2 of which rank 1 printed the text; or the batch script did."""
    run = RunDir.create(folder / item["id"], config)
    run.attempt_logs(0).mkdir()
    plan = {"time_limit_seconds": 3600, "world_size": 2, "nodes": 2, "ntasks_per_node": 1}
    run.plan.write_text(json.dumps({**plan, "directives": [{"name": "mem", "value": "64G"}]}))
    append_event(run, "submitted", executor="slurm", job_id="4711")
    batch = [f"Attempt 0 on n[1-2]: the ranks' output is in {run.attempt_logs(0)}"]
    if item.get("log") != "batch":
        append_event(run, "started", attempt=0, hosts=["n1", "n2"], world_size=2)
        for rank, text in ((0, ""), (1, item["text"])):
            (run.attempt_logs(0) / f"rank-{rank}.out").write_text("")
            (run.attempt_logs(0) / f"rank-{rank}.err").write_text(text, "utf-8")
        code = item["exit"]
        ended = f"Exited with exit code {code}" if code > 0 else _WORDS[-code]
        batch.append(f"srun: error: n2: task 1: {ended}")
    else:
        batch.append(item["text"])
    (run.logs / "batch.out").write_text("\n".join(batch) + "\n", "utf-8")
    return run


_WORDS = {
    signal.SIGILL: "Illegal instruction (core dumped)",
    signal.SIGABRT: "Aborted (core dumped)",
    signal.SIGKILL: "Killed",
    signal.SIGTERM: "Terminated",
}
"""How srun names the signals."""


def answer_to(item: dict[str, Any], folder: Path, config: str) -> Answer:
    run, code = run_of(item, folder, config), item["exit"]
    reason = f"exit code {max(code, 0)}:{max(-code, 0)}"
    cause = cause_of(run, JobState(item.get("state", "FAILED"), "4711", "slurm", reason, "n[1-2]"))
    said = str(cause or "").replace(str(run.path), "RUN").replace(str(folder), "RUNS")
    what = re.split(r"\n  (?:why|fix): ", said)[0]
    fix = said.rpartition("\n  fix: ")[2] if "\n  fix: " in said else ""
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
    config = to_yaml(load("ddp").config)
    with tempfile.TemporaryDirectory() as folder:
        return [answer_to(item, Path(folder), config) for item in texts()]
