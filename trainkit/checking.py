"""Whether what a configuration names is there: data, model, strategy, loggers, their options. Without torch."""

from __future__ import annotations

from trainkit import plugins
from trainkit.config.loading import Loaded
from trainkit.config.traits import strategy_traits
from trainkit.data import check_data
from trainkit.models import check_model
from trainkit.records.secrets import refuse_settings


def check(loaded: Loaded) -> None:
    """Refuse names, options and values that would fail only once the run starts.

    Raises UserError that names the setting and where it was written.
    """
    config = loaded.config
    with loaded.pointing_at_sources():
        check_data(config.data)
        check_model(config.model)
        strategy = config.strategy
        plugins.check_options("trainkit.strategies", strategy.name, strategy.options, where="strategy")
        strategy_traits(strategy.name)
        for logger in config.monitor.loggers:
            plugins.check_options("trainkit.monitor", logger, {}, where="monitor")
        if config.launch.environment is None and config.launch.container_image is None:  # else it runs in another one
            named = [("data", config.data.name), ("models", config.model.name), ("strategies", strategy.name)]
            for room, name in [*named, *(("monitor", logger) for logger in config.monitor.loggers)]:
                plugins.require_imports(f"trainkit.{room}", name)
    refuse_settings(loaded)  # last: its detectors take longer than all the rest
