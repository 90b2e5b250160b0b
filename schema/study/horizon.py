"""``[study]`` and ``[windows]``: how far continuations are compared, and the windows within."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from schema.study.section import Name, Positive, Section, meaning


class StudySection(Section):
    """``[study]``: name, horizon and seed."""

    name: Annotated[
        Name, meaning("The study's name, as in `stores/NAME`, in queries and on the page.", example="my-study")
    ]
    horizon: Annotated[
        Positive, meaning("The horizon H: how many tokens after the prompt are compared.", "tokens", example=64)
    ]
    seed: Annotated[
        int, Field(ge=0, lt=2**63), meaning("Decides every draw: of prompts, of tokens and of resampling.")
    ] = 0


class WindowsSection(Section):
    """``[windows]``: the windows that quantities are taken over, where they should not follow from the horizon."""

    cohort_bound: Annotated[
        Positive | None,
        meaning("T: the branch cohort is of the pairs that part at T or before; H/2 by default.", "tokens"),
    ] = None
    early_last: Annotated[Positive | None, meaning("The last early lag after τ; H/8 by default.", "tokens")] = None
    late_first: Annotated[Positive | None, meaning("The first late lag after τ; T − H/8 + 1 by default.", "tokens")] = (
        None
    )
    first_block_last: Annotated[
        Positive | None, meaning("The last position of the first block; H/4 by default.", "tokens")
    ] = None
    second_block_last: Annotated[
        Positive | None, meaning("The last position of the second block; H/2 by default.", "tokens")
    ] = None
    agreement_run: Annotated[Positive, meaning("From this length on a run of agreements is a long one.", "tokens")] = 16
    saturation_threshold: Annotated[
        float, Field(gt=0, lt=1), meaning("δ above it is saturated.", "total variation")
    ] = 0.99
