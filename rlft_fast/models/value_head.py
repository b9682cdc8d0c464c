"""A critic's head in model folders: read from a reward model's or a critic's, written as a token classifier's.

To transformers a critic is a token classifier with one label: a backbone below a linear layer with a bias.
"""

import copy
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

from rlft_fast.models.heads import RLModel, ValueModel
from rlft_fast.models.weights import CheckpointPart, build_on_meta, stored_names


def head_parameters(model: RLModel) -> dict[str, Tensor]:
    """A critic's head, by the critic's own names; nothing of a model whose head is part of the transformers model."""
    if not isinstance(model, ValueModel):
        return {}
    return {"head.weight": model.head.weight, "head.bias": model.head.bias}


def stored_head(path: str | Path, model: RLModel) -> dict[str, Tensor]:
    """The parameters of a critic's head that the critic's folder has values for, by their names there.

    A reward model (sequence classification with one label) has a weight, an exported critic a bias, too. Any other
    folder has nothing: the head is new.

    Raises:
        ValueError: a file of the folder cannot be read.
    """
    if not isinstance(model, ValueModel) or model.pretrained.config.num_labels != 1:
        return {}
    (architecture,) = (model.pretrained.config.architectures or [""])[:1]
    if not architecture.endswith(("ForSequenceClassification", "ForTokenClassification")):
        return {}
    stored = stored_names(Path(path))
    is_classifier = architecture.endswith("ForTokenClassification") and "classifier.weight" in stored
    name = "classifier" if is_classifier else "score"
    own = {f"{name}.weight": model.head.weight, f"{name}.bias": model.head.bias}
    return {key: x for key, x in own.items() if key in stored or key.endswith("weight")}  # a weight must be there


class TokenClassifier(NamedTuple):
    """What transformers calls a critic and its parts."""

    architecture: str
    prefix: str
    """Before the names of the backbone's tensors."""
    head: str

    def config(self) -> dict[str, Any]:
        """What ``config.json`` says of it."""
        return {"architectures": [self.architecture], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}

    def parts(self, backbone: dict[str, list[CheckpointPart]], model: ValueModel) -> dict[str, list[CheckpointPart]]:
        """The parts of all tensors by the critic's names, from those of its backbone."""
        named = {
            name: [part._replace(name=self.prefix + part.name) for part in parts] for name, parts in backbone.items()
        }
        for name, parameter in head_parameters(model).items():
            named[name] = [CheckpointPart(f"{self.head}.{name.removeprefix('head.')}", tuple(parameter.shape), 0)]
        return named


def token_classifier(backbone: PreTrainedModel) -> TokenClassifier:
    """The token classifier with this backbone.

    Where transformers has none that is just a backbone below a linear layer, the backbone's tensors keep their names:
    `load_critic` reads such a folder, transformers reads its backbone.
    """
    own = TokenClassifier(f"{type(backbone).__name__.removesuffix('Model')}ForTokenClassification", "", "score")
    if type(backbone.config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        return own
    model_class: Any = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING[type(backbone.config)]
    config = copy.deepcopy(backbone.config)
    config.num_labels = 1
    prefix = f"{model_class.base_model_prefix}."
    names = [name for name, _ in build_on_meta(lambda: model_class(config)).named_parameters()]
    head, _, _ = (above := sorted(name for name in names if not name.startswith(prefix)))[0].rpartition(".")
    if above != [f"{head}.bias", f"{head}.weight"]:
        return own
    return TokenClassifier(model_class.__name__, prefix, head)
