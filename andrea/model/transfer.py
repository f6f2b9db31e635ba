"""How initial values and learning rates carry over to another width and depth, so that what is tuned small holds large.

N = d_model / tuned_d_model and L = n_layer / tuned_n_layer: how much wider and deeper the model is than the one its
rates are given for. Width follows muP (Yang et al. 2022, arXiv 2203.03466, table 8): one update moves every activation
by as much at any width. Depth follows CompleteP (Dey et al. 2025, arXiv 2505.01618): each branch adds its 1/L share to
the residual stream. Muon's update has the same spectral norm at any width by itself (Yang, Simon and Bernstein 2023,
arXiv 2310.17813). Those papers write multipliers into the forward pass; here they are all moved into initial values and
rates, which trains the same function and leaves the model's own code alone. What is tuned and what is run must have one
head width and one d_mlp / d_model.

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

The first column multiplies what `initialise` draws, which already knows fan-in and 1 / √n_layer: √L times that makes
1 / L. The first layer's value_mix mixes its values with themselves: its gradient is what rounding leaves, and must not be
followed. Weight decay takes the same share of a matrix per step at any size: the share is of the rate before these factors.
"""

from __future__ import annotations

from dataclasses import dataclass

from andrea.config import ModelConfig, OptimizerConfig

WRITES_RESIDUAL = (".attention.output.weight", ".mlp.down.weight")


@dataclass(frozen=True)
class Factors:
    """What a parameter's initial value, rate and epsilon are multiplied by."""

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
        """The identity where the rates are the model's own (`optimizer.tuned_d_model=null`)."""
        if optimizer.tuned_d_model is None or optimizer.tuned_n_layer is None:
            return cls(tied_head=model.tied_head)
        wider, deeper = model.d_model / optimizer.tuned_d_model, model.n_layer / optimizer.tuned_n_layer
        return cls(wider, deeper, model.tied_head)

    def factors(self, name: str) -> Factors:
        """The factors of the parameter `name`: the table above, top to bottom."""
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
