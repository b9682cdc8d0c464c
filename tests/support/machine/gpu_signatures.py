"""Calls that only a run on a GPU makes, and the signatures that they meet in the versions that pyproject.toml admits.

    python -m tests.support.machine.gpu_signatures     # notes the signatures of the installed torch and triton

to be run with the oldest, the usual and the newest versions.
"""

import ast
import importlib
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch.nn.attention.varlen  # noqa: F401 (registers an operator)

ROOT = Path(__file__).parents[3]
RECORDED = Path(__file__).with_suffix(".json")
# transformers is called on the CPU in the same ways.
_PREFIXES = ("torch.cuda.", "torch.nn.attention.varlen.", "triton.")
_WORDS = ("cuda", "varlen", "triton")  # a file that makes such a call has one of them
# Overloads of compiled functions, which have no signature, and operators that are named and not called.
OVERLOADS = (
    "torch.ops.aten.mm.dtype_out",
    "torch.ops.aten.addmm.dtype_out",
    "torch.ops.torch_attn._varlen_attn.default",
)


@dataclass(frozen=True, slots=True)
class Call:
    """One call in the source; ``None`` stands for each argument."""

    name: str
    place: str
    num_positional: int
    keywords: tuple[str, ...]

    def bind(self, parameters: list[list[Any]]) -> None:
        """Raises TypeError if a function with these parameters does not take the call."""
        signature(parameters).bind(*[None] * self.num_positional, **dict.fromkeys(self.keywords))


def signature(parameters: list[list[Any]]) -> inspect.Signature:
    """From (name, kind, whether it has a default), as `main` notes them."""
    return inspect.Signature([
        inspect.Parameter(name, inspect._ParameterKind[kind], default=None if optional else inspect.Parameter.empty)
        for name, kind, optional in parameters
    ])  # fmt: skip


def gpu_calls() -> Iterator[Call]:
    """Of the package and its benchmarks, but for the device that stands in for a GPU."""
    paths = {*(ROOT / "rlft_fast").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")}
    for path in sorted(paths - {ROOT / "benchmarks/support/fake_gpu.py"}):
        text = path.read_text()
        if not any(word in text for word in _WORDS):
            continue
        tree = ast.parse(text, str(path))
        names = dict(_imported(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (name := _full_name(node.func, names)).startswith(_PREFIXES):
                assert not any(isinstance(x, ast.Starred) for x in node.args), f"{path}:{node.lineno} hides arguments"
                keywords = tuple(x.arg for x in node.keywords if x.arg is not None)
                yield Call(name, f"{path.relative_to(ROOT)}:{node.lineno}", len(node.args), keywords)


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((x.asname, x.name) if x.asname else (x.name.split(".")[0],) * 2 for x in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((x.asname or x.name, f"{node.module}.{x.name}") for x in node.names)


def _full_name(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_full_name(node.value, names)}.{node.attr}"
    return names.get(node.id, "") if isinstance(node, ast.Name) else ""


def find(name: str) -> Any:
    """What a full name stands for; None if there is nothing."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        return reduce(lambda found, part: getattr(found, part, None), parts[length:], module)
    return None


def parameters(name: str) -> list[list[Any]] | str | None:
    """Of a function; the schema of an overload; None if there is no such thing."""
    found = find(name)
    if found is None or name in OVERLOADS:
        return found and str(found._schema)
    found = getattr(found, "fn", found)  # of what Triton compiles
    return [[x.name, x.kind.name, x.default is not x.empty] for x in inspect.signature(found).parameters.values()]


def main() -> None:
    recorded = json.loads(RECORDED.read_text()) if RECORDED.is_file() else {}
    for package in ("torch", "triton"):
        version = importlib.import_module(package).__version__.split("+")[0]
        names = sorted({x for x in (*(call.name for call in gpu_calls()), *OVERLOADS) if x.startswith(package + ".")})
        recorded[f"{package} {version}"] = {name: parameters(name) for name in names}
    texts = []
    for version, found in sorted(recorded.items()):
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(x)}" for name, x in sorted(found.items()))
        texts.append(f"{json.dumps(version)}: {{\n{lines}\n}}")
    RECORDED.write_text("{" + ",\n".join(texts) + "}\n")


if __name__ == "__main__":
    main()
