"""Reading the files that the ranks of a sharded run wrote, in the safetensors layout of torch.distributed.checkpoint.

Each file holds some rows of some tensors; its header says which rows of the whole tensor they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp


def read_whole_tensors(folder: Path, is_wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """The whole tensors whose names are wanted, on the CPU, read by this process alone.

    Raises the errors of torch's reader, which have no common base.
    """
    metadata = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in metadata.items()
        if is_wanted(name)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that one process reads alone
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    return tensors


def read_into(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fill `tensors` by name: whole ones, or DTensors with the rows of the calling rank. Every rank must call.

    Also reads whole safetensors files. Raises the errors of torch's reader, which have no common base.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns where a run has one rank
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
