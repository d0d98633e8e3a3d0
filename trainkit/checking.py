"""Whether what a configuration names is there: data, model, task, strategy, loggers, their options. Without torch."""

from __future__ import annotations

from pathlib import Path

from trainkit import plugins
from trainkit.config.checks import check_strategy
from trainkit.config.components import check_optimizer, check_schedule, check_task
from trainkit.config.loading import Loaded
from trainkit.config.schema import Config
from trainkit.data import check_data, train_size
from trainkit.data.base import steps_per_epoch
from trainkit.errors import UserError
from trainkit.models import TIMM_SOURCES, check_model
from trainkit.run.secrets import refuse_settings


def check(loaded: Loaded) -> None:
    """Refuse names, options and values that would fail only once the run starts.

    Raises UserError that names the setting and where it was written.
    """
    config = loaded.config
    with loaded.pointing_at_sources():
        _check_own_code(config)
        check_data(config.data)
        if (images := train_size(config.data)) is not None:
            steps_per_epoch(images, config.train.global_batch_size)
        check_model(config.model)
        check_task(config)
        _check_weights(config)
        strategy = config.strategy
        plugins.check_options("trainkit.strategies", strategy.name, strategy.options, where="strategy")
        check_strategy(config)
        check_optimizer(config)
        check_schedule(config.schedule)
        for logger in config.monitor.loggers:
            plugins.check_options("trainkit.monitor", logger, {}, where="monitor")
    refuse_settings(loaded)  # last: its detectors take longer than all the rest


def _check_weights(config: Config) -> None:
    file = config.model.checkpoint
    if file is not None and not Path(file).expanduser().is_file():
        raise UserError(
            f"There is no file {file}.",
            why="Training is to start from the weights in it.",
            fix="Give a .safetensors or .pth file, such as `python -m jobs.export RUN FILE` writes.",
            key="model.checkpoint",
        )


def _check_own_code(config: Config) -> None:
    """The user's own modules can be imported, as far as that can be known without running them."""
    launch = config.launch
    # Where the job brings an environment of its own, what is missing here may be there.
    here = not (launch.environment or launch.container_image or launch.modules or launch.setup)
    named = [("data", config.data.name), ("strategies", config.strategy.name)]
    named.append(("tasks", config.task.name))
    named += [("optim", config.optim.name), ("schedule", config.schedule.name)]
    named += [("models", config.model.name)] * (not config.model.name.startswith(TIMM_SOURCES))
    named += [("schedulers", launch.executor)] * (":" in launch.executor)
    for room, name in [*named, *(("monitor", logger) for logger in config.monitor.loggers)]:
        plugins.check_importable(f"trainkit.{room}", name, installed=here)
