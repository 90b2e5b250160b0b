"""Let CI decide whether a compressed cache may be deployed: python examples/gate.py STORE ACTION MARGIN

The baseline is the action snapkv-half. Exit code 0 if the action's mismatch is at most MARGIN above the baseline's,
1 if it is worse, 3 if the documents do not decide: the exit codes of ``kvdrift gate``.
"""

import sys

import kvdrift

store, action, margin = sys.argv[1:]
verdict = kvdrift.gate(store, "mismatch", action, float(margin), baseline="snapkv-half")
print(f"{action}: {verdict.decision}: {verdict.estimate:+.4f}, between {verdict.low:+.4f} and {verdict.high:+.4f}")
sys.exit({"equivalent or better": 0, "worse": 1}.get(verdict.decision, 3))
