"""hivemind without torch, for whoever only reads what a swarm has published.

hivemind's packages import all of hivemind as soon as anything of them is imported, and that imports torch: seconds for
a table. Its modules that speak to a DHT need none of it. So the packages are put up here without their ``__init__``,
and give what other modules ask of them from the light ones.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from trainkit.errors import RefusedError

# Names that light modules take from a package, and where these are.
_FROM = {
    "hivemind.utils": {
        "MSGPackSerializer": "serializer",
        "SerializerBase": "serializer",
        "get_logger": "logging",
        "get_dht_time": "timed_storage",
        "DHTExpiration": "timed_storage",
        "TimedStorage": "timed_storage",
        "ValueWithExpiration": "timed_storage",
    },
    "hivemind.dht": {},
    "hivemind": {},
}


class _Package(ModuleType):
    def __getattr__(self, name: str) -> Any:
        where = _FROM[self.__name__].get(name)
        if where is None:
            raise AttributeError(f"{self.__name__}.{name} is not of the light ones")
        return getattr(importlib.import_module(f"{self.__name__}.{where}"), name)


def put_up_packages() -> None:
    """Call it before anything of hivemind is imported, in a process that will not train.

    Raises RefusedError where there is no hivemind.
    """
    if "hivemind" in sys.modules:
        return
    spec = importlib.util.find_spec("hivemind")
    if spec is None or not spec.submodule_search_locations:
        raise RefusedError(
            "Looking at a swarm needs hivemind.",
            why="It is not installed here; it exists for Linux.",
            fix="pip install hivemind",
        )
    # As in `processes.require_hivemind`: its loggers print tracebacks for what is normal.
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")
    folder = Path(next(iter(spec.submodule_search_locations)))
    for name in sorted(_FROM):  # hivemind itself first
        package = _Package(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
