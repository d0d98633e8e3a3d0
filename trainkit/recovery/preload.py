"""Imports of a rank, made ahead of it: by its keeper, and once for all ranks of a node."""

import importlib
from collections.abc import Mapping
from contextlib import suppress

from trainkit.cluster.ranks import RankEnv
from trainkit.common.process import share_cores, without_garbage_collection
from trainkit.config import plugins
from trainkit.config.schema import Config
from trainkit.run.events import Attempt

STATED = "IMPORTS"
"""Constant of a strategy's or a logger's file: the modules that it imports only where it is used."""


def preload(config: Config, env: Mapping[str, str]) -> None:
    """Import what trains a run, and say so where it takes long. Uses no device, and leaves no thread behind."""
    from trainkit.training.startup import Starting

    rank_env = RankEnv.from_mapping(env)
    share_cores()
    with Starting(speaks=rank_env.is_main, attempt=Attempt.named_in(env)) as starting:
        starting.at("load torch")
        with without_garbage_collection():
            from trainkit.training import experiment  # noqa: F401  # and with it torch

            for module in modules_of(config, rank_env):
                with suppress(ImportError):  # whoever needs it says so
                    importlib.import_module(module)
    starting.join()


def modules_of(config: Config, env: RankEnv) -> list[str]:
    """List the modules that a rank imports for its strategy and, the first one, for its loggers."""
    stated = []
    if env.world_size > 1:
        stated.append(plugins.stated("trainkit.distributed.strategies", config.strategy.name))
    if env.is_main:
        for name in config.monitor.loggers:
            stated.append(plugins.stated("trainkit.monitor", name))
    found: list[str] = []
    for constants in stated:
        found += constants.get(STATED, ())
    return found
