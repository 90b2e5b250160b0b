"""Bring pairs of another generator, here of two bigram models, into a store: python examples/ingest.py STORE"""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

COLUMNS = ["study", "model", "doc", "action", "replicate", "t", "x_token", "y_token", "delta", "f", "x_eos", "y_eos"]
random, tokens, rows = np.random.default_rng(1), 20, []
for doc in range(12):
    p_of, other = random.dirichlet(np.ones(tokens), size=(2, tokens))  # next-token distributions by the last token
    for action, damage in {"full": 0.0, "mild": 0.1, "harsh": 0.5}.items():
        q_of = p_of + damage * (other - p_of)
        for replicate in range(16):
            x = y = 1
            for t in range(1, 33):
                p, q, fixed = p_of[x], q_of[y], q_of[x]
                common = np.minimum(p, q)
                delta, f = (p - common).sum(), (p - np.minimum(p, fixed)).sum()
                if random.random() < delta:  # a maximal coupling: the tokens differ with probability delta
                    x, y = (random.choice(tokens, p=rest / rest.sum()) for rest in (p - common, q - common))
                else:
                    x = y = random.choice(tokens, p=common / common.sum())
                rows.append(("mine", "bigram", f"text-{doc}", action, replicate, t, x, y, delta, f, False, False))
pq.write_table(pa.table(dict(zip(COLUMNS, zip(*rows, strict=True), strict=True))), "events.parquet")
for command in ("ingest events.parquet --store", "derive", "analyze", "report"):
    subprocess.run([sys.executable, "-m", "kvdrift", *command.split(), sys.argv[1]], check=True)
