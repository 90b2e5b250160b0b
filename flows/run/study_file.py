"""The run of a study file: its studies, one for each model and law, from their documents to their reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvdrift.flows.cluster.address import ClusterAddress
from kvdrift.flows.material import SharedMaterial
from kvdrift.flows.orchestration.page import FlowRunPage
from kvdrift.flows.run.checks import check_study
from kvdrift.flows.run.generators import generators
from kvdrift.flows.run.options import default_location
from kvdrift.flows.run.remarks import remarks
from kvdrift.flows.run.study_flow import Outcome, run_studies
from kvdrift.flows.run.study_run import DocumentLimit, StudyRun
from kvdrift.generator.service.client import ServiceAddress
from kvdrift.log.last_times import record_run
from kvdrift.schema.location import absolute
from kvdrift.schema.progress import Progress
from kvdrift.schema.study import Study


def run_file(
    studies: Sequence[Study],
    store: str | Path | None,
    address: ServiceAddress | None,
    progress: Progress,
    limit: int | None = None,
    redo: Sequence[str] = (),
    *,
    plan_only: bool = False,
    replan: bool = False,
    cluster: ClusterAddress | None = None,
    compacts: bool = True,
) -> Outcome:
    """Run the studies of one file, one for each model and law.

    Without the ``address`` of a service or a ``cluster`` this process generates. The run stops after ``limit``
    documents, and with ``plan_only`` after freezing the plans. The units of the actions ``redo`` are superseded first,
    and with ``replan`` the plans are made anew. At its end the run puts small files together, unless ``compacts`` is
    False. If ``progress`` is the open page of a flow run, the stages are tasks of that run.
    """
    location = absolute(store if store is not None else default_location(studies))
    shared, gathered = DocumentLimit(limit), SharedMaterial()
    page = progress if isinstance(progress, FlowRunPage) else FlowRunPage(progress)
    with generators(studies, address, cluster, page) as by:
        runs = [
            StudyRun(
                study,
                location,
                by.made_by,
                page,
                shared,
                by.identify,
                by.derived_by,
                by.sides,
                replan=replan,
                gathered=gathered,
                compacts=compacts,
            )
            for study in studies
        ]
        for one in runs:
            check_study(one, served=by.served)
        for line in remarks(runs):
            page.say(line)
        outcome = run_studies(runs, lambda: by.get_ready(runs, redo), redo, plan_only=plan_only, page=page)
    for study in studies:
        record_run(location, study.name, study.model.id)
    return outcome
