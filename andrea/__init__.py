"""ANDREA: a mini GPT training framework built around attention."""

__version__ = "0.1.0"
