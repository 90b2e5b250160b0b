-- The median of tau over all pairs: the 50% point of the entry distribution, if the share of pairs with tau = t is
-- spread evenly over t - 1/2..t + 1/2. It is null if fewer than half of the pairs diverge. 1e-9 is for rounding in sums
-- of shares.
select
    study, model, split, stratum, action,
    case
        when max(entry_cdf) >= 0.5 - 1e-9 then least(
            arg_min(t + 0.5 - (entry_cdf - 0.5) / p, t) filter (where entry_cdf >= 0.5 - 1e-9),
            max(t)
        )
    end as median_entry
from main.entry
group by study, model, split, stratum, action
