"""The generator and the derivation of a run: this process, a service, or the workers of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvdrift.flows.cluster.address import ClusterAddress
from kvdrift.flows.generate.local import LocalGenerator
from kvdrift.flows.generate.side_processes import SideBySideGenerator
from kvdrift.flows.generate.storing import GenerateInto, Identify, storing
from kvdrift.flows.run.forecast import check_gpu_here, forecast, gpus_of_units
from kvdrift.flows.run.study_run import StudyRun
from kvdrift.generator.identity import GpuKinds
from kvdrift.schema.errors import InputError
from kvdrift.schema.own_process import OwnProcesses
from kvdrift.schema.progress import Progress
from kvdrift.schema.study import Study
from kvdrift.transforms.pipeline import run_derivation
from kvdrift.transforms.segments import DerivationReport

if TYPE_CHECKING:
    from kvdrift.generator.service.client import ServiceAddress


@dataclass(frozen=True)
class Generators:
    """The functions and processes that do the work of a run."""

    made_by: GenerateInto  # Generates events and stores them
    identify: Identify  # Returns the identity of units
    # Called with all runs and the names of redone actions before anything is written, if there is work
    get_ready: Callable[[Sequence[StudyRun], Collection[str]], None]
    # Derives the underived units of the store at a location
    derived_by: Callable[[str], DerivationReport] = run_derivation
    sides: Callable[[], OwnProcesses | None] = lambda: None  # Returns the side processes, if there are any
    served: bool = True  # Whether another machine may generate, so that this machine's devices do not matter


@contextmanager
def generators(
    studies: Sequence[Study],
    address: ServiceAddress | None,
    cluster: ClusterAddress | None,
    progress: Progress,
) -> Iterator[Generators]:
    """Give the generators of a file's studies: a service, a cluster, or by default this process."""
    engine = next((study.model.engine for study in studies if study.model.engine is not None), None)
    if engine is not None and (address or cluster) is not None:
        raise InputError(
            f"model.engine = '{engine}': decodes in this process; run it without --endpoint, --cluster and --gpus"
        )
    named = next((name for study in studies for name in study.own_weights), None)
    if address is not None and named is not None:
        raise InputError(
            f"action '{named}': has weights of its own, but a service has the weights of one model; "
            "run it without --endpoint"
        )
    if address is not None:
        from kvdrift.generator.service.client import RemoteGenerator  # noqa: PLC0415 - where a service generates

        remote = RemoteGenerator(address, studies, progress.say)

        def check_endpoint(runs: Sequence[StudyRun], redo: Collection[str]) -> None:
            remote.check(GpuKinds.together(gpus_of_units(run, redo) for run in runs))

        yield Generators(storing(remote.generate), remote.identify, check_endpoint)
    elif cluster is not None:
        from kvdrift.flows.cluster.connection import Cluster, derive_on  # noqa: PLC0415 - Dask may not be installed
        from kvdrift.flows.cluster.generator import ClusterGenerator  # noqa: PLC0415 - as above

        with Cluster(cluster, progress.say) as connection:
            there = ClusterGenerator(connection)

            def check_workers(runs: Sequence[StudyRun], redo: Collection[str]) -> None:
                there.check([(run.study, gpus_of_units(run, redo)) for run in runs])

            yield Generators(there, there.identify, check_workers, partial(derive_on, connection))
    else:
        with closing(SideBySideGenerator(local := LocalGenerator(progress.say))) as beside:

            def get_ready(runs: Sequence[StudyRun], redo: Collection[str]) -> None:
                for run in runs:
                    check_gpu_here(run, redo)
                first = [run for run in runs if run.study.model == runs[0].study.model]
                splits = [split for run in first for split in forecast(run, redo).splits]
                beside.get_ready(runs[0].study, [item for split in splits for item in split.work])

            yield Generators(storing(beside), local.identify, get_ready, sides=lambda: beside.sides, served=False)
