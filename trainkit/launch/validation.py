"""Everything that can be known before a job is queued, beyond what the plan itself decides.

``sbatch --test-only`` is no help: it takes 99 hours on a partition of one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from trainkit.cluster.site import Site
from trainkit.cluster.site_facts import SiteFacts, read_facts
from trainkit.cluster.validate import Request, require_access
from trainkit.cluster.validate_folders import doubtful, require_room, require_shared
from trainkit.config.loading import Loaded
from trainkit.errors import UserError
from trainkit.launch.plan import Plan


def validate(loaded: Loaded, plan: Plan, site: Site, folder: Path) -> list[str]:
    """Refuse what would fail, or wait for ever; what is only doubtful comes back as lines for the user.

    Raises RefusedError: account or QOS, folders that nodes do not see, no room for a run.
    """
    require_room(folder)
    if plan.executor != "slurm" or not site.slurm:
        return []
    launch, facts = loaded.config.launch, _facts(loaded)
    request = Request(plan.nodes, plan.gpus_per_node, plan.time_limit_seconds / 60)
    require_access(loaded, request, site.partition(launch.partition), facts)
    require_shared(folder, "The run folder", site, facts.shared_folders)
    places = [folder]
    own_environment = sys.prefix != sys.base_prefix and not (launch.environment or launch.container_image)
    if own_environment:  # Python's own folders are every machine's
        require_shared(Path(sys.prefix), "The virtual environment", site, facts.shared_folders)
        places.append(Path(sys.prefix))
    return [note for place in places if (note := doubtful(place, site, facts.shared_folders))]


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
