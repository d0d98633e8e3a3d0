"""Sections of a report that are tables and lists, and the sentence on how far a run came."""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import Any

from pydantic import ValidationError

from trainkit.common import fileio, jsonl, terminal
from trainkit.common.errors import TrainkitError
from trainkit.common.hosts import fold
from trainkit.common.terminal import plural
from trainkit.config import yaml
from trainkit.config.layers import flatten
from trainkit.config.loading import load
from trainkit.config.schema import OptimConfig
from trainkit.config.task_metrics import Metric
from trainkit.report.document import MEASURE, Block, Items, Part, ReportRow, Table, Text
from trainkit.report.facts import Facts
from trainkit.report.templates import Code
from trainkit.report.values import (
    NONE,
    TIMES,
    duration,
    known_rows,
    list_of,
    memory,
    number,
    numbers_of,
    rate,
    text,
    with_unit,
)
from trainkit.run.folder import REMOTE

_NOT_OF_THE_TRAINING = ("launch.", "monitor.", "collaborative.initial_peers", "data.root")
_MOST_SETTINGS = 200
_MOST_NAMES = 100
_MOST_RANKS = 64
_HIDDEN_OF_DATA = ("root", "workers", "device", "max_broken", "stage", "fake", "all_kinds")
MADE_UP = "Its images were made up (data.fake): nothing that was measured on them counts."


def headline(facts: Facts) -> tuple[str, str]:
    """Say how far a run came, and what went wrong."""
    lost = facts.setbacks.in_words()
    alarm = ""
    if facts.setbacks.diverged:
        alarm = f"It has diverged: {lost}."
    elif lost:
        alarm = f"{lost.capitalize()}."
    if facts.setting("data.fake") is True:
        alarm = f"{MADE_UP} {alarm}".rstrip()
    if facts.finished or facts.pruned:
        how = "Finished"
        cause = "Stopped early"
        if facts.pruned:
            how = "Stopped"
            cause = "Pruned"
        words = f"{how} after {facts.steps:,} steps."
        early = facts.summary.get("stopped_early")
        if isinstance(early, str):
            words += f" {cause}: {terminal.one_line(early)}."
        return words, alarm
    if not facts.begun:
        return "It has not begun.", alarm
    # A failure after which a further attempt has started is on the time line.
    last = facts.last_event("failed", "handed_back", "started")
    if last.get("event") == "failed":
        words = (str(last.get("error") or "").splitlines() or ["unknown"])[0].rstrip(".")
        alarm = f"It has failed on rank {last.get('rank', '?')}: {words}. {alarm}"
    elif last.get("event") == "handed_back":
        alarm = f"It was told to stop and saved. {alarm}"
    steps = f"{facts.steps:,}"
    total = facts.started("total_steps")
    if total:
        steps += f" of {total:,}"
    return f"Not finished: {steps} steps.", alarm.rstrip()


def _told(header: ReportRow, rows: Sequence[ReportRow]) -> list[Part]:
    """A table of those rows that have a value."""
    return [Table(header, known_rows(rows))]


def asked(facts: Facts) -> list[Part]:
    """Tags and notes of the run, the command that made it, and what that changed of the preset."""
    said = []
    if facts.labels.tags:
        said.append([f"tags: {', '.join(facts.labels.tags)}"])
    for note in facts.labels.notes:
        said.append([f"{note.day}: {note.text}".removeprefix(": ")])
    parts: list[Part] = [Items(said)]
    command = [word for word in list_of(facts.manifest.get("command")) if isinstance(word, str)]
    if command:
        parts.append(Block(shlex.join(command)))
    for word in command[3:]:
        preset = None
        if not word.startswith("-") and "=" not in word:
            preset = _preset(word)
        if preset is not None:
            return [*parts, _changes(facts, word, preset)]
    return parts


def _changes(facts: Facts, name: str, preset: Mapping[str, Any]) -> Part:
    """A table of the settings that are not those of the preset."""
    rows = []
    for key, value in flatten(facts.config):
        if value != preset.get(key) and not key.startswith(_NOT_OF_THE_TRAINING):
            rows.append((key, _line(value), _line(preset.get(key))))
    if not rows:
        return Text(["All other settings are those of the preset ", Code(name), "."])
    return Table(("setting", "this run", "the preset"), rows[:_MOST_SETTINGS])


@cache
def _preset(name: str) -> dict[str, Any] | None:
    """The settings of a preset as it is now; None where it cannot be read."""
    try:
        return dict(flatten(load(name).config.model_dump(mode="json")))
    except (TrainkitError, OSError):  # a preset of the user in another folder
        return None


def where(facts: Facts) -> list[Part]:
    """Nodes, GPUs, jobs, software."""
    nodes = fold(facts.started("hosts") or ())
    if nodes and facts.is_simulated:
        nodes = f"{facts.count('launch.nodes')} simulated on one machine: {nodes}"
    device = facts.started("device")
    gpus = NONE
    if device == "cpu":
        gpus = "none: trained on the CPU"
    elif device:
        gpus = f"{facts.processors or '?'} of {device}"
    jobs = []
    for job in facts.events_of("submitted"):
        jobs.append(f"{job.get('executor', '?')} {job.get('job_id', '?')}")
    versions = {"Python": facts.manifest.get("python")}
    for packages in (facts.manifest.get("packages"), facts.started("versions")):
        if isinstance(packages, Mapping):
            versions |= packages
    software = []
    for name, version in versions.items():
        if isinstance(version, str):
            software.append(f"{name} {version}")
    rows = [
        ("nodes", nodes or NONE),
        ("GPUs", gpus),
        ("job", ", ".join(dict.fromkeys(jobs)) or NONE),
        ("submitted from", _line(facts.manifest.get("host"))),
        ("system", _line(facts.manifest.get("platform"))),
        ("software", ", ".join(software) or NONE),
    ]
    return _told(("", "what"), rows)


def script_name(facts: Facts) -> str:
    """Name of a script's program; empty for a run of ours."""
    for key in ("module", "path", "program"):
        told = facts.setting(f"script.{key}")
        if isinstance(told, str):
            return terminal.one_line(told.rpartition("/")[2])
    return ""


def settings(facts: Facts) -> list[Part]:
    """Settings that matter to the training, in a few lines."""
    get = facts.setting
    if facts.is_script:
        words = [str(item) for item in (*list_of(get("script.arguments")), get("launch.on_restart") or "")]
        rows = [
            ("script", script_name(facts)),
            ("arguments", terminal.one_line(shlex.join(filter(None, words)), 2000)),
            ("filled in", _line(get("script.values") or None)),
            ("ranks", text(facts.started("world_size"))),
            ("code", _commit(facts)),
        ]
        return _told(("setting", "value"), rows)
    model = _named(get("model"))
    params = facts.started("params")
    if params:
        model += f", {params:,} parameters"
    rows = [
        ("model", model),
        ("data", _named(get("data"), hide=_HIDDEN_OF_DATA)),
        ("images as expected by", _named(facts.started("input"), key="source")),
        ("strategy", _named(get("strategy"))),
        ("ranks", text(facts.started("world_size"))),
        ("precision", text(facts.started("precision") or get("train.precision"))),
        ("batch size", _batch(facts)),
        ("optimizer", _named(_given(get("optim")))),
        ("schedule", text(get("schedule.name"))),
        ("warm-up, epochs", number(get("schedule.warmup_epochs"), "g")),
        ("length", _length(facts)),
        ("seed", text(get("seed"))),
        ("code", _commit(facts)),
    ]
    return _told(("setting", "value"), rows)


def results(facts: Facts) -> list[Part]:
    """Metrics of the best and the last validation, and of the test."""
    best = facts.best_val
    metrics = facts.task_metrics.metrics
    rows: list[ReportRow] = []
    if best is not None:
        rows += _result("val, best checkpoint", best, best, metrics)
    if facts.val:
        rows += _result("val, last", facts.val[-1], facts.val[-1], metrics)
    if facts.test is not None:
        place: Mapping[str, Any] = {"step": facts.summary.get("best_step")}
        if best and best["step"] == place["step"]:
            place = best
        rows += _result("test, best checkpoint", facts.test, place, metrics)
    return [Table(("split", "step", "epoch", *metrics), rows, 1)]


def _result(
    name: str, record: Mapping[str, Any], place: Mapping[str, Any], metrics: Mapping[str, Metric]
) -> Iterator[ReportRow]:
    """A row for a record, and one for the averaged weights, where there are any; ``place`` has step and epoch."""
    where = (text(place.get("step")), number(place.get("epoch"), ".1f"))
    values = []
    averaged = []
    for key, metric in metrics.items():
        values.append(with_unit(record.get(key), metric))
        averaged.append(with_unit(record.get(f"ema_{key}"), metric))
    yield (name, *where, *values)
    if "ema_loss" in record:
        yield (f"{name}, averaged weights", *where, *averaged)


def cost(facts: Facts) -> list[Part]:
    """Time, speed, memory, energy, restarts."""
    get = facts.summary.get
    seconds = duration(facts.train_seconds)
    if facts.train_seconds is not None and not jsonl.is_number(get("train_seconds")):
        seconds += " (estimated from the records)"
    speed = NONE
    if facts.images_per_sec is not None:
        speed = f"{rate(facts.images_per_sec)} images/s"
    peak = memory(facts.max_memory_mb)
    hours = "GPU-hours"
    by_use = "GPU-hours by use"
    if facts.started("device") == "cpu":
        hours = "rank-hours on the CPU"
        by_use = "Rank-hours by use"
        if facts.max_memory_mb:
            peak += " (of its process, on the CPU)"
    ranks = facts.memory_of_ranks if len(facts.memory_of_ranks) > 1 else []
    rows = [
        ("training time", seconds),
        ("wall-clock time, ranks first met to end", duration(facts.wall_seconds)),
        ("throughput, median", speed),
        ("largest batch", _largest_batch(facts)),
        ("peak memory of rank 0", peak),
        ("peak memory of every rank", _each(ranks)),
        ("and reserved by its allocator", _each(facts.of_ranks("max_memory_reserved_mb_of_ranks"))),
        ("GPU utilisation, mean", _utilisation(facts)),
        ("model FLOPs utilisation", number(get("mfu"), ".1f", " %")),
        (hours, number(facts.processor_hours, ".3g")),
        ("energy", energy(facts.energy)),
        ("g CO2 equivalent", _carbon(facts)),
        ("updates that came to nothing", facts.setbacks.in_words() or NONE),
        ("would be faster", text(get("advice"))),
        ("attempts", f"{facts.attempts} ({facts.requeues} requeued)" if facts.attempts else NONE),
    ]
    return [*_told(MEASURE, rows), Table(("use", "time", "of all"), _by_use(facts), 1, by_use)]


def _by_use(facts: Facts) -> list[ReportRow]:
    """Hours of the processors by use, and those in the queue, when nobody had any."""
    rows: list[ReportRow] = []
    for use, hours in facts.hours_by_use.items():
        rows.append((use, duration(3600 * hours), number(100 * hours / (facts.processor_hours or 1.0), ".1f", " %")))
    if rows and facts.queue_hours > 1 / 60:
        rows.append(("in the queue, without processors", duration(3600 * facts.queue_hours), NONE))
    return rows


def rounds(facts: Facts) -> list[Part]:
    """Rounds of a collaborative run and what was sent in them, and who has contributed how much."""
    everybody = facts.contributions
    samples = sum(item.samples for item in everybody) or 1
    names = []
    for item in everybody[:_MOST_NAMES]:
        share = number(100 * item.samples / samples, ".1f", " %")
        received = terminal.size(item.bytes) if item.bytes else NONE
        hours = number(item.seconds / 3600, ",.2f")
        names.append((item.name, number(item.samples, ",.0f"), share, f"{item.rounds:,}", hours, received))
    caption = "Contributions"
    if len(everybody) > _MOST_NAMES:
        caption += f", the {_MOST_NAMES} largest"
    header = ("name", "samples", "of all", "rounds", "hours", "received from it")
    return [Table(MEASURE, _of_all_rounds(facts)), Table(header, names, 1, caption)]


def _of_all_rounds(facts: Facts) -> list[ReportRow]:
    """Sums over the rounds of a collaborative run; empty for others."""
    done = [record for record in facts.train if jsonl.is_number(record.get("round"))]
    if not done:
        return []
    rounds = f"{done[-1]['round']:,}"
    planned = facts.setting("collaborative.rounds")
    if isinstance(planned, int):
        rounds += f" of {planned:,}"
    averaged = "none"
    groups = [group for group in numbers_of(done, "peers") if group > 1]
    if groups:
        averaged = f"{len(groups):,}, by up to {max(groups):.0f} peers"
    expected = sum(numbers_of(done, "parts_expected"))
    received = 100 * sum(numbers_of(done, "parts")) / expected if expected else None
    return [
        ("rounds", rounds),
        ("averaged with others", averaged),
        ("parts received", number(received, ".1f", " %")),
        ("sent", terminal.size(int(sum(numbers_of(done, "bytes_up"))))),
        ("received", terminal.size(int(sum(numbers_of(done, "bytes_down"))))),
    ]


def missing(facts: Facts) -> list[Part]:
    """Measurements that a reader may look for and the run does not have, each with the reason."""
    run = facts.run_dir
    lines: list[Sequence[str]] = []
    if facts.is_script:  # only which knows what it could have measured
        return [Items([["training metrics: the script has not called trainkit.log"]] if not facts.train else [])]
    has_classes = run.confusion.exists() or not run.task.exists()
    if not facts.train:
        lines.append(["training metrics: metrics.jsonl has none"])
    if not facts.val:
        lines.append(["validation metrics: no evaluation was reached"])
    if facts.test is None:
        lines.append(["test metrics: ", Code(terminal.command("evaluate", run.path)), " measures them"])
    if facts.val and has_classes and not run.mistakes("val").exists():
        val = Code(terminal.command("evaluate", run.path, "--split", "val"))
        lines.append(["images that were told wrong: ", val, " keeps them"])
    if not facts.summary:
        lines.append(["final numbers (summary.json): the run has not ended, or was stopped; times are estimates"])
    elif facts.summary.get("energy", 0) is None and not facts.energy:
        lines.append(["energy: no GPU has told it"])
    elif facts.energy and facts.setting("launch.carbon_intensity") is None:
        lines.append(["g CO2: ", Code("launch.carbon_intensity"), " was not set, in the site's profile or the run"])
    if not facts.hosts:
        lines.append(["hardware samples: no system-<host>.jsonl with a whole line in it"])
    return [Items(lines)]


def places(facts: Facts) -> list[Part]:
    """Places of the run's files."""
    run = facts.run_dir
    path = terminal.path
    lines: list[Sequence[str]] = [["run folder: ", Code(path(run.path))]]
    best = run.checkpoints / "best"
    step = os.path.islink(best) and re.fullmatch("step-([0-9]+)", os.readlink(best))
    if step:
        lines.append(["best checkpoint: ", Code(path(best)), f" (step {int(step[1])})"])
    bucket = jsonl.plain(fileio.read_object(REMOTE.at(run.path))).get("url")
    if isinstance(bucket, str):
        lines.append(["in the bucket: ", Code(bucket), ", with the best weights"])
    if os.path.isdir(run.code):
        lines.append(["code as it ran: ", Code(path(run.code))])
    if run.tensorboard.is_dir():
        lines.append(["curves: ", Code(f"tensorboard --logdir {path(run.tensorboard)}")])
    if any(run.wandb.glob("offline-run-*")):
        lines.append(["upload to Weights & Biases: ", Code(terminal.command("sync", run.path))])
    lines.append(["repeat it: ", Code(terminal.command("submit", run.config, "--again"))])
    return [Items(lines)]


def _line(value: Any) -> str:
    if value is None:
        return NONE
    return terminal.one_line(value)


def _named(section: Any, key: str = "name", hide: tuple[str, ...] = ()) -> str:
    """``ddp (bucket_cap_mb: 50)``: a plugin and those of its options that are set."""
    if not isinstance(section, dict):
        return NONE
    options = []
    for name, value in section.items():
        if name not in (key, *hide) and value not in (None, []):
            options.append(f"{name}: {value}")
    words = text(section.get(key))
    if options:
        words += f" ({', '.join(options)})"
    return words


def _given(optim: Any) -> Any:
    """Keep the settings that an optimizer is given, where they are what they should be."""
    try:
        shown = {"name", "lr", "weight_decay", "layer_decay", *OptimConfig.model_validate(optim).given()}
    except ValidationError:
        return optim
    if optim["name"] == "muon":
        shown.add("muon_as")
    return {key: value for key, value in optim.items() if key in shown}


def _batch(facts: Facts) -> str:
    size = facts.setting("train.global_batch_size")
    micro = facts.summary.get("micro_batch_size")
    passes = facts.summary.get("grad_accum_steps")
    if not isinstance(micro, int) or not isinstance(passes, int):
        return text(size)
    words = f"{size} = {plural(facts.started('world_size'), 'rank')} {TIMES} {micro}"
    if passes > 1:
        words += f" {TIMES} {passes} accumulated passes"
    return words


def _length(facts: Facts) -> str:
    total = facts.started("total_steps")
    per_epoch = facts.started("steps_per_epoch")
    if total is None:
        return NONE
    done = f"{total} steps" if facts.steps == total else f"{facts.steps} of {total} steps"
    if not per_epoch:
        return done
    return f"{done} = {facts.steps / per_epoch:g} epochs of {per_epoch}"


def _commit(facts: Facts) -> str:
    git = facts.manifest.get("git")
    mark = facts.manifest.get("fingerprint")
    if isinstance(git, dict) and git.get("commit"):
        commit = f"commit {str(git['commit'])[:12]}"
        if git.get("diff"):
            commit += ", with uncommitted changes"
        return commit
    if isinstance(mark, str) and mark:
        return f"no git repository; its files have the fingerprint {mark[:12]}"
    return NONE


def _largest_batch(facts: Facts) -> str:
    """Batch that ``train.micro_batch_size=auto`` has found; a given size may not be the largest."""
    found = facts.last_event("probed")
    micro = found.get("micro_batch_size")
    ranks = found.get("world_size")
    if not jsonl.is_whole(micro) or not ranks:
        return NONE
    used = f"an update takes {memory(found.get('peak_mb'))} of {memory(found.get('room_mb'))}"
    found_size = f"{micro * ranks} = {plural(ranks, 'rank')} {TIMES} {micro} in one pass; {used}"
    if micro == facts.count("train.global_batch_size") // ranks:
        return f"{found_size}; more would fit, this is all of train.global_batch_size"
    return found_size


def _each(ranks: Sequence[float]) -> str:
    """Memory of every rank, in order; of very many the extremes; a dash where there is none."""
    if len(ranks) > _MOST_RANKS:
        return f"{memory(min(ranks))} to {memory(max(ranks))}"
    return ", ".join(map(memory, ranks)) or NONE


def _utilisation(facts: Facts) -> str:
    means = []
    for host in facts.hosts:
        means += [usage.mean for usage in host.gpu_use()]
    if not means:
        return NONE
    return f"{fmean(means):.0f} % of {plural(len(means), 'GPU')}"


def _carbon(facts: Facts) -> str:
    """Emissions of generating the measured energy, with the source of the factor."""
    told = facts.energy
    factor = facts.setting("launch.carbon_intensity")
    of = "as launch.carbon_intensity says"
    if isinstance(factor, str):
        known = yaml.packaged("carbon")
        of = f"mean of {terminal.one_line(factor)} in {known['year']} by {known['source']}"
        factor = known["countries"].get(factor)
    if not told or not jsonl.is_number(factor):
        return NONE
    parts = " and ".join(name for name, key in _METERS.items() if key in told)
    grams = sum(told.values()) * factor
    return f"{number(grams, ',.0f' if grams >= 100 else '.3g')}, of {parts} alone ({number(factor, 'g')} g/kWh, {of})"


_METERS = {"GPUs": "gpu_kwh", "processors": "cpu_kwh"}


def energy(told: Mapping[str, float]) -> str:
    """Energy in words, as `Facts.energy` has it."""
    known = [f"{name} {number(told[key], '.3g', ' kWh')}" for name, key in _METERS.items() if key in told]
    return ", ".join(known) or NONE
