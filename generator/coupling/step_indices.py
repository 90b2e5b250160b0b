"""Copy the integers that a step of decoding needs to the devices, all at once, and the step's results to the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_ROOM = 2**16  # integers of an array: enough for thousands of streams, so that a step finds its vectors where they were

Indices = dict[torch.device, dict[str, Tensor]]
"""Vectors by device and name."""


class StepIndices:
    """Copies the vectors of a step to each device as one array; on a CPU the vectors are used directly.

    The arrays on the host and the devices are used again at the next step. By then the results of the step have been
    waited for, and so has the copy.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = set(devices)
        self._pinned = any(device.type == "cuda" for device in self._devices)  # the host does not wait for the copy
        self._host = torch.empty(0, dtype=torch.int64)
        self._buffers: dict[torch.device, Tensor] = {}

    def send(self, vectors: Mapping[str, Tensor]) -> Indices:
        """Copy vectors, int64 of any shape on the CPU, to each device; the copies are valid until the next call."""
        sent: Indices = {}
        whole = self._gathered(vectors) if any(device.type != "cpu" for device in self._devices) else None
        for device in self._devices:
            if whole is None or device.type == "cpu":
                sent[device] = dict(vectors)
                continue
            if device not in self._buffers or len(self._buffers[device]) < len(whole):
                self._buffers[device] = torch.empty(len(self._host), dtype=torch.int64, device=device)
            here = self._buffers[device][: len(whole)]
            here.copy_(whole, non_blocking=True)
            parts = torch.split(here, [vector.numel() for vector in vectors.values()])
            sent[device] = {
                name: part.view(vector.shape) for (name, vector), part in zip(vectors.items(), parts, strict=True)
            }
        return sent

    def _gathered(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """Return the vectors side by side in one array on the host."""
        flat = [vector.flatten() for vector in vectors.values()]
        total = sum(map(len, flat))
        if len(self._host) < total:
            self._host = torch.empty(max(2 * total, _ROOM), dtype=torch.int64, pin_memory=self._pinned)
        return torch.cat(flat, out=self._host[:total])


class Arrival:
    """Numbers on their way from a device to the host, which waits for them only, not for later work of the device."""

    def __init__(self, numbers: Tensor) -> None:
        self._here = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda)
        self._here.copy_(numbers, non_blocking=True)
        self._copied = torch.cuda.current_stream(numbers.device).record_event() if numbers.is_cuda else None

    def wait(self) -> Tensor:
        """Return the numbers on the CPU."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._here
