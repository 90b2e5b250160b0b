"""The study file: what is measured, on what, and what the evaluation must reach. TOML in, validated values out.

First the sections in the order of the file, then ``Study`` with the checks that need several sections, then reading a
file and explaining what is wrong in it.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from collections.abc import Collection, Iterable
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from schema.errors import InputError, nearest
from schema.location import check_regular
from schema.retention import Retention
from schema.tables import PLAIN
from schema.windows import Windows

CONTROL_ACTION = "full"
CONTROL_REPLICATES = 2
TRANSFORMER: Final = "transformer"
FINITE_STATE: Final = "finite-state"
POOLED = "pooled"
FIXED: Final = "fixed"

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)]
Positive = Annotated[int, Field(ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class StudySection(_Section):
    """``[study]``: name, horizon H in tokens, and the seed of every uniform and every resampling."""

    name: Name
    horizon: Positive
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0


class ModelSection(_Section):
    """``[model]``: an embedded model, a local folder or a Hugging Face id, and how it is run.

    Or, of ``kind`` "finite-state", systems whose laws are known for every history: drawn from the published ``family``
    over an ``alphabet`` of so many tokens, or read from the file ``tables``; ``id`` is then a name of your own.
    ``device_map`` "auto" spreads a transformer's layers over all GPUs in place of one ``device``. ``mixed_gpus`` allows
    units of one store to be made on unlike GPUs, whose arithmetic can differ in the last bits. ``logits_dtype``
    "float32" keeps logits from being rounded to a ``dtype`` of 16 bits.
    """

    id: str
    kind: Literal["transformer", "finite-state"] = TRANSFORMER
    family: Literal["mixture"] | None = None
    alphabet: Annotated[int, Field(ge=2, le=64)] | None = None
    tables: str | None = None
    device: str = "cpu"
    device_map: Literal["auto"] | None = None
    mixed_gpus: bool = False
    dtype: str = "float32"
    logits_dtype: Literal["float32"] | None = None
    revision: str | None = None


class DocumentsSection(_Section):
    """``[[documents]]``: one stratum; ``development`` and ``evaluation`` say how many documents it has at most.

    Which of the optional keys a source takes or needs is checked by ``generator.documents.registry.check_source``.
    ``exclude`` is a JSON file whose ``clusters`` are left out; a relative path starts at the study file's folder.
    """

    source: str
    tasks: list[str] = []
    length: Annotated[int, Field(ge=0)] = 0
    development: Annotated[int, Field(ge=2)]
    evaluation: Annotated[int, Field(ge=2)]
    stratum: Name | None = None
    path: str | None = None
    exclude: str | None = None
    part: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,2}/[1-9][0-9]{0,2}$")] = "1/1"
    shots: Annotated[int, Field(ge=0)] | None = None
    chat_template: bool | None = None

    @property
    def stratum_name(self) -> str:
        """The stratum's name; by default source and length, as in RULER-768."""
        return self.stratum or (f"{self.source.upper()}-{self.length}" if self.length else self.source)

    @property
    def part_of_clusters(self) -> tuple[int, int]:
        """``part`` as (which, of how many): studies that take different parts of a source share no cluster."""
        which, parts = self.part.split("/")
        return int(which), int(parts)


class ActionSection(_Section):
    """``[[actions]]``: a selector, its parameters and its retention; of a finite-state system the name alone.

    Every further key is a parameter of the selector, which says what it takes: ``generator.selectors.build_selector``.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, int | float | str | bool]

    name: Name
    selector: str = FINITE_STATE
    keep: int | str | float = "all"  # a float is refused by Retention, which says what to write instead

    @property
    def retention(self) -> Retention:
        """The parsed retention rule."""
        return Retention.parse(self.keep)

    @property
    def parameters(self) -> dict[str, int | float | str | bool]:
        """The selector parameters that the study sets; a parameter that it does not set keeps its default."""
        return dict(self.__pydantic_extra__)

    def check_kind(self, where: str, *, finite: bool) -> None:
        """Check that the action has the keys that its kind of model needs; a finite-state one's has a name alone.

        Raises:
            InputError: A key is missing or must not be there.

        """
        given = self.model_fields_set - {"name"}
        if finite and given:
            raise InputError(f"{where}.{min(given)}: unknown key; a finite-state system's actions are laws")
        for name in () if finite else ("selector", "keep"):
            if name not in given:
                raise InputError(_missing(where, name, self.parameters))


class PlanSection(_Section):
    """``[plan]``: the primary endpoints and what fixes K and N.

    ``estimator`` "swrb" adds K replicates of residual branching to the K coupled ones of every action; "hybrid" does so
    on evaluation documents only for actions where the development documents say that it pays.
    ``interval`` is how intervals are made; a plan that is made without it has studentized ones.
    ``stopping`` "sequential" looks at the evaluation at the ``looks``, shares of N, and stops when every primary
    endpoint is resolved as ``resolve`` says: its interval is as narrow as the target, excludes 0, or lies inside or
    wholly outside +-``margin``.
    ``variance`` is what K and N are chosen by: that of the estimates, or that of the reduced ones.
    """

    baseline: str
    primary: Annotated[list[str], Field(min_length=1)]
    replicates: Literal["auto"] | Positive = "auto"
    documents: Literal["auto"] | Positive = "auto"
    estimator: Literal["plain", "swrb", "hybrid"] = PLAIN
    development_replicates: Annotated[int, Field(ge=2)] = 16
    replicates_between: Annotated[tuple[Positive, Positive], Field(strict=False)] = (16, 64)
    documents_at_least: Positive = 2
    target_half_width: Annotated[float, Field(gt=0, lt=1)] = 0.02
    alpha: Annotated[float, Field(gt=0, lt=1)] = 0.05
    interval: Literal["studentized", "percentile"] | None = None
    stopping: Literal["fixed", "sequential"] = FIXED
    looks: Annotated[list[str], Field(min_length=1)] = ["1/4", "1/2", "3/4", "1"]
    resolve: Literal["half_width", "sign", "equivalence"] = "half_width"
    margin: Annotated[float, Field(gt=0)] | None = None
    variance: Literal["plain", "reduced"] = "plain"
    family_size: Positive | None = None
    draws: Annotated[int, Field(ge=100)] = 10_000
    exploratory_draws: Annotated[int, Field(ge=100)] = 2_000

    @property
    def shares(self) -> list[Fraction]:
        """The looks as shares of N.

        Raises:
            InputError: One is not a fraction.

        """
        try:
            return [Fraction(look) for look in self.looks]
        except (ValueError, ZeroDivisionError):
            raise InputError(f"plan.looks = {self.looks}: write exact fractions of the documents, as in 1/4") from None

    def check_stopping(self) -> None:
        """Check that what looks need is there, and nothing of them where there are none.

        Raises:
            InputError: A key does not go with the others.

        """
        fields = type(self).model_fields
        given = [name for name in ("looks", "resolve", "margin") if getattr(self, name) != fields[name].default]
        if self.stopping == FIXED and given:
            raise InputError(f'plan.{given[0]}: belongs to looks; write stopping = "sequential" with it')
        if any(one >= other for one, other in pairwise([Fraction(0), *self.shares])) or self.shares[-1] != 1:
            raise InputError(f"plan.looks = {self.looks}: shares of the documents must grow to 1")
        if self.resolve == "equivalence" and self.margin is None:
            raise InputError('plan.margin: missing; resolve = "equivalence" is inside or wholly outside +-margin')
        if self.resolve != "equivalence" and self.margin is not None:
            raise InputError(f'plan.margin: belongs to resolve = "equivalence", not to "{self.resolve}"')
        if self.stopping == "sequential" and self.interval == "percentile":
            raise InputError('plan.interval = "percentile": the intervals of looks are studentized; remove it')
        if self.stopping == "sequential" and self.variance == "reduced":
            raise InputError('plan.variance = "reduced": looks are at the estimates as they are; remove it')


class WindowsSection(_Section):
    """``[windows]``: overrides of the windows that otherwise scale with H."""

    cohort_bound: Positive | None = None
    early_last: Positive | None = None
    late_first: Positive | None = None
    first_block_last: Positive | None = None
    second_block_last: Positive | None = None
    agreement_run: Positive = 16
    saturation_threshold: Annotated[float, Field(gt=0, lt=1)] = 0.99


class Study(_Section):
    """A whole study file."""

    study: StudySection
    model: ModelSection
    documents: Annotated[list[DocumentsSection], Field(min_length=1)]
    actions: Annotated[list[ActionSection], Field(min_length=1)]
    plan: PlanSection
    windows: WindowsSection = WindowsSection()
    _several_models: bool = PrivateAttr(default=False)
    _folder: Path | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self._check_model()
        self._check_documents()
        self._check_actions()
        self._check_plan()
        _ = self.window_values
        return self

    @property
    def _finite(self) -> bool:
        return self.model.kind == FINITE_STATE

    def _check_model(self) -> None:
        given = [name for name in ("family", "alphabet", "tables") if getattr(self.model, name) is not None]
        if not self._finite and given:
            raise InputError(f'model.{given[0]}: belongs to finite-state systems; write kind = "finite-state" with it')
        if self._finite and given not in (["family", "alphabet"], ["tables"]):
            raise InputError('model: a finite-state model has family and alphabet, or tables = "FILE.json"')
        if self._finite and self.model.logits_dtype is not None:
            raise InputError("model.logits_dtype: belongs to transformers; finite-state laws are given")
        if self.model.device_map is not None and self.model.device != "cpu":
            raise InputError("model.device: device_map chooses the devices; write one of the two")

    def _check_documents(self) -> None:
        for number, section in enumerate(self.documents):
            where = f"documents[{number}]"
            if (section.source == FINITE_STATE) != self._finite:
                raise InputError(f"{where}.source = '{section.source}': not a source of a {self.model.kind} model")
            if self._finite and section.length:
                raise InputError(f"{where}.length: unknown key; finite-state systems have no prompt")
            if self._finite and section.exclude is not None:
                raise InputError(f"{where}.exclude: unknown key; finite-state systems have no clusters")
            if not self._finite and not section.length:
                raise InputError(f"{where}.length: missing")
            which, parts = section.part_of_clusters
            if which > parts:
                raise InputError(f"{where}.part = '{section.part}': write 1/{parts} to {parts}/{parts}")
        strata = [section.stratum_name for section in self.documents]
        _check_distinct("strata", strata)
        if POOLED in strata:
            raise InputError(f"strata: '{POOLED}' is the name of the rows that pool them; choose another")

    def _check_actions(self) -> None:
        for number, action in enumerate(self.actions):
            action.check_kind(f"actions[{number}]", finite=self._finite)
        names = [action.name for action in self.actions]
        _check_distinct("actions", names)
        if CONTROL_ACTION in names:
            raise InputError(f"actions: kvdrift adds the control '{CONTROL_ACTION}' to every study; remove it")
        for action in self.actions:
            try:
                _ = action.retention
            except InputError as error:
                raise InputError(f"action '{action.name}': {error}") from None

    def _check_plan(self) -> None:
        names = [action.name for action in self.actions]
        if self.plan.baseline not in names:
            hint = nearest(self.plan.baseline, names)
            raise InputError(f"plan.baseline = '{self.plan.baseline}': no such action; {hint}")
        least = min(part.evaluation for part in self.documents)
        if self.plan.documents != "auto" and self.plan.documents > least:
            raise InputError(f"plan.documents = {self.plan.documents}: a stratum has only {least} evaluation documents")
        low, high = self.plan.replicates_between
        if low > high:
            raise InputError(f"plan.replicates_between = [{low}, {high}]: the first bound is above the second")
        self.plan.check_stopping()

    @property
    def name(self) -> str:
        """The study's name."""
        return self.study.name

    @property
    def several_models(self) -> bool:
        """Whether the file names several models, each with a ``Study`` of its own."""
        return self._several_models

    @property
    def folder(self) -> Path | None:
        """The study file's folder, an absolute path, where modules of one's own are found; None without a file."""
        return self._folder

    def of_file(self, path: Path, *, several_models: bool) -> Self:
        """Say which file the study is read from, and whether that names several models; returns the study."""
        self._folder, self._several_models = path.absolute().parent, several_models
        return self

    @cached_property
    def window_values(self) -> Windows:
        """All windows; those that ``[windows]`` does not set scale with the horizon."""
        return Windows.of(self.study.horizon, **self.windows.model_dump())

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of ``settings``."""
        return hashlib.sha256(self.settings.encode()).hexdigest()

    @cached_property
    def settings(self) -> str:
        """What decides the events, as JSON: horizon, seed, model and document sources (actions may be added later)."""
        model = values_of(self.model, ("kind", "family", "alphabet", "tables", "device_map", "logits_dtype"))
        del model["mixed_gpus"]  # a permission: each unit says which GPU made it
        deciding = {
            "study": self.study.model_dump(),
            "model": model,
            # A path says nothing about a file's content: a document that changed is known by its prompt_sha256.
            "documents": [
                part.model_dump(exclude={"development", "evaluation", "path", "exclude"}) for part in self.documents
            ],
        }
        return json.dumps(deciding, sort_keys=True)


def values_of(section: _Section, later: Collection[str]) -> dict[str, Any]:
    """Return a section's values without ``later`` keys at their default, which must not change older hashes."""
    defaults = {name: type(section).model_fields[name].default for name in later}
    values = section.model_dump()
    return {name: value for name, value in values.items() if name not in defaults or value != defaults[name]}


def load_studies(path: Path) -> list[Study]:
    """Read and validate a study file.

    Returns:
        One study for ``[model]``; or one for each ``[[model]]``, equal but for the model.

    Raises:
        InputError: The file cannot be read or is not valid; the line names the file, the field and, for an unknown
            key, the nearest known one.

    """
    check_regular(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such study file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not valid TOML: {error}") from None
    for part in content.get("documents", []):
        if isinstance(part, dict) and isinstance(part.get("exclude"), str):
            part["exclude"] = str(path.absolute().parent / Path(part["exclude"]).expanduser())
    models = content.get("model")
    several = models if isinstance(models, list) and models else [models]
    contents = [content if model is None else content | {"model": model} for model in several]
    try:
        studies = [Study.model_validate(one) for one in contents]
        _check_distinct("models", [study.model.id for study in studies])
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except ValidationError as error:
        raise InputError(f"{path}: {_explain(error.errors())}") from None
    return [study.of_file(path, several_models=len(studies) > 1) for study in studies]


def _check_distinct(what: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{what}: '{name}' is given {names.count(name)} times; give each a name of its own")


def _explain(problems: list[Any]) -> str:
    """Make one line of pydantic's problems."""
    # A misspelled key is reported as missing, too; the unknown key is the one to correct.
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    location = problem["loc"]
    where = _place(location)
    if problem["type"] == "extra_forbidden":
        return f"{where}: unknown key; {nearest(str(location[-1]), _known_keys(location[:-1]))}"
    if problem["type"] == "missing":
        unknown = set(problem["input"]) - set(_known_keys(location[:-1]))
        return _missing(_place(location[:-1]), str(location[-1]), unknown)
    messages = [p["msg"].removeprefix("Input should be ") for p in problems if _place(p["loc"]) == where]
    return f"{where} = {problem['input']!r}: should be {' or '.join(dict.fromkeys(messages))}"


def _missing(where: str, name: str, unknown: Iterable[str]) -> str:
    """Make the error line for a key that is missing, or misspelled as one of the ``unknown`` keys beside it."""
    place = f"{where}." if where else ""
    for key in unknown:
        if difflib.get_close_matches(key, [name]):
            return f"{place}{key}: unknown key; did you mean '{name}'?"
    return f"{place}{name}: missing"


def _place(location: tuple[int | str, ...]) -> str:
    """Write a place as in ``actions[0].keep``; pydantic's names of types in it are left out."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part not in ("int", "float", "str", "bool") and not part.startswith(("literal", "constrained")):
            text += f".{part}" if text else part
    return text


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    section: Any = Study
    if location:
        section = Study.model_fields[str(location[0])].annotation
        section = next(iter(get_args(section)), section)  # of a list, what is listed
    return list(section.model_fields)
