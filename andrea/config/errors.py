"""The error for a mistake in the user's input or configuration."""

from __future__ import annotations


class UserError(ValueError):
    """The user's input or configuration is wrong. Shown as one line with exit code 2, never with a traceback."""
