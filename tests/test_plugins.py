from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.config import conftest
from tests.config.conftest import Write
from trainkit.common.errors import UserError
from trainkit.config import plugins
from trainkit.config.libraries import timm_models, torchvision_models
from trainkit.config.loading import load
from trainkit.config.plugin_options import convert, fill
from trainkit.launch.preparation import check

write = conftest.write
STRATEGIES = "trainkit.distributed.strategies"
SOURCE = """
import torch_is_not_needed_to_read_this

CONSTANT = 3
TYPED: str = "yes"
COMPUTED = 1 + len("x")
_PRIVATE = lower = 4

def build(info, *, depth: int, width: float = 1.0, kind: str | None = None):
    pass

def anything(info, **options):
    pass

def nothing(info):
    pass

@functools.wraps(build)
def wrapping(*args, **options):
    pass
"""


@pytest.fixture
def own(write: Write) -> str:
    """A module of the user's own in the current folder."""
    write("my_own_plugin.py", SOURCE)
    return "my_own_plugin"


def test_a_file_with_build_is_a_plugin_and_what_plugins_share_is_none() -> None:
    names = set(plugins.available(STRATEGIES))
    assert ({"ddp", "single"} <= names, "base" in names) == (True, False)


def test_options_are_the_keyword_only_parameters_read_without_an_import(own: str) -> None:
    signature = plugins.signature("trainkit.models", f"{own}:build")
    assert (signature.options, signature.required) == (("depth", "width", "kind"), ("depth",))
    plugins.check_options("trainkit.models", f"{own}:build", {"depth": 1}, where="model")
    plugins.check_options("trainkit.models", f"{own}:anything", {"whatever": 1}, where="model")
    assert plugins.stated("trainkit.models", f"{own}:build") == {"CONSTANT": 3, "TYPED": "yes"}
    assert own not in sys.modules


def test_a_module_in_a_package_is_read_without_importing_the_package(own: str, tmp_path: Path) -> None:
    (tmp_path / "own_package" / "nets").mkdir(parents=True)
    (tmp_path / "own_package" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "own_package" / "nets" / "small.py").write_text("def build(info, *, depth: int = 3): ...\n")
    assert plugins.signature("trainkit.models", "own_package.nets.small:build").options == ("depth",)
    with pytest.raises(UserError, match=r"No module 'own_package\.nets\.large'"):
        plugins.signature("trainkit.models", "own_package.nets.large:build")


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        (
            "build",
            {"depth": 1, "widht": 2},
            ["Unknown key 'model.widht'.", "depth, width, kind", "Did you mean 'model.width'?"],
        ),
        ("build", {"depth": "deep"}, ["model.depth=deep is not possible"]),
        ("build", {}, ["needs 'model.depth'"]),
        ("nothing", {"depth": 1}, ["no options"]),
    ],
    ids=["unknown", "of the wrong type", "missing", "of a function without any"],
)
def test_an_option_that_does_not_fit_is_refused(
    own: str, function: str, options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        plugins.check_options("trainkit.models", f"{own}:{function}", options, where="model")
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_function_that_wraps_another_has_the_options_of_that(own: str, tmp_path: Path) -> None:
    (tmp_path / "another.py").write_text(
        f"from {own} import wrapping as inner\n\n@wraps(inner)\ndef build(*args, **options):\n    pass\n"
    )
    whole = plugins.signature("trainkit.models", f"{own}:build")
    assert plugins.signature("trainkit.models", f"{own}:wrapping") == whole
    assert plugins.signature("trainkit.models", "another:build") == whole


def test_fields_of_a_dataclass_are_options(own: str, tmp_path: Path) -> None:
    head = "from dataclasses import dataclass\n\n@dataclass(frozen=True, kw_only=True)\n"
    base = f'{head}class Base:\n    """Sizes."""\n    size: int\n    """Pixels of a side."""\n'
    (tmp_path / "grouped_base.py").write_text(base)
    crop = 'class Crop(Base):\n    kind: Literal["random", "middle"] = "middle"\n'
    function = "def build(info, *, crop: Crop, depth: int = 3):\n    return crop.size, crop.kind, depth\n"
    imports = "from typing import Literal\nfrom grouped_base import Base\n"
    (tmp_path / "grouped.py").write_text(f"from __future__ import annotations\n{imports}{head}{crop}{function}")
    found = plugins.signature("trainkit.models", "grouped:build")
    assert (found.options, found.required) == (("size", "kind", "depth"), ("size",))
    assert found.defaults == {"kind": "middle", "depth": 3}
    assert "``size``: Pixels of a side." in found.doc
    for options, words in (
        ({"size": 8, "knd": 1}, "model.kind"),
        ({}, "model.size"),
        ({"size": 8, "kind": "left"}, "kind"),
    ):
        with pytest.raises(UserError, match=words):
            plugins.check_options("trainkit.models", "grouped:build", options, where="model")
    build = plugins.load("trainkit.models", "grouped:build")
    assert build(None, **fill(build, {"size": 8.0}, where="model")) == (8, "middle", 3)


def test_a_function_of_ones_own_is_found_in_the_current_folder(own: str, tmp_path: Path) -> None:
    text = "from os import system as build\nnumber = 3\ndef make(): return 3\n"
    (tmp_path / "another_plugin.py").write_text(text)
    assert plugins.load("trainkit.models", "another_plugin:make")() == 3
    for name in ("number", "build"):  # which is not written in Python
        with pytest.raises(UserError, match="does not name a function"):
            plugins.load("trainkit.models", f"another_plugin:{name}")


@pytest.mark.parametrize("name", ["os:system", "subprocess:run", "posix:system", "builtins:exec", "json.tool:main"])
def test_python_itself_is_no_plugin(name: str) -> None:
    for ask in (plugins.load, plugins.signature):
        with pytest.raises(UserError, match="is not a plugin"):
            ask("trainkit.data.datasets", name)


def plugin(
    root: str, *, size: int = 8, rate: float = 0.1, norm: Literal["group", "batch"] = "group", extra: Any = 3
) -> None:
    pass


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (3, "int", 3), (3.0, "int", 3), (3, "float", 3.0), (True, "bool", True), ("x", "str", "x"), (8, "str", "8"),
        (None, "int | None", None), (4, "int | None", 4), ("auto", "int | str", "auto"),
        ("group", "Literal['group', 'batch']", "group"), ([1, 2], "tuple[int, ...]", [1, 2]),
    ],
)  # fmt: skip
def test_a_value_of_the_declared_type_is_taken(value: object, annotation: str, expected: object) -> None:
    converted = convert(value, annotation, key="data.x")
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    ("value", "annotation", "wanted"),
    [
        ("big", "int", "a whole number"), (3.5, "int", "a whole number"), (float("inf"), "int", "a whole number"),
        (True, "int", "a whole number"), (1, "bool", "true or false"), ("yes", "bool", "true or false"),
        (None, "float", "a number"), ("x", "float | None", "a number or null"), ([1], "str", "text"),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_by_key(value: object, annotation: str, wanted: str) -> None:
    with pytest.raises(UserError, match=rf"data\.x=[\s\S]*data\.x is {wanted}\."):
        convert(value, annotation, key="data.x")


def test_what_is_not_given_has_its_default_and_a_choice_must_exist() -> None:
    assert fill(plugin, {"size": 9}, where="data") == {"size": 9, "rate": 0.1, "norm": "group", "extra": 3}
    with pytest.raises(UserError, match=r"one of: group, batch[\s\S]*Did you mean 'group'\?"):
        fill(plugin, {"norm": "grop"}, where="model")


def refusal(model: str, *overrides: str) -> UserError | None:
    """What is said of a model of the user's own, if it is refused."""
    try:
        check(load("single", [f"model.name={model}", *overrides]))
    except UserError as error:
        return error
    return None


BUILD = "def build(info): ...\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "import os\n\ndef build(info:\n    return None\n",
            ["/whole.py:3 is not valid Python.", "'(' was never closed: def build(info"],
        ),
        (
            "import os\nimport no_such_package.layers\n\ndef build(info): ...\n",
            ["/whole.py:2 imports 'no_such_package.layers', which is not there."],
        ),
        (
            f"from part import Body, hed\n\n{BUILD}",
            ["/whole.py:1 imports 'hed' from 'part', which does not have it.", "Did you mean 'head'?"],
        ),
        (f"import bad_part\n\n{BUILD}", ["/bad_part.py:1 is not valid Python."]),
        (
            f"import pack_four.lonely\n{BUILD}",
            ["/pack_four/lonely.py:1 imports 'no_such_package', which is not there."],
        ),
        (f"import pack_four.gone\n{BUILD}", ["/whole.py:1 imports 'pack_four.gone', which is not there."]),
        (f"from pack_four import inner\n{BUILD}", ["/inner.py:1 imports 'pack_four.lost', which is not there."]),
        ("def bild(info): ...\n", ["Module 'whole' has no 'build'.", "Did you mean 'bild'?"]),
    ],
    ids=[
        *("a syntax error", "a missing module", "a missing name", "a broken part", "a part's missing module"),
        *("a missing part", "a part's missing part", "a missing function"),
    ],
)
def test_a_users_module_that_a_job_cannot_import_is_refused(write: Write, text: str, words: list[str]) -> None:
    """Before anything is queued, with file and line."""
    write("part.py", "def head(): ...\nclass Body: ...\n")
    write("bad_part.py", "x = = 1\n")
    write("pack_four/lonely.py", "import no_such_package\n")
    write("pack_four/inner.py", "from .lost import x\n")
    write("whole.py", text)
    error = refusal("whole:build")
    assert error is not None
    assert error.exit_code == 2
    assert [word for word in words if word not in str(error)] == [], error


MAY_WORK = {
    "tried": f"try:\n    import no_such_package\nexcept ImportError:\n    no_such_package = None\n{BUILD}",
    "for types": f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import no_such_package\n{BUILD}",
    "later": f"def late():\n    import no_such_package\n{BUILD}",
    "elsewhere": f"import sys\nsys.path.append('/somewhere/else')\nimport no_such_package\n{BUILD}",
    "stars": f"import os.path, xml.etree.ElementTree, torch.nn.functional as F\nfrom torch.nn import *\n{BUILD}",
    "a package": f"from pack_five import inner, made\nfrom pack_five.inner import value\n{BUILD}",
    "the program": f"import __main__\n{BUILD}",
    "assigned": "from functools import partial\nbuild = partial(dict)\n",
    "launch.environment=conda:vision": f"import no_such_package\n{BUILD}",
    "launch.container_image=x.sif": f"import no_such_package\n{BUILD}",
}


@pytest.mark.parametrize("case", MAY_WORK)
def test_what_may_well_work_is_let_pass(write: Write, case: str) -> None:
    write("pack_five/__init__.py", "from . import inner\nfrom .inner import value as made\n")
    write("pack_five/inner.py", "for value in (1, 2):\n    pass\n")
    write("passes_five.py", MAY_WORK[case])
    assert refusal("passes_five:build", case if "=" in case else "seed=0") is None


def test_an_import_that_fails_when_it_runs_is_the_users_error(write: Write) -> None:
    write("runs_eight.py", "import os\nif os.sep:\n    import no_such_package\n\ndef build(info): ...\n")
    with pytest.raises(UserError) as caught:
        plugins.load("trainkit.models", "runs_eight:build")
    assert caught.value.what.endswith("/runs_eight.py:3 could not be imported.")
    assert caught.value.why == "ModuleNotFoundError: No module named 'no_such_package'."


def test_every_model_of_timm_is_found_and_nothing_else() -> None:
    import timm
    from timm.models._registry import _deprecated_models

    found = set(timm_models())
    assert set(timm.list_models()) <= found
    assert found - set(timm.list_models()) <= set(_deprecated_models)


def test_every_classification_model_of_torchvision_is_found_and_nothing_else() -> None:
    import torchvision

    assert list(torchvision_models()) == torchvision.models.list_models(module=torchvision.models)
