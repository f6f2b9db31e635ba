"""Correctness on a CUDA card: attention and the whole model against the same arithmetic in fp64 on the CPU.

The rule: an implementation may err at most twice what the readable path errs in the same precision on the same card,
plus one unit in the last place of the largest output. fp32 products are compared in full fp32, not TF32.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from common import ROOT, make_andrea, model_config, write_record

from andrea.attention import attend, causal


def attention_errors(dtype: torch.dtype, length: int, d_head: int) -> dict:
    """Largest absolute error of each implementation on (2, 3, length, d_head), values and gradients alike."""
    generator = torch.Generator().manual_seed(length + d_head)
    parts = [torch.randn(2, 3, length, d_head, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4)]
    results = {}
    for name, device, precision in (
        ("truth", "cpu", torch.float64),
        ("reference", "cuda", dtype),
        ("sdpa", "cuda", dtype),
    ):
        q, k, v, upstream = (part.to(device=device, dtype=precision) for part in parts)
        leaves = [leaf.requires_grad_() for leaf in (q, k, v)]
        z = attend(*leaves, mask=causal(), implementation="reference" if name == "truth" else name)
        results[name] = [z.detach(), *torch.autograd.grad(z, leaves, upstream)]
    row = {"dtype": str(dtype), "length": length, "d_head": d_head}
    truth = [tensor.double() for tensor in results["truth"]]
    for name in ("reference", "sdpa"):
        row[name] = [float((a.cpu().double() - b).abs().max()) for a, b in zip(results[name], truth, strict=True)]
    last_place = torch.finfo(dtype).eps
    allowed = [2 * error + last_place * float(t.abs().max()) for error, t in zip(row["reference"], truth, strict=True)]
    row["passes"] = all(error <= most for error, most in zip(row["sdpa"], allowed, strict=True))
    return row


def model_error(precision: str) -> dict:
    """Largest error of andrea-nano's logits on the card, beside their largest value."""
    model = make_andrea(model_config("andrea-nano"), 4096, "cpu")
    with torch.no_grad():
        model.head.weight.normal_(generator=torch.Generator().manual_seed(1))
    tokens = torch.randint(4096, (2, 97), generator=torch.Generator().manual_seed(2))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    with torch.no_grad():
        truth = model.double().logits(model(tokens)).double()
        on_card = model.to("cuda", dtype)
        logits = on_card.logits(on_card(tokens.cuda())).cpu().double()
    error, largest = float((logits - truth).abs().max()), float(truth.abs().max())
    return {
        "model": "andrea-nano",
        "precision": precision,
        "error": error,
        "passes": error < largest * torch.finfo(dtype).eps * 32,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "checks-cuda.json")
    chosen = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = [
        attention_errors(dtype, length, d_head)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for length in (1, 7, 127, 513)
        for d_head in (32, 64, 128)
    ]
    rows += [model_error(precision) for precision in ("fp32", "bf16")]
    for row in rows:
        print("passes" if row["passes"] else "FAILS ", {key: value for key, value in row.items() if key != "passes"})
    write_record(chosen.output, "checks", "cuda", {"rows": rows})
    print(f"{sum(row['passes'] for row in rows)} passed, {sum(not row['passes'] for row in rows)} failed")


if __name__ == "__main__":
    main()
