"""The built libraries and the build's own error messages."""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import rlft_fast

ROOT = Path(__file__).parents[2]
LIBRARIES = sorted(Path(rlft_fast.__file__).parent.glob("_C*.so"))
CUDA_LIBRARIES = [path for path in LIBRARIES if "_C_cuda" in path.name]
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
@pytest.mark.parametrize("library", CUDA_LIBRARIES, ids=lambda path: path.name)
def test_cuda_library_finds_torchs_cuda_symbols(library):
    # libtorch.so is what pulls in libtorch_cuda. The linker drops it unless told not to, for nothing here names it.
    output = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    assert re.search(r"NEEDED.*\[libtorch\.so\]", output), "link _C_cuda with -Wl,--no-as-needed"


def find_cuobjdump() -> str | None:
    """Of the CUDA toolkit, or of Triton, which comes with its own."""
    triton = find_spec("triton")
    own = Path(str(triton and triton.origin)).parent / "backends/nvidia/bin/cuobjdump"
    return shutil.which("cuobjdump") or (str(own) if own.is_file() else None)


CUOBJDUMP = find_cuobjdump()


def machine_code(library: Path, *options: str) -> str:
    command = [str(CUOBJDUMP), *options, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump, of the CUDA toolkit or of Triton")
@pytest.mark.parametrize("library", CUDA_LIBRARIES, ids=lambda path: path.name)
def test_no_kernel_spills_registers(library):
    """Registers that are spilled lie on the stack, which no kernel uses otherwise."""
    usage = re.findall(r"Function (\S+):\s+REG:\d+ STACK:(\d+) ", machine_code(library, "-res-usage"))
    assert len(usage) > 100
    assert [name for name, stack in usage if stack != "0"] == []


@pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump, of the CUDA toolkit or of Triton")
@pytest.mark.parametrize("library", CUDA_LIBRARIES, ids=lambda path: path.name)
def test_rows_are_stored_in_vectors(library):
    """Four elements at a time, and single elements only at a row's end."""
    usage = machine_code(library, "-arch", "sm_90a", "-res-usage")
    # grad_kernel<entropy, aligned, Out> and frozen_kernel<aligned, Out>
    kernels = r"Function (\S*(?:grad_kernelILb[01]E|frozen_kernelI)Lb1E(?:f|6__half|13__nv_bfloat16)E\S*):"
    names = re.findall(kernels, usage)
    listing = machine_code(library, "-arch", "sm_90a", "-sass", "-fun", ",".join(names))
    found = {}
    for function in listing.split("Function : ")[1:]:
        name = function.split(maxsplit=1)[0]
        found[name] = re.findall(r"STG\.E(?:\.(\w+))? ", function), "Lb1EfE" in name
    assert len(found) == 9
    for name, (stores, is_float) in found.items():
        num_vectors = 2 if "grad" in name else 8  # of 8 and of 32 elements
        assert stores.count("128" if is_float else "64") == num_vectors, name
        assert is_float or stores.count("U16") == 4 * num_vectors, name


def build_error(path: str, python_path: str, **environment: str) -> str:
    """The last line of `setup.py build_ext`, which gives up."""
    return failed_build(path, python_path, **environment).strip().splitlines()[-1]


def failed_build(path: str, python_path: str, **environment: str) -> str:
    """What `setup.py build_ext` says until it gives up."""
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
    return result.stderr


def pretend_torch(folder: Path, cuda: str | None = None) -> None:
    """Puts a torch there whose import takes no seconds."""
    (folder / "torch.py").write_text(f'__version__ = "2.13.0"\nclass version: cuda = {cuda!r}\n')


def pretend_program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_missing_compiler_is_one_sentence(tmp_path):
    pretend_torch(tmp_path)
    assert re.fullmatch(r"rlft_fast cannot be .*'g\+\+' was not found: install .*\.", build_error("", str(tmp_path)))


def test_missing_compiler_named_by_cxx_is_one_sentence(tmp_path):
    pretend_torch(tmp_path)
    message = build_error(os.environ["PATH"], str(tmp_path), CXX="no-such-compiler")
    assert re.fullmatch(r"rlft_fast cannot be compiled because 'no-such-compiler' was not found: .*\.", message)


def test_ninja_beside_python_is_found_without_a_path(tmp_path):
    pretend_torch(tmp_path)
    compiler = pretend_program(tmp_path / "compiler", "exit 1")
    message = build_error("", str(tmp_path), CXX=str(compiler))
    assert message.startswith("rlft_fast could not be compiled: the compiler's message")


def test_folders_with_special_characters(tmp_path):
    """Of the sources, the build, the compiler and torch. The compiler makes an empty file of its last option."""
    folder = tmp_path / "it's $HOME [1]"
    folder.mkdir()
    (folder / "sources").symlink_to(ROOT)
    (folder / "torch").mkdir()
    pretend_torch(folder / "torch")
    compiler = pretend_program(tmp_path / "a compiler" / "g++", 'while [ "$1" != -o ]; do shift; done; touch "$2"')
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder / "torch"), "CXX": str(compiler)}
    command = [sys.executable, folder / "sources" / "setup.py", "-q", "build_ext"]
    options = ["--build-temp", folder / "objects", "--build-lib", folder / "built"]
    subprocess.run(
        [*command, *options], cwd=ROOT, env=environment | {"RLFT_FAST_CPU_ONLY": "1"}, check=True, capture_output=True
    )
    libraries = {path.name.split(".")[0] for path in (folder / "built" / "rlft_fast").iterdir()}
    assert libraries == {"_C", "_planner"}
    sources = [*ROOT.glob("csrc/cpu/*.cpp"), *ROOT.glob("csrc/host/*.cpp"), ROOT / "csrc/library.cpp"]
    assert len([*(folder / "objects").glob("*/**/*.o")]) == len(sources)


def test_old_torch_is_one_sentence(tmp_path):
    (tmp_path / "torch.py").write_text('__version__ = "2.10.1+cpu"\n')
    message = build_error(os.environ["PATH"], str(tmp_path))
    assert re.fullmatch(r"rlft_fast needs torch >= 2\.11 but found 2\.10\.1\+cpu: upgrade torch.*\.", message)


def test_missing_torch_is_one_sentence(tmp_path):
    (tmp_path / "torch.py").write_text('raise ImportError("no torch")\n')
    message = build_error(os.environ["PATH"], str(tmp_path))
    assert re.fullmatch(r"rlft_fast needs torch >= 2\.11 installed before it is built: .*\.", message)


# The CUDA of torch, how the kernels are asked for, and whether they are compiled.
@pytest.mark.parametrize(
    ("cuda", "asked", "compiled"),
    [("13.0", {}, True), (None, {}, False), (None, {"RLFT_FAST_CUDA_ONLY": "1"}, True)],
)
def test_kernels_that_torch_would_not_load_are_left_out(cuda, asked, compiled, tmp_path):
    """Torch and nvcc are pretended: the build only has to be planned. A compiler that cannot be run ends it there."""
    nvcc = pretend_program(tmp_path / "cuda" / "bin" / "nvcc", "exit 1")
    compiler = pretend_program(tmp_path / "compiler", "exit 1")
    pretend_torch(tmp_path, cuda)
    output = failed_build(os.environ["PATH"], str(tmp_path), CUDA_HOME=str(nvcc.parents[1]), CXX=str(compiler), **asked)
    assert ("_C_cuda.abi3.so" in (tmp_path / "build.ninja").read_text()) == compiled
    says_so = "torch 2.13.0 is built without CUDA and would not load the CUDA kernels" in output
    assert says_so == (cuda is None and not compiled)


@pytest.mark.parametrize(("own", "given"), [({}, True), ({"NVCC_CCBIN": "g++-12"}, False)])
def test_nvcc_compiles_with_the_compiler_of_cxx(own, given, tmp_path):
    """The host's half of a kernel: the system's g++ may be newer than nvcc takes. A variable of nvcc's own wins."""
    nvcc = pretend_program(tmp_path / "cuda" / "bin" / "nvcc", "exit 1")
    compiler = pretend_program(tmp_path / "a compiler" / "g++", "exit 1")
    pretend_torch(tmp_path, "13.0")
    failed_build(os.environ["PATH"], str(tmp_path), CUDA_HOME=str(nvcc.parents[1]), CXX=str(compiler), **own)
    (rule,) = re.findall(r"command = (\S*nvcc .*)", (tmp_path / "build.ninja").read_text())
    assert (f"-ccbin '{compiler}' " in rule) == given


@pytest.mark.parametrize(("known", "compiled"), [("80 89 90", "80 90a 90"), ("80 90 100 120", "80 90a 100 90")])
def test_an_nvcc_compiles_for_the_gpus_that_it_knows(known, compiled, tmp_path):
    """nvcc of CUDA 12.6 does not know sm_100, and ends where it is asked for it."""
    listed = "".join(f"echo compute_{arch}; " for arch in known.split())
    nvcc = pretend_program(tmp_path / "cuda" / "bin" / "nvcc", f"{listed} [ $1 = --list-gpu-arch ]")
    compiler = pretend_program(tmp_path / "compiler", "exit 1")
    pretend_torch(tmp_path, "12.6")
    failed_build(os.environ["PATH"], str(tmp_path), CUDA_HOME=str(nvcc.parents[1]), CXX=str(compiler))
    planned = re.findall(r"-gencode=arch=compute_\w+,code=(?:sm|compute)_(\w+)", (tmp_path / "build.ninja").read_text())
    assert planned == compiled.split()


@pytest.mark.skipif(not CUDA_LIBRARIES, reason="the CUDA kernels were not compiled")
def test_a_wrong_compute_capability_is_one_sentence(tmp_path):
    """`make gpu-rehearsal` builds for a right one."""
    pretend_torch(tmp_path, "13.0")
    message = build_error(os.environ["PATH"], str(tmp_path), RLFT_FAST_CUDA_ARCHS="90a sm_80")
    assert re.fullmatch(r"RLFT_FAST_CUDA_ARCHS has 'sm_80', which is no compute capability: name .*\.", message)


def test_cuda_alone_beside_cpu_alone_is_one_sentence(tmp_path):
    pretend_torch(tmp_path, "13.0")
    message = build_error(os.environ["PATH"], str(tmp_path), RLFT_FAST_CUDA_ONLY="1", RLFT_FAST_CPU_ONLY="1")
    assert re.fullmatch(r"RLFT_FAST_CUDA_ONLY builds the CUDA kernels and nothing else: .*\.", message)


def package_metadata(folder: Path, **environment: str) -> str:
    """What an index shows of the distribution that these variables choose."""
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=True, stderr=subprocess.DEVNULL)
    (path,) = folder.glob("*/PKG-INFO")
    return path.read_text()


def test_a_source_distribution_has_every_file(tmp_path):
    package_metadata(tmp_path)
    (sources,) = tmp_path.glob("*/SOURCES.txt")
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    assert set(tracked) - {*sources.read_text().splitlines()} == set()


def test_links_of_a_release_lead_into_its_repository(tmp_path):
    repository = "https://example.org/rlft_fast"
    text = package_metadata(tmp_path, RLFT_FAST_REPOSITORY=repository)
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert f"{repository}/blob/v{rlft_fast.__version__}/docs/ops.md" in links
    assert [link for link in links if not link.startswith("https://")] == []
    assert f"Project-URL: Source, {repository}" in text


@pytest.mark.skipif(not CUDA_LIBRARIES, reason="the CUDA kernels were not compiled")
def test_the_cuda_distribution_needs_the_other_of_its_version(tmp_path):
    lines = package_metadata(tmp_path, RLFT_FAST_CUDA_ONLY="1").splitlines()
    assert "Name: rlft_fast-cuda" in lines
    wanted = [line for line in lines if line.startswith(("Requires-Dist", "Provides-Extra"))]
    assert wanted == [f"Requires-Dist: rlft_fast=={rlft_fast.__version__}"]
