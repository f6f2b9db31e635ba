"""Initial values and learning rates at another width and depth, so that rates tuned on a small model suit a large one.

N = d_model / tuned_d_model and L = n_layer / tuned_n_layer: how much wider and deeper the model is than the model that
its rates were tuned on. Width follows muP (Yang et al. 2022, arXiv 2203.03466, table 8): one update changes every
activation by the same amount at any width. Depth follows CompleteP (Dey et al. 2025, arXiv 2505.01618): each branch adds
1/L of its output to the residual stream. Muon's update has the same spectral norm at any width without a factor (Yang,
Simon and Bernstein 2023, arXiv 2310.17813). These papers write multipliers into the forward pass. Here all multipliers
are moved into initial values and rates: the same function is trained, and the code of the model stays as it is. The
tuned model and the model that is trained must have the same head width and the same d_mlp / d_model.

| parameter                                | initial value | AdamW's rate | Muon's rate | AdamW's epsilon |
|------------------------------------------|---------------|--------------|-------------|-----------------|
| embedding, learned positions             | 1             | 1            |             | 1 / N           |
| value_mix of the first layer             | 1             | 0            |             | 1               |
| in a branch: 1-D, compatibility function | 1             | 1            |             | 1 / (N L)       |
| in a branch: matrices that read x        | 1             | 1 / N        | 1           | 1 / (N L)       |
| matrices that write into the residual    | 1 / √L        | 1 / (N L)    | 1 / L       | 1 / N           |
| their biases                             | 1             | 1 / L        |             | 1 / N           |
| final norm                               | 1             | 1            |             | 1 / N           |
| head                                     | 1 / N         | 1 / N        |             | 1               |
| final norm before a tied head            | 1 / N         | 1 / N        |             | 1               |

The first column multiplies the values that `initialise` draws. Those depend on fan-in and on 1 / √n_layer already, so
that 1 / √L is the part of CompleteP's 1 / L that is left. The first layer's value_mix mixes its values with themselves, so
its gradient is rounding error alone and must not change it. Weight decay removes the same share of a matrix per step at
any size, because it uses the rate before these factors.
"""

from __future__ import annotations

from dataclasses import dataclass

from andrea.config import ModelConfig, OptimizerConfig

WRITES_RESIDUAL = (".attention.output.weight", ".mlp.down.weight")


@dataclass(frozen=True)
class Factors:
    """Factors of a parameter's initial value, learning rates and epsilon."""

    initial: float = 1.0
    adamw_rate: float = 1.0
    muon_rate: float = 1.0
    epsilon: float = 1.0


@dataclass(frozen=True)
class Transfer:
    """This model's size over the size its rates were tuned at. wider: ratio of d_model; deeper: of n_layer."""

    wider: float = 1.0
    deeper: float = 1.0
    tied_head: bool = False

    @classmethod
    def of(cls, model: ModelConfig, optimizer: OptimizerConfig) -> Transfer:
        """All factors are 1 if the rates are the model's own (`optimizer.tuned_d_model=null`)."""
        if optimizer.tuned_d_model is None or optimizer.tuned_n_layer is None:
            return cls(tied_head=model.tied_head)
        wider, deeper = model.d_model / optimizer.tuned_d_model, model.n_layer / optimizer.tuned_n_layer
        return cls(wider, deeper, model.tied_head)

    def factors(self, name: str) -> Factors:
        """The factors of the parameter of this name: the table above, with special cases first."""
        wider, deeper = self.wider, self.deeper
        if name.endswith(WRITES_RESIDUAL):
            return Factors(deeper**-0.5, 1 / (wider * deeper), 1 / deeper, 1 / wider)
        if name.endswith(tuple(weight.replace("weight", "bias") for weight in WRITES_RESIDUAL)):
            return Factors(adamw_rate=1 / deeper, epsilon=1 / wider)
        if name == "blocks.0.attention.value_mix":
            return Factors(adamw_rate=0.0)
        if name.startswith("blocks."):
            is_matrix = name.endswith(".weight") and not name.endswith("norm.weight") and ".compatibility." not in name
            return Factors(adamw_rate=1 / wider if is_matrix else 1.0, epsilon=1 / (wider * deeper))
        if name.startswith("head.") or (name.startswith("final_norm.") and self.tied_head):
            return Factors(initial=1 / wider, adamw_rate=1 / wider)
        return Factors(epsilon=1 / wider)
