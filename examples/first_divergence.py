"""Answer your own question from a store by SQL: python examples/first_divergence.py STORE

For how many tokens after the prompt do half of the pairs agree, and where is the earliest divergence?
"""

import sys

import kvdrift

with kvdrift.open(sys.argv[1]) as views:
    rows = views.sql("""
        select t.action, count(*) as pairs, count(t.tau) as diverged, min(t.tau) as earliest,
            median(coalesce(t.tau, s.horizon + 1)) as half_agree_until
        from analyzed_trajectories t
        join studies s using (study, model)
        join documents d using (study, model, doc)
        where d.split = 'evaluation'
        group by t.action
        order by half_agree_until desc
    """).fetchall()

for action, pairs, diverged, earliest, half in rows:
    print(f"{action}: {diverged} of {pairs} pairs diverge, the first at token {earliest}, half by token {half:.0f}")
