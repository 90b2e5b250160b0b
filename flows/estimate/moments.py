"""The moments of documents and of single replicates: rows of views in arrays, with documents and actions sorted."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvdrift.schema.errors import InputError
from kvdrift.schema.moments import ANSWER_MOMENTS, BIN_MOMENTS, LAG_MOMENTS, POSITION_MOMENTS, SCALAR_MOMENTS
from kvdrift.schema.study import CONTROL_ACTION
from kvdrift.schema.tables import PLAIN, SWRB
from kvdrift.schema.windows import Windows
from kvdrift.sql.catalog import Views
from kvdrift.sql.quoting import literal
from kvdrift.stats.efficiency import MEASURED, BranchingMoments
from kvdrift.stats.moments import DocumentMoments, Float, ReplicateMoments
from kvdrift.transforms.moments import replicate_moments as of_replicates

_POSITION_SUMS = {f"position_{name}": name for name in POSITION_MOMENTS}  # moments by column of ``profiles``
_LAG_SUMS = {f"lag_{name}": name for name in LAG_MOMENTS}
_BIN_SUMS = {f"bin_{name}": name for name in BIN_MOMENTS}
_PLACE = ["doc", "action", "replicates"]


def measured(table: pa.Table) -> pa.Table:
    """Return the rows of all actions but the full-retention control."""
    return table.filter(pc.not_equal(table["action"], CONTROL_ACTION))


def trajectory_moments(views: Views, windows: Windows, study: str, model: str, split: str) -> pa.Table:
    """Compute the scalar moments of every replicate of a split from the replicate's steps; controls are left out.

    Returns:
        Columns study, model, doc, action, replicate, stratum, cluster, and one for each scalar moment.
    """
    keys = {"study": study, "model": model}
    documents = views.rows("documents", ["doc", "stratum", "cluster"], **keys, split=split)
    trajectories = measured(views.rows("trajectories", **keys, doc=documents["doc"].to_pylist()))
    filters = {name: trajectories[name].unique().to_pylist() for name in ("doc", "action")}
    steps = views.rows(
        "steps", ["unit", "replicate", "delta", "f", "mismatch", "kl", "kl_own", "top1"], **keys, **filters
    )
    return of_replicates(trajectories, steps, windows).join(documents, "doc", join_type="inner")


class DocumentIndex:
    """The documents and actions of a view's rows, in sorted order, and the index of each row's document and action."""

    def __init__(self, table: pa.Table) -> None:
        keys = {
            doc: (stratum, cluster)
            for doc, stratum, cluster in zip(
                *(table[name].to_pylist() for name in ("doc", "stratum", "cluster")), strict=True
            )
        }
        self.documents = np.array(sorted(keys), dtype=np.str_)
        self.strata = np.array([keys[doc][0] for doc in self.documents.tolist()], dtype=np.str_)
        self.clusters = np.array([keys[doc][1] for doc in self.documents.tolist()], dtype=np.str_)
        self.actions = tuple(sorted(set(table["action"].to_pylist())))

    def spread(
        self, table: pa.Table, names: Iterable[str], axis: str | None = None, length: int = 0
    ) -> dict[str, Float]:
        """Arrange columns of a view by document and action, float64 [documents, actions]; NaN without a row.

        ``axis`` is a column that numbers the rows of a document and action from 0; it adds a dimension of ``length``.
        If the columns are lists of one length, the lists are the last dimension.
        """
        shape: tuple[int, ...] = (len(self.documents), len(self.actions))
        where: list[Any] = [
            pc.index_in(table[name], value_set=pa.array(known, pa.string())).to_numpy()
            for name, known in (("doc", self.documents.tolist()), ("action", self.actions))
        ]
        if axis is not None:
            shape = (*shape, length)
            where.append(table[axis].to_numpy())
        cells, columns = np.ravel_multi_index(where, shape), {}
        for name in names:
            values = _values(table[name])
            column = np.full((math.prod(shape), *values.shape[1:]), np.nan)
            column[cells] = values
            columns[name] = column.reshape(*shape, *values.shape[1:])
        return columns


def _values(column: pa.ChunkedArray) -> Float:
    """Return a column as float64 [rows]; a column of lists, all of one length, as float64 [rows, length]."""
    if not pa.types.is_list(column.type):
        return np.asarray(column.cast(pa.float64()).to_numpy(), dtype=np.float64)
    return np.asarray(column.combine_chunks().flatten().to_numpy(), dtype=np.float64).reshape(len(column), -1)


def analyzed_splits(views: Views, study: str, model: str) -> list[str]:
    """Return the splits that have complete trajectories of an action other than the control, sorted."""
    rows = measured(views.rows("moments", study=study, model=model))
    return sorted(set(rows["split"].to_pylist()))


def action_revisions(views: Views, study: str) -> Mapping[str | None, int]:
    """Read the revision of each action that the views show; the result gives 0 for every other key, None included."""
    listed = views.rows("actions", study=study)
    shown = zip(listed["action"].to_pylist(), listed["action_revision"].to_pylist(), strict=True)
    return defaultdict(int, shown)


def documents_revision(views: Views, study: str, model: str) -> int:
    """Read the newest revision of a study's documents that the views show; 0 without documents."""
    rows = views.rows("documents", ["document_revision"], study=study, model=model)
    return max(rows["document_revision"].to_pylist(), default=0)


def study_windows(views: Views, study: str, model: str) -> Windows:
    """Return the windows with which a study was derived.

    Raises:
        InputError: Nothing of the study is derived in this store.
    """
    rows = views.rows("windows", study=study, model=model).to_pylist()
    if not rows:
        raise InputError(
            f"study '{study}', model '{model}': has no derived trajectories in this store; 'kvdrift derive' makes them"
        )
    (row,) = rows
    return Windows.from_row(row)


def document_moments(
    views: Views, study: str, model: str, split: str, windows: Windows | None = None, *, profiles: bool = True
) -> DocumentMoments:
    """Read the moments of every document and action of a split, controls left out.

    ``windows`` are read from the views if None; without ``profiles``, moments over positions and lags are not read.
    """
    windows = windows or study_windows(views, study, model)
    table = measured(views.rows("moments", study=study, model=model, split=split))
    index = _index(table, study, model, split)
    scalars = index.spread(table, SCALAR_MOMENTS)
    positions, lags, bins = dict[str, Float](), dict[str, Float](), dict[str, Float]()
    if profiles:
        columns = ("doc", "action", "replicates", *_POSITION_SUMS, *_LAG_SUMS, *_BIN_SUMS)
        rows = measured(views.rows("profiles", columns, study=study, model=model, split=split))
        replicates = index.spread(rows, ["replicates"])["replicates"][:, :, None]
        positions, lags, bins = (
            {name: index.spread(rows, [column])[column] / replicates for column, name in sums.items()}
            for sums in (_POSITION_SUMS, _LAG_SUMS, _BIN_SUMS)
        )
    return DocumentMoments(
        index.documents, index.strata, index.clusters, index.actions, windows, scalars, positions, lags, bins
    )


def _index(table: pa.Table, study: str, model: str, split: str) -> DocumentIndex:
    if not table.num_rows:
        raise InputError(
            f"study '{study}', model '{model}': no complete {split} trajectories in this store; "
            "kvdrift status shows what is missing"
        )
    return DocumentIndex(table)


def replicate_moments(views: Views, study: str, model: str, split: str) -> ReplicateMoments:
    """Read the scalar moments of every replicate of a split, controls left out."""
    windows = study_windows(views, study, model)
    table = trajectory_moments(views, windows, study, model, split)
    index = _index(table, study, model, split)
    count = int(table["replicate"].to_numpy().max()) + 1
    scalars = index.spread(table, SCALAR_MOMENTS, "replicate", count)
    return ReplicateMoments(index.documents, index.strata, index.clusters, index.actions, windows, scalars)


def answer_moments(
    views: Views, study: str, model: str, split: str, windows: Windows, answered: Collection[str]
) -> DocumentMoments | None:
    """Read the moments of the documents with known answers of a split, controls left out.

    The moments have no profiles. The result is None if the split has no documents with known answers, or if pairs of
    one of them are not scored yet.
    """
    table = measured(views.rows("document_answers", study=study, model=model, split=split))
    whole = measured(views.rows("moments", study=study, model=model, split=split))
    whole = whole.filter(pc.is_in(whole["doc"], value_set=pa.array(sorted(answered), pa.string())))
    if not table.num_rows or not table.select(_PLACE).equals(whole.select(_PLACE)):  # in equal order
        return None
    index = DocumentIndex(whole)
    scalars = index.spread(whole, SCALAR_MOMENTS) | index.spread(table, ANSWER_MOMENTS)
    return DocumentMoments(index.documents, index.strata, index.clusters, index.actions, windows, scalars, {}, {})


def replicate_answers(views: Views, study: str, model: str, split: str, windows: Windows) -> ReplicateMoments | None:
    """Read the scalar moments of a split's scored replicates, controls left out; None if no replicate is scored."""
    table = measured(views.rows("trajectory_answers", study=study, model=model, split=split))
    if not table.num_rows:
        return None
    whole = trajectory_moments(views, windows, study, model, split).join(
        table.select(["doc", "action", "replicate"]), ["doc", "action", "replicate"], join_type="left semi"
    )
    index = DocumentIndex(table)
    count = int(table["replicate"].to_numpy().max()) + 1
    scalars = index.spread(whole, SCALAR_MOMENTS, "replicate", count)
    scalars |= index.spread(table, ANSWER_MOMENTS, "replicate", count)
    return ReplicateMoments(index.documents, index.strata, index.clusters, index.actions, windows, scalars)


def branching_moments(views: Views, study: str, model: str, split: str) -> BranchingMoments | None:
    """Read the moments of the plain and the residual-branching estimator of a split's documents, controls left out.

    Documents without residual branching are included, since other estimates resample them too. The result is None if
    nothing was branched.
    """
    of_study = f"study = {literal(study)} and model = {literal(model)}"
    # The view would read all trajectories.
    if not views.table(f"from internal.branchings where {of_study} limit 1").num_rows:
        return None
    table = measured(views.rows("swrb", study=study, model=model, split=split))
    if SWRB not in table["estimator"].to_pylist():
        return None
    listed = views.rows("documents", study=study, model=model)
    cluster_of = dict(zip(listed["doc"].to_pylist(), listed["cluster"].to_pylist(), strict=True))
    clusters = [cluster_of[doc] for doc in table["doc"].to_pylist()]
    table = table.append_column("cluster", pa.array(clusters, type=pa.string()))
    index = DocumentIndex(table)
    plain, swrb = (
        index.spread(table.filter(pc.equal(table["estimator"], estimator)), MEASURED) for estimator in (PLAIN, SWRB)
    )
    return BranchingMoments(index.documents, index.strata, index.clusters, index.actions, plain, swrb)
