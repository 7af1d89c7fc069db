"""Noticing that the engine's code is not the code that was read: fingerprints of functions, taken from source.

A fingerprint is a hash of the function's syntax tree without docstrings, annotations' formatting, comments and line
numbers, so that a reformatted file is the same and a changed default is not. Files are read from the installed
package; nothing of the engine is imported, so ``memreclaim doctor`` can look before a boot.
"""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

TARGET = "wo_a"
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Known:
    """What was read of one file."""

    sha256: str
    """Of the whole file: an untouched file is not parsed (deepseek_v4.py alone takes 0.4 s on two busy cores)."""
    functions: Mapping[str, str]
    """Fingerprints by qualified name: every hooked function, and every function that names ``wo_a``."""
    signatures: Mapping[str, str]
    """Parameters of the hooked ones, as written."""


def package_root(package: str = "sglang") -> Path | None:
    """Folder of an installed package, found without importing it; None when it is not there.

    A mere folder of that name on the path, which Python takes for a namespace package, is none.
    """
    spec = util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def look(root: Path, known: Mapping[str, Known]) -> list[str]:
    """Sentences that say what differs between the package at ``root`` and what was read; empty when nothing does."""
    return [problem for name, file in known.items() for problem in _look_at(root / name, name, file)]


def _look_at(path: Path, name: str, known: Known) -> Iterator[str]:
    try:
        source = path.read_bytes()
    except OSError:
        yield f"{name} is gone"
        return
    if hashlib.sha256(source).hexdigest() == known.sha256:
        return
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        yield f"{name} does not parse: {error.msg}"
        return
    found = dict(functions(tree))
    for function, fingerprint in known.functions.items():
        node = found.get(function)
        if node is None:
            yield f"{name}: {function} is gone"
        elif function in known.signatures and signature(node) != known.signatures[function]:
            yield f"{name}: {function} takes ({signature(node)}), not ({known.signatures[function]})"
        elif fingerprint_of(node) != fingerprint:
            yield f"{name}: {function} has changed"
    for function in readers(tree):
        if function not in known.functions:
            yield f"{name}: {function} reads {TARGET} and is not known"


def record(root: Path, names: Mapping[str, tuple[str, ...]]) -> dict[str, Known]:
    """What :func:`look` compares with: for each file, its hooked functions and every function that names ``wo_a``."""
    result = {}
    for name, hooked in names.items():
        source = (root / name).read_bytes()
        tree = ast.parse(source)
        found = dict(functions(tree))
        wanted = sorted({*hooked, *readers(tree)})
        result[name] = Known(
            hashlib.sha256(source).hexdigest(),
            {function: fingerprint_of(found[function]) for function in wanted},
            {function: signature(found[function]) for function in hooked},
        )
    return result


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, _Function]]:
    """Every function that is not inside another one, with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _Function):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif not isinstance(node, ast.expr):
            yield from functions(node, prefix)


def readers(tree: ast.AST) -> list[str]:
    """Functions that name ``wo_a`` as an attribute, or in a string such as ``getattr`` takes."""
    return [name for name, node in functions(tree) if _names_target(node)]


def _names_target(node: ast.AST) -> bool:
    return any(
        (isinstance(part, ast.Attribute) and part.attr == TARGET)
        or (isinstance(part, ast.Constant) and isinstance(part.value, str) and TARGET in _words(part.value))
        for part in ast.walk(node)
    )


def _words(text: str) -> list[str]:
    return text.replace(".", " ").split()


def fingerprint_of(node: _Function) -> str:
    """Hash of a function's syntax tree, without its docstring."""
    body = node.body
    if ast.get_docstring(node, clean=False) is not None:
        body = body[1:]
    parts = [ast.unparse(node.args), *map(ast.unparse, node.decorator_list), *map(ast.unparse, body)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def signature(node: _Function) -> str:
    """Parameters as written, without annotations."""
    arguments = ast.parse(f"def f({ast.unparse(node.args)}): pass").body[0]
    assert isinstance(arguments, _Function)
    for argument in ast.walk(arguments.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(arguments.args)
