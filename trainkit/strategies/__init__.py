"""How one model becomes a model on many ranks: one file a strategy.

Its function ``build(dist, *, <options>)`` gives a `Strategy`; with a second argument, ``build(dist, precision, ...)``,
it is told in which format the model computes. What others must know of it without loading it the file states as
upper-case constants: ``RANKS = "one"``, ``SHARDED = True``, ``LOOP = "collaborative"``, ``EXCLUDES = {...}``. See
`trainkit.config.checks.StrategyTraits`.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from trainkit import plugins
from trainkit.config.checks import strategy_traits
from trainkit.errors import UserError

if TYPE_CHECKING:
    from trainkit.config.schema import StrategyConfig
    from trainkit.distributed.process_group import Distributed
    from trainkit.strategies.base import Strategy


def build_strategy(config: StrategyConfig, dist: Distributed, precision: str = "fp32") -> Strategy:
    """The strategy of a configuration.

    Raises UserError for one that does not exist, for options that it does not have, and for several ranks where it is
    one process: each of them would train a model of its own.
    """
    plugins.check_options(__name__, config.name, config.options, where="strategy")
    if strategy_traits(config.name).ranks == "one" and dist.world_size > 1:
        raise UserError(
            f"strategy.name={config.name} runs in one process, but {dist.world_size} ranks were started.",
            why="Each of them would train a model of its own.",
            fix="Use a strategy for many ranks, such as strategy.name=ddp, or start one rank.",
            key="strategy.name",
        )
    build = plugins.load(__name__, config.name)
    kinds = [parameter.kind for parameter in inspect.signature(build).parameters.values()]
    told = (dist, precision)[: kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    strategy: Strategy = build(*told, **plugins.fill(build, config.options, where="strategy"))
    if absent := [verb for verb in ("parallelize", "grad_sync") if not callable(getattr(strategy, verb, None))]:
        raise UserError(
            f"{config.name} returned no strategy.",
            why=f"It returned {type(strategy).__name__}, which has no {' and no '.join(absent)}.",
            fix="Return an object with both: see trainkit.strategies.base.Strategy.",
            key="strategy.name",
        )
    return strategy
