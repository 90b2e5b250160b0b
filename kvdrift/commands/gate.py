"""``kvdrift gate``: whether an action is at most a margin worse than a baseline, as an exit code."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvdrift import completion
from kvdrift.options import ModelOption, StoreArgument, StudyOption
from kvdrift.schema.errors import printable

if TYPE_CHECKING:
    from kvdrift.flows.estimate.gate import Verdict
    from kvdrift.log.store import Store


_SAME_NAMES = (
    "decision", "estimate", "low", "high", "interval_level", "draws", "documents", "clusters", "alike", "distinguished",
    "status",
)  # fmt: skip


def gate(
    context: typer.Context,
    store: StoreArgument,
    quantity: Annotated[
        str, typer.Option(metavar="NAME", help="The quantity, such as mismatch; see kvdrift list quantities.")
    ],
    action: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="The action to test.", autocompletion=completion.of_store("actions", "action")
        ),
    ],
    margin: Annotated[
        float,
        typer.Option(
            metavar="M",
            help="The largest difference that still counts as no worse, in the quantity's unit: 0.02 is 2 percentage "
            "points.",
        ),
    ],
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The action to compare with.", autocompletion=completion.of_store("actions", "action")
        ),
    ] = None,
    over_floor: Annotated[
        bool,
        typer.Option(
            "--over-floor", help="Compare with the study's larger floor: the reference repeated, or by another kernel."
        ),
    ] = False,
    level: Annotated[float, typer.Option(metavar="L", help="The confidence level of the answer.")] = 0.95,
    study: StudyOption = None,
    model: ModelOption = None,
    stratum: Annotated[str | None, typer.Option(metavar="NAME", help="Use only documents of this stratum.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a line.")] = False,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the answer as a JUnit file for continuous integration.")
    ] = None,
    page: Annotated[
        bool, typer.Option("--page/--no-page", help="Add the answer to the study's report, if the report exists.")
    ] = True,
) -> None:
    """Decide whether an action is at most a margin worse than a baseline, on a finished study.

    Exit codes: 0 equivalent or better, 1 worse, 3 unresolved. If there is no answer, nothing is on standard output, and
    the code is 2 for a mistake or a study that is not finished, 4 for a failure. A JUnit file has a failure for worse,
    a skipped test for unresolved, and an error if there is no answer.

    Examples:
        kvdrift gate stores/quickstart --quantity mismatch --action snapkv-half --baseline recent-half --margin 0.02
    """
    from kvdrift.flows.estimate.gate import LARGER_FLOOR, GateQuestion, gate_stored
    from kvdrift.log.store import Store
    from kvdrift.schema.errors import InputError
    from kvdrift.schema.study import POOLED
    from kvdrift.stats.endpoints import Decision

    if (baseline is None) != over_floor:
        wrong = "--baseline and --over-floor" if over_floor else "neither --baseline nor --over-floor"
        raise InputError(f"kvdrift gate: {wrong}: give one of the two to compare with")
    opened = Store.open(store)
    question = GateQuestion(
        quantity, action, baseline or LARGER_FLOOR, margin, level, study, model, POOLED if stratum is None else stratum
    )
    verdict = gate_stored(opened, question)
    code = {Decision.EQUIVALENT: 0, Decision.WORSE: 1, Decision.UNRESOLVED: 3}[verdict.decision]
    fields, line = {**_fields(verdict, opened), "exit_code": code}, _line(verdict, named=study is not None)
    if page:
        _to_page(opened, verdict, fields)
    if junit is not None:
        context.obj.write({0: None, 1: "failure", 3: "skipped"}[code], verdict.decision, line, fields)
    typer.echo(json.dumps(fields, ensure_ascii=False) if as_json else printable(line))
    raise typer.Exit(code)


def _to_page(store: Store, verdict: Verdict, fields: dict[str, Any]) -> None:
    """Write the answer to the study's report; if the page may not be written, leave the page and print a line."""
    from kvdrift.flows.pages.reports import report_folder
    from kvdrift.report.gates import record_gate

    study, model = verdict.question.study or "", verdict.question.model
    for folder in dict.fromkeys([report_folder(store, study, model), report_folder(store, study)]):
        try:
            if record_gate(folder, fields, _line(verdict, named=False)) is not None:
                return
        except OSError as error:
            typer.echo(f"kvdrift: {folder}: the answer is not on the page ({error.strerror or error})", err=True)
            return


def _line(verdict: Verdict, *, named: bool) -> str:
    """Return the answer in one line for people; ``named`` adds the study's name, needed if the store has several."""
    from kvdrift.report.printing.numbers import count, fixed, scaled
    from kvdrift.report.printing.numbers import level as percent
    from kvdrift.report.reading.estimates import FEW_CLUSTERS
    from kvdrift.schema.study import POOLED
    from kvdrift.stats.registry import Higher, Scale

    question, contrast = verdict.question, verdict.contrast
    shown = [verdict.estimate, verdict.low, verdict.high]
    decimals = 2 if any(value is not None and abs(value) * contrast.scale.factor < 1 for value in shown) else 1
    estimate = scaled(verdict.estimate, contrast.scale, decimals)
    between = _between(verdict, decimals)
    where = "" if question.stratum == POOLED else f" in {question.stratum}"
    few_clusters = " (few)" if verdict.clusters < FEW_CLUSTERS else ""
    difference = f"{question.quantity}{where}, {question.action} less {question.baseline}"
    margin = fixed(question.margin * contrast.scale.factor, decimals)
    parts = [f"{verdict.decision}: {difference}: {estimate} {contrast.scale.sign} {between}, margin {margin}"]
    if contrast.higher is Higher.BETTER:
        parts.append("higher is better")
    parts.append(f"{percent(verdict.interval_level)} interval, {verdict.interval}")
    parts.append(f"{count(verdict.documents)} documents in {count(verdict.clusters)} clusters{few_clusters}")
    if verdict.alike:
        more = "no number of similar documents" if verdict.more is None else f"{count(verdict.more)} more like these"
        parts.append(f"these documents agree and may lack rare failures: {more} would settle it")
    if verdict.unseen is not None:
        parts.append(
            "these documents differ by more than the margin, and cannot exclude rare failures that none shows: "
            f"excluding these takes {count(verdict.unseen)} documents in all"
        )
    if verdict.from_floors:
        ends = {
            name: " to ".join(scaled(end, Scale.POINTS, 2) for end in between)
            for name, between in verdict.from_floors.items()
        }
        apart = "distinguished" if verdict.distinguished else "not distinguished"
        floors = ", ".join(f"{name} {between} pp" for name, between in ends.items())
        parts.append(f"{apart} from the floors in R: {floors}, 95% over all pairs")
    return "; ".join([*parts, verdict.status, *([f"study {question.study}"] if named else [])])


def _between(verdict: Verdict, decimals: int) -> str:
    """Return the interval as printed, with enough digits that an end looks equal to the margin only if it is."""
    from kvdrift.report.printing.numbers import scaled, sure_decimals
    from kvdrift.stats.registry import Higher

    low, high, scale = verdict.low, verdict.high, verdict.contrast.scale
    if low is None or high is None:
        return "no interval"
    factor, worse = scale.factor, -1 if verdict.contrast.higher is Higher.BETTER else 1
    ends = (factor * low, factor * high)
    margin = worse * factor * verdict.question.margin
    decimals = sure_decimals(*ends, verdict.interval_level, verdict.draws, decimals + 1, margin)
    return f"[{scaled(low, scale, decimals)}, {scaled(high, scale, decimals)}]"


def _fields(verdict: Verdict, store: Store) -> dict[str, Any]:
    import kvdrift
    from kvdrift.commands.status import iso, last_of_study
    from kvdrift.log.last_times import last_times
    from kvdrift.log.studies import count_waiting, store_size
    from kvdrift.report.reading.estimates import FEW_CLUSTERS

    times = last_times(store.location)
    study, model = str(verdict.question.study), str(verdict.question.model)
    waiting = count_waiting(store).get((study, model))
    return {
        "contrast": verdict.contrast.name,
        "higher": verdict.contrast.higher.value,
        **asdict(verdict.question),
        **{name: getattr(verdict, name) for name in _SAME_NAMES},
        "method": verdict.interval,
        "more_documents": verdict.more,
        "documents_for_unseen": verdict.unseen,
        "from_floors": dict(verdict.from_floors),
        "few_clusters": verdict.clusters < FEW_CLUSTERS,
        **last_of_study(store, study, model, times),
        "last_check": iso(times.check),
        "check_faults": times.faults,
        "waiting_replicates": 0 if waiting is None else waiting.replicates,
        "store": store.location,
        "size": store_size(store.location),
        "versions": {
            "kvdrift": kvdrift.__version__, "events": verdict.events_version, "plan": verdict.plan_sha256,
        },
    }  # fmt: skip
