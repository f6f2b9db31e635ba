"""The loss of one micro-batch: the module that is compiled, and that DDP or FSDP2 wraps.

Shapes: B sequences, T tokens, V vocabulary, L layers, H heads. A loss is a sum in nats: the caller divides once, by the
number of targets over all micro-batches and ranks.
"""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import cross_entropy, pad

from andrea.attention import HeadStatistics
from andrea.attention.implementations.triton import runs_on
from andrea.checkpoint import Damaged, read_checkpoint
from andrea.checkpoint.model import load_model
from andrea.config import RunConfig, UserError
from andrea.model.gpt import GPT, CallBlock, call_block
from andrea.runtime.device import WEIGHT_DTYPE, autocast, cpu_multiplies_bf16
from andrea.runtime.native import COUNT, NUMBER, POINTER, compiled_library
from andrea.text.shards import IGNORED_TARGET
from andrea.text.tokenizer import Tokenizer
from andrea.training.objectives.objective import Objective

# ---------------------------------------------------------------------------------------------------------------- fused
# Fuses head, soft cap and cross-entropy, so that the full logits are never in memory.
#
# N tokens, d = d_model, V vocabulary. Rows are processed in chunks. Each chunk computes its logits, their loss and their
# gradient. This gradient is multiplied at once into the gradients of hidden (N, d) and of the head (V, d), so that only
# these two are kept. The backward pass scales them. The readable twin is `loss_sum_from_hidden`, below. The idea is from
# Liger Kernel (Hsu et al. 2024, arXiv 2410.10989, section 3.2).

# Logits in a chunk. Smaller chunks add to the head's gradient more often; larger ones need more memory. The Triton kernel
# holds one copy of the logits, in the precision of the products. Compiled code holds two; eager code holds five, in
# fp32.
LOGITS_IN_KERNEL, LOGITS_COMPILED, LOGITS_EAGER = 1 << 28, 1 << 26, 1 << 24
SHARE_OF_CARD = 1 / 128  # of its memory, at most, for a chunk of the kernel: 2^28 numbers in bf16 on cards of 80 GB
# With a kernel, the vocabulary is padded; on a GPU chunks also have whole tiles of rows. With an odd number of columns (GPT-2
# has 50,257), rows of logits would begin at addresses from which a GPU can read only two bytes at a time. On a CPU, oneDNN's
# product for the head's gradient would be half as fast; a small vocabulary has nothing to gain there.
VOCABULARY_MULTIPLE, ROW_MULTIPLE, SMALL_VOCABULARY = 128, 128, 1 << 12
SOURCE = Path(__file__).parent / "kernels" / "cross_entropy.cpp"


def fused_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, cap: float | None, dtype: torch.dtype
) -> Tensor:
    """Sum over all targets of -ln softmax(cap(hidden · weightᵀ))[target], in nats, fp32 scalar.

    hidden (..., d), weight (V, d), targets (...) int64, IGNORED_TARGET where nothing is to be predicted. cap: the soft
    cap, or None. dtype: the type of the matrix products, fp32 or bf16; everything else, and the gradient of the head,
    is fp32. fp16 is not allowed: its small gradients would vanish, because the loss scale is applied after this
    function.
    """
    assert dtype != torch.float16, "fp16 gradients need the loss scale: use loss_sum_from_hidden"
    rows, row_targets = hidden.flatten(0, -2), targets.flatten()
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return FusedCrossEntropy.apply(rows, weight, row_targets, cap, dtype, weight.requires_grad)
    return cross_entropy_in_chunks(rows, weight, row_targets, cap, dtype, gradients=False)[0]


class FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, targets: Tensor, cap: float | None, dtype: torch.dtype, of_weight: bool
    ) -> Tensor:
        """of_weight: whether the gradient of the weight is needed; not of a frozen head, as with LoRA."""
        nats, d_rows, d_weight = cross_entropy_in_chunks(rows, weight, targets, cap, dtype, True, of_weight)
        ctx.save_for_backward(d_rows, d_weight)
        ctx.dtypes = rows.dtype, weight.dtype
        return nats

    @staticmethod
    def backward(ctx: Any, d_nats: Tensor) -> tuple[Tensor | None, ...]:
        d_rows, d_weight = ctx.saved_tensors
        d_weight = None if d_weight is None else (d_nats * d_weight).to(ctx.dtypes[1])
        return (d_nats * d_rows).to(ctx.dtypes[0]), d_weight, None, None, None, None


def cross_entropy_in_chunks(
    rows: Tensor,
    weight: Tensor,
    targets: Tensor,
    cap: float | None,
    dtype: torch.dtype,
    gradients: bool,
    of_weight: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The sum of nats and, with `gradients`, its gradients: of rows (N, d) and, with `of_weight`, of weight (V, d)."""
    in_kernel = uses_kernel(rows)
    n_logit = LOGITS_COMPILED if torch.compiler.is_compiling() else LOGITS_EAGER
    n_logit = logits_in_kernel(rows.device, dtype) if in_kernel else n_logit
    n_vocab = len(weight)
    rows, weight = rows.to(dtype), weight.to(dtype)
    is_native = not in_kernel and has_native_kernel(rows)
    is_padded = in_kernel or (is_native and n_vocab > SMALL_VOCABULARY)
    if is_padded and n_vocab % VOCABULARY_MULTIPLE:  # rows of zeros: the kernel writes gradients of 0 for them
        weight = pad(weight, (0, 0, 0, -n_vocab % VOCABULARY_MULTIPLE))
    n_row = rows_in_chunk(len(rows), len(weight), n_logit, ROW_MULTIPLE if in_kernel else 1)
    nats, d_rows, d_weight = torch.zeros((), device=rows.device), [], None
    for chunk, chunk_targets in zip(rows.split(n_row), targets.split(n_row), strict=True):
        logits = chunk @ weight.mT
        loss_of_chunk = (
            triton_loss_of_chunk if in_kernel else native_loss_of_chunk if is_native else torch_loss_of_chunk
        )
        chunk_nats, d_logits = loss_of_chunk(logits, chunk_targets, n_vocab, cap, gradients)
        nats = nats + chunk_nats
        if gradients:
            d_rows.append(d_logits @ weight)
        if gradients and of_weight:
            d_head = (d_logits.mT @ chunk).float()
            d_weight = d_head if d_weight is None else d_weight.add_(d_head)
    if not gradients:
        return nats, None, None
    return nats, torch.cat(d_rows), None if d_weight is None else d_weight[:n_vocab]


def uses_kernel(rows: Tensor) -> bool:
    return rows.is_cuda and runs_on(rows.device)


@torch.compiler.assume_constant_result  # torch.compile cannot trace torch's function
def logits_in_kernel(device: torch.device, dtype: torch.dtype) -> int:
    """A chunk of the kernel: LOGITS_IN_KERNEL, or the power of two for which a smaller card has memory."""
    if device.type != "cuda":
        return LOGITS_IN_KERNEL
    n_logit = int(SHARE_OF_CARD * torch.cuda.get_device_properties(device).total_memory) // dtype.itemsize
    return min(LOGITS_IN_KERNEL, 1 << (n_logit.bit_length() - 1))


def rows_in_chunk(n_row: int, n_vocab: int, n_logit: int, multiple: int = 1) -> int:
    """Rows in each chunk of about n_logit logits at most, a multiple of `multiple`: a small last one would take as long."""
    n_chunk = max(1, min(-(-n_row * n_vocab // n_logit), n_row))
    return min(n_row, -(-n_row // n_chunk // multiple) * multiple)


def torch_loss_of_chunk(
    logits: Tensor, targets: Tensor, n_vocab: int, cap: float | None, gradients: bool
) -> tuple[Tensor, Tensor | None]:
    """logits (n, V) -> the chunk's sum of nats, and its gradient (n, V) in the logits' precision, in plain torch."""
    # `andrea.model.gpt.softcap`, by tanh(x) = 2 sigmoid(2x) - 1: on a CPU, torch compiles a faster sigmoid than tanh.
    z = logits.float() if cap is None else cap * (2 * torch.sigmoid(logits.float() * (2 / cap)) - 1)
    has_target = targets != IGNORED_TARGET
    log_sum_exp = z.logsumexp(1)
    target_logit = z.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    nats = torch.where(has_target, log_sum_exp - target_logit, 0.0).sum()
    if not gradients:
        return nats, None
    is_target = torch.arange(z.shape[1], device=z.device) == targets[:, None]
    d_z = (z - log_sum_exp[:, None]).exp() - is_target.float()
    if cap is not None:
        d_z = d_z * (1 - (z / cap).square())  # the derivative of cap · tanh(x / cap)
    return nats, torch.where(has_target[:, None], d_z, 0.0).to(logits.dtype)


def triton_loss_of_chunk(
    logits: Tensor, targets: Tensor, n_vocab: int, cap: float | None, gradients: bool
) -> tuple[Tensor, Tensor | None]:
    """Like `torch_loss_of_chunk`, with the Triton kernel, which overwrites the logits with their gradient. logits (n, C):
    the columns beyond n_vocab are no tokens, and their gradient is 0."""
    from andrea.training.loss.kernels.cross_entropy_triton import cross_entropy_of_rows

    return cross_entropy_of_rows(logits, targets, n_vocab, cap or 0.0, gradients).sum(), logits if gradients else None


def native_loss_of_chunk(
    logits: Tensor, targets: Tensor, n_vocab: int, cap: float | None, gradients: bool
) -> tuple[Tensor, Tensor | None]:
    """Like `triton_loss_of_chunk`, with our kernel for CPUs. logits (n, C) bf16."""
    nats = native_cross_entropy(logits, targets, n_vocab, cap or 0.0, gradients)
    return nats.sum(), logits if gradients else None


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """The compiled function; None without a compiler, or on a processor without bf16 instructions.

    On others training computes in fp32, and torch's compiled loss is a small part of a step: a kernel would not pay.
    """
    functions = compiled_library(SOURCE) if cpu_multiplies_bf16() else None
    if functions is None or not functions.has_bf16():
        return None
    functions.cross_entropy.argtypes = [POINTER] * 3 + [COUNT] * 4 + [NUMBER, COUNT]
    functions.cross_entropy.restype = None
    return functions


@torch.compiler.assume_constant_result
def has_native_library() -> bool:
    """Whether the kernel can be used on this machine. Compiling it takes a moment the first time."""
    return native_library() is not None


def has_native_kernel(rows: Tensor) -> bool:
    """Whether the kernel can be used for the logits of these rows. Not in a memory plan, which stands for other devices too."""
    is_planned = isinstance(rows, FakeTensor) and not torch.compiler.is_compiling()
    return rows.device.type == "cpu" and rows.dtype == torch.bfloat16 and not is_planned and has_native_library()


@torch.library.custom_op("andrea::native_cross_entropy", mutates_args=("logits",))
def native_cross_entropy(logits: Tensor, targets: Tensor, n_vocab: int, cap: float, gradients: bool) -> Tensor:
    """logits (n, C) bf16, targets (n,) int64 -> nats (n,) fp32, 0 where the target is IGNORED_TARGET.

    The columns beyond n_vocab are no tokens. cap: of the soft cap, or 0. gradients: overwrite the logits with the gradient
    of the sum of the nats.
    """
    assert logits.is_contiguous() and targets.is_contiguous() and n_vocab <= logits.shape[1]
    if not ((targets == IGNORED_TARGET) | ((targets >= 0) & (targets < n_vocab))).all():
        raise IndexError(f"a target is no token of a vocabulary of {n_vocab}")  # it would be an address
    nats = logits.new_empty(len(logits), dtype=torch.float32)
    tensors = logits.data_ptr(), targets.data_ptr(), nats.data_ptr()
    native_library().cross_entropy(*tensors, *logits.shape, n_vocab, IGNORED_TARGET, cap, gradients)
    return nats


@native_cross_entropy.register_fake
def _(logits: Tensor, targets: Tensor, n_vocab: int, cap: float, gradients: bool) -> Tensor:
    return logits.new_empty(len(logits), dtype=torch.float32)


# --------------------------------------------------------------------------------------------------------- distillation
# Distillation: a model learns from its text, and from what other trained models expect at each position.
#
# Hinton, Vinyals and Dean 2015, "Distilling the knowledge in a neural network", arXiv 1503.02531, section 2, at temperature 1,
# with the mean of the teachers' probabilities (an ensemble). Measured on a small text: bench/README.md, "Small texts".

SHARE = 0.5  # of the teachers' probabilities in each target; the rest is the token of the text


@torch.no_grad()
def taught_probabilities(teachers: Sequence[GPT], tokens: Tensor, call_block: CallBlock) -> Tensor:
    """tokens (B, T) -> the mean of the teachers' next-token probabilities, (B, T, V) fp32."""
    all_logits = (model.logits(model(tokens, call_block=call_block)) for model in teachers)
    return sum(logits.float().softmax(-1) for logits in all_logits) / len(teachers)


def distilled_loss_sum(model: GPT, hidden: Tensor, targets: Tensor, taught: Tensor) -> Tensor:
    """Cross-entropy against (1 - SHARE) · the target + SHARE · `taught`, summed, in nats: hidden (B, T, d_model).

    That is the function of the gradient. The number itself is the cross-entropy against the targets alone, so that the
    training loss of a distilled run means what it means in every other run.
    """
    log_probabilities = model.logits(hidden).float().log_softmax(-1).flatten(0, 1)  # (B T, V)
    hard = cross_entropy(log_probabilities, targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum")
    has_target = (targets != IGNORED_TARGET).flatten()
    soft = -((taught.flatten(0, 1) * log_probabilities).sum(-1) * has_target).sum()
    mixed = (1 - SHARE) * hard + SHARE * soft
    return mixed + (hard - mixed).detach()


def load_teachers(config: RunConfig, tokenizer: Tokenizer, device: torch.device) -> list[GPT]:
    """The models of train.teachers, whole on every rank. Raises UserError if they cannot teach this run."""
    models = []
    for path in config.train.teachers:
        try:
            checkpoint = read_checkpoint(Path(path))
        except Damaged as fault:
            raise UserError(
                f"train.teachers (the teachers, or the reference of an objective): {fault}; name its checkpoint"
            ) from fault
        theirs = checkpoint.tokenizer()
        if theirs.identity != tokenizer.identity:
            advice = f"tokenizer.path={path} takes the teacher's"
            if tokenizer.special:
                advice = "name a teacher that was tuned on conversations"
            raise UserError(
                f"train.teachers: {path} was trained with the tokenizer {theirs.identity}, but this run uses "
                f"{tokenizer.identity}; {advice}"
            )
        model = load_model(checkpoint, theirs)
        if model.config.sequence_length < config.model.sequence_length:
            raise UserError(
                f"train.teachers: {path} was trained on {model.config.sequence_length} tokens at once, but this run reads "
                f"{config.model.sequence_length}; set model.sequence_length={model.config.sequence_length}"
            )
        models.append(model.to(device))
    return models


# -------------------------------------------------------------------------------------------- the loss of a micro-batch


def loss_sum_from_hidden(model: GPT, hidden: Tensor, targets: Tensor) -> Tensor:
    """The readable form of the loss: sum over all targets (B, T) of -ln p(target), in nats, from hidden (B, T, d_model)."""
    logits = model.logits(hidden)  # (B, T, V)
    logits = logits.float().flatten(0, 1)
    return cross_entropy(logits, targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum")


def training_loss_sum(model: GPT, hidden: Tensor, targets: Tensor, precision: str) -> Tensor:
    """The same sum as `loss_sum_from_hidden`, computed without holding all logits, except in fp16.

    In fp16 small gradients need the loss scale. The fused path would apply the scale after computing the gradients.
    """
    if precision == "fp16":
        return loss_sum_from_hidden(model, hidden, targets)
    return fused_cross_entropy(hidden, model.head_weight, targets, model.config.logit_softcap, WEIGHT_DTYPE[precision])


class MicroBatchLoss(nn.Module):
    """Forward pass and loss in the run's precision, with the heads' statistics if `observing`.

    torch.compile compiles either `forward_in_precision`, or both `call_block` and `head_loss`. Autocast is entered
    outside the compiled code, because torch does not cache compiled code that enters autocast.
    """

    def __init__(
        self,
        model: GPT,
        device: torch.device,
        precision: str,
        observing: bool,
        recompute: bool,
        teachers: Sequence[GPT] = (),
        objective: Objective | None = None,
    ) -> None:
        """observing: measure the heads' statistics. recompute: activation checkpointing. objective: None: the next token."""
        super().__init__()
        self.model = model
        self.teachers, self.objective = tuple(teachers), objective  # a tuple: their weights are no parameters of this
        self.precision, self.observing, self.recompute = precision, observing, recompute
        self.autocast = autocast(device, precision)

    def forward(
        self, tokens: Tensor, targets: Tensor, dropout_seeds: Tensor | None = None, weights: Tensor | None = None
    ) -> tuple[Tensor, HeadStatistics | None]:
        """tokens, targets (B, T) int64 -> sum of nats, fp32 scalar, and statistics (L, H) of the rows that have a target.

        With an objective, `Objective.sums` in place of the sum. dropout_seeds: (B,) int64 in training; nothing is dropped
        without them. weights (B, T): of the objective.
        """
        if not self.model.config.dropout:
            dropout_seeds = None
        elif dropout_seeds is None:  # an evaluation, which reuses the compiled code of training
            dropout_seeds = torch.full_like(tokens[:, 0], -1)
        with self.autocast:
            return self.forward_in_precision(tokens, targets, dropout_seeds, weights)

    def forward_in_precision(
        self, tokens: Tensor, targets: Tensor, dropout_seeds: Tensor | None, weights: Tensor | None = None
    ) -> tuple[Tensor, HeadStatistics | None]:
        how = {"recompute": self.recompute, "dropout_seeds": dropout_seeds, "call_block": self.call_block}
        taught = None
        if self.teachers and torch.is_grad_enabled():  # an evaluation measures the text alone
            taught = taught_probabilities(self.teachers, tokens, self.call_block)
        hidden, statistics = self.model(tokens, **how, statistics=self.observing), None
        if self.observing:
            hidden, layers = hidden
            statistics = HeadStatistics.of_layers(layers, (targets != IGNORED_TARGET).any(1))
        if self.objective is not None:
            sums = self.objective.sums(self.model, self.call_block, hidden, tokens, targets, weights)
            if sums is not None:
                return sums, statistics
        return self.head_loss(hidden, targets, taught), statistics

    call_block = staticmethod(call_block)

    def head_loss(self, hidden: Tensor, targets: Tensor, taught: Tensor | None = None) -> Tensor:
        """taught: the teachers' probabilities (B, T, V)."""
        if taught is not None:
            return distilled_loss_sum(self.model, hidden, targets, taught)
        return training_loss_sum(self.model, hidden, targets, self.precision)
