-- Block means of the generation clock; an empty block (H below 4) keeps its row, with nulls.
with

stratum_moments as (
    select * from main.stratum_moments
),

windows as (
    select * from main.windows
)

select
    stratum_moments.study,
    stratum_moments.model,
    stratum_moments.split,
    stratum_moments.stratum,
    stratum_moments.action,
    unnest([1, 2, 3]) as block,
    unnest([1, windows.first_block_last + 1, windows.second_block_last + 1]) as block_first,
    unnest([windows.first_block_last, windows.second_block_last, windows.horizon]) as block_last,
    unnest([
        stratum_moments.block_1_delta, stratum_moments.block_2_delta, stratum_moments.block_3_delta
    ]) as delta,
    unnest([stratum_moments.block_1_f, stratum_moments.block_2_f, stratum_moments.block_3_f]) as f,
    unnest([
        stratum_moments.block_1_mismatch, stratum_moments.block_2_mismatch, stratum_moments.block_3_mismatch
    ]) as mismatch
from stratum_moments
inner join windows using (study, model)
