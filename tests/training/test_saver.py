"""How a rank's files are written: torch's reader, which did not write them, reads what was given, to the bit."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from andrea.runtime.files import file_sha256
from andrea.training.parallel import saver
from andrea.training.parallel.saver import StreamingWriter, laid_out

TENSORS = {
    "w": torch.randn(7, 11),
    "v": torch.randn(5).bfloat16(),
    "empty": torch.empty(0, 3),
    "transposed": torch.randn(4, 6).T,
    "w/step": torch.tensor(3.0),
    "w/momentum": torch.randn(1 << 11, 1 << 10),  # 8 MB: more than the buffer holds
    "w/few": torch.randn(1000),  # less than a block, after one that ends with a block
    "w/more": torch.randn(3000),
    "count": torch.arange(13),
}


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("direct", [True, False])
def test_what_is_written_is_read_back_to_the_bit(direct: bool, in_place: bool, tmp_path: Path, monkeypatch) -> None:
    if not direct:
        monkeypatch.delattr(saver.os, "O_DIRECT", raising=False)
    given = laid_out(TENSORS) if in_place else dict(TENSORS)
    for name, tensor in given.items():
        tensor.copy_(TENSORS[name])
    writer = StreamingWriter(str(tmp_path), {name: 2 if "/" in name else 1 for name in TENSORS}, save_distributed=True)
    read = {name: torch.full_like(tensor, 9) for name, tensor in TENSORS.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(given, storage_writer=writer, no_dist=True)
        dcp.load(read, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert all(torch.equal(tensor, read[name]) for name, tensor in TENSORS.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(writer.written)  # and no .metadata, a pickle
    for name, about in writer.written.items():
        assert about == {"bytes": (tmp_path / name).stat().st_size, "sha256": file_sha256(tmp_path / name)}
