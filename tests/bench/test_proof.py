"""Bench proof, really run in this process by one rank: what passes, what is refused and what fails."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bench.test_run import folder, measured
from trainkit.bench.base import Results
from trainkit.bench.proof import Prover, explained
from trainkit.bench.results import for_others
from trainkit.bench.team import ArmFailedError
from trainkit.cluster.ranks import RankEnv
from trainkit.common.errors import RefusedError, RunFailedError
from trainkit.config.loading import load, to_yaml
from trainkit.distributed.process_group import Distributed
from trainkit.run.folder import BenchDir, RunDir

MODEL = """
import itertools
import torch
from torch import nn

of_all = itertools.count(1)

class Model(nn.Module):
    def __init__(self, info, fault):
        super().__init__()
        self.head, self.fault, self.calls = nn.Linear(info.in_chans * info.image_size ** 2, info.num_classes), fault, 0
    def forward(self, images):
        self.calls += 1  # which no checkpoint has
        scores = self.head(images.flatten(1))
        if self.fault == "triples" and torch.is_autocast_enabled("cpu"):
            return 3 * scores
        if self.fault == "drifts":
            return scores * next(of_all)
        return scores * self.calls if self.fault == "counts" else scores

def build(info, *, fault: str = ""):
    return Model(info, fault)
"""


@pytest.fixture(autouse=True)
def _model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "proof_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))


def proof(tmp_path: Path, *arms: str, **settings: Any) -> tuple[Results, BenchDir]:
    run = folder(tmp_path, "proof", *arms, model__name="proof_model:build", **settings)
    return measured(run)[0], run


def outcomes(results: Results) -> dict[str, tuple[str, str]]:
    return {row.name: (row.outcome, row.failed) for row in results.rows}


def test_what_trains_as_the_cpu_does_and_goes_on_where_it_was_passes(tmp_path: Path) -> None:
    results, run = proof(tmp_path, "as-on-cpu", "bf16", "ddp", "fsdp-resumed", "loader", "dp")
    assert outcomes(results) == dict.fromkeys(("as-on-cpu", "bf16", "ddp", "fsdp-resumed", "loader"), ("passed", ""))
    assert [name for name, _ in results.left_out] == ["dp"]
    assert results.meaning == "Training works here: 5 of 5 passed."
    assert run.report.read_text().startswith("# Does training work here?\n\nTraining works here: 5 of 5 passed.\n")


def test_a_format_whose_losses_are_others_fails(tmp_path: Path) -> None:
    results, _ = proof(tmp_path, "fp32", "bf16", model__fault="triples")
    assert outcomes(results)["fp32"] == ("passed", "")
    outcome, why = outcomes(results)["bf16"]
    assert (outcome, why) == ("failed", "the losses differ from those of the CPU by more than 3 %")
    assert results.meaning == "1 of 2 failed: bf16."


def test_what_is_not_in_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    results, _ = proof(tmp_path, "as-on-cpu", "ddp-resumed", model__fault="counts")
    assert outcomes(results)["ddp-resumed"] == ("failed", "it ended with different weights")


def test_trainings_that_never_end_alike_are_named_so(tmp_path: Path) -> None:
    results, _ = proof(tmp_path, "ddp-resumed", model__fault="drifts")
    why = "two uninterrupted trainings end with different weights"
    assert outcomes(results)["ddp-resumed"] == ("failed", why)


def test_the_largest_batch_is_looked_for_with_the_data_of_that_arm(tmp_path: Path) -> None:
    run = folder(tmp_path, "proof", model__name="proof_model:build", train__micro_batch_size="auto")
    prover = Prover(run.path, RankEnv.single(), lambda: None)
    order = {"overrides": ["data.in_chans=3"], "sizes": [1, 2, 4], "ranks": [0]}
    assert prover.do_largest(Distributed(RankEnv.single(), torch.device("cpu")), order)["size"] == 4


def test_an_arm_that_fails_is_explained_by_the_cause_that_its_error_shows() -> None:
    words = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    said = explained(ArmFailedError("rank 3: it failed", raised=words))
    assert said == "A rank ran out of GPU memory. (rank 3: it failed)"
    assert explained(ArmFailedError("rank 3: odd", raised="ValueError: odd")) == "rank 3: odd"
    refused = ArmFailedError("SyncBatchNorm needs GPUs", refused=True, raised=words)
    assert explained(refused) == "SyncBatchNorm needs GPUs"


def test_what_does_not_go_with_the_place_is_refused(tmp_path: Path) -> None:
    results, _ = proof(tmp_path, "as-on-cpu", "ddp", strategy__name="ddp", strategy__sync_batchnorm="true")
    outcome, why = outcomes(results)["ddp"]
    assert outcome == "refused"
    assert "SyncBatchNorm" in why


def test_the_recipe_is_refused_where_its_data_is_not(tmp_path: Path) -> None:
    results, _ = proof(tmp_path, "cifar10-94", data__root=str(tmp_path / "nothing"))
    outcome, why = outcomes(results)["cifar10-94"]
    assert outcome == "refused"
    assert "cifar10" in why


def test_a_training_in_a_process_of_its_own_says_why_it_was_refused(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", "model: {name: nowhere}\n")
    prover = Prover(tmp_path, RankEnv.single(), lambda: None)
    with pytest.raises(RefusedError, match="nowhere") as caught:
        prover._child(run)
    assert "child.log" in caught.value.fix


def test_a_training_in_a_process_of_its_own_that_hangs_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.create(tmp_path / "run", to_yaml(load("single", ("monitor.loggers=[]",)).config))
    monkeypatch.setattr("trainkit.bench.proof._CHILD_SECONDS", 0.1)
    with pytest.raises(RunFailedError, match="took too long") as caught:
        Prover(tmp_path, RankEnv.single(), lambda: None)._child(run)
    assert "child.log" in caught.value.fix


def test_a_page_of_a_checkout_that_is_not_installed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, _ = proof(tmp_path, "loader")
    monkeypatch.setattr("trainkit.bench.results.OURS", "a-package-that-is-not-installed")
    assert "trainkit of a checkout that is not installed" in for_others(results, [{"kind": "began", "time": 0.0}])


def test_a_page_for_others_names_no_node_and_no_folder(tmp_path: Path) -> None:
    results, _ = proof(tmp_path, "as-on-cpu")
    results.rows[0].failed = "gpu07: No such file: /home/anna/data/x.png on gpu07.site.org"
    records: list[dict[str, Any]] = [
        {"kind": "began", "time": 0.0, "hosts": ["gpu07", "gpu07.site.org"], "place": "2 ranks on 1 node, cpu"},
        {"kind": "software", "versions": {"torch": "2.15.0"}},
    ]
    page = for_others(results, records)
    assert "gpu07" not in page
    assert "anna" not in page
    assert "1970-01-01: 2 ranks on 1 node, cpu; trainkit " in page
    assert "| as-on-cpu | passed | loss" in page
