"""The model card of an export: what the model is, how it was trained, how it is used, and the proof."""

from __future__ import annotations

import html
import re
from typing import Any

from andrea.config import as_typed, to_plain
from andrea.interop.proof import Proof
from andrea.interop.settings import Trained
from andrea.interop.target import Target

CARD = """\
---
pipeline_tag: text-generation
tags: [andrea]
---

# {name}

A language model with {n_parameter:,} parameters, trained with ANDREA, exported as `{what}` with weights in {dtype}: {why}.

The licence of the weights is for their owner to choose: add `license:` to the head of this file.

## Use

{usage}
The model was trained on texts that begin with `<|endoftext|>`, and the tokenizer puts this token in front. It sees at most
{sequence_length} tokens.{documents}

## Training

| | |
|---|---|
{facts}

## Proof

{proof}

## Configuration

{configuration}
"""
ONE_DOCUMENT = """
In training, attention did not cross documents (`attention.across_documents=false`). The export equals the model on single
documents; in a text with several, each token also sees the documents before its own."""


def card_of(
    trained: Trained, target: Target, dtype: str, folder: str, hub: str | None, proof: Proof | None, reason: str
) -> str:
    """The card as Markdown. hub: the repository that it is uploaded to. reason: why there is no proof, if there is none."""
    return CARD.format(
        name=escaped(trained.name),
        n_parameter=sum(parameter.numel() for parameter in trained.gpt.parameters()),
        what=target.what,
        dtype=dtype,
        why=target.why,
        usage=target.usage(folder, hub, prompt_of(trained)),
        sequence_length=trained.model.sequence_length,
        documents="" if trained.attention.across_documents else ONE_DOCUMENT,
        facts="\n".join(f"| {name} | {value} |" for name, value in facts(trained).items()),
        proof="\n".join(f"- {line}" for line in [f"by {proof.program}", *proof.lines])
        if proof
        else f"Not proven: {reason}.",
        configuration="\n".join(f"    {line}" for line in configuration(trained)),
    )


def facts(trained: Trained) -> dict[str, Any]:
    """Figures of the training. Paths of the data are left out: they say more about a machine than about a model."""
    state = trained.checkpoint.state
    data = state["config"].get("data") or {}
    sources = ", ".join(data.get("sources") or {}) or data.get("kind") or "unknown"
    return {
        "data": escaped(sources),
        "tokens read": f"{state['tokens']:,}",
        "steps": f"{state['step']:,}",
        "FLOPs": f"{state['flops']:.3g}" if state.get("flops") else "unknown",
        "bits per byte of held-out text": f"{state['val_bpb']:.4f}" if state.get("val_bpb") else "unknown",
        "tokenizer": trained.tokenizer.identity,
    }


def escaped(text: str) -> str:
    """A name that somebody has chosen, as it is written in Markdown and HTML, in one line."""
    return re.sub(r"([\\`*_\[\]|!#<>~])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def prompt_of(trained: Trained) -> str:
    """The prompt of the run's own samples, for commands; empty (a new document) if it has none that every shell reads alike."""
    prompt = (trained.checkpoint.state["config"].get("data") or {}).get("sample_prompt") or ""
    return prompt if re.fullmatch(r"[^\W\d_][\w .,;:()-]{0,60}", prompt) else ""


def configuration(trained: Trained) -> list[str]:
    """Every key of the model and of its attention, as typed."""
    groups = {"model": trained.model, "attention": trained.attention}
    return [
        " ".join(f"{group}.{key}={as_typed(value)}".split())
        for group, config in groups.items()
        for key, value in to_plain(config).items()
    ]
