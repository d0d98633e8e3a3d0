"""The log book: ``logbook.md`` with its curves beside it as PNG, ready to be committed or handed in."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from trainkit import fileio, terminal
from trainkit.errors import UserError
from trainkit.report import comparing, contributors, plots, story, tables
from trainkit.report.facts import Facts, Runs, collect
from trainkit.report.sweep import by_accuracy, sweep_tables
from trainkit.run.folder import run_at

_MOST_OF_A_SWEEP = 8
_MOST_PICTURED = 20
"""Runs: a picture takes a third of a second, and one of two hundred curves or bars nobody reads."""
_LONGEST_SLUG = 100
"""No file system takes a name of more than 255 bytes, and a sweep of many settings makes long ones."""
_SPENT_NOTE = (
    "start: until the ranks have met and the data is there, before their clock begins; data: waiting for images;"
    " exposed: waiting for gradients of other ranks that nothing hides; other: records and the loop itself."
)
_BY = "<!-- Written by `python -m jobs.report`"
MARK = f"{_BY}. A new report replaces this file: copy it before you edit it. -->"


@dataclass(frozen=True)
class _Pages:
    """Where the log book is being written."""

    out: Path
    written: list[Path]

    def picture(self, name: str, text: str, draw: Callable[[Path], bool]) -> str:
        """Draw a PNG and give the Markdown that shows it; nothing if there is nothing to draw."""
        path = self.out / f"{name}.png"
        if not draw(path):
            return ""
        self.written.append(path)
        return f"![{terminal.literal(text)}]({path.name})\n"

    def slug(self, label: str) -> str:
        """A run's name for its files; of two that would be alike, each has its own."""
        slug = re.sub(r"[^A-Za-z0-9_.]+", "-", label)[:_LONGEST_SLUG].strip("-.") or "run"
        taken = {path.name.rpartition("-")[0] for path in self.written}
        return next(name for n in itertools.count(1) if (name := f"{slug}-{n}" if n > 1 else slug) not in taken)


def write_logbook(runs: Runs, out: Path) -> list[Path]:
    """Write ``out/logbook.md`` and its plots; the paths of what was written, the log book first.

    Works for runs that are going on, were interrupted or lack files: the log book says what is missing.

    Raises:
        UserError: no metrics in any of the runs; ``out`` cannot be written; a ``logbook.md`` there is somebody else's.
    """
    found = collect(runs)
    require_something(found)
    pages = _Pages(out, [])
    with written_to(out / "logbook.md") as path:
        pages.written.append(path)
        if len(found) == 1:
            parts = [_run(found[0], pages, "# Log book: ", "##")]
        else:
            parts = [f"# Log book of {len(found)} runs", _comparison(found, pages)]
            if rest := found[_MOST_PICTURED:]:
                one = terminal.code(terminal.command("report", rest[0].run_dir.path))
                parts.append(f"Here are pictures of the first {_MOST_PICTURED}; every other has its own by {one}.")
            parts += [_run(facts, pages, "## ", "###", number < _MOST_PICTURED) for number, facts in enumerate(found)]
        fileio.write(path, "\n\n".join([MARK, *parts]) + "\n", run_at(out))
    return pages.written


def write_sweep(sweep: Path, runs: Runs, out: Path) -> list[Path]:
    """Write ``out/logbook.md`` of a sweep: its results, the best first, and the log books of the best runs.

    Raises UserError where it cannot be written.
    """
    found = sorted(collect(runs), key=by_accuracy)
    pages = _Pages(out, [])
    with written_to(out / "logbook.md") as path:
        pages.written.append(path)
        parts = [f"# Log book of the sweep {terminal.literal(terminal.one_line(sweep.name))}", _finished(found)]
        parts += [
            "## Results",
            *(
                terminal.markdown_table(header, rows, numbers_from=len(header))
                for header, rows in sweep_tables(sweep, runs)
            ),
        ]
        shown = found[:_MOST_OF_A_SWEEP]
        parts += [
            pages.picture("val-acc1", "validation accuracy", lambda path: plots.draw_accuracies(shown, path)).rstrip()
        ]
        if rest := found[_MOST_OF_A_SWEEP:]:
            one = terminal.code(terminal.command("report", rest[0].run_dir.path))
            parts.append(f"Here are the best {len(shown)} of them; every other has its log book by {one}.")
        parts += [_run(facts, pages, "## ", "###") for facts in shown]
        fileio.write(path, "\n\n".join([MARK, *(part for part in parts if part)]) + "\n", run_at(out))
    return pages.written


def _finished(runs: Sequence[Facts]) -> str:
    done = sum(facts.finished for facts in runs)
    diverged = [terminal.literal(facts.label) for facts in runs if facts.setbacks.diverged]
    more = f" **Diverged**: {', '.join(diverged)}." if diverged else ""
    return f"{done} of {len(runs)} runs have come to their end.{more}"


def require_something(found: Sequence[Facts]) -> None:
    """Raises UserError where none of the runs has begun."""
    if not any(facts.train or facts.val or facts.test or facts.started("world_size") for facts in found):
        raise UserError(
            f"Nothing to report on in {', '.join(facts.label for facts in found)}.",
            why="No training has begun: there are neither metrics nor a start.",
            fix=f"Ask what keeps it: `{terminal.command('why', found[0].run_dir.path)}`.",
        )


@contextmanager
def written_to(path: Path) -> Iterator[Path]:
    """Its folder is made. Raises UserError where it cannot be written, or would replace what somebody else wrote."""
    try:
        fileio.make_folder(path.parent)
        marked = path.name in ("logbook.md", "comparison.md", "report.html")
        if marked and path.is_file() and not path.is_symlink() and _BY not in fileio.read_start(path, 400):
            raise UserError(
                f"{path} was not written by this command.",
                why="It would be replaced.",
                fix="Choose another folder with --out FOLDER, or move that file away.",
            )
        yield path
    except OSError as error:
        raise UserError(
            f"Cannot write {path}.",
            why=f"{error.strerror}: {error.filename}",
            fix="Choose another folder with --out FOLDER.",
        ) from None


def write_comparison(runs: Runs, out: Path) -> tuple[str, list[Path]]:
    """Write ``out/comparison.md``, the comparison alone, with its plots; its table, and the paths.

    Raises UserError as `write_logbook` does.
    """
    found = collect(runs)
    require_something(found)
    pages = _Pages(out, [])
    with written_to(out / "comparison.md") as path:
        pages.written.append(path)
        fileio.write(path, "\n\n".join([MARK, _comparison(found, pages)]) + "\n", run_at(out))
    return terminal.markdown_table(
        comparing.COMPARISON, comparing.comparison_rows(found), numbers_from=2
    ), pages.written


def _comparison(runs: Sequence[Facts], pages: _Pages) -> str:
    first, shown = terminal.literal(runs[0].label), runs[:_MOST_PICTURED]
    simulated = [terminal.literal(facts.label) for facts in runs if story.is_simulated(facts)]
    parts = [
        "## Comparison",
        terminal.markdown_table(comparing.COMPARISON, comparing.comparison_rows(runs), numbers_from=2),
        f"Speed-up: images/s relative to {first}. Efficiency: speed-up divided by how many times more processors there"
        " are (ranks, or GPUs under DataParallel). Time ratio: training time of"
        f" {first} divided by that of the run, where both saw the same number of images to the end. Memory saved: of"
        f" the rank that needs most, relative to {first}, where a rank takes as many images in one pass.",
        "\n".join(f"- {terminal.literal(sentence)}" for sentence in comparing.not_comparable(runs)),
        f"The nodes of {', '.join(simulated)} were simulated on one machine, whose processors their ranks share:"
        " speed-up and efficiency say nothing of real nodes."
        if simulated
        else "",
        pages.picture("throughput", "images per second of every run", partial(plots.draw_comparison, shown)),
        pages.picture("val-acc1", "validation accuracy of every run", partial(plots.draw_accuracies, shown)),
    ]
    header, different = comparing.differences(runs)
    if different:
        parts += ["### Settings that differ", terminal.markdown_table(header, different)]
    return "\n\n".join(part.rstrip() for part in parts if part)


def _run(facts: Facts, pages: _Pages, title: str, heading: str, pictured: bool = True) -> str:
    slug = pages.slug(facts.label)
    results, costs = tables.results_rows(facts), tables.cost_rows(facts)
    drawn = (
        ("curves", "loss and accuracy", plots.draw_curves),
        ("pace", "learning rate and throughput", plots.draw_pace),
        ("hardware", "use of the hardware", plots.draw_hardware),
    )
    pictures = [pages.picture(f"{slug}-{name}", text, partial(draw, facts)) for name, text, draw in drawn if pictured]
    parts = [f"{title}{terminal.literal(facts.label)}", _outcome(facts), *_asked(facts, heading)]
    if where := story.where_rows(facts):
        parts += [f"{heading} Where it ran", terminal.markdown_table(("", "what"), where)]
    parts += [f"{heading} Settings", terminal.markdown_table(("setting", "value"), tables.settings_rows(facts))]
    if results:
        parts += [f"{heading} Results", terminal.markdown_table(tables.RESULTS, results, numbers_from=1)]
    if costs:
        parts += [f"{heading} Cost", terminal.markdown_table(("measure", "value"), costs)]
    rounds = contributors.rounds_rows(facts)
    if (spent := tables.spent_rows(facts)) and not rounds:  # the loop of rounds does not tell the parts of an update
        parts += [terminal.markdown_table(tables.SPENT, spent, numbers_from=1), _SPENT_NOTE]
    if facts.hosts:
        parts.append(terminal.markdown_table(tables.HARDWARE, tables.hardware_rows(facts), numbers_from=1))
    parts += [
        f"GPUs of {terminal.literal(host)}, as `nvidia-smi` has them:\n\n{terminal.block(text)}"
        for host, text in facts.gpus_shown
    ]
    if facts.started("device") == "cpu":
        parts.append("No GPU took part: there is nothing for `nvidia-smi` to show.")
    if attempts := story.attempts_rows(facts):
        parts += [f"{heading} Attempts", terminal.markdown_table(story.ATTEMPTS, attempts)]
    if rounds:
        parts += [f"{heading} Rounds", terminal.markdown_table(("measure", "value"), rounds)]
    if contributed := contributors.rows(facts):
        parts += [f"{heading} Contributions", terminal.markdown_table(contributors.HEADER, contributed, numbers_from=1)]
    if any(pictures):
        parts += [f"{heading} Curves", *pictures]
    if facts.metrics.every > 1:
        parts.append(
            f"Of the train records one in {facts.metrics.every} is in the curves, medians and estimates here; in the"
            " curves also those with the largest and the smallest loss of each stretch, and the first that is none."
        )
    if facts.missing:
        parts += [f"{heading} Not recorded", "\n".join(f"- {item}" for item in facts.missing)]
    parts += [f"{heading} Files", _files(facts)]
    return "\n\n".join(part.rstrip() for part in parts if part)


def _asked(facts: Facts, heading: str) -> list[str]:
    command, preset = story.asked(facts)
    changed = story.changed_rows(facts)
    parts = [f"{heading} What was asked"] if command or changed else []
    parts += [terminal.block(command)] if command else []
    if changed:
        parts.append(terminal.markdown_table(story.CHANGED, changed))
    elif command and preset:
        parts.append(f"All other settings are those of the preset {terminal.code(preset)}.")
    return parts


def _outcome(facts: Facts) -> str:
    started = next((e["time"] for e in facts.events if e.get("event") == "started" and "time" in e), None)
    when = f" Started {datetime.fromtimestamp(started).astimezone():%Y-%m-%d %H:%M %Z}." if started else ""
    if told := facts.setbacks.in_words():
        when = f" **It has diverged**: {told}.{when}" if facts.setbacks.diverged else f" {told.capitalize()}.{when}"
    if facts.finished:
        early = facts.summary.get("stopped_early")
        early = f" Stopped early: {terminal.literal(terminal.one_line(early))}." if isinstance(early, str) else ""
        return f"Finished after {facts.steps} steps.{early}{when}"
    last = next((event for event in reversed(facts.events) if event.get("event") in ("failed", "handed_back")), None)
    reason = ""
    if last and last["event"] == "failed":
        words = (str(last.get("error") or "").splitlines() or ["unknown"])[0]
        reason = f" It failed on rank {terminal.literal(str(last.get('rank', '?')))}: {terminal.code(words)}."
    elif last:
        reason = " It was told to stop and saved."
    total = facts.started("total_steps")
    all_of_them = terminal.literal(str(total)) if total is not None else "?"
    return f"**Not finished**: {facts.steps} of {all_of_them} steps.{reason}{when}"


def _files(facts: Facts) -> str:
    run_dir = facts.run_dir
    lines = [f"- run folder: {terminal.code(terminal.path(run_dir.path))}"]
    best = run_dir.checkpoints / "best"
    if os.path.islink(best) and (step := re.fullmatch("step-([0-9]+)", os.readlink(best))):
        lines.append(f"- best checkpoint: {terminal.code(str(best))} (step {int(step[1])})")
    place = fileio.plain(fileio.read_object(run_dir.path / "remote.json")).get("url")
    if isinstance(place, str):
        lines.append(f"- in the bucket: {terminal.code(place)}, with the best weights")
    if os.path.isdir(run_dir.code):
        lines.append(f"- code as it ran: {terminal.code(str(run_dir.code))}")
    if run_dir.tensorboard.is_dir():
        lines.append(f"- curves: {terminal.code(f'tensorboard --logdir {run_dir.tensorboard}')}")
    if any(run_dir.wandb.glob("offline-run-*")):
        lines.append(f"- upload to Weights & Biases: {terminal.code(f'wandb sync {run_dir.wandb}/offline-run-*')}")
    lines.append(f"- repeat it: {terminal.code(terminal.command('submit', run_dir.config, '--again'))}")
    return "\n".join(lines)
