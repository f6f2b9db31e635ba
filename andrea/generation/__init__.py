"""Text from a trained model: `sampling` chooses tokens, `engine` runs the model, `session` is the command `sample.py`."""

from andrea.generation.engine import Engine, GeneratedToken, Request, next_logits_uncached, window_start
from andrea.generation.sampling import Sampling, choose_tokens
