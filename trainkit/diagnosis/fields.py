"""Fields that the sentences and commands of ``causes.yaml`` name: the run, its job, the failed rank, its node."""

import os
import re
import shlex
from contextlib import suppress
from pathlib import Path

from trainkit.cluster.scheduler import built_in
from trainkit.common import fileio, jsonl
from trainkit.common.errors import UserError
from trainkit.common.hosts import expand
from trainkit.diagnosis import evidence
from trainkit.diagnosis.evidence import Case
from trainkit.diagnosis.rank_log import CACHES, WORDS, places_of
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of


class Fields(dict[str, str]):
    """Fields of a sentence; one that is not known leaves it readable."""

    def __missing__(self, key: str) -> str:
        return "?"


def fields(case: Case) -> Fields:
    """The fields of a case, before those that the pattern of a row finds."""
    hosts = hosts_of(case.state.nodes) or ",".join(map(str, history_of(case.run).started.get("hosts") or ()))
    host = _host_of_failure(case, hosts) or hosts.partition(",")[0]
    who = "A rank"
    rank = "0"
    if case.failure is not None:
        rank = str(case.failure.rank)
        who = f"Rank {rank}"
    found = Fields(
        run=shlex.quote(str(case.run.path)),
        logs=shlex.quote(str(case.run.logs)),
        attempt=str(case.attempt),
        job=case.state.job_id,
        state=case.state.state,
        reason=case.state.reason,
        nodes=case.state.nodes or "The node",
        hosts=hosts,
        unseeing=hosts.partition(",")[0] or "the node",
        failed=case.state.nodes or "A node",
        failed_hosts=hosts,
        host=host,
        on_node=host or "the node",
        there=built_in(case.state.executor).at_node(host),
        who=f"{who} on {host}" if host else who,
        rank=rank,
        error=case.error.rstrip("."),
        which="gloo" if "loo " in case.error else "NCCL",
    )
    if "," in hosts:
        found["failed"] = f"One of {case.state.nodes}"
        found["failed_hosts"] = ""
    found.update(_frames(case))
    found.update(_place(case))
    found.update(_resources(case))
    found.update(_settings(case))
    return found


def behind(case: Case) -> dict[str, str]:
    """The fields that name the ranks for which others waited; every rank's log is read for them."""
    ranks = evidence.lagging_ranks(case.run, case.attempt)
    if not ranks:
        return {"behind": "another rank", "lagging": "0"}
    noun = "ranks" if len(ranks) > 1 else "rank"
    named = f"{noun} {', '.join(map(str, ranks[:8]))}"
    if len(ranks) > 8:
        named += f" and {len(ranks) - 8} more"
    return {"behind": named, "lagging": str(ranks[0])}


def host_of_task(run: RunDir, hosts: str, task: int) -> str:
    """The node of a task that has not named its own."""
    names = hosts.split(",")
    each = fileio.read_object(run.plan).get("ntasks_per_node")
    if jsonl.is_whole(each) and each and task // each < len(names):
        return names[task // each]
    return names[0]


def hosts_of(nodelist: str) -> str:
    """Names with commas between them; many nodes as SLURM writes them."""
    if not nodelist:
        return ""
    try:
        names = expand(nodelist)
    except UserError:
        return ""
    if len(names) > 8:
        return nodelist
    return ",".join(names)


def _host_of_failure(case: Case, hosts: str) -> str:
    """The node of the rank that failed: by srun's word, by its own, or by its number."""
    if case.failure is None:
        return ""
    if case.failure.host:
        return case.failure.host
    for item in history_of(case.run).failures:
        if item.attempt == case.attempt and item.rank == case.failure.rank and item.host:
            return item.host
    return host_of_task(case.run, hosts, case.failure.rank)


def _frames(case: Case) -> dict[str, str]:
    """The line that raised the error, and the one that the user can mend."""
    places, own = places_of(case.traceback)
    at = _line_of(own or places)
    mend = ""
    if own:
        mend = f"Look at {at}, which called this:"
        if own[-1] == places[-1]:
            mend = f"Mend {at}:"
    return {"at": at, "crashed_at": f", at {at}" if at else "", "mend": mend}


def _line_of(places: list[tuple[str, str]]) -> str:
    """The last place, as ``train.py:9``."""
    if not places:
        return ""
    file, line = places[-1]
    return f"{Path(file).name}:{line}"


def _place(case: Case) -> dict[str, str]:
    """The file or folder that the error is about."""
    place, moved_by = place_of(case)
    folder = _folder(place or str(case.run.path))
    return {
        "place": place or str(case.run.path),
        "folder": folder if place else str(case.run.path.parent),
        "moves": f" ({moved_by}=FOLDER puts it elsewhere)" if moved_by else "",
        "full": fileio.full(Path(folder)) or "The disk is full, of bytes or of files",
    }


def place_of(case: Case) -> tuple[str, str]:
    """The file or folder that an error is about, and the variable that moves it; each empty if not known.

    The error names it, or it follows from what was about to be written: a cache of the home folder, or the node's /tmp.
    """
    named = ""
    for match in WORDS["path"].finditer(case.error):
        named = match["path"]  # the last of them
    seen = named or "\n".join(case.traceback)
    for part, folder, variable in CACHES:
        if part in seen:
            return named or os.path.expanduser(folder), variable
    if named.startswith("/tmp/"):
        return named, "TMPDIR"
    return named, ""


def _folder(place: str) -> str:
    """The folder of a file."""
    if os.path.isdir(place) or not os.path.splitext(place)[1]:
        return place
    return os.path.dirname(place)


def _resources(case: Case) -> dict[str, str]:
    """Memory and time to ask for instead, and where to see whether memory ran out."""
    scheduler = built_in(case.state.executor)
    memory = ""
    instead = "a smaller batch or fewer data.workers in a new run"
    if scheduler.batch:
        memory = _more_memory(case.run.directive("mem"))
        instead = "more --mem"
    minutes = 120
    seconds = fileio.read_object(case.run.plan).get("time_limit_seconds")
    if jsonl.is_whole(seconds):
        minutes = max(2 * seconds // 60, 1)
    shows = scheduler.shows_memory(case.state.job_id)
    return {
        "more_memory": memory,
        "all_of_it": " (0: all that it has)" if memory == " --mem 0" else "",
        "unless_memory": f"If `{shows}` shows that memory ran out, with {instead}; else:",
        "twice_the_time": f"{minutes // 60}:{minutes % 60:02d}:00",
    }


def _more_memory(asked_for: str) -> str:
    """Twice what each node was asked for; all that it has where that is not known; nothing if that was not enough."""
    size = re.fullmatch(r"(\d{1,9})([KMGT]?)B?", asked_for)
    if size is None:
        return " --mem 0"
    return f" --mem {2 * int(size[1])}{size[2]}" if int(size[1]) else ""


def _settings(case: Case) -> dict[str, str]:
    """Halves of the batch and of the learning rate that the run's configuration holds."""
    from trainkit.config.checks import smaller  # a tenth of a second, for those that have failed alone
    from trainkit.config.schema import SECTIONS

    config: dict[str, float] = {}
    with suppress(OSError):
        for key, value in WORDS["numbers"].findall(fileio.read_text(case.run.config)):
            config.setdefault(key, float(value))
    started = history_of(case.run).started
    ranks = int(started.get("world_size") or fileio.read_object(case.run.plan).get("world_size") or 1)
    share = max(int(config.get("global_batch_size") or 64) // max(ranks, 1), 1)
    micro = int(config.get("micro_batch_size") or started.get("micro_batch_size") or share)
    half_the_lr = config.get("lr", 0.0) / 2
    if not 0 < half_the_lr <= 5:  # no optimizer trains with it
        half_the_lr = SECTIONS["optim"].model_fields["lr"].default
    return {"half_the_batch": str(smaller(micro, share)), "half_the_lr": f"{half_the_lr:g}"}
