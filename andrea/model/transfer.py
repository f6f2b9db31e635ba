"""Hyperparameter transfer: learning rates tuned on a small model are adapted to a larger one.

N = d_model / tuned_d_model and L = n_layer / tuned_n_layer say how much wider and deeper the model is than the tuned
model. Width follows muP (Yang et al. 2022, arXiv 2203.03466, table 8): one update changes every activation by the same
amount at any width. Depth follows CompleteP (Dey et al. 2025, arXiv 2505.01618): each branch adds 1/L of its output to
the residual stream. Muon's update has the same spectral norm at any width, so it needs no factor for width (Yang, Simon
and Bernstein 2023, arXiv 2310.17813). These papers multiply activations in the forward pass. Here the initial values
and rates are multiplied instead. The same function is trained, and the code of the model does not change. Both models
must have the same head width and the same d_mlp / d_model. M = n_head d_head / tuned_d_model says how much more numbers the
output projection of attention reads; without model.d_head it is N.

| parameter                                | initial value | AdamW's rate | Muon's rate | AdamW's epsilon |
|------------------------------------------|---------------|--------------|-------------|-----------------|
| embedding, bigrams, learned positions    | 1             | 1            |             | 1 / N           |
| tables of value embeddings               | 1             | 1            |             | 1 / (N L)       |
| value_mix of the first layer             | 1             | 0            |             | 1               |
| in a branch: 1-D, compatibility function | 1             | 1            |             | 1 / (N L)       |
| in a branch: matrices that read x, gates | 1             | 1 / N        | 1           | 1 / (N L)       |
| matrices that write into the residual    | 1 / √L        | 1 / (N L)    | 1 / L       | 1 / N           |
| of these, attention's with model.d_head  | 1 / √L        | 1 / (M L)    | 1 / L       | 1 / N           |
| their biases                             | 1             | 1 / L        |             | 1 / N           |
| final norm                               | 1             | 1            |             | 1 / N           |
| head                                     | 1 / N         | 1 / N        |             | 1               |
| final norm before a tied head            | 1 / N         | 1 / N        |             | 1               |

"In a branch" means in attention, an MLP or their norms. The first column multiplies the values that `initialise` draws.
`initialise` already divides by √n_layer, so only 1 / √L remains of CompleteP's 1 / L. The first layer's value_mix has
rate 0: it mixes the layer's values with themselves, so its gradient is only rounding error. LoRA's factors have the row of
1-D parameters: their rates are not scaled. Weight decay uses the rate before these factors, so it removes the same share of
a matrix per step at any size.
"""

from __future__ import annotations

from dataclasses import dataclass

from andrea.config import ModelConfig, OptimizerConfig

WRITES_RESIDUAL = (".attention.output.weight", ".mlp.down.weight")


@dataclass(frozen=True)
class Factors:
    """The factors by which a parameter's initial value, learning rates and epsilon are multiplied."""

    initial: float = 1.0
    adamw_rate: float = 1.0
    muon_rate: float = 1.0
    epsilon: float = 1.0


@dataclass(frozen=True)
class Transfer:
    """The size of the model relative to the tuned model. wider: the ratio N of d_model; deeper: the ratio L of n_layer;
    attended_wider: the ratio M, N if None."""

    wider: float = 1.0
    deeper: float = 1.0
    tied_head: bool = False
    attended_wider: float | None = None

    @classmethod
    def of(cls, model: ModelConfig, optimizer: OptimizerConfig) -> Transfer:
        """The transfer that the configuration describes. If `optimizer.tuned_d_model` is null, all factors are 1."""
        if optimizer.tuned_d_model is None or optimizer.tuned_n_layer is None:
            return cls(tied_head=model.tied_head)
        wider, deeper = model.d_model / optimizer.tuned_d_model, model.n_layer / optimizer.tuned_n_layer
        return cls(wider, deeper, model.tied_head, model.d_attended / optimizer.tuned_d_model)

    def factors(self, name: str) -> Factors:
        """The factors of the parameter `name`, from the table above."""
        wider, deeper = self.wider, self.deeper
        if name.endswith(WRITES_RESIDUAL):
            is_attention = name.endswith(".attention.output.weight") and self.attended_wider is not None
            fan_in = self.attended_wider if is_attention else wider
            return Factors(deeper**-0.5, 1 / (fan_in * deeper), 1 / deeper, 1 / wider)
        if name.endswith(tuple(weight.replace("weight", "bias") for weight in WRITES_RESIDUAL)):
            return Factors(adamw_rate=1 / deeper, epsilon=1 / wider)
        if name == "blocks.0.attention.value_mix":
            return Factors(adamw_rate=0.0)
        if name.startswith("blocks."):
            is_matrix = name.endswith(".weight") and not name.endswith(("norm.weight", ".table.weight"))
            is_matrix = is_matrix and ".compatibility." not in name
            return Factors(adamw_rate=1 / wider if is_matrix else 1.0, epsilon=1 / (wider * deeper))
        if name.startswith("head.") or (name.startswith("final_norm.") and self.tied_head):
            return Factors(initial=1 / wider, adamw_rate=1 / wider)
        return Factors(epsilon=1 / wider)
