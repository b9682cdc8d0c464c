"""Whole weights out of shards: bit for bit, whatever the bucket, in bounded memory."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rlft_fast.engine import FSDPEngine
from rlft_fast.engine.weight_sync import Piece, Source, checksum, join_pieces, split_pieces, stream_pieces
from rlft_fast.models import checkpoint_parts, load_policy, low_rank_factors
from rlft_fast.models.weights import checkpoint_tensors
from tests.engine import reference
from tests.engine.models.every_architecture import MODEL_TYPES, built_model
from tests.engine.reference import full, make_engine, policy_loss, random_batch
from tests.support.machine.distributed import run_distributed

# Every weight is cut many times, some are, and all fit at once.
BUCKETS = [1000, 30_000, 2**20]
# By name: a model, its configuration, and whether ranks share one copy.
CASES = {
    "untied": ("llama", {}),
    "tied": ("qwen2-tied", {}),
    "masters": ("llama", {"param_dtype": "bfloat16", "compute_dtype": "bfloat16"}),
    "replicated": ("llama", {"shard_size": 1}),
    "lora": ("qwen2-tied", {"lora": {"rank": 4, "alpha": 8}}),
    "lora-head": ("llama", {"lora": {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "lm_head"]}}),
    "experts": ("deepseek-v3", {}),  # of a layer in one tensor, and a buffer that is no parameter
    "renamed": ("mixtral", {}),  # whose checkpoints call their layers otherwise
    "transposed": ("qwen3-vl-moe", {}),  # whose published checkpoints have the matrices of experts the other way round
}


def trained(path: Path, config: dict) -> FSDPEngine:
    engine = make_engine(path, max_tokens=24, config=dict(config), optimizer={"learning_rate": 0.05})
    engine.train_step(random_batch(), policy_loss())
    engine.infer(random_batch(), ("logprob",))  # leaves weights gathered
    return engine


def gathered_one_by_one(engine: FSDPEngine, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """What the stream must hold, by a collective for each weight."""
    weights: dict[str, Tensor] = {}
    factors, seen = low_rank_factors(engine.model), []
    for name, tensor in checkpoint_tensors(engine.model.pretrained).items():
        if any(tensor is other for other in seen):
            continue
        seen.append(tensor)
        weight = full(engine.optimizer.state.get(tensor, {}).get("master", tensor).detach())
        if name in factors:
            up, down, scale = factors[name]
            weight = weight + scale * (full(up).detach() @ full(down).detach())
        cast = dtype is not None and isinstance(tensor, torch.nn.Parameter)
        weights[name] = weight.to(dtype) if cast else weight
    written = revert_weight_conversion(engine.model.pretrained, weights)  # as save_pretrained writes them
    # transformers reads both ways, and keeps the model's own where it writes. vLLM reads the published one alone.
    is_transposed = engine.model.pretrained.config.model_type == "qwen3_vl_moe"
    return {
        name: weight.transpose(1, 2) if is_transposed and ".experts." in name else weight
        for name, weight in written.items()
    }


def check_stream(engine: FSDPEngine) -> None:
    for dtype in (None, torch.bfloat16):
        expected = gathered_one_by_one(engine, dtype)
        for bucket_bytes in BUCKETS:
            stream = engine.weight_stream(dtype, bucket_bytes)
            found = dict(stream.tensors())
            # vLLM takes what follows each other for what it was told to expect.
            assert [(name, w.dtype, w.shape) for name, w in found.items()] == stream.metadata()
            pieces = engine.weight_stream(dtype, bucket_bytes).pieces()
            reference.assert_equal(dict(join_pieces(pieces)), found)
            if engine.config.lora is None:
                reference.assert_equal(found, expected)
            else:  # the product of the factors is rounded otherwise where it is taken by rows
                reference.assert_close(found, expected, 1e-6 if dtype is None else 2**-8)


@pytest.mark.parametrize("case", CASES)
def test_one_process(case, tiny_model):
    name, config = CASES[case]
    check_stream(trained(tiny_model(name), config))


# Their checkpoints have tensors that are made of several: queries, keys and values, gates and what they gate, or the
# experts of text and of images.
SHARED = ["hrm_text", "ernie4_5_vl_moe", "qianfan_ocr", "step3p7", "kimi_k25"]
REORDERED = {
    "step3p7": ".attn.in_proj_",
    "kimi_k25": ".wqkv.",
}  # their rows are in another order: they stay as they are


def as_in_its_checkpoint(model: PreTrainedModel) -> dict[str, Tensor]:
    weights = checkpoint_tensors(model)
    whole = (Piece(name, x.shape, 0, x.detach().flatten(), borrowed=False) for name, x in weights.items())
    return dict(join_pieces(split_pieces(whole, checkpoint_parts(model))))


@pytest.mark.parametrize("model_type", SHARED)
def test_tensors_of_the_checkpoint_that_are_made_of_several(model_type, tmp_path):
    model = built_model(model_type)
    for x in checkpoint_tensors(model).values():
        x.data = x.data if x.any() else torch.randn_like(x)  # biases of routers begin at 0
    model.save_pretrained(tmp_path)
    stored, written = load_file(tmp_path / "model.safetensors"), as_in_its_checkpoint(model)
    kept = {name for name in stored if REORDERED.get(model_type, " ") in name}
    assert bool(kept) == (model_type in REORDERED)
    for name in stored.keys() - kept:
        assert torch.equal(written[name], stored[name]), name
    save_file({name: x.clone() for name, x in written.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    reference.assert_equal(dict(checkpoint_tensors(load_policy(tmp_path).model)), dict(checkpoint_tensors(model)))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_architecture_is_written_as_transformers_writes_it(model_type):
    try:
        model = built_model(model_type)
    except AssertionError:
        pytest.skip("no small model can be built")
    weights = {name: tensor.detach() for name, tensor in checkpoint_tensors(model).items()}
    stored, written = revert_weight_conversion(model, dict(weights)), as_in_its_checkpoint(model)
    kept = {name for name in stored if REORDERED.get(model_type, " ") in name}
    assert written.keys() - stored.keys() <= (weights.keys() if kept else set())
    for name in stored.keys() - kept:  # transformers keeps its own order of these experts, see `gathered_one_by_one`
        is_transposed = model_type == "qwen3_vl_moe" and ".experts." in name
        assert torch.equal(written[name], stored[name].mT if is_transposed else stored[name]), name


def test_a_tensor_of_the_checkpoint_without_the_part_of_one(tmp_path):
    """transformers converts what there is, and the other bias would have no values. Its release 5.15 fails instead."""
    model = built_model("ernie4_5_vl_moe")
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    cut = {name: x[:1].clone() for name, x in stored.items() if name.endswith("e_score_correction_bias")}
    save_file(stored | cut, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"(have nothing for|that make up) .*_moe\.gate\.moe_statics\.e_score"):
        load_policy(tmp_path)


def check_on_two(rank: int, folder: Path, memory: bool) -> None:
    for name, config in CASES.values():
        engine = trained(folder / name, config)
        check_stream(engine)
        own = {name: checksum(weight) for name, weight in engine.named_weights(torch.bfloat16)}
        every: list = [None, None]
        dist.all_gather_object(every, own)
        assert every[0] == every[1]
    check_pieces(rank)
    if memory:
        check_memory()


def check_pieces(rank: int) -> None:
    """Rows that do not come out even, fewer rows than ranks, and no element twice."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    wholes = {f"{rows}x{width}": torch.randn(rows, width) for rows in (1, 3, 8) for width in (1, 7)}
    sources = [Source(n, distribute_tensor(w, mesh, [Shard(0)]), torch.float32) for n, w in wholes.items()]
    sources.append(Source("whole", torch.arange(5), torch.int64))
    for bucket_bytes in (32, 100, 10_000):
        filled = {name: torch.zeros(whole.numel()) for name, whole in wholes.items()} | {"whole": torch.zeros(5)}
        for piece in stream_pieces(sources, bucket_bytes, torch.device("cpu")):
            assert not piece.borrowed or piece.data.nbytes <= bucket_bytes
            filled[piece.name][piece.offset : piece.offset + len(piece.data)] += piece.data
        for name, whole in wholes.items():
            assert torch.equal(filled[name].view(whole.shape), whole), (name, bucket_bytes, rank)


def check_memory() -> None:
    """With a bucket of 8 MiB, 100 MiB of weights, one of them of five buckets, cost two of them beyond the shards.

    One is gloo's, whose threads may drop it late, which only adds.
    """
    from tests.support.machine.memory import peak_mib

    mesh = init_device_mesh("cpu", (2,))
    sizes = [5 * 2**20, 1000, *[2**18] * 16, 5 * 2**18, *[2**17] * 8]
    sources = [
        Source(str(i), distribute_tensor(torch.ones(size, 2), mesh, [Shard(0)]), torch.float32)
        for i, size in enumerate(sizes)
    ]

    def stream() -> None:
        total = 0.0
        for piece in stream_pieces(sources, 8 * 2**20, torch.device("cpu")):
            total += float(piece.data.sum())
        assert total == 2 * sum(sizes)

    assert min(peak_mib(stream) for _ in range(3)) < 16 + 1
    small = [source for source in sources if source.tensor.numel() * 4 <= 8 * 2**20]

    def join() -> None:
        for name, whole in join_pieces(stream_pieces(small, 8 * 2**20, torch.device("cpu"))):
            assert whole.shape == (sizes[int(name)], 2)

    # And the weight that is used and the one that is made.
    assert min(peak_mib(join) for _ in range(3)) < 16 + 2 * 2 + 1


@pytest.mark.dist
@pytest.mark.slow
def test_two_processes(tiny_model):
    folder = {tiny_model(name).parent for name, _ in CASES.values()}.pop()
    run_distributed(check_on_two, 2, folder, sys.platform == "linux")


def test_checksum_sees_bytes_shape_and_dtype():
    weight = torch.randn(4, 6)
    changed = weight.clone().index_fill_(0, torch.tensor(3), 0)
    others = [weight.T.contiguous(), weight.view(6, 4), weight.double(), changed]
    assert checksum(weight.T.contiguous().T) == checksum(weight)
    assert checksum(weight) not in {checksum(other) for other in others}
    assert checksum(torch.tensor(0.0)) != checksum(torch.tensor(-0.0))
