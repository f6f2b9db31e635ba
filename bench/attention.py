"""Attention, implementation against implementation, on a CUDA card: time, TFLOP/s and error, with and without statistics.

    python bench/attention.py [--widths 64 128] [--lengths 1024 2048 4096 8192] [--tune]

TFLOP/s count the causal half: 2 B H T² D for the forward pass (two products, half of the pairs), 2.5 times that for the
backward. B H grows as T shrinks, so that every row has the same number of tokens and the card is full. Times are medians
of CUDA events; ratios are against the best of torch's own backends in the same round. The error stands beside each time:
the largest against float64 over a slice of the same inputs, relative to what the readable path errs in the same type.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import RESULTS, write_record

from andrea.attention import DotProduct, attend, causal
from andrea.attention.implementations import triton as triton_path
from andrea.attention.implementations.fastest import attend_and_reduce, median_milliseconds
from andrea.attention.implementations.sdpa import SDPA_BACKENDS
from andrea.attention.kernels import attend_triton as tiles

PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "B200": 2250.0}
PUBLIC_FORWARD = {  # TFLOP/s on H100, causal, fp16, head width 64: figure of the FlashAttention-3 repository
    "FA3": {1024: 265, 2048: 371, 4096: 420, 8192: 460},
    "Triton tutorial": {1024: 291, 2048: 342, 4096: 363, 8192: 376},
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MOST_ERROR = 2.0  # of tiles that are chosen: times the readable path's, as in the tests
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Save = Callable[[list[dict]], None]  # writes the rows of this width and length, and all that came before


def contenders() -> dict[str, Attend]:
    """Everything that can be asked for, by the name it has in the table."""
    by_name: dict[str, Attend] = {}
    for name in (*SDPA_BACKENDS, "flex"):
        by_name[name] = lambda q, k, v, name=name: attend(q, k, v, **CASE, implementation=name)
    by_name["triton"] = functools.partial(ours, wanted=False)
    by_name["triton + statistics"] = functools.partial(ours, wanted=True)
    by_name[BY_ADDRESS] = functools.partial(ours, wanted=False)
    by_name["triton as it trains"] = as_it_trains
    return by_name | flash_attention()


@contextmanager
def descriptors_for(name: str) -> Iterator[None]:
    """While this is open, the contender reads tiles as its name says, in its forward and in its backward pass."""
    from andrea.attention.kernels import attend_triton

    before = attend_triton.DESCRIPTORS_FROM
    attend_triton.DESCRIPTORS_FROM = 10**6 if name == BY_ADDRESS else before
    try:
        yield
    finally:
        attend_triton.DESCRIPTORS_FROM = before


def as_it_trains(q, k, v) -> torch.Tensor:
    """Through `attend`, with the reduction of what is measured to heads, compiled as in a training step."""
    return compiled_attend()(q, k, v, **CASE, implementation="triton", statistics=True)[0]


@functools.cache
def compiled_attend() -> Callable:
    return torch.compile(attend_and_reduce, dynamic=False)


BY_ADDRESS = "triton by address"  # our kernel without tensor descriptors: what they are worth
CASE = {"compatibility": DotProduct(), "mask": causal()}


def ours(q, k, v, wanted: bool) -> torch.Tensor:
    """The operator itself, with what the kernel measures and nothing beside it."""
    from andrea.attention.kernels.attend_triton import fused_attention

    return fused_attention(q, k, v, None, None, None, True, 0, 0.0, None, None, wanted)[0]


def flash_attention() -> dict[str, Attend]:
    """FlashAttention 3 and 4, where they are installed; both take (B, T, H, D)."""
    found: dict[str, Attend] = {}
    try:
        from flash_attn_interface import flash_attn_func as fa3

        found["FA3"] = lambda q, k, v: first_of(fa3(*swapped(q, k, v), causal=True, softmax_scale=1.0)).transpose(1, 2)
    except ImportError:
        pass
    try:
        from flash_attn.cute import flash_attn_func as fa4

        found["FA4"] = lambda q, k, v: first_of(fa4(*swapped(q, k, v), causal=True, softmax_scale=1.0)).transpose(1, 2)
    except ImportError:
        pass
    return found


def swapped(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.transpose(1, 2) for tensor in tensors]


def first_of(output):
    return output[0] if isinstance(output, tuple) else output


def milliseconds(run: Callable[[], object], device: str, repeats: int) -> float:
    """Median time of a call. On a GPU ten calls are queued between two events, so that launching is not timed."""
    if device != "cpu":
        return median_milliseconds(run)
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        run()
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times[1:])


def in_one_line(error: Exception) -> str:
    return (str(error) or repr(error)).splitlines()[0]


def timed(run: Attend, tensors, leaves, upstream, chosen: argparse.Namespace) -> tuple[float, float]:
    """Milliseconds of the forward pass alone, and of forward and backward."""
    with torch.no_grad():
        forward = milliseconds(lambda: run(*tensors), chosen.device, chosen.repeats)
    both = milliseconds(lambda: torch.autograd.grad(run(*leaves), leaves, upstream), chosen.device, chosen.repeats)
    return forward, both


def errors(run: Attend, q, k, v, upstream) -> list[float]:
    """Largest error of output and gradients on one head, over the readable path's in the same type."""
    parts = [tensor[:1, :1].detach() for tensor in (q, k, v)]
    results = {}
    for name, way, dtype in (("truth", None, torch.float64), ("readable", None, q.dtype), ("judged", run, q.dtype)):
        leaves = [part.to(dtype).requires_grad_() for part in parts]
        output = way(*leaves) if way else attend(*leaves, **CASE, implementation="reference")
        results[name] = [output.detach(), *torch.autograd.grad(output, leaves, upstream[:1, :1].to(dtype))]
    worst = []
    for truth, readable, judged in zip(*results.values(), strict=True):
        off = [float((tensor.double() - truth).abs().max()) for tensor in (readable, judged)]
        worst.append(off[1] / (off[0] + float(truth.abs().max()) * torch.finfo(q.dtype).eps / 2))
    return [round(ratio, 3) for ratio in worst]


def measure(width: int, length: int, chosen: argparse.Namespace, save: Save) -> list[dict]:
    heads = max(1, 768 // width)
    n_batch = max(1, chosen.tokens // length)
    generator = torch.Generator(chosen.device).manual_seed(length + width)
    shape, dtype = (n_batch, heads, length, width), DTYPES[chosen.dtype]
    q, k, v, upstream = (
        torch.randn(shape, generator=generator, device=chosen.device, dtype=torch.float32).to(dtype) for _ in range(4)
    )
    q = (q / width**0.5).to(dtype)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    flops = 2 * n_batch * heads * length**2 * width
    rows = []
    for name, run in contenders().items():
        if time.monotonic() > chosen.until:
            print(f"width {width}, T {length}: {name} left out: out of time", flush=True)
            continue
        try:
            with descriptors_for(name):
                forward, both = timed(run, (q, k, v), leaves, upstream, chosen)
                off = errors(run, q, k, v, upstream)
        except Exception as error:  # whatever it is, the others are still to be measured
            print(f"width {width}, T {length}: {name} left out: {in_one_line(error)}", flush=True)
            continue
        rows.append({
            "width": width, "length": length, "batch": n_batch, "heads": heads, "implementation": name,
            "forward_ms": forward, "both_ms": both,
            "forward_tflops": flops / forward / 1e9, "both_tflops": 3.5 * flops / both / 1e9,
            "error_over_readable": off,
        })  # fmt: skip
        compare(rows)
        save(rows)
        show(rows[-1], chosen)
    return rows


def compare(rows: list[dict]) -> None:
    """Add to each row its ratio to the best of torch's backends, and what the statistics cost."""
    torchs = [row for row in rows if row["implementation"] in SDPA_BACKENDS]
    for row in rows:
        for what in ("forward", "both"):
            best = min((other[f"{what}_ms"] for other in torchs), default=None)
            row[f"{what}_ratio"] = best / row[f"{what}_ms"] if best else None
        plain = next(
            (other for other in rows if row["implementation"] == other["implementation"] + " + statistics"), None
        )
        row["statistics_cost"] = row["both_ms"] / plain["both_ms"] - 1 if plain else None


def show(row: dict, chosen: argparse.Namespace) -> None:
    ratio = [f"{row[f'{what}_ratio']:.2f}" if row[f"{what}_ratio"] else "–" for what in ("forward", "both")]
    cost = f"  statistics {row['statistics_cost']:+.1%}" if row["statistics_cost"] is not None else ""
    name = torch.cuda.get_device_name() if chosen.device != "cpu" else ""
    peak = next((peak for card, peak in PEAK_TFLOPS.items() if card in name), None)
    share = f" ({row['both_tflops'] / peak:4.0%} of peak)" if peak else ""
    print(
        f"d {row['width']:3} T {row['length']:5} {row['implementation']:28} forward {row['forward_tflops']:7.1f} TFLOP/s"
        f" ({ratio[0]}×)  both {row['both_tflops']:7.1f} TFLOP/s ({ratio[1]}×){share}"
        f"  error ×{max(row['error_over_readable']):.2f}{cost}",
        flush=True,
    )


def tune(width: int, length: int, chosen: argparse.Namespace, save: Save) -> list[dict]:
    """Time tiles of each of the three kernels alone; then the best ones together against the kernel's own.

    The tiles nearest to the kernel's own come first, and a fifth of the time is kept for the comparison. What is fastest, and
    as exact, belongs into andrea/attention/kernels/attend_triton.py.
    """
    leaves = leaves_of(width, length, chosen)
    own, rows = own_tiles(leaves[0]), []
    grid_until = time.monotonic() + 0.8 * (chosen.until - time.monotonic())
    for kernel, blocks in grid_near(own, chosen.most_tiles):
        if time.monotonic() > grid_until:
            print(f"width {width}, T {length}: {kernel} {blocks} and further tiles left out: out of time", flush=True)
            break
        try:
            with tiles_in_use(dataclasses.replace(own, **{kernel: blocks})):
                took = milliseconds_of(kernel, leaves, chosen)
        except Exception as error:  # a tile that does not fit
            print(f"{kernel} {blocks}: {in_one_line(error)[:80]}", flush=True)
            continue
        rows.append({"kernel": kernel, "width": width, "length": length, **vars(blocks), "ms": took})
        save(rows)
        print(f"tuned d {width} T {length} {kernel}: {rows[-1]}", flush=True)
    for together in compared_with_own(rows, leaves, chosen):
        rows.append({"kernel": "all", "width": width, "length": length, **together})
        save(rows)
    return rows


def compared_with_own(rows: list[dict], leaves: list[torch.Tensor], chosen: argparse.Namespace) -> Iterator[dict]:
    """Time the kernel's own tiles, and the best of `rows`."""
    like, own = leaves[0], own_tiles(leaves[0])
    candidates = {"own": own, "tuned": best_tiles(rows, own)}
    found: dict[str, dict] = {}
    for name, candidate in candidates.items():
        try:
            with tiles_in_use(candidate):
                run = functools.partial(ours, wanted=True)
                both = milliseconds(
                    lambda run=run: torch.autograd.grad(run(*leaves).sum(), leaves),
                    chosen.device,
                    min(5, chosen.repeats),
                )
                off = max(errors(run, *leaves, torch.ones_like(like)))
        except Exception as error:  # kernels that fit alone may not fit together
            print(f"{name}: {in_one_line(error)[:80]}", flush=True)
            continue
        found[name] = {"tiles": name, "both_ms": both, "error_over_readable": off, **dataclasses.asdict(candidate)}
        print(f"d {like.shape[-1]} T {like.shape[-2]} {name}: {both:.3f} ms, error ×{off:.2f}: {candidate}", flush=True)
        yield found[name]
    exact = {name: row for name, row in found.items() if row["error_over_readable"] <= MOST_ERROR}
    if exact:
        best = min(exact, key=lambda name: exact[name]["both_ms"])
        print(f"d {like.shape[-1]} T {like.shape[-2]}: fastest: {best}, {candidates[best]}", flush=True)


def best_tiles(rows: list[dict], own: tiles.Tuning) -> tiles.Tuning:
    """The fastest tile of each kernel. A kernel without rows keeps its own."""
    best = {}
    for kernel in ("forward", "keys", "queries"):
        took = [row for row in rows if row["kernel"] == kernel]
        if took:
            fastest = min(took, key=lambda row: row["ms"])
            best[kernel] = tiles.Blocks(*(fastest[name] for name in ("m", "n", "warps", "stages")))
    return dataclasses.replace(own, **best)


def own_tiles(like: torch.Tensor) -> tiles.Tuning:
    return tiles.tiles_of(tiles.padded(like.shape[-1]), like.dtype, tiles.capability_of(like.device))


@contextmanager
def tiles_in_use(chosen: tiles.Tuning) -> Iterator[None]:
    """While this is open, our kernel uses these tiles."""
    from andrea.attention.kernels import attend_triton

    own, attend_triton.tuning = attend_triton.tuning, lambda *_: chosen
    try:
        yield
    finally:
        attend_triton.tuning = own


def leaves_of(width: int, length: int, chosen: argparse.Namespace) -> list[torch.Tensor]:
    """Query, key and value, (B, H, T, D) each."""
    shape = (max(1, chosen.tokens // length), max(1, 768 // width), length, width)
    generator = torch.Generator(chosen.device).manual_seed(length + width)
    drawn = (torch.randn(shape, generator=generator, device=chosen.device) / scale for scale in (width**0.5, 1, 1))
    return [tensor.to(DTYPES[chosen.dtype]).requires_grad_() for tensor in drawn]


def grid_near(own: tiles.Tuning, most: int | None) -> Iterator[tuple[str, tiles.Blocks]]:
    """Kernel and tile by turns: of each kernel first its own tile, then the others by their distance from it, and of those as
    near the ones that read fewer bytes from the L2 cache for a product.

    most: so many of each kernel. The grid has no tile that certainly is too small or spills registers.
    """
    by_kernel = []
    for kernel in ("forward", "keys", "queries"):
        mine = getattr(own, kernel)
        grid = [tiles.Blocks(*tile) for tile in itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (2, 3))]
        if kernel == "forward":
            grid = [tile for tile in grid if tile.m >= 64]
        else:
            grid = [tile for tile in grid if tile.m * tile.n <= 128 * 64]
        near = sorted(
            {mine, *grid}, key=lambda tile, mine=mine, kernel=kernel: (distance(tile, mine), *l2_reads(kernel, tile))
        )
        by_kernel.append([(kernel, tile) for tile in near[:most]])
    for turn in itertools.zip_longest(*by_kernel):
        yield from (each for each in turn if each is not None)


def l2_reads(kernel: str, tile: tiles.Blocks) -> tuple:
    """To be sorted by: a tile is held while all others of the other side are read, so a taller one reads less for its products.

    A program of the forward kernel and of dQ holds m queries, and one of dK and dV n keys.
    """
    return -(tile.n if kernel == "keys" else tile.m), *vars(tile).values()


def distance(one: tiles.Blocks, other: tiles.Blocks) -> float:
    """The number of doublings and halvings between two tiles, a stage more or less counted as half of one."""
    doubled = sum(abs(math.log2(getattr(one, name) / getattr(other, name))) for name in ("m", "n", "warps"))
    return doubled + abs(one.stages - other.stages) / 2


def milliseconds_of(kernel: str, leaves: list[torch.Tensor], chosen: argparse.Namespace) -> float:
    """Milliseconds of the pass that the kernel belongs to: forward with statistics, or backward."""

    def time_of(run: Callable[[], object]) -> float:
        return milliseconds(run, chosen.device, min(5, chosen.repeats))

    if kernel == "forward":
        with torch.no_grad():
            return time_of(lambda: ours(*leaves, True))
    output = ours(*leaves, False)
    upstream = torch.randn_like(output)
    return time_of(lambda: torch.autograd.grad(output, leaves, upstream, retain_graph=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--tokens", type=int, default=65536, help="tokens in the batch, whatever the length")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=540, help="stop after so long, with what has been measured")
    parser.add_argument("--tune", action="store_true", help="instead: time every tile of our kernels")
    parser.add_argument("--most-tiles", type=int, help="with --tune: so many of each kernel; default: the whole grid")
    parser.add_argument("--device", default="cuda", help="cpu, under TRITON_INTERPRET=1, tries the program alone")
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    assert triton_path.WIDEST_HEAD >= max(chosen.widths)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.config.recompile_limit = 1000  # FlexAttention compiles for each shape, and past the limit it is eager
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    work = tune if chosen.tune else measure
    chosen.until = time.monotonic() + chosen.seconds
    settings = {key: value for key, value in vars(chosen).items() if key not in ("output", "until")}
    path = chosen.output or RESULTS / f"attention-{'tune-' if chosen.tune else ''}{chosen.device}.json"
    done: list[dict] = []

    def save(rows: list[dict]) -> None:
        write_record(path, "attention", chosen.device, {"settings": settings, "rows": done + rows})

    shapes = list(itertools.product(chosen.widths, chosen.lengths))
    end = chosen.until
    for index, (width, length) in enumerate(shapes):
        now = time.monotonic()
        if now > end:
            print(f"out of time before width {width}, T {length}", flush=True)
            break
        if chosen.tune:  # every shape has its share of the time
            chosen.until = now + (end - now) / (len(shapes) - index)
        done += work(width, length, chosen, save)
    save([])
    if not any(chosen.tune or row["implementation"].startswith("triton") for row in done):
        sys.exit("none of our kernels could be measured; each line above has its reason")  # the part counts as failed
    if not chosen.tune:
        for name, marks in PUBLIC_FORWARD.items():
            print(f"public, H100, d 64, forward, {name}: " + ", ".join(f"T {t} {mark}" for t, mark in marks.items()))


if __name__ == "__main__":
    main()
