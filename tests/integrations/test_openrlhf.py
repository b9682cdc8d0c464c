"""rlft_fast.integrations.openrlhf beside OpenRLHF's own Actor, whose head is the reference: make test-peers."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from rlft_fast.integrations.openrlhf import enable, runtime_env
from tests.support.flash_attn import flash_attn_without_cuda

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(importlib.util.find_spec("openrlhf") is None, reason="no OpenRLHF: make test-peers"),
]

PROMPTS, RESPONSES = torch.tensor([3, 5, 2, 6]), torch.tensor([6, 4, 7, 3])
LORA = {"lora_rank": 2, "target_modules": "all-linear"}


@pytest.fixture(scope="module")
def openrlhf() -> SimpleNamespace:
    with pytest.MonkeyPatch.context() as patch:
        for module in flash_attn_without_cuda():
            patch.setitem(sys.modules, module.__name__, module)
        models = importlib.import_module("openrlhf.models")
        importlib.import_module("openrlhf.models.ring_attn_utils")
    return SimpleNamespace(Actor=models.Actor, PolicyLoss=models.PolicyLoss)


@pytest.fixture
def make_actor(openrlhf, monkeypatch):
    def make(folder: Path, *, fused: bool, **options) -> nn.Module:
        """The actor made last decides whether calls of every actor are fused."""
        monkeypatch.undo()
        if fused:
            for name in ("__init__", "forward"):
                monkeypatch.setattr(openrlhf.Actor, name, getattr(openrlhf.Actor, name))
            enable()
        torch.manual_seed(0)  # adapters start at random
        actor = openrlhf.Actor(str(folder), attn_implementation="sdpa", temperature=0.7, **options)
        actor.model.float()
        return actor

    return make


def update(openrlhf: SimpleNamespace, actor: nn.Module) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Log-probabilities, entropies and the gradients of OpenRLHF's PPO loss with an entropy bonus."""
    generator = torch.Generator().manual_seed(0)
    columns = torch.arange(PROMPTS.max() + RESPONSES.max()) - PROMPTS.max()
    mask = (columns >= -PROMPTS[:, None]) & (columns < RESPONSES[:, None])
    ids = torch.randint(0, 256, mask.shape, generator=generator).masked_fill(~mask, 0)
    actions = mask[:, PROMPTS.max() :].long()
    advantages, noise = torch.randn(2, *actions.shape, generator=generator)
    with torch.no_grad():
        old = actor(ids, actions, mask.long())
    logprobs, output = actor(ids, actions, attention_mask=mask.long(), return_output=True, return_entropy=True)
    entropies = output.entropy[:, -actions.shape[1] :] * actions
    loss = openrlhf.PolicyLoss()(logprobs, old + 0.1 * noise * actions, advantages, action_mask=actions)[0]
    (loss - 0.1 * entropies.sum() / actions.sum()).backward()
    named = actor.named_parameters()
    return logprobs, entropies, {name: each.grad for name, each in named if each.grad is not None}


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(("name", "options"), [("qwen2", {}), ("llama-tied", {}), ("gemma2", {}), ("llama-tied", LORA)])
def test_scores_and_gradients_are_those_of_openrlhf(name, options, packing, tiny_model, openrlhf, make_actor):
    theirs, ours = (
        update(openrlhf, make_actor(tiny_model(name), fused=fused, packing_samples=packing, **options))
        for fused in (False, True)
    )
    assert theirs[0].shape == (4, 7)
    torch.testing.assert_close(ours[:2], theirs[:2], rtol=0, atol=1e-5)
    assert ours[2].keys() == theirs[2].keys()
    assert max(gradient.abs().max() for gradient in ours[2].values()) > 0.01
    for key, gradient in theirs[2].items():
        scale = gradient.abs().max()  # a sum over 20 tokens, each of float32 precision
        torch.testing.assert_close(ours[2][key], gradient, rtol=0, atol=1e-5 * scale, msg=lambda m, k=key: k + m)


def test_without_an_action_mask_openrlhf_answers(tiny_model, make_actor):
    ids, mask = torch.randint(0, 256, (2, 5)), torch.ones(2, 5, dtype=torch.long)
    theirs, ours = (
        make_actor(tiny_model("qwen2"), fused=fused)(ids, attention_mask=mask, return_output=True)
        for fused in (False, True)
    )
    assert torch.equal(ours.logits, theirs.logits)


FLASH_ATTN = {  # as above, in files for another process
    "__init__": "",
    "bert_padding": """
from einops import rearrange
from transformers.modeling_flash_attention_utils import _pad_input as pad_input, _unpad_input as unpad_input
index_first_axis = None
""",
    "utils/__init__": "",
    "utils/distributed": "all_gather = None",
}


def where_forward_is() -> str:
    from openrlhf.models import Actor

    return Actor.forward.__module__


def test_a_ray_worker_is_enabled_before_it_works(tmp_path):
    import ray

    for name, text in FLASH_ATTN.items():
        path = tmp_path / "flash_attn" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environment = runtime_env()
    environment["env_vars"]["PYTHONPATH"] = f"{tmp_path}:{os.environ['PYTHONPATH']}"
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # wheels of others have a package named tests
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20, runtime_env=environment)
    try:
        assert ray.get(ray.remote(where_forward_is).remote()) == "rlft_fast.integrations.openrlhf"
    finally:
        ray.shutdown()


def test_a_model_with_images_keeps_its_head(tiny_model, make_actor):
    actor = make_actor(tiny_model("qwen2-vl"), fused=True)
    assert type(actor.model.lm_head) is nn.Linear


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("forward", "has a openrlhf.models:Actor.forward without the parameter action_mask, .*, expected openrlhf"),
        ("unpad_and_slice_tensor", "has no .*ring_attn_utils:unpad_and_slice_tensor .*, expected openrlhf 0.11.2"),
    ],
)
def test_a_version_without_the_seam_is_refused(name, message, openrlhf, monkeypatch):
    if name == "forward":
        monkeypatch.setattr(openrlhf.Actor, "forward", lambda self, sequences: None)
    else:
        monkeypatch.delattr(f"openrlhf.models.ring_attn_utils.{name}")
    with pytest.raises(ImportError, match=message):
        enable()


def test_a_router_is_refused(tmp_path, make_actor):
    sizes = {"vocab_size": 259, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    MixtralForCausalLM(MixtralConfig(**sizes, **heads)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="MixtralForCausalLM has a router"):
        make_actor(tmp_path, fused=True)
