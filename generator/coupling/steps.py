"""Steps of coupled pairs: the device begins a position before the host has read the tokens of the last position.

A pair's streams change only when it diverges or ends. As long as no pair does, the device alone can feed the tokens
that it has drawn: all tables of the step before stay valid, and so do all shapes. So once a position has used the
streams of the position before, the next position is begun, and the host reads tokens and distances of the last position
meanwhile. If these tokens show that streams change after all, the position that was begun is discarded and computed
again with new streams, whose results overwrite the discarded results.

On CUDA the operations that compute a position's distributions and draws are captured as one graph. Later positions of
equal shapes replay the graph, whether their streams are new or not. The integers that a step needs are copied to each
device in one copy, and its results to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from kvdrift.generator.coupling.streams import AheadDecoder, DistinctStreams, StreamDecoder
from kvdrift.schema.errors import first_line

_ROOM = 2**16  # integers of an array: enough for thousands of streams, so that vectors keep their addresses

Indices = dict[torch.device, dict[str, Tensor]]
"""Vectors by device and name."""


class StepIndices:
    """Copies the vectors of a step to each device as one array; on a CPU the vectors are used directly.

    The arrays on the host and the devices are used again at the next step. That is safe: by then the host has waited
    for the results of this step, so that the copy is over, too.
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


class StepGraphs:
    """Graphs of the steps of one rollout, one for each bucket; on other devices than CUDA there are none.

    A bucket names everything that a graph fixes: shapes, and the addresses of what a step reads and writes. The
    first step of a bucket is computed without a graph, since it compiles kernels. The second is captured. All graphs
    share the memory of their intermediate results, so a step must leave its results in memory of its own. ``say``
    receives a line if a step cannot be captured.
    """

    def __init__(self, device: str, say: Callable[[str], None]) -> None:
        self._device, self._say = torch.device(device), say
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
        """Capture a step's operations as a graph, without executing them; return None if they cannot be captured.

        After such a failure, which is reported, nothing more is captured.
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
                except RuntimeError as error:
                    self._captures = False
                    self._say(
                        f"decoding on {self._device} takes longer than it could: a step is not captured as a graph"
                        f" ({first_line(error)})"
                    )
                    with suppress(RuntimeError):  # which repeats that the capture has failed
                        graph.capture_end()
                    return None
            torch.cuda.current_stream().wait_stream(stream)
        self._graphs[bucket] = graph
        return graph


def captures(device: torch.device) -> bool:
    """Return whether decoding steps on a device are captured as CUDA graphs."""
    return device.type == "cuda"


class FusedSteps:
    """The draws of all positions, with at most ``most`` streams open at once.

    ``draw`` returns the draws of a position, of any shape, from its distributions [streams, V], ``rows`` as given to
    ``step``, and its uniforms. The draws contain the next token of each stream. ``uniforms`` are those of each
    position, [H, ...], on the distributions' device.
    """

    def __init__(
        self, kernels: StreamDecoder, draw: Callable[[Tensor, Tensor, Tensor], Tensor], uniforms: Tensor, most: int
    ) -> None:
        self._kernels, self._ahead, self._draw = kernels, kernels.ahead, draw
        self._uniforms, self._most = uniforms, most
        self._column, self._streams, self._rows = -1, -1, torch.empty(0)
        self._same = False  # whether the streams and rows of this position equal those of the last position
        self._begun = False  # whether the draws of the next position are computed already
        self._found = torch.empty(0)  # draws, on the device; draws of equal shapes have the same address
        self._graphs = StepGraphs(kernels.device, kernels.say_once)

    def open(self, streams: DistinctStreams, places: Tensor, rows: Tensor) -> Tensor:
        """Start the streams at the prompt and return the draws of position 1; arguments are those of ``step``."""
        self._prepare(0, streams, places, rows)
        self._find(self._kernels.open(streams.cache.tolist()))
        return self._read()

    def step(self, column: int, streams: DistinctStreams, places: Tensor, rows: Tensor) -> Tensor:
        """Advance all streams by one position and return its draws, on the CPU; an empty tensor if no stream is open.

        ``column`` is the position, from 0; ``places`` has the place of each stream's token among the draws of the last
        position, int64 [streams]; ``rows`` are the distributions' rows from which tokens are drawn, int64 of any shape,
        on the CPU.
        """
        self._prepare(column, streams, places, rows)
        if not self._begun:
            self._kernels.select(streams.row)
            if not self._streams:
                self._kernels.advance(streams.token)
                return torch.empty(0)
            if self._ahead is None:
                self._find(self._kernels.advance(streams.token))
            else:
                self._ahead.place(streams.token)
                self._compute(self._ahead)
        if self._ahead is not None:
            self._ahead.confirm()
        return self._read()

    def close(self) -> None:
        """Discard a position that is begun; call this before streams are rewound."""
        if self._begun and self._ahead is not None:
            self._ahead.give_up()
        self._begun = False

    def _prepare(self, column: int, streams: DistinctStreams, places: Tensor, rows: Tensor) -> None:
        """Send the inputs of a position, unless it is begun; discard a begun position if streams or rows changed."""
        stay = self._streams >= 0 and torch.equal(streams.row, torch.arange(self._streams))
        self._same = stay and torch.equal(rows, self._rows)
        self._column, self._streams, self._rows = column, len(streams.row), rows
        if self._begun and self._same:
            return
        self.close()
        unused = places.new_zeros(self._most - len(places))
        self._kernels.send(torch.cat([rows.flatten(), torch.tensor([column]), places, unused]))

    def _read(self) -> Tensor:
        """Return the draws of this position; if streams and rows stayed the same, begin the next position first."""
        arrival, self._begun = Arrival(self._found), False
        if self._same and self._ahead is not None and self._column + 1 < len(self._uniforms):
            _, column, places = self._sent()
            column.add_(1)
            self._ahead.feed(self._found.flatten()[places].long())
            self._compute(self._ahead)
            self._begun = True
        return arrival.wait()

    def _compute(self, ahead: AheadDecoder) -> None:
        """Compute the draws of the position that ``place`` or ``feed`` has prepared, by a graph if there is one."""
        bucket = (ahead.bucket, self._rows.shape, self._found.shape, self._found.data_ptr())
        self._graphs.run(bucket, lambda: self._find(ahead.distributions()))

    def _find(self, distributions: Tensor) -> None:
        rows, column, _ = self._sent()
        uniforms = self._uniforms.index_select(0, column).squeeze(0)
        draws = self._draw(distributions, rows.view(self._rows.shape), uniforms)
        self._found = self._found.copy_(draws) if draws.shape == self._found.shape else draws

    def _sent(self) -> tuple[Tensor, ...]:
        """Return rows, position, and the places of the streams' tokens, on the distributions' device."""
        return torch.split(self._kernels.sent, [self._rows.numel(), 1, self._most])
