"""transformers as the other program of an import's proof: its own class, with the settings and weights of the source folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from andrea.config import UserError
from andrea.interop.hugging_face.target import LoadedByTransformers
from andrea.text.hf_tokenizer import HfTokenizer, foreign_library

REFUSED = "transformers refuses the model"


@final
class ImportedByTransformers(LoadedByTransformers):
    """A model of transformers' own class or of ours, and the tokenizer.

    transformers gets values and tensors, never the folder: nothing in a folder can name code that runs, and no
    generation_config.json changes which token is chosen.

    settings: of config.json that may change what the model computes, with model_type. weights: as in the folder.
    """

    def __init__(self, settings: Mapping[str, Any], weights: Mapping[str, Tensor], tokenizer: HfTokenizer) -> None:
        super().__init__()
        values = dict(settings)
        self.end_of_text = tokenizer.end_of_text
        with foreign_library(REFUSED):
            kind, config = self.class_and_config(values.pop("model_type"), values)
            self.model = kind.from_pretrained(None, config=config, state_dict=dict(weights), **self.LOADING).eval()
            self.model.generation_config = self.transformers.GenerationConfig()
            self.tokenizer = self.transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.library)

    def class_and_config(self, model_type: str, values: Mapping[str, Any]) -> tuple[Any, Any]:
        if model_type == "andrea":
            from andrea.interop.hugging_face.modeling_andrea import AndreaConfig, AndreaForCausalLM

            return AndreaForCausalLM, AndreaConfig(**values)
        config = self.transformers.AutoConfig.for_model(model_type, **values)
        for alias, key in config.attribute_map.items():
            if alias in values and values[alias] != values.get(key):
                raise UserError(
                    f"{alias}={values[alias]!r:.60} and {key}={values.get(key)!r:.60} of config.json are one setting; copy it again"
                )
        with torch.device("meta"):
            return type(self.transformers.AutoModelForCausalLM.from_config(config)), config

    def logits(self, tokens: Sequence[int]) -> Tensor:
        with foreign_library(REFUSED):
            return super().logits(tokens)

    def greedy(self, tokens: Sequence[int], n_new: int) -> list[int]:
        with foreign_library(REFUSED):
            return super().greedy(tokens, n_new)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """With end-of-text in front, which some models have in front of every text, and others between texts."""
        with foreign_library(REFUSED):
            found = self.tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return [[self.end_of_text, *ids] for ids in found]
