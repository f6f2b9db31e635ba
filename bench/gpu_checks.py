"""Correctness on a CUDA GPU: every implementation of attention, and the whole model, against float64.

The rule is that of the tests (tests/oracle.py), with the readable path and the judged one on the card and the truth on
the CPU. fp32 products are compared in full fp32, not TF32.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import ROOT, NumberTokenizer, make_andrea, model_config, write_record
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(ROOT / "tests"))

from oracle import MASKS, Case, judge

from andrea.attention import Case as AttentionCase
from andrea.attention import DotProduct, refusal
from andrea.attention.implementations import triton as triton_path
from andrea.generation import Engine, Request, Sampling, next_logits_uncached
from andrea.model.layers import softcap
from andrea.text.loader import IGNORED_TARGET
from andrea.training.loss.fused import fused_cross_entropy

#         B  H  G   T    S   d_k  d_v
SHAPES = [
    (2, 2, 2, 13, 13, 16, 16), (2, 4, 2, 127, 127, 32, 32), (1, 2, 1, 1, 29, 64, 64), (2, 2, 1, 513, 513, 64, 64),
    (1, 3, 3, 257, 257, 128, 128), (2, 6, 2, 67, 139, 64, 64), (1, 2, 2, 143, 11, 32, 64), (1, 1, 1, 97, 97, 256, 256),
    (2, 3, 1, 1, 1, 16, 16), (1, 2, 2, 1031, 1031, 128, 128), (2, 2, 2, 129, 129, 100, 48),
]  # fmt: skip
IMPLEMENTATIONS = ("triton", "sdpa", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "flex")
OF_EACH_KIND = ("none", "causal", "window & documents & padding")
SCORES = ({"softcap": 1.5}, {"alibi": True}, {"sink": True}, {"softcap": 4.0, "alibi": True, "sink": True})


def attention_rows(device: str) -> Iterator[list[dict]]:
    """Our kernel first; for each implementation and type every mask on two shapes, one mask of each kind on the rest."""
    for name in IMPLEMENTATIONS:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            if name == "flex" and dtype != torch.bfloat16:  # FlexAttention compiles anew for each case
                continue
            shapes = SHAPES[1:3] if name == "flex" else SHAPES[:5] if dtype == torch.float32 else SHAPES
            for index, shape in enumerate(shapes):
                for mask in MASKS if index < 2 and name != "flex" else OF_EACH_KIND:
                    yield judged(name, Case(*shape, mask, dtype), device)
    for name in IMPLEMENTATIONS:
        for how in SCORES:
            for mask in OF_EACH_KIND:
                for shape in (SHAPES[1], SHAPES[5]):
                    yield judged(name, Case(*shape, mask, torch.bfloat16, **how), device)
    triton_path.ATOMICS_ARE_FASTER = True
    for shape in SHAPES:
        yield judged("triton", Case(*shape, "causal", torch.float16), device, "triton, atomic dQ")
    yield judged("triton", Case(*SHAPES[1], "causal", torch.float16, **SCORES[-1]), device, "triton, atomic dQ")
    triton_path.ATOMICS_ARE_FASTER = False


def judged(name: str, case: Case, device: str, shown: str | None = None) -> list[dict]:
    """One row, or none where the implementation says that it does not serve the case."""
    query, key, value, _ = case.inputs(case.dtype, device)
    how = {"modifiers": case.made_modifiers(), "sink": case.made_sink(case.dtype, device)}
    asked = AttentionCase(query, key, value, DotProduct(), case.made_mask(device), statistics=name == "triton", **how)
    if refusal(name, asked) is not None:
        return []
    row = {"check": shown or name, "case": str(case), "passes": True}
    try:
        judge(case, name, measured=name == "triton", device=device)
    except Exception as error:  # whatever it is, the other cases are still to be judged
        why = (str(error) or repr(error)).splitlines()[0]
        if "No available kernel" in why or "No viable backend" in why:  # torch has none for this type or width
            return []
        row |= {"passes": False, "why": why}
    return [row]


def model_row(precision: str, device: str) -> dict:
    """Largest error of andrea-nano's logits on the card, beside their largest value."""
    model = make_andrea(model_config("andrea-nano"), 4096, "cpu")
    tokens = torch.randint(4096, (2, 97), generator=torch.Generator().manual_seed(2))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    with torch.no_grad():
        truth = model.double().logits(model(tokens)).double()
        on_card = model.to(device, dtype)
        logits = on_card.logits(on_card(tokens.to(device))).cpu().double()
    error, largest = float((logits - truth).abs().max()), float(truth.abs().max())
    passes = error < largest * torch.finfo(dtype).eps * 32
    return {"check": f"andrea-nano, {precision}", "case": f"error {error:.3g} of {largest:.3g}", "passes": passes}


def compiled_row(precision: torch.dtype, device: str) -> dict:
    """One compiled training step through our kernel, statistics included, against the eager one."""
    from andrea.attention import HeadStatistics
    from andrea.training.loss.cross_entropy import loss_sum_from_hidden

    model = make_andrea(model_config("andrea-nano"), 4096, device)
    for block in model.blocks:
        block.attention.implementation = "triton"
    tokens = torch.randint(4096, (4, 256), generator=torch.Generator().manual_seed(2)).to(device)

    def step(tokens):
        with torch.autocast(device, precision):
            hidden, layers = model(tokens, statistics=True)
            nats = loss_sum_from_hidden(model, hidden, tokens)
        return nats, HeadStatistics.of_layers(layers)

    results = []
    for run in (step, torch.compile(step, fullgraph=True, dynamic=False)):
        nats, heads = run(tokens)
        nats.backward()
        gradient = model.blocks[0].attention.query.weight.grad.clone()
        model.zero_grad()
        results.append((float(nats.detach()), heads.figures()["entropy_nats"].cpu(), gradient.cpu()))
    (eager, compiled) = results
    near = abs(eager[0] / compiled[0] - 1) < 1e-2 and torch.allclose(eager[1], compiled[1], atol=2e-2)
    near = near and float((eager[2] - compiled[2]).norm() / eager[2].norm()) < 5e-2
    return {
        "check": f"compiled step, {precision}",
        "case": f"loss {eager[0]:.1f} / {compiled[0]:.1f}",
        "passes": bool(near),
    }


def generation_row(device: str, lookahead: int = 0, **how) -> dict:
    """Greedy text of andrea-nano by CUDA graph, beside the same text made again and again from the start, on the card."""
    model = make_andrea(model_config("andrea-nano"), 4096, device).eval().requires_grad_(False)
    request = Request(
        max_new_tokens=300, sampling=Sampling(temperature=0), lookahead=lookahead
    )  # more than the window holds
    prompts = [[1, 2, 3, 4, 5], [9, 8, 9, 8, 9], [7]]
    engine, written = Engine(model, NumberTokenizer(4096), dtype=torch.float32, **how), [[] for _ in prompts]
    for piece in engine.stream_all(prompts, request):
        written[piece.sample].append(piece.token)
    alone = [[piece.token for piece in engine.stream(prompt, request)] for prompt in prompts]
    twin = list(prompts[0])
    for _ in range(60):
        twin.append(int(next_logits_uncached(engine.model, torch.tensor([twin], device=device)).argmax()))
    passes = written == alone and alone[0][:60] == twin[5:]
    if device != "cpu":
        passes = passes and any(engine.step.recorded.values())  # a graph was made, and not only asked for
    return {"check": "generation", "case": f"lookahead={lookahead}, {how}", "passes": passes}


def loss_rows(device: str) -> Iterator[dict]:
    """Head and loss fused, by our kernel on the card: value and gradients by the rule of the tests."""
    for dtype in (torch.float32, torch.bfloat16):
        for cap in (None, 15.0):
            rows = torch.randn(257, 192, generator=torch.Generator().manual_seed(3))
            weight = torch.randn(50257, 192, generator=torch.Generator().manual_seed(4)) / 14
            targets = torch.randint(50257, (257,), generator=torch.Generator().manual_seed(5))
            targets[::9] = IGNORED_TARGET
            truth, readable, fused = (
                loss_and_gradients(of, rows, weight, targets, cap, kind, where)
                for of, kind, where in (
                    (readable_nats, torch.float64, "cpu"),
                    (readable_nats, dtype, device),
                    (fused_cross_entropy, dtype, device),
                )
            )
            passes = all(
                (mine - exact).abs().max()
                <= 2 * (theirs - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
                for mine, theirs, exact in zip(fused, readable, truth, strict=True)
            )
            yield {"check": f"loss, {dtype}", "case": f"soft cap {cap}", "passes": bool(passes)}


def readable_nats(rows, weight, targets, cap, dtype) -> torch.Tensor:
    logits = rows.to(dtype) @ weight.to(dtype).mT
    logits = logits if cap is None else softcap(logits.to(torch.promote_types(dtype, torch.float32)), cap)
    return cross_entropy(logits.to(torch.promote_types(dtype, torch.float32)), targets, reduction="sum")


def loss_and_gradients(of, rows, weight, targets, cap, dtype, device) -> list[torch.Tensor]:
    """Nats and the gradients of hidden and head, float64 on the CPU."""
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = [each.to(device, kept).requires_grad_() for each in (rows, weight)]
    nats = of(*leaves, targets.to(device), cap, dtype)
    gradients = torch.autograd.grad(nats, leaves)
    return [each.detach().cpu().double() for each in (nats, *gradients)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "checks-cuda.json")
    parser.add_argument("--device", default="cuda", help="cpu, under TRITON_INTERPRET=1, tries the program alone")
    chosen = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch._dynamo.config.recompile_limit = 1000
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    rows = [compiled_row(precision, chosen.device) for precision in (torch.bfloat16, torch.float16)]
    rows += [model_row(precision, chosen.device) for precision in ("fp32", "bf16")]
    rows += loss_rows(chosen.device)
    for how in (
        {},
        {"lookahead": 3},
        {"compiled": True},
        {"compiled": True, "lookahead": 3},
        {"compiled": True, "int8": True},
    ):
        try:
            rows.append(generation_row(chosen.device, **how))
        except Exception as error:  # whatever it is, attention is still to be judged
            rows.append({"check": "generation", "case": str(how), "passes": False, "why": repr(error)[:300]})
    for row in rows:
        print(row, flush=True)
    write_record(chosen.output, "checks", chosen.device, {"rows": rows})
    saved = time.monotonic()
    for new in attention_rows(chosen.device):
        rows += new
        for row in new:
            if not row["passes"]:
                print("FAILS ", row, flush=True)
        if time.monotonic() - saved > 20:  # a run that is cut off leaves what it has
            write_record(chosen.output, "checks", chosen.device, {"rows": rows})
            print(f"{len(rows)} cases so far, now {rows[-1]['check']}: {rows[-1]['case']}", flush=True)
            saved = time.monotonic()
    for name in dict.fromkeys(row["check"] for row in rows):
        mine = [row["passes"] for row in rows if row["check"] == name]
        print(f"{name:28} {sum(mine):4} passed, {len(mine) - sum(mine):3} failed")
    write_record(chosen.output, "checks", chosen.device, {"rows": rows})


if __name__ == "__main__":
    main()
