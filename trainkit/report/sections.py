"""The sections of a report, in order, and those that are tables. A new section of runs is a function in `RUNS`."""

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import ValidationError

from trainkit import fileio, terminal
from trainkit.config import yaml
from trainkit.config.loading import flatten, load
from trainkit.config.schema import OptimConfig
from trainkit.errors import TrainkitError
from trainkit.ranks import fold
from trainkit.report import document as doc
from trainkit.report.comparison import comparison, is_about_speed, swept
from trainkit.report.document import NONE, TIMES, duration, memory, number, rate, text
from trainkit.report.facts import Facts, list_of, numbers
from trainkit.report.figures import attempts, classes, curves, hardware, mistakes, spent, timeline
from trainkit.run.folder import REMOTE
from trainkit.terminal import plural

_NOT_OF_THE_TRAINING = ("launch.", "monitor.", "collaborative.initial_peers", "data.root")
_MOST_SETTINGS, _MOST_NAMES, _MOST_RANKS = 200, 100, 64


def of_several(runs: Sequence[Facts]) -> list[doc.Section]:
    """Sections that set runs against each other; of a sweep, whose best run is the first, with its results."""
    if not is_sweep(runs):
        return [comparison(runs)]
    about_speed = is_about_speed(key for facts in runs for key in facts.point)
    return [swept(runs), comparison(runs)] if about_speed else [swept(runs)]


def of_runs(runs: Sequence[Facts]) -> list[doc.Section]:
    """Sections on each run."""
    return [section(runs) for section in RUNS]


def is_sweep(runs: Sequence[Facts]) -> bool:
    """Whether they are the runs of one."""
    return len(runs) > 1 and all(facts.point for facts in runs)


MADE_UP = "Its images were made up (data.fake): nothing that was measured on them counts."


def headline(facts: Facts) -> tuple[str, str]:
    """How far a run came, and what went wrong."""
    setbacks, lost = facts.setbacks, facts.setbacks.in_words()
    alarm = f"It has diverged: {lost}." if setbacks.diverged else f"{lost.capitalize()}." if lost else ""
    if facts.setting("data.fake") is True:
        alarm = f"{MADE_UP} {alarm}".rstrip()
    if facts.finished or facts.pruned:
        early = facts.summary.get("stopped_early")
        how = "Pruned" if facts.pruned else "Stopped early"
        why = f" {how}: {terminal.one_line(early)}." if isinstance(early, str) else ""
        return f"{'Stopped' if facts.pruned else 'Finished'} after {facts.steps:,} steps.{why}", alarm
    if not facts.begun:
        return "It has not begun.", alarm
    # A failure after which a further attempt has started is on the time line.
    last, total = facts.last_event("failed", "handed_back", "started"), facts.started("total_steps")
    if last.get("event") == "failed":
        words = (str(last.get("error") or "").splitlines() or ["unknown"])[0].rstrip(".")
        alarm = f"It has failed on rank {last.get('rank', '?')}: {words}. {alarm}"
    elif last.get("event") == "handed_back":
        alarm = f"It was told to stop and saved. {alarm}"
    of = f" of {total:,}" if total else ""
    return f"Not finished: {facts.steps:,}{of} steps.", alarm.rstrip()


def _told(header: doc.Row, rows: Sequence[doc.Row]) -> list[doc.Part]:
    """A table of what the run has."""
    return [doc.Table(header, [row for row in rows if row[1] != NONE])]


def asked(facts: Facts) -> list[doc.Part]:
    """What the user says of the run, the command that made it, and what that changed of the preset."""
    command = [word for word in list_of(facts.manifest.get("command")) if isinstance(word, str)]
    said = [[f"tags: {', '.join(facts.labels.tags)}"]] if facts.labels.tags else []
    said += [[f"{note.day}: {note.text}".removeprefix(": ")] for note in facts.labels.notes]
    parts: list[doc.Part] = [doc.Items(said)] if said else []
    parts += [doc.Block(shlex.join(command))] if command else []
    names = [word for word in command[3:] if not word.startswith("-") and "=" not in word]
    preset = next((name for name in names if _preset(name) is not None), "")
    if not preset:
        return parts
    own, theirs = dict(flatten(facts.config)), _preset(preset) or {}
    keys = [key for key in own if own[key] != theirs.get(key) and not key.startswith(_NOT_OF_THE_TRAINING)]
    rows = [(key, _line(own[key]), _line(theirs.get(key))) for key in keys[:_MOST_SETTINGS]]
    same = doc.Text(["All other settings are those of the preset ", doc.Code(preset), "."])
    return [*parts, doc.Table(("setting", "this run", "the preset"), rows) or same]


@cache
def _preset(name: str) -> dict[str, Any] | None:
    """The settings of a preset as it is now; None where it cannot be read."""
    try:
        return dict(flatten(load(name).config.model_dump(mode="json")))
    except (TrainkitError, OSError):  # a preset of the user in another folder
        return None


def where(facts: Facts) -> list[doc.Part]:
    """Nodes, GPUs, jobs, software."""
    hosts, device, host = facts.started("hosts"), facts.started("device"), facts.manifest.get("host")
    simulated = f"{facts.count('launch.nodes')} simulated on one machine: " if facts.is_simulated else ""
    jobs = [f"{job.get('executor', '?')} {job.get('job_id', '?')}" for job in facts.events_of("submitted")]
    versions = {"Python": facts.manifest.get("python")}
    for packages in (facts.manifest.get("packages"), facts.started("versions")):
        versions |= packages if isinstance(packages, Mapping) else {}
    gpus = "none: trained on the CPU" if device == "cpu" else f"{facts.processors or '?'} of {device}"
    rows = [
        ("nodes", f"{simulated}{fold(hosts)}" if hosts else NONE),
        ("GPUs", gpus if device else NONE),
        ("job", ", ".join(dict.fromkeys(jobs)) or NONE),
        ("submitted from", host if isinstance(host, str) else NONE),
        ("system", _line(facts.manifest.get("platform"))),
        ("software", ", ".join(f"{name} {it}" for name, it in versions.items() if isinstance(it, str)) or NONE),
    ]
    return _told(("", "what"), rows)


def settings(facts: Facts) -> list[doc.Part]:
    """What the run was told to do, in a few lines."""
    get, params, expected = facts.setting, facts.started("params"), facts.started("input")
    rows = [
        ("model", _named(get("model")) + (f", {params:,} parameters" if params else "")),
        ("data", _named(get("data"), hide=("root", "workers", "device", "max_broken", "stage", "fake"))),
        ("images as expected by", _named(expected, key="source")),
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


def results(facts: Facts) -> list[doc.Part]:
    """The best and the last validation and the test."""
    best, metrics, step = facts.best_val, facts.described.metrics, facts.summary.get("best_step")
    rows: list[doc.Row] = []

    def add(name: str, record: Mapping[str, Any], place: Mapping[str, Any]) -> None:
        where = (text(place.get("step")), number(place.get("epoch"), ".1f"))
        rows.append((name, *where, *(doc.measured(record.get(key), metric) for key, metric in metrics.items())))
        if "ema_loss" in record:
            averaged = (doc.measured(record.get(f"ema_{key}"), metric) for key, metric in metrics.items())
            rows.append((f"{name}, averaged weights", *where, *averaged))

    if best is not None:
        add("val, best checkpoint", best, best)
    if facts.val:
        add("val, last", facts.val[-1], facts.val[-1])
    if facts.test is not None:
        is_known = best is not None and best["step"] == step
        add("test, best checkpoint", facts.test, best if best is not None and is_known else {"step": step})
    return [doc.Table(("split", "step", "epoch", *metrics), rows, 1)]


def cost(facts: Facts) -> list[doc.Part]:
    """Time, speed, memory, energy, restarts."""
    get, seconds, speed = facts.summary.get, facts.train_seconds, facts.images_per_sec
    estimated = "" if fileio.is_number(get("train_seconds")) else " (estimated from the records)"
    ranks, kept = facts.memory_of_ranks, numbers(list_of(get("max_memory_reserved_mb_of_ranks")))
    on_cpu = facts.started("device") == "cpu"
    of_process = " (of its process, on the CPU)" if facts.max_memory_mb and on_cpu else ""
    rows = [
        ("training time", duration(seconds) + estimated if seconds is not None else NONE),
        ("wall-clock time, ranks first met to end", duration(facts.wall_seconds)),
        ("throughput, median", f"{rate(speed)} images/s" if speed is not None else NONE),
        ("largest batch", _largest_batch(facts)),
        ("peak memory of rank 0", memory(facts.max_memory_mb) + of_process),
        ("peak memory of every rank", _each(ranks) if len(ranks) > 1 else NONE),
        ("and reserved by its allocator", _each(kept) if kept else NONE),
        ("GPU utilisation, mean", _utilisation(facts)),
        ("model FLOPs utilisation", number(get("mfu"), ".1f", " %")),
        ("rank-hours on the CPU" if on_cpu else "GPU-hours", number(facts.processor_hours, ".3g")),
        ("energy", energy(facts.energy)),
        ("g CO2 equivalent", _carbon(facts)),
        ("updates that came to nothing", facts.setbacks.in_words() or NONE),
        ("would be faster", text(get("advice"))),
        ("attempts", f"{facts.attempts} ({facts.requeues} requeued)" if facts.attempts else NONE),
    ]
    return [*_told(doc.MEASURE, rows), *_by_use(facts, "Rank-hours" if on_cpu else "GPU-hours")]


def _by_use(facts: Facts, unit: str) -> list[doc.Part]:
    """Where the hours of the processors went, and how long nobody had any: in the queue."""
    uses, held = facts.hours_by_use, facts.processor_hours or 1.0
    rows = [(use, duration(3600 * hours), number(100 * hours / held, ".1f", " %")) for use, hours in uses.items()]
    if uses and facts.queue_hours > 1 / 60:
        rows.append(("in the queue, without processors", duration(3600 * facts.queue_hours), NONE))
    return [doc.Table(("use", "time", "of all"), rows, 1, f"{unit} by use")]


def rounds(facts: Facts) -> list[doc.Part]:
    """Of a collaborative run: its rounds and what was sent in them, and who has contributed how much."""
    rows: list[doc.Row] = []
    if done := [record for record in facts.train if fileio.is_number(record.get("round"))]:
        keys = ("parts", "parts_expected", "bytes_up", "bytes_down")
        parts, expected, up, down = (sum(numbers(record.get(key) for record in done)) for key in keys)
        planned, groups = facts.setting("collaborative.rounds"), numbers(record.get("peers") for record in done)
        together = [int(group) for group in groups if group > 1]
        rows = [
            ("rounds", f"{done[-1]['round']:,}" + (f" of {planned:,}" if isinstance(planned, int) else "")),
            ("averaged with others", f"{len(together):,}, by up to {max(together)} peers" if together else "none"),
            ("parts received", number(100 * parts / expected, ".1f", " %") if expected else NONE),
            ("sent", terminal.size(int(up))),
            ("received", terminal.size(int(down))),
        ]
    everybody = facts.contributions
    samples = sum(item.samples for item in everybody) or 1
    names = [
        (
            item.name, number(item.samples, ",.0f"), number(100 * item.samples / samples, ".1f", " %"),
            f"{item.rounds:,}", number(item.seconds / 3600, ",.2f"), terminal.size(item.bytes) if item.bytes else NONE,
        )
        for item in everybody[:_MOST_NAMES]
    ]  # fmt: skip
    caption = f"Contributions{f', the {_MOST_NAMES} largest' if len(everybody) > _MOST_NAMES else ''}"
    header = ("name", "samples", "of all", "rounds", "hours", "received from it")
    return [doc.Table(doc.MEASURE, rows), doc.Table(header, names, 1, caption)]


def missing(facts: Facts) -> list[doc.Part]:
    """What a reader may look for and the run does not have, each with the reason."""
    run, lines = facts.run_dir, list[Sequence[str]]()
    has_classes = run.confusion.exists() or not run.task.exists()
    if not facts.train:
        lines.append(["training metrics: metrics.jsonl has none"])
    if not facts.val:
        lines.append(["validation metrics: no evaluation was reached"])
    if facts.test is None:
        lines.append(["test metrics: ", doc.Code(terminal.command("evaluate", run.path)), " measures them"])
    if facts.val and has_classes and not run.mistakes("val").exists():
        val = doc.Code(terminal.command("evaluate", run.path, "--split", "val"))
        lines.append(["images that were told wrong: ", val, " keeps them"])
    if not facts.summary:
        lines.append(["final numbers (summary.json): the run has not ended, or was stopped; times are estimates"])
    elif facts.summary.get("energy", 0) is None and not facts.energy:
        lines.append(["energy: no GPU has told it, and processors tell it to root alone, where they do (RAPL)"])
    elif facts.energy and facts.setting("launch.carbon_intensity") is None:
        lines.append(["g CO2: ", doc.Code("launch.carbon_intensity"), " was not set, in the site's profile or the run"])
    if not facts.hosts:
        lines.append(["hardware samples: no system-<host>.jsonl with a whole line in it"])
    return [doc.Items(lines)]


def places(facts: Facts) -> list[doc.Part]:
    """Where the files of the run are."""
    run, path = facts.run_dir, terminal.path
    best, bucket = run.checkpoints / "best", fileio.plain(fileio.read_object(REMOTE.at(run.path))).get("url")
    lines: list[Sequence[str]] = [["run folder: ", doc.Code(path(run.path))]]
    if os.path.islink(best) and (step := re.fullmatch("step-([0-9]+)", os.readlink(best))):
        lines.append(["best checkpoint: ", doc.Code(path(best)), f" (step {int(step[1])})"])
    if isinstance(bucket, str):
        lines.append(["in the bucket: ", doc.Code(bucket), ", with the best weights"])
    if os.path.isdir(run.code):
        lines.append(["code as it ran: ", doc.Code(path(run.code))])
    if run.tensorboard.is_dir():
        lines.append(["curves: ", doc.Code(f"tensorboard --logdir {path(run.tensorboard)}")])
    if any(run.wandb.glob("offline-run-*")):
        lines.append(["upload to Weights & Biases: ", doc.Code(terminal.command("sync", run.path))])
    lines.append(["repeat it: ", doc.Code(terminal.command("submit", run.config, "--again"))])
    return [doc.Items(lines)]


RUNS: Sequence[Callable[[Sequence[Facts]], doc.Section]] = (
    curves,
    doc.of_each("splits", "Results by split", results),
    doc.of_each("asked", "What was asked", asked),
    doc.of_each("where", "Where it ran", where),
    doc.of_each("settings", "Settings", settings),
    doc.of_each("cost", "Cost", cost),
    timeline,
    doc.of_each("attempts", "Attempts", attempts),
    spent,
    doc.of_each("hardware", "Hardware", hardware),
    classes,
    mistakes,
    doc.of_each("rounds", "Rounds and who contributed", rounds),
    doc.of_each("missing", "Not recorded", missing),
    doc.of_each("files", "Files", places),
)


def _line(value: Any) -> str:
    return NONE if value is None else terminal.one_line(value)


def _named(section: Any, key: str = "name", hide: tuple[str, ...] = ()) -> str:
    """``ddp (bucket_cap_mb: 50)``: a plugin and those of its options that are set."""
    if not isinstance(section, dict):
        return NONE
    options = [f"{name}: {it}" for name, it in section.items() if name not in (key, *hide) and it not in (None, [])]
    return text(section.get(key)) + (f" ({', '.join(options)})" if options else "")


def _given(optim: Any) -> Any:
    """Those settings of an optimizer that it is given, where they are what they should be."""
    try:
        given = OptimConfig.model_validate(optim).given()
        of_muon = ("muon_as",) if optim["name"] == "muon" else ()
    except ValidationError:
        return optim
    return {
        key: value
        for key, value in optim.items()
        if key in ("name", "lr", "weight_decay", "layer_decay", *given, *of_muon)
    }


def _batch(facts: Facts) -> str:
    size = facts.setting("train.global_batch_size")
    micro, passes = (facts.summary.get(key) for key in ("micro_batch_size", "grad_accum_steps"))
    if not isinstance(micro, int) or not isinstance(passes, int):
        return text(size)
    accumulated = f" {TIMES} {passes} accumulated passes" if passes > 1 else ""
    return f"{size} = {plural(facts.started('world_size'), 'rank')} {TIMES} {micro}{accumulated}"


def _length(facts: Facts) -> str:
    total, per_epoch = facts.started("total_steps"), facts.started("steps_per_epoch")
    if total is None:
        return NONE
    done = f"{total} steps" if facts.steps == total else f"{facts.steps} of {total} steps"
    return f"{done} = {facts.steps / per_epoch:g} epochs of {per_epoch}" if per_epoch else done


def _commit(facts: Facts) -> str:
    git, mark = facts.manifest.get("git"), facts.manifest.get("fingerprint")
    if isinstance(git, dict) and git.get("commit"):
        changed = ", with uncommitted changes" if git.get("diff") else ""
        return f"commit {str(git['commit'])[:12]}{changed}"
    return f"no git repository; its files have the fingerprint {mark[:12]}" if isinstance(mark, str) and mark else NONE


def _largest_batch(facts: Facts) -> str:
    """What ``train.micro_batch_size=auto`` has found: whether a given size is the largest is not known."""
    found = facts.last_event("probed")
    micro, ranks = found.get("micro_batch_size"), found.get("world_size")
    if not fileio.is_whole(micro) or not ranks:
        return NONE
    used = f"an update takes {memory(found.get('peak_mb'))} of {memory(found.get('room_mb'))}"
    found_size = f"{micro * ranks} = {plural(ranks, 'rank')} {TIMES} {micro} in one pass; {used}"
    if micro == facts.count("train.global_batch_size") // ranks:
        return f"{found_size}; more would fit, this is all of train.global_batch_size"
    return found_size


def _each(ranks: Sequence[float]) -> str:
    """Of every rank, in order; of very many the extremes."""
    if len(ranks) > _MOST_RANKS:
        return f"{memory(min(ranks))} to {memory(max(ranks))}"
    return ", ".join(map(memory, ranks))


def _utilisation(facts: Facts) -> str:
    used = [usage.mean for host in facts.hosts for i in host.gpus() if (usage := host.usage("util_percent", i))]
    return f"{sum(used) / len(used):.0f} % of {plural(len(used), 'GPU')}" if used else NONE


def _carbon(facts: Facts) -> str:
    """What generating the measured energy has emitted, with where the factor is from."""
    told, factor = facts.energy, facts.setting("launch.carbon_intensity")
    known, of = yaml.packaged("carbon"), "as launch.carbon_intensity says"
    if isinstance(factor, str):
        of = f"mean of {terminal.one_line(factor)} in {known['year']} by {known['source']}"
        factor = known["countries"].get(factor)
    if not told or not fileio.is_number(factor):
        return NONE
    parts = " and ".join(name for name, key in _METERS.items() if key in told)
    grams = sum(told.values()) * factor
    return f"{number(grams, ',.0f' if grams >= 100 else '.3g')}, of {parts} alone ({number(factor, 'g')} g/kWh, {of})"


_METERS = {"GPUs": "gpu_kwh", "processors": "cpu_kwh"}


def energy(told: Mapping[str, float]) -> str:
    """`Facts.energy` in words."""
    known = [f"{name} {number(told[key], '.3g', ' kWh')}" for name, key in _METERS.items() if key in told]
    return ", ".join(known) or NONE
