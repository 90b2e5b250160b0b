"""The section on the study: its settings, the storage and cost of each action, and the documents."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from shlex import quote
from typing import Any

from kvdrift.report.printing.estimate_tables import NOISE_FLOOR
from kvdrift.report.printing.numbers import MISSING, count, count_range, duration, level, size
from kvdrift.report.printing.tables import Cell, Column, PrintedTable, label_column, table_row
from kvdrift.report.reading.content import PageContent
from kvdrift.report.reading.estimates import FEW_CLUSTERS, ReportedEstimates, ViewRow
from kvdrift.report.reading.facts import DEVELOPMENT, EVALUATION, Control, Facts, Storage, total
from kvdrift.report.sections.section import Section
from kvdrift.schema.location import folder_name
from kvdrift.schema.study import FLOOR_ACTION, HTTP
from kvdrift.schema.study.actions import HALVES
from kvdrift.schema.study.described import described_action
from kvdrift.schema.study.design import stratum_of
from kvdrift.schema.study.reading import toml_table
from kvdrift.schema.windows import Windows

_OWN_COLUMNS = ("window", "kernel", "sinks")  # parameters of selectors that are columns of the view
_NO_PARAMETERS = {"tova": ("window",)}  # for tova the window is always the last position
_PLANNED = ("replicates", "target_half_width", "alpha", "interval", "variance")
_SPLITS = (DEVELOPMENT, EVALUATION)
_ROWS = "row_multiple"  # an entry among the library versions of a unit


def section(content: PageContent) -> Section:
    """Make the section on the study."""
    tables = (actions_table(content.facts, content.actions), documents_table(content.facts))
    rows = study_rows(content.facts, content.estimates, content.actions)
    rows += [("Ends of texts", text) for text in _ends(content)]
    return Section("study", "The study", tables, values={"rows": rows})


def _ends(content: PageContent) -> Iterator[str]:
    """Yield the tokens that end a text, and the share of X that ended; nothing if the tokens are unknown."""
    tokens, (ended, texts) = content.facts.eos_tokens, content.ended
    if tokens is not None and texts:
        named = ", ".join(f"{token} ‘{content.token_text(token)}’" for token in tokens) or "no token"
        yield f"at {named}; {count(ended)} of {count(texts)} continuations X ended ({ended / texts:.0%})"


def documents_table(facts: Facts) -> PrintedTable:
    """Make the table of documents by stratum and split."""
    columns = [label_column("stratum"), *map(Column, _SPLITS)]
    if not facts.finite:
        columns.append(Column("prompt length n", "tokens"))
    rows = []
    for stratum in (*facts.strata, None):
        lengths = [document["prompt_tokens"] for document in facts.documents if stratum in {None, document["stratum"]}]
        counts = [_documents_of(facts, split, stratum) for split in _SPLITS]
        rows.append(table_row(stratum or "all", *counts, *([] if facts.finite else [count_range(lengths)])))
    shared = facts.clusters(EVALUATION) < facts.count(EVALUATION)
    note = "Documents that share a question are one cluster." if shared else ""
    return PrintedTable("documents", "Systems" if facts.finite else "Documents", tuple(columns), tuple(rows), note)


def _documents_of(facts: Facts, split: str, stratum: str | None) -> Cell:
    documents, clusters = facts.count(split, stratum), facts.clusters(split, stratum)
    return Cell(count(documents), f"{count(clusters)} clusters" if clusters < documents else "")


def actions_table(facts: Facts, order: list[str]) -> PrintedTable:
    """Make the table of storage and time: actions in ``order``, then controls."""
    if facts.finite:
        return _finite_table(facts, order)
    rows = []
    places = {name: place for place, name in enumerate(order)}
    for action in sorted(facts.actions, key=lambda row: places.get(row["action"], len(places))):
        name, stored = action["action"], facts.storage.get(action["action"])
        traits = {
            NOISE_FLOOR: name in facts.noise_floors, "control": action["control"],
            "added after the plan": name in facts.added,
        }  # fmt: skip
        held = _held(stored, within=action["policy"] is not None) if stored else [MISSING] * 7
        weights = [size(facts.weight_bytes(name))] if facts.own_weights else []
        what = Cell(name, ", ".join(trait for trait, there in traits.items() if there))
        rows.append(table_row(what, described_action(action), *weights, *held))
    weights_column = [Column("weights", "", "bytes of the files with the weights of the action’s side")]
    columns = (
        label_column("action"),
        label_column("what it does"),
        *(weights_column if facts.own_weights else ()),
        Column("entries m", "", "prompt entries kept after prefill, per KV head and layer with full attention"),
        Column(
            "keys, values",
            "",
            "mean bytes per document, as they are stored; those of windows and states are not evictable",
        ),
        Column("scales, index, metadata", "", "mean bytes of scales, indices, lengths and positions per document"),
        Column(facts.cache, "", "the two together: stored once a document, and read by all of its replicates"),
        Column("each replicate adds", "", "mean bytes of the generated entries of one replicate, up to the horizon"),
        Column("K", "", "replicates per document"),
        Column("time to measure", "", "kvdrift’s time for prefill and decoding of all units; not the action’s speed"),
    )
    note = (
        "Measured; means over documents. A prompt’s cache is stored once, whatever K is. The time is of this study "
        "and grows with K and with documents; it says nothing about how fast an action serves."
    )
    if facts.policies:
        note += (
            " A decode-time policy keeps m entries after prefill. Its bytes are those of the most entries that a step "
            "reads, including generated entries; a step may read more entries than the prompt has."
        )
    return PrintedTable("actions", "Actions", columns, tuple(rows), note)


def _held(stored: Storage, *, within: bool) -> list[Cell | str]:
    """Return the cells of an action's storage; ``within`` says that its bytes include generated entries."""
    keys = Cell(size(stored.payload_bytes), f"{size(stored.fixed_bytes)} not evictable" if stored.fixed_bytes else "")
    held = (keys, size(stored.side_bytes), size(stored.mean_prompt_cache))
    added = Cell(MISSING, "within") if within else size(stored.added_bytes)
    return [count_range(stored.kept_entries), *held, added, _replicates(stored), duration(stored.seconds)]


def _finite_table(facts: Facts, order: list[str]) -> PrintedTable:
    rows = [
        table_row(action, _replicates(stored), duration(stored.seconds))
        for action in order if (stored := facts.storage.get(action))
    ]  # fmt: skip
    columns = (
        label_column("action"),
        Column("K", "", "replicates per system"),
        Column("time to measure", "", "of all units"),
    )
    return PrintedTable("actions", "Actions", columns, tuple(rows))


def _replicates(stored: Storage) -> Cell:
    """Return the cell of coupled pairs per document, with the replicates of residual branching below them."""
    return Cell(count_range(stored.replicates), f"{count_range(stored.branchings)} SWRB" if stored.branchings else "")


def study_rows(facts: Facts, estimates: ReportedEstimates, actions: list[str]) -> list[tuple[str, str]]:
    """Return the study's settings as labels and texts."""
    stored = [facts.storage[action] for action in actions if action in facts.storage]
    seconds = total(row.seconds for row in facts.storage.values())
    evaluations = total(row.kernel_evaluations for row in facts.storage.values())
    cost = "not recorded" if seconds is None else duration(seconds)
    computed = f", {count(evaluations)} next-token distributions" if evaluations else ""
    branched = [total for row in stored for total in row.branchings]
    plan = "none; all estimates are exploratory"
    if facts.plan:
        revision = f"revision {facts.plan.revision}, " if facts.plan.revision else ""
        plan = f"{revision}frozen {facts.plan.frozen_at}, SHA-256 {facts.plan.sha256[:12]}…"
    rows = [
        ("Model", facts.model),
        ("Engine", "; ".join(facts.engines)),
        ("Device", "" if facts.engines else "; ".join(facts.devices) or "not recorded"),
        ("Documents", _counted_documents(facts)),
        ("Horizon H", f"{facts.windows.horizon} tokens"),
        ("Sampling", "" if facts.sampling is None else facts.sampling.words),
        ("Replicates K", count_range(value for row in stored for value in row.replicates) + " per document and action"),
        ("SWRB replicates", f"{count_range(branched)} of residual branching per document that has some"
         if branched else ""),
        ("Not evictable", _not_evictable(facts)),
        ("Controls", "; ".join(_control(control) for control in facts.controls) or ("" if facts.engine else "none")),
        ("Plan", plan),
        ("Seed", str(facts.seed) if facts.seed is not None else "not recorded"),
        ("Intervals", _intervals(estimates)),
        ("Time to measure", f"{cost} for these documents{computed}"),
    ]  # fmt: skip
    return [(label, text) for label, text in rows if text]


def _not_evictable(facts: Facts) -> str:
    whole = facts.storage.get(facts.whole_cache or "")
    if whole is None or not whole.fixed_bytes:
        return ""
    return (
        f"{size(whole.fixed_bytes)} of the full cache’s {size(whole.mean_prompt_cache)} are windows and states, which "
        "no action evicts; retention is that of the layers with full attention"
    )


def _intervals(estimates: ReportedEstimates) -> str:
    bounded = [row for row in estimates.all() if row.has_interval and row.level is not None]
    parts = []
    for standing in sorted({row.standing for row in bounded}):
        rows = [row for row in bounded if row.standing == standing]
        draws = " or ".join(count(value) for value in sorted({row.draws for row in rows if row.draws is not None}))
        levels = " and ".join(level(value) for value in sorted({row.level for row in rows if row.level is not None}))
        parts.append(f"{standing}: {draws} bootstrap draws, {levels}")
    return "; ".join(parts) or "missing"


def _counted_documents(facts: Facts) -> str:
    strata = f"{len(facts.strata)} {'strata' if len(facts.strata) > 1 else 'stratum'}"
    text = f"{count(facts.count(EVALUATION))} evaluation, {count(facts.count(DEVELOPMENT))} development, {strata}"
    return f"{text}; {count(facts.unmeasured)} more are listed but not measured" if facts.unmeasured else text


def _control(control: Control) -> str:
    if not control.pairs:
        return f"{control.action}: no pairs yet"
    value = "exactly 0" if control.zero else "NOT 0"
    return (
        f"{control.action}: δ and f are {value} in {count(control.pairs)} pairs on {count(control.documents)} documents"
    )


def study_text(facts: Facts) -> str | None:
    """Return a study file made from the store; None for finite-state systems and for another generator's events.

    The file decides the same events: ``study_sha256`` is the same. ``[plan]`` has the chosen K and N.
    """
    if facts.settings is None or facts.finite:
        return None
    content = json.loads(facts.settings)
    tables = [("[study]", content["study"]), ("[model]", content["model"])]
    for section in content["documents"]:
        stratum = stratum_of(section["stratum"], section["source"], section["length"])
        counts = {split: facts.listed.get((stratum, split), 0) for split in (DEVELOPMENT, EVALUATION)}
        tables.append(("[[documents]]", section | counts))
    tables += [("[[actions]]", _action(row)) for row in facts.actions if not row["control"] and not _is_floor(row)]
    if facts.plan is not None:
        tables.append(("[plan]", _plan(facts.plan.content)))
    windows = asdict(facts.windows)
    if (horizon := windows.pop("horizon")) and facts.windows != Windows.of(horizon):
        tables.append(("[windows]", windows))
    head = "# Written from the store, which keeps the settings of a study file and not the file.\n"
    if any(not section.get("tasks") for section in content["documents"]):
        head += "# Stores keep no paths either: give documents that were read from a file their path.\n"
    if content["model"].get("engine") == HTTP:
        head += "# Stores keep no addresses of servers: give [model] and each action a url.\n"
    return "\n".join([head, *(toml_table(title, values) for title, values in tables)])


def _is_floor(row: ViewRow) -> bool:
    """Tell whether an action is an engine's repeat of the reference, which every study of an engine has by itself."""
    return row["settings"] is not None and row["action"] == FLOOR_ACTION


def _action(row: ViewRow) -> dict[str, Any]:
    weights = {} if row["weights"] is None else {"weights": row["weights"]}
    if row["settings"] is not None:
        settings = json.loads(row["settings"])
        settings_entry = {"settings": settings} if settings or row["weights"] is None else {}
        return {"name": row["action"], **settings_entry, **weights}
    keep = int(row["keep"]) if str(row["keep"]).isdigit() else row["keep"]
    action: dict[str, Any] = {"name": row["action"], **weights, "keep": keep}
    if row["policy"]:
        return action | {"policy": _named(row["policy"], row["policy_parameters"])}
    columns = [name for name in _OWN_COLUMNS if row[name] and name not in _NO_PARAMETERS.get(row["selector"], ())]
    parameters: dict[str, Any] = {name: row[name] for name in columns} | json.loads(row["parameters"] or "{}")
    codec = {"codec": _codec(row["codec"], row["codec_parameters"])} if row["codec"] else {}
    return action | {"selector": row["selector"]} | parameters | codec


def _codec(name: str, parameters: str | None) -> str | dict[str, Any]:
    """Return a codec as a study file names it; layers that are exact by default are not written."""
    written: dict[str, Any] = json.loads(parameters or "{}")
    written.pop("exact_ends", None)
    if not any(isinstance(written.get(part), dict) for part in HALVES):
        return {"name": name, **written} if written else name
    halves = {part: {"name": half, **written.pop(part)} for part, half in zip(HALVES, name.split("+"), strict=True)}
    return {part: half for part, half in halves.items() if half["name"] != "exact"} | written


def _named(name: str, parameters: str | None) -> str | dict[str, Any]:
    return {"name": name, **json.loads(parameters)} if parameters else name


def _plan(content: dict[str, Any]) -> dict[str, Any]:
    primary = list(dict.fromkeys(row["quantity"] for row in content["primary_endpoints"]))
    development = content.get("development", {}).get("replicates")
    return {
        "baseline": content["baseline"], "primary": primary, "documents": content["documents_per_stratum"],
        "development_replicates": development, **{name: content.get(name) for name in _PLANNED},
    }  # fmt: skip


def definitions(content: PageContent) -> Section:
    """Make the section of the page's symbols."""
    lags = not content.facts.finite or content.windows.early_last >= 1
    branched = bool(content.residual_risks)
    divergences = content.estimates.known("top1_agreement")
    values = {"lags": lags, "branched": branched, "divergences": divergences, "few_clusters": FEW_CLUSTERS}
    return Section("definitions", "Definitions", values=values)


def provenance(content: PageContent) -> Section:
    """Make the section on reproduction: the command, hashes, seed, versions and the store."""
    known, facts = content.provenance, content.facts
    made = facts.study_sha256 is not None  # false if another generator made the events
    what = [
        f"study {facts.study_sha256[:12]}" if facts.study_sha256 else "",
        f"plan {facts.plan.sha256[:12]}" if facts.plan else "",
        f"seed {facts.seed}" if facts.seed is not None else "",
        facts.other_sampling,
        "; ".join(facts.devices),
    ]
    line = ", ".join(part for part in what if part)
    line = f"{line}: the same file, seed and versions give the same events, and the same store the same page."
    store = known.store or "STORE"
    file = f"{folder_name(facts.study)}.toml"
    rows = [
        ("Study file SHA-256", facts.study_sha256),
        ("Plan SHA-256", facts.plan.sha256 if facts.plan else ""),
        ("Generated with", _versions({name: facts.libraries[name] for name in facts.libraries if name != _ROWS})),
        ("Batches", _batches(facts.libraries.get(_ROWS, ""))),
        ("Analyzed and drawn with", _versions(known.libraries)),
        ("Store", known.store),
        ("Table versions", _versions(known.tables)),
    ]
    values = {
        "line": line[:1].upper() + line[1:],
        "command": f"kvdrift run {quote(file)} --store {quote(store)}" if made else f"kvdrift report {quote(store)}",
        "file": file,
        "text": study_text(facts),
        "rows": [row for row in rows if row[1]],
    }
    return Section("provenance", "To reproduce", values=values)


def _versions(versions: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))


def _batches(multiple: str) -> str:
    """Say to which multiples of rows decoding padded its batches; ``multiple`` has several if machines differed."""
    numbers = [number for number in multiple.split(", ") if number not in {"", "1"}]
    if not numbers:
        return ""
    return (
        f"padded to a multiple of {' or of '.join(numbers)} rows, or of fewer rows if a test of this "
        "model and machine found fewer to be enough, so that batch size cannot change results"
    )
