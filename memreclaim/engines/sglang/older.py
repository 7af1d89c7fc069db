"""Two older lines of SGLang, recognised by their structure, since there is no release to compare a fingerprint with.

=============== ====================================================================================================
kernel-module   ``_apply_wo_a_bf16_matmul`` with more than two flags; gemv and small-batch kernels imported by name from
                a ``wo_a_bf16`` kernel module
einsum          ``_apply_wo_a_bf16_matmul(o, wo_a, is_decode=False)``; the draft runs an einsum of its own on
                ``self.wo_a.weight``
=============== ====================================================================================================

Nothing of them is replaced but the dispatch: an einsum on a tag is served by the tag itself. Every function that reads
``wo_a`` must use it in one of the ways listed in :data:`_USES`; anything else keeps the feature off.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from memreclaim.engines.sglang import drift

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DISPATCH = "_apply_wo_a_bf16_matmul"
_V4 = "srt/models/deepseek_v4.py"
_MODELS = (_V4, "srt/models/deepseek_v4_dspark.py", "srt/models/deepseek_v4_nextn.py")
_OLDEST, _NEWEST = (0, 5, 0), (0, 5, 22)
_HEAD = ("o", "wo_a", "is_decode")
_LOADING = re.compile(r"(load|dequant|__init__|scales|post_|remap|quant)")
"""Functions that run before the reclaim, while the weight is plain: they may do what they like with it."""
_USES = frozenset({"view", "float", "shape", "dtype", "to", "reshape", "unflatten", "is_contiguous", "device"})
"""What may be asked of ``self.wo_a.weight`` at run time: a tag answers each exactly."""


def examine(root: Path, version: str) -> tuple[str, tuple[str, ...]]:
    """Name of the line and why it cannot be used; the name is empty when it is none of the two."""
    if not _is_older(version):
        return "", (f"sglang {version or '(no version)'} is not known: 0.5.23 and two older lines are",)
    try:
        tree = ast.parse((root / _V4).read_bytes())
    except (OSError, SyntaxError):
        return "", (f"sglang {version} has no readable {_V4}",)
    node = dict(drift.functions(tree)).get(DISPATCH)
    if node is None:
        return "", (f"{_V4}: {DISPATCH} is gone",)
    parameters = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    if tuple(parameters[:3]) != _HEAD:
        return "", (f"{_V4}: {DISPATCH} takes ({drift.signature(node)}), not ({', '.join(_HEAD)}, ...)",)
    if _lacks_default(node, parameters[3:]):
        return "", (f"{_V4}: {DISPATCH} has a further parameter without a default",)
    name = "einsum" if len(parameters) == len(_HEAD) else "kernel-module"
    return name, tuple(problem for file in _MODELS for problem in _unknown_uses(root / file, file))


def _is_older(version: str) -> bool:
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if match is None:
        return "dsv41" in version
    release = (int(match[1]), int(match[2]), int(match[3]))
    return _OLDEST <= release <= _NEWEST or "dsv41" in version


def _lacks_default(node: ast.FunctionDef | ast.AsyncFunctionDef, further: list[str]) -> bool:
    return len(node.args.defaults) < len(further) or any(default is None for default in node.args.kw_defaults)


def _unknown_uses(path: Path, name: str) -> Iterator[str]:
    """Sentences about functions that use the weight in a way that is not in the list."""
    try:
        tree = ast.parse(path.read_bytes())
    except OSError:
        return
    for function, node in drift.functions(tree):
        if _LOADING.search(function.rpartition(".")[2]):
            continue
        for use in _uses(node):
            if use not in _USES:
                yield (
                    f"{name}: {function} uses wo_a.weight.{use}" if use else f"{name}: {function} hands wo_a.weight on"
                )


def _uses(node: ast.AST) -> Iterator[str]:
    """What is done with each ``<x>.wo_a.weight``: the attribute asked of it; nothing for an operand of a product."""
    allowed = {id(argument) for call in ast.walk(node) if isinstance(call, ast.Call) for argument in _operands(call)}
    parents = {id(child): parent for parent in ast.walk(node) for child in ast.iter_child_nodes(parent)}
    for part in ast.walk(node):
        if not _is_weight(part) or id(part) in allowed:
            continue
        parent = parents.get(id(part))
        if isinstance(parent, ast.Attribute):
            yield parent.attr
        elif not isinstance(parent, ast.Assign):
            yield ""


def _operands(call: ast.Call) -> list[ast.expr]:
    """Arguments of the products that a tag serves, and of the dispatch."""
    function = call.func
    name = (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )
    return call.args if name in ("einsum", "bmm", "matmul", "linear", DISPATCH) else []


def _is_weight(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "weight"
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == drift.TARGET
    )
