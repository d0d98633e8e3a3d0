import csv
import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import numpy
import pytest
import torch
from PIL import Image

import trainkit
from tests.data.samples import write_digits
from tests.jobs.test_json import shape_of
from tests.rank_functions import run_command, run_ranks, train_run
from tests.shell import python
from trainkit.data.base import normalize
from trainkit.data.datasets.digits import build
from trainkit.report.facts import Facts
from trainkit.run.folder import RunDir


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that shard the model."""
    folder = tmp_path_factory.mktemp("evaluate") / "run"
    run_ranks(2, train_run, folder, "fsdp", ("train.max_steps=40", "train.ema_decay=0.9"))
    return folder


def evaluate(run: Path, *arguments: str) -> str:
    done = run_command("evaluate", str(run), *arguments, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def both(run: Path) -> dict[str, Any]:
    """What is told of the model's own weights and of the averaged ones, as docs/reference/json.md says."""
    told = json.loads(evaluate(run, "--json"))
    assert [error.message for error in shape_of("evaluate")[1].iter_errors(told)] == []
    return dict(told)


@pytest.mark.nightly
def test_one_process_finds_the_test_metrics_that_two_ranks_found(run: Path, both: dict[str, Any]) -> None:
    summary = json.loads((run / "summary.json").read_text())
    test = summary["test"]
    assert (both["step"], both["samples"]) == (summary["best_step"], test["samples"])
    assert both["acc1"] == pytest.approx(test["acc1"])
    assert [both["loss"], both["ema_loss"]] == pytest.approx([test["loss"], test["ema_loss"]], rel=1e-5)


@pytest.mark.nightly
def test_averaged_weights_and_classes_are_told_apart(run: Path, both: dict[str, Any]) -> None:
    raw, ema = (json.loads(evaluate(run, "--json", "--weights", kind)) for kind in ("raw", "ema"))
    assert (raw["loss"], ema["ema_loss"]) == (both["loss"], both["ema_loss"])
    assert ("ema_loss" in raw, "loss" in ema) == (False, False)
    for kind, acc1 in (("raw", both["acc1"]), ("ema", both["ema_acc1"])):
        counts = both["confusion"][kind]
        assert sum(count for _, _, count in counts) == both["samples"]
        right = sum(count for label, told, count in counts if label == told)
        assert 100 * right / both["samples"] == pytest.approx(acc1)
    assert both["classes"] == [str(digit) for digit in range(10)]


@pytest.mark.nightly
def test_the_worst_classes_are_listed_with_what_they_were_taken_for(run: Path, both: dict[str, Any]) -> None:
    said = evaluate(run)
    assert f"test of step {both['step']} (best): acc1" in said
    assert "averaged weights: acc1" in said
    wrong = {label for label, other, _ in both["confusion"]["raw"] if label != other}
    listed = said.partition("worst classes:\n")[2].partition("worst classes (")[0].splitlines()
    assert len(listed) == min(5, len(wrong))
    shares = [float(line.split("%")[0]) for line in listed]
    assert shares == sorted(shares)
    assert all("taken for" in line for line in listed)


@pytest.mark.nightly
def test_no_verb_that_reads_weights_changes_what_training_has_recorded(run: Path, tmp_path: Path) -> None:
    """On other data, other checkpoints and splits too; what `evaluate` measures has a file of its own."""

    def contents() -> dict[str, str]:
        files = [path for path in run.rglob("*") if path.is_file() and path.name != "evaluations.jsonl"]
        return {str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

    def status() -> str:
        shown = json.loads(run_command("status", str(run), "--json", cwd=tmp_path).stdout)[0]
        return str({key: shown[key] for key in ("state", "step", "total_steps", "epoch", "val")})

    Image.new("L", (8, 8), 128).save(tmp_path / "grey.png")
    before, was, test = contents(), status(), Facts(RunDir(run), "run").test
    for verb, *arguments in (
        ("evaluate",),
        ("evaluate", "--checkpoint", "latest", "data.augment=false"),
        ("evaluate", "--split", "val", "--weights", "ema"),
        ("evaluate", "--split", "train"),
        ("predict", str(tmp_path / "grey.png")),
        ("export", str(tmp_path / "weights.safetensors")),
    ):
        done = run_command(verb, str(run), *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert (contents(), status(), Facts(RunDir(run), "run").test) == (before, was, test)
    kept = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [(item["split"], item["checkpoint"], item["settings"]) for item in kept[-4:]] == [
        ("test", "best", []), ("test", "latest", ["data.augment=false"]), ("val", "best", []), ("train", "best", [])
    ]  # fmt: skip


@pytest.fixture(scope="module")
def own_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a model of its own, whose file is not where it was any more."""
    folder = tmp_path_factory.mktemp("own")
    source = "from torch import nn\n\ndef net(info):\n    pixels = info.in_chans * info.image_size**2\n"
    source += "    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, info.num_classes))\n"
    (folder / "my_net.py").write_text(source)
    settings = ("model.name=my_net:net", "train.max_steps=2", "monitor.loggers=[jsonl]", "launch.gpus_per_node=0")
    words = ("-m", "jobs.submit", "single", "--executor", "debug", *settings)
    python(*words, cwd=folder, TRAINKIT_RUNS=str(folder / "runs")).check_returncode()
    (folder / "my_net.py").unlink()
    return folder / "runs" / "single-0001"


@pytest.mark.nightly
def test_a_model_of_the_runs_own_comes_from_its_snapshot(own_run: Path, tmp_path: Path) -> None:
    """From any folder; and what cannot be recorded is still said."""
    (own_run / "evaluations.jsonl").symlink_to("/dev/null")  # root may write anywhere, but not through this
    done = python("-m", "jobs.evaluate", str(own_run), "--allow-code", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "test of step 2 (best): acc1" in done.stdout
    file = own_run / "evaluations.jsonl"
    assert f"Could not be recorded in {file}: {file} is a link to /dev/null." in done.stderr


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test split of the run, in folders called as its classes."""
    folder = tmp_path_factory.mktemp("images")
    write_digits(folder, "{}")
    return folder


@pytest.mark.nightly
def test_a_folder_of_images_is_measured_as_the_data_that_they_are_of(
    run: Path, images: Path, both: dict[str, Any], tmp_path: Path
) -> None:
    """By the names of its folders: some classes, in an order of their own, are enough."""
    before = Facts(RunDir(run), "run").test
    found = json.loads(evaluate(run, "--json", "--data", str(images)))
    assert [found[key] for key in ("samples", "acc1", "ema_acc1")] == [
        both[key] for key in ("samples", "acc1", "ema_acc1")
    ]
    assert found["confusion"] == both["confusion"]
    assert found["ece"] == pytest.approx(both["ece"])
    assert found["per_class"]["raw"][3]["recall"] == pytest.approx(both["per_class"]["raw"][3]["recall"])
    (tmp_path / "8").symlink_to(images / "8")
    some = json.loads(evaluate(run, "--json", "--weights", "raw", "--data", str(tmp_path)))
    assert [item for item in both["confusion"]["raw"] if item[0] == 8] == some["confusion"]["raw"]
    assert [row["name"] for row in some["per_class"]["raw"]] == ["8"]
    assert Facts(RunDir(run), "run").test == before, "other images are no test of the run"
    (tmp_path / "zebra").symlink_to(images / "8")
    refused = {
        tmp_path: "'zebra' is not one of them: 0, 1, 2",
        tmp_path / "absent": "contains no class folder with images",
    }
    for folder, says in refused.items():
        done = run_command("evaluate", str(run), "--data", str(folder), cwd=tmp_path)
        assert (done.returncode, says in done.stderr) == (2, True), done.stderr


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:scipy.optimize.*L-BFGS-B:DeprecationWarning")  # scikit-learn 1.6, newest SciPy
def test_features_tell_what_scikit_learn_finds_by_those_taken_by_hand(
    run: Path, images: Path, both: dict[str, Any], tmp_path: Path
) -> None:
    """By the run's own training images, also where the images that are tested lie in a folder."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    asked = ("--json", "--knn", "--linear-probe")
    found = json.loads(evaluate(run, *asked))
    assert {key: found[key] for key in both} == both, "what else is measured stays as it is"
    on_folder = json.loads(evaluate(run, "--data", str(images), "--weights", "raw", *asked))
    data = build(tmp_path)
    kinds: tuple[tuple[Literal["raw", "ema"], str], ...] = (("raw", ""), ("ema", "ema_"))
    for kind, prefix in kinds:
        model = torch.nn.Sequential(*list(trainkit.open(run, weights=kind).model().children())[:-1])

        def features(samples: Any, model: Any = model) -> tuple[Any, list[int]]:
            pixels, labels = zip(*(samples[index] for index in range(len(samples))), strict=True)
            with torch.no_grad():
                return model(normalize(torch.stack(pixels), data.info)).numpy(), list(labels)

        for name, theirs in (
            ("knn_acc1", KNeighborsClassifier(20, metric="cosine", weights=lambda far: numpy.exp((1 - far) / 0.07))),
            ("linear_acc1", make_pipeline(StandardScaler(), LogisticRegression(tol=1e-6, max_iter=2000))),
        ):
            expected = 100 * theirs.fit(*features(data.train)).score(*features(data.test))
            assert found[prefix + name] == pytest.approx(expected)
            assert prefix or on_folder[name] == pytest.approx(expected)
    said = evaluate(run, "--knn", "--weights", "raw")
    assert f"features before the last layer: 20 nearest neighbours acc1 {found['knn_acc1']:.2f} %\n" in said


def test_features_are_not_probed_where_nothing_could_be_learned_of_it(run: Path, images: Path) -> None:
    """On images that were learned; where the training images are gone."""
    for arguments, says in (
        (("--split", "train"), "would be its own nearest neighbour"),
        (("--data", str(images), "data.name=image_folder", "data.root=gone"), "gone"),
        (("--data", str(images), "data.name=synthetic", "data.image_size=8", "data.in_chans=1"), "other classes"),
    ):
        done = run_command("evaluate", str(run), "--knn", *arguments, cwd=Path.cwd())
        assert (done.returncode, says in done.stderr) == (2, True), done.stderr


def test_every_class_is_listed_and_the_confusion_is_a_matrix(run: Path, both: dict[str, Any], tmp_path: Path) -> None:
    said = evaluate(run, "--per-class", "--confusion", str(tmp_path / "x.csv"))
    table = said.partition("each class (averaged weights): precision, recall, F1 in %, images\n")[2].splitlines()
    assert [line.split()[-1] for line in table] == [str(digit) for digit in range(10)]
    assert "macro F1 (averaged weights) " in said
    assert f"ECE {both['ece']['ema']:.2f} %" in said
    (head, *rows) = list(csv.reader((tmp_path / "x.csv").read_text().splitlines()))
    assert head == ["class", *(str(digit) for digit in range(10))]
    matrix = {(label, told): int(cell) for label, row in enumerate(rows) for told, cell in enumerate(row[1:])}
    assert {pair: count for pair, count in matrix.items() if count} == {
        (label, told): count for label, told, count in both["confusion"]["ema"]
    }
    done = run_command("evaluate", str(run), "--confusion", "absent/x.csv", cwd=tmp_path)
    assert (done.returncode, "absent/x.csv cannot be written" in done.stderr) == (2, True)
