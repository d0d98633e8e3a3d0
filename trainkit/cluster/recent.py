"""What SLURM has said a moment ago, to whoever asks again within seconds: a loop in a script, `watch -n1`.

Sites warn users whose commands ask often. So an answer is kept beside the list of this user's runs, for `KEPT_SECONDS`,
and only for `jobs.status`, which says how old it is: nothing is decided by it. It holds for a job as long as the run's
own record has not changed: what was started, cancelled, requeued or has ended since is asked anew.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainkit import fileio
from trainkit.cluster.slurm_jobs import Answer, JobState, ask
from trainkit.run import folder
from trainkit.run.events import Life

KEPT_SECONDS = 20.0
"""With two commands each, that is six a minute."""
_FIELDS = ("state", "job_id", "executor", "reason", "nodes", "start")


def mark(life: Life) -> str:
    """What a run's record says of its jobs: as long as it is the same, nothing is known to have happened."""
    jobs = [(job.job_id, job.time, job.cancelled, job.ended, job.finished) for job in life.submissions]
    attempts = (life.started.get("time"), life.outcome, len(life.failures), len(life.handed_back), len(life.requeued))
    return json.dumps([jobs, attempts])


def ask_seldom(
    wanted: Mapping[str, str], others: Mapping[str, str], *, heard: Callable[[str], None], aged: Callable[[float], None]
) -> Answer:
    """As `trainkit.cluster.slurm_jobs.ask`, with what is known of all of them, if that is recent.

    Args:
        wanted: jobs, each with the `mark` of its run.
        others: further ones, of which it only matters whether they are over.
        aged: told how many seconds ago SLURM was asked, if that was before.
    """
    marks, now = {**others, **wanted}, time.time()
    file = folder.state_file("queue.json")
    known = _read(file, now)
    if marks and all(job in known and known[job]["mark"] == said for job, said in marks.items()):
        mine = {job: known[job] for job in marks}
        aged(max(now - item["asked"] for item in mine.values()))
        jobs = {job: JobState(*item["state"]) for job, item in mine.items() if item["state"]}
        return Answer(jobs, complaint=next((item["complaint"] for item in mine.values() if item["complaint"]), ""))
    answer = ask(wanted, only_if_queued=others, heard=heard)
    if answer.has_answered and marks:
        for job, said in marks.items():
            state = answer.jobs.get(job)
            fields = [getattr(state, name) for name in _FIELDS] if state is not None else None
            known[job] = {"asked": now, "mark": said, "complaint": answer.complaint, "state": fields}
        _write(file, known)
    return answer


def _read(file: Path, now: float) -> dict[str, dict[str, Any]]:
    found = fileio.read_object(file)
    return {job: item for job, item in found.items() if _is_whole(item) and 0 <= now - item["asked"] < KEPT_SECONDS}


def _is_whole(item: Any) -> bool:
    if not isinstance(item, dict) or not fileio.is_time(item.get("asked")):
        return False
    state = item.get("state")
    fits = state is None or (isinstance(state, list) and len(state) == len(_FIELDS) and all(map(_is_text, state)))
    return fits and _is_text(item.get("mark")) and _is_text(item.get("complaint"))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _write(file: Path, known: Mapping[str, Any]) -> None:
    try:
        folder.make_state_folder(file.parent)
        fileio.write(file, json.dumps(known), file.parent)
    except OSError:  # a home that cannot be written costs only a question more
        return
