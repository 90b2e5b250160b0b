"""Decode-time policies limit the entries that every step reads; each policy has its own file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvdrift.generator.selectors.custom.parts import PartKind, check_statistics, property_of
from kvdrift.generator.selectors.parameters import Value
from kvdrift.generator.selectors.policies.h2o import H2O
from kvdrift.generator.selectors.policies.policy import Policy
from kvdrift.generator.selectors.policies.scores import ScoringPolicy
from kvdrift.generator.selectors.policies.sliding import Sliding
from kvdrift.generator.selectors.policies.tova import TOVA
from kvdrift.generator.selectors.selector import Selector
from kvdrift.schema.errors import InputError

POLICIES: dict[str, type[Policy]] = {"sliding": Sliding, "tova": TOVA, "h2o": H2O}

POLICY_KIND: PartKind[Policy] = PartKind(
    noun="policy", plural="policies", base=Policy, known=POLICIES,
    derive="ScoringPolicy of kvdrift.generator.selectors.policies, or Policy", says="what it reads", counts=("least",),
)  # fmt: skip

__all__ = ["POLICIES", "POLICY_KIND", "Policy", "ScoringPolicy", "build_policy"]


def build_policy(name: str, parameters: Mapping[str, Value], folder: Path | None = None) -> Policy:
    """Make a policy, as ``build_selector`` makes a selector; a policy whose first cut is no selector is refused."""
    policy = POLICY_KIND.build(name, parameters, folder)
    cut = property_of(policy, "policy", "first_cut")
    if not isinstance(cut, Selector):
        raise InputError(
            f"policy {type(policy).__name__}: first_cut is of type {type(cut).__name__}; it should be a selector, such "
            "as Recent() of kvdrift.generator.selectors"
        )
    check_statistics(cut)
    return policy
