"""What an exported file says of itself, and which models cannot be one."""

import importlib.util
import io
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open

import trainkit
from tests.hub import Hub, hub
from tests.rank_functions import run_command, run_ranks, train_run
from tests.shell import python
from trainkit.common.errors import UserError
from trainkit.config.loading import load
from trainkit.inference.export import export_model, told_of
from trainkit.report.facts import Facts
from trainkit.report.writers import card
from trainkit.run.folder import RunDir
from trainkit.training.saved_model import open_saved

OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, info):
        super().__init__()
        self.layer = nn.Linear(info.in_chans * info.image_size**2, info.num_classes)

    def forward(self, images):
        scores = self.layer(images.flatten(1))
        if float(scores.detach().sum()) > 1e9:  # which no exporter follows
            return scores * 2
        return scores

net = Net
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a vision transformer that enlarges its images, on photos that have moved."""
    home = tmp_path_factory.mktemp("export")
    for number in range(16):
        folder = home / "photos" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (50, 40), (16 * number,) * 3).save(folder / f"{number}.png")
    data = ("data.name=image_folder", f"data.root={home / 'photos'}", "data.image_size=32", "data.workers=0")
    train = ("train.max_steps=2", "train.global_batch_size=4", "train.ema_decay=0.5")
    model = ("model.name=timm/test_vit.r160_in1k", "model.drop_rate=0.1")
    run_ranks(1, train_run, home / "run", "single", (*data, *model, *train))
    (home / "photos").rename(home / "elsewhere")
    return home / "run"


def noted(file: Path) -> dict[str, Any]:
    with safe_open(file, "pt") as opened:
        return dict(json.loads(opened.metadata()["trainkit"]))


def test_a_file_of_weights_says_how_to_make_the_network_and_its_images(run: Path, tmp_path: Path) -> None:
    done = run_command("export", str(run), "x.safetensors", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "x.safetensors: the averaged weights of step 2 (best).\n"), done.stderr
    assert noted(tmp_path / "x.safetensors") == {
        "library": "timm", "name": "test_vit.r160_in1k", "task": "classification", "classes": ["cat", "dog"],
        "arguments": {"num_classes": 2, "in_chans": 3, "drop_rate": 0.1},
        "enlarged": {"size": 160, "interpolation": "bilinear"},
        "in_chans": 3, "size": 32, "resize": 37, "crop": 0.8649, "interpolation": "bilinear",
        "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "run": "run", "step": 2, "weights": "ema",
    }  # fmt: skip


@pytest.mark.nightly
def test_a_program_has_the_averaged_weights_and_enlarges_by_itself(run: Path, tmp_path: Path) -> None:
    done = run_command("export", str(run), "x.pt2", "--checkpoint", "latest", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "It gives the model's scores to" in done.stdout
    model = trainkit.open(run, checkpoint="latest").model()
    program = torch.export.load(tmp_path / "x.pt2").module()
    for count in (1, 5):
        images = torch.rand(count, 3, 32, 32)
        torch.testing.assert_close(program(images), model(images))


@pytest.mark.nightly
def test_an_onnx_file_takes_any_batch_and_says_the_same(run: Path, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    for file in ("x.onnx", "x.safetensors"):
        done = run_command("export", str(run), file, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    session = onnxruntime.InferenceSession(tmp_path / "x.onnx", providers=["CPUExecutionProvider"])
    note = session.get_modelmeta().custom_metadata_map["trainkit"]
    assert json.loads(note) == noted(tmp_path / "x.safetensors")
    images = torch.rand(4, 3, 32, 32)
    (scores,) = session.run(None, {"images": images.numpy()})
    torch.testing.assert_close(torch.from_numpy(scores), trainkit.open(run).model()(images), rtol=1e-3, atol=1e-4)


def test_a_library_that_is_not_there_is_named_with_its_extra(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name.startswith("onnx") else find(name))
    config = load(str(run / "config.yaml"), []).config
    with pytest.raises(UserError) as error:
        export_model(config, RunDir(run), "best", None, tmp_path / "x.onnx", "onnx")
    assert error.value.fix.startswith('pip install "trainkit-vision[onnx]"')
    assert not os.listdir(tmp_path)


@pytest.mark.nightly
def test_what_cannot_be_exported_is_refused_and_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "own_net.py").write_text(OWN)
    done = run_command(
        "train", "single", "model.name=own_net:net", "train.max_steps=1", "--run-dir", "run", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    (tmp_path / "x.pt2").write_text("of yesterday")
    done = run_command("export", "run", "x.pt2", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("own_net:net cannot be exported as torch.\n  why: "), done.stderr
    assert "safetensors" in done.stderr
    assert (tmp_path / "x.pt2").read_text() == "of yesterday"
    done = run_command("export", "run", "x.safetensors", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = noted(tmp_path / "x.safetensors")
    assert (told["library"], told["name"], told["options"]) == ("user", "own_net:net", {})
    for words, says in (
        (("x.bin",), "x.safetensors or x.pt2 or x.onnx"),
        (("x.pt2", "--format", "onnx"), "Give x.onnx."),
    ):
        done = run_command("export", "run", *words, cwd=tmp_path)
        assert (done.returncode, says in done.stderr) == (2, True), done.stderr


@pytest.mark.nightly
def test_a_file_that_gives_other_scores_is_not_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_another(content: io.BytesIO) -> Any:
        return SimpleNamespace(module=lambda: lambda images: images[:, 0, 0, :2])

    monkeypatch.setattr(torch.export, "load", of_another)
    config = load(str(run / "config.yaml"), []).config
    with pytest.raises(UserError, match="gives different scores than the model"):
        export_model(config, RunDir(run), "best", None, tmp_path / "x.pt2", "torch")
    assert not os.listdir(tmp_path)


# Cards, and the Hugging Face Hub.


def test_a_card_is_read_by_the_hubs_own_library_and_tells_the_test_metrics(run: Path, tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    done = run_command("export", str(run), "model.safetensors", "--card", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("timm", "image-classification")
    test = json.loads((run / "summary.json").read_text())["test"]
    assert card.data.eval_results is not None
    told = {item.metric_type: item.metric_value for item in card.data.eval_results}
    assert told == pytest.approx({"accuracy": test["ema_acc1"], "acc5": test["ema_acc5"]}, abs=1e-3)
    assert "cat, dog" in card.text
    assert "the shorter side is resized to 37 pixels (bilinear), the square of 32" in card.text
    assert "enlarged to 160 pixels" in card.text
    assert "http" not in card.text.replace("https://huggingface.co", "")


def test_metrics_of_the_best_weights_are_not_told_of_others(run: Path, tmp_path: Path) -> None:
    facts = Facts(RunDir(run), "run")
    about = {**told_of(open_saved(load(str(run / "config.yaml"), []).config, RunDir(run)), "run")}
    assert "Top-1 accuracy" in card(facts, about, "x.onnx")
    assert "Top-1 accuracy" not in card(facts, {**about, "step": 1}, "x.onnx")


def test_names_of_classes_move_no_terminal_in_a_card(run: Path) -> None:
    facts = Facts(RunDir(run), "run")
    about = {**told_of(open_saved(load(str(run / "config.yaml"), []).config, RunDir(run)), "run")}
    text = card(
        facts, {**about, "classes": ["cat\x1b]0;x\x07", "e\u202egpj.dog"], "name": "net\x1b[2J"}, "x\x1b[1m.onnx"
    )
    assert "cat, e\ufffdgpj.dog" in text
    assert all(character.isprintable() or character == "\n" for character in text)


def test_a_card_never_replaces_a_file_of_somebody_elses(run: Path, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# My project\n")
    done = run_command("export", str(run), "model.safetensors", "--card", cwd=tmp_path)
    assert done.returncode == 2
    assert "README.md was not written by this command" in done.stderr
    assert (tmp_path / "README.md").read_text() == "# My project\n"
    assert os.listdir(tmp_path) == ["README.md"], "it is refused before anything is written"


def send(server: Hub, run: Path, home: Path, *words: str, token: str = "right") -> subprocess.CompletedProcess[str]:
    env = {"HF_ENDPOINT": server.url, "HF_TOKEN": token, "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_XET": "1"}
    return python("-m", "jobs.export", str(run), "model.safetensors", "--to-hub", "me/net", *words, cwd=home, **env)


@pytest.mark.long
def test_the_hub_gets_weights_card_and_what_timm_loads_them_by(run: Path, tmp_path: Path) -> None:
    import timm

    with hub() as server:
        done = send(server, run, tmp_path)
        assert done.returncode == 0, done.stderr
        assert f"{server.url}/me/net: sent." in done.stdout
        assert server.made[0].get("visibility", "private" if server.made[0].get("private") else "") == "private"
        assert server.commits == ["model.safetensors of step 2 of run"]
        assert server.files.keys() == {"model.safetensors", "README.md", "config.json"}
        assert server.files["model.safetensors"] == (tmp_path / "model.safetensors").read_bytes()
        assert not (tmp_path / "README.md").exists(), "the card of a project is its own"
        server.files["README.md"] = b"mine"
        assert send(server, run, tmp_path).returncode == 0
        assert server.files["README.md"] == b"mine"
        there = tmp_path / "there"
        there.mkdir()
        for name, content in server.files.items():
            (there / name).write_bytes(content)
    model = timm.create_model(f"local-dir:{there}", pretrained=True).eval()
    images = torch.rand(2, 3, 160, 160)
    ours = trainkit.open(run).model()
    ours._forward_pre_hooks.clear()  # which enlarge
    torch.testing.assert_close(model(images), ours(images))
    assert dict(vars(model)["pretrained_cfg"])["label_names"] == ["cat", "dog"]


@pytest.mark.long
def test_without_a_token_nothing_is_written_and_with_a_wrong_one_the_file_is(run: Path, tmp_path: Path) -> None:
    with hub() as server:
        for token, says in (("", "There is no token"), ("wrong", "could not be sent to me/net")):
            assert not (tmp_path / "model.safetensors").exists()
            done = send(server, run, tmp_path, token=token)
            assert (done.returncode, says in done.stderr, "Traceback" in done.stderr) == (2, True, False), done.stderr
            assert "wrong" not in done.stderr + done.stdout
        assert server.files == {}
    assert (tmp_path / "model.safetensors").exists()
