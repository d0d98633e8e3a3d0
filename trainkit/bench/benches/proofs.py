"""Bench proof: what training must be able to do on this machine."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trainkit.bench import base
from trainkit.bench.base import Arm, Bench, Results, SkippedArm, Where
from trainkit.bench.benches.one_device import FORMATS, amp_arms
from trainkit.bench.benches.several_ranks import STRATEGIES, strategy_arms

if TYPE_CHECKING:
    from trainkit.config.schema import Config

LARGE_MODELS = ("resnet50", "vit_base_patch32_224")
_STRATEGY_ARMS: list[str] = []
for _name in STRATEGIES:
    if _name != "single":
        _STRATEGY_ARMS += (_name, f"{_name}-resumed")
PROOFS = (
    "as-on-cpu", *FORMATS, *_STRATEGY_ARMS, "killed-resumed", "largest-batch", "all-reduce-1-mib", "all-reduce-64-mib",
    "loader", *LARGE_MODELS, "cifar10-94",
)  # fmt: skip
"""The arms of bench proof."""
PHOTOS = (
    "data.name=synthetic", "data.image_size=224", "data.num_classes=1000", "data.val_size=8", "data.test_size=8",
)  # fmt: skip
_LARGE = ((40_000, 256), (16_000, 128))
"""Images that a GPU with more than so many MiB trains a large model with at once; others train with two."""


def proof_arms(config: Config, where: Where, asked: Sequence[str]) -> list[Arm | SkippedArm]:
    """List what is tried, in the order in which it tells most."""
    everybody = tuple(range(where.world_size))
    size = math.ceil(config.train.global_batch_size / where.world_size) * where.world_size
    steady = ("schedule.name=constant", "optim.lr=0.002")  # so that the weights move from the beginning
    same = (f"train.global_batch_size={size}", f"train.micro_batch_size={size // where.world_size}", *steady)
    alone = ("strategy.name=single", *same)
    found: list[Arm | SkippedArm] = [Arm("as-on-cpu", (*alone, "train.precision=fp32"), (0,), "learn")]
    for arm in amp_arms(config, where, FORMATS):
        if isinstance(arm, Arm):
            arm = replace(arm, overrides=(*alone, *arm.overrides), ranks=(0,), work="learn", series="format")
        found.append(arm)
    for arm in strategy_arms(config, where, ()):
        if isinstance(arm, SkippedArm):
            found.append(arm)
        elif arm.name != "single":
            settings = ("train.precision=fp32", same[0], *steady, *arm.overrides)
            found.append(replace(arm, overrides=settings, work="learn", series="strategy"))
            found.append(replace(arm, name=f"{arm.name}-resumed", overrides=settings, work="resume", base=""))
    found.append(Arm("killed-resumed", (), (0,), "killed"))
    each = 2
    for room_mb, images in _LARGE:
        if where.gpu and where.room_mb > room_mb:
            each = max(each, images)
    largest = ["strategy.name=single"]
    if each > 2:
        largest += [f"model.name={LARGE_MODELS[0]}", *PHOTOS, "train.channels_last=true"]
    found.append(Arm("largest-batch", tuple(largest), (0,), "largest"))
    if where.world_size == 1:
        found.append(SkippedArm("all-reduce", "it needs two ranks"))
    else:
        for mib in (1, 64):
            found.append(Arm(f"all-reduce-{mib}-mib", (), everybody, "reduce", mib << 20))
    found.append(Arm("loader", same, None, "feed"))
    for model in LARGE_MODELS:
        settings = (
            f"model.name={model}", *PHOTOS, f"data.train_size={8 * each * where.world_size}",
            f"train.global_batch_size={each * where.world_size}", "train.channels_last=true",
        )  # fmt: skip
        found.append(Arm(model, settings, None, "speed", each))
    recipe = "cifar10-94"
    if where.gpu or recipe in asked:
        found.append(Arm(recipe, (), (0,), "recipe"))
    else:
        found.append(SkippedArm(recipe, f"on a CPU it takes an hour; --arms {recipe} includes it"))
    return [arm for arm in found if not asked or arm.name in asked]


def proof_meaning(results: Results) -> str:
    """One sentence."""
    failed = [row.name for row in results.rows if row.outcome == "failed"]
    if failed:
        return f"{len(failed)} of {len(results.rows)} failed: {'; '.join(failed)}."
    outcomes = Counter(row.outcome for row in results.rows)
    passed = f"{outcomes['passed']} of {len(results.rows)}"
    if not results.ended:
        return f"It has not finished: {passed} have passed so far."
    if outcomes["refused"]:
        return f"Training works here: {passed} passed, {outcomes['refused']} refused."
    return f"Training works here: {passed} passed."


PROOF = Bench(
    name="proof", question="Does training work here?", arms=proof_arms, meaning=proof_meaning, names=PROOFS,
    columns=(
        base.ARM, ("outcome", lambda row, results: row.outcome), ("figure", lambda row, results: row.figure),
    ),
    dispensable=(), strategy="ddp", proves=True,
)  # fmt: skip
