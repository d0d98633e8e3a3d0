"""Say what is wrong with a configuration: the key, where it was written, and what would be right."""

from __future__ import annotations

import difflib
import json
import re
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError

from trainkit.config.loading import DEFAULT, Layer, Source
from trainkit.config.schema import SECTIONS, Config, ImpossibleError, PluginSection, field_of
from trainkit.errors import UserError

# A setting, and what it is called elsewhere.
_CALLED = {
    "launch.gpus_per_node": "g gpu gpus ngpu ngpus n_gpu n_gpus num_gpu num_gpus gpus_per_task devices",
    "launch.nodes": "n_nodes nnodes num_nodes node_count",
    "launch.ntasks_per_node": "n ntasks np nproc nprocs num_procs nproc_per_node processes",
    "launch.cpus_per_task": "cpus ncpus n_cpus num_cpus cores",
    "launch.mem": "memory ram mem_per_node",
    "launch.time": "walltime time_limit timelimit",
    "launch.partition": "queue",
    "launch.account": "project",
    "launch.container_image": "image container docker_image sif",
    "train.global_batch_size": "bs batch batchsize batch_size train_batch_size global_batch",
    "train.micro_batch_size": "accum accumulate_grad_batches grad_accum_steps gradient_accumulation_steps",
    "train.epochs": "epoch nepochs n_epochs num_epochs max_epochs total_epochs",
    "train.max_steps": "steps num_steps total_steps iterations",
    "train.precision": "amp fp16 bf16 mixed_precision dtype half",
    "train.grad_clip_norm": "clip clip_grad clip_grad_norm grad_clip gradient_clip_val max_grad_norm",
    "optim.lr": "learning_rate learningrate base_lr max_lr",
    "optim.weight_decay": "wd",
    "optim.name": "opt optimizer",
    "schedule.name": "scheduler lr_scheduler lr_schedule sched",
    "schedule.warmup_epochs": "warmup warmup_steps",
    "model.name": "arch architecture net backbone",
    "data.name": "dataset dataset_name",
    "data.root": "data_dir data_path data_root dataset_dir datadir",
    "data.workers": "num_workers nworkers workers",
    "seed": "random_seed manual_seed",
    "strategy.name": "distributed_strategy dist_backend parallel",
    "monitor.log_every": "log_interval print_freq log_freq log_every_n_steps",
}


def meant_by(name: str) -> str:
    """The setting that other programs, or other sections, call so: ``gpus``, ``optim.learning_rate``; else empty."""
    last = name.rpartition(".")[2].lower().replace("-", "_")
    return next((key for key, names in _CALLED.items() if last in names.split()), "")


def setting_named(name: str) -> str:
    """The setting that a word without dashes stands for: ``lr`` for ``optim.lr``, ``model`` for ``model.name``."""
    name = name.lower().replace("-", "_")
    section, _, last = name.partition(".")
    if last:
        is_known = section in SECTIONS and last in SECTIONS[section].model_fields
        return name if is_known else meant_by(last) or (name if section in SECTIONS else "")
    if name in SECTIONS and "name" in SECTIONS[name].model_fields:
        return f"{name}.name"
    if name in Config.model_fields and name not in SECTIONS:
        return name
    of = [section for section, model in SECTIONS.items() if name in model.model_fields and section != "launch"]
    return meant_by(name) or (f"{of[0]}.{name}" if of else "")


def explain(error: ValidationError, layer: Layer) -> UserError:
    """The first problem that pydantic found in the tree built from ``layer``, for the person who wrote it."""
    problem = error.errors(include_url=False)[0]
    location = [str(part) for part in problem["loc"]]
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, ImpossibleError):
        written = [f"{key} ({_source(key, layer)})" for key in cause.keys if key in layer]
        where = "" if cause.secret else f"Written: {', '.join(written) or 'by default'}."
        return UserError(f"{cause}.", why=f"{cause.why} {where}".strip(), fix=cause.fix, key=cause.keys[0])
    if problem["type"] == "extra_forbidden":
        return unknown_key(".".join([*location, *problem.get("ctx", {}).values()]), layer)
    # Members of a union and items of a list put their own names behind the key; keep the setting itself.
    key = ".".join(location[: 2 if location[0] in SECTIONS else 1])
    if key in SECTIONS:
        return value_for_section(key, problem["input"], _source(key, layer))
    return _wrong_value(key, problem["input"], cause, layer)


def unknown_key(key: str, layer: Layer) -> UserError:
    """``key`` names no setting; say which is nearest."""
    # An unknown section is reported by its name alone; show one of the settings that were to go into it.
    written = key if key in layer else next((item for item in layer if item.startswith(f"{key}.")), key)
    section, last = written.split(".")[0] if "." in written else "", written.rpartition(".")[2]
    has = list(SECTIONS[section].model_fields) if section in SECTIONS else list(Config.model_fields)
    named = f"'{section}' has" if section in SECTIONS else "The sections are"
    return UserError(
        f"Unknown key '{written if written.isprintable() else repr(written)}'.",
        why=f"{named}: {', '.join(has)} ({_source(key, layer)}).",
        fix=_nearest_key(section, last, written),
        key=written,
    )


def value_for_section(section: str, value: Any, source: Source) -> UserError:
    """A section was given one value: ``model=3``."""
    model = SECTIONS[section]
    if "name" in model.model_fields and not isinstance(value, list | dict | None):
        fix = f"Did you mean {section}.name={shown(value)}?"
    else:
        name, field = next(item for item in model.model_fields.items() if item[1].default is not None)
        fix = f"Set one of its keys, for example {section}.{name}={shown(field.default)}."
    return UserError(
        f"'{section}' is a section, not a value ({source}).",
        why=f"'{section}' has: {', '.join(model.model_fields)}.",
        fix=fix,
        key=section,
    )


def shown(value: Any) -> str:
    """A value as one would write it in YAML or in an override."""
    if isinstance(value, str):
        return value if value and value == value.strip() and value.isprintable() else repr(value)
    try:
        return json.dumps(value).replace('"', "")  # true, null, [0.9, 0.999]: the same words as in YAML
    except TypeError:
        return str(value)


def below_a_value(key: str, layer: Layer) -> UserError:
    """``key`` lies below a setting that is no section: ``optim.lr.x=1``."""
    parent = ".".join(key.split(".")[: 2 if key.split(".")[0] in SECTIONS else 1])
    field = field_of(parent)
    default = field.default if field is not None else None
    return UserError(
        f"Unknown key '{key}'.",
        why=f"'{parent}' is one value, not a section ({_source(key, layer)}).",
        fix=f"For example {parent}={shown(default)}." if default is not None else f"Give {parent}=VALUE.",
        key=key,
    )


def wanted(annotation: Any, limits: tuple[Any, ...] = ()) -> str:
    """A type in words: ``a whole number above 0, or null``. ``limits`` are pydantic's, where they stand apart."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return wanted(arguments[0], tuple(item for part in arguments[1:] for item in getattr(part, "metadata", [part])))
    if origin is Literal:
        return " or ".join(filter(None, [", ".join(map(str, arguments[:-1])), str(arguments[-1])]))
    if origin in (Union, UnionType):
        return ", or ".join(wanted(part) for part in arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        choices = ", ".join(_choices(arguments[0]))
        if choices:
            return f"a list of any of: {choices}"
        item = wanted(arguments[0])
        return "a list of texts: [a, b]" if item.startswith("text") else f"a list, each item {item}"
    if origin is tuple:
        whole = all("whole" in wanted(item) for item in arguments)
        example = "[20, 25]" if whole else f"[{', '.join(['0.9', '0.99', '0.999'][: len(arguments)])}]"
        bounds = wanted(arguments[0]).removeprefix("a whole number").removeprefix("a number")
        return f"{len(arguments)} {'whole ' if whole else ''}numbers{bounds}, as in {example}"
    if origin is dict:
        return "a mapping, as in {name: value}"
    words = {NoneType: "null", bool: "true or false", str: "text", int: "a whole number", float: "a number"}
    return words[annotation] + _within(limits)


def _wrong_value(key: str, given: Any, cause: Any, layer: Layer) -> UserError:
    value = layer[key][0] if key in layer else given
    source = _source(key, layer)
    field = field_of(key)
    assert field is not None, key
    sentence = str(cause) if cause is not None and str(cause) else wanted(field.annotation, tuple(field.metadata))
    example = f"For example {_written(key, field.default, source)}." if field.default not in (None, (), {}) else ""
    below = next((item for item in layer if item.startswith(f"{key}.")), None)
    if below is not None:
        return below_a_value(below, layer)
    if sentence.startswith("text") and isinstance(value, int | float):
        example = f"Put it in quotes: {key.rpartition('.')[2]}: '{shown(value)}'."
    # The value itself, or an item of a list, may be a misspelt choice.
    choices = _choices(field.annotation) or list(getattr(cause, "known", ()))
    if sentence.startswith(("a number", "a whole number")) and (
        number := re.fullmatch(r"([\d.e+-]+)[,;]([\d.e+-]*)", str(value))
    ):
        several = f" Several values are for --sweep {key}={value}." if number[2] else ""
        point = f".{number[2]}" if number[2] and sentence.startswith("a number") else ""
        example = f"Did you mean {key}={number[1]}{point}?{several}"
    near = [item for item in choices if item.startswith(str(given))]
    near = near or difflib.get_close_matches(str(given), choices, n=1)
    if near and given != "":
        example = f"Did you mean '{near[0]}'?"
    if sentence.startswith("a list") and isinstance(value, str) and (value in choices or not choices):
        example = f"Did you mean {_written(key, [value], source)}?"
    return UserError(
        f"{_written(key, value, source)} is not valid" + ("." if source.kind == "flag" else f" ({source})."),
        why=f"{key} must be {sentence}.",
        fix=example or f"Give {sentence.removesuffix(', or null')}, or leave it out.",
        key=key,
    )


def _source(key: str, layer: Layer) -> Source:
    """Where a setting, or the first one below it, was written."""
    found = [source for item, (_, source) in layer.items() if item == key or item.startswith(f"{key}.")]
    return layer[key][1] if key in layer else found[0] if found else DEFAULT


def _written(key: str, value: Any, source: Source) -> str:
    """``--nodes 0`` for what came by a flag, else ``launch.nodes=0``."""
    return f"{source.where} {shown(value)}" if source.kind == "flag" else f"{key}={shown(value)}"


def _nearest_key(section: str, name: str, written: str) -> str:
    own = list(SECTIONS[section].model_fields) if section in SECTIONS else []
    everywhere = {f"{item}.{field}": field for item, model in SECTIONS.items() for field in model.model_fields}
    near = difflib.get_close_matches(name, own, n=1, cutoff=0.7)
    if meant := meant_by(name) if section in ("", *SECTIONS) else "":
        return f"Did you mean '{meant}'?"
    if near:
        return f"Did you mean '{section}.{near[0]}'?"
    nearest_section = difflib.get_close_matches(section or name, list(Config.model_fields), n=1, cutoff=0.7)
    if section and nearest_section and section not in SECTIONS:
        model = SECTIONS.get(nearest_section[0])
        if model and (name in model.model_fields or issubclass(model, PluginSection)):
            return f"Did you mean '{nearest_section[0]}.{name}'?"
    if not section and nearest_section:
        return f"Did you mean '{nearest_section[0]}'?"
    near = (
        [key for key, field in everywhere.items() if field == name]
        or [key for key, field in everywhere.items() if field.endswith(f"_{name}")]
        or [key for key, field in everywhere.items() if difflib.SequenceMatcher(None, name, field).ratio() > 0.75]
    )
    return f"Did you mean '{near[0]}'?" if near else f"Use one of these, or remove '{written}'."


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(item) for item in get_args(annotation)]
    return [choice for part in get_args(annotation) for choice in _choices(part)]


def _within(limits: tuple[Any, ...]) -> str:
    words = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}
    found = [(word, getattr(item, name)) for item in limits for name, word in words.items() if hasattr(item, name)]
    return " and".join(f" {word} {limit if isinstance(limit, int) else format(limit, 'g')}" for word, limit in found)
