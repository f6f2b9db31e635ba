"""Matrix products of the blocks in 8-bit floating point, by torchao: for cards that multiply in it, from Ada and Hopper on.

A linear layer's three products, y = x Wᵀ, dx = dy W and dW = dyᵀ x, are taken of operands that are divided by their own
largest magnitude and rounded: x and W to e4m3 (4 bits of exponent, 3 of mantissa), dy to e5m2 (Micikevicius et al. 2022,
arXiv 2209.05433). Weights stay fp32, sums are taken in fp32, and what is not a product stays bf16. Attention, embedding and
head keep their own precision. Rounding costs a pass over each operand: what it saves depends on the size of the matrices,
so that it is off until it is asked for, and `bench/gpu.sh` measures both sides. What looks at the model while it trains
(samples, the heads' statistics, the lens) sees it multiply in 8 bits too; read from its checkpoint it is a plain model.
"""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

import torch
from torch import nn

from andrea.config import ModelConfig, UserError

MULTIPLE = 16  # in which a product's sizes come, in 8 bits
LEAST_CAPABILITY = (8, 9)


def check_float8(model: ModelConfig, device: torch.device, precision: str) -> None:
    """Raises UserError where it cannot be had."""
    if device.type != "cuda":
        raise UserError(f"float8=true needs a CUDA card, got device={device.type}; use float8=false")
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        shown, least = (".".join(map(str, each)) for each in (capability, LEAST_CAPABILITY))
        raise UserError(
            f"float8=true needs compute capability {least} or later, this card has {shown}; use float8=false"
        )
    if precision != "bf16":
        raise UserError(f"float8=true goes with bf16, got precision={precision}; use precision=bf16 or float8=false")
    for key in ("d_model", "d_mlp", "sequence_length"):
        if getattr(model, key) % MULTIPLE:
            raise UserError(
                f"float8=true needs model.{key} in multiples of {MULTIPLE}, got {getattr(model, key)}; "
                f"change it, or use float8=false"
            )
    try:
        import_quietly()
    except ImportError:
        raise UserError("float8=true needs torchao; pip install torchao, or use float8=false") from None


def to_float8(blocks: nn.Module) -> None:
    """Have the linear layers inside multiply in 8 bits, in place; parameters and their names stay what they are."""
    import_quietly().convert_to_float8_training(blocks, module_filter_fn=lambda module, name: fits(module))


def fits(module: nn.Module) -> bool:
    """Whether the layer's products can be taken in 8 bits."""
    return isinstance(module, nn.Linear) and not (module.in_features % MULTIPLE or module.out_features % MULTIPLE)


def import_quietly() -> ModuleType:
    """torchao.float8, which warns of kernels for other purposes that are not there. Raises ImportError."""
    told = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return importlib.import_module("torchao.float8")
    finally:
        logging.disable(told)
