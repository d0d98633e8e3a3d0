from __future__ import annotations

import importlib
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trainkit import plugins
from trainkit.checking import check
from trainkit.config.loading import load
from trainkit.errors import UserError

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """``write("mine.py", text)`` makes a file of the user's own, in the folder that they start from."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def call(name: str, text: str) -> Path:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        return file

    return call


def refusal(model: str, *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        check(load("single", [f"model.name={model}", *overrides]))
    return caught.value


def test_a_syntax_error_in_the_users_module_is_refused_before_anything_is_queued_with_file_and_line(
    write: Write,
) -> None:
    write("broken_one.py", "import os\n\ndef build(info:\n    return None\n")
    error = refusal("broken_one:build")
    assert error.exit_code == 2
    assert error.what.endswith("/broken_one.py:3 is not valid Python.")
    assert error.why.startswith("'(' was never closed: def build(info")


def test_so_is_an_import_of_a_module_that_is_not_there(write: Write) -> None:
    write("asks_one.py", "import os\nimport no_such_package.layers\n\ndef build(info): ...\n")
    said = "/asks_one.py:2 imports 'no_such_package.layers', which is not there."
    assert refusal("asks_one:build").what.endswith(said)


def test_and_what_a_module_of_the_users_own_imports_of_another(write: Write) -> None:
    write("part_two.py", "def head(): ...\nclass Body: ...\nWIDTH: int = 2\n")
    write("whole_two.py", "from part_two import Body, WIDTH, hed\n\ndef build(info): ...\n")
    error = refusal("whole_two:build")
    assert error.what.endswith("/whole_two.py:1 imports 'hed' from 'part_two', which does not have it.")
    assert error.fix == "Did you mean 'head'?"
    write("part_three.py", "x = = 1\n")
    write("whole_three.py", "import part_three\n\ndef build(info): ...\n")
    assert refusal("whole_three:build").what.endswith("/part_three.py:1 is not valid Python.")


def test_a_function_that_the_module_does_not_have_is_refused_with_the_nearest(write: Write) -> None:
    write("named_four.py", "def build_model(info): ...\n")
    error = refusal("named_four:build_modle")
    assert (error.what, error.fix) == ("Module 'named_four' has no 'build_modle'.", "Did you mean 'build_model'?")


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    import no_such_package\nexcept ImportError:\n    no_such_package = None\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import no_such_package\n",
        "def late():\n    import no_such_package\n",
        "import sys\nsys.path.append('/somewhere/else')\nimport no_such_package\n",
        "import os.path, xml.etree.ElementTree, torch.nn.functional as F\nfrom torch import nn\n",
        "from yaml import *\nfrom pack_five import inner, made\nfrom pack_five.inner import value\n",
        "from torch.nn import *\n",
    ],
)
def test_what_may_well_work_is_let_pass(write: Write, text: str) -> None:
    write("pack_five/__init__.py", "from . import inner\nfrom .inner import value as made\n")
    write("pack_five/inner.py", "for value in (1, 2):\n    pass\n")
    file = write("passes_five.py", text + "def build(info): ...\n")
    plugins._parsed.cache_clear()
    plugins.check_module("passes_five", file, key=None)


def test_a_name_that_is_assigned_or_imported_is_a_function_as_well(write: Write) -> None:
    write("makes_six.py", "from functools import partial\nbuild = partial(dict)\n")
    plugins.check_importable("trainkit.models", "makes_six:build", installed=True)


def test_where_the_job_brings_its_own_environment_a_package_may_be_there(write: Write) -> None:
    write("asks_seven.py", "import no_such_package\n\ndef build(info): ...\n")
    check(load("single", ["model.name=asks_seven:build", "launch.environment=conda:vision"]))


def test_an_import_that_fails_only_when_it_runs_is_the_users_error_with_file_and_line(write: Write) -> None:
    write("runs_eight.py", "import os\nif os.sep:\n    import no_such_package\n\ndef build(info): ...\n")
    with pytest.raises(UserError) as caught:
        plugins.load("trainkit.models", "runs_eight:build")
    assert caught.value.what.endswith("/runs_eight.py:3 could not be imported.")
    assert caught.value.why == "ModuleNotFoundError: No module named 'no_such_package'."


def test_reading_them_imports_nothing_and_takes_no_time(write: Write) -> None:
    write("heavy_nine.py", "import torch, timm\nraise SystemExit\n\ndef build(info): ...\n")
    began = time.process_time()
    plugins.check_importable("trainkit.models", "heavy_nine:build", installed=True)
    assert time.process_time() - began < 0.5
