"""Everything that can be known before a job is queued, beyond what the plan itself decides.

``sbatch --test-only`` is no help: it takes 99 hours on a partition of one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from trainkit.config.loading import Loaded
from trainkit.errors import UserError
from trainkit.launch.needed import require_container, require_environment
from trainkit.launch.plan import Plan
from trainkit.site.limits import Request, doubtful, require_access, require_room, require_shared
from trainkit.site.profile import Site, SiteFacts, read_facts


def validate(loaded: Loaded, plan: Plan, site: Site, folder: Path, cwd: Path) -> list[str]:
    """Refuse what would fail, or wait for ever; what is only doubtful comes back as lines for the user.

    Args:
        folder: of the run, or of the sweep.
        cwd: the folder of the submission, where the job runs.

    Raises RefusedError: account or QOS, folders that nodes do not see, no room for a run, an environment or a
    container's image that is not there.
    """
    require_room(folder)
    if plan.executor != "slurm" or not site.slurm:
        return []
    launch, facts = loaded.config.launch, _facts(loaded)
    request = Request(plan.nodes, plan.gpus_per_node, plan.time_limit_seconds / 60)
    require_access(loaded, request, site.partition(launch.partition), facts)
    require_environment(loaded, cwd)
    if plan.container is not None:
        require_container(loaded, plan.container, facts)
    places = {"The run folder": folder, "The folder of the submission": cwd}
    data = (cwd / Path(loaded.config.data.root).expanduser()).absolute()
    if data.is_dir():
        places["The data's folder"] = data
    own_environment = sys.prefix != sys.base_prefix and not (launch.environment or launch.container_image)
    if own_environment:  # Python's own folders are every machine's
        places["The virtual environment"] = Path(sys.prefix)
    for what, place in places.items():
        require_shared(place, what, site, facts.shared_folders)
    notes = [note for place in dict.fromkeys(places.values()) if (note := doubtful(place, site, facts.shared_folders))]
    if not launch.sbatch.get("export", "ALL").startswith("ALL") or "export-file" in launch.sbatch:
        notes.append("Note: with such an --export the job does not get the variables of this shell, keys among them.")
    return [*notes, *_idle_gpus(loaded, plan, site), *loaded.notes]


def _idle_gpus(loaded: Loaded, plan: Plan, site: Site) -> list[str]:
    """A word to who has not asked for the CPU, and would train on it while other partitions have GPUs."""
    here = site.partition(loaded.config.launch.partition)
    if plan.gpus_per_node or loaded.config.launch.gpus_per_node != "auto" or here is None:
        return []
    others = [item.name for item in site.partitions if item.up and any(node.gpus for node in item.nodes)]
    if not others:
        return []
    where = f"--partition {others[0]}" + (f" (or {', '.join(others[1:])})" if others[1:] else "")
    return [f"Note: partition '{here.name}' has no GPUs, so this trains on the CPU; {where} has some."]


def _facts(loaded: Loaded) -> SiteFacts:
    cluster = loaded.config.launch.cluster
    if cluster is None:
        return SiteFacts()
    try:
        return read_facts(cluster) or SiteFacts()
    except UserError:
        if loaded.source("launch.cluster").kind == "file":  # a run's own configuration outlives its site's profile
            return SiteFacts()
        raise
