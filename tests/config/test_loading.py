import json
import re
from functools import reduce
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.config.conftest import Write
from trainkit.common.errors import UserError
from trainkit.config.loading import load, to_yaml
from trainkit.config.presets import PACKAGED
from trainkit.config.schema import SECTIONS


def refused(*arguments: Any, **options: Any) -> UserError:
    """The error for a wrong input."""
    with pytest.raises(UserError) as caught:
        load(*arguments, **options)
    assert len(str(caught.value).splitlines()) == 3, caught.value
    assert "Input should" not in str(caught.value)
    return caught.value


# Presets


PRESETS = [*PACKAGED.glob("*.yaml"), *PACKAGED.glob("recipes/*.yaml")]


@pytest.mark.parametrize("file", PRESETS, ids=lambda file: file.stem)
def test_every_preset_and_recipe_loads_by_name_and_by_path(file: Path) -> None:
    name = str(file.relative_to(PACKAGED).with_suffix(""))
    assert load(name).config == load(str(file)).config
    assert load(name).name == file.stem


def test_every_cluster_profile_loads() -> None:
    for profile in PACKAGED.glob("clusters/*.yaml"):
        assert load("ddp", [f"launch.cluster={profile.stem}"]).sources


@pytest.mark.parametrize(
    ("files", "preset", "name", "config"),
    [
        pytest.param({}, "ddp", "ddp", {"strategy.name": "ddp"}, id="a packaged one, from any folder"),
        pytest.param({"ddp/x": ""}, "ddp", "ddp", {"strategy.name": "ddp"}, id="beside a folder of that name"),
        pytest.param({"my/vit.yaml": "seed: 3"}, "my/vit.yaml", "vit", {"seed": 3}, id="a file anywhere"),
        pytest.param(
            {"runs/vit-big-0007/config.yaml": "seed: 3"}, "runs/vit-big-0007", "vit-big", {"seed": 3}, id="a run"
        ),
        pytest.param(
            {"runs/vit-0007/3/config.yaml": "seed: 3", "runs/vit-0007/sweep.json": "[]"},
            "runs/vit-0007/3", "vit", {"seed": 3}, id="a run of a sweep",
        ),
        pytest.param({"runs/3/config.yaml": "seed: 3"}, "runs/3", "3", {}, id="a run that is called by a number"),
        pytest.param(
            {"configs/ddp.yaml": "extends: ddp\noptim: {lr: 0.5}"},
            "ddp", "ddp", {"optim.lr": 0.5, "strategy.name": "ddp"}, id="one that hides the packaged one it extends",
        ),

    ],
)  # fmt: skip
def test_a_preset_is_found_and_extended(
    write: Write, files: dict[str, str], preset: str, name: str, config: dict[str, Any]
) -> None:
    for file, text in files.items():
        write(file, f"{text}\n")
    loaded = load(preset)
    assert loaded.name == name
    for key, value in config.items():
        assert reduce(getattr, key.split("."), loaded.config) == value


@pytest.mark.parametrize(
    ("files", "preset", "words"),
    [
        ({}, "ddp_simm", ["ddp_sim, dp, fsdp", "Did you mean 'ddp_sim'?"]),
        ({}, "x.yaml", ["No file x.yaml"]), ({}, "x" * 600, ["Unknown preset"]),
        ({"runs/ddp-0001/x": ""}, "runs/ddp-0001", ["or an incomplete one"]),
        ({"a\nb.yaml": "seed: 1"}, "a\nb.yaml", ["cannot name a run"]),
        ({"a.yaml": "extends: b", "b.yaml": "extends: a"}, "a.yaml", ["extends itself", "a.yaml -> b.yaml -> a.yaml"]),
        *(
            ({"a.yaml": f"extends: {json.dumps(name)}"}, "a.yaml", ["a.yaml:1"])
            for name in ("a" * 5000, "a\0b", "/dev/zero", "../../..", "https://host/preset")
        ),
        # What is wrong in a file is named with its line
        (
            {"a.yaml": "seed: 1\noptim:\n  lr: 1\n  wieght_decay: 2"},
            "a.yaml",
            ["Unknown key 'optim.wieght_decay'.", "a.yaml:4)", "Did you mean 'optim.weight_decay'?"],
        ),
        ({"a.yaml": "seed: 1\noptim:\n  lr: fast"}, "a.yaml", ["optim.lr=fast is not valid (file a.yaml:3)."]),
        ({"a.yaml": "launch:\n  account: 123"}, "a.yaml", ["Put it in quotes: account: '123'."]),
        ({"a.yaml": "seed: 1\ndata: digits"}, "a.yaml", ["a.yaml:2).", "Set one of its keys: data.name=VALUE."]),
    ],
)  # fmt: skip
def test_a_mistake_in_a_preset_is_located(write: Write, files: dict[str, str], preset: str, words: list[str]) -> None:
    for file, text in files.items():
        write(file, f"{text}\n")
    error = str(refused(preset))
    assert [word for word in words if word not in error] == [], error


# Precedence


def test_flag_then_environment_then_file_then_profile_then_default(write: Write) -> None:
    write("configs/clusters/site.yaml", "launch: {account: profile, partition: profile, qos: profile, mem: 1G}\n")
    file = write("a.yaml", "launch: {account: file, partition: file, qos: file, cluster: site}\n")
    env = {"SBATCH_ACCOUNT": "env", "SBATCH_PARTITION": "env"}
    loaded = load(str(file), flags={"launch.account": ("flag", "--account")}, env=env)
    launch = loaded.config.launch
    assert (launch.account, launch.partition, launch.qos, launch.mem, launch.nodes) == ("flag", "env", "file", "1G", 1)
    assert [str(loaded.source(f"launch.{key}")) for key in ("account", "partition", "qos", "mem", "nodes")] == [
        "flag --account",
        "environment SBATCH_PARTITION",
        f"file {file}:1",
        "cluster profile configs/clusters/site.yaml:1",
        "default",
    ]


@pytest.mark.parametrize(
    ("variable", "text", "key", "value"),
    [
        ("SBATCH_TIMELIMIT", "2:00:00", "time", "2:00:00"), ("SBATCH_TIMELIMIT", "90", "time", "90"),
        ("SBATCH_JOB_NAME", "mine", "job_name", "mine"), ("SBATCH_MEM_PER_NODE", "8G", "mem", "8G"),
        ("SBATCH_GRES", "tape:1", "gres", "tape:1"), ("SBATCH_GPUS_PER_NODE", "4", "gpus_per_node", 4),
        ("SBATCH_GPUS_PER_NODE", "a100:4", "gpu_type", "a100"),
        ("SBATCH_WCKEY", "thesis", "sbatch", {"wckey": "thesis"}),
        ("SBATCH_HINT", "nomultithread", "sbatch", {"hint": "nomultithread"}),
        ("SBATCH_EXCLUSIVE", "1", "sbatch", {"exclusive": ""}),
        ("SBATCH_EXCLUSIVE", "user", "sbatch", {"exclusive": "user"}),
        ("SBATCH_REQ_SWITCH", "1", "sbatch", {"switches": "1"}),
        ("SBATCH_OVERCOMMIT", "1", "sbatch", {"overcommit": ""}),
        ("SBATCH_EXPORT", "NONE", "sbatch", {"export": "NONE"}),
        ("SLURM_HINT", "nomultithread", "sbatch", {"hint": "nomultithread"}),
        ("SBATCH_CPU_FREQ_REQ", "high", "sbatch", {"cpu-freq": "high"}),
        ("SBATCH_TRES_BIND", "gres/gpu:closest", "sbatch", {"tres-bind": "gres/gpu:closest"}),
    ],
)  # fmt: skip
def test_sbatchs_own_variables_count_as_they_do_for_sbatch(variable: str, text: str, key: str, value: Any) -> None:
    loaded = load("ddp", env={variable: text})
    assert getattr(loaded.config.launch, key) == value
    entry = f"launch.{key}.{next(iter(value))}" if isinstance(value, dict) else f"launch.{key}"
    assert str(loaded.source(entry)) == f"environment {variable}"
    assert loaded.notes == ()


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("SBATCH_OUTPUT", "logs of ranks"), ("SBATCH_SIGNAL", "launch.signal_seconds"),
        ("SBATCH_NO_REQUEUE", "launch.requeue"), ("SBATCH_ARRAY_INX", "--sweep"),
        ("SBATCH_CLUSTERS", "cluster of this machine"), ("SLURM_CLUSTERS", "cluster of this machine"),
        ("SBATCH_WAIT", "--wait"), ("SBATCH_GPUS_PER_TASK", "--gpus-per-node"),
        ("SBATCH_CLUSTER_CONSTRAINT", "cluster of this machine"), ("SBATCH_CONTAINER_ID", "--container-image"),
    ],
)  # fmt: skip
def test_a_variable_of_sbatchs_that_is_not_passed_on_is_said(variable: str, words: str) -> None:
    loaded = load("ddp", env={variable: "1", "SBATCH_NO_SUCH": "1"})
    assert loaded.config.launch == load("ddp").config.launch
    (note,) = loaded.notes
    assert note.startswith(f"Note: {variable}=1 is not passed on.")
    assert words in note


def test_each_entry_of_the_options_for_sbatch_has_its_own_source(write: Write) -> None:
    file = write("a.yaml", "launch: {sbatch: {comment: file, hold: true}}\n")
    flags: dict[str, tuple[Any, str]] = {"launch.sbatch": ({"nice": "3", "comment": "flag"}, "--sbatch")}
    given = "launch.sbatch.licenses=x"
    loaded = load(str(file), [given], flags=flags, env={"SBATCH_WCKEY": "mine"})
    assert {key: (value, str(loaded.source(f"launch.sbatch.{key}")))
            for key, value in loaded.config.launch.sbatch.items()} == {
        "comment": ("flag", "flag --sbatch"), "hold": ("", f"file {file}:1"), "nice": ("3", "flag --sbatch"),
        "wckey": ("mine", "environment SBATCH_WCKEY"), "licenses": ("x", f"override {given}"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "env", "key", "value"),
    [
        (["launch.account=first", "launch.account=last"], {}, "account", "last"),
        ([], {"SBATCH_ACCOUNT": ""}, "account", None), ([], {"TRAINKIT_CLUSTER": "site"}, "partition", "gpu"),
        (["launch.cluster=elsewhere.yaml"], {}, "partition", "gpu"),
    ],
)  # fmt: skip
def test_who_says_a_setting(write: Write, overrides: list[str], env: dict[str, str], key: str, value: str) -> None:
    for file in ("configs/clusters/site.yaml", "elsewhere.yaml"):
        write(file, "launch: {partition: gpu}\n")
    assert getattr(load("ddp", overrides, env=env).config.launch, key) == value


def test_a_cluster_profile_that_is_unknown_or_no_profile_is_refused(write: Write) -> None:
    write("configs/clusters/leonardo.yaml", "seed: 1\n")
    assert refused("ddp", ["launch.cluster=leonard"]).fix == "Did you mean 'leonardo'?"
    error = refused("ddp", ["launch.cluster=leonardo"])
    assert "'seed' does not belong" in error.what
    assert "configs/clusters/leonardo.yaml:1" in error.why


# Extending


def test_a_preset_states_only_what_differs(write: Write) -> None:
    write("shared/base.yaml", "optim: {lr: 1, name: sgd}\n")
    write("middle.yaml", "extends: shared/base.yaml\noptim: {lr: 2}\n")
    loaded = load(str(write("top.yaml", "extends: middle\nseed: 3\n")))
    assert (loaded.config.seed, loaded.config.optim.lr, loaded.config.optim.name) == (3, 2, "sgd")
    assert str(loaded.source("optim.name")).endswith("base.yaml:1")
    assert str(loaded.source("optim.lr")).endswith("middle.yaml:2")


def test_a_runs_own_configuration_does_not_ask_its_profile_again(write: Write) -> None:
    profile = write("site.yaml", "launch: {qos: long, sbatch: {comment: then}}\n")
    run = load("ddp", [f"launch.cluster={profile}"]).config
    write("runs/ddp-0001/config.yaml", to_yaml(run))
    write("site.yaml", "launch: {sbatch: {nice: 10}}\n")
    assert load("runs/ddp-0001").config == run
    profile.unlink()
    assert load("runs/ddp-0001").config == run


@pytest.mark.parametrize("key", ["partition", "account", "mem", "time", "gpus_per_node"])
def test_a_copied_run_configuration_gets_what_it_lacks_from_its_profile(write: Write, key: str) -> None:
    profile = write("site.yaml", f"launch: {{{key}: '4'}}\n".replace("'", "" if key == "gpus_per_node" else "'"))
    whole = to_yaml(load("ddp", [f"launch.cluster={profile}", f"launch.{key}=8"]).config)
    cut = "\n".join(line for line in whole.splitlines() if not line.startswith(f"  {key}:"))
    launches = [load(str(write("config.yaml", text))).config.launch for text in (whole, cut)]
    assert [str(getattr(launch, key)) for launch in launches] == ["8", "4"]


# Plugins


@pytest.mark.parametrize(
    ("text", "overrides", "options"),
    [
        ("model: {depth: 3}", ["model.name=fashion_cnn"], {"depth": 3}),
        ("model: {name: vit, depth: 3, width: 2}", ["model.name=deit", "model.depth=4"], {"depth": 4}),
    ],
    ids=["the same", "another"],
)
def test_another_plugin_drops_the_options_of_the_one_before(
    write: Write, text: str, overrides: list[str], options: dict[str, int]
) -> None:
    file = write("a.yaml", f"{text}\ndata: {{name: synthetic, root: there, image_size: 8}}\n")
    loaded = load(str(file), [*overrides, "data.name=digits"])
    assert (loaded.config.model.options, loaded.config.data.options) == (options, {})
    assert loaded.config.data.root == "there"
    assert "data.image_size" not in loaded.sources


def test_an_option_may_come_before_the_name_of_its_plugin() -> None:
    words = ["data.image_size=8", "data.name=synthetic"]
    for order in (words, words[::-1]):
        loaded = load("single", order)
        assert loaded.config.data.options == {"image_size": 8}
        assert str(loaded.source("data.image_size")) == "override data.image_size=8"


def test_a_check_that_names_a_key_says_where_it_was_written() -> None:
    loaded = load("ddp", ["strategy.bucket=3"])
    with (
        pytest.raises(UserError, match=r"why: It has none \(override strategy\.bucket=3\)\."),
        loaded.pointing_at_sources(),
    ):
        raise UserError("Unknown key 'strategy.bucket'.", why="It has none.", key="strategy.bucket")


# Overrides


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optim.lr=3e-4", 3e-4), ("optim.lr=1", 1.0), ("train.max_steps=null", None), ("train.max_steps=", None),
        ("train.epochs=010", 10), ("optim.nesterov=true", True), ("optim.nesterov=no", False),
        ("optim.betas=[0.8, 0.9]", (0.8, 0.9)), ("monitor.loggers=[jsonl]", ("jsonl",)),
        ("launch.time=1:00:00", "1:00:00"), ("launch.time=90", "90"),
        ("launch.container_image=none", None), ("launch.account=0123", "0123"),
        ("launch.job_name=run #3", "run #3"), ("launch.job_name='3'", "3"), ("launch.job_name=no", "no"),
        ("launch.job_name=null", None), ("launch.gpus_per_node=4", 4), ("launch.gpus_per_node=auto", "auto"),
        ("launch.sbatch={comment: x}", {"comment": "x"}), ("launch.sbatch.comment=x=y", {"comment": "x=y"}),
    ],
)  # fmt: skip
def test_an_override_is_of_the_type_of_its_key(override: str, value: Any) -> None:
    section, name = override.split("=")[0].split(".")[:2]
    assert getattr(getattr(load("ddp", [override]).config, section), name) == value


@pytest.mark.parametrize(
    ("env", "flags"),
    [
        ({"SBATCH_MEM_PER_CPU": "1G"}, {"launch.mem": ("4G", "--mem")}),
        ({"SBATCH_MEM_PER_NODE": "8G"}, {"launch.sbatch": ({"mem_per_gpu": "1G"}, "--sbatch")}),
        ({"SBATCH_MEM_PER_CPU": "1G", "SBATCH_MEM_PER_GPU": "1G"}, {}),
    ],
)
def test_memory_asked_for_in_two_ways_is_refused_before_sbatch_does(env: dict[str, str], flags: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="both request memory") as caught:
        load("ddp", env=env, flags=flags)
    assert "environment SBATCH_MEM_PER_" in caught.value.why


@pytest.mark.parametrize(
    "words", ["lr", "=3", "--lr=3", "", "optim.lr = 3", "optim.lr= 3", "optim.lr =3", "optim.lr:3"]
)
def test_what_is_no_override_is_told_what_one_looks_like(words: str) -> None:
    assert refused("ddp", [*words.split(" "), "train.epochs=2"]).fix == "For example optim.lr=3e-4."


# Mistakes: what, where it was written, what is right


@pytest.mark.parametrize(
    ("override", "what", "fix"),
    [
        ("optim.wieght_decay=1", "Unknown key 'optim.wieght_decay'.", "Did you mean 'optim.weight_decay'?"),
        ("optimm.lr=1", "Unknown key 'optimm.lr'.", "Did you mean 'optim.lr'?"),
        ("lr=1", "Unknown key 'lr'.", "Did you mean 'optim.lr'?"),
        ("train.name=vit", "Unknown key 'train.name'.", "Did you mean 'model.name'?"),
        ("batch_size=8", "Unknown key 'batch_size'.", "Did you mean 'train.global_batch_size'?"),
        ("launch.gpus=2", "Unknown key 'launch.gpus'.", "Did you mean 'launch.gpus_per_node'?"),
        ("launch.gpus-per-node=1", "Unknown key 'launch.gpus-per-node'.", "Did you mean 'launch.gpus_per_node'?"),
        ("launch.foo=1", "Unknown key 'launch.foo'.", "Use one of these, or remove 'launch.foo'."),
        ("train.epoochs=1", "Unknown key 'train.epoochs'.", "Did you mean 'train.epochs'?"),
        ("bogus.key=1", "Unknown key 'bogus.key'.", "Use one of these, or remove 'bogus.key'."),
        ("optim.lr.x=1", "Unknown key 'optim.lr.x'.", "Give optim.lr=VALUE."),
        (
            "model=vit",
            "'model' is a section, not a value (override model=vit).",
            "Set one of its keys: model.name=VALUE.",
        ),
        ("optim.lr=abc", "optim.lr=abc is not valid (override optim.lr=abc).", "For example optim.lr=0.002."),
        ("train.epochs=true", "train.epochs=true is not valid", "For example train.epochs=20."),
        ("launch.executor=slrm", "Unknown executor 'slrm'.", "Did you mean 'slurm'?"),
        ("monitor.loggers=[jsonl, jsonl]", "monitor.loggers=[jsonl, jsonl] is not valid", "For example"),
        ("train.precision=bf61", "train.precision=bf61 is not valid", "Did you mean 'bf16'?"),
    ],
)
def test_a_mistake_is_answered_with_what_is_right(override: str, what: str, fix: str) -> None:
    error = refused("ddp", [override])
    assert what in error.what
    assert fix in error.fix
    assert f"override {override}" in str(error)
    assert error.key == override.partition("=")[0]


BETA = "float >= 0 and < 1"
BETAS = f"[{BETA}, {BETA}] | [{BETA}, {BETA}, {BETA}] | null."


ONE_LINE = "text on one line, without control characters."
BY_LONG_NAME = "options by their long names, without dashes, as in {comment: thesis}."


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("optim.lr=0", "float > 0."), ("seed=-1", "int >= 0 and <= 4294967295."),
        (f"seed={2**70}", "int >= 0 and <= 4294967295."), ("collaborative.port=65536", "int >= 0 and <= 65535."),
        ("launch.gpus_per_node=few", "int >= 0 | auto."), ("optim.betas=[0.9]", BETAS), ("optim.betas=[0.9, 2]", BETAS),
        ("optim.nesterov=maybe", "bool | null."), ("monitor.loggers=3", "[text, ...]."),
        ("monitor.loggers=[jsonl,jsonl]", "a list without repetitions: every record would be written twice."),
        ("train.class_weights=[0, 1]", "balanced | [float > 0, ...] | null."),
        ("monitor.profile_steps=5", "[int >= 0, int > 0] | null."), ("launch.sbatch=3", "{name: text}."),
        ("launch.time=soon", "a time as sbatch writes it: 30 (minutes), 2:00:00, 1-12:00:00."),
        ("launch.mem=lots", "a size as sbatch writes it: 32G, 500M, 0."),
        *((f"launch.environment={value}", "venv:FOLDER, conda:NAME or uv:PROJECT.") for value in ("vision", "conda:")),
        ("launch.job_name=\x1b[2J", ONE_LINE), ("launch.nodelist=n1\n#SBATCH --begin=now+1year", ONE_LINE),
        ('launch.setup=["module load x\\nrm x"]', ONE_LINE), ("launch.sbatch.comment=a\nb", ONE_LINE),
        ("launch.sbatch.comment\nb=a", ONE_LINE), ("launch.sbatch.comment b=a", BY_LONG_NAME),
        ("launch.sbatch.L=a", BY_LONG_NAME), ("launch.srun.--mpi=a", BY_LONG_NAME),
    ],
)  # fmt: skip
def test_a_mistake_is_answered_in_one_printable_line_with_what_must_be_there(override: str, wanted: str) -> None:
    error = refused("ddp", [override])
    assert error.key == ".".join(override.partition("=")[0].split(".")[:2])
    assert error.why == f"{error.key} must be {wanted}"
    assert error.what.isprintable()


def test_settings_that_cannot_hold_together_are_named_with_their_places(write: Write) -> None:
    file = write("a.yaml", "train:\n  global_batch_size: 10\n")
    error = refused(str(file), ["train.micro_batch_size=4"])
    assert error.what == "train.global_batch_size=10 is not a multiple of train.micro_batch_size=4."
    assert "a.yaml:2" in error.why
    assert "override train.micro_batch_size=4" in error.why
    assert (error.fix, error.key) == ("Use train.global_batch_size=8 or 12.", "train.global_batch_size")


ODD = ("", "x", "-1", "1.5", "true", "null", "[1]", "{a: 1}", "1e400", "[[]]", "é # y")
UNREADABLE = ("'", "[", "!!x", "*a", "%")  # whose setting it is does not matter


@pytest.mark.parametrize("section", ["", *SECTIONS])
def test_whatever_is_typed_the_answer_is_three_lines_in_our_words(section: str) -> None:
    fields = ["seed", "nope", section]
    if section:
        # One field of each type: the others are answered by the same code.
        types = {
            str((field.annotation, field.metadata)): name for name, field in SECTIONS[section].model_fields.items()
        }
        fields = [*types.values(), "nope", "nope.x"]
    answers = []
    for field, value in [*product(fields, ODD), *product(fields[:1], UNREADABLE)]:
        try:
            load("ddp", [f"{section}.{field}={value}".lstrip(".")])
        except UserError as error:
            answers.append(str(error))
    assert [text for text in answers if len(text.splitlines()) != 3] == []
    assert [text for text in answers if re.search("nput should|pydantic|Undefined|<class|validation", text)] == []


# Writing


@pytest.mark.parametrize(
    "overrides",
    [
        [], ["optim.lr=1e-5", "train.max_steps=7"],
        ["model.name=a.b:c", "model.depth=3", "model.act=no", "model.sizes=[1, 2]", "model.cfg={a: {b: 1e-3}}"],
        ["launch.account=0123", "launch.job_name=yes", "launch.time=90", "launch.mem=0", "launch.sbatch={nice: 010}"],
        ["launch.setup=['module load x', 'a: b # c']", "launch.mail_user=null"],
    ],
)  # fmt: skip
def test_a_written_configuration_loads_as_an_equal_one(write: Write, overrides: list[str]) -> None:
    config = load("ddp", overrides).config
    assert load(str(write("config.yaml", to_yaml(config)))).config == config
