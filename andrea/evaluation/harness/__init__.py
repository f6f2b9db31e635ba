"""EleutherAI's lm-evaluation-harness (package lm-eval): our model for it, its tasks for us, and its command line."""
