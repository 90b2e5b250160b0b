"""Every stored table as an Arrow schema: columns, types, units and meanings.

The types are common to Delta Lake and DuckDB: signed integers only, strings without a dictionary type. Column names
follow the definitions page. A test compares the SQL staging views with this module.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from kvdrift.schema.moments import LAG_MOMENTS, POSITION_MOMENTS, SCALAR_MOMENTS

SCHEMA_VERSION = 1
"""The version of these tables. A store of another version is refused."""

GROUP_KEY: Final = ("study", "model", "doc", "action")  # shared by all replicates of a unit

MEASURES: Final = (
    "tokens", "bytes", "seconds", "entries", "count", "share, 0..1", "probability, 0..1", "total variation, 0..1",
    "score, 0..1", "difference, -1..1", "correlation, -1..1", "ratio", "share squared", "total variation x tokens",
    "standard errors", "unit of the quantity", "unit in column unit", "unit of the moment, times replicates", "none"
)  # fmt: skip
"""The units of numbers in tables and views; ``none`` is for numbers without a unit: seeds, revisions, token ids."""

COUPLED, SCAN, BRANCH = "coupled", "scan", "branch"  # kinds of events
PLAIN: Final = "plain"  # estimator of a unit of coupled pairs
SWRB: Final = "swrb"  # estimator of a unit of scans with one residual branch each


@dataclass(frozen=True)
class Table:
    """One stored table: the meaning of a row, the columns that are unique together, and the columns."""

    name: str
    row: str
    key: tuple[str, ...]
    schema: pa.Schema

    @functools.cached_property
    def columns(self) -> tuple[str, ...]:
        """Column names in stored order."""
        return tuple(self.schema.names)

    @property
    def meanings(self) -> dict[str, str]:
        """The meaning of each column, by name."""
        return {field.name: field.metadata[b"meaning"].decode() for field in self.schema}

    @property
    def units(self) -> dict[str, str]:
        """The unit of each column that has numbers, one of ``MEASURES``, by name."""
        return {field.name: field.metadata[b"unit"].decode() for field in self.schema if b"unit" in field.metadata}

    @functools.cached_property
    def defaults(self) -> dict[str, Any]:
        """The columns that rows to append may leave out, each with its value then."""
        return {
            field.name: pa.scalar(field.metadata[b"default"].decode()).cast(field.type).as_py()
            if b"default" in field.metadata
            else None
            for field in self.schema
            if field.nullable or b"default" in field.metadata
        }


def _column(
    name: str, meaning: str, unit: str = "", *, kind: pa.DataType, null: bool = False, default: str = ""
) -> pa.Field:
    """Declare a column. Rows to append may leave out a column that may be null or has a ``default``."""
    metadata = {"meaning": meaning, "unit": unit, "default": default}
    return pa.field(name, kind, nullable=null, metadata={key: text for key, text in metadata.items() if text})


_text = functools.partial(_column, kind=pa.string())
_int = functools.partial(_column, kind=pa.int32())
_long = functools.partial(_column, kind=pa.int64())
_real = functools.partial(_column, kind=pa.float64())
_flag = functools.partial(_column, kind=pa.bool_())
_distance = functools.partial(_column, kind=pa.float32())
_ints = functools.partial(_column, kind=pa.list_(pa.int32()))
_texts = functools.partial(_column, kind=pa.list_(pa.string()))


def _table(name: str, row: str, key: tuple[str, ...], *columns: pa.Field) -> Table:
    return Table(name, row, key, pa.schema(columns))


_STUDY = _text("study", "name of the study")
_MODEL = _text("model", "model id as the study file gives it")
_DOC = _text("doc", "document id, unique within study and model")
_ACTION = _text("action", "action name, unique within study")
_GROUP = (_STUDY, _MODEL, _DOC, _ACTION)
_PAIR = (*_GROUP, _int("replicate", "coupled pair of continuations, from 0", "none"))


_IDENTITY = (
    _text("weights_sha256", "SHA-256 of the model's weights and settings", null=True),
    _text("tokenizer_sha256", "SHA-256 of the tokenizer's files", null=True),
    _text("selector_sha256", "SHA-256 of source and parameters of selector, codec and policy", null=True),
    _int("numerics", "version of the generator's own numerics", "none", null=True),
    _text(
        "eos_tokens",
        "ids of the tokens that end a text on both sides, separated by commas; the first fills what follows an end",
        null=True,
    ),
)
_REVISION = _int(
    "action_revision", "revision of the action, from 0; a later revision supersedes it", "none", default="0"
)
_UNIT = _long("unit", "unit of the row, as in units", "none", null=True)
_ESTIMATED_FROM = (
    _int("action_revision", "revision of the action whose events the row was estimated from", "none", default="0"),
    _int(
        "baseline_revision",
        "revision of the baseline whose events the row was estimated from; 0 without a baseline",
        "none",
        default="0",
    ),
)
_DOCUMENTS_REVISION = _int(
    "documents_revision",
    "newest revision of the study's documents that the row was estimated from",
    "none",
    default="0",
)


# Of estimates.
_SPLIT = _text("split", "development or evaluation")
_STRATUM = _text("stratum", "stratum, or pooled")
_BASELINE = _text("baseline", "baseline of a contrast; null for one action's quantity", null=True)
_QUANTITY = _text("quantity", "column name of the quantity in its view")
_ESTIMATE = _real("estimate", "point estimate; null if undefined", "unit of the quantity", null=True)
_EVENTS_VERSION = _long("events_version", "version of the events table behind the row", "none")
_PLAN = _text("plan_sha256", "SHA-256 of the plan under which the row was made", null=True)
_STATUS = _text("status", "prespecified; seen: planned after the outcomes were known; or exploratory")
_INTERVAL = _text(
    "interval",
    "how the interval was made: studentized, skewed, alike, expanded, percentile, simultaneous, repeated (of a look)",
    default="percentile",
)


_INPUTS = _text("inputs_sha256", "SHA-256 of the moments and settings that the row was made from", null=True)


EVENTS = _table(
    "events",
    "one position of one coupled pair, of one overlap scan or of one residual branch",
    ("study", "model", "doc", "action", "action_revision", "kind", "replicate", "t"),
    *_PAIR,
    _int("t", "position, 1..H", "tokens"),
    _int("x_token", "token of the reference, X_t", "none"),
    _int("y_token", "token of the compressed model, Y_t", "none"),
    _distance("delta", "TV(P_t(.|X_<t), Q_t(.|Y_<t))", "total variation, 0..1"),
    _distance("f", "TV(P_t(.|X_<t), Q_t(.|X_<t)); 0 after X's EOS", "total variation, 0..1"),
    _flag("x_eos", "true from X's first EOS on"),
    _flag("y_eos", "true from Y's first EOS on"),
    _text("kind", "coupled, scan (both tokens U_t, delta e_t) or branch", default=COUPLED),
    _real("weight", "w_t of a scan step: its residual branch's probability", "probability, 0..1", null=True),
    _REVISION,
    _UNIT,
)

# The columns that every log of coupled pairs has; the other columns serve residual branching.
PAIR_COLUMNS = tuple(name for name in EVENTS.columns if name not in EVENTS.defaults)

DOCUMENTS = _table(
    "documents",
    "one tokenized prompt, in one revision of its answers, scoring and cluster",
    ("study", "model", "doc", "document_revision"),
    *_GROUP[:3],
    _SPLIT,
    _text("stratum", "the document's stratum, by default source and length"),
    _text("cluster", "documents of one cluster are resampled together"),
    _text("task", "task of the document source", null=True),
    _text("source", "document source", null=True),
    _int("prompt_tokens", "true prompt length n", "tokens", null=True),
    _text("prompt_sha256", "SHA-256 of the token ids as little-endian int32", null=True),
    _texts("answers", "the texts that a right continuation states; empty if unknown", null=True),
    _text(
        "scoring",
        "how answers are scored: all (the share that occurs), part (whether any occurs) or normalized (likewise, "
        "without case, punctuation and articles); null: the rule of the document's task",
        null=True,
    ),
    _int(
        "document_revision",
        "revision of the document's answers, scoring and cluster, numbered within its study, from 0; a later "
        "revision supersedes it",
        "none",
        default="0",
    ),
)

ACTIONS = _table(
    "actions",
    "one action: which prompt entries are kept, how they are stored, or the most entries that a step reads",
    ("study", "action", "action_revision"),
    _STUDY,
    _ACTION,
    _text("selector", "registered selector name; full for an action with only a codec, or with a policy"),
    _text(
        "keep",
        "retention rule: an integer, an exact fraction of n, or all; with a policy, the most entries that a step reads",
    ),
    _int("window", "observation window W kept whole", "tokens", null=True),
    _int("kernel", "score pooling kernel", "tokens", null=True),
    _text("pooling", "score pooling: average", null=True),
    _text("head_reduction", "how and when the scores of a KV head's query heads are combined", null=True),
    _int("sinks", "initial positions always kept", "tokens", null=True),
    _text("position_mode", "positions of generated entries: continued from n"),
    _flag("control", "full-retention control: delta and f must be exactly 0"),
    _flag("prespecified", "false for an action added after the plan was frozen"),
    _text("parameters", "parameters without a column, JSON object", null=True),
    _REVISION,
    _flag("dropped", "whether the action was dropped", default="false"),
    _text("codec", "codec that stores the kept entries; null: entries are stored as computed", null=True),
    _text("codec_parameters", "the codec's parameters, JSON object", null=True),
    _text("policy", "registered name of the decode-time policy; null: every step reads all kept entries", null=True),
    _text("policy_parameters", "the policy's parameters, JSON object", null=True),
    _text(
        "settings",
        "engine settings that differ from the reference's settings, JSON object; null without an engine",
        null=True,
    ),
    _text("weights", "weights of the action's side; null: the reference's", null=True),
)

IDENTITIES = _table(
    "identities",
    "the identity of one revision of an action: how its units are made; null where another generator does not say it",
    ("study", "model", "action", "action_revision"),
    _STUDY,
    _MODEL,
    _ACTION,
    _REVISION,
    *_IDENTITY,
)

UNITS = _table(
    "units",
    "one replicate range of a document under an action and estimator, committed together",
    ("study", "model", "doc", "action", "action_revision", "estimator", "first_replicate"),
    *_GROUP,
    _int("first_replicate", "first replicate of the range", "none"),
    _int("replicates", "replicates in the range", "count"),
    _int("horizon", "positions per replicate, H", "tokens"),
    _int("prompt_entries", "prompt entries n per KV head and layer", "entries", null=True),
    _int("kept_entries", "prompt entries m per KV head and layer, kept after prefill", "entries", null=True),
    _long(
        "payload_bytes",
        "bytes of the kept prompt keys and values as stored; with a policy, the most that a step reads",
        "bytes",
        null=True,
    ),
    _long("index_bytes", "bytes of the indices of the kept entries; 0 if no entry is ever removed", "bytes", null=True),
    _long("metadata_bytes", "bytes of per-layer lengths and positions", "bytes", null=True),
    _long("resident_bytes", "all bytes that stay for decoding, before step 1", "bytes", null=True),
    _real(
        "prefill_seconds",
        "seconds of prefill and eviction: prefill is divided among the document's units, eviction among the "
        "action's units; scores that actions share count for each action",
        "seconds",
        null=True,
    ),
    _real("decode_seconds", "seconds of decoding, in proportion to this unit's rows", "seconds", null=True),
    _long("kernel_evaluations", "next-token laws computed for this unit", "count", null=True),
    _text("device", "device of the model", null=True),
    _text("dtype", "floating-point type of the model", null=True),
    _text(
        "versions",
        "JSON object: versions of libraries, the GPU, and row_multiple (a test found that the bits of a row do not "
        "depend on its batch if rows are padded to a multiple of this number)",
        null=True,
    ),
    _flag(
        "batch_invariant", "whether a self-test at these sizes found that rows do not depend on the batch", null=True
    ),
    _long("seed", "seed of the study", "none", null=True),
    _texts("kept_sha256", "SHA-256 of kept indices (int32), per layer", null=True),
    _text("estimator", "plain: coupled rollouts; swrb: residual branching", default=PLAIN),
    _long("pair_evaluations", "kernel pairs evaluated: positions not yet absorbed", "count", null=True),
    _real(
        "batch_deviation",
        "largest difference that other rows of the batch made in the self-test, relative to the largest output",
        "ratio",
        null=True,
    ),
    _REVISION,
    *_IDENTITY,
    _text("prompt_sha256", "SHA-256 of the prompt, as in documents", null=True),
    _long("scale_bytes", "bytes of a codec's scales and zero points; null if unknown", "bytes", null=True),
    _texts(
        "read_checksums",
        "per layer, checksum of the entries as the codec reads them back, or of the policy's first step; null "
        "without codec and policy",
        null=True,
    ),
    _long("unit", "number of the unit: the first 60 bits of a SHA-256 of its key and replicates", "none"),
    _long("event_rows", "rows of the unit in events", "count"),
    _text("events_sha256", "SHA-256 of these rows, independent of the files that hold them"),
    _text(
        "engine",
        "an engine's report of itself, JSON object: build, libraries, settings asked and read back; null "
        "without an engine",
        null=True,
    ),
    _long(
        "weight_bytes",
        "bytes of the files with the weights of the action's side; null if there are no such files or their "
        "size is unknown",
        "bytes",
        null=True,
    ),
    _long(
        "fixed_bytes",
        "part of payload_bytes that no action can evict: entries of windows, and states; null if unknown",
        "bytes",
        null=True,
    ),
)

TRAJECTORIES = _table(
    "trajectories",
    "one coupled pair of continuations",
    ("study", "model", "doc", "action", "action_revision", "replicate"),
    *_PAIR,
    _int("tau", "first mismatch; null if the pair agrees through H", "tokens", null=True),
    _int("eos_x", "first EOS position of X; null if there is none", "tokens", null=True),
    _int("eos_y", "first EOS position of Y; null if there is none", "tokens", null=True),
    _int("horizon", "H: the last position present", "tokens"),
    _flag("complete", "positions 1..H are all present once"),
    _int("mismatches", "sum of I_t", "tokens"),
    _real("sum_delta", "sum of delta_t", "total variation x tokens"),
    _real("sum_f", "sum of f_t", "total variation x tokens"),
    _int("exposure", "(H - tau) 1{tau <= H}", "tokens"),
    _int("occupation", "sum of I_t over t > tau", "tokens"),
    _int(
        "longest_agreement",
        "longest run of agreements in tau < t < e (up to H); null without divergence",
        "tokens",
        null=True,
    ),
    _flag(
        "mismatch_after_agreement", "a mismatch follows an agreement in tau < t < e; null without divergence", null=True
    ),
    _REVISION,
    _UNIT,
)

STEPS = _table(
    "steps",
    "one position of one coupled pair, with its place on both clocks",
    ("study", "model", "doc", "action", "action_revision", "replicate", "t"),
    *_PAIR,
    _int("t", "position, 1..H", "tokens"),
    _int("mismatch", "I_t: 1 if X_t differs from Y_t, else 0", "none"),
    _int("lag", "t - tau; null before tau and without divergence", "tokens", null=True),
    _int("eos_set", "0: t < e, 1: t = e, 2: e < t <= e', 3: t > e'", "none"),
    _distance("delta", "the distance of table events", "total variation, 0..1"),
    _distance("f", "the distance of table events", "total variation, 0..1"),
    _REVISION,
    _UNIT,
)

SCORES = _table(
    "scores",
    "one coupled pair of continuations of a document with answers, scored by its decoded text up to EOS",
    ("study", "model", "doc", "action", "action_revision", "replicate", "document_revision"),
    *_PAIR,
    _REVISION,
    _text("scoring", "the rule: all (the share of answers that occurs), part or normalized (whether any does)"),
    _real("score_x", "score of X; 1 is right", "score, 0..1"),
    _real("score_y", "score of Y", "score, 0..1"),
    _int(
        "span_first",
        "position of X's first token of a matched answer; null if no answer is matched",
        "tokens",
        null=True,
    ),
    _int(
        "span_last", "position of X's last token of a matched answer; null if no answer is matched", "tokens", null=True
    ),
    _int("document_revision", "revision of the document whose answers scored the pair", "none", default="0"),
)

TOKENS = _table(
    "tokens",
    "one token of a study's model as text",
    ("study", "model", "token"),
    _STUDY,
    _MODEL,
    _int("token", "token id, as x_token and y_token of events", "none"),
    _text("text", "the token decoded alone; a part of a character is written as U+FFFD"),
)

PROMPTS = _table(
    "prompts",
    "the tokens of one prompt (action null), or the prompt's entries that an action keeps after a step",
    ("study", "model", "doc", "document_revision", "action", "action_revision", "step"),
    *_GROUP[:3],
    _int("document_revision", "revision of the answers whose records the row has; 0 with an action", "none"),
    _text("action", "action name, unique within study; null: the prompt itself", null=True),
    _REVISION,
    _int("step", "generated tokens after which entries are counted; 0: right after prefill", "tokens"),
    _ints("tokens", "token ids in order; null with an action", null=True),
    _column(
        "records",
        "records, the places where the prompt states its answers: positions from 1, the answer's number from 0, "
        "and the number of its piece; a piece that is stated several times has several records; null with an "
        "action or without a tokenizer",
        kind=pa.list_(pa.struct([(name, pa.int32()) for name in ("answer", "piece", "first", "last")])),
        null=True,
    ),
    _int("layers", "layers of the model; null without an action", "count", null=True),
    _long(
        "pairs",
        "(layer, KV head) pairs counted, after a step of each stream; null without an action",
        "count",
        null=True,
    ),
    _ints(
        "kept",
        "how many of these pairs have the entry of each position: first for positions 1..n in the first group "
        "of layers, then in the second group, and so on; group g of G has layers [g L / G, (g + 1) L / G), "
        "rounded down; null without an action",
        null=True,
    ),
    _column(
        "turns",
        "turns of a prompt that a chat template wrote: the role of each and its first position, from 1; null with an "
        "action or without a template",
        kind=pa.list_(pa.struct([("role", pa.string()), ("first", pa.int32())])),
        null=True,
    ),
)

BRANCHINGS = _table(
    "branchings",
    "one replicate of residual branching: a scan and, unless M = 0, one branch",
    ("study", "model", "doc", "action", "action_revision", "replicate"),
    *_PAIR,
    _int("horizon", "H", "tokens"),
    _flag("complete", "every scan and branch position of the replicate is present exactly once"),
    _int("scanned", "last position of the scan: H, or the position at which survival reached 0", "tokens"),
    _real("mass", "M = sum of w_s", "probability, 0..1"),
    _int("branch", "J, the position at which the branch starts; null if M = 0", "tokens", null=True),
    _int("mismatches", "sum of I_t over t >= J; 0 if M = 0", "tokens"),
    _REVISION,
    _UNIT,
)

BRANCHING_DEPTHS = _table(
    "branching_depths",
    "one replicate of residual branching at one depth",
    ("study", "model", "doc", "action", "action_revision", "replicate", "depth"),
    *_PAIR,
    _int("depth", "L, 1..H", "tokens"),
    _real("observed", "Z_L = (M/H) times the mismatches within L positions from J", "share, 0..1"),
    _real("capacity", "W_L = (1/H) sum_s w_s (H - s - L + 1)_+", "share, 0..1"),
    _REVISION,
    _UNIT,
)

_SUM = pa.float64()
_PROFILE = pa.list_(_SUM)
_HORIZON = _int("horizon", "H", "tokens")
_WINDOWS = (
    _HORIZON,
    _int("cohort_bound", "T: the fixed branch cohort is tau <= T", "tokens"),
    _int("early_last", "early lags are 1..early_last", "tokens"),
    _int("late_first", "late lags are late_first..T", "tokens"),
    _int("first_block_last", "block 1 is 1..first_block_last", "tokens"),
    _int("second_block_last", "block 2 ends here, block 3 goes on to H", "tokens"),
    _int("agreement_run", "run length of a long agreement", "tokens"),
    _real("saturation_threshold", "delta above it is saturated", "total variation, 0..1"),
)


def _sum(name: str, text: str, kind: pa.DataType = _SUM, *, null: bool = False) -> pa.Field:
    """Declare the sum of a moment, or of its profile, over the replicates of a unit."""
    return _column(name, f"sum over replicates of {text}", "unit of the moment, times replicates", kind=kind, null=null)


UNIT_MOMENTS = _table(
    "unit_moments",
    "the moments of one unit, summed over its complete replicates that end at the study's horizon",
    (*GROUP_KEY, "action_revision", "unit"),
    *_GROUP,
    _REVISION,
    _long("unit", "unit of the row, as in units", "none"),
    *_WINDOWS,
    _int("replicates", "replicates that are summed", "count"),
    *(_sum(f"scalar_{name}", own.meaning, null=True) for name, own in SCALAR_MOMENTS.items()),
    *(_sum(f"position_{name}", f"{own.meaning}, at t = 1..H", _PROFILE) for name, own in POSITION_MOMENTS.items()),
    *(_sum(f"lag_{name}", f"{own.meaning}, at j = 1..T", _PROFILE) for name, own in LAG_MOMENTS.items()),
    _sum("depth_observed", "H Z_L, at L = 1..H", _PROFILE),
    _sum("depth_capacity", "H W_L, at L = 1..H", _PROFILE),
)

EXACT_VALUES = _table(
    "exact_values",
    "one quantity of one finite-state system, by enumeration",
    ("study", "model", "doc", "action", "action_revision", "quantity", "x"),
    *_GROUP,
    _QUANTITY,
    _int("x", "position or depth; null for a scalar", "tokens", null=True),
    _real("value", "the exact value", "unit of the quantity"),
    _REVISION,
)

STUDIES = _table(
    "studies",
    "one study's fixed parameters: horizon, law and windows",
    ("study", "model"),
    *_GROUP[:2],
    _HORIZON,
    _long("seed", "seed of all uniforms", "none"),
    *_WINDOWS[1:],
    _text("study_sha256", "SHA-256 of what in the study file decides the events"),
    _text("revision", "the model's revision as the study file gives it", null=True),
    _text("settings", "the settings that study_sha256 hashes, canonical JSON", null=True),
    _real("temperature", "divisor of the logits; 0 is greedy decoding", "none", default="1.0"),
    _real(
        "top_p",
        "tokens are drawn from the smallest set of most probable tokens whose total probability reaches this "
        "value; null: from all tokens",
        "probability, 0..1",
        null=True,
    ),
    _int("top_k", "tokens are drawn from this many most probable tokens; null: from all tokens", "tokens", null=True),
)

PLANS = _table(
    "plans",
    "one revision of the frozen plan of a study's evaluation; the newest revision is the plan",
    ("study", "model", "plan_revision"),
    *_GROUP[:2],
    _text("plan_sha256", "SHA-256 of column plan without the measured seconds"),
    _column("frozen_at", "when the plan was frozen", kind=pa.timestamp("us", tz="UTC")),
    _long("events_version", "version of the events table behind the plan", "none"),
    _text("plan", "the plan: K, N, endpoints, contrasts, levels; canonical JSON"),
    _int("plan_revision", "revision of the plan, from 0", "none", default="0"),
)

RESULTS = _table(
    "results",
    "one estimate with its interval",
    (
        "study",
        "model",
        "split",
        "stratum",
        "action",
        "baseline",
        "quantity",
        "x",
        "events_version",
        "plan_sha256",
        "documents_revision",
    ),
    *_GROUP[:2],
    _SPLIT,
    _STRATUM,
    _ACTION,
    _BASELINE,
    _QUANTITY,
    _int("x", "position or lag in tokens, or number of a block, of a profile; null for a scalar", "none", null=True),
    _ESTIMATE,
    _real("low", "lower end of the interval", "unit of the quantity", null=True),
    _real("high", "upper end of the interval", "unit of the quantity", null=True),
    _real("level", "coverage of the interval", "probability, 0..1"),
    _int("draws", "bootstrap draws", "count"),
    _int("documents", "documents behind the estimate", "count"),
    _text("family", "prespecified family that the level is adjusted for", null=True),
    _STATUS,
    _EVENTS_VERSION,
    _PLAN,
    *_ESTIMATED_FROM,
    _INPUTS,
    _INTERVAL,
    _int("clusters", "effective clusters of documents behind the estimate, rounded down", "count", null=True),
    _real(
        "estimate_reduced",
        "the estimate minus control variates; null for quantities without control variates",
        "unit of the quantity",
        null=True,
    ),
    _real("low_reduced", "lower end of the reduced estimate's interval", "unit of the quantity", null=True),
    _real("high_reduced", "upper end of the reduced estimate's interval", "unit of the quantity", null=True),
    _DOCUMENTS_REVISION,
)

LOOKS = _table(
    "looks",
    "one primary endpoint at one look of a sequential study",
    (
        "study",
        "model",
        "plan_sha256",
        "look",
        "quantity",
        "stratum",
        "action",
        "baseline",
        "action_revision",
        "baseline_revision",
        "documents_revision",
    ),
    *_GROUP[:2],
    _int("look", "number of the look, from 1", "none"),
    _STRATUM,
    _ACTION,
    _BASELINE,
    _QUANTITY,
    _ESTIMATE,
    _real("low", "lower end of the repeated interval; null if the look has none", "unit of the quantity", null=True),
    _real("high", "upper end of the repeated interval", "unit of the quantity", null=True),
    _real("level", "probability with which the intervals of all looks hold together", "probability, 0..1"),
    _real("constant", "critical constant of the look", "standard errors"),
    _text("interval", "how the interval was made: studentized, student, alike or expanded", null=True),
    _int("draws", "bootstrap draws; 0 if the interval rests on Student's law", "count"),
    _int("documents", "documents of the look behind the estimate", "count"),
    _int("clusters", "effective clusters of documents behind the estimate, rounded down", "count"),
    _flag("resolved", "whether the interval reaches the plan's goal"),
    *_ESTIMATED_FROM,
    _EVENTS_VERSION,
    _text("plan_sha256", "SHA-256 of the plan that has the look"),
    _DOCUMENTS_REVISION,
)

CALIBRATION = _table(
    "calibration",
    "one candidate predictor of a contrast, judged on evaluation documents",
    (
        "study",
        "model",
        "action",
        "baseline",
        "observation",
        "candidate",
        "events_version",
        "plan_sha256",
        "documents_revision",
    ),
    *_GROUP[:2],
    _ACTION,
    _text("baseline", "the action that the contrast subtracts"),
    _text("observation", "fixed_history: F; positions: the moments of block 1"),
    _text("candidate", "stratum_action_mean, flat or ridge"),
    _flag("selected", "whether the predictor has the least cross-validated error on development documents"),
    _real("cross_validated_mse", "pooled squared error of document contrasts", "share squared", null=True),
    _int("documents", "evaluation documents that both actions have", "count"),
    _real("gap", "contrast of mismatch on evaluation documents", "difference, -1..1", null=True),
    _real("predicted_gap", "this contrast as predicted from the observation", "difference, -1..1", null=True),
    _real("error", "gap - predicted_gap", "difference, -1..1", null=True),
    _real("low", "lower end of the error's interval", "difference, -1..1", null=True),
    _real("high", "upper end of the error's interval", "difference, -1..1", null=True),
    _real("level", "coverage of the interval", "probability, 0..1"),
    _real("margin", "an interval inside +-margin is equivalence", "share, 0..1"),
    _text("decision", "equivalent, different or unresolved", null=True),
    _real("mae", "pooled mean absolute error of document contrasts", "share, 0..1", null=True),
    _real("rmse", "root of the pooled squared error of document contrasts", "share, 0..1", null=True),
    _int("draws", "bootstrap draws", "count"),
    _STATUS,
    _EVENTS_VERSION,
    _PLAN,
    *_ESTIMATED_FROM,
    _INPUTS,
    _INTERVAL,
    _DOCUMENTS_REVISION,
)

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        EVENTS, DOCUMENTS, ACTIONS, UNITS, TRAJECTORIES, STEPS, SCORES, TOKENS, PROMPTS, BRANCHINGS, BRANCHING_DEPTHS,
        UNIT_MOMENTS, EXACT_VALUES, STUDIES, IDENTITIES, PLANS, LOOKS, RESULTS, CALIBRATION
    )
}  # fmt: skip
