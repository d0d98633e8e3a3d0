"""Imports of a rank, made ahead of it: by its keeper, and once for all ranks of a node."""

import importlib
from collections.abc import Mapping
from contextlib import suppress

from trainkit.cluster.ranks import RankEnv
from trainkit.common.process import without_garbage_collection
from trainkit.config import plugins
from trainkit.config.schema import Config
from trainkit.run.events import Attempt

STATED = "IMPORTS"
"""Constant of a strategy's file: the modules that torch imports only where it is used."""


def preload(config: Config, env: Mapping[str, str]) -> None:
    """Import what trains a run, and say so where it takes long. Uses no device, and leaves no thread behind."""
    from trainkit.training.startup import Starting

    is_main = RankEnv.from_mapping(env).is_main
    with Starting(speaks=is_main, attempt=Attempt.named_in(env)) as starting:
        starting.at("load torch")
        load_torch(config)
    starting.join()


def load_torch(config: Config) -> None:
    """Import what trains a run; loggers are opened beside the training."""
    with without_garbage_collection():
        from trainkit.training import experiment  # noqa: F401  # and with it torch

        constants = plugins.stated("trainkit.distributed.strategies", config.strategy.name)
        for module in constants.get(STATED, ()):
            with suppress(ImportError):  # another version of torch does without
                importlib.import_module(module)
