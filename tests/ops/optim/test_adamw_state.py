"""The state of FusedAdamW, which torch.optim.AdamW's goes into and comes from, and its checks."""

import copy
import io
import math
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from rlft_fast.ops import FusedAdamW
from tests.ops.optim.adamw_problems import (
    NARROW,
    OPTIONS,
    SHAPES,
    as_parameters,
    assert_same_bits,
    bits,
    random_tensors,
    take_steps,
)
from tests.support.machine.devices import DEVICES


def through_a_file(state_dict: dict) -> dict:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *NARROW])
def test_continues_bit_for_bit(dtype, device):
    parameters = as_parameters(random_tensors(SHAPES, dtype, device))
    optimizer = FusedAdamW(parameters, **OPTIONS)
    take_steps(optimizer, 3)
    resumed = FusedAdamW(as_parameters([p.detach() for p in parameters]), lr=1.0)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_same_bits(bits(resumed), bits(optimizer))
    take_steps(optimizer, 2, first=4)
    take_steps(resumed, 2, first=4)
    assert_same_bits(bits(resumed), bits(optimizer))


@pytest.mark.parametrize("device", DEVICES)
# Its step counts lie on the CPU unless it is fused or capturable.
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_loads_what_torch_saved_and_torch_loads_ours(options, device):
    initial = random_tensors(SHAPES, device=device)
    theirs = torch.optim.AdamW(as_parameters(initial), **OPTIONS, **options)
    take_steps(theirs, 3)
    weights = [p.detach() for p in theirs.param_groups[0]["params"]]
    ours = FusedAdamW(as_parameters(weights))
    ours.load_state_dict(through_a_file(theirs.state_dict()))
    take_steps(ours, 2, first=4)
    take_steps(theirs, 2, first=4)
    for mine, other in zip(bits(ours), bits(theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6, check_device=False)

    for saved in (ours, FusedAdamW(as_parameters(weights), **OPTIONS)):  # with torch's other options, and without
        take_steps(saved, 1, first=6)
        back = torch.optim.AdamW(as_parameters([p.detach() for p in saved.param_groups[0]["params"]]), **options)
        back.load_state_dict(through_a_file(saved.state_dict()))
        take_steps(saved, 2, first=7)
        take_steps(back, 2, first=7)
        for mine, other in zip(bits(saved), bits(back), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6, check_device=False)


@pytest.mark.parametrize("dtype", NARROW)
def test_loads_torchs_state_of_narrow_parameters(dtype):
    theirs = torch.optim.AdamW(as_parameters(random_tensors(SHAPES, dtype)), **OPTIONS)
    take_steps(theirs, 2)
    weights = [p.detach() for p in theirs.param_groups[0]["params"]]
    ours = FusedAdamW(as_parameters(weights), **OPTIONS)
    saved = through_a_file(theirs.state_dict())
    saved["state"][0]["step"] = 2  # a plain number, as old versions of torch saved it
    ours.load_state_dict(saved)
    ours.initialize_state()
    for mine, other in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert ours.state[mine][key].dtype == torch.float32
            assert torch.equal(ours.state[mine][key], theirs.state[other][key].float())
        assert torch.equal(ours.state[mine]["master"], other.float())
    take_steps(ours, 1, first=3)
    assert {state["step"].item() for state in ours.state.values()} == {3.0}


def test_hooks_see_and_change_what_is_loaded():
    optimizer = FusedAdamW(as_parameters(random_tensors([(5,)])))
    take_steps(optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())

    def double(_, state_dict):
        return state_dict | {"state": {0: state_dict["state"][0] | {"exp_avg": torch.full((5,), 7.0)}}}

    optimizer.register_load_state_dict_pre_hook(double)
    for _ in range(2):
        optimizer.load_state_dict(saved)
        assert torch.equal(optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"], torch.full((5,), 7.0))


def test_what_a_hook_puts_into_the_state_stays_there():
    optimizer = FusedAdamW(as_parameters(random_tensors([(5,), (3,)], torch.bfloat16)))
    take_steps(optimizer, 1)
    first, second = optimizer.param_groups[0]["params"]
    expected = optimizer.state[second]["exp_avg"].clone()
    seen = []

    def replace(loaded: FusedAdamW) -> None:
        seen.append(loaded.state[first]["exp_avg"].dtype)
        loaded.state[first]["exp_avg"] = torch.full((5,), 7.0)

    optimizer.register_load_state_dict_post_hook(replace)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert seen == [torch.float32]
    assert torch.equal(optimizer.state[first]["exp_avg"], torch.full((5,), 7.0))
    assert torch.equal(optimizer.state[second]["exp_avg"], expected)


# ---- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"lr is -1\.0"),
        ({"lr": math.nan}, "lr is nan"),
        ({"lr": torch.tensor(-1.0)}, r"lr is -1\.0"),
        ({"lr": torch.tensor(math.nan)}, "lr is nan"),
        ({"lr": torch.ones(2)}, r"lr has shape \(2,\)"),
        ({"betas": (0.9, 1.0)}, r"betas are \(0\.9, 1\.0\)"),
        ({"betas": (-0.1, 0.9)}, r"betas are \(-0\.1, 0\.9\)"),
        ({"betas": (0.9,)}, r"betas are \(0\.9,\)"),
        ({"eps": -1e-8}, "eps is -1e-08"),
        ({"weight_decay": -0.1}, r"weight_decay is -0\.1"),
        ({"amsgrad": True}, "amsgrad is on"),
        ({"maximize": True}, "maximize is on"),
        ({"differentiable": True}, "differentiable is on"),
    ],
)
def test_bad_options_are_named(options, message):
    parameter = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=message):
        FusedAdamW([{"params": [parameter], **options}])
    with pytest.raises(ValueError, match=message):
        FusedAdamW([parameter], **options)
    optimizer = FusedAdamW([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [parameter], **options})
    assert len(optimizer.param_groups) == 1


def test_a_group_that_is_no_dict_is_named():
    with pytest.raises(TypeError, match="param_group must be a dict"):
        FusedAdamW([nn.Parameter(torch.ones(2))]).add_param_group([nn.Parameter(torch.ones(2))])


@pytest.mark.parametrize(
    ("parameter", "gradient", "error", "message"),
    [
        (torch.eye(2), torch.eye(2).to_sparse(), ValueError, "layout torch.sparse_coo, expected a dense one"),
        (torch.ones(2, dtype=torch.complex64), None, TypeError, "complex64, expected"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), TypeError, "float64, expected float32"),
        (torch.ones(2, dtype=torch.float64), torch.ones(2), TypeError, "float32, expected float64"),
        (torch.ones(3).expand(2, 3), None, ValueError, r"strides \(0, 1\), with which its elements share"),
        (
            torch.ones(9).as_strided((3, 3), (2, 1)),
            None,
            ValueError,
            r"strides \(2, 1\), with which its elements share",
        ),
    ],
)
def test_bad_gradients_are_named_before_anything_changes(parameter, gradient, error, message):
    good, bad = nn.Parameter(torch.ones(2)), parameter.detach().requires_grad_()
    optimizer = FusedAdamW([good])
    take_steps(optimizer, 1)
    before = bits(optimizer)
    optimizer.add_param_group({"params": [bad]})
    bad.grad_dtype = None
    bad.grad = torch.ones_like(bad) if gradient is None else gradient
    with pytest.raises(error, match=message):
        optimizer.step()
    optimizer.param_groups.pop()
    assert_same_bits(bits(optimizer), before)


@pytest.mark.parametrize("name", ["coefficient", "found_inf"])
@pytest.mark.parametrize(
    ("scalar", "error", "message"),
    [
        (0.5, TypeError, r"is 0\.5, expected a 0-d float32"),
        (torch.ones((), dtype=torch.float64), TypeError, "is torch.float64"),
        (torch.ones(2), TypeError, r"is torch.float32 of shape \(2,\)"),
        (torch.ones((), device="meta"), ValueError, r"is on meta, parameters are on cpu: pass .*\.to\('cpu'\)"),
    ],
)
def test_bad_scalars_are_named_before_anything_changes(name, scalar, error, message):
    optimizer = FusedAdamW(as_parameters(random_tensors([(3,)])))
    take_steps(optimizer, 1)
    before = bits(optimizer)
    with pytest.raises(error, match=f"{name} {message}"):
        optimizer.step(**{name: scalar})
    assert_same_bits(bits(optimizer), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad is on"),
        (lambda p: torch.optim.Adam(p), "decoupled_weight_decay is False"),
        (lambda p: torch.optim.SGD(p, lr=0.1), "no betas, eps"),
        (lambda p: torch.optim.Adamax(p), r"state of a parameter of shape \(3,\) has no exp_avg_sq"),
        (lambda p: torch.optim.AdamW([*p, torch.ones(1)]), "doesn't match the size"),
        (lambda p: torch.optim.AdamW([torch.ones(4)]), r"exp_avg has shape \(4,\), its parameter \(3,\)"),
    ],
)
def test_bad_state_dicts_are_named(options, message):
    parameters = as_parameters(random_tensors([(3,)]))
    other = options(as_parameters(random_tensors([(3,)])))
    take_steps(other, 1)
    optimizer = FusedAdamW(parameters)
    take_steps(optimizer, 2)
    before, groups = bits(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(other.state_dict())
    assert_same_bits(bits(optimizer), before)
    assert optimizer.state_dict()["param_groups"] == groups


def test_a_flat_state_dict_loads_without_gradients_only():
    model, flat = torch.nn.Linear(3, 2), StateDictOptions(flatten_optimizer_state_dict=True)
    optimizer, fresh = FusedAdamW(model.parameters()), FusedAdamW(model.parameters())
    take_steps(optimizer, 1)
    saved = get_optimizer_state_dict(model, optimizer, options=flat)
    # torch drops the moments then; its own AdamW starts anew without a word.
    with pytest.raises(ValueError, match=r"has no step, exp_avg, exp_avg_sq: .* zero_grad\(\) first"):
        set_optimizer_state_dict(model, fresh, saved, options=flat)
    fresh = FusedAdamW(model.parameters())
    optimizer.zero_grad()
    set_optimizer_state_dict(model, fresh, saved, options=flat)
    assert_same_bits(bits(fresh), bits(optimizer))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moment_dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype, moment_dtype, device):
    lists = [random_tensors([(3,), (4, 5)], dtype, device, seed) for seed in range(2)]
    lists += [[x.to(moment_dtype) for x in lists[0]], [x.to(moment_dtype).square() for x in lists[0]]]
    masters = [] if dtype == torch.float32 else [x.float() for x in lists[0]]
    steps = [torch.ones((), device=device) for _ in range(2)]
    zero, half = torch.zeros((), device=device), torch.full((), 0.5, device=device)
    for scalars in ((None, None, None), (half, half, zero)):
        arguments = (*lists, masters, steps, 1e-3, scalars[0], 0.9, 0.99, 0.1, 1e-8, *scalars[1:])
        torch.library.opcheck(torch.ops.rlft_fast.multi_tensor_adamw_.default, arguments)


# ---- state and settings that were changed between steps -------------------------------------------------------------


def two_groups() -> FusedAdamW:
    """After a step of two groups of one parameter each."""
    first, second = as_parameters(random_tensors([(3,), (4,)]))
    optimizer = FusedAdamW([{"params": [first]}, {"params": [second]}])
    take_steps(optimizer, 1)
    return optimizer


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        *((key, math.inf, f"{key} is inf, expected a finite number") for key in ("lr", "eps", "weight_decay")),
        ("lr", "1", "lr is '1'"),
        ("lr", 1j, "lr is 1j"),
        ("lr", torch.tensor(math.nan), "lr is nan"),
        ("eps", None, "eps is None"),
        ("weight_decay", math.nan, "weight_decay is nan"),
        ("betas", (math.inf, 0.9), r"betas are \(inf, 0\.9\)"),
        ("betas", ("a", 0.9), r"betas are \('a', 0\.9\)"),
        ("betas", 0.9, r"betas are 0\.9"),
    ],
)
def test_a_setting_of_the_second_group_is_named_before_the_first_moves(key, value, message):
    optimizer = two_groups()
    before = bits(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], key: value})
    optimizer.param_groups[1][key] = value
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert_same_bits(bits(optimizer), before)


BAD_STATE = [
    ("step", lambda _: [1.0], (TypeError, ValueError), r"step is \[1\.0\]"),
    ("step", lambda _: torch.ones(2), (TypeError, ValueError), "step is .*expected"),
    *(
        ("step", lambda _, count=count: torch.tensor(count), ValueError, "a whole number from 0 to 16777216")
        for count in (math.nan, math.inf, -5.0, 1.5, 1e30)
    ),
    ("exp_avg", lambda x: x.to(torch.complex64), TypeError, "exp_avg is torch.complex64"),
    ("exp_avg", lambda x: x.long(), TypeError, "exp_avg is torch.int64"),
    ("exp_avg", lambda x: x.to_sparse(), TypeError, "exp_avg is .*layout torch.sparse_coo, expected dense"),
    ("exp_avg_sq", lambda x: x.tolist(), TypeError, "exp_avg_sq is a list, expected a tensor"),
    ("exp_avg_sq", lambda x: x[:2], ValueError, r"exp_avg_sq has shape \(2,\), its parameter \(4,\)"),
]


@pytest.mark.parametrize(("key", "change", "error", "message"), BAD_STATE)
def test_bad_state_of_the_second_group_is_named_before_the_first_moves(key, change, error, message):
    optimizer = two_groups()
    saved, last = optimizer.state_dict(), optimizer.param_groups[1]["params"][0]
    good = optimizer.state[last][key]
    before = bits(optimizer)
    saved["state"][1] = saved["state"][1] | {key: change(good)}
    with pytest.raises(error, match=message):
        optimizer.load_state_dict(saved)
    optimizer.state[last][key] = change(good)
    with pytest.raises(error, match=message):
        optimizer.step()
    optimizer.state[last][key] = good
    assert_same_bits(bits(optimizer), before)


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("exp_avg", lambda x: x.double(), "exp_avg is torch.float64 on cpu, expected torch.float32 on cpu"),
        ("exp_avg", lambda x: x.to("meta"), "exp_avg is torch.float32 on meta"),
        ("step", lambda x: x.double(), "step is torch.float64"),
        ("step", lambda _: 3, "step is 3, expected a 0-d float32 tensor"),
    ],
)
def test_state_that_loading_would_convert_is_refused_by_a_step(key, change, message):
    optimizer = two_groups()
    last = optimizer.param_groups[1]["params"][0]
    good, before = optimizer.state[last][key], bits(optimizer)
    optimizer.state[last][key] = change(good)
    with pytest.raises(TypeError, match=message):
        optimizer.step()
    optimizer.state[last][key] = good
    assert_same_bits(bits(optimizer), before)


def test_a_step_count_that_is_changed_in_place_is_checked_again():
    optimizer = two_groups()
    last = optimizer.param_groups[1]["params"][0]
    take_steps(optimizer, 1)
    optimizer.state[last]["step"].fill_(math.nan)
    first = optimizer.param_groups[0]["params"][0]
    before = first.detach().clone()
    with pytest.raises(ValueError, match="step is nan"):
        optimizer.step()
    assert torch.equal(first, before)


def test_a_parameter_that_is_cast_between_steps_gets_its_master():
    """As `model.bfloat16()` casts it."""
    (parameter,) = as_parameters([torch.ones(3, 4)])
    optimizer = FusedAdamW([parameter], lr=0.1)
    take_steps(optimizer, 1)
    parameter.grad, parameter.data = None, parameter.data.bfloat16()
    loaded = FusedAdamW(as_parameters([parameter.detach()]), lr=0.1)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in (optimizer, loaded):
        take_steps(each, 2, first=2)
    assert_same_bits(bits(optimizer), bits(loaded))
    assert optimizer.state[parameter]["master"].dtype == torch.float32


def test_checked_state_is_not_kept_alive():
    """An engine that moves the state elsewhere needs its memory back."""
    optimizer = two_groups()
    last = optimizer.param_groups[1]["params"][0]
    old = weakref.ref(optimizer.state[last]["exp_avg"])
    optimizer.state[last]["exp_avg"] = optimizer.state[last]["exp_avg"].clone()
    assert old() is None
