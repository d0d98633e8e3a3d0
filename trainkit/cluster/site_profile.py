"""The profile of a site: what was seen of its partitions, accounts and nodes.

It stands below ``site:`` in a cluster's file. `jobs.cluster discover` writes it, and the checks of a submission read it
there instead of asking the scheduler.
"""

import re
from collections import Counter
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from trainkit.cluster.site import Dialect, Partition
from trainkit.common import terminal
from trainkit.common.errors import UserError
from trainkit.config import yaml
from trainkit.config.loading import SITE
from trainkit.config.presets import find_profile
from trainkit.config.slurm_options import slurm_time

_HEADING = "# What is known of the site; jobs are checked against it before they are queued.\n"


@dataclass(frozen=True)
class NodeKind:
    """Nodes of a partition that are alike. Memory in MB; null where the site does not say."""

    count: int
    cpus: int
    mem_mb: int | None = None
    gpus: int = 0
    gpu_types: tuple[str, ...] = ()
    features: tuple[str, ...] = ()


@dataclass(frozen=True)
class PartitionFacts:
    """One partition: its limits, who may use it (empty: everybody), and its nodes by kind."""

    name: str
    default: bool = False
    up: bool = True
    max_time: str | None = None
    max_nodes: int | None = None
    accounts: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    preempt_mode: str = ""
    nodes: tuple[NodeKind, ...] = ()


@dataclass(frozen=True)
class ClusterAccount:
    """An account that this user may charge, where (empty: in every partition), and with which QOS."""

    name: str
    partition: str = ""
    qos: tuple[str, ...] = ()
    default: bool = False


@dataclass(frozen=True)
class Qos:
    """A quality of service and its limits, in SLURM's words."""

    name: str
    max_wall: str = ""
    max_tres_per_user: str = ""


@dataclass(frozen=True)
class SiteFacts:
    """A site. None and empty: not known, or not there; ``gaps`` says what could not be asked, and why."""

    cluster: str = ""
    version: str = ""
    gpu_dialect: Dialect = "gpus-per-node"
    partitions: tuple[PartitionFacts, ...] = ()
    accounts: tuple[ClusterAccount, ...] = ()
    qos: tuple[Qos, ...] = ()
    accounts_enforced: bool | None = None
    max_array_size: int | None = None
    kill_wait_seconds: int | None = None
    preemption: str = ""
    containers: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    shared_folders: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()


def facts_of(partition: Partition) -> PartitionFacts:
    """Return a partition as a profile keeps it."""
    limit = partition.max_time_min
    kinds = Counter((node.cpus, node.mem_mb, node.gpus, node.gpu_types, node.features) for node in partition.nodes)
    max_time = None if limit is None else slurm_time(limit)
    preempt_mode = "" if partition.preempt_mode == "OFF" else partition.preempt_mode
    return PartitionFacts(
        partition.name, partition.default, partition.up, max_time, partition.max_nodes, partition.accounts,
        partition.qos, preempt_mode, tuple(NodeKind(count, *kind) for kind, count in kinds.items()),
    )  # fmt: skip


def to_profile(facts: SiteFacts) -> str:
    """Write the text of a new profile: what to ask for at this site, and below ``site:`` what was found."""
    launch: dict[str, object] = {}
    for item in sorted(facts.partitions, key=lambda item: not item.default):
        if item.default or item.up:
            launch["partition"] = item.name
            break
    if facts.gpu_dialect != "gpus-per-node":
        launch["gpu_dialect"] = facts.gpu_dialect
    head = f"# {facts.cluster or 'This site'}, as `python -m jobs.cluster discover` found it."
    hint = "# Below launch: is what every job gets: any setting of launch, such as account, setup, internet."
    return "\n".join([head, hint, yaml.dump({"launch": launch}), _known(facts)])


def renewed(text: str, facts: SiteFacts) -> str:
    """Renew what a profile's text says of its site. Settings and comments stay as they are."""
    rest = re.sub(rf"^{SITE}:.*\n?(?:[ \t].*\n?|\n)*", "", text, flags=re.MULTILINE).replace(_HEADING, "").rstrip()
    return f"{rest}\n\n{_known(facts)}" if rest else _known(facts)


def _known(facts: SiteFacts) -> str:
    return _HEADING + yaml.dump({SITE: TypeAdapter(SiteFacts).dump_python(facts, mode="json", exclude_defaults=True)})


def read_facts(cluster: str) -> SiteFacts | None:
    """Read what the profile of that name, or in that file, knows of its site; None if it holds settings only.

    Raises UserError if there is no such profile, or its section ``site`` is damaged.
    """
    path = find_profile(cluster)
    values, lines = yaml.read(path)
    if not values.get(SITE):
        return None
    try:
        return TypeAdapter(SiteFacts).validate_python(values[SITE])
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        what = f"{path} cannot be read below '{SITE}' ({path}:{lines.get(f'{SITE}.{where}', lines[SITE])})."
        why = f"{where}: {first['msg']}." if where else f"{first['msg']}."
        fix = "Correct it, or examine the site again: python -m jobs.cluster discover NAME --force."
        raise UserError(what, why=why, fix=fix) from None


def lines(facts: SiteFacts) -> list[str]:
    """Lines of ``jobs.cluster show``: partitions as a table, the rest as in a profile, then what is not known."""
    below = []
    rows = [_row(partition) for partition in facts.partitions]
    if rows:
        below += terminal.table(rows[0], rows[1:])
    shown = {"cluster", "version", "partitions", "gaps"}
    rest = TypeAdapter(SiteFacts).dump_python(facts, mode="json", exclude=shown, exclude_defaults=True)
    if rest:
        below += yaml.dump(rest).splitlines()
    below += [f"not known   {gap}" for gap in facts.gaps]
    head = f"{facts.cluster or 'This site'}: SLURM {facts.version or 'of unknown version'}"
    return [head, *(f"  {line}" for line in below)]


def _row(partition: PartitionFacts) -> tuple[str, ...]:
    kinds = " + ".join(_kind(kind) for kind in partition.nodes) or "no nodes"
    remarks = []
    if partition.max_nodes:
        remarks.append(f"at most {partition.max_nodes} nodes a job")
    if partition.accounts:
        remarks.append(f"accounts {','.join(partition.accounts)}")
    if partition.qos:
        remarks.append(f"QOS {','.join(partition.qos)}")
    if partition.preempt_mode:
        remarks.append(f"preemption: {partition.preempt_mode.lower()}")
    if not partition.up:
        remarks.append("takes no jobs")
    name = f"{partition.name}*" if partition.default else partition.name
    return name, kinds, partition.max_time or "no time limit", ", ".join(remarks)


def _kind(kind: NodeKind) -> str:
    words = f"{kind.count} x {kind.cpus} CPUs"
    if kind.mem_mb:
        words += f", {kind.mem_mb / 1024:.0f} GB"
    if kind.gpus:
        named = " ".join(["/".join(kind.gpu_types), "GPU"]).lstrip()
        words += f", {terminal.plural(kind.gpus, named)}"
    return words
