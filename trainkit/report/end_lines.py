"""Lines for the end of a command: what a run came to, and where its files are."""

import shlex
from pathlib import Path

from trainkit.common import jsonl, terminal
from trainkit.report.facts import Facts
from trainkit.report.fit import fit_of
from trainkit.run.folder import RunDir
from trainkit.run.metrics import measured_in


def summary_lines(run_dir: RunDir) -> list[str]:
    """Say what a run came to and where its files are, for the end of a command.

    The lines are ``what  path or command``. The last one holds the results, so that they stand above the prompt.
    """
    facts = Facts(run_dir, run_dir.name)
    places: dict[str, Path | str] = {}
    early = facts.summary.get("stopped_early")
    if isinstance(early, str):
        places["pruned" if facts.pruned else "stopped early"] = terminal.one_line(early)
    places["run folder"] = run_dir.path
    if run_dir.metrics.exists():
        places["metrics"] = run_dir.metrics
    best = run_dir.checkpoints / "best"
    if best.exists():
        places["best checkpoint"] = best
    if run_dir.tensorboard.is_dir():
        places["tensorboard"] = f"tensorboard --logdir {shlex.quote(str(run_dir.tensorboard))}"
    if any(run_dir.wandb.glob("offline-run-*")):
        places["wandb"] = terminal.command("sync", run_dir.path)
    if run_dir.metrics.exists():
        places["log book"] = terminal.command("report", run_dir.path)
    sent = facts.last_event("uploaded", "upload_recovered", "upload_failed", "not_uploaded")
    if sent.get("event") in ("upload_failed", "not_uploaded"):
        places["not sent yet"] = f"{terminal.command('resume', run_dir.path)} sends it to {sent.get('url', '?')}"

    fit = fit_of([facts])
    if fit is not None and fit.flags:
        places["next time"] = " ".join(fit.flags)

    lines = [f"{name:16} {place}" for name, place in places.items()]
    results = _results(facts)
    if not results and facts.is_script:  # its output has told more
        return lines
    if not results:
        return [*lines, "No results yet."]
    if facts.started("made_up") is True:
        results.insert(0, "made-up images")
    return [*lines, " · ".join(results)]


def _results(facts: Facts) -> list[str]:
    task = facts.task_metrics
    best = facts.best_val
    words: list[str] = []
    setbacks = facts.setbacks.in_words()
    if setbacks and facts.setbacks.diverged:
        words.append(f"DIVERGED: {setbacks}")
    elif setbacks:
        words.append(setbacks)
    if best is not None and facts.best is not None:
        words.append(f"val {task.words(task.headline, facts.best)} (best, step {best['step']})")
    elif facts.val and best is None:
        last = facts.val[-1]
        if "loss" in last:
            lost = [name for name in task.metrics if name in last and last[name] is None]
            words.append(f"val {', '.join(lost) or 'loss'} is not finite (step {last['step']}): no model is the best")
        else:  # a script's, whose models nobody has compared
            measured = [task.words(name, last[name]) for name in measured_in(last)]
            words.append(f"val {'  '.join(measured)} (step {last['step']})")
    if best is None and facts.is_script and facts.train:
        words.append("  ".join(task.words(key, value) for key, value in facts.train[-1].items() if task.find(key)))
    if facts.tested is not None:
        words.append(f"test {task.words(task.headline, facts.tested)}")
    seconds = facts.summary.get("train_seconds")
    if jsonl.is_number(seconds):
        words.append(terminal.duration(seconds))
    speed = facts.summary.get("images_per_sec")
    if jsonl.is_number(speed):
        words.append(f"{speed:,.0f} images/s")
    return words
