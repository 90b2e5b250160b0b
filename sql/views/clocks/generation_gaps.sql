-- Block gaps of the generation clock, one row per block; generation_gap_change repeats on the rows of a pair.
with

changes as (
    select * from main.generation_gap_change
),

windows as (
    select * from main.windows
)

select
    changes.study,
    changes.model,
    changes.split,
    changes.stratum,
    changes.baseline,
    changes.action,
    unnest([1, 2, 3]) as block,
    unnest([1, windows.first_block_last + 1, windows.second_block_last + 1]) as block_first,
    unnest([windows.first_block_last, windows.second_block_last, windows.horizon]) as block_last,
    changes.documents,
    unnest([changes.first_gap, changes.middle_gap, changes.last_gap]) as gap,
    changes.generation_gap_change
from changes
inner join windows using (study, model)
