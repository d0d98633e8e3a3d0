"""A simulated accelerator, so that mistakes that only a GPU shows are seen on a machine without one; see sim.py.

The process of the tests never has the device, as other tests run in it. Child processes have it, from ``plugin``.
"""

import os
from pathlib import Path

PROJECT = Path(__file__).parents[2]


def plugin(folder: Path) -> dict[str, str]:
    """Variables of the environment under which every Python process has the device as soon as it imports torch.

    ``folder`` gets a distribution with an entry point of the group torch.backends, which torch loads by itself.
    """
    metadata = folder / "trainkit_sim-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: trainkit-sim\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\nsim = tests.accelerator.sim:loaded\n")
    others = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(folder), str(PROJECT), *([others] if others else [])])
    return {"PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
