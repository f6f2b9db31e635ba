"""The parts of scores and of logits add up to them, and path patching equals a computation with one input changed."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CASES, TOKENIZER, hand_made, make, prompt_tokens

from andrea.insight.lens.attribution import (
    head_effects,
    largest_pairs,
    logit_parts,
    parts_of,
    score_parts,
    written_parts,
)
from andrea.insight.lens.trace import trace_layers
from andrea.model.gpt import GPT
