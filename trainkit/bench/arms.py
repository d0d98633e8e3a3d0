"""The benches: what each compares where, what its table shows, and what the figures mean.

A bench is an entry of ``BENCHES``, at the end; its arms are a pure function of the configuration and the place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit import terminal
from trainkit.bench import base
from trainkit.bench.base import ARM, Arm, Bench, LeftOut, Results, Row, Where, percent, rate
from trainkit.errors import UserError, did_you_mean, unknown
from trainkit.terminal import plural

if TYPE_CHECKING:
    from trainkit.config.schema import Config

FORMATS = ("fp32", "tf32", "bf16", "fp16", "o2")
STRATEGIES: dict[str, tuple[str, ...]] = {
    **{name: (f"strategy.name={name}",) for name in ("single", "dp", "ddp", "zero")},
    "fsdp": ("strategy.name=fsdp", "strategy.shard_within=all"),
    "hsdp": ("strategy.name=fsdp", "strategy.shard_within=node"),
}
"""The arms of bench strategy, with their settings."""
STRONG, WEAK = "same batch for all", "as much for each"
ONE, ALL = "one device", "DataParallel"
GRADIENTS = "gradients"
NETWORKS = {"within": "within a node", "between": "between nodes", "all": "over all ranks"}
LARGE_MODELS = ("resnet50", "vit_base_patch32_224")
PROOFS = (
    "as-on-cpu", *FORMATS, *(f"{name}{how}" for name in STRATEGIES if name != "single" for how in ("", "-resumed")),
    "killed-resumed", "largest-batch", "all-reduce-1-mib", "all-reduce-64-mib", "loader", *LARGE_MODELS, "cifar10-94",
)  # fmt: skip
"""The arms of bench proof."""
PHOTOS = (
    "data.name=synthetic", "data.image_size=224", "data.num_classes=1000", "data.val_size=8", "data.test_size=8",
)  # fmt: skip
ENOUGH = 0.95
"""Share of the highest rate beyond which more memory or processes gain nothing."""
HEADROOM = 0.1
"""Share of the memory that stays free."""
LONGEST_UPDATE = 15.0
"""Seconds of one update, after which larger ones are not tried."""
_LARGE = ((40_000, 256), (16_000, 128), (0, 2))
"""Images that a GPU with as many MiB trains a large model with at once."""
_SMALLEST = 8
"""Batches down to this fraction of the configuration's are tried."""


def amp_arms(config: Config, where: Where, asked: Sequence[str]) -> list[Arm | LeftOut]:
    """All formats that the device has; a slow one, and O2, only if asked for."""
    found: list[Arm | LeftOut] = []
    has = where.places[0].formats
    for name in asked or FORMATS[:-1]:
        why = ""
        if name == "tf32" and name not in has:
            why = "only NVIDIA GPUs from Ampere on have it"
        elif name == "bf16" and where.gpu and name not in has and not asked:
            why = "this GPU emulates it (--arms fp32,bf16 measures it)"
        elif name == "fp16" and not where.gpu and not asked:
            why = "it crawls on a CPU (--arms fp32,fp16 measures it)"
        found.append(LeftOut(name, why) if why else Arm(name, (f"train.precision={name}",)))
    return found


def _fastest(results: Results) -> tuple[Row, str]:
    """The fastest arm, which is the first where none is clearly faster; and how fast the others are in words."""
    first, best = results.rows[0], max(results.compared, key=lambda row: row.speed)
    trains = f"{best.name} trains {best.speed:.2f} x as fast"
    if best.speed > 1:
        return best, f"{trains} as {first.name} here"
    return first, f"Nothing is clearly faster than {first.name} here, {trains}"


def _losses(results: Results) -> str:
    """Whether all arms have learned the same."""
    ran = results.ran
    if len(ran) < 2 or ran[0].loss is None:
        return ""
    first, updates = ran[0].loss, f"after {results.updates} updates"
    other = [row for row in ran if row.loss is None or abs(row.loss - first) > base.LOSS_TOLERANCE * abs(first)]
    if not other:
        return f"All come to the same loss {updates}."
    losses = [f"{row.name} not finite" if row.loss is None else f"{row.name} {row.loss:.3g}" for row in other]
    return f"But {updates} the loss differs: {ran[0].name} {first:.3g}, {', '.join(losses)}."


def amp_meaning(results: Results) -> str:
    if not results.compared:
        return results.no_difference()
    best, said = _fastest(results)
    if best.memory_ratio is not None:  # which the first has not
        said += f" {'and' if best.memory_ratio < 1 else 'but'} takes {best.memory_ratio:.2f} of the memory"
    return f"{said}; use train.precision={best.name}. {_losses(results)}".rstrip()


def amp_notes(config: Config, where: Where) -> list[str]:
    from trainkit.site.profile import cpu_formats

    if where.gpu or "bf16" in cpu_formats():
        return []
    return ["This CPU has neither AVX512-BF16 nor AMX: it computes bf16 by way of float32."]


def batch_size_arms(config: Config, where: Where, asked: Sequence[str]) -> list[Arm | LeftOut]:
    """First the configuration's, then powers of two up to the number of images; updates are of one micro batch."""
    own = config.train.given_micro_batch_size or max(config.train.global_batch_size // where.world_size, 1)
    powers = [1 << power for power in range(1, 24) if own // _SMALLEST <= 1 << power != own]
    found: list[Arm | LeftOut] = []
    for size in [int(name) for name in asked] or [own, *powers]:
        if size <= where.train_images // where.world_size:
            overrides = (f"train.global_batch_size={size * where.world_size}", f"train.micro_batch_size={size}")
            found.append(Arm(str(size), overrides, size=size))
        elif asked:
            found.append(LeftOut(str(size), f"there are {where.train_images} images to train on"))
    return found


def batch_size_stops(arm: Arm, trials: Mapping[str, Mapping[str, Any]], room_mb: float) -> str:
    """Whether a size should not fit, by the line through the two largest before it, or would take too long."""
    known = sorted((int(name), max(told.get("memory_mb") or [0.0]), told) for name, told in trials.items())
    below = [one for one in known if one[0] < arm.size]
    if not below:
        return ""
    size, peak, told = below[-1]
    seconds = told["seconds"] / told["updates"]
    if seconds > LONGEST_UPDATE:
        return f"not tried: an update of {size} takes {seconds:.0f} s already"
    slope = (peak - below[-2][1]) / (size - below[-2][0]) if len(below) > 1 else peak / size
    predicted = peak + max(slope, 0.0) * (arm.size - size)
    if room_mb and predicted > room_mb * (1 - HEADROOM):
        return f"does not fit: it would take about {predicted:,.0f} of {room_mb:,.0f} MiB"
    return ""


def batch_size_meaning(results: Results) -> str:
    first, ran = results.rows[0], [row for row in results.ran if not row.failed]
    if not ran:
        return results.no_difference()
    last = f"the largest that ran is {max(ran, key=lambda row: row.arm.size).name}"
    compared = [row for row in ran if row.ratio is not None]
    if not compared:
        return f"{results.no_difference()[:-1]}; {last}."
    best = max(row.speed for row in compared)
    if best <= 1:
        return f"No micro batch trains faster than {first.name} here; {last}."
    enough = min((row for row in compared if row.speed >= ENOUGH * best), key=lambda row: row.arm.size)
    return (
        f"Micro batches of {enough.name} train {enough.speed:.2f} x as fast as {first.name} here, "
        f"larger ones hardly faster, and {last}; use train.micro_batch_size={enough.name}."
    )


def loader_arms(config: Config, where: Where, asked: Sequence[str]) -> list[Arm | LeftOut]:
    """The model fed from memory, which is the ceiling; then numbers of loader processes, with files and with packs."""
    cpus = max(where.places[0].cpus // where.ranks_per_node, 1)
    workers = [int(name) for name in asked] or sorted({0, 1, *(1 << n for n in range(1, 6) if 1 << n <= cpus)})
    data = config.data
    sources: list[tuple[str, tuple[str, ...]]] = [("", ())]  # as they are configured
    if data.pack is not None:
        sources.append((", files", ("data.pack=null", "data.stage=false")))
    elif ":" not in data.name:
        sides = [pack.stem.rpartition("-")[2] for pack in sorted(Path(data.root).glob(f"{data.name}-*.pack"))]
        sources += [(f", pack {side}", (f"data.pack={side}",)) for side in sides if side.isdecimal()]
    found: list[Arm | LeftOut] = [Arm("model alone", work="ceiling")]
    for source, overrides in sources:
        for count in workers:
            name = f"{plural(count, 'worker')}{source}"
            found.append(Arm(name, (f"data.workers={count}", *overrides), work="feed", size=count))
    return found


def loader_meaning(results: Results) -> str:
    ceiling, fed = results.rows[0], [row for row in results.rows[1:] if row.rates]
    if not fed:
        return results.no_difference()
    best = max(row.median for row in fed)
    enough = min((row for row in fed if row.median >= ENOUGH * best), key=lambda row: row.arm.size)
    use = " ".join(word for word in enough.arm.overrides if not word.startswith("data.stage"))
    if not ceiling.rates or (enough.why_none and base.WITHIN not in enough.why_none):
        return results.no_difference()
    share = 1.0 if enough.ratio is None else enough.speed
    trains = f"with {enough.name} the model trains at {share:.2f} of what it does fed from memory"
    if share >= ENOUGH:
        return f"The data keeps up: {trains}; use {use}."
    command = terminal.command("prepare", "DATASET", "--pack", "256")
    more = "" if any("pack" in row.name for row in fed) else f"; image files can be packed ({command})"
    return f"The data does not keep up: {trains}, and more processes gain nothing; use {use}{more}."


def sharing_arms(config: Config, where: Where, asked: Sequence[str]) -> list[Arm | LeftOut]:
    """So many runs at the same time on one device."""
    return [Arm(name, (), (0,), "beside", int(name)) for name in asked or ("1", "2", "4")]


def sharing_meaning(results: Results) -> str:
    if not results.compared:
        return results.no_difference()
    best, first = max(results.compared, key=lambda row: row.speed), results.rows[0]
    so = f"; use launch.runs_per_gpu={best.name}" if best.speed > 1 else ": no gain"
    return f"{best.name} side by side train {best.speed:.2f} x as many images a second as {first.name}{so}."


def dp_inference_arms(config: Config, where: Where, asked: Sequence[str]) -> list[Arm | LeftOut]:
    """Forward passes of several batch sizes, on one device and split over all that one process sees."""

    def infer(size: int, series: str, strategy: str, against: str) -> Arm:
        return Arm(f"{series}, {size}", (f"strategy.name={strategy}",), (0,), "infer", size, against, series)

    sizes = [int(name) for name in asked] or [1, 4, 16, 64, 256, 1024]
    found: list[Arm | LeftOut] = [infer(size, ONE, "single", "") for size in sizes]
    if where.gpus < 2:
        return [*found, LeftOut(ALL, f"it splits batches over GPUs, and here {'is one' if where.gpus else 'are none'}")]
    return found + [infer(size, ALL, "dp", f"{ONE}, {size}") for size in sizes]


def dp_inference_meaning(results: Results) -> str:
    one, split = ([row for row in results.series(series) if row.rates] for series in (ONE, ALL))
    alone = ""
    if one:
        best, about = max(one, key=lambda row: row.median), "roughly " if results.problem else ""
        alone = f"One device classifies most, {about}{rate(best.median)} images/s, in batches of {best.arm.size}"
    if not split:
        return f"{alone}; DataParallel takes two GPUs, so there is nothing to compare it with."
    faster = [row for row in split if row.speed > 1]
    if not faster:
        return f"DataParallel is not faster than one device with any of these batches. {alone}."
    first, most = min(faster, key=lambda row: row.arm.size), max(faster, key=lambda row: row.speed)
    gain = f"from batches of {first.arm.size} on, at most {most.speed:.2f} x, with {most.arm.size}"
    return f"DataParallel is faster than one device {gain}. {alone}."


def scaling_arms(config: Config, where: Where, asked: Sequence[str]) -> list[Arm | LeftOut]:
    """The same batch for all ranks (strong scaling) and as much for each (weak), over the first ranks of the job."""
    chosen = [int(name) for name in asked] or scaling_counts(where)
    size = config.train.global_batch_size
    each = max(size // where.world_size, 1)
    whole = [count for count in chosen if count <= where.world_size and size % count == 0]
    names = [plural(count, "rank") for count in whole]
    why = f"{plural(where.world_size, 'rank')} are here, and {size} images are divided among them"
    found: list[Arm | LeftOut] = [LeftOut(plural(count, "rank"), why) for count in chosen if count not in whole]
    for count, name in zip(whole, names, strict=True):
        first = names[0] if name != names[0] else ""
        found.append(Arm(name, (), tuple(range(count)), base=first, series=STRONG))
    for count, name in zip(whole, names, strict=True):
        overrides = (f"train.global_batch_size={each * count}",)
        found.append(Arm(f"{name} x {each}", overrides, tuple(range(count)), base=f"{names[0]} x {each}", series=WEAK))
    return found


def scaling_counts(where: Where) -> list[int]:
    """Numbers of ranks that are compared: 1, 2, 4 ... within a node, then whole nodes; all divide that of all."""
    per_node, nodes = where.ranks_per_node, where.nodes
    within = [1 << power for power in range(per_node.bit_length()) if per_node % (1 << power) == 0]
    between = [per_node * count for count in range(1, nodes + 1) if nodes % count == 0]
    return sorted({*within, *between})


def _count(row: Row) -> int:
    """How many ranks an arm of this bench has."""
    return len(row.arm.ranks or ())


def efficiency(row: Row, results: Results) -> float | None:
    """The useful share of the ranks that an arm has more than the one that it is compared with."""
    first = results.series(row.arm.series)[0]
    return None if row.ratio is None or row is first else row.speed * _count(first) / _count(row)


def scaling_meaning(results: Results) -> str:
    most, gains, shares, exposed = max(map(_count, results.rows)), [], [], 0.0
    for row in results.rows:
        share = efficiency(row, results)
        if share is None or _count(row) < most:
            continue
        first = results.series(row.arm.series)[0]
        how = "with the same batch" if row.arm.series == STRONG else "with as much for each"
        fewer = plural(_count(first), "rank")
        gains.append(f"{row.speed:.2f} x as fast as {fewer} {how} (efficiency {percent(share)})")
        shares.append(share)
        exposed = max(exposed, row.extra.get("exposed_share", 0.0))
    if not gains:
        return results.no_difference()
    worth = "they are not worth it"
    if shares[0] >= 0.8:
        worth = "they are worth it"
    elif shares[0] * most > 1.1:
        worth = "they help"
    waits = f"; {percent(exposed)} of an update is communication that no computation hides"
    return f"{plural(most, 'rank')} train {' and '.join(gains)}{waits}: {worth}."


def strategy_arms(config: Config, where: Where, asked: Sequence[str]) -> list[Arm | LeftOut]:
    """All that can be here, with the same global batch and the same micro batch on a device: so the same updates."""
    from trainkit.config.checks import strategy_traits

    given, size = config.train.given_micro_batch_size, config.train.global_batch_size
    micro = given or max(size // where.world_size, 1)
    found: list[Arm | LeftOut] = []
    for name in asked or STRATEGIES:
        settings = STRATEGIES[name]
        traits = strategy_traits(settings[0].partition("=")[2])
        splits, why = traits.gpus_per_rank == "all", ""
        if splits and where.gpus < 2:
            why = f"it splits batches over the GPUs of one process, which sees {where.gpus or 'none'}"
        elif name == "hsdp" and (where.nodes < 2 or where.ranks_per_node < 2):
            why = "it shards within each of several nodes: it takes two with two ranks each"
        if why:
            found.append(LeftOut(name, why))
            continue
        if config.train.micro_batch_size != "auto":
            own = micro * where.gpus if splits and size % (micro * where.gpus) == 0 else micro
            settings = (*settings, f"train.micro_batch_size={own}")
        found.append(Arm(name, settings, (0,) if traits.ranks == "one" else None))
    return found


def strategy_meaning(results: Results) -> str:
    first, losses = results.rows[0], _losses(results)
    if not results.compared:
        return f"{results.no_difference()} {losses}".rstrip()
    best, said = _fastest(results)
    lean = min(results.rows, key=lambda row: row.memory_ratio or 1.0)
    if lean.memory_ratio is not None and lean.memory_ratio < 1:
        said += f", and {lean.name} needs the least memory of a rank, {lean.memory_ratio:.2f} of {first.name}'s"
    named = "fsdp strategy.shard_within=node" if best.name == "hsdp" else best.name
    return f"{said}; use strategy.name={named}. {losses}".rstrip()


def strategy_notes(config: Config, where: Where) -> list[str]:
    size = config.train.given_micro_batch_size or config.train.global_batch_size // where.world_size
    return [f"Every arm makes updates of {config.train.global_batch_size} images, {size} at a time on a device."]


def network_arms(config: Config, where: Where, asked: Sequence[str]) -> list[Arm | LeftOut]:
    """All-reduces of several sizes, and of this model's gradients: over a node, a rank of each node, and all ranks."""
    who = {
        "within": tuple(place.rank for place in where.places if place.node_rank == 0),
        "between": tuple(place.rank for place in where.places if place.local_rank == 0),
        "all": tuple(place.rank for place in where.places),
    }
    sizes = [1 << 16, 1 << 20, 1 << 24, *[1 << 28] * where.gpu]  # gloo would take seconds for the last
    messages = [(terminal.size(size), size) for size in sizes]
    if where.params:
        messages.append((f"{GRADIENTS}, {terminal.size(4 * where.params)}", 4 * where.params))
    found: list[Arm | LeftOut] = []
    seen: set[tuple[int, ...]] = set()
    for name in asked or NETWORKS:
        if len(who[name]) < 2:
            found.append(LeftOut(name, "there is one rank on a node" if name == "within" else "there is one node"))
        elif who[name] not in seen:  # on one node, or with one rank on each, "all" are the same ranks
            seen.add(who[name])
            for text, size in messages:
                found.append(Arm(f"{name}, {text}", (), who[name], "reduce", size, series=name))
    return found


def milliseconds(row: Row) -> str:
    """What one exchange takes."""
    return f"{1000 * row.extra.get('seconds', 0.0):.3g} ms"


def network_meaning(results: Results) -> str:
    best = {name: max((row.median for row in results.series(name)), default=0.0) for name in NETWORKS}
    moves = ", ".join(f"{rate(value)} GB/s {NETWORKS[name]}" for name, value in best.items() if value)
    said = f"An all-reduce moves {'roughly ' if results.problem else ''}{moves}"
    own = [row for row in results.ran if GRADIENTS in row.name]
    if own:
        size = own[-1].name.rpartition(", ")[2]
        said += f"; exchanging this model's gradients ({size}) takes {milliseconds(own[-1])} an update"
    return f"{said}."


def proof_arms(config: Config, where: Where, asked: Sequence[str]) -> list[Arm | LeftOut]:
    """What is tried, in the order in which it tells most."""
    everybody = tuple(place.rank for place in where.places)
    size = math.ceil(config.train.global_batch_size / where.world_size) * where.world_size
    steady = ("schedule.name=constant", "optim.lr=0.002")  # so that the weights move from the beginning
    same = (f"train.global_batch_size={size}", f"train.micro_batch_size={size // where.world_size}", *steady)
    alone = ("strategy.name=single", *same)
    found: list[Arm | LeftOut] = [
        Arm("as-on-cpu", (*alone, "train.precision=fp32"), (0,), "learn"),
        *(replace(arm, overrides=(*alone, *arm.overrides), ranks=(0,), work="learn", series="format")
          if isinstance(arm, Arm) else arm for arm in amp_arms(config, where, FORMATS)),
    ]  # fmt: skip
    for arm in strategy_arms(config, where, ()):
        if isinstance(arm, LeftOut):
            found.append(arm)
        elif arm.name != "single":
            settings = ("train.precision=fp32", same[0], *steady, *arm.overrides)
            found += [replace(arm, overrides=settings, work="learn", series="strategy")]
            found += [replace(arm, name=f"{arm.name}-resumed", overrides=settings, work="resume", base="")]
    found.append(Arm("killed-resumed", (), (0,), "killed"))
    each = next(images for room_mb, images in _LARGE if (where.gpu and where.room_mb > room_mb) or not room_mb)
    large = (f"model.name={LARGE_MODELS[0]}", *PHOTOS, "train.channels_last=true") if each > 2 else ()
    found.append(Arm("largest-batch", ("strategy.name=single", *large), (0,), "largest"))
    if where.world_size > 1:
        found += [Arm(f"all-reduce-{size >> 20}-mib", (), everybody, "reduce", size) for size in (1 << 20, 1 << 26)]
    else:
        found.append(LeftOut("all-reduce", "it takes two ranks"))
    found.append(Arm("loader", same, None, "feed"))
    for model in LARGE_MODELS:
        settings = (
            f"model.name={model}", *PHOTOS, f"data.train_size={8 * each * where.world_size}",
            f"train.global_batch_size={each * where.world_size}", "train.channels_last=true",
        )  # fmt: skip
        found.append(Arm(model, settings, None, "speed", each))
    recipe = "cifar10-94"
    slow = LeftOut(recipe, f"on a CPU it takes an hour; --arms {recipe} asks for it")
    found.append(Arm(recipe, (), (0,), "recipe") if where.gpu or recipe in asked else slow)
    return [arm for arm in found if not asked or arm.name in asked]


def proof_meaning(results: Results) -> str:
    """One sentence."""
    outcomes = [row.outcome for row in results.rows]
    failed = [row.name for row in results.rows if row.outcome == "failed"]
    if failed:
        return f"{len(failed)} of {len(outcomes)} failed: {'; '.join(failed)}."
    if not results.ended:
        return f"It has not come to its end: {outcomes.count('passed')} of {len(outcomes)} have passed so far."
    refused = f", {outcomes.count('refused')} refused" if "refused" in outcomes else ""
    return f"Training works here: {outcomes.count('passed')} of {len(outcomes)} passed{refused}."


# fmt: off
BENCHES = {
    bench.name: bench
    for bench in (
        Bench(
            "amp", "Does mixed precision help here?", amp_arms, amp_meaning,
            (*base.COMPARED, ("largest batch", lambda row, results: str(row.largest or base.NONE)), base.LOSS),
            names=FORMATS, same_updates=True, largest=True, notes=amp_notes,
        ),
        Bench(
            "batch-size", "Do larger batches help here?", batch_size_arms, batch_size_meaning,
            (("micro batch", ARM[1]), *base.COMPARED[1:]),
            stops=batch_size_stops,
        ),
        Bench(
            "loader", "Does the data keep up here?", loader_arms, loader_meaning,
            (
                ARM, ("trains", base.RATE[1]), base.SPREAD, ("of ceiling", base.SPEED[1]),
                ("loads alone", lambda row, results: rate(row.extra.get("loads_per_sec"))),
                ("waits", lambda row, results: percent(row.extra.get("data_share"))),
            ),
            lowest=0,
        ),
        Bench(
            "sharing", "Do several runs on one GPU help here?", sharing_arms, sharing_meaning,
            (("side by side", ARM[1]), *base.COMPARED[1:]),
            strategy="single",
        ),
        Bench(
            "dp-inference", "Does DataParallel help inference here?", dp_inference_arms, dp_inference_meaning,
            (*base.TIMED, base.MEMORY),
            strategy="dp",
        ),
        Bench(
            "scaling", "Do more ranks help here?", scaling_arms, scaling_meaning,
            (
                ARM, base.RATE, base.SPREAD, ("speed-up", base.SPEED[1]),
                ("efficiency", lambda row, results: percent(efficiency(row, results))), base.EXPOSED, base.MEMORY,
            ),
            dispensable=("min to max", "memory"), fewest_ranks=2, strategy="ddp",
        ),
        Bench(
            "strategy", "Which strategy helps here?", strategy_arms, strategy_meaning,
            (*base.COMPARED, base.EXPOSED, base.LOSS),
            names=tuple(STRATEGIES), dispensable=("min to max", "exposed"), same_updates=True, fewest_ranks=2,
            strategy="ddp", notes=strategy_notes,
        ),
        Bench(
            "network", "How fast is the network here?", network_arms, network_meaning,
            (
                ARM, ("GB/s", base.RATE[1]), base.SPREAD,
                ("takes", lambda row, results: milliseconds(row) if "seconds" in row.extra else base.NONE),
            ),
            names=tuple(NETWORKS), amount="bytes", unit="GB/s", scale=1e-9, fewest_ranks=2, strategy="ddp",
        ),
        Bench(
            "proof", "Does training work here?", proof_arms, proof_meaning,
            (ARM, ("outcome", lambda row, results: row.outcome), ("figure", lambda row, results: row.figure)),
            names=PROOFS, dispensable=(), strategy="ddp", proves=True,
        ),
    )
}
# fmt: on


def bench_of(name: str) -> Bench:
    """Raises UserError for a name that is none."""
    if name not in BENCHES:
        otherwise = "`python -m jobs.bench --help` says what each of them answers."
        raise unknown("bench", name, list(BENCHES), otherwise=otherwise)
    return BENCHES[name]


def check_asked(bench: Bench, asked: Sequence[str]) -> None:
    """Refuse names that are none of this bench's arms."""
    for name in asked:
        is_number = name.isdecimal() and bench.lowest <= int(name) < 1 << 24
        if not (name in bench.names if bench.names else is_number):
            some = ",".join(bench.names[:2]) or "16,32,64"
            raise UserError(
                f"'{name}' is no arm of bench {bench.name}.",
                why=f"It has: {', '.join(bench.names) or f'whole numbers from {bench.lowest} on'}.",
                fix=did_you_mean(name, bench.names, otherwise=f"For example --arms {some}."),
            )
    if len(set(asked)) < len(asked):
        raise UserError("--arms names an arm twice.", why="The first one is its own control.", fix="Give each once.")
