"""What the sentences of the tables of causes may name: the run, its job, the rank that failed and its node."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit import reading
from trainkit.cluster.slurm_jobs import JobState
from trainkit.config.checks import smaller
from trainkit.config.schema import SECTIONS
from trainkit.diagnosis.evidence import Failure, lagging_ranks
from trainkit.diagnosis.stderr import places_of
from trainkit.errors import UserError
from trainkit.ranks.hostlist import expand
from trainkit.records.history import life_of
from trainkit.records.rundir import RunDir

_PATH = re.compile(r"""['"](?P<path>/[^'"\n]+)['"]""")
_CACHES = (
    ("huggingface", ".cache/huggingface", "HF_HOME"),
    ("torch/hub", ".cache/torch", "TORCH_HOME"),
    ("matplotlib", ".cache/matplotlib", "MPLCONFIGDIR"),
    ("triton", ".triton", "TRITON_CACHE_DIR"),
    ("wandb", ".cache/wandb", "WANDB_CACHE_DIR"),
    ("/.cache/", ".cache", "XDG_CACHE_HOME"),
    ("_inductor", "/tmp", "TMPDIR"),
    ("/tempfile.py", "/tmp", "TMPDIR"),
)
"""What a path or a traceback holds, the folder that is written to then, and the variable that moves it."""


_FOR_A_SHELL = frozenset({"run", "runs", "logs", "there", "more_memory"})
"""Fields that are quoted already."""


class Fields(dict[str, str]):
    """Fields of a sentence; one that is not known leaves it readable."""

    def __missing__(self, key: str) -> str:
        return "?"


def for_a_shell(found: Fields) -> Fields:
    """The fields as words of a command: what a log or a stranger's folder has put into them stays one word."""
    return Fields({key: text if key in _FOR_A_SHELL or not text else shlex.quote(text) for key, text in found.items()})


def fields(run: RunDir, state: JobState, attempt: int, failure: Failure | None) -> Fields:
    """What the sentences of the tables may name; paths of the run are quoted for a shell."""
    life = life_of(run)
    plan, config = reading.read_object(run.plan), _settings(run)
    hosts = hosts_of(state.nodes) or ",".join(map(str, life.started.get("hosts") or ()))
    host = failure.host if failure is not None and failure.host else ""
    if failure is not None and not host:
        host = _host_of_rank(run, attempt, failure.rank) or host_of_task(run, hosts, failure.rank)
    host = host or hosts.partition(",")[0]
    rank = f"Rank {failure.rank}" if failure is not None else "A rank"
    seconds = plan.get("time_limit_seconds")
    ranks = max(int(life.started.get("world_size") or plan.get("world_size") or 1), 1)
    share = max(int(config.get("global_batch_size") or 64) // ranks, 1)
    micro = int(config.get("micro_batch_size") or life.started.get("micro_batch_size") or share)
    memory = _more_memory(plan) if state.executor == "slurm" else ""
    behind, at = lagging_ranks(run, attempt), _place(failure)
    place, moved_by = place_of(failure)
    return Fields(
        {
            "run": shlex.quote(str(run.path)),
            "runs": shlex.quote(str(run.path.parent)),
            "logs": shlex.quote(str(run.logs)),
            "job": state.job_id,
            "state": state.state,
            "reason": state.reason,
            "nodes": state.nodes or "The node",
            "hosts": hosts,
            "unseeing": hosts.partition(",")[0] or "the node",
            "host": host,
            "on_node": host or "the node",
            "failed": f"One of {state.nodes}" if "," in hosts else state.nodes or "A node",
            "failed_hosts": "" if "," in hosts else hosts,
            "who": f"{rank} on {host}" if host else rank,
            "rank": str(failure.rank) if failure is not None else "0",
            "error": failure.error.rstrip(".") if failure is not None else "",
            "attempt": str(attempt),
            "at": at,
            "mend": _mend(failure),
            "place": place or str(run.path),
            "folder": _folder(place) if place else str(run.path.parent),
            "moves": f" ({moved_by}=FOLDER puts it elsewhere)" if moved_by else "",
            "full": _full(place or str(run.path)),
            "crashed_at": f", at {at}" if at else "",
            "there": f"srun -N1 -n1 -w {shlex.quote(host)} " if state.executor == "slurm" and host else "",
            "which": "gloo" if failure is not None and "loo " in failure.error else "NCCL",
            "behind": _ranks(behind) if behind else "another rank",
            "lagging": str(behind[0]) if behind else "0",
            "more_memory": memory,
            "all_of_it": " (0: all that it has)" if memory == " --mem 0" else "",
            "unless_memory": _unless_memory(state),
            "twice_the_time": _clock(2 * seconds) if reading.is_whole(seconds) else "2:00:00",
            "half_the_batch": str(smaller(micro, share)),
            "half_the_lr": _smaller_lr(config.get("lr")),
        }
    )


def _directive(plan: Mapping[str, Any], name: str) -> str | None:
    """What sbatch was given for an option; None if nothing."""
    given = plan.get("directives")
    items = [item for item in given if isinstance(item, dict)] if isinstance(given, list) else []
    return next((str(item.get("value")) for item in items if item.get("name") == name), None)


def asked_for(run: RunDir) -> set[str]:
    """The nodes that the run asks for by name."""
    return set(hosts_of(_directive(reading.read_object(run.plan), "nodelist") or "").split(",")) - {""}


def _more_memory(plan: Mapping[str, Any]) -> str:
    """Twice what each node was asked for; all that it has where that is not known; nothing if that was not enough."""
    size = re.fullmatch(r"(\d{1,9})([KMGT]?)B?", _directive(plan, "mem") or "")
    if size is None:
        return " --mem 0"
    return f" --mem {2 * int(size[1])}{size[2]}" if int(size[1]) else ""


def _unless_memory(state: JobState) -> str:
    """Where to see whether memory ran out, and what to do then."""
    if state.executor == "slurm":
        return (
            f"If `sacct -j {state.job_id} -o NodeList,MaxRSS,ReqMem` shows that memory ran out, with more --mem; else:"
        )
    return "If `dmesg` shows that memory ran out, with a smaller batch or fewer data.workers in a new run; else:"


def _settings(run: RunDir) -> dict[str, float]:
    """The numbers of the configuration that a fix may halve."""
    try:
        text = reading.read_text(run.config)
    except OSError:
        return {}
    found = re.findall(r"^\s+(global_batch_size|micro_batch_size|lr): ([0-9.e+-]+)$", text, re.MULTILINE)
    values: dict[str, float] = {}
    for key, value in found:
        try:
            number = float(value)
        except ValueError:
            continue
        if math.isfinite(number):
            values.setdefault(key, number)
    return values


def _host_of_rank(run: RunDir, attempt: int, rank: int) -> str:
    told = [item.host for item in life_of(run).failures if item.attempt == attempt and item.rank == rank and item.host]
    return told[0] if told else ""


def host_of_task(run: RunDir, hosts: str, task: int) -> str:
    """The node of a task that never came to say its own."""
    each = reading.read_object(run.plan).get("ntasks_per_node")
    names = hosts.split(",")
    index = task // each if reading.is_whole(each) and each else len(names)
    return names[index] if index < len(names) else names[0]


def hosts_of(nodelist: str) -> str:
    """Names with commas between them; of many nodes as SLURM writes them."""
    try:
        names = expand(nodelist) if nodelist else []
    except UserError:
        return ""
    return ",".join(names) if len(names) <= 8 else nodelist


def _place(failure: Failure | None) -> str:
    """File and line of the failure: the last in code of the user's own, else the last of all."""
    places, own = places_of(failure.traceback if failure is not None else ())
    return _named((own or places)[-1]) if places else ""


def _mend(failure: Failure | None) -> str:
    """What to do about an error of code: mend it where the user's own raised it, or look where that called another."""
    places, own = places_of(failure.traceback if failure is not None else ())
    if not own:
        return ""
    return f"Mend {_named(own[-1])}:" if own[-1] == places[-1] else f"Look at {_named(own[-1])}, which called this:"


def _named(place: tuple[str, str]) -> str:
    return f"{Path(place[0]).name}:{place[1]}"


def place_of(failure: Failure | None) -> tuple[str, str]:
    """The file or folder that an error is about, and the variable that puts it elsewhere; each empty if not known.

    It is named by the error, or known by who was about to write: a cache of the home folder, or the node's /tmp.
    """
    if failure is None:
        return "", ""
    named = _PATH.findall(failure.error)
    seen = named[-1] if named else "\n".join(failure.traceback)
    for part, folder, variable in _CACHES:
        if part in seen:
            return (named[-1] if named else os.path.expanduser(os.path.join("~", folder))), variable
    if named and named[-1].startswith("/tmp/"):
        return named[-1], "TMPDIR"
    return (named[-1], "") if named else ("", "")


def _folder(place: str) -> str:
    """The folder that a file lies in, which can be asked for its room."""
    return place if os.path.isdir(place) or not os.path.splitext(place)[1] else os.path.dirname(place)


def _full(place: str) -> str:
    """Of what a full disk has none left, where it can be asked from here."""
    try:
        room = os.statvfs(_folder(place))
    except OSError:
        return "full, of bytes or of files"
    if room.f_files and room.f_favail == 0 and room.f_bavail:
        return "out of inodes: it has room for bytes, and for no further file"
    return "full" if room.f_bavail == 0 else "full, of bytes or of files"


def _smaller_lr(lr: float | None) -> str:
    """Half of it; of one that no optimizer has trained with, the default."""
    return f"{lr / 2 if lr and lr <= 10 else SECTIONS['optim'].model_fields['lr'].default:g}"


def _ranks(numbers: Sequence[int]) -> str:
    shown = [str(number) for number in numbers[:8]]
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(shown)}{more}"


def _clock(seconds: int) -> str:
    minutes = max(seconds // 60, 1)
    return f"{minutes // 60}:{minutes % 60:02d}:00"
