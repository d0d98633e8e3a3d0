"""Rows of the log book: a run's settings, results and costs as text with units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainkit import fileio
from trainkit.ranks.env import fold
from trainkit.report.facts import Facts
from trainkit.report.samples import Usage
from trainkit.report.spans import processor_hours

Row = tuple[str, ...]
TIMES = "\N{MULTIPLICATION SIGN}"
NONE = "–"  # noqa: RUF001  an en dash: a value that this run does not have


def settings_rows(facts: Facts) -> list[Row]:
    """What the run was told to do, and where it ran."""
    get = facts.setting
    params = facts.started("params")
    rows = [
        ("model", _named(get("model")) + (f", {params:,} parameters" if isinstance(params, int) else "")),
        ("data", _named(get("data"), hide=("root", "workers", "device", "max_broken", "stage"))),
        ("images as expected by", _input(facts.started("input"))),
        ("strategy", _named(get("strategy"))),
        ("ranks", _ranks(facts)),
        ("device", _text(facts.started("device"))),
        ("precision", _text(facts.started("precision") or get("train.precision"))),
        ("batch size", _batch(facts)),
        ("optimizer", _optimizer(get("optim"))),
        ("schedule", _schedule(facts)),
        ("length", _length(facts)),
        ("seed", _text(get("seed"))),
        ("code", _commit(facts)),
    ]
    return [row for row in rows if row[1] != NONE]


RESULTS = ("split", "step", "epoch", "loss", "acc1", "acc5")


def results_rows(facts: Facts) -> list[Row]:
    """Of the best and the last evaluation and the test, of averaged weights as well; the columns are those of
    `RESULTS`."""
    found = []
    best, last = facts.best_val, facts.val[-1] if facts.val else None
    for name, record in (("val, best checkpoint", best), ("val, last", last), ("test, best checkpoint", facts.test)):
        if record is None:
            continue
        at = record
        if record is facts.test:
            step = facts.summary.get("best_step")
            at = best if best is not None and best["step"] == step else {"step": step}
        for prefix, whose in (("", ""), ("ema_", ", averaged weights")):
            if not prefix or "ema_loss" in record:
                percent = [number(record.get(f"{prefix}{key}"), ".2f", " %") for key in ("acc1", "acc5")]
                where = (_text(at.get("step")), number(at.get("epoch"), ".1f"))
                found.append((name + whose, *where, number(record.get(f"{prefix}loss"), ".4f"), *percent))
    return found


def cost_rows(facts: Facts) -> list[Row]:
    """Time, speed, memory, energy, restarts."""
    estimated = "" if fileio.is_number(facts.summary.get("train_seconds")) else " (estimated from the records)"
    seconds, wall = facts.train_seconds, facts.wall_seconds
    rows: list[Row] = [
        ("training time", duration(seconds) + estimated if seconds is not None else NONE),
        ("wall-clock time, ranks first met to end", duration(wall) if wall is not None else NONE),
        ("throughput, median", speed(facts.images_per_sec)),
        ("largest batch", _largest_batch(facts)),
        ("peak memory of rank 0", memory(facts.max_memory_mb) + _resident(facts)),
    ]
    ranks = facts.memory_of_ranks
    if len(ranks) > 1:
        rows.append(("peak memory of every rank", _each(ranks)))
    kept = [value for value in _list(facts.summary.get("max_memory_reserved_mb_of_ranks")) if fileio.is_number(value)]
    if kept:
        rows.append(("and reserved by its allocator", _each(kept)))
    rows.append(("GPU utilisation, mean", _utilisation(facts)))
    rows.append(("model FLOPs utilisation", number(facts.summary.get("mfu"), ".1f", " %")))
    rows.append(("GPU-hours", _gpu_hours(facts)))
    rows.append(("energy", _energy(facts.summary.get("energy"))))
    rows.append(("updates that came to nothing", facts.setbacks.in_words() or NONE))
    rows.append(("would be faster", _text(facts.summary.get("advice"))))
    rows.append(("attempts", f"{facts.attempts} ({facts.requeues} requeued)" if facts.attempts else NONE))
    return [row for row in rows if row[1] != NONE]


SPENT = ("time of rank 0 went on", "seconds", "of all")


def spent_rows(facts: Facts) -> list[Row]:
    """On what time went, in the order of an update; the columns are those of `SPENT`."""
    total = sum(facts.spent.values())
    rows = [
        (name, number(value, ",.1f"), number(100 * value / total, ".1f", " %")) for name, value in facts.spent.items()
    ]
    return [*rows, ("all", number(total, ",.1f"), "100 %")] if rows else []


HARDWARE = ("device", "utilisation, mean", "highest", "memory, highest", "power, mean", "temperature, highest")


def hardware_rows(facts: Facts) -> list[Row]:
    """One row for every GPU and for every host's CPUs; the columns are those of `HARDWARE`."""
    rows = []
    for host in facts.hosts:
        for index in host.gpu_indices():
            util, used, total = (host.gpu(index, key) for key in ("util_percent", "memory_used_mb", "memory_total_mb"))
            power, heat = host.gpu(index, "power_w"), host.gpu(index, "temperature_c")
            watts, celsius = number(power and power.mean, ".0f", " W"), number(heat and heat.highest, ".0f", " °C")
            rows.append(_use(f"GPU {index} of {host.host}", util, used, total, watts, celsius))
        util, used, total = (host.machine(key) for key in ("cpu_percent", "memory_used_mb", "memory_total_mb"))
        rows.append(_use(f"CPUs of {host.host}", util, used, total, NONE, NONE))
    return rows


def number(value: Any, spec: str, unit: str = "") -> str:
    """A number in ``spec`` with its unit, or a dash."""
    return format(value, spec) + unit if fileio.is_number(value) else NONE


def duration(seconds: float) -> str:
    """``12.3 s``, ``4 min 05 s``, ``1 h 30 min``; ``40 ms``, for nothing that took time took 0.0 s."""
    if not fileio.is_number(seconds):
        return NONE
    if 0 < seconds < 0.05:
        return f"{seconds * 1000:.2g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours} h {minute:02} min" if hours else f"{minute} min {second:02} s"


def speed(images_per_sec: float | None) -> str:
    """``2,010 images/s``; slow ones, as of a large model on a CPU, with decimals."""
    return number(images_per_sec, speed_spec(images_per_sec or 0.0), " images/s")


def speed_spec(images_per_sec: float) -> str:
    """The format of images/s: never 0 for what is not nothing."""
    return ",.0f" if images_per_sec >= 20 else ".1f" if images_per_sec >= 2 else ".2g"


def memory(mb: Any) -> str:
    """Megabytes as ``812 MB`` or ``15.2 GB``."""
    if not fileio.is_number(mb):
        return NONE
    return f"{mb:,.0f} MB" if mb < 1024 else f"{mb / 1024:,.1f} GB"


def _use(device: str, util: Usage | None, used: Usage | None, total: Usage | None, *more: str) -> Row:
    memory_text = memory(used.highest if used else None) + (f" of {memory(total.highest)}" if used and total else "")
    return (
        device,
        number(util and util.mean, ".0f", " %"),
        number(util and util.highest, ".0f", " %"),
        memory_text,
        *more,
    )


def _named(section: Any, hide: tuple[str, ...] = ()) -> str:
    """``ddp (bucket_cap_mb: 50)``: a plugin and those of its options that are set."""
    if not isinstance(section, dict):
        return NONE
    given = {key: value for key, value in section.items() if key not in ("name", *hide) and value not in (None, [])}
    options = ", ".join(f"{key}: {value}" for key, value in given.items())
    return _text(section.get("name")) + (f" ({options})" if options else "")


def _ranks(facts: Facts) -> str:
    world_size, hosts = facts.started("world_size"), facts.started("hosts") or []
    if not isinstance(world_size, int):
        return NONE
    nodes = told if isinstance(told := facts.setting("launch.nodes"), int) and told > 0 else 1
    per_node = f"{nodes} nodes {TIMES} {world_size // nodes}" if nodes > 1 and world_size % nodes == 0 else ""
    simulated = " simulated on one machine" if nodes > 1 and len(hosts) == 1 else ""
    where = f"{per_node}{simulated}" if per_node else ""
    return f"{world_size}" + (f" ({where})" if where else "") + (f" on {fold(hosts)}" if hosts else "")


def _input(expected: Any) -> str:
    """How pretrained weights had the images prepared."""
    if not isinstance(expected, dict):
        return NONE
    return f"{expected.get('source')}: " + ", ".join(
        f"{key} {expected.get(key)}" for key in ("mean", "std", "interpolation", "crop")
    )


def _batch(facts: Facts) -> str:
    size = facts.setting("train.global_batch_size")
    micro, passes = facts.summary.get("micro_batch_size"), facts.summary.get("grad_accum_steps")
    if not isinstance(micro, int) or not isinstance(passes, int):
        return _text(size)
    ranks = facts.started("world_size")
    return f"{size} = {ranks} rank{'s' if ranks != 1 else ''} {TIMES} {micro}" + (
        f" {TIMES} {passes} accumulated passes" if passes > 1 else ""
    )


def _optimizer(optim: Any) -> str:
    if not isinstance(optim, dict):
        return NONE
    keys = ["lr", "weight_decay"]
    own = {"adamw": ["betas"], "lamb": ["betas"], "sgd": ["momentum", "nesterov"], "muon": ["momentum", "nesterov"]}
    keys += own.get(str(optim.get("name")), []) + ["layer_decay"] * (optim.get("layer_decay", 1) != 1)
    return f"{optim.get('name')}, " + ", ".join(f"{key} {optim[key]}" for key in keys if key in optim)


def _schedule(facts: Facts) -> str:
    schedule = facts.setting("schedule")
    if not isinstance(schedule, dict):
        return NONE
    epochs = schedule.get("warmup_epochs", 0)
    total, per_epoch = facts.started("total_steps"), facts.started("steps_per_epoch")
    told = f"{schedule.get('name')}, warm-up {number(epochs, 'g')} epoch{'s' * (epochs != 1)}"
    known = all(fileio.is_number(value) for value in (epochs, total, per_epoch))
    # Training warms up for at most half of a run, and not at all for a single update.
    return f"{told}, here {total // 2} steps" if known and epochs * per_epoch > total / 2 else told


def _length(facts: Facts) -> str:
    total, per_epoch = facts.started("total_steps"), facts.started("steps_per_epoch")
    if not isinstance(total, int):
        return NONE
    done = f"{facts.steps} of {total} steps" if facts.steps != total else f"{total} steps"
    if not isinstance(per_epoch, int) or not per_epoch:
        return done
    return f"{done} = {facts.steps / per_epoch:g} epochs of {per_epoch}"


def _commit(facts: Facts) -> str:
    git, mark = facts.manifest.get("git"), facts.manifest.get("fingerprint")
    if isinstance(git, dict) and git.get("commit"):
        return f"commit {str(git['commit'])[:12]}" + (", with uncommitted changes" if git.get("diff") else "")
    return f"no git repository; its files have the fingerprint {mark[:12]}" if isinstance(mark, str) and mark else NONE


def _largest_batch(facts: Facts) -> str:
    """What ``train.micro_batch_size=auto`` has found: of a size that was given nobody knows if it is the largest."""
    found: dict[str, Any] = next((event for event in reversed(facts.events) if event.get("event") == "probed"), {})
    micro, ranks = found.get("micro_batch_size"), found.get("world_size")
    if not fileio.is_whole(micro) or not fileio.is_whole(ranks) or not ranks:
        return NONE
    used = f"an update takes {memory(found.get('peak_mb'))} of {memory(found.get('room_mb'))}"
    share = facts.count("train.global_batch_size") // ranks
    more = "; more would fit, this is all of train.global_batch_size" if micro == share else ""
    return f"{micro * ranks} = {ranks} rank{'s' * (ranks > 1)} {TIMES} {micro} in one pass; {used}{more}"


def _resident(facts: Facts) -> str:
    known = facts.max_memory_mb is not None and facts.started("device") == "cpu"
    return " (of its process, on the CPU)" if known else ""


def _each(ranks: Sequence[float]) -> str:
    """Of every rank, in order; of very many the extremes."""
    if len(ranks) > 64:
        return f"{memory(min(ranks))} to {memory(max(ranks))}"
    return ", ".join(memory(value) for value in ranks)


def _utilisation(facts: Facts) -> str:
    used = [usage.mean for host in facts.hosts for i in host.gpu_indices() if (usage := host.gpu(i, "util_percent"))]
    if used:
        return f"{sum(used) / len(used):.0f} % of {len(used)} GPU{'s' * (len(used) > 1)}"
    return "no GPU: trained on the CPU" if facts.started("device") == "cpu" else NONE


def _gpu_hours(facts: Facts) -> str:
    hours = processor_hours(facts)
    if hours is None:
        return NONE
    return f"none; {hours:.3g} rank-hours on the CPU" if facts.started("device") == "cpu" else f"{hours:.3g}"


def _energy(energy: Any) -> str:
    told = {"GPUs": "gpu_kwh", "processors": "cpu_kwh"} if isinstance(energy, dict) else {}
    kwh = [f"{name} {number(energy[key], '.3g', ' kWh')}" for name, key in told.items() if key in energy]
    return ", ".join(kwh) or NONE


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return NONE if value is None else str(value)
