"""The tables of a study's plans, and of the estimates from its events."""

from __future__ import annotations

import pyarrow as pa

from kvdrift.schema.columns import ACTION, GROUP, REVISION, SPLIT, column, flag, integer, long, real, stored_table, text

_ESTIMATED_FROM = (
    integer("action_revision", "revision of the action whose events the row was estimated from", "none", default="0"),
    integer(
        "baseline_revision",
        "revision of the baseline whose events the row was estimated from; 0 without a baseline",
        "none",
        default="0",
    ),
)
_DOCUMENTS_REVISION = integer(
    "documents_revision",
    "newest revision of the study's documents that the row was estimated from",
    "none",
    default="0",
)

_STRATUM = text("stratum", "stratum, or pooled")
_BASELINE = text("baseline", "baseline of a contrast; null for one action's quantity", null=True)
_QUANTITY = text("quantity", "column name of the quantity in its view")
_ESTIMATE = real("estimate", "point estimate; null if undefined", "unit of the quantity", null=True)
_EVENTS_VERSION = long("events_version", "version of the events table behind the row", "none")
_PLAN = text("plan_sha256", "SHA-256 of the plan under which the row was made", null=True)
_STATUS = text("status", "prespecified; seen: planned after the outcomes were known; or exploratory")
_INTERVAL = text(
    "interval",
    "how the interval was made: studentized, skewed, alike, expanded, percentile, simultaneous, or repeated (of an "
    "interim look)",
    default="percentile",
)
_INPUTS = text("inputs_sha256", "SHA-256 of the moments and settings that the row was made from", null=True)

PLANS = stored_table(
    "plans",
    "one revision of the frozen plan of a study's evaluation; the newest revision is the plan",
    "study model plan_revision",
    *GROUP[:2],
    text("plan_sha256", "SHA-256 of column plan without the measured seconds"),
    column("frozen_at", "when the plan was frozen", kind=pa.timestamp("us", tz="UTC")),
    long("events_version", "version of the events table behind the plan", "none"),
    text("plan", "the plan: K, N, endpoints, contrasts, levels; canonical JSON"),
    integer("plan_revision", "revision of the plan, from 0", "none", default="0"),
)

EXACT_VALUES = stored_table(
    "exact_values",
    "one quantity of one finite-state system, by enumeration",
    "study model doc action action_revision quantity x",
    *GROUP,
    _QUANTITY,
    integer("x", "position or depth; null for a scalar", "tokens", null=True),
    real("value", "the exact value", "unit of the quantity"),
    REVISION,
)

RESULTS = stored_table(
    "results",
    "one estimate with its interval",
    "study model split stratum action baseline quantity x events_version plan_sha256 documents_revision",
    *GROUP[:2],
    SPLIT,
    _STRATUM,
    ACTION,
    _BASELINE,
    _QUANTITY,
    integer("x", "position or lag in tokens, or number of a block, of a profile; null for a scalar", "none", null=True),
    _ESTIMATE,
    real("low", "lower end of the interval", "unit of the quantity", null=True),
    real("high", "upper end of the interval", "unit of the quantity", null=True),
    real("level", "coverage of the interval", "probability, 0..1"),
    integer("draws", "bootstrap draws", "count"),
    integer("documents", "documents behind the estimate", "count"),
    text("family", "prespecified family that the level is adjusted for", null=True),
    _STATUS,
    _EVENTS_VERSION,
    _PLAN,
    *_ESTIMATED_FROM,
    _INPUTS,
    _INTERVAL,
    integer("clusters", "effective clusters of documents behind the estimate, rounded down", "count", null=True),
    real(
        "estimate_reduced",
        "the estimate minus control variates; null for quantities without control variates",
        "unit of the quantity",
        null=True,
    ),
    real("low_reduced", "lower end of the reduced estimate's interval", "unit of the quantity", null=True),
    real("high_reduced", "upper end of the reduced estimate's interval", "unit of the quantity", null=True),
    _DOCUMENTS_REVISION,
)

LOOKS = stored_table(
    "looks",
    "one primary endpoint at one interim look of a sequential study",
    "study model plan_sha256 look quantity stratum action baseline "
    "action_revision baseline_revision documents_revision",
    *GROUP[:2],
    integer("look", "number of the interim look, from 1", "none"),
    _STRATUM,
    ACTION,
    _BASELINE,
    _QUANTITY,
    _ESTIMATE,
    real(
        "low",
        "lower end of the repeated interval; null if the interim look has none",
        "unit of the quantity",
        null=True,
    ),
    real("high", "upper end of the repeated interval", "unit of the quantity", null=True),
    real("level", "probability with which the intervals of all interim looks hold together", "probability, 0..1"),
    real("constant", "critical constant of the interim look", "standard errors"),
    text("interval", "how the interval was made: studentized, student, alike or expanded", null=True),
    integer("draws", "bootstrap draws; 0 if the interval rests on Student's t distribution", "count"),
    integer("documents", "documents of the interim look behind the estimate", "count"),
    integer("clusters", "effective clusters of documents behind the estimate, rounded down", "count"),
    flag("resolved", "whether the interval reaches the plan's goal"),
    *_ESTIMATED_FROM,
    _EVENTS_VERSION,
    text("plan_sha256", "SHA-256 of the plan with the interim look"),
    _DOCUMENTS_REVISION,
)

CALIBRATION = stored_table(
    "calibration",
    "one candidate predictor of a contrast, judged on evaluation documents",
    "study model action baseline observation candidate events_version plan_sha256 documents_revision",
    *GROUP[:2],
    ACTION,
    text("baseline", "the action that the contrast subtracts"),
    text("observation", "fixed_history: F; positions: the moments of block 1"),
    text("candidate", "stratum_action_mean, flat or ridge"),
    flag("selected", "whether the predictor has the least cross-validated error on development documents"),
    real("cross_validated_mse", "pooled squared error of document contrasts", "share squared", null=True),
    integer("documents", "evaluation documents that both actions have", "count"),
    real("gap", "contrast of mismatch on evaluation documents", "difference, -1..1", null=True),
    real("predicted_gap", "this contrast as predicted from the observation", "difference, -1..1", null=True),
    real("error", "gap - predicted_gap", "difference, -1..1", null=True),
    real("low", "lower end of the error's interval", "difference, -1..1", null=True),
    real("high", "upper end of the error's interval", "difference, -1..1", null=True),
    real("level", "coverage of the interval", "probability, 0..1"),
    real("margin", "an interval inside +-margin is equivalence", "share, 0..1"),
    text("decision", "equivalent, different or unresolved", null=True),
    real("mae", "pooled mean absolute error of document contrasts", "share, 0..1", null=True),
    real("rmse", "root of the pooled squared error of document contrasts", "share, 0..1", null=True),
    integer("draws", "bootstrap draws", "count"),
    _STATUS,
    _EVENTS_VERSION,
    _PLAN,
    *_ESTIMATED_FROM,
    _INPUTS,
    _INTERVAL,
    _DOCUMENTS_REVISION,
)
