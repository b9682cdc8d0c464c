"""The heads of reinforcement fine-tuning, and the models that end in them.

A head is always *called*. FSDP2's hooks then gather its weight before the call and reshard it afterwards, whether the
weight is tied to the embedding or not. Code that reads ``lm_head.weight`` from outside would find a shard.

Shapes: T packed tokens, A active positions (those whose next token was sampled), D hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._pytree import tree_map_only
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel

from rlft_fast.data import Images
from rlft_fast.models.architectures import (
    WITHOUT_CACHE,
    own_implementation,
    packed_implementation,
    padded_attention,
    why_not_packed,
)
from rlft_fast.models.attention import RowCache, cache_argument, counts_tokens_before, prepare_chunks, takes_row_cache
from rlft_fast.models.images import has_three_positions, has_vision, prompts_with_images
from rlft_fast.models.packed import ModelInputs, final_hidden
from rlft_fast.models.probe import probe
from rlft_fast.ops import (
    LinearLogprob,
    LinearLogprobLoss,
    TopLogprob,
    linear_logprob,
    linear_logprob_loss,
    support_logprob,
    support_logprob_loss,
    top_logprob,
)
from rlft_fast.ops.logprob import LossFunction


class LogprobHead(nn.Module):
    """An ``lm_head`` that returns log-probabilities if the call has targets, and logits otherwise.

    Args:
        weight: (V, D) projection. It is shared, not copied, so tied weights stay tied.
        bias: (V,) or None.
        softcap: logit soft-capping.
        logit_scale: factor on the raw logits.
        workspace_mib: the most memory that logits take at any time [MiB], see :func:`rlft_fast.ops.linear_logprob` and,
            for losses, :func:`rlft_fast.ops.linear_logprob_loss`.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, softcap: float | None, logit_scale: float,
        workspace_mib: int | None = None,
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)  # a subclass may have further bases
        self.weight = weight
        self.register_parameter("bias", bias)
        self.options: dict[str, Any] = {
            "softcap": softcap, "logit_scale": logit_scale, "workspace_mib": workspace_mib,
        }  # fmt: skip
        self.register_parameter("lora_A", None)
        self.register_parameter("lora_B", None)
        self.lora_scale = 0.0
        self.lora_enabled = True

    def add_lora(self, rank: int, alpha: float) -> None:
        """Adds a low-rank adapter of the weight. `rlft_fast.models.adapters` gives it values later."""
        options: dict[str, Any] = {"device": self.weight.device, "dtype": self.weight.dtype}
        self.lora_A = nn.Parameter(torch.empty(rank, self.weight.shape[1], **options))
        self.lora_B = nn.Parameter(torch.empty(self.weight.shape[0], rank, **options))
        self.lora_scale = alpha / rank

    def enable_adapters(self, enabled: bool) -> None:
        self.lora_enabled = enabled

    def _adapted(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """The hidden states and None; with an adapter [x, s A x] and B.

        [x, s A x] [W, B]^T is W x + s B A x. It avoids the rounded sum of W and B A, in which small updates would be
        lost.
        """
        if self.lora_A is None or self.lora_B is None or not self.lora_enabled:
            return hidden, None
        return torch.cat([hidden, self.lora_scale * linear(hidden, self.lora_A)], dim=-1), self.lora_B

    def _logits(self, hidden: Tensor) -> Tensor:
        """(*, V) raw logits. An adapter adds its own product: a copy of W for every decoded token would cost more."""
        logits = linear(hidden, self.weight, self.bias)
        if self.lora_A is None or self.lora_B is None or not self.lora_enabled:
            return logits
        return logits + linear(self.lora_scale * linear(hidden, self.lora_A), self.lora_B)

    def forward(
        self,
        hidden: Tensor,
        target: Tensor | None = None,
        *,
        temperature: float | Tensor = 1.0,
        return_entropy: bool = False,
        return_sum_prob_squared: bool = False,
        return_top1: bool = False,
        return_mean_logits: bool = False,
        loss_fn: LossFunction | None = None,
        per_token: tuple[Tensor, ...] = (),
        ids: Tensor | None = None,
        top_k: int | None = None,
        support: Tensor | None = None,
        active_index: Tensor | None = None,
    ) -> Tensor | LinearLogprob | LinearLogprobLoss | TopLogprob:
        """Logits (without ``target``), log-probabilities, or the sum of a per-token loss (with ``loss_fn``).

        Args:
            hidden: (*, D) final hidden states; converted to the dtype of the weight.
            target: (*) int64 next tokens; -100 at positions that are not scored.
            temperature: one number, also as a tensor of one element, or a (*) tensor.
            return_entropy: also return the entropies, or pass them to ``loss_fn``.
            return_sum_prob_squared: also return the sums of squared probabilities; not with ``loss_fn``.
            return_top1: also return whether the target is the most likely token; not with ``loss_fn`` or ``support``.
            return_mean_logits: also return the mean of the logits over the vocabulary; not with ``loss_fn`` or
                ``support``.
            loss_fn: as in :func:`rlft_fast.ops.linear_logprob_loss`.
            per_token: (*) or (*, K) tensors for ``loss_fn``.
            ids: (*, K) further ids whose log-probabilities ``loss_fn`` reads, see
                :func:`rlft_fast.ops.linear_logprob_loss`; not with ``support``.
            top_k: return the most likely ids instead, see :func:`rlft_fast.ops.top_logprob`; with no other statistic.
            support: (*, K) ids as in :func:`rlft_fast.ops.support_logprob`. All statistics are over these ids instead
                of the whole vocabulary.
            active_index: as in :func:`rlft_fast.ops.linear_logprob`, into the flattened ``target``.

        Returns:
            Without ``target``: (*, V) raw logits, as the replaced ``lm_head`` gives them. The model around the head
            applies soft-cap and scale. With ``target``: statistics in the shape of ``target``. The head applies
            soft-cap and scale.

        Raises:
            ValueError: shapes, devices or option values do not fit each other.
        """
        hidden = hidden.to(self.weight.dtype)
        if target is None:
            return self._logits(hidden)
        hidden, adapter = self._adapted(hidden)
        if isinstance(temperature, Tensor) and temperature.numel() == 1:
            temperature = temperature.reshape(()).expand(target.shape)
        _check_rows(hidden, target, temperature, per_token, {"support": support, "ids": ids})
        of_vocabulary = {"return_top1": return_top1, "return_mean_logits": return_mean_logits}
        extras = {"return_sum_prob_squared": return_sum_prob_squared, **of_vocabulary}
        if loss_fn is not None:
            _check_goes_with("loss_fn, which reads log-probabilities and entropies alone", extras)
        if support is not None:
            of_ids = {"ids": ids is not None, "top_k": top_k is not None}
            _check_goes_with("a support, because it is of the whole vocabulary", of_vocabulary | of_ids)
        if top_k is not None:
            asked = {"return_entropy": return_entropy, "loss_fn": loss_fn is not None, "ids": ids is not None}
            _check_goes_with("top_k", asked | extras)
        elif loss_fn is None and ids is not None:
            raise ValueError("ids are read by loss_fn, which is not given: pass both, or leave ids out")
        hidden_TD, target_T = hidden.flatten(0, -2), target.flatten()
        options = self.options | {
            "bias_V": self.bias, "return_entropy": return_entropy,
            "temperature": temperature.flatten() if isinstance(temperature, Tensor) else temperature,
        }  # fmt: skip
        per_token = tuple(x.flatten(0, target.dim() - 1) for x in per_token)
        weight = self.weight
        if weight.requires_grad and adapter is not None:  # the ops train an adapter beside a frozen weight alone
            weight, adapter = torch.cat([weight, adapter], dim=-1), None
        arguments = (hidden_TD, weight, target_T)
        options["adapter_VE"] = adapter
        if support is not None:
            options["support_TK"] = support.flatten(0, -2)
            if loss_fn is None:
                result = support_logprob(*arguments, **options, return_sum_prob_squared=return_sum_prob_squared)
            else:
                result = support_logprob_loss(*arguments, loss_fn, *per_token, **options)
        else:
            options["active_index"] = active_index
            if top_k is not None:
                result = top_logprob(*arguments, top_k, **_without_entropy(options))
            elif loss_fn is None:
                result = linear_logprob(*arguments, **options, **extras)
            else:
                options["ids_TK"] = None if ids is None else ids.flatten(0, -2)
                result = linear_logprob_loss(*arguments, loss_fn, *per_token, **options)
        statistics = {name: x for name, x in result._asdict().items() if x is not None and name != "loss"}
        return result._replace(**{name: _reshaped(x, *target.shape, *x.shape[1:]) for name, x in statistics.items()})


class ScalarHead(nn.Module):
    """A linear layer to one number for each hidden state. The number is float32, whatever the dtype of the layer.

    In bfloat16, values and rewards near 10 would be multiples of 1/16.

    Args:
        layer: whose weight and bias it has.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """(*, 1) float32, given (*, D)."""
        return linear(hidden.float(), self.weight.float(), None if self.bias is None else self.bias.float())


def _without_entropy(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "return_entropy"}


def _check_goes_with(what: str, asked: dict[str, bool]) -> None:
    if unfit := [name for name, is_asked in asked.items() if is_asked]:
        raise ValueError(f"{unfit[0]} does not go with {what}: leave one of them out")


def _check_rows(
    hidden: Tensor, target: Tensor, temperature: float | Tensor, per_token: tuple[Tensor, ...],
    of_ids: dict[str, Tensor | None],
) -> None:  # fmt: skip
    """Requires shapes that agree token by token, since flattening would hide a difference."""
    if hidden.dim() < 2:
        raise ValueError(f"hidden has shape {tuple(hidden.shape)}, expected (*, D): unsqueeze a single hidden state")
    if isinstance(per_token, Tensor):
        raise ValueError("per_token is a tensor, expected a tuple of tensors: pass per_token=(x,)")
    tensors = {"target": target} | {f"per_token[{i}]": values for i, values in enumerate(per_token)}
    if isinstance(temperature, Tensor):
        tensors["temperature"] = temperature
    tensors |= {name: ids for name, ids in of_ids.items() if ids is not None}
    rows = tuple(hidden.shape[:-1])
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        may_be_wide = name.startswith("per_token") and len(shape) > len(rows)
        if (shape[:-1] if name in of_ids or may_be_wide else shape) != rows:
            expected = f"{(*rows, 'K')} to hold ids" if name in of_ids else f"{rows} to hold one value"
            raise ValueError(f"{name} has shape {shape}, expected {expected} for each hidden state")


def _reshaped(values: Tensor, *shape: int) -> Tensor:
    """A copy in another shape. On a view, an in-place operation would make FSDP2 lose its backward hook."""
    return values if values.shape == shape else values.view(shape).clone()


class _HeadedModel(nn.Module):
    """A transformers model that runs packed, or padded where a packed forward would be wrong.

    Attributes:
        padded_because: why the model runs padded; empty if it is packed.
        run_backbone: computes the (U, D) final hidden states.
    """

    padded_because: str
    run_backbone: Callable[[nn.Module, ModelInputs], Tensor] = staticmethod(final_hidden)

    def run_padded(self, because: str) -> None:
        """Makes a packed model run padded from now on."""
        model = cast(Any, self).pretrained
        own = own_implementation(model.config) or ("sdpa" if model._supports_sdpa else "eager")
        model.set_attn_implementation(own)
        self.padded_because = because

    @torch.no_grad()
    def deviation(self, input_ids_T: Tensor) -> Tensor:
        """The largest difference of final hidden states between the model's own forward and the forward of this class.

        It is relative to the largest hidden state, see `PolicyModel.deviation`.
        """
        model: Any = self
        with padded_attention(model.pretrained):
            own_TD = model.backbone(input_ids=input_ids_T[None], use_cache=False).last_hidden_state[0].float()
        half, inputs = len(input_ids_T) // 2, self._deviation_inputs(input_ids_T, input_ids_T.flip(0))
        hidden_UD = final_hidden(model.backbone, inputs).float()
        found = hidden_UD.view(-1, *own_TD.shape)
        return torch.cat([found[0] - own_TD, *(found[1:] - own_TD)[:, :half]]).abs().max() / own_TD.abs().max()

    def _deviation_inputs(self, input_ids_T: Tensor, target_T: Tensor) -> ModelInputs:
        """The tokens; in a padded batch, their first half stands beside them."""
        if not self.padded_because:
            return _one_sequence(cast(Any, self).pretrained, input_ids_T, target_T)
        half = input_ids_T[: len(input_ids_T) // 2]
        return _padded(torch.stack([input_ids_T, torch.cat([half, half.flip(0)])]), target_T.repeat(2))

    def choose_way(self, model: PreTrainedModel) -> None:
        """Sets packed attention where the model can be packed. A tower that never runs is frozen."""
        self.padded_because = why_not_packed(model)
        if not self.padded_because:
            model.set_attn_implementation(packed_implementation(model.config))
        if hasattr(model.config, "vision_config") and (self.padded_because or not has_vision(model)):
            ends = (model.get_input_embeddings(), model.get_output_embeddings(), getattr(model, "score", None))
            parts = [part for part in (model.get_decoder(), *ends) if part is not None]
            runs = {id(parameter) for part in parts for parameter in part.parameters()}
            for parameter in model.parameters():
                parameter.requires_grad_(id(parameter) in runs)


class PolicyModel(_HeadedModel):
    """A causal language model whose forward ends in a :class:`LogprobHead`.

    :func:`rlft_fast.models.probe.probe` finds out how the model's own forward transforms hidden states and logits.

    Args:
        model: a model with a linear head, which is replaced.
        workspace_mib: see :class:`LogprobHead`.

    Raises:
        ValueError: the model has no head or no backbone, has a module between backbone and head, or transforms its
            logits in an unknown way.
    """

    def __init__(self, model: PreTrainedModel, workspace_mib: int | None = None) -> None:
        super().__init__()
        head = model.get_output_embeddings()
        if head is None:
            raise ValueError(f"{type(model).__name__} has no lm_head: a policy must be a causal language model")
        text = _text_model(model, head)
        around = probe(text, "cpu" if head.weight.is_meta else head.weight.device, torch.float32)
        if around.hidden_scale is None:
            raise ValueError(
                f"{type(model).__name__} has modules between its backbone and its lm_head "
                f"({', '.join(_beside_backbone(text))}), which a policy cannot run: choose a model whose head reads "
                "the last hidden states"
            )
        self.model = model
        self.choose_way(model)
        self.hidden_scale = around.hidden_scale
        self.head = LogprobHead(head.weight, head.bias, around.softcap, around.logit_scale, workspace_mib)
        model.set_output_embeddings(self.head)  # one module under both names
        self._backbone_name = _name_of(_backbone(text), model)

    @property
    def pretrained(self) -> PreTrainedModel:
        return self.model

    @property
    def backbone(self) -> PreTrainedModel:
        return cast(PreTrainedModel, self.model.get_submodule(self._backbone_name))

    @property
    def decodes_in_place(self) -> bool:
        """Whether `prefill_rows` and `next_logits` give the model's logits. Otherwise `generate` does."""
        return not self.padded_because and takes_row_cache(self.model, images_alone=has_vision(self.backbone))

    @property
    def sees_padding(self) -> bool:
        """Whether padding on the left would change the logits of generated tokens."""
        return bool(self.padded_because) or counts_tokens_before(self.model.config)

    def forward(self, inputs: ModelInputs, **head: Any) -> LinearLogprob | LinearLogprobLoss | TopLogprob:
        """Log-probabilities of the A active positions, or their loss. Keywords as in :meth:`LogprobHead.forward`."""
        hidden_UD = self.run_backbone(self.backbone, inputs)
        # All A rows are active. Passing this index spares the op a search for them.
        everything = torch.arange(len(inputs.target_A), device=inputs.target_A.device)
        hidden_AD = hidden_UD.index_select(0, inputs.active_index_A)
        if self.hidden_scale != 1.0:
            hidden_AD = self.hidden_scale * hidden_AD
        return self.head(hidden_AD, inputs.target_A, support=inputs.support_AK, active_index=everything, **head)

    @torch.no_grad()
    def deviation(self, input_ids_T: Tensor) -> Tensor:
        """The largest difference of log-probabilities between the model's own forward and the forward of this class.

        A difference shows that the model does something that this forward leaves out. The model's own forward runs on
        these tokens. A padded forward runs on their first half alone, beside all of them: tokens that see later tokens
        make a difference.
        """
        target_T, half = input_ids_T.flip(0), len(input_ids_T) // 2
        inputs = self._deviation_inputs(input_ids_T, target_T)
        with padded_attention(self.model):
            own_logits = self.model(input_ids=input_ids_T[None], use_cache=False).logits[0].float()
        own_T = torch.log_softmax(own_logits, -1).gather(-1, target_T[:, None]).squeeze(-1)
        found = self(inputs).logprob.view(-1, len(own_T))
        return torch.cat([found[0] - own_T, *(found[1:] - own_T)[:, :half]]).abs().max()

    def prefill(self, prompt_ids: Tensor, attention_mask: Tensor, num_samples: int | Tensor) -> Cache | None:
        """The key-value cache of prompts but for their last tokens, which `generate` runs. Each prompt runs once.

        A padded model has none: its own cache may hold states that cannot be repeated.

        Args:
            prompt_ids: (P, L) left-padded prompts.
            attention_mask: (P, L), 0 at padding.
            num_samples: sequences of each prompt, one number or (P,).

        Returns:
            The cache of all sequences, in which those of a prompt follow each other.
        """
        if self.padded_because:
            return None
        cache = DynamicCache(config=self.model.config)
        self._fill(cache, prompt_ids, attention_mask)
        if prompt_ids.shape[1] > 1:
            cache.batch_repeat_interleave(cast(int, num_samples))  # torch's own takes a tensor, too
        return cache

    def prefill_rows(
        self, prompt_ids: Tensor, attention_mask: Tensor, cache: RowCache, images: Sequence[Images | None] = ()
    ) -> Tensor:
        """The same for a model that `takes_row_cache`, one row for each prompt. `next_logits` runs the last tokens.

        Args:
            prompt_ids: (P, L) left-padded prompts. The last token is no image's.
            attention_mask: (P, L), 0 at padding.
            cache: empty, or with the first tokens of all rows, which do not run again (not of images whose tokens see
                later ones). Afterwards it has all but the last of each row.
            images: of each prompt, None where it has none; empty: no prompt has. The vision tower runs once on each,
                if the cache does not have it.

        Returns:
            (P,) int64 positions of the last tokens.
        """
        if not any(images):
            self._fill(cache, prompt_ids, attention_mask)
            return _positions(attention_mask)[:, -1]
        begun = cache.get_seq_length()
        keywords, positions = prompts_with_images(self.backbone, prompt_ids, attention_mask, images, begun)
        if prompt_ids.shape[1] > begun + 1:
            model = self.backbone.get_decoder()
            model(
                position_ids=positions[..., begun:-1], use_cache=True, **keywords,
                **{cache_argument(model.forward): cache},
            )  # fmt: skip
        return positions[..., -1].view(-1, len(prompt_ids))[0]

    def next_logits(self, token_ids_U: Tensor, position_U: Tensor, padding_U: Tensor, cache: RowCache) -> Tensor:
        """(U, V) logits after the next token of each row.

        Args:
            token_ids_U: (U,) int64.
            position_U: (U,) int64 position of each token.
            padding_U: (U,) int64 padding at the left of each row.
            cache: of all tokens before. Afterwards it has these tokens, too.
        """
        outputs = self.model(
            input_ids=token_ids_U[:, None], attention_mask=cache.mask(padding_U), position_ids=position_U[:, None],
            use_cache=True, **{cache_argument(type(self.model).forward): cache},
        )  # fmt: skip
        return outputs.logits[:, -1]

    def _fill(self, cache: Cache, prompt_ids: Tensor, attention_mask: Tensor) -> None:
        begun = cache.get_seq_length()
        if prompt_ids.shape[1] > begun + 1:
            self.backbone(
                input_ids=prompt_ids[:, begun:-1], attention_mask=attention_mask[:, :-1],
                position_ids=_positions(attention_mask)[:, begun:-1], use_cache=True,
                **{cache_argument(self.backbone.forward): cache},
            )  # fmt: skip

    def generate(self, input_ids: Tensor, attention_mask: Tensor, cache: Cache | None, **options: Any) -> Tensor:
        """Continues sequences by transformers' ``generate``.

        Args:
            input_ids: (B, L) left-padded sequences; without padding for a padded model, whose state may see it.
            attention_mask: (B, L), 0 at padding.
            cache: of all tokens but the last of each sequence. Afterwards it has the new tokens, but for the last.
                None: the model makes its own and runs all tokens, or if its cache is wrong, runs all tokens every time.
            **options: for ``generate``.

        Returns:
            (B, L + new) token ids.
        """
        if cache is not None:
            # Without position_ids, Qwen2-VL would reuse the ids of the previous batch, whose size differs.
            options["position_ids"] = _positions(attention_mask)
            options[cache_argument(GenerationMixin.prepare_inputs_for_generation)] = cache
        elif self.model.config.model_type in WITHOUT_CACHE:
            options["use_cache"] = False
        return cast(Any, self.model).generate(input_ids, attention_mask=attention_mask, **options)


def _positions(attention_mask: Tensor) -> Tensor:
    """(B, L) positions of left-padded tokens."""
    return (attention_mask.cumsum(1) - 1).clamp(min=0)


def _one_sequence(model: PreTrainedModel, input_ids_T: Tensor, target_T: Tensor) -> ModelInputs:
    """The inputs of one sequence of T tokens that are all active."""
    length, device = len(target_T), target_T.device
    position_ids_T = torch.arange(length, device=device)
    if has_three_positions(model.base_model):
        position_ids_T = position_ids_T.expand(3, -1)
    boundaries = torch.tensor([0, length], dtype=torch.int32)
    chunks, boundaries = prepare_chunks(model, boundaries, boundaries, None), boundaries.to(device)
    return ModelInputs(
        input_ids_U=input_ids_T, position_ids_U=position_ids_T,
        cu_seqlens_q=boundaries, cu_seqlens_k=boundaries, max_seqlen_q=length, max_seqlen_k=length, key_index=None,
        chunks=tree_map_only(Tensor, lambda x: x.to(device), chunks),
        active_index_A=torch.arange(length, device=device), target_A=target_T, output_index_A=torch.arange(length),
    )  # fmt: skip


def _padded(ids_BL: Tensor, target_T: Tensor) -> ModelInputs:
    """The inputs of a padded batch whose tokens are all active."""
    (num_sequences, length), device = ids_BL.shape, ids_BL.device
    boundaries = torch.arange(num_sequences + 1, dtype=torch.int32, device=device) * length
    everything = torch.arange(ids_BL.numel())
    return ModelInputs(
        input_ids_U=ids_BL.flatten(), position_ids_U=torch.arange(length, device=device).repeat(num_sequences),
        cu_seqlens_q=boundaries, cu_seqlens_k=boundaries, max_seqlen_q=length, max_seqlen_k=length, key_index=None,
        active_index_A=everything.to(device), target_A=target_T, output_index_A=everything, padded_length=length,
    )  # fmt: skip


def _text_model(model: PreTrainedModel, head: nn.Module) -> PreTrainedModel:
    """The causal language model that ends in the head: the model itself, or its part (Llama 4 with images)."""
    inside = (x for x in model.children() if isinstance(x, PreTrainedModel) and any(y is head for y in x.modules()))
    part = next(inside, None) if model.base_model is model else None
    return model if part is None else _text_model(part, head)


def _backbone(text: PreTrainedModel) -> PreTrainedModel:
    """The backbone of a causal language model, also where its class gives it another name (Llama 4)."""
    if text.base_model is not text:
        return cast(PreTrainedModel, text.base_model)
    embedding = text.get_input_embeddings()
    parts = [x for x in text.children() if isinstance(x, PreTrainedModel) and any(y is embedding for y in x.modules())]
    if len(parts) != 1:
        raise ValueError(
            f"{type(text).__name__} has no backbone under the name {text.base_model_prefix!r} of its class: choose "
            "another model"
        )
    return parts[0]


def _name_of(module: nn.Module, model: nn.Module) -> str:
    return next(name for name, found in model.named_modules() if found is module)


def _beside_backbone(model: PreTrainedModel) -> list[str]:
    return [name for name, child in model.named_children() if not isinstance(child, PreTrainedModel)]


class ValueModel(_HeadedModel):
    """A backbone with a scalar head, which gives V(s_t) at each active position. A new head gives 0 everywhere.

    Raises:
        ValueError: transformers has the model with its lm_head alone (Llama 4 with images).
    """

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        if backbone.get_output_embeddings() is not None:
            raise ValueError(
                f"transformers has no {type(backbone).__name__} without its lm_head, whose place a critic's head would "
                "take: choose another critic.model"
            )
        self.backbone = backbone
        self.choose_way(backbone)
        config, device = backbone.config.get_text_config(), next(backbone.parameters()).device
        size = getattr(config, "word_embed_proj_dim", config.hidden_size)  # OPT may project its final hidden states
        self.head = ScalarHead(nn.Linear(size, 1, device=device, dtype=backbone.dtype))
        self.initialize_head()

    @torch.no_grad()
    def initialize_head(self) -> None:
        self.head.weight.zero_()
        self.head.bias.zero_()

    @property
    def pretrained(self) -> PreTrainedModel:
        return self.backbone

    def forward(self, inputs: ModelInputs) -> Tensor:
        """(A,) float32 values."""
        hidden_AD = self.run_backbone(self.backbone, inputs).index_select(0, inputs.active_index_A)
        return _reshaped(self.head(hidden_AD), *inputs.target_A.shape)


class RewardModel(_HeadedModel):
    """A sequence classification model with one label, whose logit is the reward of the text up to a position.

    Raises:
        ValueError: another module than a linear layer ``score`` makes the logit of the final hidden states.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        score = getattr(model, "score", None)
        if not isinstance(score, nn.Linear):
            above = ", ".join(name for name, child in model.named_children() if child is not model.base_model)
            raise ValueError(
                f"{type(model).__name__} classifies by {above or 'modules of its own'}, not by one linear layer score: "
                "choose a reward model of a causal language model (Llama, Qwen, Gemma, ...)"
            )
        model.score = ScalarHead(score)
        self.model = model
        self.choose_way(model)

    @property
    def pretrained(self) -> PreTrainedModel:
        return self.model

    @property
    def backbone(self) -> PreTrainedModel:
        return cast(PreTrainedModel, self.model.base_model)

    @property
    def head(self) -> ScalarHead:
        return cast(ScalarHead, self.model.score)

    def forward(self, inputs: ModelInputs) -> Tensor:
        """(A,) float32 rewards at the active positions."""
        hidden_AD = self.run_backbone(self.backbone, inputs).index_select(0, inputs.active_index_A)
        return _reshaped(self.head(hidden_AD), *inputs.target_A.shape)


RLModel = PolicyModel | ValueModel | RewardModel
"""Each model holds a transformers model with all weights, ``pretrained``, and is called with `ModelInputs`."""
