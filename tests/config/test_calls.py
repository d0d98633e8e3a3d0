"""Functions of the user's own that no job could call."""

import pytest

from tests.config.conftest import Write
from trainkit.common.errors import UserError
from trainkit.config.loading import load
from trainkit.launch.preparation import check

# setting -> how a function of that kind is written, and how it may not be
CALLED: dict[str, tuple[list[str], dict[str, str]]] = {
    "model.name": (
        ["info", "info, *, width=3", "info, width=3", "*all", "information, **options"],
        {"": "takes 0 by position but gets 1", "info, width": "requires width", "*, info": "takes 0"},
    ),
    "data.name": (["root", "folder, /"], {"root, image_size": "requires image_size", "": "takes 0"}),
    "optim.name": (
        ["groups, lr", "groups, *, lr", "parameters, *, lr=1", "params, decay=1, lr=1", "groups, **options"],
        {
            "groups, rate": "does not take lr by name",
            "lr, groups": "does not take lr",
            "groups, lr, decay": "requires decay",
        },
    ),
    "schedule.name": (
        ["step, total_steps, lr", "a, b, c", "step, *rest", "step, total, peak, /, *, steps_per_epoch"],
        {"step, lr": "takes 2 by position but gets 3", "step, total_steps, lr, gamma": "requires gamma"},
    ),
    "strategy.name": (["dist", "dist, precision", "dist, *, x=1"], {"dist, precision, device": "requires device"}),
    "monitor.loggers": (["run_dir, config, start", "*all"], {"run_dir": "takes 1", "a, b, c, d": "requires d"}),
}


@pytest.mark.parametrize("key", CALLED)
def test_what_a_job_could_not_call_is_refused(write: Write, key: str) -> None:
    good, bad = CALLED[key]

    def setting(name: str) -> str:
        return f"{key}=[calls:{name}]" if key == "monitor.loggers" else f"{key}=calls:{name}"

    lines = []
    for index, takes in enumerate([*good, *bad]):
        lines.append(f"def f{index}({takes}): ...\n")
        of_class = f"self, {takes}" if takes else "self"
        lines.append(f"class C{index}:\n    def __init__({of_class}): ...\n")
        lines.append(f"@unknown\ndef d{index}(): ...\n")
    write("calls.py", "unknown = print\n" + "".join(lines))
    for index in range(len(good)):
        for kind in "fCd":
            check(load("ddp", ["schedule.name=constant", setting(f"{kind}{index}")]))
    for index, words in enumerate(bad.values(), len(good)):
        for kind in "fC":
            with pytest.raises(UserError, match="cannot be called the way a job calls it") as refused:
                check(load("ddp", [setting(f"{kind}{index}")]))
            assert words in refused.value.why
        check(load("ddp", [setting(f"d{index}")]))  # only importing could tell what the decorator makes of it
