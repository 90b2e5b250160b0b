"""Every stored table as an Arrow schema: columns, types, units and meanings.

Columns of quantities have the names of ``docs/quantities.md``. A test compares the SQL staging views with this module.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from kvdrift.schema.columns import (
    ACTION,
    GROUP,
    MODEL,
    PAIR,
    REVISION,
    SPLIT,
    STUDY,
    Table,
    column,
    distance,
    flag,
    integer,
    integers,
    long,
    real,
    stored_table,
    text,
    texts,
)
from kvdrift.schema.estimate_tables import CALIBRATION, EXACT_VALUES, LOOKS, PLANS, RESULTS
from kvdrift.schema.moments import BIN_MOMENTS, LAG_MOMENTS, POSITION_MOMENTS, SCALAR_MOMENTS

SCHEMA_VERSION = 2
"""The version of these tables. A store of another version is refused."""

GROUP_KEY: Final = ("study", "model", "doc", "action")  # shared by all replicates of a unit

MEASURES: Final = (
    "tokens", "bytes", "seconds", "entries", "count", "share, 0..1", "probability, 0..1", "total variation, 0..1",
    "score, 0..1", "difference, -1..1", "correlation, -1..1", "ratio", "share squared", "total variation x tokens",
    "nats", "nats x tokens", "standard errors", "unit of the quantity", "unit in column unit",
    "unit of the moment, times replicates", "none"
)  # fmt: skip
"""The units of numbers in tables and views; ``none`` is for numbers without a unit: seeds, revisions, token ids."""

COUPLED, SCAN, BRANCH = "coupled", "scan", "branch"  # kinds of events
PLAIN: Final = "plain"  # estimator of a unit of coupled pairs
SWRB: Final = "swrb"  # estimator of a unit of scans with one residual branch each

_IDENTITY = (
    text("weights_sha256", "SHA-256 of the model's weights and settings", null=True),
    text("tokenizer_sha256", "SHA-256 of the tokenizer's files", null=True),
    text("selector_sha256", "SHA-256 of source and parameters of selector, codec and policy", null=True),
    integer("numerics", "version of the generator's own arithmetic", "none", null=True),
    text(
        "eos_tokens",
        "ids of the tokens that end a text on both sides, separated by commas; the first fills positions after an end",
        null=True,
    ),
)
_UNIT = long("unit", "unit of the row, as in units", "none", null=True)
_UNKNOWN = "null after X's end, in scans, where a branch starts, and from a generator that does not give it"
_ALONG_X = (
    distance(
        "kl", f"KL(P_t(.|X_<t) || Q_t(.|X_<t)), infinite if only P_t can draw a token; {_UNKNOWN}", "nats", null=True
    ),
    distance("kl_own", "KL(P_t(.|X_<t) || Q_t(.|Y_<t)), infinite or null likewise", "nats", null=True),
    flag("top1", "whether P_t(.|X_<t) and Q_t(.|X_<t) have the same most probable token; null likewise", null=True),
)

EVENTS = stored_table(
    "events",
    "one position of one coupled pair, of one overlap scan or of one residual branch",
    "study model doc action action_revision kind replicate t",
    *PAIR,
    integer("t", "position, 1..H", "tokens"),
    integer("x_token", "token of the reference, X_t", "none"),
    integer("y_token", "token of the compressed model, Y_t", "none"),
    distance("delta", "TV(P_t(.|X_<t), Q_t(.|Y_<t))", "total variation, 0..1"),
    distance("f", "TV(P_t(.|X_<t), Q_t(.|X_<t)); 0 after X's EOS", "total variation, 0..1"),
    flag("x_eos", "true from X's first EOS on"),
    flag("y_eos", "true from Y's first EOS on"),
    text("kind", "coupled, scan (both tokens U_t, delta e_t) or branch", default=COUPLED),
    real("weight", "w_t of a scan step: its residual branch's probability", "probability, 0..1", null=True),
    *_ALONG_X,
    REVISION,
    _UNIT,
)

# The columns that every log of coupled pairs has; the other columns serve residual branching.
PAIR_COLUMNS = tuple(name for name in EVENTS.columns if name not in EVENTS.defaults)

DOCUMENTS = stored_table(
    "documents",
    "one tokenized prompt, in one revision of its answers, scoring and cluster",
    "study model doc document_revision",
    *GROUP[:3],
    SPLIT,
    text("stratum", "the document's stratum, by default source and length"),
    text("cluster", "documents of one cluster are resampled together"),
    text("task", "task of the document source", null=True),
    text("source", "document source", null=True),
    integer("prompt_tokens", "true prompt length n", "tokens", null=True),
    text("prompt_sha256", "SHA-256 of the token ids as little-endian int32", null=True),
    texts("answers", "the texts that a right continuation states; empty if unknown", null=True),
    text(
        "scoring",
        "how answers are scored: all (the share that occurs), part (whether any occurs) or normalized (likewise, "
        "without case, punctuation and articles); null: the rule of the document's task",
        null=True,
    ),
    integer(
        "document_revision",
        "revision of the document's answers, scoring and cluster, numbered within its study, from 0; a later "
        "revision supersedes it",
        "none",
        default="0",
    ),
)

ACTIONS = stored_table(
    "actions",
    "one action: which prompt entries are kept, how they are stored, or the most entries that a step reads",
    "study action action_revision",
    STUDY,
    ACTION,
    text("selector", "registered selector name; full for an action with only a codec, or with a policy"),
    text(
        "keep",
        "retention rule: an integer, an exact fraction of n, or all; with a policy, the most entries that a step reads",
    ),
    integer("window", "observation window W kept whole", "tokens", null=True),
    integer("kernel", "positions that the pooling of scores spans", "tokens", null=True),
    text("pooling", "score pooling: average", null=True),
    text("head_reduction", "how and when the scores of a KV head's query heads are combined", null=True),
    integer("sinks", "initial positions always kept", "tokens", null=True),
    text("position_mode", "positions of generated entries: continued from n"),
    flag("control", "full-retention control: delta and f must be exactly 0"),
    flag("prespecified", "false for an action added after the plan was frozen"),
    text("parameters", "parameters without a column, JSON object", null=True),
    REVISION,
    flag("dropped", "whether the action was dropped", default="false"),
    text("codec", "codec that stores the kept entries; null: entries are stored as computed", null=True),
    text("codec_parameters", "the codec's parameters, JSON object", null=True),
    text("policy", "registered name of the decode-time policy; null: every step reads all kept entries", null=True),
    text("policy_parameters", "the policy's parameters, JSON object", null=True),
    text(
        "settings",
        "engine settings that differ from the reference's settings, JSON object; null without an engine",
        null=True,
    ),
    text("weights", "weights of the action's side; null: the reference's", null=True),
)

IDENTITIES = stored_table(
    "identities",
    "the identity of one revision of an action: how its units are made; null if another generator does not record it",
    "study model action action_revision",
    STUDY,
    MODEL,
    ACTION,
    REVISION,
    *_IDENTITY,
)

UNITS = stored_table(
    "units",
    "one replicate range of a document under an action and estimator, committed together",
    "study model doc action action_revision estimator first_replicate",
    *GROUP,
    integer("first_replicate", "first replicate of the range", "none"),
    integer("replicates", "replicates in the range", "count"),
    integer("horizon", "positions per replicate, H", "tokens"),
    integer("prompt_entries", "prompt entries n per KV head and layer", "entries", null=True),
    integer("kept_entries", "prompt entries m per KV head and layer, kept after prefill", "entries", null=True),
    long(
        "payload_bytes",
        "bytes of the kept prompt keys and values as stored; with a policy, the most that a step reads",
        "bytes",
        null=True,
    ),
    long("index_bytes", "bytes of the indices of the kept entries; 0 if no entry is ever removed", "bytes", null=True),
    long("metadata_bytes", "bytes of per-layer lengths and positions", "bytes", null=True),
    long("resident_bytes", "all bytes that stay for decoding, before step 1", "bytes", null=True),
    real(
        "prefill_seconds",
        "seconds of prefill and eviction: prefill is divided among the document's units, eviction among the "
        "action's units; scores that actions share count for each action",
        "seconds",
        null=True,
    ),
    real("decode_seconds", "seconds of decoding, in proportion to this unit's rows", "seconds", null=True),
    long("kernel_evaluations", "next-token distributions computed for this unit", "count", null=True),
    text("device", "device of the model", null=True),
    text("dtype", "floating-point type of the model", null=True),
    text(
        "versions",
        "JSON object: versions of libraries, the GPU, and row_multiple (a test found that the bits of a row do not "
        "depend on its batch if rows are padded to a multiple of this number)",
        null=True,
    ),
    flag("batch_invariant", "whether a self-test at these sizes found that rows do not depend on the batch", null=True),
    long("seed", "seed of the study", "none", null=True),
    texts("kept_sha256", "SHA-256 of kept indices (int32), per layer", null=True),
    text("estimator", "plain: coupled rollouts; swrb: residual branching", default=PLAIN),
    long("pair_evaluations", "positions of all pairs before both sides had ended", "count", null=True),
    real(
        "batch_deviation",
        "largest difference that other rows of the batch made in the self-test, relative to the largest output",
        "ratio",
        null=True,
    ),
    REVISION,
    *_IDENTITY,
    text("prompt_sha256", "SHA-256 of the prompt, as in documents", null=True),
    long("scale_bytes", "bytes of a codec's scales and zero points; null if unknown", "bytes", null=True),
    texts(
        "read_checksums",
        "per layer, checksum of the entries as the codec reads them back, or of the policy's first step; null "
        "without codec and policy",
        null=True,
    ),
    long("unit", "number of the unit: the first 60 bits of a SHA-256 of its key and replicates", "none"),
    long("event_rows", "rows of the unit in events", "count"),
    text("events_sha256", "SHA-256 of these rows, independent of the files that hold them"),
    text(
        "engine",
        "an engine's report of itself, JSON object: build, libraries, settings requested and read back; null "
        "without an engine",
        null=True,
    ),
    long(
        "weight_bytes",
        "bytes of the files with the weights of the action's side; null if there are no such files or their "
        "size is unknown",
        "bytes",
        null=True,
    ),
    long(
        "fixed_bytes",
        "part of payload_bytes that no action can evict: entries of windows, and states; null if unknown",
        "bytes",
        null=True,
    ),
)

TRAJECTORIES = stored_table(
    "trajectories",
    "one coupled pair of continuations",
    "study model doc action action_revision replicate",
    *PAIR,
    integer("tau", "first mismatch; null if the pair agrees through H", "tokens", null=True),
    integer("eos_x", "first EOS position of X; null if there is none", "tokens", null=True),
    integer("eos_y", "first EOS position of Y; null if there is none", "tokens", null=True),
    integer("horizon", "H: the last position present", "tokens"),
    flag("complete", "positions 1..H are all present once"),
    integer("mismatches", "sum of I_t", "tokens"),
    real("sum_delta", "sum of delta_t", "total variation x tokens"),
    real("sum_f", "sum of f_t", "total variation x tokens"),
    integer("exposure", "(H - tau) 1{tau <= H}", "tokens"),
    integer("occupation", "sum of I_t over t > tau", "tokens"),
    integer(
        "longest_agreement",
        "longest run of agreements in tau < t < e (up to H); null without divergence",
        "tokens",
        null=True,
    ),
    flag(
        "mismatch_after_agreement", "a mismatch follows an agreement in tau < t < e; null without divergence", null=True
    ),
    REVISION,
    _UNIT,
)

STEPS = stored_table(
    "steps",
    "one position of one coupled pair, with its place on both clocks",
    "study model doc action action_revision replicate t",
    *PAIR,
    integer("t", "position, 1..H", "tokens"),
    integer("mismatch", "I_t: 1 if X_t differs from Y_t, else 0", "none"),
    integer("lag", "t - tau; null before tau and without divergence", "tokens", null=True),
    integer("eos_set", "0: t < e, 1: t = e, 2: e < t <= e', 3: t > e'", "none"),
    distance("delta", "the distance of table events", "total variation, 0..1"),
    distance("f", "the distance of table events", "total variation, 0..1"),
    distance("kl", "the divergence of table events", "nats", null=True),
    distance("kl_own", "the divergence of table events", "nats", null=True),
    flag("top1", "as in table events", null=True),
    REVISION,
    _UNIT,
)

SCORES = stored_table(
    "scores",
    "one coupled pair of continuations of a document with answers, scored by its decoded text up to EOS",
    "study model doc action action_revision replicate document_revision",
    *PAIR,
    REVISION,
    text("scoring", "the rule: all (the share of answers that occurs), part or normalized (whether any does)"),
    real("score_x", "score of X; 1 is right", "score, 0..1"),
    real("score_y", "score of Y", "score, 0..1"),
    integer(
        "span_first",
        "position of X's first token of a matched answer; null if no answer is matched",
        "tokens",
        null=True,
    ),
    integer(
        "span_last", "position of X's last token of a matched answer; null if no answer is matched", "tokens", null=True
    ),
    integer("document_revision", "revision of the document whose answers scored the pair", "none", default="0"),
)

TOKENS = stored_table(
    "tokens",
    "one token of a study's model as text",
    "study model token",
    STUDY,
    MODEL,
    integer("token", "token id, as x_token and y_token of events", "none"),
    text("text", "the token decoded alone; bytes that are no character by themselves in hexadecimal, such as \\xE9"),
)

PROMPTS = stored_table(
    "prompts",
    "the tokens of one prompt (action null), or the prompt's entries that an action keeps after a step",
    "study model doc document_revision action action_revision step",
    *GROUP[:3],
    integer("document_revision", "revision of the answers whose records the row has; 0 with an action", "none"),
    text("action", "action name, unique within study; null: the prompt itself", null=True),
    REVISION,
    integer("step", "generated tokens after which entries are counted; 0: right after prefill", "tokens"),
    integers("tokens", "token ids in order; null with an action", null=True),
    column(
        "records",
        "records, the places where the prompt states its answers: positions from 1, the answer's number from 0, "
        "and the number of its piece; a piece that is stated several times has several records; null with an "
        "action or without a tokenizer",
        kind=pa.list_(pa.struct([(name, pa.int32()) for name in ("answer", "piece", "first", "last")])),
        null=True,
    ),
    integer("layers", "layers of the model; null without an action", "count", null=True),
    long(
        "pairs",
        "(layer, KV head) pairs counted, after a step of each stream; null without an action",
        "count",
        null=True,
    ),
    integers(
        "kept",
        "how many of these pairs have the entry of each position: first for positions 1..n in the first group "
        "of layers, then in the second group, and so on; group g of G has layers [g L / G, (g + 1) L / G), "
        "rounded down; null without an action",
        null=True,
    ),
    column(
        "turns",
        "turns of a prompt that a chat template wrote: the role of each and its first position, from 1; null with an "
        "action or without a template",
        kind=pa.list_(pa.struct([("role", pa.string()), ("first", pa.int32())])),
        null=True,
    ),
)

BRANCHINGS = stored_table(
    "branchings",
    "one replicate of residual branching: a scan and, unless M = 0, one branch",
    "study model doc action action_revision replicate",
    *PAIR,
    integer("horizon", "H", "tokens"),
    flag("complete", "every scan and branch position of the replicate is present exactly once"),
    integer("scanned", "last position of the scan: H, or the position at which survival reached 0", "tokens"),
    real("mass", "M = sum of w_s", "probability, 0..1"),
    integer("branch", "J, the position at which the branch starts; null if M = 0", "tokens", null=True),
    integer("mismatches", "sum of I_t over t >= J; 0 if M = 0", "tokens"),
    REVISION,
    _UNIT,
)

BRANCHING_DEPTHS = stored_table(
    "branching_depths",
    "one replicate of residual branching at one depth",
    "study model doc action action_revision replicate depth",
    *PAIR,
    integer("depth", "L, 1..H", "tokens"),
    real("observed", "Z_L = (M/H) times the mismatches within L positions from J", "share, 0..1"),
    real("capacity", "W_L = (1/H) sum_s w_s (H - s - L + 1)_+", "share, 0..1"),
    REVISION,
    _UNIT,
)

_SUM = pa.float64()
_PROFILE = pa.list_(_SUM)
_HORIZON = integer("horizon", "H", "tokens")
_WINDOWS = (
    _HORIZON,
    integer("cohort_bound", "T: the fixed branch cohort is tau <= T", "tokens"),
    integer("early_last", "early lags are 1..early_last", "tokens"),
    integer("late_first", "late lags are late_first..T", "tokens"),
    integer("first_block_last", "block 1 is 1..first_block_last", "tokens"),
    integer("second_block_last", "block 2 ends here, block 3 goes on to H", "tokens"),
    integer("agreement_run", "run length of a long agreement", "tokens"),
    real("saturation_threshold", "delta above it is saturated", "total variation, 0..1"),
)


def _sum(name: str, text: str, kind: pa.DataType = _SUM, *, null: bool = False) -> pa.Field:
    """Declare the column of a moment, or of a profile of moments, summed over the replicates of a unit."""
    return column(name, f"sum over replicates of {text}", "unit of the moment, times replicates", kind=kind, null=null)


UNIT_MOMENTS = stored_table(
    "unit_moments",
    "the moments of one unit, summed over its complete replicates that end at the study's horizon",
    "study model doc action action_revision unit",
    *GROUP,
    REVISION,
    long("unit", "unit of the row, as in units", "none"),
    *_WINDOWS,
    integer("replicates", "replicates that are summed", "count"),
    *(_sum(f"scalar_{name}", moment.meaning, null=True) for name, moment in SCALAR_MOMENTS.items()),
    *(
        _sum(f"position_{name}", f"{moment.meaning}, at t = 1..H", _PROFILE)
        for name, moment in POSITION_MOMENTS.items()
    ),
    *(_sum(f"lag_{name}", f"{moment.meaning}, at j = 1..T", _PROFILE) for name, moment in LAG_MOMENTS.items()),
    *(
        _sum(f"bin_{name}", f"{moment.meaning}, for the bins of KL in order", _PROFILE)
        for name, moment in BIN_MOMENTS.items()
    ),
    _sum("depth_observed", "H Z_L, at L = 1..H", _PROFILE),
    _sum("depth_capacity", "H W_L, at L = 1..H", _PROFILE),
)
STUDIES = stored_table(
    "studies",
    "one study's fixed parameters: horizon, sampling and windows",
    "study model",
    *GROUP[:2],
    _HORIZON,
    long("seed", "seed of all uniforms", "none"),
    *_WINDOWS[1:],
    text("study_sha256", "SHA-256 of the settings in the study file that decide the events"),
    text("revision", "the model's revision as the study file gives it", null=True),
    text("settings", "the settings that study_sha256 hashes, canonical JSON", null=True),
    real("temperature", "divisor of the logits; 0 is greedy decoding", "none", default="1.0"),
    real(
        "top_p",
        "tokens are drawn from the smallest set of most probable tokens whose total probability reaches this "
        "value; null: from all tokens",
        "probability, 0..1",
        null=True,
    ),
    integer(
        "top_k", "tokens are drawn from this many most probable tokens; null: from all tokens", "tokens", null=True
    ),
)

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        EVENTS, DOCUMENTS, ACTIONS, UNITS, TRAJECTORIES, STEPS, SCORES, TOKENS, PROMPTS, BRANCHINGS, BRANCHING_DEPTHS,
        UNIT_MOMENTS, EXACT_VALUES, STUDIES, IDENTITIES, PLANS, LOOKS, RESULTS, CALIBRATION
    )
}  # fmt: skip
