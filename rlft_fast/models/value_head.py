"""The head of a critic in model folders.

The head is read from the folder of a reward model or of a critic. It is written as the head of a token classifier.

To transformers a critic is a token classifier with one label: a backbone below a linear layer with a bias.
"""

import copy
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

from rlft_fast.models.folders import read_config
from rlft_fast.models.heads import RLModel, ValueModel
from rlft_fast.models.weights import CheckpointPart, build_on_meta, stored_names


def head_parameters(model: RLModel) -> dict[str, Tensor]:
    """The parameters of a critic's head by name. Other models give {}: transformers' model holds their head."""
    if not isinstance(model, ValueModel):
        return {}
    return {"head.weight": model.head.weight, "head.bias": model.head.bias}


def stored_head(path: str | Path, model: RLModel) -> dict[str, Tensor]:
    """The parameters of a critic's head that a folder has values for, by their names there.

    A reward model (sequence classification with one label) stores a weight. An exported critic stores a weight and a
    bias. Any other folder stores no head, and the result is empty: the critic keeps the head that it has.

    Args:
        path: a folder that the critic reads. It need not be the folder that the critic was built from.
        model: a critic; other models have no head of this kind.

    Raises:
        ValueError: a file of the folder cannot be read.
    """
    if not isinstance(model, ValueModel) or (config := read_config(path)).num_labels != 1:
        return {}
    (architecture,) = (config.architectures or [""])[:1]
    if not architecture.endswith(("ForSequenceClassification", "ForTokenClassification")):
        return {}
    stored = stored_names(Path(path))
    is_classifier = architecture.endswith("ForTokenClassification") and "classifier.weight" in stored
    name = "classifier" if is_classifier else "score"
    own = {f"{name}.weight": model.head.weight, f"{name}.bias": model.head.bias}
    return {key: x for key, x in own.items() if key in stored or key.endswith("weight")}  # the weight is required


class TokenClassifier(NamedTuple):
    """The names that transformers gives to a critic and its parts."""

    architecture: str
    prefix: str
    """Prefix of the names of the backbone's tensors."""
    head: str

    def config(self) -> dict[str, Any]:
        """The entries of ``config.json`` that describe the token classifier."""
        return {"architectures": [self.architecture], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}

    def parts(self, backbone: dict[str, list[CheckpointPart]], model: ValueModel) -> dict[str, list[CheckpointPart]]:
        """The parts of all tensors by the critic's names, given the parts of its backbone."""
        named = {
            name: [part._replace(name=self.prefix + part.name) for part in parts] for name, parts in backbone.items()
        }
        for name, parameter in head_parameters(model).items():
            named[name] = [CheckpointPart(f"{self.head}.{name.removeprefix('head.')}", tuple(parameter.shape), 0)]
        return named


def token_classifier(backbone: PreTrainedModel) -> TokenClassifier:
    """The token classifier of transformers that has this backbone.

    transformers may have no such class, or a class that is more than a backbone below a linear layer. The backbone's
    tensors then keep their names: `load_critic` reads such a folder, and transformers reads only its backbone.
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
