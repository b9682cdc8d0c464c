"""Heads and the models that end in them, against plain transformers."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    BertConfig,
    BertLMHeadModel,
    CohereConfig,
    CohereForCausalLM,
    ErnieConfig,
    ErnieForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    HyperCLOVAXConfig,
    HyperCLOVAXForCausalLM,
    LlamaConfig,
    LlamaModel,
    ModernBertDecoderConfig,
    ModernBertDecoderForCausalLM,
    PreTrainedModel,
)

from rlft_fast.models import (
    PACKED_ATTENTION,
    LogprobHead,
    ModelInputs,
    PolicyModel,
    ValueModel,
    load_policy,
    padded_attention,
)
from tests.support.gemms import multiplications, requires_mkl
from tests.support.machine.distributed import run_distributed
from tests.support.numerics import assert_close_to_rounding
from tests.support.tiny_models import MODELS

SIZES = {
    "vocab_size": 67, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip


def packed(lengths: list[int], active: list[int]) -> ModelInputs:
    generator = torch.Generator().manual_seed(3)
    total = sum(lengths)
    boundaries = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return ModelInputs(
        input_ids_U=torch.randint(0, 67, (total,), generator=generator),
        position_ids_U=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens_q=boundaries,
        cu_seqlens_k=boundaries,
        max_seqlen_q=max(lengths),
        max_seqlen_k=max(lengths),
        key_index=None,
        active_index_A=torch.tensor(active, dtype=torch.int64),
        target_A=torch.randint(0, 67, (len(active),), generator=generator),
        output_index_A=torch.tensor(active, dtype=torch.int64),
    )


def plain_logits(model: PreTrainedModel, inputs: ModelInputs, lengths: list[int]) -> torch.Tensor:
    """(T, V) logits of the whole model, transforms included, one sequence after the other."""
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        rows = [model(input_ids=part).logits[0] for part in inputs.input_ids_U[None].split(lengths, dim=1)]
    model.set_attn_implementation(PACKED_ATTENTION)
    return torch.cat(rows)


# Cohere multiplies its logits, Granite divides them, and HyperCLOVA X multiplies by the setting that Granite divides
# by; a forgotten transform shows in every log-probability.
@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (CohereForCausalLM, CohereConfig(**SIZES, logit_scale=0.25)),
        (GraniteForCausalLM, GraniteConfig(**SIZES, logits_scaling=3.0)),
        (HyperCLOVAXForCausalLM, HyperCLOVAXConfig(**SIZES, logits_scaling=3.0)),
    ],
)
def test_logit_transforms_of_the_model_are_applied(model_class, config):
    torch.manual_seed(0)
    model = model_class(config).eval()
    lengths, active = [4, 7], [1, 2, 5, 9]
    inputs = packed(lengths, active)
    logits_TV = plain_logits(model, inputs, lengths)[active]
    policy = PolicyModel(model)
    with torch.no_grad():
        result = policy(inputs, temperature=0.8, return_entropy=True)
    log_softmax_TV = torch.log_softmax(logits_TV / 0.8, -1)
    wanted = log_softmax_TV.gather(1, inputs.target_A[:, None]).squeeze(1)
    torch.testing.assert_close(result.logprob, wanted, rtol=0, atol=1e-5)
    entropy = -(log_softmax_TV.exp() * log_softmax_TV).sum(-1)
    torch.testing.assert_close(result.entropy, entropy, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_head_with_softcap_and_bias(bias):
    torch.manual_seed(0)
    linear = torch.nn.Linear(8, 31, bias=bias)
    head = LogprobHead(linear.weight, linear.bias, softcap=2.0, logit_scale=1.5, workspace_mib=1)
    hidden, target = torch.randn(5, 8), torch.tensor([0, 30, 3, 3, 9])
    assert torch.equal(head(hidden), linear(hidden))
    logits = 2.0 * torch.tanh(1.5 * linear(hidden) / 2.0)
    wanted = torch.log_softmax(logits / 0.7, -1).gather(1, target[:, None]).squeeze(1)
    assert_close_to_rounding(head(hidden, target, temperature=0.7).logprob, wanted)

    def loss_fn(logprob, entropy, weight):
        return weight * logprob.square()

    weight = torch.arange(5.0)
    result = head(hidden, target, temperature=0.7, loss_fn=loss_fn, per_token=(weight,))
    torch.testing.assert_close(result.loss, (weight * wanted.square()).sum(), rtol=1e-5, atol=0)


@requires_mkl
def test_an_adapted_head_multiplies_as_a_frozen_one_and_the_adapter():
    rows, dim, vocab, rank = 20, 8, 500, 2
    head = LogprobHead(torch.nn.Parameter(torch.randn(vocab, dim), requires_grad=False), None, None, 1.0)
    head.add_lora(rank, alpha=4.0)
    torch.nn.init.normal_(head.lora_A), torch.nn.init.normal_(head.lora_B)
    hidden, target = torch.randn(rows, dim, requires_grad=True), torch.arange(rows)
    step = lambda: head(hidden, target, loss_fn=lambda logprob, _: -logprob).loss.backward()  # noqa: E731
    assert multiplications(step) == (2 * (dim + rank) + rank) * rows * vocab + 3 * rows * dim * rank


@pytest.mark.parametrize("lora", [None, "beside a trained weight", "beside a frozen weight"])
def test_head_over_a_support(lora):
    """Also in the shape of padded targets, without those that are ignored, and with a loss."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(8, 31)
    head = LogprobHead(linear.weight, linear.bias, softcap=2.0, logit_scale=1.5, workspace_mib=1)
    plain = linear.weight
    if lora:
        head.add_lora(rank=2, alpha=6.0)
        torch.nn.init.normal_(head.lora_A), torch.nn.init.normal_(head.lora_B)
        plain = plain + 3.0 * head.lora_B @ head.lora_A
        head.weight.requires_grad_(lora == "beside a trained weight")
    hidden, target = torch.randn(2, 2, 8), torch.tensor([[3, -100], [0, 30]])
    support = torch.tensor([[[3, 5, 8], [1, 2, -1]], [[7, 0, -1], [30, -1, -1]]])
    z = 2.0 * torch.tanh(1.5 * (hidden @ plain.T + linear.bias) / 2.0) / 0.7
    first, second = z[0, 0, [3, 5, 8]].log_softmax(0), z[1, 0, [7, 0]].log_softmax(0)
    wanted = torch.stack([first[0], torch.tensor(0.0), second[1], torch.tensor(0.0)]).view(2, 2)
    result = head(hidden, target, temperature=0.7, support=support, return_sum_prob_squared=True)
    assert_close_to_rounding(result.logprob, wanted)
    squared = torch.stack([(2 * first).exp().sum(), torch.tensor(0.0), (2 * second).exp().sum(), torch.tensor(1.0)])
    assert_close_to_rounding(result.sum_prob_squared, squared.view(2, 2))

    for name in ("return_top1", "return_mean_logits"):
        with pytest.raises(ValueError, match=f"{name} does not go with a support.*leave one of them out"):
            head(hidden, target, support=support, **{name: True})

    weight = torch.arange(4.0).view(2, 2)
    loss = head(
        hidden, target, temperature=0.7, support=support, return_entropy=True, per_token=(weight,),
        loss_fn=lambda logprob, entropy, weight: weight * logprob + entropy + 5,
    )  # fmt: skip
    entropy = -(first.exp() * first).sum() - (second.exp() * second).sum()
    torch.testing.assert_close(loss.loss, (weight * wanted).sum() + entropy + 15)  # three tokens count
    assert not any(x.requires_grad for x in (loss.logprob, loss.entropy))
    loss.loss.backward()
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    assert all(parameter.grad.isfinite().all() and parameter.grad.any() for parameter in trained)


def test_head_keeps_the_shape_of_its_targets_and_leaves_out_ignored_ones():
    torch.manual_seed(0)
    linear, targets = torch.nn.Linear(8, 31), torch.tensor([[0, -100, 3], [-100, -100, 30]])
    head = LogprobHead(linear.weight, linear.bias, softcap=None, logit_scale=1.0, workspace_mib=1)
    hidden, temperature = torch.randn(2, 3, 8), torch.rand(2, 3) + 0.5
    result = head(hidden, targets, temperature=temperature, return_entropy=True)
    log_p = torch.log_softmax(linear(hidden) / temperature[..., None], -1)
    active = targets != -100
    logprob = log_p.gather(-1, targets.where(active, 0)[..., None])[..., 0]
    assert_close_to_rounding(result.logprob, logprob.where(active, 0))
    assert_close_to_rounding(result.entropy, -(log_p.exp() * log_p).sum(-1).where(active, 0))


def test_head_takes_hidden_states_of_another_dtype():
    """Some models end in a norm that computes in float32."""
    head = LogprobHead(torch.nn.Linear(8, 31).weight, None, softcap=None, logit_scale=1.0).bfloat16()
    hidden, target = torch.randn(2, 3, 8), torch.randint(0, 31, (2, 3))
    assert torch.equal(head(hidden), head(hidden.bfloat16()))
    assert torch.equal(head(hidden, target).logprob, head(hidden.bfloat16(), target).logprob)


@pytest.mark.dist
def test_results_may_be_changed_in_place_under_fsdp2():
    run_distributed(check_results_changed_in_place, 1)


def check_results_changed_in_place(rank: int) -> None:
    """FSDP2 gathers the weight for backward by a hook on the results. An in-place change of a view would replace it."""
    torch.manual_seed(0)
    linear, hidden, target = torch.nn.Linear(4, 10, bias=False), torch.randn(2, 5, 4), torch.randint(0, 10, (2, 5))
    log_p = linear(hidden).log_softmax(-1)
    expected = torch.autograd.grad((log_p.gather(-1, target[..., None]) - 1).exp().sum(), linear.weight)[0]
    model = torch.nn.Sequential(LogprobHead(linear.weight, None, softcap=None, logit_scale=1.0))
    fully_shard(model[0], mesh=init_device_mesh("cpu", (1,)))
    logprob = model[0](hidden, target).logprob
    logprob -= 1
    logprob.exp().sum().backward()
    torch.testing.assert_close(model[0].weight.grad.full_tensor(), expected)


@pytest.mark.parametrize("over_support", [False, True])
def test_a_temperature_may_be_a_tensor_of_one_element(over_support):
    torch.manual_seed(0)
    head = LogprobHead(torch.nn.Linear(8, 31).weight, None, softcap=None, logit_scale=1.0, workspace_mib=1)
    hidden, target = torch.randn(2, 3, 8), torch.randint(0, 31, (2, 3))
    support = torch.arange(31).expand(2, 3, 31) if over_support else None
    expected = head(hidden, target, temperature=0.5, support=support).logprob
    for temperature in (torch.tensor(0.5), torch.tensor([0.5])):
        assert torch.equal(head(hidden, target, temperature=temperature, support=support).logprob, expected)


# All have the right number of elements, so a reshape would hide the error.
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": torch.zeros(3, 2, dtype=torch.int64)}, r"target has shape \(3, 2\), expected \(2, 3\)"),
        ({"target": torch.zeros(6, dtype=torch.int64)}, r"target has shape \(6,\), expected \(2, 3\)"),
        ({"temperature": torch.ones(3, 2)}, r"temperature has shape \(3, 2\), expected \(2, 3\)"),
        ({"per_token": (torch.ones(2, 3), torch.ones(3, 2))}, r"per_token\[1\] has shape \(3, 2\), expected \(2, 3\)"),
        ({"per_token": torch.ones(2, 3)}, "expected a tuple of tensors"),
        ({"support": torch.zeros(3, 2, 4, dtype=torch.int64)}, r"support has shape .* expected \(2, 3, 'K'\)"),
        ({"hidden": torch.ones(8)}, r"hidden has shape \(8,\), expected \(\*, D\)"),
    ],
)
def test_head_names_what_would_be_misaligned(change, message):
    head = LogprobHead(torch.nn.Linear(8, 31).weight, None, softcap=None, logit_scale=1.0, workspace_mib=1)
    arguments = {"hidden": torch.ones(2, 3, 8), "target": torch.zeros(2, 3, dtype=torch.int64)} | change
    with pytest.raises(ValueError, match=message):
        head(**arguments, loss_fn=lambda logprob, entropy, *per_token: -logprob)


@pytest.mark.parametrize("support", [None, torch.zeros(2, 3, 1, dtype=torch.int64)])
def test_a_reduced_loss_is_refused(support):
    head = LogprobHead(torch.nn.Linear(8, 31).weight, None, softcap=None, logit_scale=1.0, workspace_mib=1)
    target = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="one loss per token"):
        head(torch.ones(2, 3, 8), target, support=support, loss_fn=lambda logprob, entropy: -logprob.mean())


def test_head_shares_its_weight_with_the_model(tiny_model):
    tied = load_policy(tiny_model("llama-tied")).model
    assert tied.get_output_embeddings().weight is tied.get_input_embeddings().weight
    untied = load_policy(tiny_model("llama")).model
    assert untied.get_output_embeddings().weight is not untied.get_input_embeddings().weight


@pytest.mark.parametrize("name", MODELS)
def test_policy_without_targets_is_the_plain_model(tiny_model, name):
    inputs = packed([9], [])
    policy = load_policy(tiny_model(name))
    logits = plain_logits(policy.model, inputs, [9])
    plain = MODELS[name][0].from_pretrained(tiny_model(name))
    assert torch.equal(logits, plain(input_ids=inputs.input_ids_U[None]).logits[0])


def test_no_active_position():
    torch.manual_seed(0)
    model = PolicyModel(CohereForCausalLM(CohereConfig(**SIZES, attn_implementation=PACKED_ATTENTION)))
    inputs = packed([3], [])
    assert model(inputs).logprob.shape == (0,)
    result = model(inputs, loss_fn=lambda logprob, entropy: logprob)
    result.loss.backward()
    assert result.loss.item() == 0.0


BERT = SIZES | {"is_decoder": True, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("model_class", "config", "message"),
    [
        (BertLMHeadModel, BertConfig(**BERT), r"modules between its backbone and its lm_head \(cls\)"),
        (ErnieForCausalLM, ErnieConfig(**BERT), r"ErnieForCausalLM has modules .* \(cls\)"),
        (ModernBertDecoderForCausalLM, ModernBertDecoderConfig(**BERT, cls_token_id=1, sep_token_id=2),
         r"ModernBertDecoderForCausalLM has modules .* \(lm_head, decoder\)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_a_policy_would_skip_is_refused(model_class, config, message, device):
    with torch.device(device):
        model = model_class(config)
    with pytest.raises(ValueError, match=message):
        PolicyModel(model)


def test_a_policy_that_deviates_from_its_model_is_found():
    torch.manual_seed(0)
    policy = PolicyModel(CohereForCausalLM(CohereConfig(**SIZES, attn_implementation=PACKED_ATTENTION)).eval())
    tokens = torch.arange(3, 11)
    assert policy.deviation(tokens) < 1e-5
    policy.head.options["logit_scale"] *= 3
    assert policy.deviation(tokens) > 0.1


def test_a_model_without_lm_head_is_no_policy():
    with pytest.raises(ValueError, match="LlamaModel has no lm_head"):
        PolicyModel(LlamaModel(LlamaConfig(**SIZES)))


def test_padding_of_prompts_makes_no_difference_to_absolute_positions():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, initializer_range=0.5)).eval()
    policy, options = PolicyModel(model), {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    prompts = torch.tensor([[0, 0, 7, 8], [3, 4, 5, 6]])

    def generated(prompt_ids: torch.Tensor, num_samples: int) -> list[list[int]]:
        mask = (prompt_ids != 0).long()
        repeated = (x.repeat_interleave(num_samples, 0) for x in (prompt_ids, mask))
        with padded_attention(model):
            ids = policy.generate(*repeated, policy.prefill(prompt_ids, mask, num_samples), **options)
        return ids[:, prompt_ids.shape[1] :].tolist()

    (first,), (second,) = generated(prompts[:1, 2:], 1), generated(prompts[1:], 1)
    assert generated(prompts, 2) == [first, first, second, second]


def test_critic_starts_at_zero_and_values_are_linear_in_its_head():
    torch.manual_seed(0)
    backbone = LlamaModel(LlamaConfig(**SIZES, attn_implementation=PACKED_ATTENTION)).eval()
    critic, inputs = ValueModel(backbone), packed([4, 7], [1, 2, 5, 9])
    assert torch.equal(critic(inputs), torch.zeros(4))
    torch.nn.init.normal_(critic.head.weight)
    torch.nn.init.constant_(critic.head.bias, 0.5)
    backbone.set_attn_implementation("sdpa")
    hidden = torch.cat(
        [backbone(input_ids=part).last_hidden_state[0] for part in inputs.input_ids_U[None].split([4, 7], 1)]
    )
    backbone.set_attn_implementation(PACKED_ATTENTION)
    wanted = hidden[[1, 2, 5, 9]] @ critic.head.weight[0] + 0.5
    torch.testing.assert_close(critic(inputs), wanted, rtol=0, atol=1e-5)
    narrow = ValueModel(backbone.bfloat16())
    assert narrow.head.weight.dtype == torch.bfloat16  # FSDP2 shards one dtype at a time
    assert narrow(inputs).dtype == torch.float32
