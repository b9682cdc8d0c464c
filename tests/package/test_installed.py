"""At the root of a source tree that was not compiled, an installed package runs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rlft_fast

PACKAGE = Path(rlft_fast.__file__).parent
PLACE = "from importlib.util import find_spec as find; print(find('rlft_fast._C'))"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """The root of a source tree, and a folder of installed packages."""
    root, installed = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("installed")
    shutil.copytree(PACKAGE, installed / "rlft_fast", ignore=shutil.ignore_patterns("__pycache__", "_C_cuda*"))
    shutil.copytree(PACKAGE, root / "rlft_fast", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (root / "test_place.py").write_text(f"def test_place():\n    {PLACE}\n")
    return root, installed


def run_at_root(folders: tuple[Path, Path], *arguments: str) -> subprocess.CompletedProcess:
    root, installed = folders
    command = [sys.executable, "-S", *arguments]  # without the site's packages, which may be an editable install
    rest = [entry for entry in sys.path if entry and Path(entry) != PACKAGE.parent]
    environment = os.environ | {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join([str(installed), *rest]),
    }
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


# A script reads the package as torchrun's processes do. pytest puts the root before the installed packages.
@pytest.mark.parametrize(
    "arguments",
    [
        ("-c", PLACE),
        ("-m", "pytest", "-s", "-q", "-o", "pythonpath=.", "-p", "no:cacheprovider", "test_place.py"),
    ],
)
def test_the_installed_package_runs(arguments, folders):
    root, installed = folders
    result = run_at_root(folders, *arguments)
    assert result.returncode == 0, result.stderr
    assert f"origin='{installed / 'rlft_fast' / '_C.abi3.so'}'" in result.stdout
    said = f"the source in {root / 'rlft_fast'} is not compiled: the installed rlft_fast in {installed / 'rlft_fast'}"
    assert said in result.stdout + result.stderr


def test_as_a_program(folders):
    result = run_at_root(folders, "-m", "rlft_fast", "--version")
    assert result.stdout == f"rlft-fast {rlft_fast.__version__}\n"
    assert result.stderr.count("is not compiled") == 1


def test_without_an_installed_package_the_source_stays(folders, tmp_path):
    result = run_at_root((folders[0], tmp_path), "-c", PLACE)
    assert (result.stdout, result.stderr) == ("None\n", "")  # the ops then say how to compile it
