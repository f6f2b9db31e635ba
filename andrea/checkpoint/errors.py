"""The error of a checkpoint that cannot be used."""

from andrea.config import UserError


class Damaged(UserError):
    """The folder is not a whole checkpoint of this project; the message names the folder or file and the fault."""
