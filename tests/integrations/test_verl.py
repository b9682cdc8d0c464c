"""rlft_fast.integrations.verl in verl's own FSDP engine, whose unfused head is the reference: make test-peers."""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5_vl
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl

from tests.support.tiny_models import IMAGE_TOKEN_ID

if VERL := importlib.util.find_spec("verl"):
    import verl.models.transformers.monkey_patch as monkey_patch
    from tensordict import TensorDict
    from verl.plugin.platform.platform_base import PlatformBase
    from verl.plugin.platform.platform_manager import set_platform

pytestmark = [pytest.mark.peers, pytest.mark.skipif(VERL is None, reason="no verl: make test-peers")]

PROMPTS, RESPONSES = torch.tensor([3, 5, 2, 6]), torch.tensor([6, 4, 7, 3])
TEMPERATURE = 0.7


def cpu_platform() -> "PlatformBase":
    """verl has none for CPUs, and takes those of others."""
    members = dict.fromkeys(PlatformBase.__abstractmethods__) | {  # nobody here asks for the others
        "device_name": "cpu",
        "vendor_name": "cpu",
        "device_module": SimpleNamespace(
            empty_cache=lambda: None, synchronize=lambda: None, current_device=lambda: 0, is_available=lambda: True,
            memory_allocated=lambda: 0, memory_reserved=lambda: 0, max_memory_allocated=lambda: 0,
            max_memory_reserved=lambda: 0, mem_get_info=lambda: (0, 1),
        ),
        "is_available": lambda self: True,
        "current_device": lambda self: torch.device("cpu"),
        "communication_backend_name": lambda self: "gloo",
    }  # fmt: skip
    return type("CPU", (PlatformBase,), members)()


def verl_on_a_cpu() -> Iterator[None]:
    set_platform(cpu_platform())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monkey_patch, "is_trl_available", lambda: False)  # verl looks in TRL for what ours no longer has
        patch.setattr(monkey_patch, "patch_forward_with_backends", monkey_patch.patch_forward_with_backends)
        patch.setattr("verl.utils.experimental.torch_functional.FusedLinearForPPO", None)  # verl's kernel
        yield


here = pytest.fixture(verl_on_a_cpu, scope="module", autouse=True)
SGD = {"optimizer": "SGD", "clip_grad": 1e9}


def make_engine(folder: Path, *, fused: bool, packed: bool = True, optimizer: dict = SGD, **model):
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    precision = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = FSDPEngineWithLMHead(
        HFModelConfig(
            path=str(folder), external_lib="rlft_fast.integrations.verl" if fused else None, load_tokenizer=False,
            enable_gradient_checkpointing=False, override_config={"attn_implementation": "sdpa"},
            use_remove_padding=packed, **model,
        ),
        FSDPEngineConfig(
            strategy="fsdp2", model_dtype="fp32", mixed_precision=precision, use_torch_compile=False,
            use_remove_padding=packed,
        ),
        FSDPOptimizerConfig(lr=1e-2, weight_decay=0.01, total_training_steps=10, **optimizer),
        CheckpointConfig(),
    )  # fmt: skip
    torch.manual_seed(0)  # adapters start at random
    engine.initialize()
    return engine


def make_batch(engine, *, packed: bool = True) -> "TensorDict":
    """As verl's trainer hands it to its workers: prompts padded on the left, responses on the right, then unpadded."""
    from verl.utils.tensordict_utils import assign_non_tensor
    from verl.workers.utils.padding import left_right_2_no_padding

    generator = torch.Generator().manual_seed(0)
    columns = torch.arange(PROMPTS.max() + RESPONSES.max()) - PROMPTS.max()
    mask = (columns >= -PROMPTS[:, None]) & (columns < RESPONSES[:, None])
    ids = torch.randint(0, 256, mask.shape, generator=generator).masked_fill(~mask, 0)
    responses = (len(PROMPTS), int(RESPONSES.max()))
    batch = left_right_2_no_padding(TensorDict({
        "input_ids": ids, "attention_mask": mask.long(), "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0),
        "prompts": ids[:, : -responses[1]], "responses": ids[:, -responses[1] :],
        "response_mask": mask[:, -responses[1] :].long(), "advantages": torch.randn(responses, generator=generator),
        "old_log_probs": -5 + 0.1 * torch.randn(responses, generator=generator),
    }, batch_size=len(PROMPTS)))  # fmt: skip
    assign_non_tensor(
        batch, calculate_entropy=True, compute_loss=True, use_remove_padding=packed, use_dynamic_bsz=False,
        use_fused_kernels=engine.engine_config.use_fused_kernels,  # as verl's TrainingWorker does
        micro_batch_size_per_gpu=2, temperature=TEMPERATURE, global_batch_size=len(PROMPTS),
    )  # fmt: skip
    return batch


def train(engine, **options) -> dict:
    """A step with verl's PPO loss and an entropy bonus; returns the engine's metrics."""
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    config = ActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=2, entropy_coeff=0.1, use_dynamic_bsz=False
    )
    with engine.train_mode():
        return engine.train_batch(make_batch(engine, **options), partial(ppo_loss, config=config))["metrics"]


def gradients(engine, **options) -> dict[str, Tensor]:
    """verl frees them as soon as it has stepped."""
    kept = {}

    def keep(*_) -> None:
        named = engine.module.named_parameters()
        kept.update({name: each.grad.full_tensor().clone() for name, each in named if each.grad is not None})

    engine.optimizer.register_step_pre_hook(keep)
    train(engine, **options)
    return kept


def scores(engine, **options) -> Tensor:
    """(2, tokens): log-probabilities and entropies, without the last of each sequence, which predicts nothing."""
    with engine.eval_mode():
        output = engine.infer_batch(make_batch(engine, **options))["model_output"]
    rows = zip(output["log_probs"].unbind(), output["entropy"].unbind(), strict=True)
    return torch.cat([torch.stack(row)[:, :-1] for row in rows], dim=1)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen2", {}),
        ("llama-tied", {}),
        ("gemma2", {}),  # caps its logits, which verl's own kernels do not
        ("llama-tied", {"lora_rank": 2}),
    ],
)
def test_scores_and_gradients_are_those_of_verl(name, options, packed, tiny_model):
    theirs, ours = (make_engine(tiny_model(name), fused=fused, packed=packed, **options) for fused in (False, True))
    expected, actual = (scores(each, packed=packed) for each in (theirs, ours))
    assert actual.shape == (2, (PROMPTS + RESPONSES - 1).sum())
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    expected, actual = (gradients(each, packed=packed) for each in (theirs, ours))
    assert actual.keys() == expected.keys()
    assert max(gradient.abs().max() for gradient in actual.values()) > 0.01
    for key, gradient in expected.items():
        scale = gradient.abs().max()  # a sum over 20 tokens, each of float32 precision
        torch.testing.assert_close(actual[key], gradient, rtol=0, atol=1e-5 * scale, msg=lambda m, k=key: k + m)


def scores_in_a_worker(folder: Path) -> Tensor:
    with contextlib.contextmanager(verl_on_a_cpu)():
        return scores(make_engine(folder, fused=True))


def test_a_ray_worker_needs_the_same_line_alone(tiny_model):
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # wheels of others have a package named tests
    expected = scores(make_engine(tiny_model("qwen2"), fused=False))
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20)
    try:
        actual = ray.get(ray.remote(scores_in_a_worker).remote(tiny_model("qwen2")))
    finally:
        ray.shutdown()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def without_a_parameter(model, fused_kernels_backend=None) -> None: ...


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, r"verl 0.9.1 has no .*monkey_patch:patch_forward_with_backends \(.*, expected verl 0.9.1: install"),
        (without_a_parameter, r"has a .*patch_forward_with_backends without the parameter use_fused_kernels, expected"),
    ],
)
def test_a_version_without_the_seam_is_refused(version, message, monkeypatch):
    module = importlib.import_module("rlft_fast.integrations.verl")
    monkeypatch.delattr(monkey_patch, "patch_forward_with_backends")
    if version is not None:
        monkeypatch.setattr(monkey_patch, "patch_forward_with_backends", version, raising=False)
    with pytest.raises(ImportError, match=message):
        module.enable()


def test_images_reach_a_model_whose_forward_verl_replaces(tiny_model, monkeypatch):
    for each in (qwen2_vl.Qwen2VLModel, qwen2_vl.Qwen2VLForConditionalGeneration,
                 qwen2_5_vl.Qwen2_5_VLModel, qwen2_5_vl.Qwen2_5_VLForConditionalGeneration):  # fmt: skip
        monkeypatch.setattr(each, "forward", each.forward)
    theirs, ours = (AutoModelForImageTextToText.from_pretrained(tiny_model("qwen2-vl")) for _ in range(2))
    importlib.import_module("rlft_fast.integrations.verl")
    for model, fused in ((theirs, False), (ours, True)):
        monkey_patch.apply_monkey_patch(model, use_remove_padding=False, use_fused_kernels=fused)
    inputs = {
        "input_ids": torch.tensor([[5, IMAGE_TOKEN_ID, IMAGE_TOKEN_ID, 7, 8, 9]]), "attention_mask": torch.ones(1, 6),
        "position_ids": torch.arange(6).expand(4, 1, 6), "pixel_values": torch.randn(8, 24),
        "image_grid_thw": torch.tensor([[1, 2, 4]]),
    }  # fmt: skip
    with torch.no_grad():
        log_p = (theirs(**inputs).logits / TEMPERATURE).log_softmax(-1)
        actual = ours(**inputs, temperature=TEMPERATURE, return_dict=True)
        blank = ours(**inputs | {"pixel_values": torch.zeros(8, 24)}, temperature=TEMPERATURE, return_dict=True)
    expected = log_p[0, :-1].gather(-1, inputs["input_ids"][0, 1:, None])[:, 0]
    torch.testing.assert_close(actual.log_probs[0, :-1], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(actual.entropy, -(log_p.exp() * log_p).sum(-1), rtol=0, atol=1e-5)
    assert (actual.log_probs - blank.log_probs).abs().max() > 0.01


@pytest.mark.parametrize("fused", [False, True])
def test_an_adapter_on_the_head_cannot_be_sharded_by_verl(fused, tiny_model):
    """With the patch and without it, FSDP2 raises at PEFT's layer."""
    with pytest.raises(TypeError, match="'FSDPLinear' object layout differs from 'Linear'"):
        make_engine(tiny_model("qwen2"), fused=fused, lora_rank=2, target_modules=["q_proj", "lm_head"])


def test_adamw_by_configuration(tiny_model):
    fused = {"optimizer_impl": "rlft_fast.ops", "optimizer": "FusedAdamW"}
    theirs, ours = (make_engine(tiny_model("qwen2"), fused=True, optimizer=each) for each in ({}, fused))
    before = scores(ours)
    assert type(theirs.optimizer) is torch.optim.AdamW
    assert type(ours.optimizer).__name__ == "FusedAdamW"
    for _ in range(3):
        expected, actual = train(theirs), train(ours)
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    expected, actual = scores(theirs), scores(ours)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    assert (actual - before).abs().max() > 0.1
