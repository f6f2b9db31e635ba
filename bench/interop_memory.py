"""Peak memory of importing, loading and exporting, as multiples of the weights' bytes in fp32.

    python bench/interop_memory.py                  # a model of SmolLM2-135M's shape, random weights, made by transformers
    python bench/interop_memory.py --parts load     # the parts whose names begin so; the record keeps the others

Each part is a process of its own, once with the model and once with a tiny one of the same family, which costs what the
program and its libraries cost. The difference, divided by the bytes of the weights in fp32, is the figure. The peak is the
largest resident set (VmHWM of Linux): memory that the process allocated, and the pages of files that it had mapped.
Needs the extra `interop`; parts whose package is missing are left out, and named.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT, version_of, write_record

SHAPE: dict[str, Any] = {  # of config.json of SmolLM2-135M
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "max_position_embeddings": 8192, "rope_theta": 100000.0, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
TINY = SHAPE | {"vocab_size": 400, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 3, "num_key_value_heads": 1}
IMPORT = """
from andrea.interop.importing.import_model import write_imported
write_imported(Path("{source}"), Path("{out}/own"), "{source}", "model")"""
LOAD = """
from andrea.api.loaded_model import load
load("{own}", device="cpu")"""
INIT_FROM = """
from andrea.checkpoint import read_checkpoint
from andrea.api.command_line import compose, read
from andrea.config import RunConfig, parse
from andrea.interop.importing.import_model import imported_if_foreign
from andrea.training.start import make_model
from andrea.training.resume import with_source
line = read(RunConfig, ["init_from={source}", "data_dir={out}"])
composed = compose("train", line)
composed["init_from"] = imported_if_foreign(composed["init_from"], composed["data_dir"])
config = parse(RunConfig, with_source(composed, line.groups, line.values))
source = read_checkpoint(Path(config.init_from))
make_model(config, source.tokenizer(), source, fresh=True)"""
COMMAND = """
from andrea.__main__ import main
assert main({words}) == 0"""
# source: transformers' folder. own: the checkpoint that it becomes. out: an empty folder.
PARTS = {
    "import without the proof": IMPORT,
    "import, the whole command": COMMAND.replace("{words}", '["import", "from={source}", "out={out}/own"]'),
    "load": LOAD,
    "init_from, up to the model of the new run": INIT_FROM,
    "sample precision=fp32": COMMAND.replace(
        "{words}", '["sample", "checkpoint={own}", "device=cpu", "precision=fp32", "max_new_tokens=2"]'
    ),
    "sample precision=bf16": COMMAND.replace(
        "{words}", '["sample", "checkpoint={own}", "device=cpu", "precision=bf16", "max_new_tokens=2"]'
    ),
    "export to=hf": COMMAND.replace("{words}", '["export", "checkpoint={own}", "out={out}/hf"]'),
    "export to=gguf": COMMAND.replace("{words}", '["export", "checkpoint={own}", "to=gguf", "out={out}/gguf"]'),
}
NEEDED = {"export to=gguf": "llama_cpp"}  # the package that proves, where it is another than transformers
PEAK = """
import re, sys
from pathlib import Path
{part}
print("peak", 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=[""], help="beginnings of the names of parts")
    parser.add_argument("--output", type=Path, default=RESULTS / "interop-memory-cpu.json")
    chosen = parser.parse_args()
    rows = json.loads(chosen.output.read_text(encoding="utf-8"))["results"] if chosen.output.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        fp32_bytes = 4 * make_models(place)
        for name, part in PARTS.items():
            if not name.startswith(tuple(chosen.parts)):
                continue
            if name in NEEDED and importlib.util.find_spec(NEEDED[name]) is None:
                print(f"LEFT OUT {name}: {NEEDED[name]} is not installed")
                continue
            peaks = {size: peak_bytes(part, place / size) for size in ("tiny", "model")}
            times = (peaks["model"] - peaks["tiny"]) / fp32_bytes
            rows[name] = {"peak_bytes": peaks, "times_the_weights": round(times, 3)}
            print(f"{name:44}{times:6.2f} times the weights", flush=True)
            versions = {package: version_of(package) for package in ("safetensors", "gguf", "llama_cpp_python")}
            content = {"shape": SHAPE, "weights_fp32_bytes": fp32_bytes, "versions": versions, "results": rows}
            write_record(chosen.output, "interop_memory", "cpu", content)
    print(f"\nwritten: {chosen.output}")


def make_models(place: Path) -> int:
    """Write place/model and place/tiny in bf16, as such models are published, and our checkpoints of them beside.

    Returns the number of the model's weights. In processes of their own: this one stays small.
    """
    for name, shape in (("model", SHAPE), ("tiny", TINY)):
        program = f"""
import torch, transformers
from interop_memory import write_tokenizer
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{shape!r}))
print(sum(parameter.numel() for parameter in model.parameters()))
model.to(torch.bfloat16).save_pretrained("{place / name}")
write_tokenizer("{place / name}", {shape["vocab_size"]})"""
        found = run_python(program)
        run_python("from pathlib import Path\n" + IMPORT.format(source=place / name, out=place / f"{name}-imported"))
        if name == "model":
            n_parameter = int(found.split()[0])
    return n_parameter


def write_tokenizer(folder: str, n_vocab: int) -> None:
    """A byte-level tokenizer.json of n_vocab tokens, of modules of Python's library, with id 0 for end-of-text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=n_vocab, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    tokenizer.train_from_iterator([path.read_text(encoding="utf-8", errors="replace") for path in library], trainer)
    tokenizer.save(f"{folder}/tokenizer.json")


def peak_bytes(part: str, source: Path) -> int:
    """The largest resident set of a process that does this part."""
    with tempfile.TemporaryDirectory(dir=source.parent) as empty:
        words = {"source": source, "own": source.parent / f"{source.name}-imported" / "own", "out": empty}
        program = part
        for word, value in words.items():
            program = program.replace(f"{{{word}}}", str(value))
        return int(run_python(PEAK.replace("{part}", program)).rpartition("peak ")[2])


def run_python(program: str) -> str:
    """The standard output of a program, run from a file, so that its processes may import it."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "bench")])
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(program)
        file.flush()
        done = subprocess.run(
            [sys.executable, file.name], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}
        )
    if done.returncode != 0:
        raise SystemExit(f"a part failed:\n{program}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
