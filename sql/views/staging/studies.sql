-- Staging: the stored table as it is, one study's fixed parameters: horizon and windows.
select
    study,
    model,
    horizon,
    seed,
    cohort_bound,
    early_last,
    late_first,
    first_block_last,
    second_block_last,
    agreement_run,
    saturation_threshold,
    study_sha256,
    revision
from stored.studies
