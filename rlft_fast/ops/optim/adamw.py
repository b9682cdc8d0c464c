"""AdamW in one pass over memory, which clips and skips while it steps.

    g = coefficient * gradient
    m = beta1 * m + (1 - beta1) * g                                         Kingma and Ba 2015, arXiv:1412.6980
    v = beta2 * v + (1 - beta2) * g^2
    w = (1 - lr * weight_decay) * w - lr * m_hat / (sqrt(v_hat) + eps)      Loshchilov and Hutter 2019, arXiv:1711.05101

with m_hat = m / (1 - beta1^t) and v_hat = v / (1 - beta2^t). Clipping by scaling the gradients first would read and
write them once more; here the coefficient is one more factor, and gradients are only read. A bfloat16 or float16
parameter has a float32 master, and the step updates the master: a narrow parameter would lose every update smaller than
half a unit of its last place. Moments may be bfloat16, rounded stochastically (Gupta et al. 2015, arXiv:1502.02551):
rounded to nearest, v would stand still, because beta2 = 0.999 changes it by less than its last place. Moments in 8
bits are in eight_bits.py.
"""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from rlft_fast.ops.optim.checks import (
    NARROW,
    check_count,
    check_gradient,
    check_moment,
    check_offered,
    check_parameter,
    check_scalar,
    check_settings,
    check_state,
    local_part,
    state_dtypes,
)
from rlft_fast.ops.optim.eight_bits import (
    CODE_OF,
    CODES,
    MOMENTS,
    SCALES,
    coded_bytes,
    decoded,
    encode,
    scale_like,
)
from rlft_fast.ops.optim.host import buckets, copies_of, to_host, write_back
from rlft_fast.ops.optim.memory_order import is_dense
from rlft_fast.ops.optim.parts import STEPPED, Parts, parts_of


class FusedAdamW(torch.optim.Optimizer):
    """AdamW with float32 masters, clipping inside the step, and steps that can be skipped without a host sync.

    Plain tensors and DTensors of any placement, dtype and (without a coefficient) device may be mixed, also in one
    group. State and state dict are those of `torch.optim.AdamW`, and load from and into it: `step` (0-d float32 on the
    parameter's device), `exp_avg` and `exp_avg_sq`, and `master` for bfloat16 and float16 parameters. All but `step`
    have the parameter's shape and placements, in float32 (float64 for float64 parameters). With 8 bits, `exp_avg_code`,
    `exp_avg_sq_code`, `exp_avg_scale` and `exp_avg_sq_scale` stand in place of the moments of matrices.

    The master is the weight: change a narrow parameter by hand, and the next step overwrites it.

    It takes the arguments of `torch.optim.AdamW`, and ``moment_dtype`` and ``offload_moments``.

    Args:
        params: parameters or parameter groups, as for any optimizer. A parameter with gaps between its elements is
            copied twice in every step.
        lr: learning rate, a float or a 0-d tensor, which is read on its device.
        betas: decays of the two moments, in [0, 1).
        eps: added to the denominator.
        weight_decay: of every parameter of a group, decoupled from the gradient.
        amsgrad: False, as ``maximize`` and ``differentiable``: each would change the formula.
        maximize: see ``amsgrad``.
        foreach: ignored, as ``capturable`` and ``fused``: each would choose another way to the same numbers.
        capturable: see ``foreach``.
        differentiable: see ``amsgrad``.
        fused: see ``foreach``.
        moment_dtype: dtype of the moments of float32, bfloat16 and float16 parameters: float32, or bfloat16 in half of
            the memory, or int8: codes of 8 bits, with a float32 scale for each row of a matrix. Both are rounded at
            random, and the rounding repeats with the step count. A loaded state is converted. A step with int8 decodes
            the moments of 256 MiB of parameters, or of the largest parameter, at a time.
        offload_moments: keep the moments in CPU memory, pinned where the parameters are on a GPU. Steps copy them to
            the parameters' device and back, and wait for it. The numbers are the same bits, but for the random
            rounding of bfloat16 moments, which draws other numbers.

    Raises:
        ValueError: a number is out of range, or a group asks for amsgrad, maximize or differentiable.
        TypeError: the moments cannot have this dtype.
    """

    moment_dtype: torch.dtype = torch.float32
    offload_moments: bool = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        moment_dtype: torch.dtype = torch.float32,
        offload_moments: bool = False,
    ) -> None:
        check_offered({"amsgrad": amsgrad, "maximize": maximize, "differentiable": differentiable})
        if moment_dtype not in (torch.float32, torch.bfloat16, torch.int8):
            raise TypeError(f"moment_dtype is {moment_dtype}, expected torch.float32, torch.bfloat16 or torch.int8.")
        self.moment_dtype, self.offload_moments = moment_dtype, offload_moments
        self._seen: dict[Tensor, _Seen] = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def __getstate__(self) -> dict[str, Any]:
        own = {"moment_dtype": self.moment_dtype, "offload_moments": self.offload_moments}
        return super().__getstate__() | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._seen = {}
        super().__setstate__(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):  # else the base class says so
            check_settings(self.defaults | param_group)
        super().add_param_group(param_group)

    @staticmethod
    def moment_bytes(shape: Sequence[int], moment_dtype: torch.dtype) -> int:
        """Bytes of both moments of a parameter of this shape, or of its shard, unless the parameter is float64."""
        is_coded = moment_dtype == torch.int8
        return coded_bytes(shape) if is_coded else 2 * moment_dtype.itemsize * math.prod(shape)

    @torch.no_grad()
    def initialize_state(self) -> None:
        """Creates missing state before the first step, so that a checkpoint can be loaded into it."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._state_of(parameter)

    def move_state(self, device: torch.device | str) -> None:
        """Moves the state, as the parameters are moved. Moments that ``offload_moments`` keeps stay."""
        for state in self.state.values():
            for key, tensor in state.items():
                if not (self.offload_moments and _is_of_moments(key)):
                    state[key] = tensor.to(device)

    @torch.compiler.disable  # Dynamo would take the state of one parameter for that of another
    @torch.no_grad()
    def step(  # pyrefly: ignore [bad-override]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        coefficient: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> Any:
        """One step of every parameter that has a gradient. Gradients stay as they are; nothing waits for the device.

        Everything is checked first: where the step raises, no parameter of any group has moved.

        Args:
            closure: recomputes the loss and its gradients first.
            coefficient: 0-d float32 factor of every gradient, from `clip_coefficient`. None for 1.
            found_inf: 0-d float32. Where it is not 0 the step is skipped whole: parameters, moments, masters and step
                counts keep their bits.

        Returns:
            What the closure returned.

        Raises:
            ValueError: a setting is out of range; a gradient is sparse or has other placements than its parameter; a
                parameter's elements share memory; the state has other shapes than its parameter, or on the CPU a step
                count that is none; or coefficient or found_inf is on another device.
            TypeError: the dtype of a parameter, of its gradient or of its state cannot be used, or coefficient or
                found_inf is not 0-d float32.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            check_settings(group, waits=False)
        copies: list[tuple[Tensor, Tensor]] = []
        calls = [(group, parts) for group in self.param_groups for parts in self._parts_by_dtype(group, copies)]
        for _, parts in calls:
            check_scalar("coefficient", coefficient, parts[0].parameter.device)
            check_scalar("found_inf", found_inf, parts[0].parameter.device)
        numbers = count()  # over all buckets: their limits depend on how much of each parameter this rank has
        for group, parts in calls:
            for bucket in buckets(parts) if self.offload_moments or self.moment_dtype == torch.int8 else [parts]:
                here = [self._with_moments_here(part) for part in bucket]
                _step(group, here, coefficient, found_inf)
                for part, moved, number in zip(bucket, here, numbers, strict=False):
                    if moved is not part:
                        write_back(part, moved, number, found_inf)
        for parameter, copy in copies:
            parameter.copy_(copy)
        # A later backward pass through the old weights must raise an error. 0.2 ms for 2000 parameters.
        changed = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        torch.autograd.graph.increment_version(changed)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class or of `torch.optim.AdamW`. Tensors that need no conversion are not copied.

        Raises:
            ValueError: the groups do not fit, have settings out of range or use options that this class lacks; a
                tensor is missing or has another shape; or a step count is none.
            TypeError: a moment is no dense tensor of real numbers.
        """
        states: dict[Tensor, dict[str, Tensor]] = {}
        # The base class rounds the loaded state to the parameters' dtypes, so this class restores the full precision.
        # The pre-hook runs last and reads the state dict as the user's hooks left it. The post-hook runs first, so the
        # user's hooks may still change the loaded state.
        handles = [
            self.register_load_state_dict_pre_hook(lambda _, final: states.update(self._loaded_states(final))),
            self.register_load_state_dict_post_hook(lambda _: self.state.update(states), prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _loaded_states(self, state_dict: dict[str, Any]) -> dict[Tensor, dict[str, Tensor]]:
        for group in state_dict["param_groups"]:
            check_settings(group)
        keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        states = state_dict["state"]  # keys and parameters may differ in number: the base class raises the error
        return {
            p: self._placed(_loaded_state(p, states[key], state_dtypes(p, self.moment_dtype)))
            for key, p in zip(keys, parameters, strict=False)
            if key in states
        }

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            check_parameter(parameter)
            dtypes = state_dtypes(parameter, self.moment_dtype)
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for key in filter(_is_of_moments, dtypes):
                zeros = scale_like(parameter) if key in SCALES else torch.zeros_like(parameter, dtype=dtypes[key])
                state[key] = zeros
            self._placed(state)
        if parameter.dtype in NARROW and "master" not in state:
            state["master"] = parameter.detach().float()
        return state

    def _placed(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state, whose moments are moved to CPU memory if they belong there."""
        if self.offload_moments:
            state |= {key: to_host(tensor) for key, tensor in state.items() if _is_of_moments(key)}
        return state

    def _with_moments_here(self, part: Parts) -> Parts:
        if not self.offload_moments and part.exp_avg_scale is None:
            return part
        return part._replace(**copies_of(part, part.parameter.device))

    def _checked_state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state, which is checked unless it is what the last step left."""
        seen = self._seen.get(parameter)
        if seen is not None and _is_seen(seen, parameter, state := self.state[parameter]):
            return state
        state = self._state_of(parameter)
        dtypes = state_dtypes(parameter, self.moment_dtype)
        check_state(parameter, state, dtypes, offloads_moments=self.offload_moments)
        if MOMENTS[0] in state:
            self._seen[parameter] = _seen(parameter, state)
        return state

    def _parts_by_dtype(self, group: dict[str, Any], copies: list[tuple[Tensor, Tensor]]) -> Iterator[list[Parts]]:
        """The parameters of a group that have gradients, in lists of one device, dtype and gradient's dtype.

        A copy steps for a parameter with gaps; both are added to `copies`.
        """
        lists: dict[tuple, list[Parts]] = {}
        for index, parameter in enumerate(group["params"]):
            gradient = parameter.grad
            if gradient is not None:
                check_gradient(index, gradient, parameter)
                state = self._checked_state_of(parameter)
                if not is_dense(local_part(parameter)):
                    check_parameter(parameter)
                    copies.append((parameter, torch.empty_like(parameter).copy_(parameter)))
                    parameter = copies[-1][1]
                parts = parts_of(parameter, gradient, state)
                lists.setdefault((parameter.device, parameter.dtype, gradient.dtype), []).append(parts)
        yield from lists.values()


def _is_of_moments(key: str) -> bool:
    return key not in ("step", "master")


_Seen = tuple[int, torch.dtype, weakref.ref, weakref.ref, weakref.ref, weakref.ref]


def _seen(parameter: Tensor, state: dict[str, Tensor]) -> _Seen:
    """What tells a checked state from another: its tensors, which are not kept alive, and its step count's version.

    A parameter that was cast since needs another state, with a master or without.
    """
    step, exp_avg, exp_avg_sq = state["step"], state["exp_avg"], state["exp_avg_sq"]
    refs = map(weakref.ref, (step, exp_avg, exp_avg_sq, state.get("master", step)))
    return (_version(step), parameter.dtype, *refs)  # type: ignore[return-value]


def _is_seen(seen: _Seen, parameter: Tensor, state: dict[str, Any]) -> bool:
    version, dtype, step, exp_avg, exp_avg_sq, master = seen  # a microsecond counts: there are thousands
    found: Any = state.get("step")
    return (
        step() is found is not None
        and exp_avg() is state.get("exp_avg")
        and exp_avg_sq() is state.get("exp_avg_sq")
        and master() is state.get("master", found)
        and version == _version(found)
        and dtype == parameter.dtype
    )


def _version(tensor: Tensor) -> int:
    """How often torch has changed the tensor in place; the optimizer's own steps do not count."""
    try:
        return tensor._version
    except RuntimeError:  # of an inference tensor
        return 0


def _step(group: dict[str, Any], parts: list[Parts], coefficient: Tensor | None, found_inf: Tensor | None) -> None:
    lists = map(list, zip(*(part[: len(STEPPED)] for part in parts), strict=True))
    parameters, gradients, exp_avgs, exp_avg_sqs, masters, steps = lists
    lr, beta1, beta2 = group["lr"], *group["betas"]
    # The kernel reads a learning rate on a GPU. A learning rate on the CPU is read here, without waiting for a device.
    lr_tensor = lr.to(steps[0].device, torch.float32) if isinstance(lr, Tensor) and not lr.is_cpu else None
    torch.ops.rlft_fast.multi_tensor_adamw_(
        parameters, gradients, exp_avgs, exp_avg_sqs, masters if parameters[0].dtype in NARROW else [], steps,
        float(lr) if lr_tensor is None else 0.0, lr_tensor, beta1, beta2, group["weight_decay"], group["eps"],
        coefficient, found_inf,
    )  # fmt: skip


# ---- loading -------------------------------------------------------------------------------------------------------


def _loaded_state(parameter: Tensor, saved: dict[str, Any], dtypes: dict[str, torch.dtype]) -> dict[str, Tensor]:
    """Converts the state that torch's AdamW or ours saved: moments of any dtype, a step count on any device."""
    expected = (*CODES, *SCALES) if CODES[0] in saved else MOMENTS
    if missing := [key for key in ("step", *expected) if key not in saved]:
        raise ValueError(
            f"the state of a parameter of shape {tuple(parameter.shape)} has no {', '.join(missing)}: this state dict "
            "is not AdamW's, or it is a flat one, which torch cannot read while there are gradients: zero_grad() first."
        )
    check_count(saved["step"])
    state = {"step": torch.as_tensor(saved["step"], dtype=torch.float32, device=parameter.device).reshape(())}
    for key in (*expected, *({"master"} & saved.keys() & dtypes.keys())):
        check_moment(key, saved[key], parameter)
    moments = saved if {*expected} <= dtypes.keys() else _recoded(parameter, saved)
    for key, dtype in dtypes.items():
        if key in moments:
            state[key] = moments[key].to(device=parameter.device, dtype=dtype)
    return state


def _recoded(parameter: Tensor, saved: dict[str, Any]) -> dict[str, Any]:
    """The saved state with codes of its moments, rounded to nearest, or with the moments of its codes."""
    if CODES[0] in saved:
        pairs = ([local_part(saved[key]) for key in pair] for pair in zip(CODES, SCALES, strict=True))
        found = {key: torch.empty_like(parameter, dtype=torch.float32) for key in MOMENTS}
        for tensor, pair in zip(found.values(), pairs, strict=True):
            local_part(tensor).copy_(decoded(*pair))
    else:
        codes = [torch.zeros_like(parameter, dtype=code.dtype) for code in CODE_OF.values()]
        scales = [scale_like(parameter), scale_like(parameter)]
        moments = [local_part(saved[key]).to(parameter.device, torch.float32).contiguous() for key in MOMENTS]
        encode(moments, [*map(local_part, codes)], [*map(local_part, scales)], None, None)
        found = dict(zip((*CODES, *SCALES), (*codes, *scales), strict=True))
    return saved | found


# ---- fakes ---------------------------------------------------------------------------------------------------------


@torch.library.register_fake("rlft_fast::multi_tensor_adamw_")
def _(
    params, grads, exp_avgs, exp_avg_sqs, masters, steps, lr, lr_tensor, beta1, beta2, weight_decay, eps, coefficient,
    found_inf,
):  # fmt: skip
    return None
