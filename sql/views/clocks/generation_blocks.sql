-- Block means of the generation clock; an empty block (H below 4) keeps its row, with nulls.
select
    study, model, split, stratum, action,
    unnest([1, 2, 3]) as block,
    unnest([1, first_block_last + 1, second_block_last + 1]) as block_first,
    unnest([first_block_last, second_block_last, horizon]) as block_last,
    unnest([block_1_delta, block_2_delta, block_3_delta]) as delta,
    unnest([block_1_f, block_2_f, block_3_f]) as f,
    unnest([block_1_mismatch, block_2_mismatch, block_3_mismatch]) as mismatch
from internal.stratum_moments
inner join main.windows using (study, model)
