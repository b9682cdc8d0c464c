"""The built libraries and the build's own error messages."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rlft_fast

ROOT = Path(__file__).parent.parent
LIBRARIES = sorted(Path(rlft_fast.__file__).parent.glob("_C*.so"))
PTXAS_LOGS = sorted(ROOT.glob("build/temp*/_C_cuda/**/*.ptxas"))
requires_nm = pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm (binutils)")


@requires_nm
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_only_the_stable_abi_is_used(library):
    command = ["nm", "-D", "-C", "--undefined-only", str(library)]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "aoti_torch" in symbols, "nm listed nothing of torch: this test looks at the wrong file"
    unstable = [line for line in symbols.splitlines() if re.search(r"\b(at|c10|torch)::", line)]
    assert unstable == []


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf (binutils)")
@pytest.mark.parametrize("library", [p for p in LIBRARIES if "_C_cuda" in p.name], ids=lambda path: path.name)
def test_cuda_library_finds_torchs_cuda_symbols(library):
    # libtorch.so is what pulls in libtorch_cuda. The linker drops it unless told not to, for nothing here names it.
    output = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    assert re.search(r"NEEDED.*\[libtorch\.so\]", output), "link _C_cuda with -Wl,--no-as-needed"


@pytest.mark.skipif(not PTXAS_LOGS, reason="the CUDA kernels were not compiled in this tree")
@pytest.mark.parametrize("log", PTXAS_LOGS, ids=lambda path: path.name)
def test_no_kernel_spills_registers(log):
    function, spilling = "", []
    for line in log.read_text().splitlines():
        function = line if "Function properties" in line or "Compiling entry" in line else function
        if any(int(count) for count in re.findall(r"(\d+) bytes spill", line)):
            spilling.append((function, line.strip()))
    assert spilling == []


def build_error(path: str, python_path: str, **environment: str) -> str:
    """What `setup.py build_ext` says when it gives up."""
    environment = {"PATH": path, "PYTHONPATH": python_path, "HOME": os.environ.get("HOME", "/"), **environment}
    result = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-temp", python_path, "--build-lib", python_path],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    return result.stderr.strip().splitlines()[-1]


def test_missing_compiler_is_one_sentence(tmp_path):
    assert re.fullmatch(r"rlft_fast cannot be .*'g\+\+' was not found: install .*\.", build_error("", str(tmp_path)))


def test_missing_compiler_named_by_cxx_is_one_sentence(tmp_path):
    message = build_error(os.environ["PATH"], str(tmp_path), CXX="no-such-compiler")
    assert re.fullmatch(r"rlft_fast cannot be compiled because 'no-such-compiler' was not found: .*\.", message)


def test_old_torch_is_one_sentence(tmp_path):
    (tmp_path / "torch.py").write_text('__version__ = "2.10.1+cpu"\n')
    message = build_error(os.environ["PATH"], str(tmp_path))
    assert re.fullmatch(r"rlft_fast needs torch >= 2\.11 but found 2\.10\.1\+cpu: upgrade torch.*\.", message)


def test_missing_torch_is_one_sentence(tmp_path):
    (tmp_path / "torch.py").write_text('raise ImportError("no torch")\n')
    message = build_error(os.environ["PATH"], str(tmp_path))
    assert re.fullmatch(r"rlft_fast needs torch >= 2\.11 installed before it is built: .*\.", message)


@pytest.mark.skipif(not PTXAS_LOGS, reason="the CUDA kernels were not compiled in this tree")
def test_a_wrong_compute_capability_is_one_sentence(tmp_path):
    """`make gpu-rehearsal` builds for a right one."""
    message = build_error(os.environ["PATH"], str(tmp_path), RLFT_FAST_CUDA_ARCHS="90a sm_80")
    assert re.fullmatch(r"RLFT_FAST_CUDA_ARCHS has 'sm_80', which is no compute capability: name .*\.", message)


def test_cuda_alone_beside_cpu_alone_is_one_sentence(tmp_path):
    message = build_error(os.environ["PATH"], str(tmp_path), RLFT_FAST_CUDA_ONLY="1", RLFT_FAST_CPU_ONLY="1")
    assert re.fullmatch(r"RLFT_FAST_CUDA_ONLY builds the CUDA kernels and nothing else: .*\.", message)


def package_metadata(folder: Path, **environment: str) -> str:
    """What an index shows of the distribution that these variables choose."""
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=True, stderr=subprocess.DEVNULL)
    (path,) = folder.glob("*/PKG-INFO")
    return path.read_text()


def test_links_of_a_release_lead_into_its_repository(tmp_path):
    repository = "https://example.org/rlft_fast"
    text = package_metadata(tmp_path, RLFT_FAST_REPOSITORY=repository)
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert f"{repository}/blob/v{rlft_fast.__version__}/docs/ops.md" in links
    assert [link for link in links if not link.startswith("https://")] == []
    assert f"Project-URL: Source, {repository}" in text


@pytest.mark.skipif(not PTXAS_LOGS, reason="the CUDA kernels were not compiled in this tree")
def test_the_cuda_distribution_needs_the_other_of_its_version(tmp_path):
    lines = package_metadata(tmp_path, RLFT_FAST_CUDA_ONLY="1").splitlines()
    assert "Name: rlft_fast-cuda" in lines
    wanted = [line for line in lines if line.startswith(("Requires-Dist", "Provides-Extra"))]
    assert wanted == [f"Requires-Dist: rlft_fast=={rlft_fast.__version__}"]
