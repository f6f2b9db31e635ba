"""Runs an ANDREA command on a device that refuses fp64, as Apple's MPS does: `python tests/like_mps.py train key=value …`.

torch is told of one more device, whose kernels are written in Python: each takes the tensors off the device, computes on the
CPU, and puts the result back. What would put an fp64 tensor on the device raises, with the words of MPS. So everything runs
as on a Mac but the arithmetic, and the choices that ask for `device.type == "mps"`.
"""

from __future__ import annotations

import sys
from typing import Any

import safetensors.torch
import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "like_mps"


class OnDevice(torch.Tensor):
    """A tensor on the device. `inner` holds its numbers, on the CPU."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnDevice:
        if inner.dtype == torch.float64:
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
            )
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=f"{NAME}:0",
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(with_tensors(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(
            with_tensors(index), value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=self.dtype)
        )

    def tolist(self) -> list:
        return self.inner.tolist()  # torch's refuses tensors whose kernels are Python

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return compute(operation, *args, **(kwargs or {}))


def compute(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """The operation on the CPU. What it returns of its arguments (in place, or `out`) stays what it was."""
    given = {id(off_device(each)): each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
    leaves_device = kwargs.get("device") == torch.device("cpu")
    args, kwargs = tree_map(off_device, (args, kwargs))
    result = operation(*args, **kwargs)
    if leaves_device:
        return result
    with torch.inference_mode(False):  # in which a tensor of a class of our own cannot be made
        return tree_map(
            lambda each: given.get(id(each), OnDevice(each)) if isinstance(each, torch.Tensor) else each, result
        )


def with_tensors(index: Any) -> Any:
    """An index whose lists are tensors: torch would put them on the device itself, which it cannot here."""
    if isinstance(index, tuple):
        return tuple(map(with_tensors, index))
    return torch.tensor(list(index)) if isinstance(index, (list, range)) else index


def off_device(each: Any) -> Any:
    if isinstance(each, OnDevice):
        return each.inner
    return torch.device("cpu") if isinstance(each, torch.device) else each


class Module(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


def main() -> None:
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    kernels = torch.library.Library("_", "IMPL")
    kernels.fallback(compute, "PrivateUse1")
    make = torch.tensor  # itself it cannot put a tensor on a device whose kernels are Python
    torch.tensor = lambda data, *, device=None, **how: make(data, **how).to(device)

    save = safetensors.torch.save_file  # it asks for the address of numbers
    safetensors.torch.save_file = lambda tensors, *rest, **how: save(
        {name: off_device(tensor.detach()) for name, tensor in tensors.items()}, *rest, **how
    )

    import andrea.runtime.device as devices

    devices.choose_device = lambda requested: torch.device(NAME)  # before the modules that import it by name
    from andrea.__main__ import main as run_command
    from andrea.cli.exit_code import run

    run(run_command, sys.argv[1:])


if __name__ == "__main__":
    main()
