"""The results and costs of a run, for programs."""

from typing import Any

from trainkit.report.facts import Facts
from trainkit.report.fit import fit_of


def cost_of(facts: Facts) -> dict[str, Any]:
    """Costs of a run, and what it should ask for next time. Durations in seconds; None is unknown."""
    fit = fit_of([facts])
    return {
        "train_seconds": facts.train_seconds,
        "wall_seconds": facts.wall_seconds,
        "images_per_sec": facts.images_per_sec,
        "processor_hours": facts.processor_hours,
        "hours_by_use": dict(facts.hours_by_use),
        "energy_kwh": dict(facts.energy),
        "fit": None if fit is None else fit.to_json(),
    }


def values_of(facts: Facts) -> dict[str, Any]:
    """Results of a run, with its cost; docs/reference/json.md names the keys."""
    best = facts.best_val or {}
    return {
        "run": facts.label,
        "folder": str(facts.run_dir.path),
        "point": dict(facts.point),
        "tags": list(facts.labels.tags),
        "finished": facts.finished,
        "steps": facts.steps,
        "attempts": facts.attempts,
        "metric": facts.task_metrics.headline,
        "best": facts.best,
        "best_step": best.get("step"),
        "test": facts.tested,
        **cost_of(facts),
    }
