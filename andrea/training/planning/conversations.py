"""What suits a run on conversations, where nothing else was typed. Needs no torch, so that a wrong command line ends quickly."""

import copy
from typing import Any

from andrea.config import lay_over
from andrea.config.parse import is_null

# Of the rates of a new model. andrea-nano ends, after 400 steps of python_chat, at 0.182, 0.168 and 0.169 bits per byte with
# 0.1, 0.3 and 1 of them: a smaller share undoes less of what was learned before.
TUNING_RATE = 0.3
# The same for preferences and rewards, which say little in each step. At 0.3, six steps of GRPO took a tuned andrea-nano from a
# reward of 0.73 to 0.68; at 0.01 it stayed within the noise for 60 steps, and DPO reached an accuracy of 0.87.
OBJECTIVE_RATE = 0.01
TUNING_PATIENCE = 3  # evaluations


def for_conversations(composed: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """`composed`, not parsed yet, with what suits conversations, unless it was typed. values: as typed.

    No conversation sees another that stands in the same window. A model that was trained before (init_from) gets a share of
    the learning rates, and the rates begin to fall when the held-out loss has risen a few times.
    """
    suited: dict[str, Any] = {"attention.across_documents": False}
    if not is_null(composed["init_from"]):
        share = TUNING_RATE if composed["objective"]["kind"] == "next_token" else OBJECTIVE_RATE
        is_lora = str(composed["model"]["lora_rank"]) != "0"  # typed values are not parsed yet
        for name, rate in composed["optimizer"].items():
            # LoRA's factors begin at zero, and learn best at the whole rate.
            is_whole = is_lora and share == TUNING_RATE and name == "learning_rate"
            is_typed = f"optimizer.{name}" in values  # maybe not as a number
            if name.endswith("learning_rate") and rate is not None and not is_whole and not is_typed:
                suited[f"optimizer.{name}"] = share * float(rate)
        suited["train.patience"] = TUNING_PATIENCE
    return lay_over(copy.deepcopy(composed), {key: value for key, value in suited.items() if key not in values})
