"""What becomes of a run whose best weights are lost on the way."""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path

import pytest

from tests.rank_functions import QUICK, run_ranks, train_run
from trainkit.checkpoint import format
from trainkit.ranks.env import RankEnv
from trainkit.run.folder import RunDir

# Nothing is learned, so the first validation (19 updates, one epoch) stays the best.
SETTINGS = ("optim.lr=1e-30", "train.max_steps=24")
BEST = 19


def _go_on_and_evaluate(env: RankEnv, folder: Path) -> tuple[str, int, str, str]:
    from trainkit.config.loading import load
    from trainkit.inference import evaluate_checkpoint

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        ending = train_run(env, folder, "single", SETTINGS)
        config = load(str(RunDir(folder).config), QUICK).config
        result = evaluate_checkpoint(config, RunDir(folder), "best", "test")
    return ending, result.step, result.which, said.getvalue()


def flip(checkpoint: Path) -> None:
    content = bytearray((checkpoint / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (checkpoint / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "why"),
    [(flip, "the content of model.safetensors has changed"), (shutil.rmtree, "No such file or directory")],
    ids=["flipped", "gone"],
)
def test_a_run_whose_best_weights_are_lost_ends_all_the_same_and_says_so(
    tmp_path: Path, damage: object, why: str
) -> None:
    folder = tmp_path / "run"
    run_ranks(1, train_run, folder, "single", SETTINGS, 22 + 5)
    assert format.pointed(folder / "checkpoints", "best") == BEST
    assert callable(damage)
    damage(format.path_of(folder / "checkpoints", BEST))
    ((ending, step, which, said),) = run_ranks(1, _go_on_and_evaluate, folder)
    assert ending == "finished"
    assert (step, which) == (24, "newest"), "nobody takes it for the best"
    assert f"step-{BEST:08d} is broken: {why}" in said
