"""A CUDA device where there is none, for a process that does nothing else.

Everything above the kernels takes tensors that say ``cuda:0`` for a GPU's, so its code for GPUs runs. What a GPU
refuses is refused: tensors of two devices in one operator. There are two kinds of such tensors:

- Under :class:`CudaDevice` they have their elements on the CPU. PyTorch's own operators compute there; the project's
  operators are the emulated CUDA kernels, and Triton's interpreter runs the Triton kernels. An operator that would wait
  for the device raises under ``torch.cuda.set_sync_debug_mode("error")``.
- Under :class:`DeviceOfShapes` they have no elements, so nothing is computed and whole models pass. An operator that
  would wait for a value raises, and copies are noted.

RLFT_EMULATED_KERNELS names the library to load: tests/cuda_emulator/device.cpp, with the emulated kernels or alone.
"""

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Before torch asks, once and for all, whether there is a GPU.
ctypes.CDLL(str(Path(find_spec("torch").origin).parent / "lib/libtorch_cpu.so"))
if library := os.environ.get("RLFT_EMULATED_KERNELS"):
    ctypes.CDLL(library)

os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

DEVICE = torch.device("cuda", 0)
aten = torch.ops.aten
_WAIT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # for a value, for the size of their result
_COPIES = {aten._to_copy.default, aten.copy_.default}
_raise_on_sync = False


def _set_sync_debug_mode(mode: str) -> None:
    global _raise_on_sync
    _raise_on_sync = mode == "error"


def install() -> None:
    """Makes torch and the project believe in the device."""
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda"): made on the CPU, then moved
    torch.cuda.is_available = lambda: True
    torch.cuda._lazy_init = lambda: None
    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda._exchange_device = torch.cuda._maybe_exchange_device = lambda index: 0
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.set_sync_debug_mode = _set_sync_debug_mode
    torch.Generator = Generator
    from rlft_fast.ops import backends, library

    library.has_cuda_kernels = backends.has_cuda_kernels = True


def _asked_for(kwargs: dict[str, Any]) -> str | None:
    """Type of the device that an operator is told to put its result on."""
    return torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None


# ---- tensors with elements -------------------------------------------------------------------------------------------


class CudaTensor(Tensor):
    """Wraps the CPU tensor that holds its elements."""

    elements: Tensor

    @staticmethod
    def __new__(cls, elements: Tensor) -> "CudaTensor":
        return Tensor._make_wrapper_subclass(
            cls, elements.shape, strides=elements.stride(), storage_offset=elements.storage_offset(),
            dtype=elements.dtype, device=DEVICE,
        )  # fmt: skip

    def __init__(self, elements: Tensor) -> None:
        self.elements = elements

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"CudaTensor({self.elements})"

    def tolist(self) -> list[Any]:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


class Generator(torch.Generator):
    """Of any device, on the CPU."""

    def __new__(cls, device: torch.device | str = "cpu") -> "Generator":
        return super().__new__(cls, "cpu")  # pyrefly: ignore[bad-argument-count]


class CudaDevice(TorchDispatchMode):
    """While it is entered, operators that are asked for a CUDA tensor make one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator as a machine with a GPU runs it."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    on_device = [x for x in tensors if isinstance(x, CudaTensor)]
    asked_for = _asked_for(kwargs)
    if not on_device and asked_for != "cuda":
        return func(*args, **kwargs)
    if func.namespace == "rlft_fast" and (python := python_implementation(func)) is not None:
        with CudaDevice():
            return python(*args, **kwargs)
    if func.namespace == "aten" and func._can_decompose():  # inside of a custom operator nothing has taken it apart
        with CudaDevice():
            return func.decompose(*args, **kwargs)
    result_on_device = asked_for == "cuda" or (asked_for is None and bool(on_device))
    if func is aten.copy_.default:
        result_on_device = isinstance(args[0], CudaTensor)
    if func not in _COPIES and any(x.dim() and not isinstance(x, CudaTensor) for x in tensors):
        raise RuntimeError(f"{func}: expected all tensors to be on one device, got cuda:0 and cpu")
    if _raise_on_sync and waits(func, args, kwargs, len(on_device) == len(tensors) and result_on_device):
        raise RuntimeError(f"{func} waits for the device")

    owner = {id(x.elements): x for x in on_device}
    args, kwargs = _elements((args, kwargs))
    if asked_for == "cuda":
        kwargs["device"] = torch.device("cpu")
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    result = _compute(func, args, kwargs)

    def returned(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return owner[id(x)] if id(x) in owner else CudaTensor(x) if result_on_device else x

    return tree_map(returned, result)


def _elements(values: Any) -> Any:
    return tree_map(lambda x: x.elements if isinstance(x, CudaTensor) else x, values)


def python_implementation(func: Any) -> Any:
    """Of an operator that `torch.library.custom_op` made; its body runs operators of its own."""
    definition = torch._library.custom_ops.OPDEFS.get(f"{func.namespace}::{func._schema.name.split('::')[-1]}")
    return None if definition is None else definition._init_fn


def waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], stays: bool = True) -> bool:
    """Whether an operator waits for a value; ``stays``: it copies nothing from the device."""
    if func in _COPIES:
        non_blocking = kwargs.get("non_blocking", args[2] if func is aten.copy_.default and len(args) > 2 else False)
        return not stays and not non_blocking
    if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return bool(_WAIT.intersection(func.tags)) and kwargs.get("output_size") is None


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func.namespace == "rlft_fast":
        return func._op_dk(torch.DispatchKey.CUDA, *args, **kwargs)
    if func is aten.mm.out and args[0].dtype in (torch.float16, torch.bfloat16):  # in minutes on CPUs without AVX-512
        return kwargs["out"].copy_(args[0].float() @ args[1].float())
    if func is aten.mm.dtype_out:  # which CPUs do not have: narrow operands, float32 sums
        a, b, dtype = args
        _check_widening(a, b, dtype, kwargs["out"])
        return torch.mm(a.float(), b.float(), out=kwargs["out"])
    if func is aten.addmm.dtype_out:
        start, a, b, dtype = args
        _check_widening(a, b, dtype, kwargs["out"])
        assert start.dtype in (dtype, a.dtype), "self dtype must match either out_dtype or mat1 dtype"
        return torch.addmm(start.float(), a.float(), b.float(), out=kwargs["out"])
    return func(*args, **kwargs)


def _check_widening(a: Tensor, b: Tensor, dtype: torch.dtype, out: Tensor) -> None:
    assert a.dtype == b.dtype
    assert out.dtype == dtype
    assert dtype == a.dtype or (dtype == torch.float32 and a.dtype in (torch.float16, torch.bfloat16))


def interpret_triton() -> None:
    """Lets Triton's interpreter have the elements, and the values of bfloat16: its dot multiplies their bits."""
    import numpy as np
    import triton
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

    launch, dot = GridExecutor.__call__, InterpreterBuilder.create_dot

    def widened(x: TensorHandle) -> TensorHandle:
        if not x.dtype.is_bf16():
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), triton.language.float32)

    GridExecutor.__call__ = lambda self, *args, **kwargs: launch(self, *_elements(args), **_elements(kwargs))
    InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest)


# ---- tensors without elements ----------------------------------------------------------------------------------------


class DeviceOfShapes(TorchDispatchMode):
    """While it is entered, operators that are asked for a CUDA tensor make one without elements.

    Attributes:
        seen: what happened, in order: names of the project's operators, "from device" and "from unpinned memory", and
            copies to the CPU that nothing waits for, "to host".
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode()
        self.pinned: list[Tensor] = []
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func is aten._pin_memory.default:
            self.pinned.append(args[0].clone())
            return self.pinned[-1]
        asked_for = _asked_for(kwargs)
        if asked_for != "cuda" and not any(isinstance(x, FakeTensor) for x in tensors):
            return func(*args, **kwargs)
        self._note(func, tensors, asked_for, waits=waits(func, args, kwargs, stays=False))
        args, kwargs = tree_map(self._as_fake, (args, kwargs))
        with self.fake:
            return func(*args, **kwargs)

    def _note(self, func, tensors: list[Tensor], asked_for: str | None, *, waits: bool) -> None:
        from_cpu = [x for x in tensors if not isinstance(x, FakeTensor)]
        if func.namespace == "rlft_fast":
            self.seen.append(func._opname)
        if func not in _COPIES:
            mixed = any(x.is_cuda for x in tensors) and any(x.dim() for x in from_cpu)
            assert not mixed, f"{func} of tensors on the device and on the CPU"
        elif asked_for == "cpu" and tensors[0].is_cuda:
            self.seen.append("from device")
        elif func is aten.copy_.default and tensors[1].is_cuda and not tensors[0].is_cuda:
            self.seen.append("from device" if waits else "to host")
        elif asked_for == "cuda" and any(x is not y for x in from_cpu for y in self.pinned[-1:] or [None]):
            self.seen.append("from unpinned memory")

    def _as_fake(self, x):
        return self.fake.from_tensor(x) if isinstance(x, Tensor) and not isinstance(x, FakeTensor) else x
