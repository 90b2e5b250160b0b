"""Every view against its independent evaluation on awkward logs, and every contract executed on them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fixtures.awkward_logs import LOGS, Log, awkward_log, number_events
from fixtures.branched_logs import SWRB_LOGS
from oracles.answer_definitions import ANSWER_EVALUATIONS
from oracles.coupled_paths import Analysis
from oracles.record_definitions import RECORD_EVALUATIONS
from oracles.summary_definitions import OUR_NAMES, SUMMARY_EVALUATIONS
from oracles.swrb_definitions import SWRB_EVALUATIONS
from oracles.unit_moment_definitions import UNIT_MOMENT_EVALUATIONS
from oracles.verdict_definitions import verdict
from oracles.view_definitions import EVALUATIONS as PLAIN_EVALUATIONS

from kvdrift.log.store import Store
from kvdrift.schema.moments import LAG_MOMENTS, POSITION_MOMENTS, SCALAR_MOMENTS
from kvdrift.schema.tables import TABLES
from kvdrift.sql.catalog import Views, open_views, view_texts
from kvdrift.sql.contracts import contracts
from kvdrift.stats.quantities import QUANTITIES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

VIEWS = sorted(view_texts())
EVALUATIONS = {
    **PLAIN_EVALUATIONS, **SWRB_EVALUATIONS, **ANSWER_EVALUATIONS, **RECORD_EVALUATIONS, **SUMMARY_EVALUATIONS,
    **UNIT_MOMENT_EVALUATIONS, "verdict": verdict,
}  # fmt: skip
TOLERANCE = 1e-9


class PlainFolder:
    """A source for ``open_views`` over plain Parquet files; unlike a store, it accepts damaged events."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.location = str(folder)

    def version(self, table: str) -> int:
        """There is one version of each table."""
        assert table in TABLES
        return 0

    def check_made_from_events(self, versions: Mapping[str, int]) -> None:
        """Files are of no events here."""

    def read(self, table: str, version: int = 0, columns: Sequence[str] | None = None) -> pa.Table:
        """Return all rows of a table."""
        parts = [pq.read_table(path) for path in self.files(table, version)]
        return pa.concat_tables([TABLES[table].schema.empty_table(), *parts]).select(columns or TABLES[table].columns)

    def files(self, table: str, version: int) -> list[str]:
        """Return all files of the table."""
        assert version == 0
        return sorted(str(path) for path in (self.folder / table).glob("*.parquet"))

    def of_files(self, table: str, columns: Sequence[str], make: Callable[[pa.Table], Any], version: int) -> list[Any]:
        """Return the results of ``make`` for each file's rows."""
        return [make(pq.read_table(path, columns=list(columns))) for path in self.files(table, version)]


def written(folder: Path, analysis: Analysis) -> Store:
    """The log's tables as two Parquet files each, derived tables from the loop evaluation."""
    for name, table in TABLES.items():
        raw = getattr(analysis.log, name, None)  # also rows that a view leaves out
        rows = [{column: row[column] for column in table.columns} for row in raw or EVALUATIONS[name](analysis)]
        (folder / name).mkdir()
        for part, some in enumerate((rows[: len(rows) // 2], rows[len(rows) // 2 :])):
            if some:
                pq.write_table(pa.Table.from_pylist(some, schema=table.schema), folder / name / f"{part}.parquet")
    return PlainFolder(folder)  # type: ignore[return-value]


def log_of(name: str) -> Log:
    return number_events(SWRB_LOGS[name]() if name in SWRB_LOGS else awkward_log(name))


@pytest.fixture(scope="module", params=sorted([*LOGS, *SWRB_LOGS]))
def computed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Computed]:
    """Return one log, its views, and each view's rows computed once; for one log, views without stored moments."""
    analysis = Analysis(log_of(request.param))
    kept = () if request.param == "long agreements" else VIEWS
    with open_views(written(tmp_path_factory.mktemp("log"), analysis), kept=kept) as views:
        yield Computed(analysis, views, {view: views.rows(view) for view in VIEWS})


@dataclass(frozen=True)
class Computed:
    """The data that the tests of one log share."""

    analysis: Analysis
    views: Views
    rows: dict[str, pa.Table]


def by_grain(rows: list[dict[str, Any]], grain: tuple[str, ...]) -> dict[tuple[Any, ...], dict[str, Any]]:
    found = {tuple(row[name] for name in grain): row for row in rows}
    assert len(found) == len(rows), "the grain is not unique"
    return found


def same(left: Any, right: Any) -> bool:
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and isinstance(right, int | float) and not isinstance(right, bool):
        return left == right or (abs(left - right) <= TOLERANCE * max(1.0, abs(right)) and not math.isnan(left))
    return bool(left == right)


@pytest.mark.by_default("branched", "several studies")
def test_views_equal_their_definitions(computed: Computed) -> None:
    for view in VIEWS:
        contract = contracts()[view]
        rows = by_grain(computed.rows[view].to_pylist(), contract.grain)
        defined = by_grain([*EVALUATIONS[view](computed.analysis)], contract.grain)
        assert set(rows) == set(defined), view
        for key, row in defined.items():
            assert set(row) == set(rows[key]), view
            wrong = {name: (rows[key][name], row[name]) for name in row if not same(rows[key][name], row[name])}
            assert not wrong, f"{view} {key}: (view, definition) {wrong}"


@pytest.mark.by_default("branched", "several studies")
def test_contracts_hold(computed: Computed) -> None:
    # Identities may look into other views: here every view is a table of the rows already computed.
    connection = duckdb.connect()
    for name, table in computed.rows.items():
        connection.register(name, table)
    for view in VIEWS:
        contract, rows = contracts()[view], computed.rows[view]
        assert tuple(rows.column_names) == tuple(contract.columns), view
        by_grain(rows.to_pylist(), contract.grain)
        assert [name for name in contract.not_null if rows.column(name).null_count] == [], view
        for name, predicate in contract.identities.items():
            broken = connection.sql(f'from "{view}" as view where ({predicate}) is not true').fetchall()
            assert not broken, f"{view}: {name}"


def test_the_papers_numbers_stand_beside_estimates_of_the_same_name() -> None:
    assert set(OUR_NAMES.values()) <= set(QUANTITIES)
    rows = EVALUATIONS["published_comparison"](Analysis(awkward_log("one document")))
    assert {(row["study"], row["model"]) for row in rows} == {
        ("paper", "meta-llama/Llama-3.1-8B-Instruct"), ("paper", "/models/qwen2.5-7b-instruct/"),
    }  # fmt: skip
    beside = {row["quantity"] for row in rows if row["estimate"] is not None}
    assert beside == {"gap", "generation_gap", "branch_delta", "mean_entry", "divergence_probability"}
    (gap,) = (row for row in rows if row["quantity"] == "gap" and "Llama" in row["model"])
    printed = (gap["published"], gap["published_low"], gap["published_high"])
    assert printed == (pytest.approx(0.2079), pytest.approx(0.1906), pytest.approx(0.2251))


def test_every_view_has_a_contract_and_an_evaluation() -> None:
    assert set(contracts()) == set(VIEWS) == set(EVALUATIONS)


def test_grain_and_nullable_name_columns() -> None:
    for contract in contracts().values():
        assert set(contract.grain) <= set(contract.columns)
        assert contract.nullable <= set(contract.columns)
        assert "\n" not in contract.description


def test_staging_views_are_the_stored_tables(tmp_path: Path) -> None:
    with open_views(Store.create(tmp_path / "store")) as views:
        for name, table in TABLES.items():
            declared = duckdb.from_arrow(table.schema.empty_table())
            staged = views.sql(f"from {contracts()[name].relation}")
            assert tuple(contracts()[name].columns) == table.columns
            assert (staged.columns, staged.types) == (declared.columns, declared.types)


def test_moment_views_carry_every_declared_moment() -> None:
    for view in ("moments", "stratum_moments", "paired_moments"):
        assert set(SCALAR_MOMENTS) <= set(contracts()[view].columns)
    assert set(POSITION_MOMENTS) <= set(contracts()["position_moments"].columns)
    assert set(LAG_MOMENTS) <= set(contracts()["lag_moments"].columns)


def test_awkward_logs_are_awkward() -> None:
    """The comparison is worth only as much as its logs: each corner of the definitions is in one of them."""
    found = set()
    for name in LOGS:
        analysis = Analysis(awkward_log(name))
        found |= {"entering and not"} if 0 < len(analysis.paths) < len(analysis.paths_of_all) else set()
        for path in analysis.paths:
            h, tau = path.horizon, path.tau
            x, y = path.eos("x"), path.eos("y")
            found.add("never" if tau is None else {1: "tau 1", h: "tau H"}.get(tau, "tau inside"))
            found.add({0: "no EOS", 1: "one EOS", 2: "two EOS"}[(x is not None) + (y is not None)])
            if tau is not None and path.first_eos <= h:
                order = (path.first_eos > tau) - (path.first_eos < tau)
                found.add({-1: "EOS before tau", 0: "EOS at tau", 1: "EOS after tau"}[order])
            if (path.longest_agreement or 0) >= 16:
                found.add("long agreement")
    assert found >= {
        "entering and not", "never", "tau 1", "tau H", "tau inside", "no EOS", "one EOS", "two EOS", "EOS at tau",
        "EOS after tau", "long agreement",
    }  # fmt: skip


def test_branched_logs_have_what_views_must_tell_apart() -> None:
    """Each number that may be unknown is known in one row of its level and unknown in another one."""
    found: set[tuple[Any, ...]] = set()
    wanted = set(product(("pooled", "document", "stratum"), ("variance_ratio", "efficiency", "efficiency_in_seconds")))
    wanted |= set(product(["risk"], ("plain_mismatch", "monte_carlo_error")))
    wanted |= set(product(["swrb"], ("exact_risk", "evaluations", "seconds", "risk_variance")))
    for build in SWRB_LOGS.values():
        analysis = Analysis(build())
        for view, level in (("swrb_efficiency", ""), ("swrb_risk", "risk"), ("swrb", "swrb")):
            for row in SWRB_EVALUATIONS[view](analysis):
                own = level or ("pooled" if row["stratum"] == "pooled" else "document" if row["doc"] else "stratum")
                if row.get("estimator", own) == own or level != "swrb":
                    found |= {(*one, row[one[1]] is None) for one in wanted if one[0] == own}
    assert found >= {(*one, unknown) for one in wanted for unknown in (True, False)}
