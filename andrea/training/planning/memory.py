"""What fits into the memory of a device: the memory of a training step, and with it the sharing and the micro-batch of a run.

The first section computes how much memory a step needs, by part and at the peak, without allocating the model. The last one
chooses the micro-batch: the largest that this plan allows, and on a GPU the largest that fits when tried.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from andrea.attention.attend import WRITTEN_OUT_KEYS
from andrea.attention.multihead import operators_of_a_card
from andrea.config import AttentionConfig, ModelConfig, RunConfig, UserError
from andrea.model.gpt import GPT
from andrea.model.size import END_OF_TEXT, flops_per_token, without_memory
from andrea.runtime.compiling import choose_compile
from andrea.runtime.device import WEIGHT_DTYPE, Choice, choose_device
from andrea.runtime.free_and_peak_memory import free_host_bytes, held_bytes
from andrea.runtime.program import typed_command
from andrea.training.loss.loss import LOGITS_EAGER, MicroBatchLoss, rows_in_chunk, training_loss_sum
from andrea.training.optimizer import group_parameters
from andrea.training.parallel.ranks import Parallel, Ranks
from andrea.training.records.console import Console, format_memory

# ----------------------------------------------------------------------------------------------------- memory of a step

# On a CPU, measured by bench/memory.py (bench/results/memory.json):
PROGRAM_BYTES = 480 * 2**20  # resident memory without tensors: interpreter, torch, this package
COMPILED_PROGRAM_BYTES = 560 * 2**20  # the same with the compiler
EVALUATION_SHARE = 1.8  # resident memory of the evaluation for each byte of its tensors: see RESIDENT_SHARE
DISTILLATION_COPIES = 5  # of all logits, in fp32: of a teacher, their mean, the model's, their gradient, a temporary
PROBE_PASS_TOKENS = 256  # at most, but at least one sequence
COUNTED_CHUNKS = 3  # of the loss, at most: further chunks need no more memory
# Resident memory of a pass for each byte of an eager pass's tensors, by `compile`: an upper bound of what was measured. glibc
# keeps the memory of freed tensors, and fills their holes only in part, because each tensor begins at a multiple of 64 bytes: an
# eager step takes nearly twice its tensors. Compiled code makes fewer of them.
RESIDENT_SHARE = {"off": 1.9, "on": 0.8, "blocks": 1.15}


@dataclass(frozen=True)
class Placement:
    """The facts that a memory plan needs: device, precision of the matrix products, number of ranks, FSDP or not."""

    device: torch.device
    precision: str
    ranks: int = 1
    sharded: bool = False


@dataclass(frozen=True)
class Memory:
    """Bytes on one device: tensors kept from step to step, and the temporary memory of a step at its peak."""

    weights: int  # fp32, of the model and its teachers
    gradients: int  # fp32
    optimizer: int  # its state
    gathered: int  # FSDP only: weights while they are gathered, gradients while they are reduced
    activations: int  # forward and backward pass of a micro-batch at their peak, see `pass_bytes`
    optimizer_step: int  # temporaries of the optimizer's step, when activations are freed
    gathered_model: int  # of evaluations: with FSDP the fp32 model that rank 0 gathers, with LoRA the merged one
    evaluation: int  # on a CPU: measuring the heads on held-out text, with their scores written out
    python_and_libraries: int  # on a CPU: interpreter, torch, this package, the compiler

    @property
    def total(self) -> int:
        """The peak: backward pass, optimizer's step or evaluation, whichever needs most.

        Rank 0 may validate while it holds the gathered model; the gradients of the step are freed before. Validation
        gathers blocks and runs passes like a step. On a CPU the process keeps a pass's memory while the optimizer, whose
        stacks fit into none of its holes, needs more, and a step's while the heads are measured: both add to the peak.
        """
        kept = self.python_and_libraries + self.weights + self.optimizer
        passes = self.gathered + self.activations
        on_cpu = self.python_and_libraries > 0
        step = self.gradients + (passes + self.optimizer_step if on_cpu else max(passes, self.optimizer_step))
        return kept + max(step, self.gathered_model + passes) + self.evaluation


def memory_of(config: RunConfig, n_vocab: int, micro_batch: int, placement: Placement) -> Memory:
    """The peak of a training step on one device, by part.

    Kept from step to step: fp32 weights, fp32 gradients (all micro-batches after the first add to them) and the optimizer's
    state. AdamW keeps two fp32 numbers per parameter. Muon keeps one per parameter of the blocks' matrices, and AdamW
    updates the other parameters. Temporary memory comes on top: the passes of one micro-batch (`pass_bytes`) or the
    optimizer's step (`optimizer_step_bytes`), whichever needs more. A teacher counts as a model of the same size, and every
    rank holds it whole; the loss then holds all logits.

    On a CPU both count, and Python and libraries, because they share the memory. The heads are measured one sequence at a time,
    without a kernel. A pass takes RESIDENT_SHARE of its tensors. On a GPU compiled code is planned like eager code, which is
    an upper bound.

    With FSDP2, each of the ranks keeps 1/ranks of weights and optimizer state. Gradients are summed over ranks once a step;
    until then each rank keeps all of them, in fp32. `gathered_bytes` adds the temporary buffers. With DDP every rank needs
    as much as a single device (DDP's buckets are the gradients themselves).
    """
    attention, precision, n_teacher = config.attention, placement.precision, len(config.train.teachers)
    share, on_cpu = placement.ranks if placement.sharded else 1, placement.device.type == "cpu"
    compiled = choose_compile(config.compile, placement.device, flops_of_run(config, n_vocab)).value
    # A fused implementation runs on its own device only; `auto` keeps as little memory. Compiled code for a CPU may write out
    # the scores of few keys in fp32.
    few_keys = precision == "fp32" and config.model.sequence_length <= WRITTEN_OUT_KEYS
    written_out = attention.implementation == "reference" or (on_cpu and compiled != "off" and few_keys)
    if attention.implementation != "chunked":
        attention = dataclasses.replace(attention, implementation="reference" if written_out else "auto")
    model = without_memory(config.model, attention, n_vocab)
    matrices = Counter(
        tuple(parameter.shape) for name, parameter in group_parameters(dict(model.named_parameters()))["matrix"].items()
    )
    total = sum(parameter.numel() for parameter in model.parameters())
    n_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    muon = config.optimizer.kind == "muon" and bool(matrices)  # LoRA's factors are AdamW's
    state = 2 * n_trained - (sum(n * rows * columns for (rows, columns), n in matrices.items()) if muon else 0)
    state += n_trained if config.optimizer.average_half_life is not None else 0
    # On a GPU our kernel measures the heads without materialising the scores.
    observing, recompute = on_cpu and attention.qk_clip is not None, config.train.activation_checkpointing
    how = precision, recompute, observing, placement.sharded, placement.device.type == "cuda"
    activations = pass_bytes(config.model, attention, n_vocab, micro_batch, *how)
    activations = round(RESIDENT_SHARE[compiled] * activations) if on_cpu else activations
    if n_teacher:
        activations += DISTILLATION_COPIES * 4 * micro_batch * config.model.sequence_length * n_vocab
    return Memory(
        weights=4 * total // share + 4 * n_teacher * total,
        gradients=4 * n_trained,
        optimizer=4 * state // share,
        gathered=gathered_bytes(model, config.model.n_layer, precision) if placement.sharded else 0,
        gathered_model=(placement.sharded + bool(config.model.lora_rank)) * gathered_model_bytes(model),
        activations=activations,
        optimizer_step=optimizer_step_bytes(matrices, precision, share) if muon else 0,
        evaluation=round(EVALUATION_SHARE * evaluation_bytes(config.model, attention, n_vocab)) if on_cpu else 0,
        python_and_libraries=(PROGRAM_BYTES if compiled == "off" else COMPILED_PROGRAM_BYTES) if on_cpu else 0,
    )


def flops_of_run(config: RunConfig, n_vocab: int) -> int:
    return config.steps * config.tokens_per_step * flops_per_token(config.model, config.attention, n_vocab)


def gathered_bytes(model: GPT, n_layer: int, precision: str) -> int:
    """The bytes of FSDP2's temporary buffers.

    Three buffers have the precision of the matrix products: two for the weights of two blocks, and one that receives
    the weights of a third. The other buffers are fp32: one block's gradients while they are reduced, and the weights
    and gradients outside the blocks.
    """
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    outside = sum(parameter.numel() for parameter in model.parameters()) - n_layer * block
    return (3 * WEIGHT_DTYPE[precision].itemsize + 4) * block + 2 * 4 * outside


def gathered_model_bytes(model: GPT) -> int:
    """Of `Parallel.gathered_model`: the model in fp32, and its largest parameter once more, copied out of a padded one."""
    sizes = [parameter.numel() for parameter in model.parameters()]
    return 4 * (sum(sizes) + max(sizes))


def optimizer_step_bytes(stacks: Counter[tuple[int, int]], precision: str, ranks: int = 1) -> int:
    """The peak temporary memory of Muon's step. stacks: number of matrices of each shape (rows, columns).

    The memory of a stack has two peaks; the larger one counts. At the first peak three fp32 copies of the stack
    exist: gradient, new momentum and update. At the second peak one fp32 copy exists, and the following tensors exist
    in the precision of the products: the normalised matrices, those before and after a Newton–Schulz step, and two
    times the Gram matrices. With several ranks each rank works on its share of the matrices. It then holds four more
    copies of this share: as sent, as received, gathered, and as sent back.

    Where rates are transferred to another depth, the output matrices are updated apart. They are counted with the others
    of their shape, so that the figure is an upper bound.
    """
    product = (torch.bfloat16 if precision == "bf16" else torch.float32).itemsize
    most = 0
    for (rows, columns), n in stacks.items():
        kept, whole = n * rows * columns // ranks, -(-n // ranks) * rows * columns
        in_product = (3 if precision == "bf16" else 2) + (4 if ranks > 1 else 0)  # in fp32 the gradient serves as one
        gram = whole // max(rows, columns) * min(rows, columns)
        most = max(most, 12 * kept, 4 * kept + product * (in_product * whole + 2 * gram))
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
    on_card: bool,
) -> int:
    """The peak memory of the forward and backward pass of one micro-batch, without weights and gradients.

    The bytes are counted by running both passes eagerly on fake tensors. The count includes activations kept for the
    backward pass, several copies of a chunk of logits, the gradients of the loss, and weights in low precision under
    autocast.
    observing: the readable implementation measures each head, and materialises its scores. sharded: the blocks'
    matrices are in low precision. on_card: with the operators of a GPU.
    """
    dtype = WEIGHT_DTYPE[precision]
    with FakeTensorMode(), operators_of_a_card() if on_card else nullcontext():
        model = GPT(config, attention, n_vocab, END_OF_TEXT)
        if sharded:
            for module in model.blocks.modules():
                if isinstance(module, nn.Linear):
                    module.weight = nn.Parameter(module.weight.to(dtype), module.weight.requires_grad)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        tokens = torch.zeros(micro_batch, config.sequence_length, dtype=torch.int64)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        existing = [*model.parameters(), *gradients, *model.buffers()]
        with LiveBytes(existing) as live:
            with torch.autocast("cpu", dtype, enabled=precision != "fp32"):
                seeds = tokens[:, 0] if config.dropout else None
                hidden = model(tokens, statistics=observing, recompute=recompute, dropout_seeds=seeds)
                hidden = hidden[0] if observing else hidden
                loss = planned_nats(model, hidden, tokens, precision)
            del hidden
            loss.backward()
    return live.most


def planned_nats(model: GPT, hidden: Tensor, tokens: Tensor, precision: str) -> Tensor:
    """The loss of the first few chunks of rows, with memory for the gradients of all rows: the peak is that of all chunks."""
    if precision == "fp16":  # fp16 is not computed in chunks
        return training_loss_sum(model, hidden, tokens, precision)
    rows, answers = hidden.flatten(0, 1), tokens.flatten()
    few = min(len(rows), COUNTED_CHUNKS * rows_in_chunk(len(rows), model.n_vocab, LOGITS_EAGER))
    others = torch.empty_like(rows[few:], dtype=WEIGHT_DTYPE[precision])  # stands for the gradients of the other rows
    nats = training_loss_sum(model, rows[:few], answers[:few], precision)
    del others
    return nats


@functools.lru_cache(maxsize=64)
def evaluation_bytes(config: ModelConfig, attention: AttentionConfig, n_vocab: int) -> int:
    """The peak memory of a pass that measures the heads without a kernel: the scores are then materialised."""
    with FakeTensorMode():
        model = GPT(config, attention, n_vocab, END_OF_TEXT)
        shape = sequences_in_probe_pass(config.sequence_length), config.sequence_length
        tokens = torch.zeros(shape, dtype=torch.int64)
        with torch.no_grad(), LiveBytes([*model.parameters(), *model.buffers()]) as live:
            model(tokens, statistics=True)
    return live.most


def sequences_in_probe_pass(sequence_length: int) -> int:
    """Sequences that are read together while heads are measured: short ones, because scores (H, T, T) may be materialised."""
    return max(1, PROBE_PASS_TOKENS // sequence_length)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors created while it is active, without `existing`; `most`: the largest total at once."""

    def __init__(self, existing: list[Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known = {id(tensor.untyped_storage()) for tensor in existing}  # views share a storage

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and id(storage := tensor.untyped_storage()) not in self.known:
                self.known.add(id(storage))
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.gone, id(storage), storage.nbytes())
        return result

    def gone(self, identity: int, n_byte: int) -> None:
        self.known.discard(identity)
        self.now -= n_byte


# -------------------------------------------------------------------------------------------------------------- machine

GIB = 2**30
USABLE_SHARE = 0.8  # of the free memory: a plan is not exact, and other programs need memory too
CARD = torch.device("cuda")
FREE_ON_CARD = {24: 23 * GIB, 80: 78 * GIB}  # bytes that are free on a GPU of so many GB


@dataclass(frozen=True)
class Machine:
    """The device and memory that a run may use. free_bytes: the smallest free memory of any rank."""

    device: torch.device
    ranks: Ranks
    free_bytes: float

    @classmethod
    def of_rank(cls, asked_device: str, ranks: Ranks) -> Machine:
        """The machine as this rank uses it. Every rank must call this. Raises UserError for fewer GPUs than ranks."""
        device = ranks.rank_0_first(lambda: device_of_rank(asked_device, ranks))
        sharing = ranks.local_size if device.type == "cpu" else 1  # the ranks of one machine share its memory
        return cls(device, ranks, float(ranks.minimum(torch.tensor(free_bytes(device) / sharing))))


def device_of_rank(asked: str, ranks: Ranks) -> torch.device:
    """The device of a rank. A rank's own GPU is already its current device. Raises UserError for too few GPUs."""
    device = choose_device(asked)
    cards = torch.cuda.device_count() if device.type == "cuda" else 0
    if ranks.size > 1 and (device.index is not None or device.type == "mps"):
        raise UserError(
            f"device={asked} is one device, but there are {ranks.size} ranks; use device=cuda or device=cpu"
        )
    if 1 < cards < ranks.local_size:  # one visible GPU is fine: SLURM can show each rank a different one
        raise UserError(
            f"there are {ranks.local_size} ranks on this machine, but {cards} GPUs; use --nproc-per-node={cards}"
        )
    return device


def free_bytes(device: torch.device) -> int:
    """Bytes that a run can have: free on the GPU; on a CPU free or held by this process, whose libraries a plan counts."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes() + held_bytes()


# ------------------------------------------------------------------------------------------------------------- parallel
# How the ranks share the model: one process, DDP (a copy on each rank) or FSDP2 (a shard on each rank).


def choose_sharing(config: RunConfig, machine: Machine, n_vocab: int) -> Choice:
    """Chooses none, ddp or fsdp for the ranks that torchrun started. Raises UserError for impossible settings."""
    ranks = machine.ranks
    chosen = Choice(config.parallel.kind.removesuffix("_offload"), "as configured")
    if config.parallel.kind == "auto":
        if not ranks.started_by_torchrun:
            return Choice("none", "one process")
        chosen = sharing_that_fits(config, n_vocab, Placement(CARD, config.precision, ranks.size), machine.free_bytes)
    if chosen.value == "fsdp" and not ranks.started_by_torchrun:
        raise UserError(
            f"parallel={config.parallel.kind} shards a model over the ranks of torchrun, but torchrun was not used; start with "
            f"`{typed_command('train', 'torchrun --standalone --nproc-per-node=2')} …`, or choose parallel=auto"
        )
    return chosen


def sharing_that_fits(config: RunConfig, n_vocab: int, placement: Placement, free_bytes: float) -> Choice:
    """ddp if the whole model with one sequence fits on each rank, else fsdp; for a single rank `none` in place of ddp."""
    capacity, ranks = USABLE_SHARE * free_bytes, placement.ranks
    alone = memory_of(config, n_vocab, 1, Placement(placement.device, placement.precision)).total
    why = (
        f"the whole model with one sequence needs {format_memory(alone)}, and a rank may use {format_memory(capacity)}"
    )
    if alone <= capacity:
        return Choice("ddp" if ranks > 1 else "none", why)
    sharded = memory_of(config, n_vocab, 1, Placement(placement.device, placement.precision, ranks, sharded=True)).total
    return Choice(
        "fsdp", why + (f"; sharded over {ranks} ranks, it needs {format_memory(sharded)} on each" if ranks > 1 else "")
    )


# ---------------------------------------------------------------------------------------------------------- micro-batch

TOKENS_IN_PASS_ON_CPU = 4096  # at most: on a CPU a longer pass is no faster and takes more memory


def micro_batches_that_fit(config: RunConfig, n_vocab: int, placement: Placement, capacity_bytes: float) -> list[int]:
    """The divisors of a rank's sequences per step that the memory plan allows, largest first. Always includes 1."""
    sequences = -(-config.sequences_per_step // placement.ranks)
    most = sequences
    if placement.device.type == "cpu":
        most = max(1, min(most, TOKENS_IN_PASS_ON_CPU // config.model.sequence_length))
    smallest, largest = (memory_of(config, n_vocab, n, placement) for n in (1, most))
    # The memory of a pass is the maximum of functions that are linear in n, so it is convex in n. Therefore the chord
    # between two counted sizes is an upper bound. A size is counted only if this bound does not fit.
    slope = (largest.activations - smallest.activations) / max(1, most - 1)
    fitting = [1]
    for n in (n for n in range(2, most + 1) if sequences % n == 0):
        by_chord = dataclasses.replace(smallest, activations=smallest.activations + round(slope * (n - 1)))
        if by_chord.total > capacity_bytes and memory_of(config, n_vocab, n, placement).total > capacity_bytes:
            break
        fitting.append(n)
    return fitting[::-1]


def largest_that_fits(try_one: Callable[[int], None], candidates: list[int]) -> int:
    """The first of `candidates` (largest first) for which try_one(n) does not run out of memory. Raises UserError.

    try_one runs the forward and backward pass of n sequences and frees its memory. There is no optimizer state before
    the first step, so try_one must reserve memory for it.
    """
    for n_sequence in candidates:
        try:
            try_one(n_sequence)
            return n_sequence
        except torch.OutOfMemoryError:
            pass  # the exception keeps the tensors of its frames alive: leave this block before freeing memory
        torch.cuda.empty_cache()
    raise UserError(
        f"train.micro_batch=auto: not even a micro-batch of {candidates[-1]} fits in the GPU's memory; set "
        f"train.activation_checkpointing=true, choose a smaller model or a smaller model.sequence_length, or use "
        f"parallel=fsdp on several GPUs"
    )


def with_tried_micro_batch(
    config: RunConfig, parallel: Parallel, machine: Machine, console: Console, micro_loss: MicroBatchLoss
) -> RunConfig:
    """The config with the largest micro-batch that fits when tried, starting with the planned one.

    The trial runs without torch.compile: it takes seconds, and eager code needs at least as much memory as compiled
    code. A sharded model cannot be tried on one rank alone, so it keeps its planned micro-batch.
    """
    if parallel.is_sharded:
        return config
    device, n_vocab, length = machine.device, parallel.model.n_vocab, config.model.sequence_length

    def try_one(n_sequence: int) -> None:
        planned = memory_of(config, n_vocab, n_sequence, Placement(device, config.precision))
        set_aside = torch.empty(planned.optimizer, dtype=torch.uint8, device=device)
        tokens, targets = (torch.zeros(n_sequence, length, dtype=torch.int64, device=device) for _ in range(2))
        try:
            micro_loss(tokens, targets)[0].sum().backward()
        finally:
            parallel.zero_gradients()
            del set_aside

    placement = Placement(device, config.precision, parallel.ranks.size)
    candidates = micro_batches_that_fit(config, n_vocab, placement, USABLE_SHARE * machine.free_bytes)
    fits = largest_that_fits(try_one, [n for n in candidates if n <= config.train.micro_batch])
    fits = int(parallel.ranks.minimum(torch.tensor(fits)))
    console.say(f"micro-batch: {fits} sequences, the largest that fitted when tried on this GPU")
    return dataclasses.replace(config, train=dataclasses.replace(config.train, micro_batch=fits))
