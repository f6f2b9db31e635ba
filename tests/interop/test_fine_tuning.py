"""An exported model is trained further by transformers' Trainer, and with LoRA by peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from exportable import BLOCKS_OF_32, NANO, make_trained, tokens_of

from andrea.interop.architectures import REMOTE_CODE
from andrea.interop.hugging_face.target import write_folder

transformers = pytest.importorskip("transformers", minversion="5.10")


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """The default model's layers, loaded from an exported folder."""
    write_folder(tmp_path, make_trained(BLOCKS_OF_32 | NANO), REMOTE_CODE, "f32")
    return transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)


def losses(model: Any, folder: Path, **settings: Any) -> list[float]:
    """The loss of each of twenty steps on the same few tokens."""
    pytest.importorskip("accelerate")
    how = {"max_steps": 20, "learning_rate": 1e-2, "logging_steps": 1, "per_device_train_batch_size": 4}
    how |= {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    rows = [{"input_ids": row, "labels": row} for row in tokens_of(4, 32)]
    trainer = transformers.Trainer(
        model=model, args=transformers.TrainingArguments(str(folder / "run"), **how, **settings), train_dataset=rows
    )
    trainer.train()
    return [float(record["loss"]) for record in trainer.state.log_history if "loss" in record]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trainer_learns(checkpointing: bool, model: Any, tmp_path: Path) -> None:
    found = losses(model, tmp_path, gradient_checkpointing=checkpointing)
    assert len(found) == 20 and found[-1] < 0.5 * found[0]


def test_lora_learns_and_is_merged(model: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    found = losses(wrapped, tmp_path)
    assert found[-1] < found[0]
    tokens = tokens_of()
    with torch.no_grad():
        expected = wrapped.eval()(tokens).logits
        merged = wrapped.merge_and_unload()
        torch.testing.assert_close(merged(tokens).logits, expected, atol=1e-3, rtol=1e-3)
