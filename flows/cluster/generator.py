"""Generation on a cluster: a group of documents is a task, and the worker that takes it stores its units.

This process waits, counts, and at the end checks that the store has the units that workers reported.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace

from kvdrift.flows.cluster.connection import Cluster
from kvdrift.flows.cluster.facts import facts
from kvdrift.flows.cluster.gpus import resources_of, who_has_which
from kvdrift.flows.cluster.groups import Groups
from kvdrift.flows.generate.local import LocalGenerator
from kvdrift.flows.generate.named_work import named
from kvdrift.flows.generate.storing import Identities, not_stored, stored_gpus, studies_of
from kvdrift.generator.actions import Action
from kvdrift.generator.generation import Work
from kvdrift.generator.identity import ActionIdentity, GpuKinds
from kvdrift.generator.transformer.files.text_ends import model_files
from kvdrift.generator.transformer.other_weights.named import identities
from kvdrift.log.store import Store
from kvdrift.schema.errors import KvdriftError, OperationError
from kvdrift.schema.study import FINITE_STATE, Study


class ClusterGenerator:
    """Generates the units of studies on a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        # Of studies whose models are elsewhere: the weights, and the tokens that end a text.
        self._models: dict[tuple[str, str], tuple[str | None, tuple[int, ...]]] = {}

    def check(self, studies: Sequence[tuple[Study, GpuKinds]]) -> None:
        """Check that the cluster answers, and that its workers can generate; no store is needed.

        Each study comes with the kinds of GPU that made its units so far.

        Raises:
            InputError: A worker cannot generate; the line says what the worker needs.
            OperationError: No scheduler answers.
        """
        self._cluster.check(resources=resources_of(study.model for study, _ in studies))
        for study, made_on in studies:
            self._gpus(study, made_on)

    def __call__(
        self, store: Store, study: Study, work: Work, known: Identities
    ) -> Generator[tuple[int, int], None, None]:
        """Generate a study's work, and yield the numbers of documents and of new units of each group that is stored.

        ``HandingOut.stored`` says what is raised.
        """
        from kvdrift.flows.cluster.handing_out import HandingOut  # noqa: PLC0415 - it imports Dask
        from kvdrift.flows.cluster.worker import Assignment  # noqa: PLC0415 - as above

        resources = resources_of([study.model])
        self._cluster.check(store, resources)
        asked = {(unit.study(study.name), unit.action.name, unit.revision) for _, units in work for unit in units}
        made_on = (stored_gpus(store, name, study.model.id) for name in studies_of(study, work))
        gpus = self._gpus(study, GpuKinds.together(made_on))
        own = {key: known[key] for key in asked}
        assignment = Assignment(uuid.uuid4().hex, study, store.location, facts(store.location), gpus, own)
        handing_out = HandingOut(self._cluster, assignment, Groups(named(work), store.location), resources)
        with closing(handing_out.stored()) as groups:
            for stored in groups:
                yield len(stored.documents), stored.units
        check_stored(store, study, work)

    def identify(self, study: Study, *, required: bool) -> Callable[[Action], ActionIdentity]:
        """Return the identity of the study's actions, from this machine's files or, if these lack, from a worker's.

        Raises:
            InputError: A file cannot be read, or a worker cannot load the model.
            OperationError: No scheduler answers, and an identity that is unknown on this machine is ``required``.
        """
        local = LocalGenerator()
        if study.model.kind == FINITE_STATE:
            return local.identify(study, required=required)
        files = model_files(study)
        if required and files.weights_sha256 is None:
            weights, ends = self._model_of(study)
            files = replace(files, weights_sha256=weights, eos_tokens=ends)
        return identities(study, files)

    def _gpus(self, study: Study, made_on: GpuKinds) -> GpuKinds:
        """Return the GPU models that workers must have: those of the present units, or else the first worker's."""
        if not (resources := resources_of([study.model])):
            return made_on
        from kvdrift.flows.cluster.worker import gpu_there  # noqa: PLC0415 - it imports Dask

        workers = self._cluster.workers(resources)
        found = sorted(self._cluster.ask(gpu_there, study.model, workers=workers))
        for who, gpu in found:
            made_on.check(who, gpu, study.model)
            made_on = made_on if made_on.names else GpuKinds.at(who, gpu)
        self._cluster.say(who_has_which(found, len(self._cluster.workers()) - len(workers)))
        return made_on

    def _model_of(self, study: Study) -> tuple[str | None, tuple[int, ...]]:
        from kvdrift.flows.cluster.worker import model_there  # noqa: PLC0415 - it imports Dask

        key = (study.name, study.model.id)
        if key not in self._models:
            resources = resources_of([study.model]) or None
            task = self._cluster.client.submit(model_there, study, pure=False, resources=resources)
            found = self._cluster.result(task)
            if isinstance(found, KvdriftError):
                raise found
            self._models[key] = found
        return self._models[key]


def check_stored(store: Store, study: Study, work: Work) -> None:
    """Check that the store has the units that workers were to store."""
    lost = [(document.doc, unit.action.name) for document, units in not_stored(store, study, work) for unit in units]
    if lost:
        raise OperationError(
            f"{store.location}: {len(lost)} units that workers have stored do not show here, the first of document "
            f"'{lost[0][0]}', action '{lost[0][1]}'; run the same command again to go on"
        )
