"""From a batch to micro-batches and model inputs, and back, without a model's forward pass."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    GPT2Config,
    GPT2Model,
    GPTJConfig,
    GPTJModel,
    LlamaConfig,
    LlamaModel,
    OPTConfig,
    OPTModel,
    Phi3Config,
    Phi3Model,
    PreTrainedModel,
)

from rlft_fast.data import Batch, Images, image_table, plan_batch, share_prefixes
from rlft_fast.engine.forward import (
    bucket,
    check_batch,
    prepare_micro_batches,
    prepare_model_inputs,
    prepare_model_outputs,
)
from rlft_fast.models import load_policy, position_limit
from rlft_fast.models.packed import final_hidden
from tests.engine.reference import plain_model, random_batch, random_image_batch
from tests.support.tiny_models import IMAGE_TOKEN_ID, PICTURE_MODELS

CPU = torch.device("cpu")


@settings(max_examples=60)
@given(
    num_sequences=st.integers(0, 12),
    seed=st.integers(0, 99),
    max_tokens=st.integers(22, 90),  # 22 is the longest sequence
    world_size=st.integers(1, 5),
)
def test_micro_batches_of_all_ranks_are_the_batch_under_the_cap(num_sequences, seed, max_tokens, world_size):
    batch = random_batch(num_sequences, seed)
    batch = batch.replace(group_B=torch.arange(batch.num_sequences))
    plan = plan_batch(batch, max_tokens, world_size)
    ranks = [prepare_micro_batches(batch, plan, rank) for rank in range(world_size)]
    assert {len(micro_batches) for micro_batches in ranks} == {plan.num_micro_batches}
    micro_batches = [micro_batch for rank in ranks for micro_batch in rank]
    assert sorted(torch.cat([x.group_B for x in micro_batches]).tolist()) == list(range(batch.num_sequences))
    assert all(len(share_prefixes(x).token_index_U) <= max_tokens for x in micro_batches)
    for micro_batch in micro_batches:
        tokens = batch.input_ids_T.split(batch.lengths.tolist())
        wanted = [tokens[i] for i in micro_batch.group_B]
        assert torch.equal(micro_batch.input_ids_T, torch.cat([batch.input_ids_T[:0], *wanted]))


def test_a_change_of_meta_shows_nowhere_else():
    batch = random_batch().replace(meta={"step": 3, "nested": {"seen": []}})
    micro_batches = prepare_micro_batches(batch, plan_batch(batch, 24), 0)
    assert len(micro_batches) > 2
    micro_batches[0].meta["nested"]["seen"].append("here")
    micro_batches[0].meta["step"] = 4
    assert all(x.meta == {"step": 3, "nested": {"seen": []}} for x in [batch, *micro_batches[1:]])


def test_inputs_and_outputs_are_at_the_active_positions(tiny_model):
    batch, backbone = random_batch(), load_policy(tiny_model("llama")).backbone
    inputs = prepare_model_inputs(batch, CPU, backbone=backbone)
    assert torch.equal(inputs.output_index_A, batch.active_index_T)
    assert torch.equal(inputs.target_A, batch.input_ids_T[batch.active_index_T + 1])
    # What a row holds is the token of the position that its output belongs to.
    assert torch.equal(inputs.input_ids_U[inputs.active_index_A], batch.input_ids_T[inputs.output_index_A])
    assert torch.equal(inputs.position_ids_U[inputs.active_index_A], batch.position_ids_T[inputs.output_index_A])
    values = torch.arange(1.0, len(inputs.target_A) + 1)
    outputs = prepare_model_outputs(values, batch, inputs.output_index_A)
    assert torch.equal(outputs[batch.loss_mask_T], values)
    assert not outputs[~batch.loss_mask_T].any()


def test_completions_may_be_shorter_than_what_they_attend_to(tiny_model):
    batch = Batch.from_samples([[1, 2, 3, 4]] * 2, [[5, 6, 7], [8, 9]])
    inputs = prepare_model_inputs(batch, CPU, backbone=load_policy(tiny_model("llama")).backbone)
    assert inputs.cu_seqlens_q.tolist() == [0, 4, 6, 7]
    assert inputs.cu_seqlens_k.tolist() == [0, 4, 10, 15]
    assert (inputs.max_seqlen_q, inputs.max_seqlen_k) == (4, 6)


@pytest.mark.parametrize("num_sequences", [0, 7])
def test_a_micro_batch_without_an_active_position_is_one_row(tiny_model, num_sequences):
    batch, backbone = random_batch(num_sequences), load_policy(tiny_model("llama")).backbone
    batch = batch.replace(loss_mask_T=torch.zeros_like(batch.loss_mask_T))
    inputs = prepare_model_inputs(batch, CPU, backbone=backbone)
    assert inputs.input_ids_U.tolist() == inputs.position_ids_U.tolist() == [0]
    assert inputs.cu_seqlens_q.tolist() == inputs.cu_seqlens_k.tolist() == [0, 1]
    assert (inputs.max_seqlen_q, inputs.max_seqlen_k, len(inputs.target_A)) == (1, 1, 0)


# ---- buckets --------------------------------------------------------------------------------------------------------


def test_buckets_are_few_and_little_larger():
    found = [bucket(size) for size in range(1, 16385)]
    assert all(size <= each < size + max(64, size / 32) for size, each in enumerate(found, 1))
    assert len(set(found)) == 2048 // 64 + 3 * 32


@pytest.mark.parametrize("name", ["llama", "qwen2-sliding"])
def test_padding_to_buckets_changes_no_number(name, tiny_model):
    model, batch = load_policy(tiny_model(name)).double(), random_batch()
    found = []
    for in_buckets in (False, True):
        inputs = prepare_model_inputs(batch, CPU, backbone=model.backbone, in_buckets=in_buckets)
        model.zero_grad()
        result = model(inputs, temperature=0.7, return_entropy=True)
        (result.logprob.double() * torch.linspace(-1, 1, len(inputs.target_A)) + result.entropy).sum().backward()
        gradients = {name: x.grad for name, x in model.named_parameters()}
        found.append({"logprob": result.logprob, "entropy": result.entropy} | gradients)
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=1e-12, atol=1e-12)


def test_sizes_in_buckets_come_again(tiny_model):
    """Batches of 3 to 24 sequences, with and without tokens in common, have few sizes."""
    backbone = load_policy(tiny_model("llama")).backbone
    sizes = set()
    for number in range(3, 25):
        for seed in range(3):
            inputs = prepare_model_inputs(random_batch(number, seed), CPU, backbone=backbone, in_buckets=True)
            tensors = (inputs.input_ids_U, inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.key_index.index_M)
            sizes.add((*map(len, tensors), inputs.max_seqlen_q, inputs.max_seqlen_k))
            assert len(inputs.cu_seqlens_q) == len(inputs.cu_seqlens_k)
            assert inputs.cu_seqlens_q[-1] == len(inputs.input_ids_U)
            assert inputs.cu_seqlens_k[-1] == len(inputs.key_index.index_M)
    assert len(sizes) < 22


# ---- images ---------------------------------------------------------------------------------------------------------


def test_positions_and_features_are_those_of_each_sequence_alone(tiny_model):
    batch, backbone = random_image_batch(), load_policy(tiny_model("qwen2-vl")).backbone
    inputs = prepare_model_inputs(batch, CPU, backbone=backbone)
    layout = share_prefixes(batch)
    merged = 0
    for b, (start, length) in enumerate(zip(batch.cu_seqlens.tolist(), batch.lengths.tolist(), strict=False)):
        ids = batch.input_ids_T[start : start + length]
        is_image = (ids == backbone.config.image_token_id).long()
        grid = None if (own := batch.images_B[b]) is None else own.inputs["image_grid_thw"]
        positions, _ = backbone.get_rope_index(ids[None], mm_token_type_ids=is_image[None], image_grid_thw=grid)
        rows = layout.row_T[start : start + length]
        assert torch.equal(inputs.position_ids_U[:, rows[rows >= 0]], positions[:, 0, rows >= 0])
        image_rows = rows[is_image.bool()]
        num_rows = len(inputs.input_ids_U)
        features = inputs.images.source_index_U[image_rows] - num_rows
        assert torch.equal(features, merged + torch.arange(len(image_rows)))
        merged += len(image_rows)
    assert inputs.images.tower["pixel_values"].shape[0] == 4 * merged


def test_the_vision_tower_has_a_gradient_of_zeros_without_images(tiny_model):
    model = load_policy(tiny_model("qwen2.5-vl"))
    batch = random_image_batch().select([0, 3])  # those without images
    model(prepare_model_inputs(batch, CPU, backbone=model.backbone)).logprob.sum().backward()
    for name, parameter in model.backbone.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.any() != name.startswith("visual."), name


@pytest.mark.parametrize("name", [*PICTURE_MODELS])
def test_a_batch_without_images_runs_the_tower_on_a_blank_one(tiny_model, name):
    model = load_policy(tiny_model(name))
    batch = random_image_batch(name=name).select([0, 3])
    model(prepare_model_inputs(batch, CPU, backbone=model.backbone)).logprob.sum().backward()
    tower = [x for part, x in model.backbone.named_parameters() if part.startswith("vision") and x.grad is not None]
    assert tower
    assert not any(x.grad.any() for x in tower)


def test_an_image_of_one_token(tiny_model):
    """Mistral 3 alone has images as small. The forward of transformers fails if no other image is beside them."""
    path = tiny_model("mistral3")
    model, backbone = load_policy(path), plain_model(path).model
    inputs = {"pixel_values": torch.randn(1, 3, 4, 4), "image_sizes": torch.tensor([[4, 4]])}
    batch = Batch.from_samples([[7, IMAGE_TOKEN_ID, 8]], [[1, 2]], images=[Images("a", inputs)])
    found = final_hidden(model.backbone, prepare_model_inputs(batch, CPU, backbone=model.backbone))
    with torch.no_grad():
        beside = torch.cat([inputs["pixel_values"], torch.zeros(1, 3, 4, 4)]).double()
        features = backbone.get_image_features(beside, image_sizes=torch.tensor([[4, 4], [4, 4]])).pooler_output[0]
        embeddings = backbone.get_input_embeddings()(batch.input_ids_T)
        embeddings[1] = features[0]
        expected = backbone.language_model(inputs_embeds=embeddings[None]).last_hidden_state[0, : len(found)]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


def test_a_sampled_image_token_is_a_token_like_any_other(tiny_model):
    batch, backbone = random_image_batch(), load_policy(tiny_model("qwen2-vl")).backbone
    check_batch(batch, backbone)
    before = prepare_model_inputs(batch, CPU, backbone=backbone)
    ids = batch.input_ids_T.clone()
    ids[batch.active_index_T[0] + 1] = backbone.config.image_token_id
    sampled = batch.replace(input_ids_T=ids)
    # A run may compute some of the log-probabilities: the mask then leaves sampled tokens out.
    left_out = batch.loss_mask_T.clone()
    left_out[batch.active_index_T[0]] = False
    for each in (sampled, sampled.replace(loss_mask_T=left_out)):
        check_batch(each, backbone)
        after = prepare_model_inputs(each, CPU, backbone=backbone)
        assert torch.equal(after.images.source_index_U, before.images.source_index_U)
        assert torch.equal(after.position_ids_U, before.position_ids_U)


def test_samples_of_a_prompt_share_its_images(tiny_model):
    """Images of one number run once, and give what images of other numbers give."""
    model = load_policy(tiny_model("qwen2.5-vl"))
    few = random_image_batch().select([1, 2, 0, 2, 1, 1, 4])
    each = [None if own is None else Images(f"{b}", own.inputs) for b, own in enumerate(few.images_B)]
    copies = few.replace(**image_table(each))
    found = []
    for batch in (few, copies):
        inputs = prepare_model_inputs(batch, CPU, backbone=model.backbone)
        logprob = model(inputs).logprob
        gradient = torch.autograd.grad(logprob.square().sum(), model.backbone.visual.parameters())
        found.append((inputs, logprob, *gradient))
    (shared, *actual), (repeated, *expected) = found
    assert len(shared.input_ids_U) < len(repeated.input_ids_U)
    assert shared.images.tower["pixel_values"].shape[0] == 8 + 56 + 8
    assert repeated.images.tower["pixel_values"].shape[0] == 2 * (8 + 56 + 8)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def image_batch(ids: list[int], grid: list, num_patches: int, **more) -> Batch:
    inputs = {"pixel_values": torch.zeros(num_patches, 24), "image_grid_thw": torch.tensor(grid)}
    return Batch.from_samples([ids], [[1, 2]], images=[Images("a", inputs | more)])


def test_parts_of_images_run_once(tiny_model):
    """Two sequences begin with one image, then each shows its own; their log-probabilities are those of whole sets."""
    model, generator = load_policy(tiny_model("qwen2-vl")), torch.Generator().manual_seed(0)
    grid = torch.tensor([[1, 2, 4]])
    first, *own = [
        Images(x, {"pixel_values": torch.randn(8, 24, generator=generator), "image_grid_thw": grid}) for x in "abc"
    ]
    in_parts = [first, *(Images(x.key, x.inputs, before=first) for x in own)]
    whole = [Images(f"a{x.key}", {k: torch.cat([first.inputs[k], v]) for k, v in x.inputs.items()}) for x in own]
    shown = [7, IMAGE_TOKEN_ID, IMAGE_TOKEN_ID, 8]
    prompts = [[5, *shown], *[[5, *shown, 20, *shown]] * 2]
    found = []
    for images in (in_parts, [first, *whole]):
        batch = Batch.from_samples(prompts, [[1, 2, 3]] * 3, images=images)
        check_batch(batch, model.backbone)
        found.append(prepare_model_inputs(batch, CPU, backbone=model.backbone))
    parts, sets = found
    assert [x.images.tower["pixel_values"].shape[0] for x in found] == [24, 40]
    assert torch.equal(parts.position_ids_U, sets.position_ids_U)
    torch.testing.assert_close(model(parts).logprob, model(sets).logprob, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            image_batch([7, 258, 258, 258, 8], [[1, 2, 4]], 8),
            r"sequence 0 has 8 patches and runs of \[3\] image tokens",
        ),
        (image_batch([7, 258, 258, 8], [[1, 2, 4]], 4), r"sequence 0 has 4 patches and runs of \[2\] image tokens"),
        (image_batch([258, 258], [[1, 2, 2], [1, 2, 2]], 8), "and text between images"),
        (image_batch([258], [[1, 2, 2]], 4, pixel_values_videos=None), "pixel_values_videos: expected"),
    ],
)
def test_images_that_do_not_fit_are_refused(tiny_model, batch, message):
    backbone = load_policy(tiny_model("qwen2-vl")).backbone
    with pytest.raises(ValueError, match=message):
        check_batch(batch, backbone)


def test_a_token_of_an_image_is_not_taught_where_it_sees_later_ones(tiny_model):
    """Gemma 3: behind the last taught token nothing runs, not even the rest of an image."""
    backbone = load_policy(tiny_model("gemma3-vision")).backbone
    images = [None, Images("a", {"pixel_values": torch.zeros(1, 3, 8, 8)})]
    whole = [7, *[IMAGE_TOKEN_ID] * 4, 8]
    check_batch(Batch.from_samples([[1], whole], [[2], [3]], images=images), backbone)
    check_batch(
        Batch.from_samples(
            [[1], [7]], [[2], whole[1:]], completion_masks=[[True], [True] + [False] * 4], images=images
        ),
        backbone,
    )
    with pytest.raises(
        ValueError, match=r"sequence 1 teaches token 3, .* image from token 1 to 4, .* out of loss_mask_T"
    ):
        check_batch(Batch.from_samples([[1], whole[:3]], [[2], whole[3:]], images=images), backbone)


def test_images_for_a_text_model_are_refused(tiny_model):
    with pytest.raises(ValueError, match="LlamaModel has no vision tower"):
        check_batch(random_image_batch(), load_policy(tiny_model("llama")).backbone)


def test_rotary_embeddings_that_depend_on_the_longest_sequence_are_refused():
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    }  # fmt: skip
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    limits = {"max_position_embeddings": 32, "original_max_position_embeddings": 8}
    backbone = Phi3Model(
        Phi3Config(**sizes, **limits, num_attention_heads=2, rope_parameters=rope, pad_token_id=0, eos_token_id=1)
    )
    check_batch(Batch.from_samples([[1]], [[2] * 7]), backbone)
    with pytest.raises(ValueError, match=r"have up to 9 tokens, but the longrope .* of Phi3Model change beyond 8"):
        check_batch(Batch.from_samples([[1]], [[2] * 8]), backbone)


WITH_TABLES: list[PreTrainedModel] = [
    GPT2Model(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2)),
    GPTJModel(GPTJConfig(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2, rotary_dim=4)),
    OPTModel(OPTConfig(vocab_size=32, max_position_embeddings=8, hidden_size=8, ffn_dim=8, num_hidden_layers=1,
                       num_attention_heads=2)),
]  # fmt: skip


@pytest.mark.parametrize("backbone", WITH_TABLES, ids=lambda model: type(model).__name__)
def test_sequences_longer_than_a_table_of_positions_are_refused(backbone):
    """On a GPU a look-up behind its end would end the process without a reason."""
    ids = torch.full((1, 9), 3)
    backbone(input_ids=ids[:, :8])
    check_batch(Batch.from_samples([[1]], [[2] * 7]), backbone)
    with pytest.raises((IndexError, RuntimeError)):
        backbone(input_ids=ids)
    with pytest.raises(ValueError, match=r"have up to 9 tokens, but \w+Model has embeddings of 8 positions: limit"):
        check_batch(Batch.from_samples([[1]], [[2] * 8]), backbone)
    assert position_limit(backbone) == 8


def test_rotary_positions_do_not_end():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    backbone = LlamaModel(LlamaConfig(**sizes, vocab_size=32, max_position_embeddings=8))
    check_batch(Batch.from_samples([[1]], [[2] * 8]), backbone)
    assert position_limit(backbone) is None
