"""Resources of a launch, one decision at a time: what was asked for, what the site has, and who decided."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from trainkit import terminal
from trainkit.accelerators import SHARES
from trainkit.config.checks import strategy_traits
from trainkit.config.loading import DEFAULT, Loaded, Source
from trainkit.config.slurm_options import slurm_time, time_minutes
from trainkit.errors import RefusedError, UserError, did_you_mean
from trainkit.schedulers.base import named
from trainkit.site.profile import Node, Partition, Site, gpus_asked

DERIVED = Source("derived")
FIXED = Source("trainkit")
_OTHER_WAYS = ("gpus", "G", "gpus-per-node", "gpus-per-task", "gpus-per-socket")
_MEGABYTES = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}


@dataclass(frozen=True)
class Decision:
    """A decided value, where it came from, and why."""

    name: str
    value: Any
    source: Source
    reason: str = ""


class Resources:
    """The decisions about one launch.

    Raises:
        UserError: the settings contradict one another.
        RefusedError: this site or machine does not have what is asked for.
    """

    def __init__(self, loaded: Loaded, site: Site) -> None:
        self._loaded, self._site, self._launch = loaded, site, loaded.config.launch
        self._strategy = strategy_traits(loaded.config.strategy.name)
        self.executor = self._decide_executor()
        self.batch = named(self.executor.value).batch
        """Whether it is a job of a scheduler with a queue."""
        self.partition = self._choose_partition() if site.scheduler == self.executor.value else None
        """The partition that the job will run in; None if the site does not tell."""
        self.nodes = self._decide_nodes()
        self.share = self._share_of_gpu() if self.batch and self._launch.runs_per_gpu > 1 else None
        """What asks for a part of a GPU; None for whole ones."""
        self.gpus = self._decide_gpus()
        self.tasks = self._decide_tasks()
        self.cpus = self._decide_cpus()
        self.memory = self._decide_memory()
        self.time = self._decide_time()

    def _source(self, name: str) -> Source:
        return self._loaded.source(f"launch.{name}")

    def given(self, name: str, value: Any, reason: str = "") -> Decision:
        """A value that follows from a setting of `launch`."""
        return Decision(name, value, self._source(name), reason)

    def _asked(self, name: str, reason: str = "") -> Decision:
        return self.given(name, getattr(self._launch, name), reason)

    def _refusal(self, name: str, what: str, *, why: str, fix: str) -> RefusedError:
        """The error for a setting of `launch` that this site or machine cannot give."""
        return RefusedError(f"{what} ({self._source(name)}).", why=why, fix=fix, key=f"launch.{name}")

    def _discovered(self) -> Source:
        return Source("discovered", f"partition {self.partition.name}" if self.partition else "")

    def _decide_executor(self) -> Decision:
        """Take the site's scheduler where there is one, unless another was asked for."""
        found = self._site.scheduler
        if self._launch.executor != "auto":
            return self._asked("executor")
        if found:
            return Decision("executor", found, Source("discovered", "sbatch"), f"{named(found).title} is here")
        reason = self._site.unknown or "there is no SLURM on this machine"
        return Decision("executor", "local", Source("discovered", "no sbatch"), reason)

    def _choose_partition(self) -> Partition | None:
        asked, names = self._launch.partition, [partition.name for partition in self._site.partitions]
        if (found := self._site.partition(asked)) is None:
            if asked is None or "," in asked or not names:
                return None
            fix = did_you_mean(asked, names, otherwise=f"Use --partition {names[0]}.")
            why = f"This site has: {', '.join(names)}."
            raise self._refusal("partition", f"Unknown partition '{asked}'", why=why, fix=fix)
        if found.groups and self._site.user_groups and not set(found.groups) & set(self._site.user_groups):
            what, fix = f"Partition '{found.name}' is not for you", "Use another --partition, or ask for membership."
            why = f"It lets in the Unix groups {', '.join(found.groups)}."
            raise self._refusal("partition", what, why=why, fix=fix)
        if not found.up:
            what, fix = f"Partition '{found.name}' takes no jobs now", "Use another --partition."
            raise self._refusal("partition", what, why="Its state is not UP.", fix=fix)
        return found

    def _decide_nodes(self) -> Decision:
        nodes, partition = self._launch.nodes, self.partition
        if self.executor.value == "debug":
            reason = "debug runs rank 0 of 1 in this process" + (f", not {nodes} nodes" if nodes > 1 else "")
            return Decision("nodes", 1, FIXED, reason)
        if self.executor.value == "local":
            return self._asked("nodes", f"{nodes} nodes are simulated on this machine" if nodes > 1 else "")
        if partition is None:
            return self._asked("nodes")
        total = len(partition.nodes)
        most = min(partition.max_nodes or total, total) if total else partition.max_nodes
        if nodes < (partition.min_nodes or 1):
            than, limit, why = "fewer", partition.min_nodes, f"Its jobs have at least {partition.min_nodes}."
        elif most is not None and nodes > most:
            allows = f" and allows {partition.max_nodes} per job" if partition.max_nodes else ""
            than, limit, why = "more", most, f"It has {total} nodes{allows}."
        else:
            return self._asked("nodes")
        what = f"{nodes} nodes are {than} than partition '{partition.name}' gives"
        raise self._refusal("nodes", what, why=why, fix=f"Use --nodes {limit}, or another --partition.")

    # GPUs are never asked for in two ways at once. SLURM 22.05 takes --gres=gpu:1 with --gpus-per-node=2 without a
    # word, gives the one, and then refuses the srun in it.

    def _decide_gpus(self) -> Decision:
        """Give the GPUs per node that were asked for, if they are there, else those that are there."""
        launch, site, nodes = self._launch, self._site, self.nodes.value
        name = "gres" if launch.gres is not None and gpus_asked(launch.gres) else "gpus_per_node"
        asked, source = gpus_asked(launch.gres or "") or launch.gpus_per_node, self._source(name)
        decided = Decision("gpus_per_node", asked, source, "trains on the CPU" if asked == 0 else "")
        is_one = self._strategy.ranks == "one" and self._strategy.gpus_per_rank == 1
        most_of_strategy = 1 if is_one or launch.runs_per_gpu > 1 else None
        if self.share is not None:
            return Decision("gpus_per_node", 1, self.share.source, "others share it")
        if self.batch and launch.gpu_dialect == "constraint":
            self._require_counted_feature(asked)
            return replace(decided, reason="by --constraint alone") if asked else decided
        if self.batch:
            return self._gpus_of_partition(decided, most_of_strategy)
        if self.executor.value == "debug":
            here = min(site.gpus, 1 if asked == "auto" else asked)
            return Decision("gpus_per_node", here, DERIVED, "one process uses one GPU")
        if asked == "auto":
            share = min(site.gpus // nodes, most_of_strategy or site.gpus)
            simulated = f" over {nodes} simulated nodes" if nodes > 1 else ""
            why = f"{site.gpus} GPUs here{simulated}" if site.gpus else "no GPU here, so it trains on the CPU"
            return Decision("gpus_per_node", share, Source("discovered", "nvidia driver"), why)
        if asked * nodes > site.gpus:
            visible = f"{site.gpus} of its GPUs are visible" if site.gpus else "no GPU is visible"
            no_slurm = "" if site.scheduler else ", and there is no SLURM here to find others"
            what = f"{asked * nodes} GPUs are asked for, and this machine does not have them"
            why = f"The run would be local, and {visible}{no_slurm}."
            fix = "Use --gpus-per-node 0 or the preset ddp_sim to train on the CPU, or submit from a login node."
            raise self._refusal(name, what, why=why, fix=fix)
        return decided

    def _share_of_gpu(self) -> Decision:
        """What asks for a run's share of a GPU, where the site has divided its GPUs."""
        count, found = self._launch.runs_per_gpu, [node.shares for node in self._nodes_of_type()]
        least = {kind: min((shares[kind] for shares in found if shares.get(kind)), default=0) for kind in SHARES}
        for kind, shares in least.items():
            if shares >= count and self._launch.gpus_per_node != 0:
                why = f"a GPU has {shares}, for {terminal.plural(count, 'run')}"
                return self.given("runs_per_gpu", f"{kind}:{shares // count}", why)
        what = f"{count} runs cannot share a GPU there"
        why = f"The site has divided its GPUs into {', '.join(f'{shares} {kind}' for kind, shares in least.items())}."
        fix = f"Use {max(least.values())} at most."
        if self._launch.gpus_per_node == 0:
            why, fix = "They train on the CPU, and jobs share nodes by their CPUs as it is.", "Leave it out."
        elif max(least.values()) < 2:
            why = "The site gives a GPU to one job, whole."
            fix = "Leave it out; docs/training.md has a script for such sites."
        raise self._refusal("runs_per_gpu", what, why=why, fix=fix)

    def _gpus_of_partition(self, decided: Decision, most_of_strategy: int | None) -> Decision:
        asked, nodes = decided.value, self._nodes_of_type()
        if asked == "auto":
            if (most := self._least(node.gpus for node in nodes if node.up)) is None:
                return Decision("gpus_per_node", 0, DEFAULT, "the partition's nodes are not known; set --gpus-per-node")
            count = min(most, most_of_strategy or most)
            why = "one process uses one GPU" if count < most else "what its nodes have"
            return Decision("gpus_per_node", count, self._discovered(), why)
        most = self._least(node.gpus for node in nodes)
        if most is not None and asked > most:
            what = f"{asked} GPUs per node are asked for on {terminal.plural(self.nodes.value, 'node')}"
            why = f"So many nodes of its partition have {f'{most} GPUs each at most' if most else 'no GPUs'}."
            fix = f"Use --gpus-per-node {most}{'' if most else ' to train on the CPU'}, or another --partition."
            raise self._refusal("gpus_per_node", what, why=why, fix=fix)
        return decided

    def _nodes_of_type(self) -> list[Node]:
        """The partition's nodes with the type of GPU that was asked for; RefusedError where it has none."""
        kind, nodes = self._launch.gpu_type, list(self.partition.nodes) if self.partition else []
        types = sorted({name for node in nodes for name in node.gpu_types})
        if kind is None or not types:
            return nodes
        if self.partition and kind not in types:
            what, why = f"Partition '{self.partition.name}' has no GPUs of type '{kind}'", ", ".join(types)
            fix = did_you_mean(kind, types, otherwise=f"Use launch.gpu_type={types[0]}, or another --partition.")
            raise self._refusal("gpu_type", what, why=f"Its nodes have: {why}.", fix=fix)
        return [node for node in nodes if kind in node.gpu_types]

    def _require_counted_feature(self, asked: Any) -> None:
        """Where GPUs are a feature of nodes, SLURM does not count them: somebody must say how many a node has."""
        if asked == "auto":
            what = "Nobody knows how many GPUs a node has (launch.gpus_per_node=auto)."
            why = f"This site asks for them by a feature ({self._source('gpu_dialect')}), which has no number."
            fix = "Set gpus_per_node in the site's profile, or give --gpus-per-node N."
            raise UserError(what, why=why, fix=fix, key="launch.gpus_per_node")
        if asked and self._launch.constraint is None:
            what = "launch.gpu_dialect=constraint needs the constraint."
            fix = "Set constraint in the site's profile, or give --constraint gpu."
            raise UserError(what, why="Nothing else would ask for GPUs.", fix=fix, key="launch.constraint")

    def gpu_directives(self) -> list[Decision]:
        """What asks for the GPUs, and for other generic resources: at most one of --gpus-per-node and --gres.

        Raises UserError where `launch.sbatch` asks for GPUs as well.
        """
        launch, gpus = self._launch, self.gpus
        for key, value in launch.sbatch.items():
            replaces_gres = key == "gres" and (gpus_asked(value) or launch.gres or launch.gpu_dialect == "gres")
            if key in _OTHER_WAYS or (replaces_gres and (gpus.value or gpus_asked(value))):
                what = f"GPUs are asked for in two ways: --gpus-per-node, and --sbatch {key}={value}."
                why = "SLURM takes both without a word, and the job's srun then fails or has other GPUs than planned"
                fix = "Give --gpus-per-node N alone, or --gres gpu:N where the site wants that."
                raise UserError(what, why=f"{why} ({self._source('sbatch')}).", fix=fix, key="launch.sbatch")
        own = [self._asked("gres")] if launch.gres is not None else []
        if self.share is not None:
            listed = ",".join(filter(None, (self.share.value, launch.gres)))
            return [replace(self.share, name="gres", value=listed)]
        if not gpus.value or launch.gpu_dialect == "constraint" or (launch.gres and gpus_asked(launch.gres)):
            return own
        count = f"{launch.gpu_type}:{gpus.value}" if launch.gpu_type else gpus.value
        if launch.gpu_dialect == "gpus-per-node":
            return [*own, replace(gpus, value=count)]
        # One list: of two --gres SLURM takes the last.
        listed = ",".join([f"gpu:{count}", *([launch.gres] if launch.gres else [])])
        return [Decision("gres", listed, gpus.source, gpus.reason)]

    def _decide_tasks(self) -> Decision:
        """Start one rank per GPU, or one on the CPU, unless asked otherwise."""
        asked, gpus = self._launch.ntasks_per_node, self.gpus.value
        if self.executor.value == "debug":
            return Decision("ntasks_per_node", 1, FIXED, "one process")
        if self._strategy.ranks == "one":
            return Decision("ntasks_per_node", 1, DEFAULT, f"{self._loaded.config.strategy.name} is one process")
        if asked is None:
            why = "one rank per GPU" if gpus else "one rank per node on the CPU"
            return Decision("ntasks_per_node", gpus or 1, DEFAULT, why)
        if gpus and asked > gpus:
            what = f"{asked} ranks per node cannot share {terminal.plural(gpus, 'GPU')}"
            fix = f"Use --ntasks-per-node {gpus}, or --gpus-per-node 0 to train on the CPU."
            raise self._refusal("ntasks_per_node", what, why="Every rank needs a GPU of its own.", fix=fix)
        return self._asked("ntasks_per_node", f"{gpus - asked} of {gpus} GPUs stay idle" if gpus > asked else "")

    def _decide_cpus(self) -> Decision:
        """Give each rank the CPUs that belong to its GPUs, unless asked otherwise."""
        asked, tasks, gpus = self._launch.cpus_per_task, self.tasks.value, self.gpus.value
        most = self._least(node.cpus for node in self.partition.nodes) if self.partition else None
        if asked is not None and most is not None and asked * tasks > most:
            what, why = f"{tasks} x {asked} CPUs per node are asked for", f"have {most} CPUs each at most"
            fewer = f" with --ntasks-per-node {most}" if tasks > most else ""
            fix = f"Use --cpus-per-task {max(most // tasks, 1)}{fewer}, or another --partition."
            raise self._refusal("cpus_per_task", what, why=f"So many nodes of its partition {why}.", fix=fix)
        if asked is not None or not self.batch:
            return self._asked("cpus_per_task", "" if asked else "what this machine has is shared")
        if not (owners := self._with_gpus()):
            why = "left to the site" + ("" if gpus else ": no GPUs to go by")
            return Decision("cpus_per_task", None, DEFAULT, why)
        # A node's CPUs in proportion to the GPUs taken: the rest is for whoever takes the other GPUs.
        parts = tasks * self._launch.runs_per_gpu
        share = min(node.cpus * gpus // (node.gpus * parts) for node in owners)
        why = f"{min(node.cpus for node in owners)} CPUs a node, by its GPUs"
        return Decision("cpus_per_task", max(share, 1), self._discovered(), why)

    def _decide_memory(self) -> Decision | None:
        """Give a node the memory that belongs to its GPUs, unless asked otherwise.

        None where it is left to the site, which gives jobs memory by its own rule.
        """
        launch, partition, gpus = self._launch, self.partition, self.gpus.value
        if not self.batch:
            return None
        if launch.mem is not None:
            asked = int(launch.mem.rstrip("KMGTB")) * _MEGABYTES[launch.mem.strip("0123456789B")]
            known = [node.mem_mb for node in partition.nodes if node.mem_mb is not None] if partition else []
            has = self._least(known) if partition and len(known) == len(partition.nodes) else None
            allowed = partition.max_mem_mb if partition else None
            most = min((limit for limit in (has, allowed) if limit is not None), default=asked)
            if asked > most:
                what = f"{launch.mem} of memory per node is asked for"
                why = f"So many nodes of its partition have {most} MB each at most."
                why = why if most == has else f"A job may have {most} MB of it in its partition."
                raise self._refusal("mem", what, why=why, fix=f"Use --mem {most}M, or another --partition.")
            return self._asked("mem")
        given_otherwise = {"mem-per-cpu", "mem-per-gpu", "mem"} & launch.sbatch.keys()
        if partition is None or partition.has_memory_default or given_otherwise:
            return None
        owners, parts = self._with_gpus(), launch.runs_per_gpu
        shares = [node.mem_mb * gpus // (node.gpus * parts) for node in owners if node.mem_mb is not None]
        if not shares:
            return None
        share = min(*shares, partition.max_mem_mb or shares[0])
        return Decision("mem", f"{share}M", self._discovered(), "by its GPUs")

    def _least(self, counts: Iterable[int]) -> int | None:
        """The number that as many nodes as are asked for all have at least; None where nothing is known."""
        best = sorted(counts, reverse=True)
        return best[min(self.nodes.value, len(best)) - 1] if best else None

    def _with_gpus(self) -> list[Node]:
        """The partition's nodes that have at least this many GPUs, of the type that was asked for."""
        gpus = self.gpus.value
        return [node for node in self._nodes_of_type() if node.gpus >= gpus] if gpus else []

    def _decide_time(self) -> Decision:
        time, partition = self._launch.time, self.partition
        limit = partition.max_time_min if partition else None
        if partition is None or limit is None or time_minutes(time) <= limit:
            return self._asked("time")
        longest = slurm_time(limit)
        if self._source("time").kind == "default":
            return Decision("time", longest, self._discovered(), "its MaxTime")
        what = f"--time {time} is over the limit of partition '{partition.name}'"
        why = f"Its MaxTime is {longest}; SLURM would leave the job pending for ever."
        fix = f"Use --time {longest}; the job is requeued at the limit and goes on where it was."
        raise self._refusal("time", what, why=why, fix=fix)
