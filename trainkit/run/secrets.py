"""Find credentials in texts before they are written into a run folder.

detect-secrets knows the shapes of services' tokens, and names like ``password = "..."``. This module adds what it
misses (bearer tokens, short or unquoted values, passwords with slashes, newer shapes), and excludes what is no secret
here: texts about models and data sets are full of hashes, keys of dictionaries and tokens of language. So the entropy
detectors are off, and a value with a telling name counts only if it is no placeholder, path, type or variable. The
patterns are in ``patterns.yaml``.

A line that ends in ``# pragma: allowlist secret``, detect-secrets' own mark, is skipped.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from trainkit.common.errors import RefusedError
from trainkit.config.loading import Loaded

# High entropy is every hash; a public address is no secret; Artifactory's pattern fits APACHELICENSE; the last four
# are slow (a tenth of a second a megabyte each), and what they look for has a name that counts anyway.
_OFF = {
    "Base64HighEntropyString", "HexHighEntropyString", "IPPublicDetector", "ArtifactoryDetector",
    "CloudantDetector", "IbmCloudIamDetector", "IbmCosHmacDetector", "SoftlayerDetector",
}  # fmt: skip
_ALLOWED = re.compile(r"pragma: ?allowlist[ -]secret")
LONGEST_LINE = 5000  # beyond it only shapes are looked for: such a line is data

_SAID: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("patterns.yaml").read_text("utf-8"))
_TOKENS: dict[str, str] = _SAID["tokens"]
_SHAPES = {kind: re.compile(shape) for kind, shape in _SAID["shapes"].items()}
_SHAPES["token"] = re.compile(rf"\b({'|'.join(f'(?:{token})' for token in _TOKENS.values())})")
_FILES = re.compile("|".join(_SAID["files"]), re.IGNORECASE)
_TEMPLATE, _NOT_A_VALUE = (re.compile("|".join(_SAID[kind])) for kind in ("templates", "innocent"))
_NAME = rf"(?P<name>(?<![A-Za-z0-9])[\w.-]*(?:{'|'.join(_SAID['names'])}|token))"
_QUOTED = r"""[rbuf]{0,2}(?P<quote>\\?["'`])(?P<quoted>[^"'`\n]{3,}?)(?P=quote)"""
_ASSIGNED = r"""\\?["']?\]?\s*(?::\s*[\w.\[\] |]+=|:=|=>|={1,2}|:)\s*"""
_IN_PYTHON = re.compile(rf"(?i){_NAME}{_ASSIGNED}{_QUOTED}")
_IN_TEXT = re.compile(rf"(?i){_NAME}{_ASSIGNED}(?:{_QUOTED}|(?P<bare>[^\s\"'`,;]{{3,}}))")
_AS_DEFAULT = re.compile(r"""["'](?P<name>[A-Z0-9_]*(?:KEY|TOKEN|SECRET|PASSWORD))["']\s*,\s*""" + _QUOTED)
_WORTH_A_LOOK = re.compile(r"(?i)key|token|secret|pass|pwd|credential|contrase")
_MAY_HAVE_A_SHAPE = re.compile(r"[A-Za-z0-9_-]{16,}|://|-----BEGIN|eyJ")
"""No detector finds anything in a text without one of these or a telling name: most settings need not import them."""


class FoundSecret(NamedTuple):
    """Text that looks like a credential: its first line (from 1), its kind, and its place."""

    line: int
    kind: str
    start: int
    end: int


def find(text: str, *, python: bool) -> list[FoundSecret]:
    """Everything in a text that looks like a credential, in order.

    Args:
        python: a value with a name like ``password`` counts only in quotes; elsewhere (shell, YAML) without them too.
    """
    spans = {**_named(text, python), **_of_detectors(text), **_shaped(text)}  # the most telling kind wins
    found: list[FoundSecret] = []
    for (start, end), kind in sorted(spans.items(), key=lambda item: (item[0][0], -item[0][1])):
        line_end = text.find("\n", start)
        line = text[text.rfind("\n", 0, start) + 1 : line_end if line_end >= 0 else len(text)]
        if not _ALLOWED.search(line) and not (found and end <= found[-1].end):
            found.append(FoundSecret(text.count("\n", 0, start) + 1, kind, start, end))
    return found


def mark_of(text: str, *, python: bool) -> str:
    """Digest of a text and of all by which `find` judges it: what was harmless once still is."""
    digest = hashlib.blake2b(f"{_rules()} {python}\n".encode(), digest_size=16)
    digest.update(text.encode())
    return digest.hexdigest()


@cache
def _rules() -> str:
    own = Path(__file__)
    rules = own.read_bytes() + own.with_name("patterns.yaml").read_bytes()
    return f"{hashlib.blake2b(rules).hexdigest()} {metadata.version('detect-secrets')}"


def is_credentials(name: str) -> bool:
    """True if a file is one of credentials, by its name and its folders."""
    *folders, last = name.split("/")
    return _FILES.fullmatch(last) is not None or not set(_SAID["folders"]).isdisjoint(folders)


def refuse_settings(loaded: Loaded) -> None:
    """Refuse a setting that looks like a credential: config.yaml must be complete, so it cannot be left out.

    Raises:
        RefusedError: naming the setting, not its value.
    """
    settings = loaded.config.model_dump(mode="json")
    for key, source in loaded.sources.items():
        if source.kind == "default":
            continue
        value: Any = settings
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        for found in _in_setting(key, value):
            raise RefusedError(
                f"{key} looks like a secret ({found.kind}).",
                why="Settings are stored unchanged in the run folder, and shown to everybody who follows the run.",
                fix="Export it as an environment variable before you submit, and read it from there.",
            )


def _in_setting(key: str, value: Any) -> Iterator[FoundSecret]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _in_setting(f"{key}.{name}", item)
    elif isinstance(value, list):
        words = [item for item in value if isinstance(item, str)]  # lines of shell, or of a command
        for word, after in zip(words, [*words[1:], ""], strict=False):
            text = f"{word}={after}" if word.startswith("-") and "=" not in word else word
            yield from find(text, python=False)
    elif isinstance(value, str):
        unquoted = re.sub("[\"'`]", "", value)
        yield from find(f'{key} = "{unquoted}"', python=True)


def redacted(text: str, found: Iterable[FoundSecret]) -> str:
    """The text with ``***`` in place of what was found in it."""
    parts = []
    at = 0
    for finding in found:
        if finding.end > at:
            parts += [text[at : max(at, finding.start)], "***"]
            at = finding.end
    return "".join([*parts, text[at:]])


def _shaped(text: str) -> dict[tuple[int, int], str]:
    return {
        match.span(1): next(
            (name for name, each in _TOKENS.items() if kind == "token" and re.match(each, match[1])), kind
        )
        for kind, shape in _SHAPES.items()
        for match in shape.finditer(text)
        if kind == "private key" or not _TEMPLATE.search(match[1])
    }


def _of_detectors(text: str) -> dict[tuple[int, int], str]:
    found: dict[tuple[int, int], str] = {}
    if not (_MAY_HAVE_A_SHAPE.search(text) or _WORTH_A_LOOK.search(text)):
        return found
    detectors, by_name = _detectors()
    for detector in detectors:
        for secret in set(detector.analyze_string(text)):
            if not _TEMPLATE.search(secret):
                found |= {match.span(): detector.secret_type for match in re.finditer(re.escape(secret), text)}
    for start, line in _lines(text):
        for secret in by_name.analyze_string(line):
            if not _is_innocent(secret, weak=False):
                at = start + line.index(secret)
                found[at, at + len(secret)] = by_name.secret_type
    return found


def _named(text: str, python: bool) -> dict[tuple[int, int], str]:
    found = {}
    for start, line in _lines(text):
        for pattern in (_IN_PYTHON if python else _IN_TEXT, _AS_DEFAULT):
            for match in pattern.finditer(line):
                group = "quoted" if match["quoted"] else "bare"
                weak = match["name"].lower().endswith("token")
                if not _is_innocent(match[group], weak=weak, short=6 if group == "bare" or not python else 16):
                    name = match["name"].lstrip("-").rpartition(".")[2]
                    found[start + match.start(group), start + match.end(group)] = f"value of {name}"
    return found


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines that may name a credential, each with its place in the text."""
    at = 0
    for line in text.splitlines(keepends=True):
        if len(line) <= LONGEST_LINE and _WORTH_A_LOOK.search(line):
            yield at, line.rstrip("\r\n")
        at += len(line)


def _is_innocent(value: str, *, weak: bool, short: int = 16) -> bool:
    """True if a value is no credential despite its name. ``token`` is a weak name: models are full of tokens."""
    if len(value) < 4 or _TEMPLATE.search(value) or _NOT_A_VALUE.search(value):
        return True
    mixed = re.fullmatch(r"(?=.*\d)(?=.*[A-Za-z])[\w.~+/=:@-]+", value) is not None
    return weak and (len(value) < short or not mixed)


@cache
def _detectors() -> tuple[list[Any], Any]:
    """detect-secrets' detectors of shapes, and that of names. Takes a tenth of a second: it imports requests."""
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
    from detect_secrets.plugins.keyword import KeywordDetector

    known: Iterable[Any] = get_mapping_from_secret_type_to_class().values()
    return [make() for make in known if make.__name__ not in {*_OFF, "KeywordDetector"}], KeywordDetector()
