-- Block gaps of the generation clock, one row per block; generation_gap_change is repeated on all rows of a pair.
select
    study, model, split, stratum, baseline, action,
    unnest([1, 2, 3]) as block,
    unnest([1, first_block_last + 1, second_block_last + 1]) as block_first,
    unnest([first_block_last, second_block_last, horizon]) as block_last,
    documents,
    unnest([first_gap, middle_gap, last_gap]) as gap,
    generation_gap_change
from main.generation_gap_change
inner join main.windows using (study, model)
