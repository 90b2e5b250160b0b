"""Loading the models of a study file: the reference, and those of actions with weights of their own."""

from __future__ import annotations

from generator.transformer.files.local_folders import model_location
from generator.transformer.loading import load_model
from generator.transformer.model import LoadedModel
from generator.transformer.other_weights.model import ModelWithOthers
from generator.transformer.other_weights.named import told_of, weights_location, with_own_weights
from generator.transformer.other_weights.shared_tokens import check_shared
from schema.study import Study


def load_transformer(study: Study) -> LoadedModel | ModelWithOthers:
    """Load the models of a study file's ``[model]`` and ``[[actions]]``; weights that several name are loaded once."""
    section = study.model
    reference = load_model(
        model_location(section),
        name=section.id,
        device=section.device,
        dtype=section.dtype,
        revision=section.revision,
        device_map=section.device_map,
        logits_dtype=section.logits_dtype,
    )
    own = with_own_weights(study)
    if not own:
        return reference
    loaded: dict[str, LoadedModel] = {} if section.revision else {model_location(section): reference}
    others: dict[str, LoadedModel] = {}
    for action in own:
        location = weights_location(study, action)
        if location not in loaded:
            with told_of(action, location):
                loaded[location] = load_model(
                    location,
                    device=section.device,
                    dtype=section.dtype,
                    device_map=section.device_map,
                    logits_dtype=section.logits_dtype,
                )
        others[action.name] = loaded[location]
    check_shared(study, fetch=True)
    return ModelWithOthers(reference, others, study.law)
