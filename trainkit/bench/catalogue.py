"""The list of benches, and checks of the names that a user gives."""

from collections.abc import Sequence

from trainkit.bench.base import Bench
from trainkit.bench.benches.loader_workers import LOADER
from trainkit.bench.benches.one_device import AMP, BATCH_SIZE, DP_INFERENCE, SHARING
from trainkit.bench.benches.proofs import PROOF
from trainkit.bench.benches.several_ranks import NETWORK, SCALING, STRATEGY
from trainkit.common.errors import UserError, did_you_mean, unknown

_ALL = (AMP, BATCH_SIZE, LOADER, SHARING, DP_INFERENCE, SCALING, STRATEGY, NETWORK, PROOF)
BENCHES: dict[str, Bench] = {bench.name: bench for bench in _ALL}
"""Name, as `python -m jobs.bench NAME` takes it -> bench."""


def bench_of(name: str) -> Bench:
    """Return the bench called ``name``.

    Raises:
        UserError: there is none.
    """
    if name not in BENCHES:
        otherwise = "`python -m jobs.bench --help` lists the question of each bench."
        raise unknown("bench", name, list(BENCHES), otherwise=otherwise)
    return BENCHES[name]


def check_asked(bench: Bench, asked: Sequence[str]) -> None:
    """Refuse names that are none of this bench's arms, and names given twice."""
    known = ", ".join(bench.names) or f"whole numbers from {bench.lowest} on"
    example = ",".join(bench.names[:2]) or "16,32,64"
    for name in asked:
        is_number = name.isdecimal() and bench.lowest <= int(name) < 1 << 24
        if name not in bench.names and (bench.names or not is_number):
            fix = did_you_mean(name, bench.names, otherwise=f"For example --arms {example}.")
            raise UserError(f"'{name}' is not an arm of bench {bench.name}.", why=f"It has: {known}.", fix=fix)
    if len(set(asked)) < len(asked):
        raise UserError(
            "--arms names an arm twice.", why="The first arm is measured twice anyway.", fix="Give each once."
        )
