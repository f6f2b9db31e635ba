"""What a training step holds in memory, planned from the model built without any: by part, and at its fullest."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from andrea.config import AttentionConfig, ModelConfig
from andrea.model.gpt import GPT
from andrea.model.size import END_OF_TEXT
from andrea.training.loss.cross_entropy import training_loss_sum
from andrea.training.loss.fused import LOGITS_EAGER, rows_in_chunk

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}  # of the products
# On a CPU, measured by bench/memory.py (bench/results/memory.json):
PROGRAM_BYTES = 480 * 2**20  # resident beside the tensors of a run: interpreter, torch, this package
COMPILED_PROGRAM_BYTES = 560 * 2**20  # and the compiler
CHUNKS_LOOKED_AT = 3  # of the loss, where it has more
COMPILED_SHARE = 0.6  # of what the passes of eager code hold, compiled ones do


@dataclass(frozen=True)
class Memory:
    """Bytes on one device while training: what is kept from step to step, and what one step holds at its fullest."""

    weights: int  # fp32
    gradients: int  # fp32
    optimizer: int  # its state
    gathered: int  # sharded only: the weights that are whole for a while, and gradients on their way
    activations: int  # a micro-batch's forward and backward pass at their fullest, see `pass_bytes`
    optimizer_step: int  # temporaries of the optimizer's step, when activations are freed
    evaluation: int  # on a CPU: measuring the heads on held-out text, with their scores written out
    python_and_libraries: int  # on a CPU: interpreter, torch, this package, the compiler

    @property
    def total(self) -> int:
        """The peak: backward pass or optimizer's step, whichever needs more.

        glibc keeps freed memory, so on a CPU the evaluation adds to the peak.
        """
        kept = self.python_and_libraries + self.weights + self.gradients + self.optimizer
        return kept + max(self.gathered + self.activations, self.optimizer_step) + self.evaluation


def plan_memory(
    config: ModelConfig,
    attention: AttentionConfig,
    n_vocab: int,
    *,
    micro_batch: int,
    precision: str,
    optimizer: str,
    recompute: bool = False,
    compiled: bool = False,
    on_cpu: bool = False,
    ranks: int = 1,
    sharded: bool = False,
) -> Memory:
    """The peak of a training step on one device, by part.

    What is kept: fp32 weights, fp32 gradients (there while all micro-batches but the first run), and the optimizer's
    state: adamw has two fp32 numbers a parameter; muon one for the blocks' matrices, two for the rest. On top of it
    comes the larger of two: what the passes of one micro-batch hold (`pass_bytes`), or the temporaries of the
    optimizer's step (`optimizer_step_bytes`). recompute: activation checkpointing.

    on_cpu: the program itself counts, as it is in the same memory; the heads are measured, a sequence at a time,
    without a kernel; and compiled passes hold a share, measured there, of what eager ones do. On a card, where nothing
    has been measured yet, compiled code is planned like eager code, which is the most it can need.

    sharded: FSDP2 over `ranks` keeps 1/ranks of weights and optimizer state. Gradients of micro-batches before a
    step's last are kept whole, in fp32: they are summed over ranks once a step. For a while there are besides, in the
    precision of the products, two blocks' weights and the buffer that the next one's arrive in, one block's gradients
    in fp32 on their way; and in fp32 embedding, head and final norm, with their gradients. Without `sharded` every
    rank holds what one device does (DDP's buckets are the gradients themselves).
    """
    if attention.implementation not in ("reference", "chunked"):  # the others need their device, and keep as little
        attention = dataclasses.replace(attention, implementation="auto")
    with torch.device("meta"):
        model = GPT(config, attention, n_vocab, END_OF_TEXT)
    matrices = Counter(
        tuple(parameter.shape)
        for name, parameter in model.blocks.named_parameters()
        if parameter.dim() == 2 and ".compatibility." not in name
    )
    total = sum(parameter.numel() for parameter in model.parameters())
    muon = optimizer == "muon"
    state = 2 * total - (sum(n * rows * columns for (rows, columns), n in matrices.items()) if muon else 0)
    share, gathered = 1, 0
    if sharded:
        share = ranks
        block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
        outside = total - config.n_layer * block
        gathered = (3 * DTYPES[precision].itemsize + 4) * block + 2 * 4 * outside
    observing = on_cpu and attention.qk_clip is not None  # on a card our kernel measures, and writes nothing out
    activations = pass_bytes(config, attention, n_vocab, micro_batch, precision, recompute, observing, sharded)
    return Memory(
        weights=4 * total // share,
        gradients=4 * total,
        optimizer=4 * state // share,
        gathered=gathered,
        activations=round(COMPILED_SHARE * activations) if compiled and on_cpu else activations,
        optimizer_step=optimizer_step_bytes(matrices, precision, share) if muon else 0,
        evaluation=evaluation_bytes(config, attention, n_vocab) if on_cpu else 0,
        python_and_libraries=(COMPILED_PROGRAM_BYTES if compiled else PROGRAM_BYTES) if on_cpu else 0,
    )


def optimizer_step_bytes(stacks: Counter[tuple[int, int]], precision: str, ranks: int = 1) -> int:
    """The temporaries of Muon's step at their fullest; stacks: how many matrices there are of a shape (rows, columns).

    A stack goes through two moments. First three of it in fp32: gradient, new momentum, what of it is applied. Then
    one, and in the precision of the products the normalised matrices, three terms of a Newton–Schulz step and the Gram
    matrices. Several ranks do their share of the matrices each, and hold that four times more: as sent, as received,
    whole, and as sent back.
    """
    product = (torch.bfloat16 if precision == "bf16" else torch.float32).itemsize
    most = 0
    for (rows, columns), n in stacks.items():
        kept, whole = n * rows * columns // ranks, -(-n // ranks) * rows * columns
        in_product = (5 if precision == "bf16" else 4) + (4 if ranks > 1 else 0)  # in fp32 the gradient serves as one
        gram = whole // max(rows, columns) * min(rows, columns)
        most = max(most, 12 * kept, 4 * kept + product * (in_product * whole + gram))
    return most


@functools.lru_cache(maxsize=64)
def pass_bytes(
    config: ModelConfig,
    attention: AttentionConfig,
    n_vocab: int,
    micro_batch: int,
    precision: str,
    recompute: bool,
    observing: bool,
    sharded: bool,
) -> int:
    """The most that the forward and backward pass of one micro-batch hold at once, besides weights and gradients.

    Counted by running both on tensors without memory, as eager code does: activations kept for the backward pass, a
    chunk of logits in several copies, the loss's gradients, weights in low precision under autocast. observing: each head is
    measured on the readable path, which writes its scores out. sharded: blocks' matrices come in low precision already.
    """
    dtype = DTYPES[precision]
    with FakeTensorMode():
        model = GPT(config, attention, n_vocab, END_OF_TEXT)
        if sharded:
            for module in model.blocks.modules():
                if isinstance(module, nn.Linear):
                    module.weight = nn.Parameter(module.weight.to(dtype))
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        tokens = torch.zeros(micro_batch, config.sequence_length, dtype=torch.int64)
        there = [*model.parameters(), *(parameter.grad for parameter in model.parameters()), *model.buffers()]
        with LiveBytes(there) as live:
            with torch.autocast("cpu", dtype, enabled=precision != "fp32"):
                hidden = model(tokens, observed=[] if observing else None, recompute=recompute)
                loss = planned_nats(model, hidden, tokens, precision)
            del hidden
            loss.backward()
    return live.most


def planned_nats(model: GPT, hidden: Tensor, tokens: Tensor, precision: str) -> Tensor:
    """The loss of the first chunks of rows, which hold no less than the others, beside the gradients of all rows."""
    if precision == "fp16":  # which knows no chunks
        return training_loss_sum(model, hidden, tokens, precision)
    rows, answers = hidden.flatten(0, 1), tokens.flatten()
    few = min(len(rows), CHUNKS_LOOKED_AT * rows_in_chunk(len(rows), model.n_vocab, LOGITS_EAGER))
    others = torch.empty_like(rows[few:], dtype=DTYPES[precision])  # their gradients; the name keeps them alive
    nats = training_loss_sum(model, rows[:few], answers[:few], precision)
    del others
    return nats


@functools.lru_cache(maxsize=64)
def evaluation_bytes(config: ModelConfig, attention: AttentionConfig, n_vocab: int) -> int:
    """The most that one sequence's pass holds in which each head is measured, where no kernel does it: scores written out."""
    with FakeTensorMode():
        model = GPT(config, attention, n_vocab, END_OF_TEXT)
        tokens = torch.zeros(1, config.sequence_length, dtype=torch.int64)
        with torch.no_grad(), LiveBytes([*model.parameters(), *model.buffers()]) as live:
            model(tokens, observed=[])
    return live.most


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors made while it is on; `most` is the most that were alive at once.

    there: tensors that are not counted where an operation returns them.
    """

    def __init__(self, there: list[Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known = {id(tensor.untyped_storage()) for tensor in there}  # storages: tensors may be views of one another

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) not in self.known:
                self.made(tensor.untyped_storage())
        return result

    def made(self, storage: torch.UntypedStorage) -> None:
        self.known.add(id(storage))
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self.gone, id(storage), storage.nbytes())

    def gone(self, identity: int, n_byte: int) -> None:
        self.known.discard(identity)
        self.now -= n_byte
