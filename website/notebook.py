"""Run the code of ``docs/notebook.ipynb`` over a store, and write its output into the notebook.

``.venv/bin/python -m website.notebook stores/quickstart`` runs it over the quickstart's store.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebook.ipynb"
_DOTS = 80  # per inch, so that the figure is 560 pixels wide


def executed(notebook: dict[str, Any], store: str) -> dict[str, Any]:
    """Return a notebook with the outputs of its code cells over a store: text, and figures as PNG."""
    mpl.use("agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the choice of where it draws

    os.environ["STORE"] = store
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec("".join(cell["source"]), names)  # noqa: S102 - the repository's own notebook
            outputs = [_stream(printed.getvalue())] if printed.getvalue() else []
            outputs += [_picture(plt.figure(number)) for number in plt.get_fignums()]
            plt.close("all")
            cell |= {"execution_count": count, "outputs": outputs}
        cells.append(cell)
    return notebook | {"cells": cells}


def _stream(text: str) -> dict[str, Any]:
    return {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}


def _picture(figure: Any) -> dict[str, Any]:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=_DOTS, metadata={"Software": None})
    data = {"image/png": base64.b64encode(drawn.getvalue()).decode("ascii"), "text/plain": ["<Figure>"]}
    return {"data": data, "metadata": {}, "output_type": "display_data"}


if __name__ == "__main__":
    made = executed(json.loads(NOTEBOOK.read_text(encoding="utf-8")), sys.argv[1])
    NOTEBOOK.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
