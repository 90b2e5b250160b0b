"""Decode-time policies bound what every step reads; every file has one policy."""

from __future__ import annotations

from collections.abc import Mapping

from generator.selectors.own.classes import default_parameters
from generator.selectors.parameters import Value, check_types
from generator.selectors.policies.h2o import H2O
from generator.selectors.policies.policy import Policy
from generator.selectors.policies.sliding import Sliding
from generator.selectors.policies.tova import TOVA
from schema.errors import InputError, nearest

POLICIES: dict[str, type[Policy]] = {"sliding": Sliding, "tova": TOVA, "h2o": H2O}

__all__ = ["POLICIES", "Policy", "build_policy"]


def build_policy(name: str, parameters: Mapping[str, Value]) -> Policy:
    """Make a policy, one of ``POLICIES``, with the parameters that differ from the defaults.

    Raises:
        InputError: An unknown name or parameter, or a value that the policy does not take.
    """
    if name not in POLICIES:
        raise InputError(f"policy = '{name}': {nearest(name, POLICIES)}")
    defaults = default_parameters(POLICIES[name])
    for parameter in parameters:
        if parameter not in defaults:
            raise InputError(
                f"policy.{parameter}: {nearest(parameter, defaults) if defaults else f'{name} takes no parameters'}"
            )
    check_types(parameters, defaults)
    return POLICIES[name](**parameters)
