"""Send an exported model to the Hugging Face Hub."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.common.errors import UserError


def require_hub(repo: str) -> None:
    """Raise UserError where nothing can be sent to that repository of the Hugging Face Hub, as far as is seen here.

    The token is that of the user's environment or of ``hf auth login``.
    """
    from huggingface_hub import get_token

    if re.fullmatch(r"([\w.-]+/)?[\w.-]+", repo, re.ASCII) is None:
        why = "It must be OWNER/NAME, of letters, digits, . - and _."
        raise UserError(f"'{repo}' is not a repository name of the Hub.", why=why, fix="Give OWNER/NAME.")
    if get_token() is None:
        fix = "Create a token with write access at https://huggingface.co/settings/tokens, and run `hf auth login`."
        why = "Neither HF_TOKEN nor a file of `hf auth login` has one."
        raise UserError("There is no token for the Hugging Face Hub.", why=why, fix=fix)


def to_hub(repo: str, file: Path, card: str, about: Mapping[str, Any], *, replace_card: bool) -> str:
    """Send ``file`` and its ``card`` to a repository of the Hugging Face Hub, in one commit; its address.

    A repository that is not there is made, and is private. ``README.md`` of one that is there stays, unless
    ``replace_card``. Weights of a timm model get the ``config.json`` by which ``timm.create_model("hf-hub:...")``
    loads them. `require_hub` comes before.

    Raises UserError where the hub refuses.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    contents = dict[str, Path | bytes]({file.name: file})
    try:
        made = api.create_repo(repo, private=True, exist_ok=True)
        if replace_card or not api.file_exists(made.repo_id, "README.md"):
            contents["README.md"] = card.encode(errors="replace")
        if about["library"] == "timm" and ":" not in about["name"] and file.suffix == ".safetensors":
            contents["config.json"] = json.dumps(_for_timm(about), indent=2).encode()
        adding = [CommitOperationAdd(name, content) for name, content in contents.items()]
        api.create_commit(made.repo_id, adding, commit_message=f"{file.name} of step {about['step']} of {about['run']}")
    except Exception as error:  # its own, and those of the library that carries its requests
        why = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
        fix = f"Check the name, the network, and the token's write access. {file} was written."
        raise UserError(f"The model could not be sent to {repo}.", why=why, fix=fix) from None
    return str(made)


def _for_timm(about: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` as `timm.models.load_model_config_from_hf` reads it."""
    import timm

    arguments = dict(about["arguments"])
    classes = arguments.pop("num_classes")
    seen = about["enlarged"] or {"size": about["size"], "interpolation": about.get("interpolation", "bilinear")}
    cfg = {
        "num_classes": classes, "input_size": [arguments["in_chans"], seen["size"], seen["size"]],
        "crop_pct": about.get("crop", 1.0), "interpolation": seen["interpolation"], "mean": about["mean"],
        "std": about["std"],
    }  # fmt: skip
    known = timm.get_pretrained_cfg(about["name"])
    for key, value in (known.to_dict() if known is not None else {}).items():
        if key in ("fixed_input_size", "first_conv", "classifier", "pool_size"):
            cfg[key] = value
    return {
        "architecture": about["name"].partition(".")[0], "num_classes": classes, "label_names": about["classes"],
        "model_args": arguments, "pretrained_cfg": cfg,
    }  # fmt: skip
