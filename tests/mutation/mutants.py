"""What is changed in a module: mutmut's operators, less what changes nothing that a test could see."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import libcst
import yaml
from libcst.metadata import MetadataWrapper, WhitespaceInclusivePositionProvider
from mutmut.mutation.file_mutation import create_mutations

from tests.mutation.modules import ROOT

# Of a call: speed, what a CPU does not show, checks of our own, and when text is seen.
UNSEEN = ("encoding", "non_blocking", "pin_memory", "device", "strict", "flush")
EQUIVALENT = ROOT / "tests" / "mutation" / "equivalent.yaml"


@dataclass(frozen=True)
class Mutant:
    """A module with one thing changed."""

    module: str
    line: int
    before: str
    """The lines that were changed, and ``after``: without indentation, joined by one space."""
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}\n  - {self.before}\n  + {self.after}"


def mutants_of(module: str) -> list[Mutant]:
    """All different mutants of a module, in order of their lines."""
    code = (ROOT / module).read_text(encoding="utf-8")
    tree, mutations, _, _ = create_mutations(module, code)
    noise = set(_noise(tree))
    places = MetadataWrapper(tree, unsafe_skip_copy=True).resolve(WhitespaceInclusivePositionProvider)
    starts = [0, *accumulate(len(line) for line in code.splitlines(keepends=True))]
    found: dict[str, Mutant] = {}
    for mutation in mutations:
        if mutation.original_node in noise or _changes_only_unseen(mutation.original_node, mutation.mutated_node):
            continue
        place = places[mutation.original_node]
        first, last = (starts[at.line - 1] + at.column for at in (place.start, place.end))
        changed = code[:first] + tree.code_for_node(mutation.mutated_node) + code[last:]
        if changed != code and changed not in found and _compiles(changed):
            found[changed] = _mutant(module, code, changed)
    return sorted(found.values(), key=lambda mutant: mutant.line)


def is_equivalent(mutant: Mutant) -> bool:
    """It is in the list of those that no test can tell from the original."""
    return (mutant.module, mutant.before, mutant.after) in _equivalent()


@cache
def _equivalent() -> set[tuple[str, str, str]]:
    known: list[dict[str, str]] = yaml.safe_load(EQUIVALENT.read_text(encoding="utf-8")) or []
    return {(entry["module"], entry["before"], entry["after"]) for entry in known}


def _noise(tree: libcst.Module) -> Iterator[libcst.CSTNode]:
    """What no test here could see: text for people, speed, and what only a GPU shows (tests/training/test_gpu.py)."""
    for node in _inside(tree):
        if isinstance(node, libcst.Raise | libcst.Assert):
            yield from (inner for inner in _inside(node) if isinstance(inner, libcst.SimpleString))
        if isinstance(node, libcst.Call) and _code(node.func).endswith("Error"):
            yield node  # an argument that is None or absent: half a message
            yield from (inner for inner in _inside(node) if isinstance(inner, libcst.SimpleString))
        if isinstance(node, libcst.Assign) and _code(node.targets[0].target) in ("what", "why", "fix"):  # an error's
            yield from (inner for inner in _inside(node) if isinstance(inner, libcst.SimpleString))
        if isinstance(node, libcst.Assign) and _code(node.value).startswith(("Literal[", "Callable[")):
            yield from (node, *_inside(node))  # read by the type checker alone
        if isinstance(node, libcst.SimpleString) and node.evaluated_value == "cuda":
            yield node
        if isinstance(node, libcst.If) and '"cuda"' in _code(node.test):
            yield from _inside(node.body)
        if isinstance(node, libcst.Arg) and _is_unseen(node):
            yield from _inside(node)


def _is_unseen(argument: libcst.Arg) -> bool:
    return argument.keyword is not None and argument.keyword.value in UNSEEN


def _changes_only_unseen(before: libcst.CSTNode, after: libcst.CSTNode) -> bool:
    """A call that lost, or lost the value of, an argument of `_is_unseen`, or the device that something is put on."""
    if not (isinstance(before, libcst.Call) and isinstance(after, libcst.Call)):
        return False
    left = [argument for argument in before.args if not any(argument is other for other in after.args)]
    is_move = isinstance(before.func, libcst.Attribute) and before.func.attr.value == "to"
    return bool(left) and (_is_unseen(left[0]) or (is_move and left[0] is before.args[0]))


def _code(node: libcst.CSTNode) -> str:
    return str(libcst.Module([]).code_for_node(node))


def _inside(node: libcst.CSTNode) -> Iterator[libcst.CSTNode]:
    yield node
    for child in node.children:
        yield from _inside(child)


def _compiles(code: str) -> bool:
    try:
        compile(code, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _mutant(module: str, code: str, changed: str) -> Mutant:
    old, new = code.splitlines(), changed.splitlines()
    matcher = difflib.SequenceMatcher(a=old, b=new, autojunk=False)
    edits = [edit for edit in matcher.get_opcodes() if edit[0] != "equal"]
    first, last = edits[0], edits[-1]

    def shown(lines: list[str]) -> str:
        return " ".join(line.strip() for line in lines)

    return Mutant(module, first[1] + 1, shown(old[first[1] : last[2]]), shown(new[first[3] : last[4]]), changed)
