"""Traits that a strategy's file states, and everybody goes by: for strategies of ours and of the user's own."""

import re
from collections.abc import Callable
from contextlib import nullcontext

import pytest

from tests.config.conftest import Write
from trainkit.common.errors import UserError
from trainkit.config import checks
from trainkit.config.loading import load
from trainkit.launch.preparation import check

Own = Callable[[str], str]


@pytest.fixture
def own(write: Write) -> Own:
    """Writes a strategy that states something, and gives the setting that chooses it."""

    def call(stated: str) -> str:
        name = f"own_{abs(hash(stated))}"
        write(f"{name}.py", f"{stated}\ndef build(dist, *, mode: str = 'slow'): ...\n")
        return f"strategy.name={name}:build"

    return call


@pytest.mark.parametrize(
    ("name", "traits"),
    [
        ("single", checks.StrategyTraits(ranks="one")), ("dp", checks.StrategyTraits(ranks="one", gpus_per_rank="all")),
        ("hivemind", checks.StrategyTraits(loop="collaborative")), ("zero", checks.strategy_traits("ddp")),
    ],
)  # fmt: skip
def test_a_strategy_says_itself_what_others_must_know(name: str, traits: checks.StrategyTraits) -> None:
    assert checks.strategy_traits(name) == traits
    assert not traits.sharded
    assert checks.strategy_traits("fsdp").sharded


def test_one_process_of_a_job_of_several_ranks_may_be_alone() -> None:
    """An arm of a bench is, and so is `train`, which starts no other; a plan of several is refused."""
    config = load("ddp_sim", ["strategy.name=single"]).config
    with pytest.raises(UserError, match=r"ranks=2 does not go with strategy\.name=single"):
        checks.check_strategy(config, {"ranks": 2})


@pytest.mark.parametrize(
    ("stated", "says"),
    [
        ('RANKS = "two"', "states RANKS = 'two'"), ('SHARDED = "yes"', "states SHARDED = 'yes'"),
        ('EXCLUDES = ["train.ema_decay"]', "states EXCLUDES = ['train.ema_decay']"),
        ('EXCLUDES = {"train.emadecay": "no"}', "states 'train.emadecay'"),
        ('EXCLUDES = {"train.compile": ["no", "none"]}', "Input should be a valid tuple."),
        ('EXCLUDES = {"strategy.mood=good": "no"}', "states 'strategy.mood=good'"),
        ('GLOBAL_BATCHNORM = "always, if so"', "states 'if so'"), ('EXCLUDES = {"train.compile, ": "no"}', "states ''"),
    ],
)  # fmt: skip
def test_a_trait_that_does_not_exist_is_refused(own: Own, stated: str, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)) as refused:
        checks.strategy_traits(own(stated).partition("=")[2])
    assert refused.value.key == "strategy.name"


@pytest.mark.parametrize(
    ("setting", "keys"),
    [
        ("train.ema_decay=0.9", ["train.ema_decay"]),
        ("train.early_stopping_patience=2", ["train.early_stopping_patience"]),
        ("train.micro_batch_size=auto", ["train.micro_batch_size"]),
        ("train.precision=o2", ["train.precision"]), ("collaborative.sync=gradients", ["collaborative.sync"]),
        ("collaborative.open=true", ["collaborative.open"]),
    ],
)  # fmt: skip
def test_own_collaborative_strategies_are_checked_as_hivemind(own: Own, setting: str, keys: list[str]) -> None:
    strategy = own('LOOP = "collaborative"')
    check(load("hivemind", [strategy]))
    with pytest.raises(UserError) as theirs:
        load("hivemind", [setting])
    with pytest.raises(UserError) as refused:
        check(load("hivemind", [strategy, setting]))
    assert refused.value.what == theirs.value.what.replace("name=hivemind", strategy.removeprefix("strategy."))
    assert (refused.value.fix, refused.value.key) == (theirs.value.fix, *keys)


def test_own_sharded_strategies_refuse_o2_as_fsdp_does(own: Own) -> None:
    settings = [own("SHARDED = True"), "train.precision=o2"]
    with pytest.raises(UserError, match=r"train.precision=o2 does not go with strategy.name=own_"):
        check(load("ddp", settings))
    with pytest.raises(UserError, match=r"train.precision=o2 does not go with strategy.name=fsdp"):
        load("fsdp", settings[1:])
    load("ddp", settings[1:])


def test_what_an_own_strategy_excludes_is_refused_with_its_reason(own: Own) -> None:
    why = {"train.channels_last": "It wants rows.", "strategy.mode=fast, train.grad_clip_norm": ("Unclipped.", "Wait.")}
    strategy = own(f"EXCLUDES = {why!r}")
    check(load("ddp", [strategy, "train.grad_clip_norm=1", "strategy.mode=slow"]))
    with pytest.raises(UserError) as refused:
        check(load("ddp", [strategy, "train.channels_last=true"]))
    assert refused.value.what == f"train.channels_last=true does not go with {strategy}."
    assert "It wants rows (override train.channels_last=true)." in refused.value.why
    assert refused.value.fix == "Omit train.channels_last, or use another strategy."
    with pytest.raises(UserError, match=r"fast does not go with train.grad_clip_norm=1.0(.|\n)*Unclipped(.|\n)*Wait"):
        check(load("ddp", [strategy, "train.grad_clip_norm=1", "strategy.mode=fast"]))


def test_a_run_is_read_where_its_own_strategy_is_not(own: Own) -> None:
    settings = ["strategy.name=gone:build", "train.ema_decay=0.9"]
    assert load("ddp", settings).config.train.ema_decay == 0.9
    with pytest.raises(UserError, match="No module 'gone'"):
        check(load("ddp", settings))


@pytest.mark.parametrize(
    ("condition", "settings", "facts", "held"),
    [
        ("", [], {}, False), ("train.ema_decay", [], {}, False),
        ("train.ema_decay", ["train.ema_decay=0.9"], {}, True),
        ("train.precision=fp16|o2", ["train.precision=o2"], {}, True),
        ("train.precision=fp16|o2", ["train.precision=bf16"], {}, False),
        ("strategy.sync_batchnorm=true", ["strategy.sync_batchnorm=true"], {}, True),
        ("strategy.sync_batchnorm=false", [], {}, True), ("grad_accum_steps>1", [], {}, False),
        ("grad_accum_steps>1", [], {"grad_accum_steps": 2}, True),
        ("launch.nodes>1", ["launch.nodes=2"], {"launch.nodes": 1}, False),
        ("launch.nodes>1, seed=1", ["launch.nodes=2"], {}, False),
        ("launch.nodes>1, launch.requeue=true", ["launch.nodes=2"], {}, True),
    ],
)  # fmt: skip
def test_a_condition_holds(condition: str, settings: list[str], facts: dict[str, int], held: bool) -> None:
    assert checks.holds(condition, load("ddp", settings).config, facts) is held


@pytest.mark.parametrize(
    ("size", "micro", "ranks", "says"),
    [
        (100, None, 4, ""),
        (96, 8, 4, ""),
        (100, None, 3, r"over 3 ranks\.[\s\S]*batch_size=99 or 102, or another number of ranks"),
        (96, 32, 2, r"over 2 ranks of train\.micro_batch_size=32\.[\s\S]* 64 samples\.[\s\S]*=64 or 128,"),
        (4, None, 8, r"over 8 ranks\.[\s\S]*Use train\.global_batch_size=8, or"),
    ],
)
def test_a_batch_that_ranks_cannot_share_is_refused_with_the_nearest(
    size: int, micro: int | None, ranks: int, says: str
) -> None:
    sizes = [f"train.global_batch_size={size}", f"train.micro_batch_size={'null' if micro is None else micro}"]
    config = load("ddp", sizes).config
    with pytest.raises(UserError, match=says) if says else nullcontext():
        checks.check_split(config, ranks)


STATIC = ("strategy.static_graph=true", "train.global_batch_size=64")


@pytest.mark.parametrize("preset", ["ddp", "zero"])
def test_a_static_graph_goes_with_one_micro_batch_an_update(preset: str) -> None:
    config = load(preset, (*STATIC, "train.micro_batch_size=16")).config
    checks.check_strategy(config, {"grad_accum_steps": 1})
    with pytest.raises(UserError, match=r"grad_accum_steps=2(.|\n)*train\.micro_batch_size=null"):
        checks.check_strategy(config, {"grad_accum_steps": 2})


@pytest.mark.parametrize("preset", ["ddp", "zero"])
def test_the_strategy_knows_what_spares_the_network_and_what_a_resize_costs(preset: str) -> None:
    plain, powersgd = load(preset).config, load(preset, ["strategy.comm_hook=powersgd"]).config
    assert (checks.less_traffic(plain), checks.less_traffic(powersgd)) == ("strategy.comm_hook=bf16", None)
    assert (checks.lost_when_resized(plain), len(checks.lost_when_resized(powersgd))) == ([], 1)
    assert checks.less_traffic(load("fsdp").config) is None


@pytest.mark.parametrize("ramp", ["null", "[3,3]", "[5,2]"])
def test_images_that_grow_must_do_so_from_one_epoch_to_another(ramp: str) -> None:
    with pytest.raises(UserError, match=r"Use augment.ramp_epochs=\[10,16\]") as refused:
        load("ddp", ["augment.min_size=4", f"augment.ramp_epochs={ramp}"])
    assert refused.value.what.startswith("augment.min_size=4 and augment.ramp_epochs=")
    load("ddp", ["augment.min_size=4", "augment.ramp_epochs=[10,16]"])


def test_images_of_a_swarm_do_not_grow() -> None:
    with pytest.raises(UserError, match="Peers come and go"):
        load("hivemind", ["augment.min_size=4", "augment.ramp_epochs=[0,2]"])
