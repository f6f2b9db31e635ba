"""What the kernels of attention and of the loss take of a card, by compiling them: registers, spills, shared memory. Needs no GPU.

    python bench/kernel_resources.py [--widths 64 128] [--types bf16 fp16] [--targets 80 90 100 gfx942] [--json FILE]

Spilled bytes are local memory of the machine code, read off it by the cuobjdump that comes with triton. Occupancy is
the number of programs that fit one multiprocessor by registers and shared memory. Loops are counted in the machine code: the
instructions and the special functions (MUFU) that a warp executes for a block of keys or queries.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels cannot be compiled

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from andrea.attention.kernels import attend_triton, decode_triton
from andrea.attention.kernels.attend_triton import Blocks, padded, tiles_of
from andrea.text.shards import IGNORED_TARGET
from andrea.training.loss.kernels import cross_entropy_triton as cross_entropy

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MODES = {
    "none": attend_triton.NONE.value,
    "causal": attend_triton.CAUSAL.value,
    "interval": attend_triton.INTERVAL.value,
}
# Bytes of shared memory that programs may take on a multiprocessor, and warps that it holds, by compute capability.
SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
MOST_WARPS = {80: 64, 86: 48, 89: 48, 90: 64, 100: 64, 120: 48}
AMD = "gfx942"
INTEGERS_32 = {"H", "T", "S", "start", "GROUP"}
IN_FP32 = {"lse", "delta", "largest", "entropy", "slopes", "sink"}
IN_INT32 = {"first", "stop", "ranges"}


def kernels(width: int, dtype: str, target: int | str, mode: str, statistics: bool, modified: bool) -> dict[str, tuple]:
    """name -> (function, tiles, its own constants), as `fused_attention` would launch them. modified: with a cap on scores,
    ALiBi and sinks."""
    tuned = tiles_of(padded(width), TYPES[dtype], 80 if target == AMD else target)
    how = {"MODE": MODES[mode], "CAPPED": modified, "SLOPED": modified}
    of_forward = {"STATISTICS": statistics, "SINK": modified, **how}
    return {
        "forward": (attend_triton.forward_kernel, tuned.forward, of_forward),
        "keys": (attend_triton.keys_kernel, tuned.keys, how),
        "queries": (attend_triton.queries_kernel, tuned.queries, how),
    }


def compiled(function, blocks: Blocks, constants: dict, width: int, dtype: str, target: int | str):
    """The kernel as the launcher would compile it for tensors whose strides are multiples of 16."""
    constants = {
        **constants, "BLOCK_M": blocks.m, "BLOCK_N": blocks.n, "D_QK": width, "D_V": width,
        "PADDED_QK": padded(width), "PADDED_V": padded(width), "GROUP": 1,
        "PRECISION": "ieee" if dtype == "fp32" else "tf32", "DESCRIPTORS": target != AMD and target >= 90 and dtype != "fp32",
    }  # fmt: skip
    described = (
        {"q": blocks.m, "dz": blocks.m} if function is attend_triton.keys_kernel else {"k": blocks.n, "v": blocks.n}
    )
    signature, attributes = {}, {}
    for position, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif constants["DESCRIPTORS"] and name in described:
            signature[name] = f"tensordesc<{dtype}[1,1,{described[name]},{padded(width)}]>"
            continue
        elif name == "cap":
            signature[name] = "fp32"
        elif name in INTEGERS_32 or re.fullmatch(r"[a-z]+_[a-z]", name):
            signature[name] = "i32"
        else:
            signature[name] = "*i32" if name in IN_INT32 else "*fp32" if name in IN_FP32 else f"*{dtype}"
        if signature[name] != "constexpr" and name not in ("start", "cap"):
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, attributes)
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages, "enable_fp_fusion": True}
    gpu = GPUTarget("hip", AMD, 64) if target == AMD else GPUTarget("cuda", target, 32)
    return triton.compile(source, target=gpu, options=options)


def compiled_loss(dtype: str, target: int, capped: bool):
    """The loss's kernel as its launcher would compile it: any vocabulary, padded to a multiple of 128 columns."""
    pointers = {"logits": f"*{dtype}", "targets": "*i64", "nats": "*fp32"}
    numbers = {"stride": "i64", "n_vocab": "i32", "n_column": "i32", "cap": "fp32", "to_u": "fp32"}
    constants = {
        "CAPPED": capped,
        "HARDWARE": dtype == "bf16",
        "FIXED": capped,
        "GRADIENTS": True,
        "IGNORED": IGNORED_TARGET,
        "BLOCK": cross_entropy.BLOCK,
    }
    signature = pointers | numbers | dict.fromkeys(constants, "constexpr")
    aligned = {*pointers, "stride", "n_column"}
    attributes = {(position,): [["tt.divisibility", 16]] for position, name in enumerate(signature) if name in aligned}
    source = ASTSource(cross_entropy.row_kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options={"num_warps": cross_entropy.WARPS})


def compiled_decoding(width: int, dtype: str, target: int):
    """The two kernels of a decoded token, with every option, as a model with as many heads for keys would launch them."""
    own = {"MIX": True, "NORM": True, "ROTATE": True, "BLOCK": decode_triton.BLOCK, "H": 12, "G": 12, "K": 3}
    named = {"cosine": "*fp32", "sine": "*fp32", "z": "*fp32", "sums": "*fp32", "lengths": "*i64", "epsilon": "fp32"}
    named |= {"scale": "fp32"} | dict.fromkeys(("f_b", "f_h", "turn_b", "length_b", "S", "window"), "i32")
    for function, warps, constants in (
        (decode_triton.split_kernel, decode_triton.WARPS, own), (decode_triton.join_kernel, 1, {})
    ):  # fmt: skip
        constants = constants | {"D": width, "SPLITS": decode_triton.splits_of(1, 12)}
        signature = {
            name: "constexpr" if name in constants else named.get(name, f"*{dtype}") for name in function.arg_names
        }
        aligned = {name for name, kind in signature.items() if kind[0] == "*" or name == "S"}
        attributes = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(signature) if name in aligned}
        source = ASTSource(function, signature, constants, attributes)
        yield (
            function,
            warps,
            triton.compile(source, target=GPUTarget("cuda", target, 32), options={"num_warps": warps}),
        )


def measure_decoding(widths, types, targets) -> list[dict]:
    rows = []
    for width in widths:
        for dtype in types:
            for target in targets:
                for function, warps, kernel in compiled_decoding(width, dtype, target):
                    about = {"kernel": function.__name__, "width": width, "dtype": dtype, "target": f"sm_{target}"}
                    rows.append(about | {"warps": warps} | resources(kernel, target, warps))
                    print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    return rows


def resources(kernel, target: int, warps: int) -> dict:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        usage, code = (disassembled(file.name, how) for how in ("--dump-resource-usage", "--dump-sass"))
    found = {what: max(map(int, re.findall(what + r":(\d+)", usage))) for what in ("REG", "STACK", "LOCAL")}
    registers, shared = found["REG"], kernel.metadata.shared
    return {
        "registers": registers,
        "spilled_bytes": found["LOCAL"] + found["STACK"],
        "shared_bytes": shared,
        "occupancy": occupancy(registers, shared, warps, target),
        "loads_of_2_bytes": len(re.findall(r"LDG\.\S*U16", code)),
        "loops": loops(code),
    }


def amd_resources(kernel) -> dict:
    """The same of an AMD GPU, from the assembly's metadata. Vector registers are 512 for each lane, in two files."""
    code = kernel.asm["amdgcn"]
    found = {
        what: int(re.findall(rf"\.{what}:\s+(\d+)", code)[0])
        for what in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
    }
    return {
        "registers": found["vgpr_count"],
        "spilled_bytes": found["private_segment_fixed_size"],
        "shared_bytes": kernel.metadata.shared,
        "products_in_code": len(re.findall(r"\bv_mfma", code)),
    }


def disassembled(cubin: str, how: str) -> str:
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([cuobjdump, how, cubin], capture_output=True, text=True, check=True).stdout


def occupancy(registers: int, shared_bytes: int, warps: int, target: int) -> int:
    """Programs that fit one multiprocessor at a time: by registers, by shared memory and by warps.

    A warp's registers are given out in units of 256, and a program takes one KiB of shared memory besides its own (CUDA C++
    Programming Guide, "Technical Specifications per Compute Capability").
    """
    of_warp = -(-registers * 32 // 256) * 256
    most_warps = MOST_WARPS[target]
    return min(65536 // (of_warp * warps), (SHARED_LIMIT[target] + 1024) // (shared_bytes + 1024), most_warps // warps)


def loops(code: str) -> list[dict]:
    """The innermost loops of machine code, in their order: instructions, special functions, products of tensor cores, and how
    many of the special functions run beside a product: those between an HGMMA and the wait for it (Hopper).

    An inner loop is what lies between a backward branch and its target, without another backward branch inside.
    """
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);", code)
    index_of = {int(address, 16): index for index, (address, _, _) in enumerate(lines)}
    spans = []
    for index, (_, name, operands) in enumerate(lines):
        target = re.search(r"0x([0-9a-f]+)\s*$", operands) if name.startswith("BRA") else None
        begin = index_of.get(int(target[1], 16)) if target else None
        if begin is not None and begin < index:
            spans.append((begin, index))
    inner = [
        one for one in spans if not any(one != other and one[0] <= other[0] and other[1] <= one[1] for other in spans)
    ]
    counted = []
    for begin, end in sorted(inner):
        names = [name for _, name, _ in lines[begin : end + 1]]
        if len(names) < 20:  # waits for a barrier
            continue
        counted.append({
            "instructions": len(names),
            "special": sum(name.startswith("MUFU") for name in names),
            "products": sum(re.match(r"(HMMA|HGMMA|UTC\w*MMA)", name) is not None for name in names),
            "beside_products": special_beside_products(names),
        })  # fmt: skip
    return counted


def special_beside_products(names: list[str]) -> int:
    count, in_flight = 0, False
    for name in names:
        if name.startswith("HGMMA"):
            in_flight = True
        elif name.startswith("WARPGROUP.DEPBAR"):
            in_flight = False
        count += in_flight and name.startswith("MUFU")
    return count


def measure(widths, types, targets, modes, modified: bool, statistics=(True, False)) -> list[dict]:
    rows = []
    for width in widths:
        for dtype in types:
            for target in targets:
                for mode in modes:
                    for with_statistics in statistics:
                        for name, (function, blocks, own) in kernels(
                            width, dtype, target, mode, with_statistics, modified
                        ).items():
                            if name != "forward" and with_statistics:
                                continue  # the backward pass knows nothing of them
                            kernel = compiled(function, blocks, own, width, dtype, target)
                            if target == AMD:
                                found = amd_resources(kernel)
                            else:
                                found = resources(kernel, target, blocks.warps)
                            rows.append({
                                "kernel": name + " + statistics" * with_statistics + ", modified" * modified,
                                "width": width, "dtype": dtype, "target": AMD if target == AMD else f"sm_{target}", "mode": mode,
                                "m": blocks.m, "n": blocks.n, "warps": blocks.warps, "stages": blocks.stages,
                                **found,
                            })  # fmt: skip
                            print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    return rows


def measure_loss(types, targets) -> list[dict]:
    rows = []
    for dtype in types:
        for target in targets:
            for capped in (True, False):
                name = "loss, capped" if capped else "loss"
                about = {"kernel": name, "dtype": dtype, "target": f"sm_{target}", "warps": cross_entropy.WARPS}
                rows.append(about | resources(compiled_loss(dtype, target, capped), target, cross_entropy.WARPS))
                print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--types", nargs="+", default=["bf16", "fp16"], choices=TYPES)
    parser.add_argument("--targets", type=target_of, nargs="+", default=[80, 90, 100])
    parser.add_argument("--modes", nargs="+", default=["causal"], choices=MODES)
    parser.add_argument("--modified", action="store_true", help="with a cap on scores, ALiBi and sinks")
    parser.add_argument("--decoding", action="store_true", help="only the kernels of a decoded token")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if chosen.decoding:
        write(chosen.json, triton.__version__, measure_decoding(chosen.widths, chosen.types, chosen.targets))
        return
    rows = measure(chosen.widths, chosen.types, chosen.targets, chosen.modes, chosen.modified)
    rows += measure_loss(chosen.types, [target for target in chosen.targets if target != AMD])
    write(chosen.json, triton.__version__, rows)


def target_of(word: str) -> int | str:
    return word if word == AMD else int(word)


def write(path: Path | None, version: str, rows: list[dict]) -> None:
    if path:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        record = {"bench": "kernel_resources", "date": date, "triton": version, "rows": rows}
        path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
