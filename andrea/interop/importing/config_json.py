"""What the families have in common: reading settings out of a config.json, and weights under our names.

Every setting that changes what the model computes is either represented or refused by its name in config.json.
"""

from collections import UserDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from andrea.config import AttentionConfig, ModelConfig, UserError, parse
from andrea.interop.architectures import NO_ROTATION, SCALING, renamed
from andrea.model.gpt import GPT

RECIPE_STEPS, RECIPE_TOKENS = 1000, 1 << 16  # of fine-tuning with train.steps=auto; nothing in the file says
WORDS = ("name", "position", "norm", "mlp", "qk_norm", "value_embedding")  # values that are no numbers
MAX_WINDOW_LAYERS = 28  # of Qwen's files that lack it, in transformers
MOST_PARAMETERS = 1 << 37  # against absurd sizes: they are compared with the weights only after the model is built
# Tables that old files hold: the causal mask, and the frequencies of the rotary positions, which are computed here.
TABLES = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq")
# Settings that do not change what a model computes for a text: where it comes from, how it was trained and is loaded, how
# texts are chosen, other heads than the one of a language model. `max_window_layers` is read where there are windows.
INERT = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures auto_map dtype
    is_llama_config max_window_layers model_type pretraining_tp reorder_and_upcast_attn return_dict torch_dtype torchscript
    transformers.js_config transformers_version unsloth_fixed unsloth_version use_bfloat16 use_cache
    attention_dropout attention_probs_dropout_prob attn_pdrop classifier_dropout embd_pdrop gradient_checkpointing
    hidden_dropout initializer_range output_router_logits resid_pdrop
    bos_token_id decoder_start_token_id eos_token_id forced_bos_token_id forced_eos_token_id pad_token_id prefix sep_token_id
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty length_penalty max_length max_new_tokens min_length no_repeat_ngram_size num_beam_groups
    num_beams num_return_sequences remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens
    temperature top_k top_p typical_p
    chunk_size_feed_forward finetuning_task id2label is_decoder is_encoder_decoder label2id num_labels output_attentions
    output_hidden_states output_scores problem_type pruned_heads summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj task_specific_params tie_encoder_decoder tokenizer_class
    """.split()
)


class Settings(UserDict[str, Any]):
    """The content of a config.json, which remembers the keys that were asked for.

    Each method that reads settings raises UserError that names the key.
    """

    def __init__(self, plain: Mapping[str, Any]) -> None:
        super().__init__(plain)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return self.data[key]

    def unknown(self) -> list[str]:
        """The keys with a value that nobody has asked for, and that may change what the model computes."""
        return sorted(key for key, value in self.data.items() if value is not None and key not in self.asked | INERT)

    def effective(self) -> dict[str, Any]:
        """What may change what the model computes: asked for, or unknown."""
        return {key: value for key, value in self.data.items() if key in self.asked or key not in INERT}

    def demand(self, values: Mapping[str, Any]) -> None:
        """Refuse another value than these: with it the model would compute something else. A missing key is the value."""
        for key, demanded in values.items():
            found = self.get(key, demanded)
            if found != demanded:
                raise UserError(
                    f"{key}={found!r:.60} of config.json has no counterpart here; only {key}={demanded} has"
                )

    def sizes(self, names: Mapping[str, str], defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Our key -> the value of config.json's key. defaults: for keys that it lacks."""
        found = {theirs: self.get(theirs, (defaults or {}).get(theirs)) for theirs in names.values()}
        if missing := [theirs for theirs, value in found.items() if value is None]:
            raise UserError(f"config.json lacks {', '.join(missing)}; copy it again")
        return {ours: found[theirs] for ours, theirs in names.items()}

    def choice(self, key: str, default: Any, known: Mapping[Any, Any]) -> Any:
        """What `known` has for the key's value."""
        found = self.get(key, default)
        if isinstance(found, (list, dict)) or found not in known:
            raise UserError(
                f"{key}={found!r:.60} of config.json has no counterpart here; importable: {', '.join(map(str, known))}"
            )
        return known[found]

    def rotary(self, usual_base: Any = 10000.0) -> dict[str, Any]:
        """position and rotary_base. Files of transformers before version 5 have the base as `rope_theta`."""
        rope = self.get("rope_parameters") or self.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise UserError(f"rope_parameters={rope!r:.60} of config.json is not an object; copy it again")
        kind = rope.get("rope_type", rope.get("type", "default"))
        base = rope.get("rope_theta", self.get("rope_theta", usual_base))
        if kind in ("linear", "llama3"):
            keys = SCALING[:1] if kind == "linear" else SCALING
            if missing := [key for key in keys if not isinstance(rope.get(key), (int, float))]:
                raise UserError(f"rope_type={kind} of config.json has no number {missing[0]}; copy it again")
            if kind == "linear" and rope["factor"] >= NO_ROTATION:
                return {"position": "none", "rotary_base": base}  # as we export a model without positions
            return {"position": "rotary", "rotary_base": base, "rotary_scaling": [rope[key] for key in keys]}
        if kind != "default":
            raise UserError(
                f"rope_type={kind!r:.60} of config.json has no counterpart here; only default, linear and llama3 have"
            )
        return {"position": "rotary", "rotary_base": base}

    def windows(self, n_layer: Any) -> Any:
        """attention.window, as transformers reads it: one for all layers, or a list. None without windows.

        Mistral has a window where `sliding_window` is a number, Qwen where `use_sliding_window` is true too, and Llama never.
        """
        kind, width, kinds, use = map(self.get, ("model_type", "sliding_window", "layer_types", "use_sliding_window"))
        if kind == "mistral":
            return width
        if width is None or kind == "llama" or not use:
            return None
        if kinds is None:  # files of Qwen before layer_types
            first = self.get("max_window_layers", MAX_WINDOW_LAYERS)
            if type(first) is not int or type(n_layer) is not int:
                raise UserError(
                    f"max_window_layers={first!r:.60} of config.json is not a number of layers; copy it again"
                )
            kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(n_layer)]
        known = {"sliding_attention": width, "full_attention": None}
        if not isinstance(kinds, list) or len(kinds) != n_layer or not {str(kind) for kind in kinds} <= known.keys():
            raise UserError(
                f"layer_types={kinds!r:.60} of config.json must name {n_layer} layers, each one of {', '.join(known)}"
            )
        windows = [known[kind] for kind in kinds]
        return one_or_all(windows)


def one_or_all(windows: list[Any]) -> Any:
    """attention.window for the windows of all layers: the one that all have, or the list."""
    return windows[0] if all(window == windows[0] for window in windows) else windows


def own_head_width(width: Any, sizes: Mapping[str, Any]) -> Any:
    """model.d_head for the head_dim of config.json: None where it is d_model / n_head, as here without d_head."""
    d_model, n_head = sizes["d_model"], sizes["n_head"]
    is_usual = type(width) is type(d_model) is type(n_head) is int and width * n_head == d_model
    return None if is_usual else width


def configs(model: Mapping[str, Any], attention: Mapping[str, Any]) -> tuple[ModelConfig, AttentionConfig]:
    """The configuration of a plain transformer but for these values. Raises UserError for an impossible one."""
    length = model.get("sequence_length")
    is_length = type(length) is int and 0 < length <= RECIPE_TOKENS
    plain = {
        "logit_softcap": None,
        "recipe_steps": RECIPE_STEPS,
        "recipe_tokens_per_step": RECIPE_TOKENS // length * length if is_length else length,
        "rotary_base": 10000.0,
        "bias": False,
        "qk_norm": False,
    }
    for key, value in model.items():
        if isinstance(value, str) and key not in WORDS:  # which `parse` would read as a number, as on a command line
            raise UserError(f"model.{key}={value!r:.60} of config.json is not a number; copy it again")
    found = parse(ModelConfig, plain | dict(model), "model")
    scoring = {"compatibility": "scaled_dot", "implementation": "auto"} | dict(attention)
    size = found.n_layer * found.d_model * (found.d_model + found.d_mlp)
    if size > MOST_PARAMETERS:
        raise UserError(
            f"config.json describes a model of {size:.0e} parameters, more than can be imported; copy it again"
        )
    return found, parse(AttentionConfig, scoring, "attention")


def under_our_names(
    theirs: Mapping[str, Tensor], names: dict[str, str], model: ModelConfig, attention: AttentionConfig, n_vocab: int
) -> dict[str, Tensor]:
    """The weights by our names, the same tensors. names: see `renamed`.

    Raises UserError if names or shapes are not those of the model. A head that is tied to the embedding may be in the file
    too, if it is equal.
    """
    with torch.device("meta"):  # no memory is allocated
        gpt = GPT(model, attention, n_vocab)
    shapes = {name: tuple(parameter.shape) for name, parameter in gpt.named_parameters()}
    left = {name: weight for name, weight in theirs.items() if not name.endswith(TABLES)}
    if model.tied_head and (head := left.pop("lm_head.weight", None)) is not None:
        if not torch.equal(head, theirs.get(renamed("embedding.weight", names), head)):
            raise UserError("tie_word_embeddings=true of config.json, but lm_head.weight differs from the embedding")
    found = {}
    for ours, shape in shapes.items():
        name = renamed(ours, names)
        found[ours] = left.pop(name, None)
        in_file = "absent" if found[ours] is None else tuple(found[ours].shape)
        if in_file != shape:
            raise UserError(f"{name} is {in_file} in the file, but {shape} by config.json; copy both again")
    if left:
        raise UserError(f"the file holds {len(left)} weights that such a model does not have, for example {min(left)}")
    return found


def with_zero_biases(theirs: Mapping[str, Tensor], unbiased: tuple[str, ...]) -> dict[str, Tensor]:
    """The weights, and zeros for the biases of the matrices in modules whose names end like this: here all have one, or none.

    Raises UserError if the file has such a bias.
    """
    found = dict(theirs)
    for name, weight in theirs.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module.endswith(unbiased):
            if f"{module}.bias" in theirs:
                raise UserError(f"the file holds {module}.bias, which such a model does not have by config.json")
            found[f"{module}.bias"] = torch.zeros(weight.shape[:1])
    return found
