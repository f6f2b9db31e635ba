"""Correctness on a CUDA GPU: every implementation of attention, and the whole model, against float64.

The rule is that of the tests (tests/oracle.py), with the readable path and the judged one on the card and the truth on
the CPU. fp32 products are compared in full fp32, not TF32.

    python bench/gpu_checks.py [--only attention loss …] [--processes 16] [--seconds 300]

Most of the time is compilation, so the checks run in several processes. A check that raises, or whose process ends, is a
row that fails; the others go on. Rows are written as they come.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import ROOT, NumberTokenizer, die_with_parent, make_andrea, model_config, write_record
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(ROOT / "tests"))

from oracle import (
    DECODED_CASES,
    HEADS_CASES,
    MASKS,
    Case,
    DecodedCase,
    HeadsCase,
    judge,
    judge_decoded,
    judge_prepared,
)

from andrea.attention import Case as AttentionCase
from andrea.attention import DotProduct, refusal
from andrea.generation import Engine, Request, Sampling, next_logits_uncached
from andrea.model.gpt import softcap
from andrea.text.shards import IGNORED_TARGET
from andrea.training.loss.loss import fused_cross_entropy, training_loss_sum

PARTS = ("heads", "attention", "compiled", "loss", "model", "generation")

#         B  H  G   T    S   d_k  d_v
SHAPES = [
    (2, 2, 2, 13, 13, 16, 16), (2, 4, 2, 127, 127, 32, 32), (1, 2, 1, 1, 29, 64, 64), (2, 2, 1, 513, 513, 64, 64),
    (1, 3, 3, 257, 257, 128, 128), (2, 6, 2, 67, 139, 64, 64), (1, 2, 2, 143, 11, 32, 64), (1, 1, 1, 97, 97, 256, 256),
    (2, 3, 1, 1, 1, 16, 16), (1, 2, 2, 1031, 1031, 128, 128), (2, 2, 2, 129, 129, 100, 48),
]  # fmt: skip
IMPLEMENTATIONS = ("triton", "sdpa", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "flex")
OF_EACH_KIND = ("none", "causal", "window & documents & padding")
SCORES = ({"softcap": 1.5}, {"alibi": True}, {"sink": True}, {"softcap": 4.0, "alibi": True, "sink": True})


@dataclass(frozen=True)
class Check:
    """One check: `part` is what --only names; `rows(device)` returns its rows, none where nothing serves the case."""

    part: str
    name: str
    case: str
    rows: Callable[[str], list[dict]]


def all_checks(small: bool) -> list[Check]:
    """Every check, the many of attention last. small: a few of each part, for a machine without a GPU."""
    attention = list(attention_checks())
    shape = (2, 16) if small else (4, 256)
    compiled = [
        Check("compiled", "compiled step", str(precision), partial(compiled_rows, precision, shape))
        for precision in (torch.bfloat16, torch.float16)
    ]
    models = [
        Check("model", "andrea-nano", precision, lambda device, precision=precision: [model_row(precision, device)])
        for precision in ("fp32", "bf16")
    ]
    heads = [
        Check("heads", "heads", f"{dtype}, {case}", partial(heads_rows, judge_prepared, case, dtype))
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for case in (
            *HEADS_CASES,
            HeadsCase(12, 12, 64, 1024, 3, True, True),
            HeadsCase(6, 2, 128, 300, 3, True, True, B=5),
        )
    ]
    decoded = [
        Check("heads", "decoded", f"{dtype}, {case}", partial(heads_rows, judge_decoded, case, dtype))
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for case in (*DECODED_CASES, DecodedCase(12, 12, 64, lengths=(77,)), DecodedCase(8, 2, 128, lengths=(9, 78)))
    ]
    losses = [
        Check("loss", "loss", f"{dtype}, soft cap {cap}", partial(loss_rows, dtype, cap, 97 if small else 50257))
        for dtype in (torch.float32, torch.bfloat16)
        for cap in (None, 15.0)
    ]
    hows = (
        {},
        {"lookahead": 3},
        {"compiled": True},
        {"compiled": True, "lookahead": 3},
        {"compiled": True, "bits": 8},
    )
    generation = [
        Check("generation", "generation", str(how), lambda device, how=how: [generation_row(device, **how)])
        for how in hows
    ]
    if small:
        served = [check for check in attention if "float32" in check.case and check.name in ("triton", "sdpa")]
        return heads[-8:-7] + decoded[-3:-2] + served[::7] + compiled[1:] + models[:1] + losses[:1] + generation[:1]
    return heads + decoded + compiled + losses + models + generation + attention


def attention_checks() -> Iterator[Check]:
    """Our kernel first; for each implementation and type every mask on two shapes, one mask of each kind on the rest."""
    for name in IMPLEMENTATIONS:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            if name == "flex" and dtype != torch.bfloat16:  # FlexAttention compiles anew for each case
                continue
            shapes = SHAPES[1:3] if name == "flex" else SHAPES[:5] if dtype == torch.float32 else SHAPES
            for index, shape in enumerate(shapes):
                for mask in MASKS if index < 2 and name != "flex" else OF_EACH_KIND:
                    yield attention_check(name, Case(*shape, mask, dtype))
    for name in IMPLEMENTATIONS:
        for how in SCORES:
            for mask in OF_EACH_KIND:
                for shape in (SHAPES[1], SHAPES[5]):
                    yield attention_check(name, Case(*shape, mask, torch.bfloat16, **how))


def attention_check(name: str, case: Case) -> Check:
    return Check("attention", name, str(case), partial(judged, name, case))


def judged(name: str, case: Case, device: str) -> list[dict]:
    """One row, or none where the implementation says that it does not serve the case."""
    query, key, value, _ = case.inputs(case.dtype, device)
    how = {"modifiers": case.made_modifiers(), "sink": case.made_sink(case.dtype, device)}
    asked = AttentionCase(query, key, value, DotProduct(), case.made_mask(device), statistics=name == "triton", **how)
    if refusal(name, asked) is not None:
        return []
    row = {"check": name, "case": str(case), "passes": True}
    try:
        judge(case, name, measured=name == "triton", device=device)
    except Exception as error:  # whatever it is, the other cases are still to be judged
        why = (str(error) or repr(error)).splitlines()[0]
        if "No available kernel" in why or "No viable backend" in why:  # torch has none for this type or width
            return []
        row |= {"passes": False, "why": why}
    return [row]


def heads_rows(judge: Callable, case: HeadsCase | DecodedCase, dtype: torch.dtype, device: str) -> list[dict]:
    name = "heads" if judge is judge_prepared else "decoded"
    row = {"check": name, "case": f"{dtype}, {case}", "passes": True}
    try:
        judge(case, dtype, device)
    except AssertionError as error:
        row |= {"passes": False, "why": str(error).splitlines()[0]}
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


def compiled_rows(precision: torch.dtype, shape: tuple[int, int], device: str) -> list[dict]:
    """One compiled training step through our kernel, statistics and the fused loss included, against the eager one.

    shape: sequences, and tokens in each.
    """
    from andrea.attention import HeadStatistics
    from andrea.training.loss.loss import loss_sum_from_hidden

    model = make_andrea(model_config("andrea-nano"), 4096, device)
    for block in model.blocks:
        block.attention.implementation = "triton"
    tokens = torch.randint(4096, shape, generator=torch.Generator().manual_seed(2)).to(device)
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[precision]

    def step(tokens, loss_of):
        with torch.autocast(device, precision):
            hidden, layers = model(tokens, statistics=True)
            nats = loss_of(hidden)
        return nats, HeadStatistics.of_layers(layers)

    def readable(hidden):
        return loss_sum_from_hidden(model, hidden, tokens)

    def that_trains(hidden):
        return training_loss_sum(model, hidden, tokens, name)

    results = []
    for run, loss_of in ((step, readable), (torch.compile(step, fullgraph=True, dynamic=False), that_trains)):
        nats, heads = run(tokens, loss_of)
        nats.backward()
        gradients = [model.blocks[0].attention.query.weight.grad.clone(), model.head_weight.grad.clone()]
        model.zero_grad()
        results.append((float(nats.detach()), heads.figures()["entropy_nats"].cpu(), gradients))
    (eager, compiled) = results
    off = [float((mine - theirs).norm() / theirs.norm()) for mine, theirs in zip(compiled[2], eager[2], strict=True)]
    near = abs(eager[0] / compiled[0] - 1) < 1e-2 and torch.allclose(eager[1], compiled[1], atol=2e-2)
    shown = f"loss {eager[0]:.1f} / {compiled[0]:.1f}; gradients of query and head differ by {off[0]:.2g}, {off[1]:.2g}"
    return [{"check": f"compiled step, {precision}", "case": shown, "passes": bool(near and max(off) < 5e-2)}]


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


def loss_rows(dtype: torch.dtype, cap: float | None, n_vocab: int, device: str) -> list[dict]:
    """Head and loss fused, eager and compiled as it trains: value and gradients by the rule of the tests."""
    rows = torch.randn(257, 192, generator=torch.Generator().manual_seed(3))
    weight = torch.randn(n_vocab, 192, generator=torch.Generator().manual_seed(4)) / 14
    targets = torch.randint(n_vocab, (257,), generator=torch.Generator().manual_seed(5))
    targets[::9] = IGNORED_TARGET
    truth = loss_and_gradients(readable_nats, rows, weight, targets, cap, torch.float64, "cpu")
    readable = loss_and_gradients(readable_nats, rows, weight, targets, cap, dtype, device)
    compiled = torch.compile(fused_cross_entropy, fullgraph=True, dynamic=False)
    found = []
    for shown, way in (("eager", fused_cross_entropy), ("compiled", compiled)):
        fused = loss_and_gradients(way, rows, weight, targets, cap, dtype, device)
        passes = all(
            (mine - exact).abs().max() <= 2 * (theirs - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
            for mine, theirs, exact in zip(fused, readable, truth, strict=True)
        )
        found.append({"check": f"loss, {dtype}, {shown}", "case": f"soft cap {cap}", "passes": bool(passes)})
    return found


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


def chosen_checks(chosen: argparse.Namespace) -> list[Check]:
    """The checks to do, in the same order in every process, because processes are given their numbers."""
    return [check for check in all_checks(chosen.small) if check.part in chosen.only]


def work(chosen: argparse.Namespace, connection: Connection) -> None:
    """What a process does: the rows of the checks whose numbers arrive."""
    die_with_parent()
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch._dynamo.config.recompile_limit = 1000
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    checks = chosen_checks(chosen)
    while (index := connection.recv()) is not None:
        check = checks[index]
        try:
            rows = check.rows(chosen.device)
        except Exception as error:  # whatever it is, the others are still to be judged
            rows = [failed(check, repr(error))]
        connection.send(rows)


def failed(check: Check, why: str) -> dict:
    return {"check": check.name, "case": check.case, "passes": False, "why": why[:300]}


class Process:
    """A process that does one check after another."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=work, args=(chosen, other), daemon=True)
        self.process.start()
        other.close()  # or `recv` would wait for ever where the process has ended
        self.index: int | None = None  # the check that it is at

    def give(self, index: int) -> None:
        self.index = index
        with contextlib.suppress(ConnectionError):  # the process has ended; `rows` says so
            self.connection.send(index)

    def rows(self, checks: list[Check]) -> tuple[list[dict], bool]:
        """The rows of its check, and whether the process can go on. After an error of CUDA it cannot."""
        assert self.index is not None
        check = checks[self.index]
        try:
            rows = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            return [failed(check, f"its process ended with exit code {self.process.exitcode}")], False
        poisoned = any("CUDA error" in row.get("why", "") for row in rows)
        if poisoned:
            self.process.kill()
        return rows, not poisoned


def check_all(chosen: argparse.Namespace, checks: list[Check], save: Callable[[list[dict]], None]) -> list[dict]:
    """The rows of the checks, done by --processes processes until the time is up."""
    until, waiting, rows, n_done = time.monotonic() + chosen.seconds, list(range(len(checks)))[::-1], [], 0
    at_work: dict[Connection, Process] = {}
    for _ in range(min(chosen.processes, len(checks))):
        process = Process(chosen)
        at_work[process.connection] = process
        process.give(waiting.pop())
    while at_work and (remaining := until - time.monotonic()) > 0:
        for connection in multiprocessing.connection.wait(list(at_work), timeout=remaining):
            process = at_work.pop(connection)
            new, goes_on = process.rows(checks)
            rows += new
            n_done += 1
            for row in new:
                if not row["passes"]:
                    print("FAILS ", row, flush=True)
            save(rows)
            if waiting:
                process = process if goes_on else Process(chosen)
                at_work[process.connection] = process
                process.give(waiting.pop())
            else:
                process.process.kill()
    if n_done < len(checks):
        print(f"OUT OF TIME after {n_done} of {len(checks)} checks", flush=True)
    for process in at_work.values():
        process.process.kill()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "checks-cuda.json")
    parser.add_argument("--device", default="cuda", help="cpu, under TRITON_INTERPRET=1, tries the program alone")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--processes", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--seconds", type=float, default=86400, help="stop after so long, with what has been judged")
    parser.add_argument("--small", action="store_true", help="a few checks of each part")
    chosen = parser.parse_args()
    checks = chosen_checks(chosen)

    def save(rows: list[dict]) -> None:
        write_record(chosen.output, "checks", chosen.device, {"checks": len(checks), "rows": rows})

    rows = check_all(chosen, checks, save)
    for name in dict.fromkeys(row["check"] for row in rows):
        mine = [row["passes"] for row in rows if row["check"] == name]
        print(f"{name:28} {sum(mine):4} passed, {len(mine) - sum(mine):3} failed")
    if not all(row["passes"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
