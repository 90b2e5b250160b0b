"""CUDA graphs of decoding steps: a step that repeats another one is launched at once, not operation by operation."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress

import torch


class StepGraphs:
    """Graphs of the steps of one rollout, one for each bucket; on other devices than CUDA there are none.

    A bucket names everything that a graph holds fast: shapes, and the addresses of what a step reads and writes. The
    first step of a bucket is computed without a graph, since it compiles kernels. The second is captured. All graphs
    share the memory of their intermediate results, so a step must leave its results in memory of its own.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._captures = captures(self._device)
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._stream: torch.cuda.Stream | None = None

    def run(self, bucket: Hashable, step: Callable[[], None]) -> None:
        """Do the operations of ``step``, which returns nothing and never waits for the device."""
        graph = self._graphs.get(bucket)
        if graph is None and self._captures and bucket in self._seen:
            graph = self._captured(bucket, step)
        self._seen.add(bucket)
        if graph is None:
            step()
        else:
            with torch.cuda.device(self._device):
                graph.replay()

    def _captured(self, bucket: Hashable, step: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """Return the graph of a step, whose operations are not executed; None if they cannot be captured.

        The rollout then goes on without more graphs.
        """
        graph, pool = torch.cuda.CUDAGraph(), next((some.pool() for some in self._graphs.values()), None)
        with torch.cuda.device(self._device):
            stream = self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                # Other threads may go on allocating memory.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    step()
                    graph.capture_end()
                except RuntimeError:
                    self._captures = False
                    with suppress(RuntimeError):  # which says again that the capture has failed
                        graph.capture_end()
                    return None
            torch.cuda.current_stream().wait_stream(stream)
        self._graphs[bucket] = graph
        return graph


def captures(device: torch.device) -> bool:
    """Tell whether steps on a device are captured."""
    return device.type == "cuda"
