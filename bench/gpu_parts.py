"""The parts of bench/gpu.py: which commands each part runs, on a GPU and in a rehearsal, and what they need.

A part's commands are the same in a rehearsal but for the device and the sizes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LIKE_ITS_PEER = "--model andrea-12m --vocabulary 30000"  # small, and within 2 % of Hugging Face's number of parameters


@dataclass(frozen=True)
class Call:
    """What the commands depend on. shards: prepared token shards."""

    scratch: Path
    rehearsal: bool
    shards: Path | None

    @property
    def device(self) -> str:
        return "cpu" if self.rehearsal else "cuda"

    def sized(self, on_gpu: str, in_rehearsal: str) -> list[str]:
        return (in_rehearsal if self.rehearsal else on_gpu).split()


@dataclass(frozen=True)
class Command:
    """name: of its record. words: after `python`. tells_seconds: it takes --seconds, and ends itself in time.

    metrics: a file that grows while it runs, which is copied into the result folder.
    """

    name: str
    words: list[str]
    tells_seconds: bool = False
    metrics: Path | None = None


@dataclass(frozen=True)
class Part:
    """seconds: its time limit on a GPU. least_seconds: with less time left it is not started."""

    seconds: int
    least_seconds: int
    commands: Callable[[Call], list[Command]]
    modules: tuple[str, ...] = ()


def step(call: Call) -> list[Command]:
    """This project's step alone, today's preset and the earlier one: its speed, and the kernels that take its time."""
    tiny = "--model andrea-nano --vocabulary 512 --sequence-length 16 --batch 1 --accumulate 2"
    return [
        Command(
            f"step-{model}",
            training(call, ["--profile", "40", *call.sized(f"--model {model} --batch 64 --accumulate 8", tiny)]),
        )
        for model in ("andrea-120m", "andrea-120m-2026-11")
    ]


def attention(call: Call) -> list[Command]:
    sizes = call.sized("", "--dtype fp32 --widths 128 --lengths 16 --tokens 16 --repeats 1")
    return [Command("attention", ["bench/attention.py", "--device", call.device, *sizes], tells_seconds=True)]


def tune(call: Call) -> list[Command]:
    sizes = call.sized(
        "--lengths 1024", "--dtype fp32 --widths 128 --lengths 16 --tokens 16 --repeats 1 --most-tiles 2"
    )
    return [Command("tune", ["bench/attention.py", "--tune", "--device", call.device, *sizes], tells_seconds=True)]


def train(call: Call) -> list[Command]:
    # The preset of November 2026 has the layers that the published figures were measured with, and no convolution.
    sizes = call.sized(
        "--model andrea-120m-2026-11 --batch 64 --accumulate 8 --peer-batch 16",
        f"{LIKE_ITS_PEER} --sequence-length 16 --batch 2 --accumulate 2 --peer-batch 1 --pairs 2",
    )
    peers = ["--peers", "bf16-compiled", "bf16", "fp32"]  # the first is the baseline of ratios
    return [Command("train-andrea-120m-2026-11", training(call, [*sizes, *peers]))]


def training(call: Call, words: list[str]) -> list[str]:
    return ["bench/train.py", "--device", call.device, "--optimizer", "muon", *words]


def resume(call: Call) -> list[Command]:
    """A run that is killed and goes on, beside one that is not, with and without deterministic=true."""
    tiny = "model.d_model=32 model.n_layer=2 model.n_head=2 model.d_mlp=64 model.sequence_length=32 compile=off "
    tiny += f"train.tokens_per_step=256 tokenizer.vocab_size=300 data=text data.path={Path(os.__file__)}"
    return [Command("resume", ["bench/gpu_resume.py", "--device", call.device, *call.sized("", tiny)])]


def checks(call: Call) -> list[Command]:
    sizes = call.sized("", "--small --processes 1")
    return [Command("checks", ["bench/gpu_checks.py", "--device", call.device, *sizes], tells_seconds=True)]


def loss(call: Call) -> list[Command]:
    sizes = call.sized("--batch 64", "--model andrea-nano --vocabulary 512 --batch 1 --pairs 2")
    return [Command("loss", ["bench/loss.py", "--device", call.device, *sizes])]


def generate(call: Call) -> list[Command]:
    tiny = f"{LIKE_ITS_PEER} --prompt-tokens 4 --long-prompt-tokens 8 --new-tokens 4 --pairs 2"
    words = ["bench/generate.py", "--device", call.device, *call.sized("", tiny)]
    peers = ["--peers", "bf16-static", "bf16"]  # static: compiled on a GPU; the baseline of ratios
    return [
        Command("generate-compiled", [*words, "--compiled", *peers]),
        Command("generate-eager", [*words, "--ours", "bf16", *peers]),
        Command(
            "generate-batch-64", [*words, "--batch", *call.sized("64", "3"), "--ours", "bf16", "--compiled", *peers]
        ),
    ]


def optimizer(call: Call) -> list[Command]:
    sizes = call.sized("", "--model andrea-nano --vocabulary 512 --steps 1 --pairs 2")
    return [Command("optimizer", ["bench/optimizer.py", "--device", call.device, *sizes])]


def run(call: Call) -> list[Command]:
    """A real run, then a text from it. Its own text is prepared first, in a few seconds, unless --shards names shards."""
    vocabulary = call.sized("50257", "512")[0]
    named = ["data=text", f"data.path={Path(os.__file__)}"] if call.rehearsal else ["data=pystdlib"]
    text = [*named, f"tokenizer.vocab_size={vocabulary}"]
    if call.shards is not None:
        text = ["data=shards", f"data.path={call.shards}", "tokenizer=gpt2"]
    text.append(f"data_dir={call.scratch / 'data'}")
    steps = call.sized("60", "4")[0]
    sizes = call.sized(
        "model=andrea-120m",
        "model=andrea-nano model.d_model=32 model.n_layer=2 model.n_head=2 model.d_mlp=64 model.sequence_length=32 "
        "train.tokens_per_step=128 train.log_every=1",
    )
    folder = call.scratch / "runs" / "run"
    words = ["train.py", f"device={call.device}", *sizes, *text, f"train.steps={steps}", "logger=none"]
    words += ["train.sample_tokens=0", f"runs_dir={folder.parent}", f"name={folder.name}"]
    prepared = [] if call.shards else [Command("prepare", ["-m", "andrea", "prepare", *text])]
    sample = ["sample.py", f"checkpoint={folder}", f"device={call.device}", "max_new_tokens=100"]
    made = Command("run-andrea-120m", words, metrics=folder / "metrics.jsonl")
    return [*prepared, made, Command("sample", sample)]


def sizes(call: Call) -> list[Command]:
    tiny = f"{LIKE_ITS_PEER} --sequence-length 16 --batch 1 --accumulate 2 --pairs 2"
    return [
        Command(
            f"train-{model}",
            training(
                call,
                ["--peers", *call.sized(f"--model {model} --batch {batch} --accumulate 8", tiny)],
            ),
        )
        for model, batch in (("andrea-120m", 64), ("andrea-480m", 16), ("andrea-2b", 4))
    ]


def save(call: Call) -> list[Command]:
    # The limit is for a GPU: in a rehearsal, a save competes with tiny steps for the same cores.
    sizes = call.sized("--limit 0.05", "--limit 1000 --model andrea-nano --rounds 1 --steps 1 --tokens 16")
    return [Command("async-save", ["bench/async_save.py", "--ranks", "1", *sizes])]


def memory(call: Call) -> list[Command]:
    with_gpt2 = "andrea-nano andrea-12m" + (" andrea-120m" if os.environ.get("TIKTOKEN_CACHE_DIR") else "")
    sizes = call.sized(f"--models {with_gpt2}", "--models andrea-nano --micro-batches 1 --precisions fp32")
    return [Command("memory", ["bench/memory.py", "--device", call.device, *sizes])]


# In the order in which they run: what is known after ten minutes should be what is asked first.
PARTS = {
    "step": Part(240, 60, step),
    "resume": Part(240, 60, resume, ("hydra", "tokenizers", "safetensors")),
    "attention": Part(180, 40, attention),
    "checks": Part(420, 60, checks),
    "run": Part(420, 120, run, ("hydra", "tokenizers", "tiktoken", "safetensors")),
    "train": Part(300, 90, train, ("transformers",)),
    "generate": Part(360, 60, generate, ("transformers",)),
    "tune": Part(240, 60, tune),
    "loss": Part(120, 40, loss),
    "optimizer": Part(90, 30, optimizer),
    "sizes": Part(480, 90, sizes),
    "save": Part(180, 60, save, ("safetensors",)),
    "memory": Part(900, 60, memory, ("hydra", "tokenizers", "safetensors")),
}

BUILT = "antlr4-python3-runtime"  # has no wheel
# The distributions that are not in a bare installation of torch, the module of each, and the parts that need it.
WHEELS = {
    "triton": ("triton", "all"),
    "numpy": ("numpy", "all"),
    "PyYAML": ("yaml", "all"),
    "safetensors": ("safetensors", "run resume save memory"),
    "tiktoken": ("tiktoken", "run resume memory"),
    "regex": ("regex", "run resume memory (tiktoken imports it)"),
    "tokenizers": ("tokenizers", "run resume memory"),
    "transformers": ("transformers", "train generate (Hugging Face's side)"),
    "hydra-core": ("hydra", "run resume memory"),
    "omegaconf": ("omegaconf", "run resume memory (hydra imports it)"),
    BUILT: ("antlr4", "run resume memory (omegaconf imports it)"),
}
