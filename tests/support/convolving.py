"""A stand-in for a device with cuDNN: the CPU, on which everything but the plans is real.

What is asked of it is what `calls.Device` asks of CUDA. A convolution on the CPU counts as one by cuDNN.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from support.inprocess import Recorded, recording

from otel_dl.patches.cudnn import calls
from otel_dl.recording import native
from otel_dl.recording.keep import Head


class OnTheCpu(calls.Device):
    name = "cpu"

    def has(self, tensor: Any) -> bool:
        return tensor.device.type == "cpu"

    def uses_cudnn(self, operation: calls.Operation, arguments: Mapping[str, Any], call: calls.Call) -> bool:
        return True


def is_followed(function: Callable[..., Any] = torch.conv2d) -> bool:
    """Whether the calls of this function of torch's are. Nothing of it shows that; it can't be followed twice."""
    if native.hooks is None:
        return False
    try:
        native.hooks.Follow(function, bool, bool).restore()
    except TypeError:
        return True
    return False


@contextlib.contextmanager
def convolving(head: Head | None = None, benchmark: bool = True, **settings: Any) -> Iterator[Recorded]:
    """A session in which the CPU has cuDNN."""
    with (
        mock.patch("otel_dl.patches.cudnn.Device", OnTheCpu),
        torch.backends.cudnn.flags(enabled=True, benchmark=benchmark, deterministic=False),
        recording(head, **settings) as recorded,
    ):
        yield recorded
