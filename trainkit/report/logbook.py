"""The log book: ``logbook.md`` with its curves beside it as PNG, ready to be committed or handed in."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from trainkit import terminal
from trainkit.errors import UserError
from trainkit.records.rundir import RunDir
from trainkit.report import contributors, plots, tables
from trainkit.report.facts import Facts, collect

MARK = "<!-- Written by `python -m jobs.report`. A new report replaces this file: copy it before you edit it. -->"


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
        return f"![{text}]({path.name})\n"


def write_logbook(runs: Sequence[RunDir], out: Path) -> list[Path]:
    """Write ``out/logbook.md`` and its plots; the paths of what was written, the log book first.

    Works for runs that are going on, were interrupted or lack files: the log book says what is missing.

    Raises:
        UserError: no metrics in any of the runs; ``out`` cannot be written; a ``logbook.md`` there is somebody else's.
    """
    found = collect(runs)
    if not any(facts.train or facts.val or facts.test or facts.started("world_size") for facts in found):
        raise UserError(
            f"Nothing to report on in {', '.join(facts.label for facts in found)}.",
            why="No training has begun: there are neither metrics nor a start.",
            fix=f"See what the run does with `{terminal.command('logs', found[0].run_dir.path)}`.",
        )
    path = out / "logbook.md"
    pages = _Pages(out, [path])
    try:
        out.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(MARK):
            raise UserError(
                f"{path} was not written by this command.",
                why="It would be replaced.",
                fix="Choose another folder with --out FOLDER, or move that file away.",
            )
        if len(found) == 1:
            parts = [_run(found[0], pages, "# Log book: ", "##")]
        else:
            parts = [f"# Log book of {len(found)} runs", _comparison(found, pages)]
            parts += [_run(facts, pages, "## ", "###") for facts in found]
        path.write_text("\n\n".join([MARK, *parts]) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"Cannot write the log book in {out}.",
            why=f"{error.strerror}: {error.filename}",
            fix="Choose another folder with --out FOLDER.",
        ) from None
    return pages.written


def _comparison(runs: Sequence[Facts], pages: _Pages) -> str:
    first = runs[0].label
    parts = [
        "## Comparison",
        tables.markdown(tables.COMPARISON, tables.comparison_rows(runs), numbers_from=2),
        f"Speed-up: images/s relative to {first}. Efficiency: speed-up divided by how many times more processors there"
        " are (ranks, or GPUs under DataParallel). Time ratio: training time of"
        f" {first} divided by that of the run, where both did the same number of steps to the end.",
        pages.picture("throughput", "images per second of every run", lambda path: plots.draw_comparison(runs, path)),
        pages.picture("val-acc1", "validation accuracy of every run", lambda path: plots.draw_accuracies(runs, path)),
    ]
    different = tables.difference_rows(runs)
    if different:
        header = ("setting", *(facts.label for facts in runs))
        parts += ["### Settings that differ", tables.markdown(header, different)]
    return "\n\n".join(part.rstrip() for part in parts if part)


def _run(facts: Facts, pages: _Pages, title: str, heading: str) -> str:
    slug = re.sub(r"[^A-Za-z0-9_.]+", "-", facts.label).strip("-")
    results, costs = tables.results_rows(facts), tables.cost_rows(facts)
    pictures = [
        pages.picture(f"{slug}-curves", "loss and accuracy", lambda path: plots.draw_curves(facts, path)),
        pages.picture(f"{slug}-pace", "learning rate and throughput", lambda path: plots.draw_pace(facts, path)),
        pages.picture(f"{slug}-hardware", "use of the hardware", lambda path: plots.draw_hardware(facts, path)),
    ]
    settings = tables.markdown(("setting", "value"), tables.settings_rows(facts))
    parts = [f"{title}{facts.label}", _outcome(facts), f"{heading} Settings", settings]
    if results:
        header = ("split", "step", "loss", "acc1", "acc5")
        parts += [f"{heading} Results", tables.markdown(header, results, numbers_from=1)]
    if costs:
        parts += [f"{heading} Cost", tables.markdown(("measure", "value"), costs)]
    rounds = contributors.rounds_rows(facts)
    if (spent := tables.spent_rows(facts)) and not rounds:  # the loop of rounds does not tell the parts of an update
        parts.append(tables.markdown(tables.SPENT, spent, numbers_from=1))
    if facts.hosts:
        parts.append(tables.markdown(tables.HARDWARE, tables.hardware_rows(facts), numbers_from=1))
    parts += [f"GPUs of {host}:\n\n```\n{text}\n```" for host, text in facts.gpus_shown]
    if rounds:
        parts += [f"{heading} Rounds", tables.markdown(("measure", "value"), rounds)]
    if contributed := contributors.rows(facts):
        parts += [f"{heading} Contributions", tables.markdown(contributors.HEADER, contributed, numbers_from=1)]
    if any(pictures):
        parts += [f"{heading} Curves", *pictures]
    if facts.missing:
        parts += [f"{heading} Not recorded", "\n".join(f"- {item}" for item in facts.missing)]
    parts += [f"{heading} Files", _files(facts)]
    return "\n\n".join(part.rstrip() for part in parts if part)


def _outcome(facts: Facts) -> str:
    started = next((e["time"] for e in facts.events if e.get("event") == "started" and "time" in e), None)
    when = f" Started {datetime.fromtimestamp(started).astimezone():%Y-%m-%d %H:%M %Z}." if started else ""
    if told := facts.setbacks.in_words():
        when = f" **It has diverged**: {told}.{when}" if facts.setbacks.diverged else f" {told.capitalize()}.{when}"
    if facts.finished:
        early = facts.summary.get("stopped_early")
        early = f" Stopped early: {terminal.one_line(early)}." if isinstance(early, str) else ""
        return f"Finished after {facts.steps} steps.{early}{when}"
    last = next((event for event in reversed(facts.events) if event.get("event") in ("failed", "handed_back")), None)
    reason = ""
    if last and last["event"] == "failed":
        words = (str(last.get("error") or "").splitlines() or ["unknown"])[0].replace("`", "'")
        reason = f" It failed on rank {last.get('rank', '?')}: `{words}`."
    elif last:
        reason = " It was told to stop and saved."
    total = facts.started("total_steps")
    return f"**Not finished**: {facts.steps} of {total if total is not None else '?'} steps.{reason}{when}"


def _files(facts: Facts) -> str:
    run_dir = facts.run_dir
    lines = [f"- run folder: `{run_dir.path}`"]
    best = run_dir.checkpoints / "best"
    if best.is_symlink() and (step := re.fullmatch("step-([0-9]+)", os.readlink(best))):
        lines.append(f"- best checkpoint: `{best}` (step {int(step[1])})")
    if run_dir.tensorboard.is_dir():
        lines.append(f"- curves: `tensorboard --logdir {run_dir.tensorboard}`")
    if any(run_dir.wandb.glob("offline-run-*")):
        lines.append(f"- upload to Weights & Biases: `wandb sync {run_dir.wandb}/offline-run-*`")
    lines.append(f"- repeat it: `{terminal.command('submit', run_dir.config, '--again')}`")
    return "\n".join(lines)
