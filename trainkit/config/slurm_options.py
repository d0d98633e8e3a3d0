"""sbatch's and srun's own words, by their manuals: times, options, and variables of the environment.

Some options stand for a flag of ours, some break what we promise. Whatever is in neither list is passed on, options of
plugins and of later versions included.
"""

import re
from collections.abc import Mapping
from typing import Any

from trainkit.config import yaml


def time_minutes(text: str) -> float:
    """Minutes of a time as sbatch writes it: ``M``, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M``, ``D-H:M:S``.

    Raises ValueError for anything else, and for zero.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise ValueError("a time as sbatch writes it: 30 (minutes), 2:00:00, 1-12:00:00")
    days, *parts = (int(part) if part else None for part in match.groups())
    if days is None and parts[2] is None:  # M:S
        parts = [0, *parts[:2]]
    hours, whole, seconds = (part or 0 for part in parts)
    minutes = (days or 0) * 1440 + hours * 60 + whole + seconds / 60
    if minutes <= 0:
        raise ValueError("a time above zero")
    return minutes


def slurm_time(minutes: float) -> str:
    """A time as sbatch writes it: ``30:00``, ``2:00:00``, ``1-12:00:00``."""
    seconds = round(minutes * 60)
    days, rest = divmod(seconds, 86400)
    hours, rest = divmod(rest, 3600)
    text = f"{hours}:{rest // 60:02}:{rest % 60:02}"
    return f"{days}-{text}" if days else re.sub(r"^0:", "", text)


# Long options of 22.05. getopt takes every beginning of a name that no other name has.
_BOTH = """
    account acctg-freq batch bb bbf begin chdir cluster-constraint clusters comment constraint container contiguous
    core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error
    exclude exclusive export extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task
    gres gres-flags help hint hold input job-name licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu
    mem-per-gpu mincpus network nice no-kill nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu
    ntasks-per-node ntasks-per-socket open-mode output overcommit oversubscribe partition power prefer priority
    profile propagate qos quiet reboot reservation signal sockets-per-node spread-job switches test-only thread-spec
    threads-per-core time time-min tmp uid usage use-min-nodes verbose version wait wckey
"""
_OF_SBATCH = """
    array export-file get-user-env ignore-pbs kill-on-invalid-dep no-requeue parsable requeue wait-all-nodes wrap
"""
_OF_SRUN = """
    accel-bind bcast bcast-exclude compress cpu-bind disable-status epilog exact het-group immediate interactive jobid
    kill-on-bad-exit label mpi msg-timeout multi-prog no-allocate overlap preserve-env prolog pty quit-on-interrupt
    relative resv-ports send-libs slurmd-debug task-epilog task-prolog threads unbuffered
"""
_NAMES = {"sbatch": f"{_BOTH} {_OF_SBATCH}".split(), "srun": f"{_BOTH} {_OF_SRUN}".split()}

# What is not passed on: to which of the programs, the options, why, and what to do instead. Of the first the plan is
# made: elsewhere they would contradict it.
_PLAN, _LEAVE_OUT = "It would contradict the plan.", "Leave it out."
_OWN_FLAGS = """
    account constraint cpus-per-task dependency exclude gpus-per-node job-name mail-type mail-user nodelist nodes
    ntasks-per-node partition qos reservation time
"""
_LOGS = "The logs of ranks and of the batch script are in the run's folder, where `logs`, `why` and restarts read them."
_REFUSED = (
    *(("sbatch srun", name, _PLAN, f"Use --{name}.") for name in _OWN_FLAGS.split()),
    ("sbatch srun", "container container-image", _PLAN, "Use --container-image."),
    ("sbatch srun", "container-mounts", _PLAN, "Use launch.container_mounts."),
    ("sbatch srun", "nodefile", _PLAN, "Use --nodelist."),
    ("sbatch srun", "ntasks", _PLAN, "Use --nodes and --ntasks-per-node."),
    ("sbatch srun", "ntasks-per-core ntasks-per-gpu ntasks-per-socket", _PLAN, "Use --ntasks-per-node."),
    ("sbatch srun", "signal", _PLAN, "Use launch.signal_seconds."),
    ("sbatch", "array", _PLAN, "Use --sweep (peers of a swarm: --array)."),
    ("sbatch", "gpus gpus-per-socket gpus-per-task", _PLAN, "Use --gpus-per-node."),
    ("sbatch", "cpus-per-gpu", _PLAN, "Use --cpus-per-task."),
    ("sbatch", "mem", _PLAN, "Use --mem."),
    ("sbatch", "no-requeue", _PLAN, "Use launch.requeue=false."),
    ("sbatch", "requeue", _PLAN, "Use launch.requeue."),
    ("sbatch", "test-only", "trainkit reads what sbatch says.", "Use --dry-run or --estimate."),
    ("sbatch", "wait", "trainkit calls sbatch by itself.", "Use --wait."),
    ("sbatch", "parsable quiet verbose wrap", "trainkit calls it by itself, and reads what it says.", _LEAVE_OUT),
    ("sbatch srun", "help usage version", "Nothing would be started.", _LEAVE_OUT),
    ("srun", "test-only", "Nothing would be started.", _LEAVE_OUT),
    ("sbatch srun", "output error open-mode", _LOGS, _LEAVE_OUT),
    ("srun", "label", _LOGS, _LEAVE_OUT),
    ("sbatch srun", "chdir", "A run goes on in the folder of its submission, where its paths are.", _LEAVE_OUT),
    ("sbatch srun", "clusters cluster-constraint", "Only the cluster of this machine is asked.", _LEAVE_OUT),
    ("sbatch srun", "uid gid", "A run is its submitter's: nobody else writes its folder.", _LEAVE_OUT),
    ("sbatch srun", "no-kill", "A node that is gone ends the job, which starts again without it.", _LEAVE_OUT),
    ("srun", "het-group jobid multi-prog no-allocate pty relative", "All ranks are started together.", _LEAVE_OUT),
    ("srun", "export", "The ranks get the variables of the batch script, and in them where they meet.", _LEAVE_OUT),
    ("srun", "kill-on-bad-exit", "A rank that dies ends the others, and the run starts again.", _LEAVE_OUT),
    ("srun", "wait", "Ranks end by themselves, each when it has written its part.", _LEAVE_OUT),
)
_HARMLESS = {("srun", "export"): ("ALL", "ALL,"), ("sbatch", "open-mode"): ("append",)}


def long_name(program: str, key: str) -> str:
    """The name of an option as it may be written: with underscores, or only a beginning of it."""
    name = key.replace("_", "-")
    known = _NAMES[program]
    if name in known:
        return name
    begun = [item for item in known if item.startswith(name)]
    return begun[0] if len(begun) == 1 else name


def objection(program: str, name: str, value: str) -> tuple[str, str] | None:
    """Why an option (by its long name) is not passed on, and what to do instead; None if it is."""
    if value and value.startswith(_HARMLESS.get((program, name), ())):
        return None
    rows = (
        (why, fix) for programs, names, why, fix in _REFUSED if program in programs.split() if name in names.split()
    )
    return next(rows, None)


# sbatch's own variables, which users set in their shell's profile. sbatch ranks them above the script's header, and
# below its flags.
_SAME = ("account", "constraint", "gpus_per_node", "gres", "job_name", "partition", "qos", "reservation")
_SETTINGS = {f"SBATCH_{name.upper()}": f"launch.{name}" for name in _SAME}
_SETTINGS |= {"SBATCH_MEM_PER_NODE": "launch.mem", "SBATCH_TIMELIMIT": "launch.time"}
_OTHER_NAMES = {
    "SBATCH_ARRAY_INX": "array", "SBATCH_DEBUG": "verbose", "SBATCH_REQ_SWITCH": "switches", "SBATCH_TIMELIMIT": "time",
    "SLURM_CLUSTERS": "clusters",
}  # fmt: skip
_WITHOUT_VALUE = ("ignore-pbs", "overcommit", "spread-job", "use-min-nodes")


def settings_of(env: Mapping[str, str]) -> tuple[list[tuple[str, str, Any]], list[str]]:
    """What sbatch's own variables say: each variable with the setting that it is and its value; and of those that are
    not passed on, why."""
    found: list[tuple[str, str, Any]] = []
    notes = []
    for name, text in sorted(env.items()):
        option = _OTHER_NAMES.get(name, name.removeprefix("SBATCH_").lower().replace("_", "-"))
        is_option = name in _OTHER_NAMES or (name.startswith("SBATCH_") and option in _NAMES["sbatch"])
        if not text or (name not in _SETTINGS and not is_option):
            continue
        if name == "SBATCH_GPUS_PER_NODE":
            kind, colon, count = text.rpartition(":")
            found.append((name, _SETTINGS[name], yaml.parse_value(count)))
            found += [(name, "launch.gpu_type", kind)] if colon else []
        elif name in _SETTINGS:
            found.append((name, _SETTINGS[name], text))
        elif (refused := objection("sbatch", option, text)) is not None:
            notes.append(f"Note: {name}={text} is not passed on. {' '.join(refused)}")
        else:
            if option == "switches" and (longest := env.get("SBATCH_WAIT4SWITCH")):
                text = f"{text}@{longest}"
            is_bare = option in _WITHOUT_VALUE or (option == "exclusive" and text not in ("user", "mcs"))
            found.append((name, "launch.sbatch", {option: "" if is_bare else text}))
    return found, notes
