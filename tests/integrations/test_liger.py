"""patch_lm_head beside Liger's own patches: make test-peers."""

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from rlft_fast import patch_lm_head

if LIGER := importlib.util.find_spec("liger_kernel"):
    from liger_kernel.transformers import apply_liger_kernel_to_llama

pytestmark = [pytest.mark.peers, pytest.mark.skipif(LIGER is None, reason="no Liger: make test-peers")]

NO_KERNELS = {"rope": False, "rms_norm": False, "swiglu": False}  # which need a GPU
IDS = torch.tensor([[5, 6, 7, 8]])
TARGETS = torch.tensor([[6, 7, 8, -100]])


@pytest.fixture
def load(tiny_model):
    return lambda: AutoModelForCausalLM.from_pretrained(tiny_model("llama"))


def logprob(model: PreTrainedModel) -> torch.Tensor:
    return model(IDS, logprob_targets=TARGETS).logprob


def test_ligers_loss_on_the_class_does_not_matter(load, monkeypatch):
    expected, later = logprob(patch_lm_head(load())), patch_lm_head(load())
    monkeypatch.setattr(LlamaForCausalLM, "forward", LlamaForCausalLM.forward)
    apply_liger_kernel_to_llama(**NO_KERNELS)
    assert LlamaForCausalLM.forward.__module__.startswith("liger_kernel.")
    torch.testing.assert_close(logprob(patch_lm_head(load())), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(logprob(later), expected, rtol=0, atol=1e-6)


def test_ligers_loss_on_a_model_is_refused(load):
    model = load()
    apply_liger_kernel_to_llama(**NO_KERNELS, model=model)
    with pytest.raises(ValueError, match=r"is liger_kernel.*lce_forward, which .*fused_linear_cross_entropy=False"):
        patch_lm_head(model)


def test_ligers_loss_on_a_patched_model_is_refused(load):
    model = patch_lm_head(load())
    apply_liger_kernel_to_llama(**NO_KERNELS, model=model)
    with pytest.raises(ValueError, match=r"liger_kernel.*lce_forward replaced .*fused_linear_cross_entropy=False"):
        logprob(model)


def test_ligers_other_patches_on_a_model(load):
    model = load()
    apply_liger_kernel_to_llama(**NO_KERNELS, fused_linear_cross_entropy=False, model=model)
    torch.testing.assert_close(logprob(patch_lm_head(model)), logprob(patch_lm_head(load())), rtol=0, atol=1e-6)
