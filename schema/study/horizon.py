"""``[study]`` and ``[windows]``: the horizon, the law of tokens, and the windows of quantities."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvdrift.schema.errors import InputError
from kvdrift.schema.sampling import SamplingLaw, Temperature, TopK, TopP
from kvdrift.schema.study.section import MOST_LISTED, Name, Section, Tokens, meaning


class StudySection(Section):
    """``[study]``: name, horizon, seed, and the law of tokens."""

    name: Name = meaning("The study's name in `stores/NAME`, in queries and on the page.", example="my-study")
    horizon: Tokens = meaning(
        "The horizon H: how many tokens after the prompt are compared. It is 2 or more, except for "
        "finite-state systems, engines and actions of other weights. The events of a document and action are in "
        "memory together, so H times the pairs is at most 2^24.",
        "tokens",
        example=64,
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = meaning(
        "The seed of every draw: of prompts, of tokens and of resampling.", default=0
    )
    temperature: Temperature = meaning(
        "The divisor of the logits before tokens are drawn. At 0 decoding is greedy: the most probable "
        "token is taken. A list of temperatures makes one study for each temperature.",
        default=1.0,
    )
    top_p: TopP | None = meaning(
        "Tokens are drawn from the smallest set of most probable tokens whose total probability reaches this value.",
        "probability",
        default=None,
    )
    top_k: TopK | None = meaning(
        "Tokens are drawn from exactly this many most probable tokens; of equally probable tokens, those with the "
        "lowest ids are taken.",
        "tokens",
        default=None,
    )
    eos: Annotated[list[int | str], Field(max_length=MOST_LISTED)] | None = meaning(
        "The tokens that end a text, by id or by text, in place of those that the model and its chat template name. "
        "The first of them fills the positions after a side's end. An empty list lets every text go on to H.",
        default=None,
    )
    store_prompts: bool = meaning(
        "Whether the store records the tokens of prompts and the entries that each action keeps. The "
        "explorer and the views of answers' records need both.",
        default=True,
    )

    @property
    def law(self) -> SamplingLaw:
        """The law by which both sides draw tokens."""
        return SamplingLaw(self.temperature, self.top_p, self.top_k)

    def check_law(self) -> None:
        """Check that the keys of the law agree with each other."""
        for name in ("top_p", "top_k") if self.law.greedy else ():
            if getattr(self, name) is not None:
                raise InputError(f"study.{name}: at temperature 0 the most probable token is taken; remove it")


class WindowsSection(Section):
    """``[windows]``: windows of quantities that should not follow from the horizon."""

    cohort_bound: Tokens | None = meaning(
        "T: the branch cohort has the pairs that part at position T or before; H/2 by default.", "tokens", default=None
    )
    early_last: Tokens | None = meaning("The last early lag after τ; H/8 by default.", "tokens", default=None)
    late_first: Tokens | None = meaning("The first late lag after τ; T − H/8 + 1 by default.", "tokens", default=None)
    first_block_last: Tokens | None = meaning(
        "The last position of the first block; H/4 by default.", "tokens", default=None
    )
    second_block_last: Tokens | None = meaning(
        "The last position of the second block; H/2 by default.", "tokens", default=None
    )
    agreement_run: Tokens = meaning("A run of agreements is long from this length on.", "tokens", default=16)
    saturation_threshold: Annotated[float, Field(gt=0, lt=1)] = meaning(
        "A δ above this value is saturated.", "total variation", default=0.99
    )
