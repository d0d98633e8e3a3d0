"""The parts of `tests.benchmarks.arms.airbench`, by which CIFAR-10 is learnt to 94 % in an hour on two CPU cores."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch.nn import functional as F

from tests.benchmarks.arms import airbench
from trainkit import fileio
from trainkit.data.base import DataInfo

ARMS, PROJECT = Path(airbench.__file__).parent, Path(__file__).parents[2]
INFO = DataInfo("cifar10", 10, 3, 32, tuple("abcdefghij"), (0.5,) * 3, (0.25,) * 3)


def test_the_command_trains_with_all_four_parts(data: Path, tmp_path: Path) -> None:
    small = (
        "model.width=16",
        "train.global_batch_size=40",
        "train.epochs=12",
        "data.val_fraction=0.2",
        "monitor.log_every=2",
    )
    command = [sys.executable, "-m", "jobs.submit", str(ARMS / "airbench.yaml"), "--executor", "debug"]
    where = (f"data.root={data}", "monitor.loggers=[jsonl]", "--run-dir", str(tmp_path / "run"))
    env = {**os.environ, "PYTHONPATH": f"{ARMS}:{PROJECT}"}
    done = subprocess.run([*command, *small, *where], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    records = list(fileio.read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    losses = [record["loss"] for record in records if record["split"] == "train"]
    assert losses[-1] < losses[0] - 0.5
    assert records[-1]["split"] == "test"


def test_the_first_layer_gives_features_of_one_variance() -> None:
    def drawing(likeness: float, size: int) -> torch.Tensor:
        """What makes noise alike from one place to the next."""
        alike = torch.tensor([[likeness ** abs(i - j) for j in range(size)] for i in range(size)])
        factor: torch.Tensor = torch.linalg.cholesky(alike)
        return factor

    torch.manual_seed(0)
    beside, noise = drawing(0.93, 40), torch.randn(100, 3, 40, 40)
    images = torch.einsum("ck,nkyx->ncyx", drawing(0.91, 3), beside @ noise @ beside.T)
    found = airbench.Whitening(3)(images).detach().transpose(0, 1).flatten(1)
    variances = found.var(1)[:12].sort().values
    assert variances[0] > 0.3  # the faintest of all: noise is not made as strong as the rest
    assert ((variances[2:] > 0.9) & (variances[2:] < 1.1)).all()
    assert torch.allclose(found[:12], -found[12:], atol=1e-5)


def test_filters_keep_one_length_and_turn_by_steps_of_one_size() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(8, 16, 3)
    optimizer = airbench.Optimizer([{"params": [layer.weight]}], 0.24)
    for _ in range(3):
        layer.weight.grad = 100 * torch.randn_like(layer.weight)
        before = layer.weight.detach() * 16**0.5 / layer.weight.detach().norm()
        optimizer.step()
        step = torch.linalg.svdvals((layer.weight.detach() - before).flatten(1)) / 0.24
        assert ((step > 0.4) & (step < 1.3)).all()


def test_an_image_goes_on_beyond_its_edge_as_its_mirror_image() -> None:
    crops = airbench.Crops(32, 2, True)
    images = torch.randint(256, (50, 3, 32, 32), dtype=torch.uint8)
    drawn = crops.draw(torch.arange(50) * 7919)
    for image, (top, left, mirrored), cut in zip(images, drawn.tolist(), crops.batch(images, drawn), strict=True):
        wide = F.pad(image[None].float(), (2,) * 4, mode="reflect")[0]
        window = wide[:, top : top + 32, left : left + 32]
        assert torch.equal(window.flip(-1) if mirrored else window, cut.float())


def test_an_image_that_is_not_trained_on_is_looked_at_six_times() -> None:
    model = airbench.Net(INFO, 4).eval()
    images, looks = torch.randn(2, 3, 32, 32), list[torch.Tensor]()
    model.layers.register_forward_pre_hook(lambda layers, given: looks.append(given[0]))
    model(images)
    assert [tuple(look.shape) for look in looks] == [images.shape] * 6
    assert torch.equal(looks[0], images)
    assert all(torch.equal(one, other.flip(-1)) for one, other in zip(looks[::2], looks[1::2], strict=True))
    assert torch.equal(looks[2][..., 1:, 1:], images[..., :-1, :-1])
    assert torch.equal(looks[4][..., :-1, :-1], images[..., 1:, 1:])
    model.train()
    model(images)
    assert len(looks) == 7
