"""The line of ``kvdrift run --dry-run`` about the tokens that end a text."""

from __future__ import annotations

from collections.abc import Iterator

from kvdrift.generator.generation.engine_models import engine_model
from kvdrift.generator.transformer.files.local_folders import local_configuration, model_location
from kvdrift.generator.transformer.files.text_ends import end_texts, text_ends
from kvdrift.schema.study import FINITE_STATE, Study


def end_lines(study: Study) -> Iterator[str]:
    """Yield a line with the tokens that end a text, and where each comes from; none for finite-state systems."""
    if study.model.kind == FINITE_STATE:
        return
    if study.model.engine is not None:
        ends = engine_model(study).ends
    elif local_configuration(model_location(study.model), study.model.revision) is None:
        yield "  texts end at tokens that the model's files name, which are not on this machine"
        return
    else:
        ends = text_ends(study)
    named = ", ".join(end_texts(study, ends))
    yield f"  texts end at {named}" if named else "  no token ends a text: every text goes on to H"
