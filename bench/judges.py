"""Bits per byte of a run's held-out text by four programs: ours, transformers, and lm-eval with our model and with the export.

All read the same windows: each document by itself, end-of-text in front, as in andrea/evaluation/scoring.py. The
checkpoint is exported twice, with weights in 32 bits and in bf16; every program computes in fp32.

    python -m bench.judges checkpoint=runs/NAME [runs_dir=runs] [data_dir=data] [most_documents=N]
"""

from __future__ import annotations

import json
import logging
import math
import sys
import tempfile
from pathlib import Path

import torch

from andrea.__main__ import main
from andrea.evaluation.evaluate import held_out_documents
from andrea.evaluation.harness.run import TASKS
from andrea.evaluation.scoring import Subject, bits_per_byte, load_subject, rolling_windows

RESULTS = Path(__file__).parent / "results" / "judges.json"


def by_transformers(folder: Path, subject: Subject, texts: list[str]) -> float:
    """With the export's own tokenizer. One window at a time, as a user of transformers would write it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    nats = 0.0
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        for context, predicted in rolling_windows(ids, tokenizer.eos_token_id, model.config.max_position_embeddings):
            with torch.no_grad():
                logits = model(torch.tensor([[*context, *predicted[:-1]]])).logits[0, -len(predicted) :]
            nats -= float(logits.log_softmax(-1).gather(-1, torch.tensor(predicted)[:, None]).sum())
    return nats / math.log(2) / sum(len(text.encode()) for text in texts)


def by_lm_eval(model: object, text: Path) -> float:
    import lm_eval
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(include_path=str(TASKS), include_defaults=False, metadata={"text": str(text)})
    results = lm_eval.simple_evaluate(model=model, tasks=["andrea_bpb"], task_manager=manager, log_samples=False)
    return results["results"]["andrea_bpb"]["bits_per_byte,none"]


def measure(words: dict[str, str]) -> dict[str, object]:
    from lm_eval.models.huggingface import HFLM

    from andrea.evaluation.harness.model import AndreaLM

    runs_dir, data_dir = words.get("runs_dir", "runs"), words.get("data_dir", "data")
    subject = load_subject(words["checkpoint"], runs_dir, "cpu", 8, False)
    texts = held_out_documents(subject.checkpoint, subject.tokenizer, Path(data_dir))
    texts = texts[: int(words.get("most_documents", len(texts)))]
    found: dict[str, object] = {"checkpoint": subject.checkpoint.path.parents[1].name, "step": subject.checkpoint.step}
    with tempfile.TemporaryDirectory() as place:
        text = Path(place) / "documents.jsonl"
        text.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts), encoding="utf-8")
        ours = bits_per_byte(subject, texts)
        found |= {"documents": ours.n_document, "tokens": ours.n_token, "bytes": ours.n_byte}
        found |= {"ours": ours.value, "standard_error": ours.standard_error}
        report(found)
        found["lm-eval, our model"] = by_lm_eval(AndreaLM(subject=subject), text)
        for dtype in ("f32", "bf16"):
            folder = Path(place) / dtype
            typed = [f"{key}={value}" for key, value in words.items() if key != "most_documents"]
            assert main(["export", *typed, f"dtype={dtype}", f"out={folder}"]) == 0
            found[f"transformers, {dtype}"] = by_transformers(folder, subject, texts)
            hf = HFLM(
                pretrained=str(folder),
                trust_remote_code=True,
                dtype="float32",
                device="cpu",
                batch_size=8,
                add_bos_token=False,
            )
            found[f"lm-eval, hf, {dtype}"] = by_lm_eval(hf, text)
            report(found)
    return found


def report(found: dict[str, object]) -> None:
    for name, value in found.items():
        print(f"{name:<22} {value:.6f}" if isinstance(value, float) else f"{name:<22} {value}", flush=True)


if __name__ == "__main__":
    measured = measure(dict(word.split("=", 1) for word in sys.argv[1:]))
    RESULTS.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
