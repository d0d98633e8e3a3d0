"""What is known of a site, as lines for a person."""

from __future__ import annotations

from trainkit.cluster.site_facts import NodeKind, PartitionFacts, SiteFacts

_HOW = {
    "gpus-per-node": "--gpus-per-node=N",
    "gres": "--gres=gpu:N",
    "constraint": "--constraint alone",
}


def lines(facts: SiteFacts) -> list[str]:
    """The whole of ``jobs.cluster show``."""
    found = [f"{facts.cluster or 'This site'}: SLURM {facts.version or 'of unknown version'}"]
    found += _table([_row(partition) for partition in facts.partitions])
    accounts = [_account(item.name, item.partition, item.qos, item.default) for item in facts.accounts]
    limits = [f"{item.name}: {', '.join(filter(None, (item.max_wall, item.max_tres_per_user)))}" for item in facts.qos
              if item.max_wall or item.max_tres_per_user]  # fmt: skip
    enforced = {None: "", True: "", False: "; not enforced"}[facts.accounts_enforced]
    said = {
        "GPUs by": _HOW[facts.gpu_dialect],
        "accounts": "; ".join(accounts) + enforced if accounts else "",
        "QOS limits": "; ".join(limits),
        "arrays": f"up to {facts.max_array_size} tasks" if facts.max_array_size else "",
        "KillWait": f"{facts.kill_wait_seconds} s" if facts.kill_wait_seconds is not None else "",
        "preemption": facts.preemption,
        "containers": ", ".join(facts.containers),
        "modules": " ".join(facts.modules),
        "shared": " ".join(facts.shared_folders),
    }
    found += [f"  {name:11} {value}" for name, value in said.items() if value]
    return found + [f"  not known   {gap}" for gap in facts.gaps]


def _row(partition: PartitionFacts) -> tuple[str, ...]:
    kinds = " + ".join(_kind(kind) for kind in partition.nodes) or "no nodes"
    who = [f"accounts {','.join(partition.accounts)}"] if partition.accounts else []
    who += [f"QOS {','.join(partition.qos)}"] if partition.qos else []
    who += [f"preemption: {partition.preempt_mode.lower()}"] if partition.preempt_mode else []
    limit = partition.max_time or "no time limit"
    most = f"at most {partition.max_nodes} nodes a job" if partition.max_nodes else ""
    up = "" if partition.up else "takes no jobs"
    name = partition.name + "*" * partition.default
    return name, kinds, limit, ", ".join(filter(None, (most, *who, up)))


def _kind(kind: NodeKind) -> str:
    memory = f", {kind.mem_mb / 1024:.0f} GB" if kind.mem_mb else ""
    name = f" {'/'.join(kind.gpu_types)}" if kind.gpu_types else ""
    gpus = f", {kind.gpus}{name} GPU{'s' * (kind.gpus > 1)}" if kind.gpus else ""
    return f"{kind.count} x {kind.cpus} CPUs{memory}{gpus}"


def _account(name: str, partition: str, qos: tuple[str, ...], default: bool) -> str:
    where = f" in {partition}" if partition else ""
    return f"{name}{'*' * default}{where}" + (f" (QOS {', '.join(qos)})" if qos else "")


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)] + [0]
    return [
        "  " + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
