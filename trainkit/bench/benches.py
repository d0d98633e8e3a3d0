"""The benches by name."""

from __future__ import annotations

from trainkit.bench import amp, batch_size, dp_inference, loader, network, scaling, strategy
from trainkit.bench.arms import Bench
from trainkit.errors import UserError, did_you_mean

_MODULES = (amp, batch_size, loader, dp_inference, scaling, strategy, network)
BENCHES: dict[str, Bench] = {module.BENCH.name: module.BENCH for module in _MODULES}


def bench_of(name: str) -> Bench:
    """Raises UserError for a name that is none."""
    if name not in BENCHES:
        raise UserError(
            f"There is no bench '{name}'.",
            why=f"There are: {', '.join(BENCHES)}.",
            fix=did_you_mean(name, BENCHES, otherwise="`python -m jobs.bench --help` says what each of them answers."),
        )
    return BENCHES[name]
