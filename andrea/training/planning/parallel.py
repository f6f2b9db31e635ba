"""How the ranks share the model: one process, DDP (a copy on each rank) or FSDP2 (a shard on each rank)."""

from __future__ import annotations

from andrea.config import RunConfig, UserError
from andrea.runtime.device import Choice
from andrea.runtime.program import typed_command
from andrea.training.parallel.ranks import Ranks
from andrea.training.planning.machine import CARD, USABLE_SHARE, Placement
from andrea.training.planning.micro_batch import memory_of
from andrea.training.records.format import format_memory


def choose_sharing(config: RunConfig, ranks: Ranks, n_vocab: int, free_bytes: float, precision: str) -> Choice:
    """Chooses none, ddp or fsdp for the ranks that torchrun started. Raises UserError for impossible settings."""
    chosen = Choice(config.parallel.kind.removesuffix("_offload"), "as configured")
    if config.parallel.kind == "auto":
        if not ranks.started_by_torchrun:
            return Choice("none", "one process")
        chosen = sharing_that_fits(config, n_vocab, Placement(CARD, precision, ranks.size), free_bytes)
    if chosen.value == "fsdp" and not ranks.started_by_torchrun:
        raise UserError(
            f"parallel={config.parallel.kind} shards a model over the ranks of torchrun, but torchrun was not used; start with "
            f"`{typed_command('train', 'torchrun --standalone --nproc-per-node=2')} …`, or choose parallel=auto"
        )
    return chosen


def sharing_that_fits(config: RunConfig, n_vocab: int, placement: Placement, free_bytes: float) -> Choice:
    """Chooses ddp if the model, its gradients and optimizer state fit on each rank with one sequence, else fsdp.

    A single rank gets `none` in place of `ddp`.
    """
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
