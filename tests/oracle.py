"""The rule by which every fast path is judged (design.md): against float64 it may err at most twice what the readable
path errs in the same precision, plus one unit in the last place of the largest number it returns.

For the gradients of query and key that number is the largest they are made of, the gradient of a weight, dz·v (over
magnitudes, as the error of a sum goes). Every
fused kernel subtracts z·dz from it, which the readable path sums up as Σ p (dz·v) instead: where a query sees one key
the two are equal, the readable path's gradient is exactly zero, and a fused one's is what two sums of the same numbers
in another order differ by. (In 16 bits the readable path's own error is larger than that.)

B batch, H query heads, G key/value heads, T queries, S keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from andrea.attention import Mask, ScaledDotProduct, attend, causal, key_padding, packed_documents, sliding_window
from andrea.attention.shapes import shared_by_group

STATISTICS = ("log_sum_exp", "largest_logit", "entropy_nats")
MASSES = ("first_token_mass", "previous_token_mass")


@dataclass(frozen=True)
class Case:
    B: int
    H: int
    G: int
    T: int
    S: int
    d_k: int
    d_v: int
    mask: str
    dtype: torch.dtype = torch.float32

    def inputs(self, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
        """Query, key, value and the upstream gradient, the same numbers in every type that can hold them."""
        generator = torch.Generator().manual_seed(hash((self.T, self.S, self.d_k)) % 2**31)
        shapes = (
            (self.B, self.H, self.T, self.d_k),
            (self.B, self.G, self.S, self.d_k),
            (self.B, self.G, self.S, self.d_v),
            (self.B, self.H, self.T, self.d_v),
        )
        rounded = [torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype) for shape in shapes]
        return [tensor.to(device, dtype) for tensor in rounded]

    def made_mask(self, device: str = "cpu") -> Mask | None:
        row = torch.arange(self.B, device=device)[:, None]
        lengths = (row * 7) % (self.S + 1)  # the first row of the batch sees nothing
        documents = torch.arange(self.S, device=device) // 5 + row[..., None]
        return {
            "none": None,
            "causal": causal(),
            "window": sliding_window(4),
            "padding": key_padding(lengths),
            "documents": packed_documents(documents.expand(self.B, 1, self.S)),
            "causal & padding": causal() & key_padding(lengths),
            "causal & documents": causal() & packed_documents(documents),
            "window & documents & padding": sliding_window(3) & packed_documents(documents) & key_padding(lengths),
        }[self.mask]


MASKS = (
    "none", "causal", "window", "padding", "documents", "causal & padding", "causal & documents",
    "window & documents & padding",
)  # fmt: skip


def everything(
    case: Case, implementation: str, dtype: torch.dtype, measured: bool, attend=attend, device: str = "cpu"
) -> dict[str, Tensor]:
    """Output, gradients and, where measured, statistics: by name, on the CPU."""
    *leaves, upstream = case.inputs(dtype, device)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    how = {"compatibility": ScaledDotProduct(), "mask": case.made_mask(device), "implementation": implementation}
    output, rows = attend(*leaves, statistics=True, **how) if measured else (attend(*leaves, **how), None)
    gradients = torch.autograd.grad(output, leaves, upstream)
    results = {"output": output.detach()} | dict(zip(("d_query", "d_key", "d_value"), gradients, strict=True))
    results |= {name: getattr(rows, name) for name in STATISTICS + MASSES} if rows else {}
    return {name: tensor.cpu() for name, tensor in results.items()}


def judge(case: Case, implementation: str, measured: bool = False, attend_by=attend, device: str = "cpu") -> None:
    """Assert the rule for every result of the case; infinities must stand at the same places.

    The truth is computed on the CPU; the readable path and the one that is judged on `device`.
    """
    truth = everything(case, "reference", torch.float64, measured)
    eager = everything(case, "reference", case.dtype, measured, device=device)
    fast = everything(case, implementation, case.dtype, measured, attend_by, device)
    for name, exact in truth.items():
        assert fast[name].shape == exact.shape
        assert torch.equal(fast[name].isinf(), exact.isinf()), f"{name}: infinities of {case}"
        finite = ~exact.isinf()
        if not finite.any():
            continue
        error, allowed = ((other[name].double() - exact)[finite].abs().max() for other in (fast, eager))
        largest, kept_in = exact[finite].abs().max(), torch.float32 if name in STATISTICS + MASSES else case.dtype
        if name in ("d_query", "d_key"):
            *_, value, upstream = case.inputs(torch.float64)
            largest = (upstream.abs() @ shared_by_group(value, upstream).abs().mT).max()
        if name in MASSES:  # e^(s - lse): as exact as a score and its log-sum-exp are
            largest = 4 * max(1, truth["log_sum_exp"].nan_to_num(neginf=0).abs().max())
        last_place = torch.finfo(kept_in).eps * largest
        assert error <= 2 * allowed + last_place, f"{name}: {error:.3g} > 2 · {allowed:.3g} + {last_place:.3g}, {case}"
