"""Resources of a launch, one decision at a time: what was asked for, what the site has, and who decided."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

from trainkit.cluster.plan import Decision
from trainkit.cluster.scheduler import named
from trainkit.cluster.site import ComputeNode, Partition, Site, gpus_asked
from trainkit.common import terminal
from trainkit.common.accelerators import SHARES
from trainkit.common.errors import RefusedError, UserError, did_you_mean
from trainkit.config.checks import strategy_traits
from trainkit.config.layers import DEFAULT
from trainkit.config.loading import Loaded
from trainkit.config.slurm_options import slurm_time, time_minutes
from trainkit.config.source import Source

DERIVED = Source("derived")
FIXED = Source("trainkit")
OPTIONS_OF_QUEUE = (
    "partition", "account", "qos", "constraint", "nodelist", "exclude", "reservation", "dependency", "mail_user",
    "mail_type",
)  # fmt: skip
"""Settings that become options of sbatch, by the same names."""
_OF_QUEUE = (*OPTIONS_OF_QUEUE, "sbatch", "srun", "setup", "modules", "environment")
"""Settings of jobs that wait in a queue; ranks on this machine start without them."""
_OF_SHARES = ("mem", "cpus_per_task", "gpu_type")
"""Settings for a job's share of a node; ranks on this machine share all of it."""
_OTHER_WAYS = ("gpus", "G", "gpus-per-node", "gpus-per-task", "gpus-per-socket")
_MEGABYTES = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}


def without_use(loaded: Loaded, *kinds: str) -> list[str]:
    """List settings from these kinds of sources that ask something of a queue, and so have no effect on this machine,
    each as it was written."""
    launch = loaded.config.launch
    names = list(_OF_QUEUE)
    if not gpus_asked(launch.gres or ""):
        names.append("gres")
    found = []
    for name in names:
        source = loaded.source(f"launch.{name}")
        if not getattr(launch, name) or source.kind not in kinds:
            continue
        if source.kind == "file":
            found.append(f"{source.where.rpartition(':')[0]}: {name}")
        else:
            found.append(source.where)
    return list(dict.fromkeys(found))


def shares_without_use(loaded: Loaded) -> list[str]:
    """List the shares of a node that were asked for by flags and settings, as they were written."""
    sources = [loaded.source(f"launch.{name}") for name in _OF_SHARES]
    return [source.where for source in sources if source.kind in ("flag", "override")]


class Resources:
    """The decisions about one launch.

    Raises:
        UserError: the settings contradict one another.
        RefusedError: this site or machine does not have what is asked for.
    """

    def __init__(self, loaded: Loaded, site: Site) -> None:
        self._loaded = loaded
        self._site = site
        self._launch = loaded.config.launch
        self._strategy = strategy_traits(loaded.config.strategy.name)
        self.executor = self._decide_executor()
        self.batch = named(self.executor.value).batch
        """True for a job of a scheduler with a queue."""
        self.partition: Partition | None = None
        """The partition that the job will run in; None if the site does not tell."""
        if site.scheduler == self.executor.value:
            self.partition = self._choose_partition()
        self.nodes = self._decide_nodes()
        self.share: Decision | None = None
        """The generic resource that is a part of a GPU; None for whole ones."""
        if self.batch and self._launch.runs_per_gpu > 1:
            self.share = self._share_of_gpu()
        self.gpus = self._decide_gpus()
        self.tasks = self._decide_tasks()
        self.cpus = self._decide_cpus()
        self.memory = self._decide_memory()
        self.time = self._decide_time()

    def _source(self, name: str) -> Source:
        return self._loaded.source(f"launch.{name}")

    def given(self, name: str, value: Any, reason: str = "") -> Decision:
        """Decide a value that follows from a setting of `launch`."""
        return Decision(name, value, self._source(name), reason)

    def _asked(self, name: str, reason: str = "") -> Decision:
        return self.given(name, getattr(self._launch, name), reason)

    def _refusal(self, name: str, what: str, why: str, fix: str) -> RefusedError:
        """The error for a setting of `launch` that this site or machine cannot give."""
        return RefusedError(f"{what} ({self._source(name)}).", why=why, fix=fix, key=f"launch.{name}")

    def _discovered(self) -> Source:
        if self.partition is None:
            return Source("discovered")
        return Source("discovered", f"partition {self.partition.name}")

    def _decide_executor(self) -> Decision:
        """Take the site's scheduler where there is one, unless another was asked for."""
        found = self._site.scheduler
        if self._launch.executor != "auto":
            return self._asked("executor")
        if found:
            return Decision("executor", found, Source("discovered", "sbatch"), f"{named(found).title} is here")
        self._refuse_what_is_for_slurm()
        reason = self._site.unknown or "there is no SLURM on this machine"
        return Decision("executor", "local", Source("discovered", "no sbatch"), reason)

    def _refuse_what_is_for_slurm(self) -> None:
        """Refuse to train on this machine, which may be a login node, what somebody has just meant for a queue.

        A preset, or a run from elsewhere, may name a partition and train on a laptop all the same.
        """
        asked = without_use(self._loaded, "flag", "override")
        if self._source("cluster").kind == "flag" and self._launch.cluster is not None:
            asked.append("--cluster")
        variables = set()
        for key, source in self._loaded.sources.items():
            if key.startswith("launch.") and source.kind == "environment" and not source.where.startswith("SLURM_"):
                variables.add(source.where)
        asked += sorted(variables)
        if self._site.expected:
            asked.append(self._site.expected)
        if not asked:
            return
        verb = "is" if len(asked) == 1 else "are"
        missing = self._site.unknown.rstrip(".") or "There is no sbatch on the PATH"
        by = "Set SLURM_CONF" if self._site.unknown else "Load SLURM's programs (often `module load slurm`)"
        raise RefusedError(
            f"{', '.join(asked)} {verb} for SLURM, but this machine has none.",
            why=f"{missing}, so the run would train here.",
            fix=f"{by}, or add --executor local to train here without it.",
            key="launch.executor",
        )

    def _choose_partition(self) -> Partition | None:
        asked = self._launch.partition
        names = [partition.name for partition in self._site.partitions]
        found = self._site.partition(asked)
        if found is None:
            if asked is None or "," in asked or not names:
                return None
            fix = did_you_mean(asked, names, otherwise=f"Use --partition {names[0]}.")
            why = f"This site has: {', '.join(names)}."
            raise self._refusal("partition", f"Unknown partition '{asked}'", why, fix)
        if not found.up:
            what = f"Partition '{found.name}' accepts no jobs now"
            raise self._refusal("partition", what, "Its state is not UP.", "Use another --partition.")
        return found

    def _decide_nodes(self) -> Decision:
        nodes = self._launch.nodes
        partition = self.partition
        if self.executor.value == "debug":
            reason = "debug runs rank 0 of 1 in this process"
            if nodes > 1:
                reason += f", not {nodes} nodes"
            return Decision("nodes", 1, FIXED, reason)
        if self.executor.value == "local" and nodes > 1:
            return self._asked("nodes", f"{nodes} nodes are simulated on this machine")
        if self.executor.value == "local" or partition is None:
            return self._asked("nodes")
        spare = self._launch.spare_nodes
        nodes += spare
        fewest = partition.min_nodes or 1
        most = min(filter(None, (partition.max_nodes, len(partition.nodes))), default=max(nodes, fewest))
        if nodes < fewest or nodes > most:
            what = f"{nodes} nodes are not possible in partition '{partition.name}'"
            limit = max(min(max(nodes, fewest), most) - spare, 1)
            why = f"It has {len(partition.nodes)} nodes, and a job may use {fewest} to {most} of them."
            fix = f"Use --nodes {limit}, or another --partition."
            if spare:
                why += f" {terminal.plural(spare, 'node')} would be spare ({self._source('spare_nodes')})."
                fix = f"Use fewer --spare-nodes, --nodes {limit}, or another --partition."
            raise self._refusal("nodes", what, why, fix)
        return self._asked("nodes")

    # GPUs are never asked for in two ways at once. SLURM 22.05 takes --gres=gpu:1 with --gpus-per-node=2 without a
    # word, gives the one, and then refuses the srun in it.

    def _decide_gpus(self) -> Decision:
        """Give the GPUs per node that were asked for, if they are there, else those that are there."""
        launch = self._launch
        site = self._site
        nodes = self.nodes.value
        name = "gpus_per_node"
        asked: Any = launch.gpus_per_node
        if launch.gres is not None and gpus_asked(launch.gres):
            name = "gres"
            asked = gpus_asked(launch.gres)
        decided = Decision("gpus_per_node", asked, self._source(name))
        if asked == 0:
            decided = replace(decided, reason="trains on the CPU")
        most_of_strategy = None
        if launch.runs_per_gpu > 1 or (self._strategy.ranks == "one" and self._strategy.gpus_per_rank == 1):
            most_of_strategy = 1
        if self.share is not None:
            return Decision("gpus_per_node", 1, self.share.source, "others share it")
        if self.batch and launch.gpu_dialect == "constraint":
            self._require_counted_feature(asked)
            if asked:
                decided = replace(decided, reason="by --constraint alone")
            return decided
        if self.batch:
            return self._gpus_of_partition(decided, most_of_strategy)
        if self.executor.value == "debug":
            here = min(site.gpus, 1 if asked == "auto" else asked)
            return Decision("gpus_per_node", here, DERIVED, "one process uses one GPU")
        if asked == "auto":
            share = min(site.gpus // nodes, most_of_strategy or site.gpus)
            why = f"{site.gpus} GPUs here"
            if not site.gpus:
                why = "no GPU here, so it trains on the CPU"
            elif nodes > 1:
                why += f" over {nodes} simulated nodes"
            return Decision("gpus_per_node", share, Source("discovered", "nvidia driver"), why)
        if asked * nodes > site.gpus:
            what = f"{asked * nodes} GPUs were requested, but this machine does not have them"
            why = f"The run would be local, and it sees {terminal.plural(site.gpus, 'GPU')}."
            fix = "Use --gpus-per-node 0 or the preset ddp_sim to train on the CPU, or submit from a login node."
            raise self._refusal(name, what, why, fix)
        return decided

    def _share_of_gpu(self) -> Decision:
        """Choose the generic resource that is a run's share of a GPU, where the site has divided its GPUs."""
        count = self._launch.runs_per_gpu
        what = f"{count} runs cannot share a GPU there"
        if self._launch.gpus_per_node == 0:
            why = "They train on the CPU, and jobs share the CPUs of nodes anyway."
            raise self._refusal("runs_per_gpu", what, why, "Leave it out.")
        nodes = self._nodes_of_type()
        most = 0
        for kind in SHARES:
            least = min((node.shares[kind] for node in nodes if node.shares.get(kind)), default=0)
            if least >= count:
                why = f"a GPU has {least}, for {terminal.plural(count, 'run')}"
                return self.given("runs_per_gpu", f"{kind}:{least // count}", why)
            most = max(most, least)
        why = f"The site has divided its GPUs into {most} shares."
        fix = f"Use {most} at most."
        if most < 2:
            why = "The site gives each GPU to one job only."
            fix = "Omit it; docs/training.md has a script for such sites."
        raise self._refusal("runs_per_gpu", what, why, fix)

    def _gpus_of_partition(self, decided: Decision, most_of_strategy: int | None) -> Decision:
        asked = decided.value
        nodes = self._nodes_of_type()
        if asked == "auto":
            most = self._least(node.gpus for node in nodes if node.up)
            if most is None:
                return Decision("gpus_per_node", 0, DEFAULT, "the partition's nodes are not known; set --gpus-per-node")
            count = min(most, most_of_strategy or most)
            why = "one process uses one GPU" if count < most else "what its nodes have"
            return Decision("gpus_per_node", count, self._discovered(), why)
        most = self._least(node.gpus for node in nodes)
        if most is not None and asked > most:
            what = f"{asked} GPUs per node were requested on {terminal.plural(self.nodes.value, 'node')}"
            why = f"That many nodes of its partition have at most {most} GPUs each."
            raise self._refusal("gpus_per_node", what, why, f"Use --gpus-per-node {most}, or another --partition.")
        return decided

    def _nodes_of_type(self) -> list[ComputeNode]:
        """The partition's nodes with the type of GPU that was asked for; RefusedError where it has none."""
        kind = self._launch.gpu_type
        if self.partition is None:
            return []
        nodes = list(self.partition.nodes)
        types = sorted(set(chain.from_iterable(node.gpu_types for node in nodes)))
        if kind is None or not types:
            return nodes
        if kind not in types:
            what = f"Partition '{self.partition.name}' has no GPUs of type '{kind}'"
            why = ", ".join(types)
            fix = did_you_mean(kind, types, otherwise=f"Use launch.gpu_type={types[0]}, or another --partition.")
            raise self._refusal("gpu_type", what, f"Its nodes have: {why}.", fix)
        return [node for node in nodes if kind in node.gpu_types]

    def _require_counted_feature(self, asked: Any) -> None:
        """Refuse GPUs as a feature of nodes without a number: SLURM does not count them, so somebody must."""
        if asked == "auto":
            what = "The number of GPUs per node is unknown (launch.gpus_per_node=auto)."
            why = f"This site requests them by a feature ({self._source('gpu_dialect')}), which does not give a number."
            fix = "Set gpus_per_node in the site's profile, or give --gpus-per-node N."
            raise UserError(what, why=why, fix=fix, key="launch.gpus_per_node")
        if asked and self._launch.constraint is None:
            what = "launch.gpu_dialect=constraint needs the constraint."
            fix = "Set constraint in the site's profile, or give --constraint gpu."
            raise UserError(what, why="Nothing else would request GPUs.", fix=fix, key="launch.constraint")

    def gpu_directives(self) -> list[Decision]:
        """List the directives for GPUs and other generic resources: at most one of --gpus-per-node and --gres.

        Raises UserError where `launch.sbatch` asks for GPUs as well.
        """
        launch = self._launch
        gpus = self.gpus
        for key, value in launch.sbatch.items():
            replaces_gres = key == "gres" and (gpus_asked(value) or launch.gres or launch.gpu_dialect == "gres")
            if key in _OTHER_WAYS or (replaces_gres and (gpus.value or gpus_asked(value))):
                what = f"GPUs are requested in two ways: --gpus-per-node, and --sbatch {key}={value}."
                why = "SLURM takes both without a word, and the job's srun then fails or has other GPUs than planned"
                fix = "Give --gpus-per-node N alone, or --gres gpu:N where the site wants that."
                raise UserError(what, why=f"{why} ({self._source('sbatch')}).", fix=fix, key="launch.sbatch")
        if self.share is not None:
            listed = ",".join(filter(None, (self.share.value, launch.gres)))
            return [replace(self.share, name="gres", value=listed)]
        own = []
        if launch.gres is not None:
            own.append(self._asked("gres"))
        if not gpus.value or launch.gpu_dialect == "constraint" or gpus_asked(launch.gres or ""):
            return own
        count = gpus.value
        if launch.gpu_type:
            count = f"{launch.gpu_type}:{count}"
        if launch.gpu_dialect == "gpus-per-node":
            return [*own, replace(gpus, value=count)]
        # One list: of two --gres SLURM takes the last.
        listed = ",".join(filter(None, (f"gpu:{count}", launch.gres)))
        return [Decision("gres", listed, gpus.source, gpus.reason)]

    def _decide_tasks(self) -> Decision:
        """Start one rank per GPU, or one on the CPU, unless asked otherwise."""
        asked = self._launch.ntasks_per_node
        gpus = self.gpus.value
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
            raise self._refusal("ntasks_per_node", what, "Every rank needs a GPU of its own.", fix)
        if gpus > asked:
            return self._asked("ntasks_per_node", f"{gpus - asked} of {gpus} GPUs stay idle")
        return self._asked("ntasks_per_node")

    def _decide_cpus(self) -> Decision:
        """Give each rank the CPUs that belong to its GPUs, unless asked otherwise."""
        asked = self._launch.cpus_per_task
        tasks = self.tasks.value
        gpus = self.gpus.value
        most = None
        if self.partition is not None:
            most = self._least(node.cpus for node in self.partition.nodes)
        if asked is not None and most is not None and asked * tasks > most:
            what = f"{tasks} x {asked} CPUs per node were requested"
            why = f"That many nodes of its partition have at most {most} CPUs each."
            fix = f"Use --cpus-per-task {most // tasks}, or another --partition."
            if tasks > most:
                fix = f"Use --cpus-per-task 1 with --ntasks-per-node {most}, or another --partition."
            raise self._refusal("cpus_per_task", what, why, fix)
        if asked is not None:
            return self._asked("cpus_per_task")
        if not self.batch:
            return self._asked("cpus_per_task", "what this machine has is shared")
        owners = self._with_gpus()
        if not owners:
            return Decision("cpus_per_task", None, DEFAULT, "left to the site")
        # A node's CPUs in proportion to the GPUs taken: the rest is for whoever takes the other GPUs.
        parts = tasks * self._launch.runs_per_gpu
        share = min(node.cpus * gpus // (node.gpus * parts) for node in owners)
        why = f"{min(node.cpus for node in owners)} CPUs a node, by its GPUs"
        return Decision("cpus_per_task", max(share, 1), self._discovered(), why)

    def _decide_memory(self) -> Decision | None:
        """Give a node the memory that belongs to its GPUs, unless asked otherwise.

        None where it is left to the site, which gives jobs memory by its own rule.
        """
        launch = self._launch
        partition = self.partition
        gpus = self.gpus.value
        if not self.batch:
            return None
        if launch.mem is not None:
            if partition is not None:
                self._require_memory(partition, launch.mem)
            return self._asked("mem")
        given_otherwise = {"mem-per-cpu", "mem-per-gpu", "mem"} & launch.sbatch.keys()
        if partition is None or partition.has_memory_default or given_otherwise:
            return None
        owners = self._with_gpus()
        parts = launch.runs_per_gpu
        shares = [node.mem_mb * gpus // (node.gpus * parts) for node in owners if node.mem_mb is not None]
        if not shares:
            return None
        share = min(*shares, partition.max_mem_mb or shares[0])
        return Decision("mem", f"{share}M", self._discovered(), "by its GPUs")

    def _require_memory(self, partition: Partition, mem: str) -> None:
        """Refuse more memory than so many nodes of the partition have, or than it gives to a job."""
        asked = int(mem.rstrip("KMGTB")) * _MEGABYTES[mem.strip("0123456789B")]
        known = [node.mem_mb for node in partition.nodes if node.mem_mb is not None]
        most = partition.max_mem_mb
        if len(known) == len(partition.nodes):
            most = min(filter(None, (most, self._least(known))), default=None)
        if most is not None and asked > most:
            why = f"Its partition gives a job on that many nodes at most {most} MB each."
            fix = f"Use --mem {most}M, or another --partition."
            raise self._refusal("mem", f"{mem} of memory per node was requested", why, fix)

    def _least(self, counts: Iterable[int]) -> int | None:
        """Return the number that as many nodes as are asked for all have at least; None where nothing is known."""
        best = sorted(counts, reverse=True)
        if not best:
            return None
        place: int = min(self.nodes.value + self._launch.spare_nodes, len(best)) - 1
        return best[place]

    def _with_gpus(self) -> list[ComputeNode]:
        """List the partition's nodes that have at least this many GPUs, of the type that was asked for."""
        gpus = self.gpus.value
        if not gpus:
            return []
        return [node for node in self._nodes_of_type() if node.gpus >= gpus]

    def _decide_time(self) -> Decision:
        time = self._launch.time
        partition = self.partition
        if partition is None or partition.max_time_min is None or time_minutes(time) <= partition.max_time_min:
            return self._asked("time")
        longest = slurm_time(partition.max_time_min)
        if self._source("time").kind == "default":
            return Decision("time", longest, self._discovered(), "its MaxTime")
        what = f"--time {time} is over the limit of partition '{partition.name}'"
        why = f"Its MaxTime is {longest}; SLURM would leave the job pending for ever."
        fix = f"Use --time {longest}; the job is requeued at the limit and continues."
        raise self._refusal("time", what, why, fix)
