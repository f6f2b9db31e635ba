"""Upload of an export to Hugging Face's hub. What fails here leaves the folder on this machine as it is."""

from __future__ import annotations

import shlex
from pathlib import Path

from andrea.config import UserError

LONGEST_REASON = 300  # characters of an error


def upload(folder: Path, repository: str, is_private: bool, replaced: tuple[str, ...]) -> str:
    """Upload the files of `folder` to OWNER/NAME, which is made if it does not exist. Returns a line for people.

    is_private: of a new repository; the hub leaves an existing one as it is. replaced: patterns of files that an earlier
    upload may have left; those that this folder lacks are deleted in the same commit. Raises UserError.
    """
    try:
        import huggingface_hub
    except ImportError:
        reason = "huggingface_hub cannot be imported; run: pip install huggingface_hub"
        raise not_uploaded(folder, reason, repository, is_private) from None
    try:
        if huggingface_hub.get_token() is None:
            reason = "this machine has no token of the hub; run: hf auth login, or set HF_TOKEN"
            raise not_uploaded(folder, reason, repository, is_private)
        api = huggingface_hub.HfApi()
        url = api.create_repo(repository, private=is_private, exist_ok=True)
        visibility = "private" if api.model_info(repository).private else "public"
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="Export by ANDREA",
            delete_patterns=list(replaced) or None,
        )
    except UserError:
        raise
    except Exception as error:  # it has many: no network, a token that may not write, a name that is not allowed
        raise not_uploaded(folder, reason_of(error), repository, is_private) from None
    return f"uploaded to {url}, which is {visibility}"


def not_uploaded(folder: Path, reason: str, repository: str, is_private: bool) -> UserError:
    by_hand = shlex.join(["hf", "upload", repository, str(folder), *(["--private"] if is_private else [])])
    return UserError(
        f"{folder} was written, but not uploaded to {repository} ({reason}); to upload it later: {by_hand}"
    )


def reason_of(error: BaseException) -> str:
    """What failed, in one line: the first line of the error and of what caused it, and the words of the hub if it answered."""
    found: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        for words in (
            str(cause).strip().partition("\n")[0] or type(cause).__name__,
            getattr(cause, "server_message", None),
        ):
            line = " ".join((words or "").split()).rstrip(".")
            if line and not any(line in each for each in found):
                found.append(line)
        cause = cause.__cause__
    return ": ".join(found)[:LONGEST_REASON]
