"""What the engine must compute, by plain transformers and plain PyTorch, in float64."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from rlft_fast.config import EngineConfig, OptimizerConfig
from rlft_fast.data import Batch, Images
from rlft_fast.engine import FSDPEngine
from rlft_fast.rl import PolicyLoss, ValueLoss
from tests.support.tiny_models import IMAGE_TOKEN_ID, VOCAB_SIZE

POLICY_LOSS = {"clip_low": 0.2, "clip_high": 0.3, "entropy_coef": 0.02, "kl_coef": 0.1}
VALUE_CLIP = 0.2
TEMPERATURE = 0.7
HEAD_WEIGHT = 0.1  # a critic starts at 0, where its backbone has no gradient


def make_engine(path: Path, *, max_tokens: int = 64, dtype: str = "float32", **options: Any) -> FSDPEngine:
    """A trainable engine that does not clip, so that AdamW's first moment is the gradient."""
    optimizer = {"learning_rate": 1e-3, "eps": 1e-4, "max_grad_norm": None} | options.pop("optimizer", {})
    settings = {"max_tokens": max_tokens, "compute_dtype": dtype, "compile": False} | options.pop("config", {})
    config = EngineConfig(**settings, optimizer=OptimizerConfig(**optimizer))
    engine = FSDPEngine(str(path), config, **({"num_training_steps": 10} | options)).initialize()
    if engine.head == "value":
        nn.init.constant_(engine.model.head.weight, HEAD_WEIGHT)
    return engine


def make_engines(path: Path, **optimizer: Any) -> dict[str, FSDPEngine]:
    """Adam's moments, a schedule in its middle, and a critic whose head is in no model folder."""
    options = {"optimizer": {"schedule": "linear", "warmup_steps": 1} | optimizer, "max_tokens": 24}
    return {"actor": make_engine(path, **options), "critic": make_engine(path, head="value", **options)}


def random_batch(num_sequences: int = 7, seed: int = 0) -> Batch:
    """Sequences of 2 to 22 tokens, three per prompt, some with tokens of an environment between the policy's."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, size: int) -> list[int]:
        return torch.randint(low, high, (size,), generator=generator).tolist()

    prompts = [integers(0, VOCAB_SIZE, length) for length in integers(1, 11, num_sequences)]
    prompts = [prompts[i - i % 3] for i in range(num_sequences)]
    completions = [integers(0, VOCAB_SIZE, length) for length in integers(1, 12, num_sequences)]
    masks = [[i % 5 != 3 for i in range(len(completion))] for completion in completions]
    batch = Batch.from_samples(prompts, completions, completion_masks=masks)

    def normal(mean: float, std: float) -> Tensor:
        return mean + std * torch.randn(batch.num_tokens, generator=generator)

    return batch.replace(
        old_logprob_T=normal(-5.5, 0.5), ref_logprob_T=normal(-5.5, 0.5), advantage_T=normal(0, 1),
        value_T=normal(0, 0.3), return_T=normal(0, 1),
    )  # fmt: skip


def with_supports(batch: Batch, most: int = 6) -> Batch:
    """The batch with 1 to `most` ids that each sampled token is said to come from, itself at any place among them."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.rand(batch.num_tokens, VOCAB_SIZE, generator=generator)
    ids[batch.active_index_T, batch.target_T[batch.active_index_T]] = 2.0
    ids = ids.topk(most).indices
    ids[torch.arange(most) > torch.randint(most, (batch.num_tokens, 1), generator=generator)] = -1
    ids = ids[:, torch.randperm(most, generator=generator)]
    return batch.replace(support_TK=ids.masked_fill(~batch.loss_mask_T[:, None], -1).int())


def qwen_images(number: int, generator: torch.Generator) -> tuple[dict[str, Tensor], list[int]]:
    """Inputs of the tower for so many images, and the tokens of each."""
    shapes = [(1, 2, 4), (1, 6, 8)][:number]
    pixels = torch.randn(sum(t * h * w for t, h, w in shapes), 24, generator=generator)
    inputs = {"pixel_values": pixels, "image_grid_thw": torch.tensor(shapes)}
    return inputs, [h * w // 4 for _, h, w in shapes]


def llava_images(number: int, generator: torch.Generator) -> tuple[dict[str, Tensor], list[int]]:
    return {"pixel_values": torch.randn(number, 3, 8, 8, generator=generator)}, [16] * number


def internvl_images(number: int, generator: torch.Generator) -> tuple[dict[str, Tensor], list[int]]:
    """The second image is cut into two pictures."""
    counts = [1, 2][:number]
    pixels = torch.randn(sum(counts), 3, 8, 8, generator=generator)
    return {"pixel_values": pixels, "num_patches": torch.tensor(counts)}, [4 * count for count in counts]


def idefics_images(number: int, generator: torch.Generator) -> tuple[dict[str, Tensor], list[int]]:
    """The second image is cut into two pictures, and has a picture of all of it."""
    cuts = torch.tensor([[0, 0], [1, 2]])[:number]
    pictures = int((cuts.prod(-1) + 1).sum())
    pixels = torch.randn(pictures, 1, 3, 8, 8, generator=generator)
    return {"pixel_values": pixels, "rows": cuts[:, 0], "cols": cuts[:, 1]}, [4] * pictures


def mistral_images(number: int, generator: torch.Generator) -> tuple[dict[str, Tensor], list[int]]:
    """Padded to one size. The second image is wide, the first is high."""
    sizes = [(12, 4), (4, 8)][:number]
    pixels = torch.zeros(number, 3, 12, 8 if number > 1 else 4)
    for picture, (height, width) in zip(pixels, sizes, strict=True):
        picture[:, :height, :width] = torch.randn(3, height, width, generator=generator)
    runs = [width // 4 for height, width in sizes for _ in range(height // 4)]
    return {"pixel_values": pixels, "image_sizes": torch.tensor(sizes)}, runs


def gemma_images(number: int, generator: torch.Generator) -> tuple[dict[str, Tensor], list[int]]:
    return {"pixel_values": torch.randn(number, 3, 8, 8, generator=generator)}, [4] * number


IMAGES = {
    "llava": llava_images, "internvl": internvl_images, "idefics3": idefics_images, "smolvlm": idefics_images,
    "mistral3": mistral_images, "gemma3-vision": gemma_images,
}  # fmt: skip


def random_image_batch(num_sequences: int = 6, seed: int = 0, name: str = "qwen2-vl") -> Batch:
    """The batch above with images before the prompts of every second and third sequence: none, one, or two of them."""
    generator = torch.Generator().manual_seed(seed)
    text = random_batch(num_sequences, seed)
    images: list[Images | None] = [None] * num_sequences
    prompts, completions, masks = [], [], []
    sequences = zip(*(x.split(text.lengths.tolist()) for x in (text.input_ids_T, text.loss_mask_T)), strict=True)
    for b, (ids, mask) in enumerate(sequences):
        ids = ids.clamp(max=IMAGE_TOKEN_ID - 1)
        start = int(mask.nonzero()[0]) + 1
        number, counts = (b % 3 != 0) + (b % 3 == 2), []
        if number:
            inputs, counts = IMAGES.get(name, qwen_images)(number, generator)
            images[b] = Images(str(b), inputs)
        shown = [token for count in counts for token in [7, *[IMAGE_TOKEN_ID] * count, 8]]
        prompts.append([*shown, *ids[:start].tolist()])
        completions.append(ids[start:].tolist())
        masks.append(mask[start - 1 : -1].tolist())
    batch = Batch.from_samples(prompts, completions, completion_masks=masks, images=images)
    return batch.replace(advantage_T=torch.randn(batch.num_tokens, generator=generator))


def near_policy(batch: Batch, logprob_T: Tensor) -> Batch:
    """The batch with log-probabilities around the policy's, so that some ratios are clipped and some are not."""
    generator = torch.Generator().manual_seed(1)
    noise = 0.3 * torch.randn(2, batch.num_tokens, generator=generator)
    return batch.replace(old_logprob_T=logprob_T + noise[0], ref_logprob_T=logprob_T + noise[1])


def policy_loss(aggregation: str = "token-mean") -> PolicyLoss:
    return PolicyLoss(**POLICY_LOSS, aggregation=aggregation)


@dataclass(frozen=True, kw_only=True)
class FailsLate(PolicyLoss):
    """Raises in one of the later micro-batches."""

    call: int
    calls: list[int] = field(default_factory=list)

    def per_token(self, fields):
        self.calls.append(1)
        if len(self.calls) == self.call:
            raise RuntimeError("out of memory")
        return super().per_token(fields)


def value_loss(aggregation: str = "token-mean") -> ValueLoss:
    return ValueLoss(clip=VALUE_CLIP, aggregation=aggregation)


def gradients(engine: FSDPEngine) -> dict[str, Tensor]:
    """Gradients of the engine's first step: exp_avg = (1 - beta1) * gradient."""
    beta = engine.config.optimizer.betas[0]
    state = {name: full(tensor) for name, tensor in engine.state_tensors().items() if name.endswith(".exp_avg")}
    return {name.removeprefix("optimizer.").removesuffix(".exp_avg"): g / (1 - beta) for name, g in state.items()}


def weights(engine: FSDPEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


def step(engines: dict[str, FSDPEngine], seed: int) -> list[dict[str, float]]:
    """One step of an actor and a critic."""
    batch = random_batch(seed=seed)
    return [
        engines["actor"].train_step(batch, policy_loss()),
        engines["critic"].train_step(batch, value_loss()),
    ]


def state_of(engines: dict[str, FSDPEngine]) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": full(tensor)
        for name, engine in engines.items()
        for key, tensor in engine.state_tensors().items()
    }


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def names(folder: Path) -> list[str]:
    """Of what is in a folder."""
    return sorted(path.name for path in folder.iterdir())


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Every tensor within `tolerance` of the largest magnitude in it; both dictionaries have the same names."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (actual[name].double() - tensor.double()).abs().max()
        assert error <= tolerance * tensor.abs().max().clamp(min=1e-3), (name, error.item())


def assert_same_steps(actual: FSDPEngine, expected: FSDPEngine, num_steps: int) -> None:
    """Weights after steps on the same gradients, added in another order.

    An update of AdamW is lr·g / (|g| + eps): where |g| is far below eps, it multiplies the error of g by lr / eps. That
    error is some roundings of the largest gradients, as an element near 0 is a sum of larger terms.
    """
    optimizer = expected.config.optimizer
    largest = max(gradient.abs().max().item() for gradient in gradients(expected).values())
    error = 16 * torch.finfo(torch.float32).eps * largest
    atol = num_steps * optimizer.learning_rate / optimizer.eps * error
    for (name, x), y in zip(weights(actual).items(), weights(expected).values(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert actual.keys() == expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)]
    assert not different


# ---- the plain way ------------------------------------------------------------------------------------------------


def pad_right(batch: Batch) -> tuple[Tensor, Tensor]:
    """(B, L) token ids and mask."""
    rows = batch.input_ids_T.split(batch.lengths.tolist())
    ids = nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=0)
    return ids, torch.arange(ids.shape[1]) < torch.tensor(batch.lengths)[:, None]


def plain_model(path: Path, dtype: torch.dtype = torch.float64) -> nn.Module:
    """With the attention written out: Gemma 2 soft-caps its scores."""
    config = json.loads((path / "config.json").read_text())
    has_experts = any("experts" in key for key in config | config.get("text_config", {}))
    experts = {"experts_implementation": "eager"} if has_experts else {}  # the grouped one is float32
    auto_class = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    return auto_class.from_pretrained(path, dtype=dtype, attn_implementation="eager", **experts)


def plain_log_softmax(model: nn.Module, batch: Batch, temperature: float) -> Tensor:
    """(T, V) log-probabilities of every next token, one sequence after the other."""
    sequences = batch.input_ids_T.split(batch.lengths.tolist())
    logits = [model(input_ids=ids[None], **images(model, batch, b)).logits[0] for b, ids in enumerate(sequences)]
    wide = torch.cat(logits).to(torch.promote_types(logits[0].dtype, torch.float32))
    return torch.log_softmax(wide / temperature, dim=-1)


def images(model: Any, batch: Batch, b: int) -> dict[str, Tensor]:
    """Sequence b's images as keywords of a plain model."""
    if (own := batch.images_B[b]) is None:
        return {}
    inputs = own.inputs | {"pixel_values": own.inputs["pixel_values"].double()}
    return plain_inputs(model, inputs, batch.input_ids_T.split(batch.lengths.tolist())[b][None])


def plain_inputs(model: Any, inputs: Mapping[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
    """Images as keywords of a plain model."""
    kept = {name: x for name, x in inputs.items() if name in ("pixel_values", "image_sizes", "image_grid_thw")}
    kind = {"gemma3": "token_type_ids"}.get(model.config.model_type)
    kind = "mm_token_type_ids" if "image_grid_thw" in inputs else kind
    return kept if kind is None else kept | {kind: (ids == IMAGE_TOKEN_ID).long()}


def plain_logprob_and_entropy(path: Path, batch: Batch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """(T,) each, 0 outside the mask, in float64."""
    with torch.no_grad():
        return _at_targets(plain_log_softmax(plain_model(path), batch, temperature), batch)


def _at_targets(log_softmax_TV: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    log_softmax_TV = over_supports(log_softmax_TV, batch)
    logprob_T = log_softmax_TV.gather(1, batch.target_T.clamp(min=0)[:, None]).squeeze(1)
    entropy_T = -(log_softmax_TV.exp() * log_softmax_TV.clamp(min=-1e9)).sum(-1)  # 0 log 0 is 0
    return logprob_T * batch.loss_mask_T, entropy_T * batch.loss_mask_T


def over_supports(log_softmax_TV: Tensor, batch: Batch) -> Tensor:
    """Normalised over the supports of the batch, if it has any; as it was where no token was sampled."""
    if batch.support_TK is None:
        return log_softmax_TV
    vocab = log_softmax_TV.shape[1]
    ids = batch.support_TK.long()
    kept = torch.zeros(len(ids), vocab + 1, dtype=torch.bool).scatter_(1, ids.where(ids >= 0, vocab), True)[:, :-1]
    return log_softmax_TV.masked_fill(~kept & batch.loss_mask_T[:, None], -torch.inf).log_softmax(-1)


class PlainPolicy:
    """A plain model with its outputs for a batch at `TEMPERATURE`, and the gradient of a loss on them.

    Attributes:
        log_softmax_TV: log-probabilities of every next token.
        logprob_T: of the targets, 0 outside the mask.
        entropy_T: 0 outside the mask.
    """

    def __init__(self, path: Path, batch: Batch, dtype: torch.dtype = torch.float64) -> None:
        self._model = plain_model(path, dtype)
        log_softmax_TV = plain_log_softmax(self._model, batch, TEMPERATURE)
        self._outputs = _at_targets(log_softmax_TV, batch)
        self.log_softmax_TV = log_softmax_TV.detach()
        self.logprob_T, self.entropy_T = (x.detach() for x in self._outputs)

    def gradients(self, batch: Batch, aggregation: str) -> dict[str, Tensor]:
        """Gradient of PPO's loss with entropy bonus and k3 penalty, written out token by token. Once.

        Args:
            batch: with the tokens of the first one.
            aggregation: of the tokens.
        """
        logprob_T, entropy_T = self._outputs
        ratio_T = (logprob_T - batch.old_logprob_T).exp()
        low, high = 1 - POLICY_LOSS["clip_low"], 1 + POLICY_LOSS["clip_high"]
        surrogate_T = torch.minimum(ratio_T * batch.advantage_T, ratio_T.clamp(low, high) * batch.advantage_T)
        x_T = batch.ref_logprob_T - logprob_T
        penalty_T = POLICY_LOSS["kl_coef"] * (x_T.exp() - 1 - x_T)
        _mean(-surrogate_T - POLICY_LOSS["entropy_coef"] * entropy_T + penalty_T, batch, aggregation).backward()
        return {f"model.{name}": parameter.grad for name, parameter in self._model.named_parameters()}


def plain_value_gradients(path: Path, batch: Batch, aggregation: str) -> dict[str, Tensor]:
    """Gradient of the clipped value loss."""
    backbone = AutoModel.from_pretrained(path, dtype=torch.float64)
    head = nn.Linear(backbone.config.hidden_size, 1, dtype=torch.float64)
    nn.init.constant_(head.weight, HEAD_WEIGHT)
    nn.init.zeros_(head.bias)
    ids, mask = pad_right(batch)
    value_T = head(backbone(input_ids=ids, attention_mask=mask.long()).last_hidden_state[mask]).squeeze(-1)
    clipped_T = batch.value_T + (value_T - batch.value_T).clamp(-VALUE_CLIP, VALUE_CLIP)
    error_T = torch.maximum((value_T - batch.return_T).square(), (clipped_T - batch.return_T).square())
    _mean(0.5 * error_T, batch, aggregation).backward()
    named = {f"backbone.{name}": parameter.grad for name, parameter in backbone.named_parameters()}
    return named | {f"head.{name}": parameter.grad for name, parameter in head.named_parameters()}


def _mean(loss_T: Tensor, batch: Batch, aggregation: str) -> Tensor:
    if aggregation == "token-mean":
        return loss_T[batch.loss_mask_T].mean()
    bounds = batch.cu_seqlens.tolist()
    parts = [slice(*pair) for pair in pairwise(bounds)]
    return torch.stack([loss_T[part][batch.loss_mask_T[part]].mean() for part in parts]).mean()
