"""TransformerLens's architecture adapter for AndreaForCausalLM, the model whose code is in an exported folder.

    from andrea.interop.transformer_lens.adapter import load_bridge
    logits, cache = load_bridge("my-model").run_with_cache("def main(")

Attention is computed by the exported code, which has options that TransformerLens does not know. So hooks read attention
patterns (attn.hook_pattern), but a changed pattern does not change the output, and TransformerLens warns of that. Hooks on
the residual stream, on the projections and on what the heads write (attn.hook_z) do change the output.
"""

import os
from pathlib import Path
from typing import Any, final

from transformer_lens.factories import architecture_adapter_factory as factory
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.architecture_adapter import ArchitectureAdapter
from transformer_lens.model_bridge.generalized_components import (
    AttentionBridge,
    BlockBridge,
    EmbeddingBridge,
    LinearBridge,
    MLPBridge,
    NormalizationBridge,
    PosEmbedBridge,
    RMSNormalizationBridge,
    UnembeddingBridge,
)

ARCHITECTURE = "AndreaForCausalLM"


@final
class AndreaAdapter(ArchitectureAdapter):
    """Gives the parts of AndreaForCausalLM TransformerLens's names. Weights are never folded or centred."""

    supports_fold_ln = False
    supports_center_writing_weights = False

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self._set_rms_rotary_defaults()
        self.cfg.attn_implementation = "eager"
        self.cfg.default_prepend_bos = True
        self.weight_processing_conversions = {}
        self.component_mapping = self.components("rmsnorm", "swiglu", "rotary")

    def prepare_loading(self, model_name: str, model_kwargs: dict[str, Any]) -> None:
        """Called with the exported configuration, which has more than `cfg`, before the model is loaded."""
        config = model_kwargs["config"]
        is_rms = config.norm == "rmsnorm"
        self.cfg.normalization_type, self.cfg.final_rms = ("RMS" if is_rms else "LN"), is_rms
        self.cfg.gated_mlp = config.mlp == "swiglu"
        self.cfg.positional_embedding_type = "standard" if config.position == "learned" else "rotary"
        self.component_mapping = self.components(config.norm, config.mlp, config.position)

    def components(self, norm: str, mlp: str, position: str) -> dict[str, Any]:
        """TransformerLens's name of each part -> a wrapper that knows its name in the exported code."""
        norm_bridge = RMSNormalizationBridge if norm == "rmsnorm" else NormalizationBridge
        how = {"config": self.cfg, "use_native_layernorm_autograd": True}  # the model's own norm computes
        projections = {name: LinearBridge(name=f"{name}_proj") for name in ("q", "k", "v", "o")}
        layers = {"in": LinearBridge(name="up_proj"), "out": LinearBridge(name="down_proj")}
        plain_mlp = MLPBridge(name="mlp", config=self.cfg, submodules=layers)
        submodules = {
            "ln1": norm_bridge(name="input_layernorm", **how),
            "attn": AttentionBridge("self_attn", self.cfg, projections, maintain_native_attention=True),
            "ln2": norm_bridge(name="post_attention_layernorm", **how),
            "mlp": self._gated_mlp() if mlp == "swiglu" else plain_mlp,
        }
        found = {"embed": EmbeddingBridge(name="model.embed_tokens")}
        if position == "learned":
            found["pos_embed"] = PosEmbedBridge(name="model.embed_positions")
        return found | {
            "blocks": BlockBridge(name="model.layers", submodules=submodules),
            "ln_final": norm_bridge(name="model.norm", **how),
            "unembed": UnembeddingBridge(name="lm_head"),
        }


def register() -> None:
    """Make `TransformerBridge.boot_transformers` know AndreaForCausalLM.

    The entry point `transformer_lens.architectures` and `register_adapter` do not suffice in TransformerLens 4.3: they add
    to a copy of the table in which `boot_transformers` looks the class up.
    """
    factory.ArchitectureAdapterFactory.register_adapter(ARCHITECTURE, AndreaAdapter)
    factory.SUPPORTED_ARCHITECTURES[ARCHITECTURE] = AndreaAdapter


def load_bridge(folder: str | os.PathLike, **how: Any) -> TransformerBridge:
    """An exported folder as a TransformerBridge. how: further arguments of `boot_transformers`, such as device="cpu".

    Runs the code in the folder, if it has any: export it yourself, or read it.
    """
    register()
    bridge = TransformerBridge.boot_transformers(str(Path(folder)), trust_remote_code=True, **how)
    # End-of-text begins every text; TransformerLens's adapter of Qwen3 leaves it out.
    bridge.cfg.default_prepend_bos = True
    return bridge
