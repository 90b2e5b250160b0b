"""Bring pairs of another generator, here of two bigram models, into a store: python examples/ingest.py STORE"""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

COLUMNS = ["study", "model", "doc", "action", "replicate", "t", "x_token", "y_token", "delta", "f", "x_eos", "y_eos"]
random, tokens, docs, rows = np.random.default_rng(1), 20, [f"text-{number}" for number in range(12)], []
for doc in docs:
    p_of, other = random.dirichlet(np.ones(tokens), size=(2, tokens))  # next-token distributions by the last token
    for action, damage in {"full": 0.0, "mild": 0.1, "harsh": 0.5}.items():
        for replicate in range(16):
            x = y = 1
            for t in range(1, 33):
                used = p_of if t == 1 else p_of + damage * (other - p_of)  # eviction follows prefill
                p, q, fixed = p_of[x], used[y], used[x]
                common = np.minimum(p, q)
                delta, f = (p - common).sum(), (p - np.minimum(p, fixed)).sum()
                if random.random() < delta:  # a maximal coupling: the tokens differ with probability delta
                    x, y = (random.choice(tokens, p=rest / rest.sum()) for rest in (p - common, q - common))
                else:
                    x = y = random.choice(tokens, p=common / common.sum())
                rows.append(("mine", "bigram", doc, action, replicate, t, x, y, delta, f, False, False))
pq.write_table(pa.table(dict(zip(COLUMNS, zip(*rows, strict=True), strict=True))), "events.parquet")
pq.write_table(pa.table({"doc": docs, "stratum": ["mine"] * 12, "split": ["evaluation"] * 12}), "documents.parquet")
for command in ("ingest events.parquet --documents documents.parquet --store", "derive", "analyze", "report"):
    subprocess.run([sys.executable, "-m", "kvdrift", *command.split(), sys.argv[1]], check=True)
