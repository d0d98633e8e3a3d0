"""Refuse settings that do not go together; read what a strategy's file states without loading it.

A strategy's file states upper-case constants (`StrategyTraits`), which are read from its source
(`trainkit.config.plugins.stated`): nobody else knows a strategy by its name, or has read its options.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from trainkit.common import terminal
from trainkit.common.errors import UserError, unknown
from trainkit.config import plugins, yaml
from trainkit.config.schema import Config, ImpossibleError, ScheduleConfig, field_of

_STRATEGIES = "trainkit.distributed.strategies"
_KEY = r"[a-z]\w*(?:\.\w+)?"
_CONDITION = re.compile(rf"(?P<key>{_KEY})(?:(?P<sign>[=>])(?P<value>\S+))?")


class StrategyTraits(BaseModel):
    """Facts about a strategy for planning, starting, training and reporting.

    A condition is a setting that is not at its default, ``train.ema_decay``, or has a certain value,
    ``train.precision=fp16|o2``, ``launch.nodes>1``; a comma joins those that must hold at once.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    ranks: Literal["any", "one"] = "any"
    """``RANKS``: any, or one process on one node."""
    gpus_per_rank: Literal[1, "all"] = 1
    """``GPUS_PER_RANK``: 1, or all that the process sees."""
    loop: Literal["updates", "collaborative"] = "updates"
    """``LOOP``: updates of all ranks together, or collaborative: every rank is a peer with batches of its own."""
    sharded: bool = False
    """``SHARDED``: a rank holds a part of each weight, so that its memory layout is the strategy's own."""
    excludes: dict[str, str | tuple[str, str]] = {}
    """``EXCLUDES``: condition -> why it does not go with this strategy, or (why, what to do instead)."""
    global_batchnorm: str = ""
    """``GLOBAL_BATCHNORM``: the condition under which BatchNorm's statistics are those of all ranks."""
    less_traffic: str = ""
    """``LESS_TRAFFIC``: a setting with which gradients take less of the network, ``strategy.comm_hook=bf16``."""
    lost_when_resized: dict[str, str] = {}
    """``LOST_WHEN_RESIZED``: condition -> what a run gives up that goes on with another number of ranks."""


def strategy_traits(name: str) -> StrategyTraits:
    """Return the traits that the file of strategy ``name`` states, else the defaults.

    Raises UserError for values that do not exist.
    """
    stated = plugins.stated(_STRATEGIES, name)
    options = plugins.signature(_STRATEGIES, name)

    def wrong(what: str, why: str) -> UserError:
        fix = "Correct it in the file of the strategy, or remove it."
        return UserError(f"Strategy '{name}' states {what}.", why=why, fix=fix, key="strategy.name")

    given = {name.lower(): value for name, value in stated.items() if name.lower() in StrategyTraits.model_fields}
    try:
        traits = StrategyTraits(**given)
    except ValidationError as error:
        problem = error.errors(include_url=False)[-1]  # of a text or a pair, what is wrong with the pair
        trait = str(problem["loc"][0])
        raise wrong(f"{trait.upper()} = {given[trait]!r}", f"{problem['msg']}.") from None
    conditions = [*traits.excludes, *traits.lost_when_resized, traits.global_batchnorm, traits.less_traffic]
    for condition in filter(None, conditions):
        for part in condition.split(", "):
            match = _CONDITION.fullmatch(part)
            key = match["key"] if match else "?.?"
            section, _, option = key.partition(".")
            is_own = section == "strategy" and (option in options.options or options.takes_any)
            if option and not is_own and field_of(key) is None:
                raise wrong(f"'{part}'", "It is neither a setting nor an option of the strategy.")
    return traits


def holds(condition: str, config: Config, facts: Mapping[str, Any] | None = None) -> bool:
    """True if a condition of a strategy holds.

    Args:
        facts: what is known beyond the configuration, such as ``grad_accum_steps``; outranks it.
    """
    return bool(condition) and all(_part_holds(part, config, facts or {}) for part in condition.split(", "))


def less_traffic(config: Config) -> str | None:
    """The strategy's setting that takes less of the network, where that option is at its default."""
    setting = strategy_traits(config.strategy.name).less_traffic
    if not setting or holds(setting.partition("=")[0], config):
        return None
    return setting


def lost_when_resized(config: Config) -> list[str]:
    """Return what this strategy loses when a run goes on with another number of ranks."""
    traits = strategy_traits(config.strategy.name)
    return [lost for condition, lost in traits.lost_when_resized.items() if holds(condition, config)]


def check_strategy(config: Config, facts: Mapping[str, Any] | None = None) -> None:
    """Refuse settings that do not go with the strategy, by what it states. Raises UserError."""
    name = config.strategy.name
    traits = strategy_traits(config.strategy.name)
    excluded = dict(traits.excludes)
    if traits.loop == "collaborative":
        excluded |= yaml.packaged("exclusions")["collaborative"]
    if traits.sharded:
        excluded |= yaml.packaged("exclusions")["sharded"]
    if traits.ranks == "one":
        excluded |= yaml.packaged("exclusions")["of one rank"]
    for condition, reason in excluded.items():
        if not holds(condition, config, facts):
            continue
        keys = re.findall(rf"(?:^|, )({_KEY})", condition)
        first, *others = [f"{key}={json.dumps(_value(key, config, facts or {})[0])}".replace('"', "") for key in keys]
        what = f"{first} does not go with {' and '.join(others) or f'strategy.name={name}'}."
        if isinstance(reason, str):
            raise ImpossibleError(what, why=reason, fix=f"Omit {keys[0]}, or use another strategy.")
        why, fix = reason
        raise ImpossibleError(what, why=why, fix=fix)


def check_split(config: Config, world_size: int, source: object = "") -> None:
    """Refuse a global batch that so many ranks cannot share evenly, and what the strategy excludes where a rank takes
    its share in several passes.

    Args:
        source: where the size of the batch is from, in words.

    Raises UserError.
    """
    size = config.train.global_batch_size
    micro = config.train.given_micro_batch_size
    unit = world_size * (micro or 1)
    if size % unit:
        ranks = terminal.plural(world_size, "rank")
        if micro:
            ranks += f" of train.micro_batch_size={micro}"
        near = sorted({max(size // unit, 1) * unit, -(-size // unit) * unit})
        what = f"train.global_batch_size={size} cannot be split evenly over {ranks}."
        samples = f"{unit} samples ({source})" if source else f"{unit} samples"
        why = f"A pass over all ranks takes {samples}."
        fix = f"Use train.global_batch_size={' or '.join(map(str, near))}, or another number of ranks."
        raise UserError(what, why=why, fix=fix, key="train.global_batch_size")
    check_strategy(config, {"grad_accum_steps": size // unit if micro else 1})


def _part_holds(part: str, config: Config, facts: Mapping[str, Any]) -> bool:
    match = _CONDITION.fullmatch(part)
    assert match is not None, part
    value, default = _value(match["key"], config, facts)
    if match["sign"] is None:
        return bool(value != default)
    if match["sign"] == ">":
        return isinstance(value, int | float) and value > float(match["value"])
    return value in map(yaml.parse_value, match["value"].split("|"))


def _value(key: str, config: Config, facts: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the value of a setting, of an option of the strategy or of a fact, and its default."""
    section, _, name = key.partition(".")
    field = field_of(key)
    if field is not None and name:
        return facts.get(key, getattr(getattr(config, section), name)), field.get_default()
    default = plugins.signature(_STRATEGIES, config.strategy.name).defaults.get(name)
    if not name:
        return facts.get(key), default
    return config.strategy.options.get(name, default), default


def check_combinations(config: Config) -> None:
    """Raise ImpossibleError for the first settings that do not go together."""
    train = config.train
    batch = train.global_batch_size
    micro = train.given_micro_batch_size
    augment = config.augment
    if micro is not None and batch % micro:
        what = f"train.global_batch_size={batch} is not a multiple of train.micro_batch_size={micro}."
        lower = batch // micro * micro
        possible = f"{lower} or {lower + micro}" if lower else str(micro)
        fix = f"Use train.global_batch_size={possible}."
        raise ImpossibleError(what, why="An update takes whole micro batches.", fix=fix)
    if (config.checkpoint.best or "").startswith("val/ema_") and train.ema_decay is None:
        what = f"checkpoint.best={config.checkpoint.best} and train.ema_decay=null."
        fix = "Use train.ema_decay=0.9999, or omit checkpoint.best."
        raise ImpossibleError(what, why="There are no averaged weights to validate.", fix=fix)
    name = "global_batch_size" if micro is None else "micro_batch_size"
    size = micro or batch
    if augment.mixes and size % 2:
        what = f"train.{name}={size} is odd, and augment.mixup_alpha or augment.cutmix_alpha mixes pairs of images."
        raise ImpossibleError(
            what, why="Both images of a pair must be in one micro batch.", fix=f"Use train.{name}={size + 1}."
        )
    ramp = augment.ramp_epochs
    if augment.min_size is not None and (ramp is None or ramp[0] >= ramp[1]):
        fix = f"Use augment.ramp_epochs=[{train.epochs // 2},{max(train.epochs * 4 // 5, train.epochs // 2 + 1)}]."
        what = f"augment.min_size={augment.min_size} and augment.ramp_epochs={json.dumps(ramp)}."
        raise ImpossibleError(
            what,
            why="Progressive resizing needs both: the smallest size, and the epochs in which images grow.",
            fix=fix,
        )
    if train.distill_from is not None and train.class_weights is not None:
        what = f"train.distill_from={train.distill_from} does not go with train.class_weights."
        why = "The teacher's outputs have no class weights."
        raise ImpossibleError(what, why=why, fix="Omit one of them.", keys=("train.class_weights",))
    if augment.rand_augment_ops and augment.policy != "none":
        what = f"augment.rand_augment_ops={augment.rand_augment_ops} and augment.policy={augment.policy}."
        fix = "Use augment.rand_augment_ops=0 for the policy, or augment.policy=none for RandAugment."
        raise ImpossibleError(
            what, why="RandAugment is also a policy, and each image is augmented by one policy.", fix=fix
        )
    if train.bce_threshold is not None and (train.loss != "bce" or train.label_smoothing):
        other = f"loss={train.loss}"
        use = "loss=bce"
        if train.loss == "bce":
            other = f"label_smoothing={train.label_smoothing:g}"
            use = "label_smoothing=0"
        what = f"train.bce_threshold={train.bce_threshold:g} and train.{other}."
        fix = f"Use train.{use}, or omit train.bce_threshold."
        raise ImpossibleError(what, why="It makes targets of 0 and 1, for binary cross entropy.", fix=fix)
    if train.memory_limit_mb is not None and train.micro_batch_size != "auto":
        what = f"train.memory_limit_mb={train.memory_limit_mb:g} and train.micro_batch_size={micro or 'null'}."
        fix = "Use train.micro_batch_size=auto, or omit train.memory_limit_mb."
        raise ImpossibleError(
            what, why="The limit only has an effect on the search for micro_batch_size=auto.", fix=fix
        )
    waits = train.early_stopping_patience is not None or config.schedule.name == "plateau"
    delta = train.early_stopping_min_delta
    if delta and not waits:
        what = f"train.early_stopping_min_delta={delta:g} and train.early_stopping_patience=null."
        fix = "Use train.early_stopping_patience=5, or train.early_stopping_min_delta=0."
        raise ImpossibleError(
            what, why="The minimum improvement only has an effect on early stopping, which is off.", fix=fix
        )
    try:
        if not config.strategy.is_own:  # which is read at submission and by those who train
            check_strategy(config)
    except UserError as error:
        if isinstance(error, ImpossibleError):  # else there is no such strategy: `trainkit.launch.preparation` says so
            raise


def micro_batch_sizes(share: int, *, even: bool = False) -> list[int]:
    """Sizes that divide ``share``, ascending; ``even``: those that mixing pairs of images takes."""
    return [size for size in range(1, share + 1) if share % size == 0 and not (even and size % 2)]


def smaller(micro: int, share: int, *, even: bool = False) -> int:
    """The largest of them that is at most half as large as ``micro``; 0 if none is."""
    sizes = micro_batch_sizes(share, even=even)
    return max(filter((micro // 2).__ge__, sizes), default=0)


def check_schedule(schedule: ScheduleConfig) -> None:
    """Refuse a schedule that does not exist, and options that it does not have. Raises UserError."""
    if schedule.is_own:
        asked = plugins.signature("trainkit.schedule", schedule.name).options
        plugins.check_options("trainkit.schedule", schedule.name, given_to_own(schedule, asked, 1), where="schedule")
    elif schedule.name not in schedule.OURS:
        raise unknown("schedule", schedule.name, list(schedule.OURS), own=True, key="schedule.name")


def given_to_own(schedule: ScheduleConfig, asked: Sequence[str], steps_per_epoch: int) -> dict[str, Any]:
    """Return the arguments of a schedule of the user's own: its options, and what else it asks for by name."""
    known = schedule.model_dump(include={*asked} - {"name"})
    if "steps_per_epoch" in asked:
        known["steps_per_epoch"] = steps_per_epoch
    return known | schedule.options
