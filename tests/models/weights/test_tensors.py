"""Weights are read into shards: values are right for every architecture, and no process ever holds a whole model."""

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from rlft_fast.models.weights import build_on_meta, load_weights, materialize
from tests.support.machine.distributed import run_distributed

TEXT = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
CONFIGS = {
    "llama": LlamaConfig(**TEXT, tie_word_embeddings=False),
    "tied": LlamaConfig(**TEXT, tie_word_embeddings=True),
    "gemma3": Gemma3TextConfig(**TEXT, head_dim=8),  # scales its embeddings by a buffer
    # Their files hold experts one by one, the models hold them in one tensor.
    "qwen3-moe": Qwen3MoeConfig(**TEXT, **EXPERTS, num_experts=11, head_dim=8),  # experts.10 < experts.2 as text
    "deepseek": DeepseekV3Config(
        **(TEXT | {"num_key_value_heads": 4}), **EXPERTS, n_routed_experts=4, n_group=1, topk_group=1, q_lora_rank=8,
        kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
    ),
}  # fmt: skip


def save_random(config, folder: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(folder, max_shard_size="30KB")
    return folder


def build(config):
    return build_on_meta(lambda: AutoModelForCausalLM.from_config(config, dtype=torch.float32))


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request, tmp_path_factory):
    return save_random(CONFIGS[request.param], tmp_path_factory.mktemp(request.param))


def assert_same_state(model, folder: Path) -> PreTrainedModel:
    """Every parameter and buffer is that of plain transformers, bit for bit, and as much is tied.

    Returns:
        The plain model.
    """
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = dict(plain.named_parameters()) | dict(plain.named_buffers())
    actual = dict(model.named_parameters()) | dict(model.named_buffers())
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        own = actual[name]
        assert torch.equal(own.full_tensor() if isinstance(own, DTensor) else own, tensor), name
    return plain


def test_streamed_weights_are_those_of_transformers(folder):
    model = build(AutoModelForCausalLM.from_pretrained(folder).config)
    assert all(parameter.is_meta for parameter in model.parameters())
    materialize(model, torch.device("cpu"))
    load_weights(folder, model)
    assert_same_state(model, folder)


def test_a_layer_may_be_larger_than_the_memory():
    """The experts of one layer are 1 TB in float32, which the system does not even promise."""
    config = DeepseekV3Config(**CONFIGS["deepseek"].to_dict() | {"hidden_size": 2**14, "moe_intermediate_size": 2**21})
    model = build(config)
    assert sum(parameter.nbytes for parameter in model.parameters()) > 2**40
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_buffers_are_where_the_model_computes():
    """FSDP copies offloaded weights to the device, but not the buffers beside them."""
    model = build(CONFIGS["llama"])
    materialize(model, torch.device("cpu"), torch.device("meta"))
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}


def test_converted_to_the_dtype_of_the_model(tmp_path):
    save_random(CONFIGS["llama"], tmp_path)
    model = build_on_meta(lambda: AutoModelForCausalLM.from_config(CONFIGS["llama"], dtype=torch.bfloat16))
    materialize(model, torch.device("cpu"))
    load_weights(tmp_path, model)
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, wanted[name].bfloat16()), name


def check_shards(rank: int, world_size: int, folders: Path) -> None:
    """Rows that do not divide evenly, tensors of fewer rows than ranks, experts that are put together."""
    mesh = init_device_mesh("cpu", (world_size,))
    for name, config in CONFIGS.items():
        model = build(config)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        materialize(model, torch.device("cpu"))
        load_weights(folders / name, model)
        plain = assert_same_state(model, folders / name)
        ids = torch.arange(12)[None]
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.dist
def test_each_rank_reads_its_shards(tmp_path):
    for name, config in CONFIGS.items():
        save_random(config, tmp_path / name)
    run_distributed(check_shards, 3, 3, tmp_path)


# ---- memory ---------------------------------------------------------------------------------------------------------

BIG = LlamaConfig(
    vocab_size=20_000, hidden_size=512, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=8,
    tie_word_embeddings=False,
)  # fmt: skip
BIG_BYTES = 4 * (2 * 20_000 * 512 + 6 * (4 * 512 * 512 + 3 * 512 * 2048))


def anonymous_bytes() -> int:
    """Anonymous memory of this process. The system may drop the pages that safetensors maps at any time."""
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))


def check_memory(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    load_weights(folder.parent / "warm-up", _sharded(CONFIGS["llama"], mesh))  # imports and pools
    before = anonymous_bytes()
    peaks = []
    original = torch.Tensor.copy_

    def measured(self, *args, **kwargs):
        peaks.append(anonymous_bytes() - before)
        return original(self, *args, **kwargs)

    torch.Tensor.copy_ = measured
    model = _sharded(BIG, mesh)
    load_weights(folder, model)
    torch.Tensor.copy_ = original
    assert peaks
    largest = 4 * 20_000 * 512
    # Half of the model, and one whole tensor while the shards are filled.
    assert max(peaks) < BIG_BYTES / 2 + largest


def _sharded(config, mesh):
    model = build(config)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    materialize(model, torch.device("cpu"))
    return model


@pytest.mark.dist
def test_no_rank_ever_holds_the_model(tmp_path):
    save_random(CONFIGS["llama"], tmp_path / "warm-up")
    with torch.device("cpu"):
        LlamaForCausalLM(BIG).save_pretrained(tmp_path / "big", max_shard_size="30MB")
    run_distributed(check_memory, 2, tmp_path / "big")
