"""Build of the compiled half: one ninja file for all three libraries, so that everything compiles in parallel.

    rlft_fast/_C.abi3.so         schemas and CPU kernels, LibTorch stable ABI
    rlft_fast/_C_cuda.abi3.so    CUDA kernels, stable ABI; built where an nvcc is found, GPU or not, and torch has CUDA.
                                 RLFT_FAST_CPU_ONLY leaves them out. RLFT_FAST_CUDA_ONLY or RLFT_FAST_CUDA_ARCHS asks
                                 for them beside a torch without CUDA, which does not load them.
    rlft_fast/_planner.*.so      host-side planning, pybind11

An index serves two distributions. `rlft_fast` is built with RLFT_FAST_CPU_ONLY. `rlft_fast-cuda`, built with
RLFT_FAST_CUDA_ONLY, is rlft_fast/_C_cuda.abi3.so alone, and needs the `rlft_fast` of its own version, whose folder it
joins. So neither overwrites a file of the other, and one file of `rlft_fast-cuda` serves every Python.
RLFT_FAST_REPOSITORY is the address of the repository that a release is built from: its metadata then links there.

RLFT_FAST_CUDA_ARCHS, such as "90a" or "80 90a", names the GPUs that the CUDA kernels are compiled for instead of all:
with one it takes a quarter of the time, and no other GPU runs them.

torch's own BuildExtension is not used: it refuses to compile CUDA sources against a CPU-only torch and builds
one extension after the other.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
MINIMUM_TORCH = (2, 11)
# 0xMMmm000000000000: the oldest torch the binaries must load in. Decimal 11 is 0x0b.
TARGET_VERSION = f"-DTORCH_TARGET_VERSION=0x{MINIMUM_TORCH[0]:02x}{MINIMUM_TORCH[1]:02x}000000000000ULL"
CUDA_ARCHITECTURES = ("80", "90a", "100")  # nvcc knows the last one from CUDA 12.8 on
# macOS wants to be told that the interpreter has Python's symbols, and always keeps the libraries that it is given.
SHARED, KEEP_LIBRARIES = (
    ("-shared -undefined dynamic_lookup", "") if sys.platform == "darwin" else ("-shared", "-Wl,--no-as-needed")
)
PTX_ARCHITECTURE = "90"  # for GPUs newer than the list; 90a and 100 carry no forward-compatible PTX


def torch_root() -> Path:
    """Folder of the installed torch, or one sentence that says what to do."""
    try:
        import torch
    except ImportError:
        sys.exit(
            f"rlft_fast needs torch >= {MINIMUM_TORCH[0]}.{MINIMUM_TORCH[1]} installed before it is built: "
            "install torch, then run pip again with --no-build-isolation."
        )
    if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < MINIMUM_TORCH:
        sys.exit(
            f"rlft_fast needs torch >= {MINIMUM_TORCH[0]}.{MINIMUM_TORCH[1]} but found {torch.__version__}: "
            "upgrade torch, then build again."
        )
    return Path(torch.__file__).parent


def find(tool: str, advice: str) -> str:
    # A virtual environment's pip runs with the PATH outside of it.
    path = shutil.which(tool) or shutil.which(tool, path=sysconfig.get_path("scripts"))
    if path is None:
        sys.exit(f"rlft_fast cannot be compiled because '{tool}' was not found: {advice}.")
    return path


def find_nvcc() -> str | None:
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if home and (candidate := Path(home) / "bin" / "nvcc").exists():
            return str(candidate)
    return shutil.which("nvcc")


def gencode(nvcc: str) -> str:
    """nvcc's options for the GPUs to compile for: those that are chosen, or those of the list that it knows."""
    chosen = os.environ.get("RLFT_FAST_CUDA_ARCHS", "").split()
    if wrong := [arch for arch in chosen if not re.fullmatch(r"\d{2,3}[af]?", arch)]:
        sys.exit(
            f"RLFT_FAST_CUDA_ARCHS has {wrong[0]!r}, which is no compute capability: "
            "name them without 'sm_' and divided by spaces, such as '90a' or '80 90a'."
        )
    known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=False).stdout.split()
    default = [arch for arch in CUDA_ARCHITECTURES if f"compute_{arch.rstrip('af')}" in known]
    options = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in chosen or default]
    if not chosen:
        options.append(f"-gencode=arch=compute_{PTX_ARCHITECTURE},code=compute_{PTX_ARCHITECTURE}")
    return " ".join(options)


def shell_word(path: object) -> str:
    """A path where ninja hands it to a shell."""
    return shlex.quote(str(path)).replace("$", "$$")


def file_name(path: object) -> str:
    """A path where ninja itself reads it."""
    return re.sub(r"[$ :]", r"$\g<0>", str(path))


def ninja_file(outputs: dict[str, Path], objects: Path) -> str:
    """The whole build as ninja text: one rule per compiler, one edge per source, one link per library."""
    import pybind11

    torch = torch_root()
    found = find(os.environ.get("CXX", "g++"), "install a C++20 compiler (for example g++) or point CXX at one")
    cxx, python = shell_word(found), f"-I{shell_word(sysconfig.get_path('include'))}"
    includes = f"-I{shell_word(ROOT / 'csrc')} -I{shell_word(torch / 'include')}"
    stable = f"{includes} {TARGET_VERSION} -DPy_LIMITED_API=0x030A0000"
    common = (
        "-std=c++20 -O3 -fno-math-errno -fno-trapping-math -fPIC -fvisibility=hidden -Wall "
        f"{python} {os.environ.get('CXXFLAGS', '')}"
    )
    lines = [
        f"rule cxx\n  command = {cxx} -MMD -MF $out.d {common} $flags -c $in -o $out\n  depfile = $out.d\n  deps = gcc",
        f"rule link\n  command = {cxx} {SHARED} $in -o $out $libs {os.environ.get('LDFLAGS', '')}",
    ]

    def library(name: str, rule: str, sources: list[Path], flags: str, libs: str) -> None:
        compiled = []
        for source in sources:
            compiled.append(file_name(f"{objects / name / source.relative_to(ROOT / 'csrc')}.o"))
            lines.append(f"build {compiled[-1]}: {rule} {file_name(source)}\n  flags = {flags}")
        lines.append(f"build {file_name(outputs[name])}: link {' '.join(compiled)}\n  libs = {libs}")

    torch_libs = f"-L{shell_word(torch / 'lib')} {KEEP_LIBRARIES} -ltorch_cpu -ltorch"
    if "_C" in outputs:
        library("_C", "cxx", [ROOT / "csrc/library.cpp", *ROOT.glob("csrc/cpu/*.cpp")], stable, torch_libs)
        pybind = f"-I{shell_word(pybind11.get_include())}"
        library("_planner", "cxx", [*ROOT.glob("csrc/host/*.cpp")], pybind, "")
    if "_C_cuda" in outputs:
        nvcc = find_nvcc()
        # nvcc takes the system's g++ otherwise, which may be newer than it knows; NVCC_CCBIN is its own variable.
        host = f"-ccbin {cxx} " if "CXX" in os.environ and "NVCC_CCBIN" not in os.environ else ""
        lines.append(
            f"rule nvcc\n  command = {shell_word(nvcc)} {host}-MD -MF $out.d -std=c++20 -O3 --threads 4 -Xptxas -v "
            f"-Xcompiler -fPIC,-fvisibility=hidden {python} {gencode(nvcc)} $flags -c $in -o $out "
            "> $out.ptxas 2>&1 || (cat $out.ptxas; false)\n  depfile = $out.d\n  deps = gcc"
        )
        # cudart is linked statically: the library then depends on the driver alone, not on torch's CUDA major.
        # NVIDIA's installer puts it into lib64, conda and pip into lib.
        # torch's CUDA symbols stay undefined here and are found in the torch that loads the library.
        toolkit = Path(nvcc).resolve().parents[1]
        cudart = " ".join(f"-L{shell_word(toolkit / folder)}" for folder in ("lib64", "lib"))
        cuda_libs = f"{torch_libs} {cudart} -lcudart_static -ldl -lrt -lpthread"
        library("_C_cuda", "nvcc", [*ROOT.glob("csrc/cuda/*.cu")], f"{stable} -DUSE_CUDA", cuda_libs)
    return "\n".join(lines) + "\n"


def torch_loads_cuda_kernels() -> bool:
    """Whether the installed torch is built with CUDA. If not, says that the kernels are left out, and what to do."""
    torch_root()
    import torch

    if torch.version.cuda is None:
        print(
            f"torch {torch.__version__} is built without CUDA and would not load the CUDA kernels, which {find_nvcc()} "
            "compiles for minutes: they are left out. Install a torch with CUDA to use them, or set "
            "RLFT_FAST_CUDA_ONLY=1 to compile them for another machine.",
            file=sys.stderr,
            flush=True,
        )
    return torch.version.cuda is not None


class NinjaBuild(build_ext):
    def run(self) -> None:
        if HAS_CUDA_KERNELS and not ASKS_FOR_CUDA_KERNELS and not torch_loads_cuda_kernels():
            self.extensions = [ext for ext in self.extensions if ext.name != "rlft_fast._C_cuda"]
        super().run()

    def build_extensions(self) -> None:
        # In an editable install the libraries land beside the sources, in a wheel in the build folder.
        outputs = {ext.name.split(".")[-1]: Path(self.get_ext_fullpath(ext.name)).resolve() for ext in self.extensions}
        objects = Path(self.build_temp).resolve()
        objects.mkdir(parents=True, exist_ok=True)
        for path in outputs.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        (objects / "build.ninja").write_text(ninja_file(outputs, objects))
        ninja = find("ninja", "pip install ninja")
        if subprocess.run([ninja, "-C", str(objects)], check=False).returncode:
            sys.exit("rlft_fast could not be compiled: the compiler's message is above this line.")


class Release(Distribution):
    """pyproject.toml, and what the environment changes in it for an index."""

    def parse_config_files(self, *args: object, **options: object) -> None:
        super().parse_config_files(*args, **options)
        metadata = self.metadata
        if CUDA_ONLY:
            metadata.name, metadata.description = "rlft_fast-cuda", "The CUDA kernels of rlft_fast"
            self.packages, self.entry_points = [], {}
            for place in (self, metadata):  # setuptools reads either
                place.install_requires, place.extras_require = [f"rlft_fast=={metadata.version}"], {}
        if repository := os.environ.get("RLFT_FAST_REPOSITORY"):
            pages = f"{repository}/blob/v{metadata.version}"
            metadata.project_urls = {
                "Source": repository,
                "Issues": f"{repository}/issues",
                "Changelog": f"{pages}/CHANGELOG.md",
            }
            metadata.long_description = re.sub(r"\]\((?!https?:)", f"]({pages}/", metadata.long_description)


CUDA_ONLY = "RLFT_FAST_CUDA_ONLY" in os.environ
if CUDA_ONLY and ("RLFT_FAST_CPU_ONLY" in os.environ or find_nvcc() is None):
    sys.exit(
        "RLFT_FAST_CUDA_ONLY builds the CUDA kernels and nothing else: "
        "install nvcc or point CUDA_HOME at one, and unset RLFT_FAST_CPU_ONLY."
    )
extensions = []
if not CUDA_ONLY:
    extensions += [Extension("rlft_fast._C", [], py_limited_api=True), Extension("rlft_fast._planner", [])]
ASKS_FOR_CUDA_KERNELS = CUDA_ONLY or "RLFT_FAST_CUDA_ARCHS" in os.environ
HAS_CUDA_KERNELS = (
    find_nvcc() is not None and any(ROOT.glob("csrc/cuda/*.cu")) and "RLFT_FAST_CPU_ONLY" not in os.environ
)
if HAS_CUDA_KERNELS:
    extensions.append(Extension("rlft_fast._C_cuda", [], py_limited_api=True))

setup(
    distclass=Release,
    ext_modules=extensions,
    cmdclass={"build_ext": NinjaBuild},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if CUDA_ONLY else {},
)
