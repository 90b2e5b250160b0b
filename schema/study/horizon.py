"""``[study]`` and ``[windows]``: how far continuations are compared, by which law, and the windows within."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from schema.errors import InputError
from schema.sampling import SamplingLaw, Temperature, TopK, TopP
from schema.study.section import Name, Section, Tokens, meaning

LAW_KEYS: Final = ("temperature", "top_p", "top_k")
"""Keys that came later: settings and hashes have them where they are not at their default."""


class StudySection(Section):
    """``[study]``: name, horizon, seed, and the law that tokens are drawn by."""

    name: Annotated[
        Name, meaning("The study's name, as in `stores/NAME`, in queries and on the page.", example="my-study")
    ]
    horizon: Annotated[
        Tokens,
        meaning(
            "The horizon H: how many tokens after the prompt are compared; 2 or more, but for finite-state systems. "
            "The events of a document and action are in memory together, so that H times the pairs is at most 2^24.",
            "tokens",
            example=64,
        ),
    ]
    seed: Annotated[
        int, Field(ge=0, lt=2**63), meaning("Decides every draw: of prompts, of tokens and of resampling.")
    ] = 0
    temperature: Annotated[
        Temperature,
        meaning(
            "What logits are divided by before tokens are drawn; 0 is greedy: the most probable token is taken. A list "
            "makes a study of each of several temperatures."
        ),
    ] = 1.0
    top_p: Annotated[
        TopP | None,
        meaning(
            "Tokens are drawn from the fewest of the most probable ones that have this probability together.",
            "probability",
        ),
    ] = None
    top_k: Annotated[TopK | None, meaning("Tokens are drawn from so many of the most probable ones.", "tokens")] = None
    store_prompts: Annotated[
        bool,
        meaning(
            "Whether the store has the tokens of prompts and which entries each action keeps, for the explorer and for "
            "what became of the answers' records."
        ),
    ] = True

    @property
    def law(self) -> SamplingLaw:
        """The law that tokens are drawn by, on both sides."""
        return SamplingLaw(self.temperature, self.top_p, self.top_k)

    def check_law(self) -> None:
        """Check that the keys of the law go together."""
        for name in ("top_p", "top_k") if self.law.greedy else ():
            if getattr(self, name) is not None:
                raise InputError(f"study.{name}: at temperature 0 the most probable token is taken; remove it")


class WindowsSection(Section):
    """``[windows]``: the windows that quantities are taken over, where they should not follow from the horizon."""

    cohort_bound: Annotated[
        Tokens | None,
        meaning("T: the branch cohort is of the pairs that part at T or before; H/2 by default.", "tokens"),
    ] = None
    early_last: Annotated[Tokens | None, meaning("The last early lag after τ; H/8 by default.", "tokens")] = None
    late_first: Annotated[Tokens | None, meaning("The first late lag after τ; T − H/8 + 1 by default.", "tokens")] = (
        None
    )
    first_block_last: Annotated[
        Tokens | None, meaning("The last position of the first block; H/4 by default.", "tokens")
    ] = None
    second_block_last: Annotated[
        Tokens | None, meaning("The last position of the second block; H/2 by default.", "tokens")
    ] = None
    agreement_run: Annotated[Tokens, meaning("From this length on a run of agreements is a long one.", "tokens")] = 16
    saturation_threshold: Annotated[
        float, Field(gt=0, lt=1), meaning("δ above it is saturated.", "total variation")
    ] = 0.99
