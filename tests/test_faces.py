"""Packages are imported through their faces: `from package import name`, where `__all__` has the name."""

import ast
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import rlft_fast

ROOT = Path(rlft_fast.__file__).parents[1]


def foreign_imports() -> Iterator[tuple[str, str, str]]:
    """(place, module, name) of every import from a package that the importing module is not in."""
    for path in sorted((ROOT / "rlft_fast").rglob("*.py")):
        place = path.relative_to(ROOT)
        package = ".".join(place.parent.parts)
        for node in statements(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlft_fast."):
                module = str(node.module)
                owner = module if (ROOT / module.replace(".", "/")).is_dir() else module.rpartition(".")[0]
                if not f"{package}.".startswith(f"{owner}."):  # nor one of the packages that it is inside of
                    yield from ((f"{place}:{node.lineno}", module, alias.name) for alias in node.names)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """At any depth. `ast.walk` would visit the expressions, too, which are most of the nodes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield child
            yield from statements(child)


def test_what_another_package_uses_is_in_the_face_of_its_own():
    imports = list(foreign_imports())
    assert len(imports) > 100
    faces = {module: getattr(import_module(module), "__all__", []) for _, module, _ in imports}
    assert [(place, module, name) for place, module, name in imports if name not in faces[module]] == []


def test_every_module_has_a_floor_and_the_guide_shows_the_floors():
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    floors = [layer.replace("rlft_fast.", "").split(" | ") for layer in contract["layers"]]
    paths = (path for pattern in ("*.py", "*/__init__.py") for path in (ROOT / "rlft_fast").glob(pattern))
    names = {path.parent.name if path.name == "__init__.py" else path.stem for path in paths}
    assert {name for floor in floors for name in floor} == names - {"rlft_fast", "__main__"}
    guide = "".join(f"    {' · '.join(floor)}\n" for floor in floors)
    assert f"\n\n{guide}\n" in (ROOT / "CONTRIBUTING.md").read_text()


def test_names_that_are_imported_on_first_use_are_found():
    package = import_module("rlft_fast.run")
    assert [name for name in package.__all__ if getattr(package, name, None) is None] == []
