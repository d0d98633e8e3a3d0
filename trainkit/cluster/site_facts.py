"""What is known of a site and does not change from day to day: written by ``jobs.cluster discover``, read back by name.

It stands below ``site:`` in a profile. `trainkit.cluster.validate` goes by it, so that a submission need not ask.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from trainkit.cluster.site import Node, Partition
from trainkit.config import yaml
from trainkit.config.loading import SITE, find_profile
from trainkit.config.slurm_options import slurm_time
from trainkit.errors import UserError

Dialect = Literal["gpus-per-node", "gres", "constraint"]


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
class Account:
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
    accounts: tuple[Account, ...] = ()
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
    """A partition as a profile keeps it."""
    limit = partition.max_time_min
    return PartitionFacts(
        partition.name,
        partition.default,
        partition.up,
        slurm_time(limit) if limit is not None else None,
        partition.max_nodes,
        partition.accounts,
        partition.qos,
        "" if partition.preempt_mode == "OFF" else partition.preempt_mode,
        tuple(_kinds(partition.nodes)),
    )


def to_profile(facts: SiteFacts) -> str:
    """Text of a new profile: what to ask for at this site, and below ``site:`` what was found."""
    chosen = next((item for item in facts.partitions if item.default), None)
    chosen = chosen or next((item for item in facts.partitions if item.up), None)
    launch: dict[str, object] = {"partition": chosen.name} if chosen else {}
    if facts.gpu_dialect != "gpus-per-node":
        launch["gpu_dialect"] = facts.gpu_dialect
    lines = [
        f"# {facts.cluster or 'This site'}, as `python -m jobs.cluster discover` found it.",
        "# Below launch: is what every job gets: any setting of launch may stand there, as account, setup, internet.",
        yaml.dump({"launch": launch}),
        _known(facts),
    ]
    return "\n".join(lines)


def renewed(text: str, facts: SiteFacts) -> str:
    """A profile's text with what is known of its site by now. Settings and comments stay as they are."""
    rest = re.sub(rf"^{SITE}:.*\n?(?:[ \t].*\n?|\n)*", "", text, flags=re.MULTILINE).replace(_HEADING, "").rstrip()
    return f"{rest}\n\n{_known(facts)}" if rest else _known(facts)


_HEADING = "# What is known of the site; jobs are checked against it before they are queued.\n"


def _known(facts: SiteFacts) -> str:
    return _HEADING + yaml.dump({SITE: _plain(facts)})


def read_facts(cluster: str) -> SiteFacts | None:
    """What the profile of that name, or in that file, knows of its site; None if it holds settings only.

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
        raise UserError(
            f"{path} cannot be read below '{SITE}' ({path}:{lines.get(f'{SITE}.{where}', lines[SITE])}).",
            why=f"{where}: {first['msg']}." if where else f"{first['msg']}.",
            fix="Correct it, or find it out anew: python -m jobs.cluster discover NAME --force.",
        ) from None


def _kinds(nodes: Iterable[Node]) -> Iterable[NodeKind]:
    counts: dict[NodeKind, int] = {}
    for node in nodes:
        kind = NodeKind(0, node.cpus, node.mem_mb, node.gpus, node.gpu_types, node.features)
        counts[kind] = counts.get(kind, 0) + 1
    return [dataclasses.replace(kind, count=count) for kind, count in counts.items()]


def _plain(value: object) -> object:
    """What differs from its default, as YAML writes it."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    found = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    defaults = {field.name: field.default for field in dataclasses.fields(value)}
    return {name: _plain(item) for name, item in found.items() if item != defaults[name]}
