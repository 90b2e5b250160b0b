"""Run a study from Python, and print what each action does: python examples/study.py STUDY.toml STORE"""

import sys

import kvdrift

study, store = sys.argv[1:]
page = kvdrift.run(study, store)  # goes on where an earlier run stopped; a finished study is not run again

with kvdrift.open(store) as views:
    rows = views.sql("""
        select action, mismatch, exposure, mismatch_rate
        from decomposition
        where split = 'evaluation' and stratum = 'pooled'
        order by mismatch
    """).fetchall()

print(f"{'action':<16} {'R':>6} = {'E':>6} x {'C':>6}")
for action, risk, exposure, rate in rows:
    print(f"{action:<16} {risk:6.3f}   {exposure:6.3f}   {rate or 0:6.3f}")
print(f"page: {page}")
