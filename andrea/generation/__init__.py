"""From a checkpoint to text: choose tokens (sampling), run the model (engine), talk to the terminal (session)."""

from andrea.generation.engine import Engine, Piece, Request, next_logits_uncached, window_start
from andrea.generation.sampling import Sampling, choose

__all__ = ["Engine", "Piece", "Request", "Sampling", "choose", "next_logits_uncached", "window_start"]
