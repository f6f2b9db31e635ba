"""The error of a checkpoint that cannot be used."""

from andrea.config import UserError


class Damaged(UserError):
    """The folder is not a complete checkpoint of this project. The message names the folder or file and the fault."""
