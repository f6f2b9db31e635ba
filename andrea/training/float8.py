"""Matrix products of the blocks in 8-bit floating point, by torchao, on GPUs that support it (Ada, Hopper and later).

A linear layer computes three products: y = x Wᵀ, dx = dy W and dW = dyᵀ x. Each operand is divided by its own largest
magnitude and rounded: x and W to e4m3 (4 bits of exponent, 3 of mantissa), dy to e5m2 (Micikevicius et al. 2022,
arXiv 2209.05433). Weights stay fp32, sums are computed in fp32, and all other operations stay bf16. Attention, embedding
and head keep their own precision.

Rounding needs an extra pass over each operand, so small matrices may gain nothing. Therefore 8-bit products are off by
default; `bench/gpu.sh` measures the speed with and without them. Samples, head statistics and lens pages of a run in
training also use 8-bit products. A model loaded from a checkpoint does not.
"""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

import torch
from torch import nn

from andrea.config import ModelConfig, UserError

SIZE_MULTIPLE = 16  # the sizes of an 8-bit product must be multiples of this
LEAST_CAPABILITY = (8, 9)


def check_float8(model: ModelConfig, device: torch.device, precision: str) -> None:
    """Raises UserError if the model, the device or the precision does not allow 8-bit products."""
    if device.type != "cuda":
        raise UserError(f"float8=true needs a CUDA GPU, got device={device.type}; use float8=false")
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        shown, least = (".".join(map(str, each)) for each in (capability, LEAST_CAPABILITY))
        raise UserError(
            f"float8=true needs compute capability {least} or later, but this GPU has {shown}; use float8=false"
        )
    if precision != "bf16":
        raise UserError(
            f"float8=true needs precision=bf16, got precision={precision}; use precision=bf16 or float8=false"
        )
    for key in ("d_model", "d_mlp", "sequence_length"):
        if getattr(model, key) % SIZE_MULTIPLE:
            raise UserError(
                f"float8=true needs model.{key} in multiples of {SIZE_MULTIPLE}, got {getattr(model, key)}; "
                f"change model.{key}, or use float8=false"
            )
    try:
        import_quietly()
    except ImportError:
        raise UserError("float8=true needs torchao; pip install torchao, or use float8=false") from None


def to_float8(blocks: nn.Module) -> None:
    """Convert the linear layers of `blocks` to 8-bit products, in place. Parameters and their names do not change."""
    import_quietly().convert_to_float8_training(blocks, module_filter_fn=lambda module, name: fits(module))


def fits(module: nn.Module) -> bool:
    """Whether the module is a linear layer whose sizes are multiples of SIZE_MULTIPLE."""
    return isinstance(module, nn.Linear) and not (
        module.in_features % SIZE_MULTIPLE or module.out_features % SIZE_MULTIPLE
    )


def import_quietly() -> ModuleType:
    """torchao.float8, without its warnings about missing kernels, which are not used here. Raises ImportError."""
    disabled_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return importlib.import_module("torchao.float8")
    finally:
        logging.disable(disabled_level)
