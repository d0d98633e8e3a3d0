from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainkit.config.loading import DEFAULT, PACKAGED, Source, load, to_yaml
from trainkit.config.schema import SECTIONS
from trainkit.errors import UserError

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes files into the folder of the test, which is the current one."""
    monkeypatch.chdir(tmp_path)

    def _write(name: str, text: str) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return file

    return _write


def refused(*arguments: Any, **options: Any) -> UserError:
    """What is said to a wrong input."""
    with pytest.raises(UserError) as caught:
        load(*arguments, **options)
    assert len(str(caught.value).splitlines()) == 3, caught.value
    assert "Input should" not in str(caught.value)
    return caught.value


def answer(override: str) -> str:
    """What is said to an override; nothing if it is taken."""
    try:
        load("ddp", [override])
    except UserError as error:
        return str(error)
    return ""


# Presets


@pytest.mark.parametrize(
    "file", [*PACKAGED.glob("*.yaml"), *PACKAGED.glob("recipes/*.yaml")], ids=lambda file: file.stem
)
def test_every_preset_and_recipe_loads_by_name_and_by_path(file: Path) -> None:
    name = str(file.relative_to(PACKAGED).with_suffix(""))
    assert load(name).config == load(str(file)).config
    assert load(name).name == file.stem


def test_every_cluster_profile_loads() -> None:
    for profile in PACKAGED.glob("clusters/*.yaml"):
        assert load("ddp", [f"launch.cluster={profile.stem}"]).sources


def test_presets_are_found_from_any_folder(write: Write) -> None:
    assert load("ddp").config.strategy.name == "ddp"


def test_a_preset_of_ones_own_folder_comes_first(write: Write) -> None:
    write("configs/ddp.yaml", "seed: 7\n")
    assert load("ddp").config.seed == 7


def test_a_file_needs_no_place_in_configs(write: Write) -> None:
    assert load(str(write("my/vit.yaml", "seed: 3\n"))).name == "vit"


def test_a_run_folder_is_a_preset_named_as_its_run(write: Write) -> None:
    write("runs/vit-big-0007/config.yaml", "seed: 3\n")
    loaded = load("runs/vit-big-0007")
    assert (loaded.name, loaded.config.seed) == ("vit-big", 3)


def test_an_unknown_preset_is_answered_with_the_nearest() -> None:
    error = refused("ddp_simm")
    assert "ddp_sim, dp, fsdp" in error.why
    assert error.fix == "Did you mean 'ddp_sim'?"


def test_a_file_that_is_not_there_is_refused(write: Write) -> None:
    assert "No file x.yaml" in refused("x.yaml").what


def test_a_half_written_run_folder_is_refused(write: Write, tmp_path: Path) -> None:
    (tmp_path / "runs" / "ddp-0001").mkdir(parents=True)
    assert "only half of one" in refused("runs/ddp-0001").what


def test_a_folder_of_a_presets_name_does_not_hide_the_preset(write: Write, tmp_path: Path) -> None:
    (tmp_path / "ddp").mkdir()
    assert load("ddp").name == "ddp"


def test_a_file_of_comments_is_the_defaults(write: Write) -> None:
    assert load(str(write("a.yaml", "# nothing yet\n"))).sources == {}


def test_a_section_with_nothing_but_comments_says_nothing(write: Write) -> None:
    assert load(str(write("a.yaml", "optim:\n  # lr: 1\nseed: 1\n"))).sources.keys() == {"seed"}


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
        ("SBATCH_TIMELIMIT", "2:00:00", "time", "2:00:00"),
        ("SBATCH_TIMELIMIT", "90", "time", "90"),
        ("SBATCH_JOB_NAME", "mine", "job_name", "mine"),
        ("SBATCH_MEM_PER_NODE", "8G", "mem", "8G"),
        ("SBATCH_GRES", "tape:1", "gres", "tape:1"),
        ("SBATCH_GPUS_PER_NODE", "4", "gpus_per_node", 4),
        ("SBATCH_GPUS_PER_NODE", "a100:4", "gpu_type", "a100"),
        ("SBATCH_WCKEY", "thesis", "sbatch", {"wckey": "thesis"}),
        ("SBATCH_HINT", "nomultithread", "sbatch", {"hint": "nomultithread"}),
        ("SBATCH_EXCLUSIVE", "1", "sbatch", {"exclusive": ""}),
        ("SBATCH_EXCLUSIVE", "user", "sbatch", {"exclusive": "user"}),
        ("SBATCH_REQ_SWITCH", "1", "sbatch", {"switches": "1"}),
        ("SBATCH_OVERCOMMIT", "1", "sbatch", {"overcommit": ""}),
        ("SBATCH_EXPORT", "NONE", "sbatch", {"export": "NONE"}),
    ],
)
def test_sbatchs_own_variables_count_as_they_do_for_sbatch(variable: str, text: str, key: str, value: Any) -> None:
    loaded = load("ddp", env={variable: text})
    assert getattr(loaded.config.launch, key) == value
    entry = f"launch.{key}.{next(iter(value))}" if isinstance(value, dict) else f"launch.{key}"
    assert str(loaded.source(entry)) == f"environment {variable}"
    assert loaded.notes == ()


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("SBATCH_OUTPUT", "logs of ranks"),
        ("SBATCH_SIGNAL", "launch.signal_seconds"),
        ("SBATCH_NO_REQUEUE", "launch.requeue"),
        ("SBATCH_ARRAY_INX", "--sweep"),
        ("SBATCH_CLUSTERS", "cluster of this machine"),
        ("SLURM_CLUSTERS", "cluster of this machine"),
        ("SBATCH_WAIT", "--wait"),
        ("SBATCH_GPUS_PER_TASK", "--gpus-per-node"),
    ],
)
def test_a_variable_of_sbatchs_that_is_not_passed_on_is_said(variable: str, words: str) -> None:
    loaded = load("ddp", env={variable: "1", "SBATCH_NO_SUCH": "1"})
    assert loaded.config.launch == load("ddp").config.launch
    (note,) = loaded.notes
    assert note.startswith(f"Note: {variable}=1 is not passed on.")
    assert words in note


def test_each_entry_of_the_options_for_sbatch_has_its_own_source(write: Write) -> None:
    file = write("a.yaml", "launch: {sbatch: {comment: file, hold: true}}\n")
    flags: dict[str, tuple[Any, str]] = {"launch.sbatch": ({"nice": "3", "com": "flag"}, "--sbatch")}
    loaded = load(str(file), flags=flags, env={"SBATCH_WCKEY": "mine"})
    assert loaded.config.launch.sbatch == {"comment": "flag", "hold": "", "wckey": "mine", "nice": "3"}
    assert [str(loaded.source(f"launch.sbatch.{key}")) for key in ("comment", "hold", "wckey", "nice")] == [
        "flag --sbatch", f"file {file}:1", "environment SBATCH_WCKEY", "flag --sbatch",
    ]  # fmt: skip


def test_an_override_outranks_the_environment() -> None:
    assert load("ddp", ["launch.account=mine"], env={"SBATCH_ACCOUNT": "env"}).config.launch.account == "mine"


def test_the_last_of_two_overrides_counts() -> None:
    assert load("ddp", ["seed=1", "seed=2"]).config.seed == 2


def test_an_empty_variable_is_none() -> None:
    assert load("ddp", env={"SBATCH_ACCOUNT": ""}).source("launch.account") == DEFAULT


def test_the_environment_may_name_the_cluster_profile(write: Write) -> None:
    write("configs/clusters/site.yaml", "launch: {partition: gpu}\n")
    assert load("ddp", env={"TRAINKIT_CLUSTER": "site"}).config.launch.partition == "gpu"


def test_a_cluster_profile_may_be_any_file(write: Write) -> None:
    file = write("elsewhere.yaml", "launch: {partition: gpu}\n")
    assert load("ddp", [f"launch.cluster={file}"]).config.launch.partition == "gpu"


def test_a_cluster_profile_describes_the_site_only(write: Write) -> None:
    write("configs/clusters/site.yaml", "seed: 1\n")
    error = refused("ddp", ["launch.cluster=site"])
    assert "'seed' does not belong" in error.what
    assert "configs/clusters/site.yaml:1" in error.why


def test_an_unknown_cluster_profile_is_answered_with_the_nearest(write: Write) -> None:
    write("configs/clusters/leonardo.yaml", "launch: {}\n")
    assert refused("ddp", ["launch.cluster=leonard"]).fix == "Did you mean 'leonardo'?"


# Extending


def test_a_preset_states_only_what_differs(write: Write) -> None:
    write("base.yaml", "optim: {lr: 1, name: sgd}\n")
    write("middle.yaml", "extends: base\noptim: {lr: 2}\n")
    loaded = load(str(write("top.yaml", "extends: middle\nseed: 3\n")))
    assert (loaded.config.seed, loaded.config.optim.lr, loaded.config.optim.name) == (3, 2, "sgd")
    assert str(loaded.source("optim.name")).endswith("base.yaml:1")
    assert str(loaded.source("optim.lr")).endswith("middle.yaml:2")


def test_a_file_may_extend_a_packaged_preset(write: Write) -> None:
    assert load(str(write("mine.yaml", "extends: fsdp\n"))).config.strategy.name == "fsdp"


def test_a_file_may_extend_the_path_of_another(write: Write) -> None:
    write("shared/base.yaml", "seed: 5\n")
    assert load(str(write("my/top.yaml", "extends: ../shared/base.yaml\n"))).config.seed == 5


def test_a_preset_that_stands_before_a_packaged_one_may_extend_it(write: Write) -> None:
    write("configs/ddp.yaml", "extends: ddp\noptim: {lr: 0.5}\n")
    config = load("ddp").config
    assert (config.optim.lr, config.strategy.name) == (0.5, "ddp")
    assert config.model_dump(exclude={"optim"}) == load(str(PACKAGED / "ddp.yaml")).config.model_dump(exclude={"optim"})


def test_a_runs_own_configuration_does_not_ask_its_profile_again(write: Write) -> None:
    profile = write("site.yaml", "launch: {qos: long, sbatch: {comment: then}}\n")
    run = load("ddp", [f"launch.cluster={profile}"]).config
    write("runs/ddp-0001/config.yaml", to_yaml(run))
    write("site.yaml", "launch: {sbatch: {nice: 10}}\n")
    assert load("runs/ddp-0001").config == run
    profile.unlink()
    assert load("runs/ddp-0001").config == run


def test_a_name_that_is_too_long_for_a_file_is_no_preset() -> None:
    assert "Unknown preset" in refused("x" * 600).what


def test_a_circle_of_presets_is_refused_with_its_members(write: Write) -> None:
    write("a.yaml", "extends: b\n")
    write("b.yaml", "extends: a\n")
    error = refused("a.yaml")
    assert "extends itself" in error.what
    assert "a.yaml -> b.yaml -> a.yaml" in error.why


def test_extending_what_is_not_there_names_the_line(write: Write) -> None:
    error = refused(str(write("a.yaml", "seed: 1\nextends: ddpp\n")))
    assert "a.yaml:2" in error.why
    assert error.fix == "Did you mean 'ddp'?"


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "/dev/zero", "../../..", "https://host/preset"], ids=ascii)
def test_what_is_extended_and_can_be_no_file_is_said(write: Write, name: str) -> None:
    assert "a.yaml:1" in refused(str(write("a.yaml", f"extends: {json.dumps(name)}\n"))).why


def test_a_chain_of_presets_has_an_end(write: Write) -> None:
    for number in range(30):
        write(f"{number}.yaml", f"extends: {number + 1}.yaml\n")
    assert "extends too many files" in refused(str(write("a.yaml", "extends: 0.yaml\n"))).what


def test_a_preset_extends_one_other(write: Write) -> None:
    assert "a.yaml:1" in refused(str(write("a.yaml", "extends: [ddp, fsdp]\n"))).what


# Plugins


def test_another_plugin_drops_the_options_of_the_one_before(write: Write) -> None:
    file = write("a.yaml", "model: {name: vit, depth: 3}\ndata: {name: synthetic, root: there, image_size: 8}\n")
    loaded = load(str(file), ["model.name=resnet18", "data.name=digits"])
    assert (loaded.config.model.options, loaded.config.data.options) == ({}, {})
    assert loaded.config.data.root == "there"
    assert "model.depth" not in loaded.sources


def test_the_same_plugin_keeps_its_options(write: Write) -> None:
    file = write("a.yaml", "model: {depth: 3}\n")
    assert load(str(file), ["model.name=fashion_cnn"]).config.model.options == {"depth": 3}


def test_options_given_with_the_new_plugin_are_its_own(write: Write) -> None:
    file = write("a.yaml", "model: {name: vit, depth: 3, width: 2}\n")
    assert load(str(file), ["model.name=deit", "model.depth=4"]).config.model.options == {"depth": 4}


def test_a_check_that_names_a_key_says_where_it_was_written() -> None:
    loaded = load("ddp", ["strategy.bucket=3"])
    with (
        pytest.raises(UserError, match=r"why: It has none \(override strategy\.bucket=3\)\."),
        loaded.pointing_at_sources(),
    ):
        raise UserError("Unknown key 'strategy.bucket'.", why="It has none.", key="strategy.bucket")


def test_only_the_key_of_an_error_counts_and_never_its_words() -> None:
    error = UserError("data.name=digit and strategy.name=ddp are fine.", key="optim.momentum")
    with pytest.raises(UserError) as caught, load("ddp", ["data.name=digit"]).pointing_at_sources():
        raise error
    assert caught.value is error


def test_a_check_that_names_nothing_is_passed_on_as_it_is() -> None:
    error = UserError("Something else.")
    with pytest.raises(UserError) as caught, load("ddp").pointing_at_sources():
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    ("override", "must_be"),
    [
        (f"seed={2**70}", "a whole number of at least 0 and of at most 4294967295"),
        ("collaborative.port=65536", "a whole number of at least 0 and of at most 65535"),
        ("monitor.loggers=[jsonl,jsonl]", "a list without repetitions: every record would be written twice"),
        ("launch.job_name=a\nrm -rf ~", "text on one line, without control characters"),
        ("launch.job_name=\x1b[2J", "text on one line, without control characters"),
        ("launch.account=a\u2028b", "text on one line, without control characters"),
        ("launch.nodelist=n1\n#SBATCH --begin=now+1year", "text on one line, without control characters"),
        ('launch.setup=["module load x\\nrm x"]', "text on one line, without control characters"),
        ("launch.sbatch.comment=a\nb", "text on one line, without control characters"),
        ("launch.sbatch.comment\nb=a", "text on one line, without control characters"),
        ("launch.sbatch.comment b=a", "options without their dashes, as in {comment: thesis}"),
        ("launch.srun.--mpi=a", "options without their dashes, as in {comment: thesis}"),
    ],
)
def test_what_would_fail_later_is_refused_at_once_in_one_printable_line(override: str, must_be: str) -> None:
    error = refused("ddp", [override])
    assert error.key == ".".join(override.partition("=")[0].split(".")[:2])
    assert error.why == f"{error.key} must be {must_be}."
    assert error.what.isprintable()


def test_tabs_and_what_any_language_writes_may_stand_in_a_script() -> None:
    launch = load("ddp", ["launch.job_name=Übung 3", "launch.setup=['module load\tcuda']"]).config.launch
    assert (launch.job_name, launch.setup) == ("Übung 3", ("module load\tcuda",))


def test_a_file_whose_name_breaks_a_line_names_no_run(write: Write) -> None:
    write("a\nb.yaml", "seed: 1\n")
    assert "cannot name a run" in refused("a\nb.yaml").what


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("optim.wieght_decay=1", "optim.wieght_decay"),
        ("optim.lr=fast", "optim.lr"),
        ("optim=sgd", "optim"),
        ("train.micro_batch_size=7", "train.global_batch_size"),
    ],
)
def test_a_mistake_in_the_configuration_names_its_key(override: str, key: str) -> None:
    assert refused("ddp", [override]).key == key


# Overrides


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optim.lr=3e-4", 3e-4),
        ("optim.lr=1", 1.0),
        ("train.max_steps=null", None),
        ("train.max_steps=", None),
        ("train.epochs=010", 10),
        ("optim.nesterov=true", True),
        ("optim.nesterov=no", False),
        ("optim.betas=[0.8, 0.9]", (0.8, 0.9)),
        ("monitor.loggers=[jsonl]", ("jsonl",)),
        ("launch.time=1:00:00", "1:00:00"),
        ("launch.time=90", "90"),
        ("launch.account=0123", "0123"),
        ("launch.job_name=run #3", "run #3"),
        ("launch.job_name='3'", "3"),
        ("launch.job_name=no", "no"),
        ("launch.job_name=null", None),
        ("launch.gpus_per_node=4", 4),
        ("launch.gpus_per_node=auto", "auto"),
        ("launch.sbatch={comment: x}", {"comment": "x"}),
        ("launch.sbatch.comment=x=y", {"comment": "x=y"}),
    ],
)
def test_an_override_is_of_the_type_of_its_key(override: str, value: Any) -> None:
    section, name = override.split("=")[0].split(".")[:2]
    assert getattr(getattr(load("ddp", [override]).config, section), name) == value


def test_sbatch_options_of_all_places_are_kept(write: Write) -> None:
    file = write("a.yaml", "launch: {sbatch: {comment: file, nice: 1}}\n")
    flags: dict[str, tuple[Any, str]] = {"launch.sbatch": ({"nice": "3"}, "--sbatch")}
    loaded = load(str(file), ["launch.sbatch.licenses=x"], flags=flags)
    assert loaded.config.launch.sbatch == {"comment": "file", "nice": "3", "licenses": "x"}


@pytest.mark.parametrize("text", ["lr", "=3", "--lr=3", ""])
def test_what_is_no_override_is_refused(text: str) -> None:
    assert refused("ddp", [text]).fix == "For example optim.lr=3e-4."


@pytest.mark.parametrize(
    ("env", "flags"),
    [
        ({"SBATCH_MEM_PER_CPU": "1G"}, {"launch.mem": ("4G", "--mem")}),
        ({"SBATCH_MEM_PER_NODE": "8G"}, {"launch.sbatch": ({"mem_per_gpu": "1G"}, "--sbatch")}),
        ({"SBATCH_MEM_PER_CPU": "1G", "SBATCH_MEM_PER_GPU": "1G"}, {}),
    ],
)
def test_memory_that_is_asked_for_in_two_ways_is_refused_before_sbatch_does(
    env: dict[str, str], flags: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match="both ask for memory") as caught:
        load("ddp", env=env, flags=flags)
    assert "environment SBATCH_MEM_PER_" in caught.value.why


@pytest.mark.parametrize(
    "words", [["optim.lr", "=", "3"], ["optim.lr=", "3"], ["optim.lr", "=3"], ["optim.lr==3"], ["optim.lr:3"]]
)
def test_a_setting_with_spaces_or_other_signs_is_told_with_one_equals_sign(words: list[str]) -> None:
    assert refused("ddp", [*words, "train.epochs=2"]).fix == "Write optim.lr=3."


# Mistakes: what, where it was written, what is right


@pytest.mark.parametrize(
    ("override", "what", "fix"),
    [
        ("optim.wieght_decay=1", "Unknown key 'optim.wieght_decay'.", "Did you mean 'optim.weight_decay'?"),
        ("optimm.lr=1", "Unknown key 'optimm.lr'.", "Did you mean 'optim.lr'?"),
        ("optimm=1", "Unknown key 'optimm'.", "Did you mean 'optim'?"),
        ("modle.depth=1", "Unknown key 'modle.depth'.", "Did you mean 'model.depth'?"),
        ("lr=1", "Unknown key 'lr'.", "Did you mean 'optim.lr'?"),
        ("train.lr=1", "Unknown key 'train.lr'.", "Did you mean 'optim.lr'?"),
        ("batch_size=8", "Unknown key 'batch_size'.", "Did you mean 'train.global_batch_size'?"),
        ("gpus=2", "Unknown key 'gpus'.", "Did you mean 'launch.gpus_per_node'?"),
        ("launch.gpus=2", "Unknown key 'launch.gpus'.", "Did you mean 'launch.gpus_per_node'?"),
        ("train.batch_size=8", "Unknown key 'train.batch_size'.", "Did you mean 'train.global_batch_size'?"),
        ("optim.learning_rate=1", "Unknown key 'optim.learning_rate'.", "Did you mean 'optim.lr'?"),
        ("dataset=cifar10", "Unknown key 'dataset'.", "Did you mean 'data.name'?"),
        ("launch.gpus-per-node=1", "Unknown key 'launch.gpus-per-node'.", "Did you mean 'launch.gpus_per_node'?"),
        ("bogus.key=1", "Unknown key 'bogus.key'.", "Use one of these, or remove 'bogus.key'."),
        ("optim.lr.x=1", "Unknown key 'optim.lr.x'.", "For example optim.lr=0.002."),
        ("train.max_steps.x=1", "Unknown key 'train.max_steps.x'.", "Give train.max_steps=VALUE."),
        ("model=vit", "'model' is a section, not a value (override model=vit).", "Did you mean model.name=vit?"),
        ("train=3", "'train' is a section, not a value (override train=3).", "for example train.epochs=20."),
        ("optim=", "'optim' is a section, not a value (override optim=).", "for example optim.name=adamw."),
        ("optim.lr=abc", "optim.lr=abc is not valid (override optim.lr=abc).", "For example optim.lr=0.002."),
        ("optim.lr=null", "optim.lr=null is not valid", "For example optim.lr=0.002."),
        ("train.epochs=true", "train.epochs=true is not valid", "For example train.epochs=20."),
        ("train.epochs=1.5", "train.epochs=1.5 is not valid", "For example train.epochs=20."),
        ("launch.executor=slrm", "launch.executor=slrm is not valid", "Did you mean 'slurm'?"),
        ("monitor.loggers=[jsonl, jsonl]", "monitor.loggers=[jsonl, jsonl] is not valid", "For example"),
        ("monitor.loggers=wandb", "monitor.loggers=wandb is not valid", "Did you mean monitor.loggers=[wandb]?"),
        ("launch.setup=x", "launch.setup=x is not valid", "Did you mean launch.setup=[x]?"),
        ("optim.lr=1e-3,", "optim.lr=1e-3, is not valid", "Did you mean optim.lr=1e-3?"),
        ("optim.lr=0,5", "optim.lr=0,5 is not valid", "Did you mean optim.lr=0.5? Several values are for --sweep"),
        ("train.epochs=3,5", "train.epochs=3,5 is not valid", "Did you mean train.epochs=3? Several values are for --"),
    ],
)
def test_a_mistake_is_answered_with_what_is_right(override: str, what: str, fix: str) -> None:
    error = refused("ddp", [override])
    assert what in error.what
    assert fix in error.fix
    assert f"override {override}" in str(error)


BETAS = "2 numbers of at least 0 and below 1, as in [0.9, 0.99], or 3 numbers of at least 0 and below 1, as in "
BETAS += "[0.9, 0.99, 0.999], or null."


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("optim.lr=0", "a number above 0."),
        ("optim.momentum=1", "a number of at least 0 and below 1, or null."),
        ("seed=-1", "a whole number of at least 0 and of at most 4294967295."),
        ("train.max_steps=x", "a whole number above 0, or null."),
        ("launch.gpus_per_node=few", "a whole number of at least 0, or auto."),
        ("optim.betas=[0.9]", BETAS),
        ("optim.betas=[0.9, 2]", BETAS),
        ("checkpoint.asynchronous=maybe", "true or false."),
        ("optim.nesterov=maybe", "true or false, or null."),
        ("monitor.loggers=3", "a list of texts: [a, b]."),
        ("train.class_weights=[0, 1]", "balanced, or a list, each item a number above 0, or null."),
        ("monitor.profile_steps=5", "2 whole numbers of at least 0, as in [20, 25], or null."),
        ("launch.sbatch=3", "a mapping, as in {name: value}."),
        ("launch.time=soon", "a time as sbatch writes it: 30 (minutes), 2:00:00, 1-12:00:00."),
        ("launch.mem=lots", "a size as sbatch writes it: 32G, 500M, 0."),
    ],
)
def test_a_mistake_is_answered_with_what_must_stand_there(override: str, wanted: str) -> None:
    assert refused("ddp", [override]).why == f"{override.split('=')[0]} must be {wanted}"


def test_an_unknown_key_in_a_file_is_named_with_its_line(write: Write) -> None:
    error = refused(str(write("a.yaml", "seed: 1\noptim:\n  lr: 1\n  wieght_decay: 2\n")))
    assert error.what == "Unknown key 'optim.wieght_decay'."
    assert "a.yaml:4)" in error.why
    assert error.fix == "Did you mean 'optim.weight_decay'?"


def test_a_wrong_value_in_a_file_is_named_with_its_line(write: Write) -> None:
    error = refused(str(write("a.yaml", "seed: 1\noptim:\n  lr: fast\n")))
    assert error.what.startswith("optim.lr=fast is not valid (file ")
    assert error.what.endswith("a.yaml:3).")


def test_a_mistake_in_an_extended_preset_is_named_where_it_stands(write: Write) -> None:
    write("base.yaml", "train:\n  epochs: many\n")
    assert "base.yaml:2" in refused(str(write("a.yaml", "extends: base\n"))).what


def test_a_number_where_text_must_be_is_to_be_quoted(write: Write) -> None:
    error = refused(str(write("a.yaml", "launch:\n  account: 123\n")))
    assert error.fix == "Put it in quotes: account: '123'."


def test_a_wrong_flag_is_named_as_a_flag() -> None:
    error = refused("ddp", flags={"launch.nodes": ("x", "--nodes")})
    assert error.what == "--nodes x is not valid."
    assert error.fix == "For example --nodes 1."


def test_a_section_given_as_a_value_in_a_file_is_named_with_its_line(write: Write) -> None:
    error = refused(str(write("a.yaml", "seed: 1\ndata: digits\n")), ["data.root=x"])
    assert error.what.endswith("a.yaml:2).")
    assert error.fix == "Did you mean data.name=digits?"


def test_settings_that_cannot_hold_together_are_named_with_their_places(write: Write) -> None:
    file = write("a.yaml", "train:\n  global_batch_size: 10\n")
    error = refused(str(file), ["train.micro_batch_size=4"])
    assert error.what == "train.global_batch_size=10 is not a multiple of train.micro_batch_size=4."
    assert "a.yaml:2" in error.why
    assert "override train.micro_batch_size=4" in error.why
    assert error.fix == "Use train.global_batch_size=8 or 12."


ODD = ("", "x", "-1", "1.5", "true", "null", "[1]", "{a: 1}", "1e400", "[[]]", "'", "[", "!!x", "*a", "%", "é # y")


@pytest.mark.parametrize("section", ["", *SECTIONS])
def test_whatever_is_typed_the_answer_is_three_lines_in_our_words(section: str) -> None:
    fields = [*SECTIONS[section].model_fields, "nope", "nope.x"] if section else ["seed", "nope", section]
    answers = [answer(f"{section}.{field}".lstrip(".") + f"={value}") for field in fields for value in ODD]
    assert [text for text in answers if text and len(text.splitlines()) != 3] == []
    assert [text for text in answers if re.search("nput should|pydantic|Undefined|<class|validation", text)] == []


# Writing


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["optim.lr=1e-5", "train.max_steps=7"],
        ["model.name=a.b:c", "model.depth=3", "model.act=no", "model.sizes=[1, 2]", "model.cfg={a: {b: 1e-3}}"],
        ["launch.account=0123", "launch.job_name=yes", "launch.time=90", "launch.mem=0", "launch.sbatch={nice: 010}"],
        ["launch.setup=['module load x', 'a: b # c']", "launch.mail_user=null"],
    ],
)
def test_a_written_configuration_loads_as_an_equal_one(write: Write, overrides: list[str]) -> None:
    config = load("ddp", overrides).config
    assert load(str(write("config.yaml", to_yaml(config)))).config == config


def test_a_source_reads_as_a_person_would_say_it() -> None:
    assert (str(Source("flag", "--nodes")), str(DEFAULT)) == ("flag --nodes", "default")


@pytest.mark.parametrize("given", ["null", "8"])
def test_a_memory_limit_without_a_size_to_be_found_is_refused(given: str) -> None:
    error = refused("ddp", [f"train.micro_batch_size={given}", "train.memory_limit_mb=100"])
    assert f"train.memory_limit_mb=100 and train.micro_batch_size={given}" in str(error)
    assert load("ddp", ["train.micro_batch_size=auto", "train.memory_limit_mb=100"]).config.train.memory_limit_mb == 100


def test_peers_of_a_swarm_keep_no_average_of_their_own() -> None:
    error = refused("hivemind", ["train.ema_decay=0.9"])
    assert error.what == "train.ema_decay=0.9 does not go with strategy.name=hivemind."
    assert load("ddp", ["train.ema_decay=0.9"]).config.train.ema_decay == 0.9


def test_peers_of_a_swarm_give_their_micro_batch_as_a_number() -> None:
    error = refused("hivemind", ["train.micro_batch_size=auto"])
    assert error.what == "train.micro_batch_size=auto does not go with strategy.name=hivemind."
    assert load("ddp", ["train.micro_batch_size=auto"]).config.train.micro_batch_size == "auto"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["train.micro_batch_size=null"], "collaborative.sync=gradients needs train.micro_batch_size."),
        (
            ["train.class_weights=balanced"],
            "train.class_weights=balanced does not go with collaborative.sync=gradients.",
        ),
    ],
)
def test_what_peers_cannot_do_who_average_gradients_is_refused(overrides: list[str], says: str) -> None:
    assert refused("hivemind_gradients", overrides).what == says
    assert load("hivemind", overrides).config.collaborative.sync == "diloco"
