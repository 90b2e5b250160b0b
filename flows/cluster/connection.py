"""The connection to a Dask cluster: to a scheduler's address, or to workers that start and end with this process.

Scheduler and workers run whatever code they are sent, and other processes of the machine reach their ports. So if they
are started here, they answer only a holder of their certificate, which exists in the memory of these processes alone.
Dask is imported when a cluster is reached. A worker must share the source and the store with the process that hands
out work.

Workers that have a GPU declare Dask's resource ``GPU``; only they get work of a model that computes on a GPU.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import socket
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from kvdrift.flows.cluster.address import ClusterAddress
from kvdrift.log.store import Store
from kvdrift.schema.errors import InputError, KvdriftError, NobodyLeftError, OperationError, first_line
from kvdrift.schema.location import is_local
from kvdrift.schema.study import ModelSection

if TYPE_CHECKING:
    from distributed import Client, Future, SpecCluster
    from distributed.security import Security

    from kvdrift.transforms.segments import DerivationReport

_PACKAGES = ("schema", "log", "generator", "transforms", "flows")  # the packages that workers run
_OF_DASK = ("python", "dask", "distributed")  # packages of which all processes of a cluster need the same versions


@dataclass(frozen=True)
class WorkerFacts:
    """Facts of a process; those of a worker must match those of the process that hands out the work."""

    source: str  # SHA-256 of the packages that the process runs
    threads: int | None = 1  # How many tasks the process takes at once; None allows any number
    # The id of the store that the process sees; None without a requested store, or if the process sees none
    store: str | None = None
    problem: str | None = None  # Why the process does not see the store


def facts(location: str | None, threads: int | None = 1) -> WorkerFacts:
    """Return the facts of this process, which has ``threads`` threads, and of the store at ``location``, if given."""
    if location is None:
        return WorkerFacts(source_sha256(), threads)
    try:
        return WorkerFacts(source_sha256(), threads, Store.open(location).id)
    except KvdriftError as error:
        return WorkerFacts(source_sha256(), threads, problem=str(error))


def facts_there(location: str | None, dask_worker: Any) -> tuple[str, WorkerFacts]:
    """Return this worker's name in messages, and its facts; Dask passes the worker as ``dask_worker``."""
    return worker_name(dask_worker.address), facts(location, dask_worker.state.nthreads)


def check_facts(worker: str, there: WorkerFacts, here: WorkerFacts, location: str | None) -> None:
    """Check that a worker's facts match those of the process that hands out the work; errors begin with ``worker``."""
    check_source(worker, there.source, here.source)
    if here.threads is not None and there.threads != here.threads:
        raise InputError(
            f"{worker}: has {there.threads} threads, but a model serves one; start the worker with --nthreads 1"
        )
    if there.problem is not None:
        remedy = "put the store at a path that is the same on every machine, or behind a URL"
        if location is not None and not is_local(location):
            remedy = "start the worker with the credentials that are set here, its AWS_… variables"
        raise InputError(f"{worker}: does not see the store ({there.problem}); {remedy}")
    if there.store != here.store:
        raise InputError(
            f"{worker}: has another store at {location}; put the study's store at a path that is the same on every "
            "machine, or behind a URL"
        )


def check_source(name: str, there: str, here: str | None = None) -> None:
    """Check that the process ``name`` has the source whose ``source_sha256`` is ``here``, by default this process's.

    ``there`` is the ``source_sha256`` of that process. The error begins with ``name``.
    """
    if there != (here or source_sha256()):
        raise InputError(
            f"{name}: runs another version of kvdrift; install there what is installed here, and start it again"
        )


def lacking(name: str, error: Exception) -> InputError:
    """Return the error to raise if the cluster's process ``name`` cannot import the code that was sent to it."""
    return InputError(f"{name}: lacks this kvdrift ({first_line(error)}); install there what is installed here")


def other_versions(versions: Mapping[str, Any]) -> str | None:
    """Return a line on the first process of a cluster whose Python or Dask is not this process's; None if all agree.

    ``versions`` is the result of ``get_versions`` of Dask's client.
    """
    here = versions["client"]["packages"]
    processes = {"the scheduler": versions["scheduler"]} | {
        f"worker {name}": of for name, of in versions["workers"].items()
    }
    for name, there in processes.items():
        packages = there["packages"]
        others = [
            f"{package} {packages.get(package)}, not {here[package]}"
            for package in _OF_DASK
            if packages.get(package) != here[package]
        ]
        if others:
            return f"{name} has {', '.join(others)}; if the work fails, install there what is installed here"
    return None


def has_dashboard(dask_scheduler: Any) -> bool:
    """Return whether a scheduler serves Dask's dashboard, which needs bokeh; Dask passes the scheduler.

    The scheduler is asked because Dask's client has a link to the dashboard even without bokeh: the link's server also
    reports the scheduler's health.
    """
    return bool(dask_scheduler.http_application.applications)


def worker_name(address: str) -> str:
    """Return the name that messages give to this process's worker, which has the address ``address``."""
    return f"worker {address} on {socket.gethostname()}"


@functools.cache
def source_sha256() -> str:
    """Return the SHA-256, in hexadecimal, of the source that workers run; it is read once in a process."""
    digest, root = hashlib.sha256(), Path(__file__).parents[2]
    for package in _PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


ONE_GPU: Final = {"GPU": 1.0}
"""The resource of a worker that has its own GPU."""

CONNECT_SECONDS = 20
_LOOK_SECONDS = 2.0  # waited for a first worker before a line says that there is none
_WAIT_SECONDS = 0.1  # between two checks for a worker
_CLOSE_SECONDS = 10
_ANY: Mapping[str, float] = {}  # resources that every worker has
_Answer = TypeVar("_Answer")
_FAULTS = (OSError, RuntimeError, ValueError, TimeoutError)  # raised by Dask's client


def resources_of(models: Iterable[ModelSection]) -> dict[str, float]:
    """Return the resources that a worker must declare to compute some models."""
    return ONE_GPU if any(model.device != "cpu" or model.device_map is not None for model in models) else {}


def having(workers: Mapping[str, Any], resources: Mapping[str, float]) -> list[str]:
    """Return the addresses of the workers that declare ``resources``.

    ``workers`` maps the address of each worker to what Dask's scheduler knows of the worker.
    """
    return [
        address
        for address, worker in workers.items()
        if all(worker["resources"].get(name, 0) >= value for name, value in resources.items())
    ]


def who_has_which(gpus: Sequence[tuple[str, str | None]], others: int) -> str:
    """Return a line on workers' GPUs; ``gpus`` are pairs (worker, GPU), ``others`` counts workers that declare none."""
    machines = defaultdict[str, list[str]](list)
    for name, gpu in gpus:
        machines[gpu or "no GPU that torch finds"].append(name.rpartition(" on ")[2])
    parts = [
        f"{gpu}: {len(of)} worker{'s' if len(of) > 1 else ''} on {', '.join(sorted(set(of)))}"
        for gpu, of in sorted(machines.items())
    ]
    if others:
        parts.append(f"workers that declare no GPU, and get no documents: {others}")
    return "; ".join(parts)


class Cluster:
    """A connection to a cluster, made at its first use; workers that are started for it end with this process.

    ``say`` receives lines about the cluster.
    """

    def __init__(self, address: ClusterAddress, say: Callable[[str], None]) -> None:
        self._address, self._say = address, say
        self._client: Client | None = None
        self._local: SpecCluster | None = None
        self._printed_lines = set[str]()
        self._security: Security | None = None  # of workers started here; others use Dask's

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """The cluster's name in messages."""
        return self._address.text

    @property
    def client(self) -> Client:
        """Dask's client of the cluster."""
        if self._client is None:
            self._client = self._connected()
            self._tell(self._client)
        return self._client

    @property
    def scheduler(self) -> str:
        """The scheduler's address.

        Raises:
            OperationError: No scheduler answers.
        """
        scheduler: Any = self.client.scheduler
        if scheduler is None:  # Dask's client has given the scheduler up
            raise self.lost()
        return str(scheduler.address)

    def check(
        self, store: Store | None = None, resources: Mapping[str, float] = _ANY, *, threads: int | None = 1
    ) -> None:
        """Wait for a first worker; check that scheduler and workers run this kvdrift, and that workers see the store.

        Only workers that declare ``resources`` are checked. Each must have ``threads`` threads; None allows any number.

        Raises:
            InputError: A process fails a check; the line names the process and the reason. Or no worker declares the
                resources.
            OperationError: No scheduler answers.
        """
        self._check_scheduler()
        self._wait_for_worker()
        location = None if store is None else store.location
        here = facts(location, threads)
        for name, there in self.ask(facts_there, location, workers=self._having(resources)):
            check_facts(name, there, here, location)

    def ask(self, function: Callable[..., _Answer], *arguments: Any, workers: Sequence[str]) -> list[_Answer]:
        """Call a function in the workers at some addresses; return the answers of the workers that have not ended.

        Dask also passes its worker to the function, as the argument ``dask_worker``.

        Raises:
            InputError: A worker lacks this kvdrift.
            OperationError: The function failed in a worker.
        """
        answers = list[_Answer]()
        for address, answer in self.client.run(function, *arguments, workers=workers, on_error="return").items():
            if isinstance(answer, OSError):  # a worker that has just ended is skipped
                continue
            if isinstance(answer, Exception):
                if "ModuleNotFoundError" in repr(answer):  # Dask changes its class
                    raise lacking(f"worker {address}", answer)
                raise OperationError(
                    f"worker {address}: {function.__name__} failed there with {answer!r}; see the worker's log"
                )
            answers.append(answer)
        return answers

    @contextmanager
    def for_other_clients(self) -> Iterator[None]:
        """Let other libraries' Dask clients in this process show the cluster's certificate, inside the block."""
        import dask  # noqa: PLC0415 - a run without a cluster needs none

        security = self._security
        shown = {} if security is None else {
            "require-encryption": True, "tls.ca-file": security.tls_ca_file,
            "tls.client.cert": security.tls_client_cert, "tls.client.key": security.tls_client_key,
        }  # fmt: skip
        with dask.config.set({f"distributed.comm.{key}": value for key, value in shown.items()}):
            yield

    def workers(self, resources: Mapping[str, float] = _ANY) -> list[str]:
        """Return the addresses of the present workers that declare ``resources``."""
        return having(self.client.scheduler_info()["workers"], resources)

    def say(self, line: str) -> None:
        """Report a line about the cluster, unless it was reported before."""
        if line not in self._printed_lines:
            self._printed_lines.add(line)
            self._say(f"cluster {self.name}: {line}")

    def result(self, task: Future) -> Any:
        """Return the result of a task.

        Raises:
            NobodyLeftError: The scheduler or all workers are gone.
            OperationError: Workers ended while they had the task, or Dask failed.
        """
        from distributed.scheduler import KilledWorker  # noqa: PLC0415 - a run without a cluster needs none

        try:
            return task.result()
        except CancelledError:
            raise self.lost() from None
        except KilledWorker as error:
            ended = f"{error.allowed_failures + 1} workers ended while they had the same document"
            raise (OperationError if self.workers() else NobodyLeftError)(
                f"cluster {self.name}: {ended}, the last one {error.last_worker.address}; "
                "has it enough memory, and --memory-limit 0? The standard error of the workers says what ended them"
            ) from None
        except Exception as error:
            raise OperationError(
                f"cluster {self.name}: Dask failed at a task ({type(error).__name__}: {first_line(error)}); the "
                "standard error of its scheduler and workers may say why"
            ) from error

    def cancel(self, tasks: Sequence[Future]) -> None:
        """Cancel tasks; a task that a worker has begun runs on, and its result is not used."""
        if self._client is not None:
            with suppress(*_FAULTS):
                self._client.cancel(tasks)

    @property
    def is_lost(self) -> bool:
        """Whether a scheduler was connected and does not answer any more."""
        return self._client is not None and self._client.status != "running"

    def lost(self) -> NobodyLeftError:
        """Return the error of a scheduler that is gone."""
        return NobodyLeftError(
            f"cluster {self.name}: the scheduler is gone; what was stored is kept: run the same command again to go on"
        )

    def close(self) -> None:
        """Leave the cluster, and end workers that were started for it."""
        for end in (self._client, self._local):
            if end is not None:
                with suppress(*_FAULTS):
                    end.close(timeout=_CLOSE_SECONDS)
        self._client = self._local = None

    def _check_scheduler(self) -> None:
        """Check that the scheduler, which deserializes the work that it hands out, runs this kvdrift."""
        name = f"scheduler {self.scheduler}"
        try:
            source: Any = self.client.run_on_scheduler(source_sha256)
        except ImportError as error:
            raise lacking(name, error) from None
        except OSError:
            raise self.lost() from None
        check_source(name, source)

    def _wait_for_worker(self) -> None:
        """Wait for a worker, so that a fault common to all workers shows before they are handed work."""
        while not self.client.scheduler_info()["workers"]:
            if self.is_lost:
                raise self.lost()
            time.sleep(_WAIT_SECONDS)

    def _having(self, resources: Mapping[str, float]) -> list[str]:
        """Return the addresses of the workers that declare ``resources``; raise InputError if no worker does."""
        if addresses := self.workers(resources):
            return addresses
        remedy = "start workers that have a GPU with dask worker … --resources GPU=1"
        if self._address.workers is not None:
            remedy = "--gpus all starts a worker for each GPU of this machine"
        raise InputError(f"cluster {self.name}: the model computes on a GPU, and no worker declares a GPU; {remedy}")

    def _connected(self) -> Client:
        import dask  # noqa: PLC0415 - a run without a cluster needs none
        from distributed import Client, SpecCluster  # noqa: PLC0415
        from distributed.gc import disable_gc_diagnosis  # noqa: PLC0415
        from distributed.security import Security  # noqa: PLC0415

        for name in ("distributed", "distributed.client"):  # these errors are also raised
            logging.getLogger(name).setLevel(logging.CRITICAL)
        warnings.filterwarnings("ignore", "Mismatched versions found")  # ``_tell`` says so
        dask.config.set({"distributed.admin.large-graph-warning-threshold": "1GiB"})  # prompts are large
        where: str | SpecCluster = self._address.text
        try:
            if self._address.workers is not None:
                self._security = Security.temporary()
                workers, scheduler = local_processes(self._address.workers, self._security)
                where = self._local = SpecCluster(
                    workers, scheduler, security=self._security, silence_logs=logging.CRITICAL
                )
                disable_gc_diagnosis(force=True)  # during Dask's diagnosis a Ctrl-C would be lost
            return Client(where, timeout=CONNECT_SECONDS, set_as_default=False, security=self._security)
        except _FAULTS as error:
            raise OperationError(f"cluster {self.name}: no scheduler answers ({first_line(error)})") from None

    def _tell(self, client: Client) -> None:
        """Print how many workers there are, and the address of Dask's dashboard if the scheduler has bokeh."""
        end = time.monotonic() + _LOOK_SECONDS
        while not (workers := len(client.scheduler_info()["workers"])) and time.monotonic() < end:
            time.sleep(_WAIT_SECONDS)
        many = f"{workers} worker{'s' if workers > 1 else ''}" if workers else "no worker yet, the work waits"
        dashboard: Any = False
        with suppress(ImportError):  # ``check`` says that the scheduler lacks this kvdrift
            dashboard = client.run_on_scheduler(has_dashboard)
        self.say(f"{many}; dashboard {client.dashboard_link}" if dashboard else many)
        if (line := other_versions(client.get_versions())) is not None:
            self.say(line)


def local_processes(
    environments: Sequence[Mapping[str, str]], security: Security
) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    """Return Dask's specifications of workers on this machine, and of their scheduler.

    Each worker has one of ``environments``, added to the environment of this process. It is set before the worker
    imports anything but Dask, and again in a process that replaces the worker. All processes show and require the
    certificate ``security``.
    """
    from distributed import Nanny, Scheduler  # noqa: PLC0415

    local = {"host": "127.0.0.1", "protocol": "tls://", "security": security}
    options = local | {
        "nthreads": 1,
        "memory_limit": 0,  # a worker that holds a large model must not be restarted for its memory
        "dashboard": False,
        "silence_logs": logging.CRITICAL,
        "preload": ["kvdrift.flows.cluster.own_workers"],
    }
    workers = {
        number: {
            "cls": Nanny,
            "options": options
            | {"env": dict(environment), "resources": ONE_GPU if "CUDA_VISIBLE_DEVICES" in environment else {}},
        }
        for number, environment in enumerate(environments)
    }
    scheduler = {
        "cls": Scheduler,
        "options": local | {"port": 0, "dashboard": True, "dashboard_address": "127.0.0.1:0"},
    }
    return workers, scheduler


def derive_on(cluster: Cluster, location: str) -> DerivationReport:
    """Derive every underived segment of a store, on a cluster's workers."""
    from kvdrift.transforms.pipeline import run_derivation  # noqa: PLC0415 - workers that only generate need no Beam
    from kvdrift.transforms.segments import pending  # noqa: PLC0415 - as above

    store = Store.open(location)
    if pending(store).segments:
        cluster.check(store, threads=None)
    try:
        address = cluster.scheduler
        with cluster.for_other_clients():
            return run_derivation(location, "DaskRunner", [f"--dask_client_address={address}"])
    except OperationError:
        if cluster.is_lost:  # the runner does not report lost work: it returns fewer segments than it got
            raise cluster.lost() from None
        raise
