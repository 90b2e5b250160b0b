"""Examples of each command, printed below its help."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "init": (
        "kvdrift init",
        "kvdrift init studies/mine.toml --model Qwen/Qwen2.5-0.5B-Instruct --documents prompts.jsonl",
        "kvdrift init mine.toml --model model.gguf --cache-types q8_0,q8_0/q4_0,q4_0",
        "kvdrift init mine.toml --task needle --action half=snapkv:1/2 --action few=recent:128 --horizon 32",
        "kvdrift init mine.toml --sweep snapkv:3/4,1/2,1/4 --sweep recent:3/4,1/2,1/4",
    ),
    "run": (
        "kvdrift run studies/quickstart.toml --dry-run",
        "kvdrift run studies/quickstart.toml",
        "kvdrift run my-study.toml --store s3://laboratory/my-study --gpus all",
        "kvdrift run my-study.toml --redo snapkv-half --replan",
    ),
    "serve": (
        "kvdrift serve kvdrift/tiny",
        "kvdrift serve my/model --device cuda:0 --dtype bfloat16 --port 8816 --token-file token",
    ),
    "schedule": ('kvdrift schedule my-study.toml --cron "0 3 * * *"',),
    "status": (
        "kvdrift status stores/quickstart",
        "kvdrift status stores/quickstart --watch",
        "kvdrift status stores/quickstart --metrics",
    ),
    "verify": (
        "kvdrift verify stores/quickstart",
        "kvdrift verify stores/quickstart --repair",
        "kvdrift verify stores/quickstart --since 7d",
    ),
    "sql": (
        'kvdrift sql stores/quickstart "from summary"',
        "kvdrift sql stores/quickstart \"from decomposition where split = 'evaluation' order by stratum, mismatch\"",
        'kvdrift sql stores/quickstart "from estimates" -o estimates.parquet',
        "kvdrift sql stores/quickstart",
    ),
    "ingest": (
        "kvdrift ingest events.parquet --store stores/other --documents documents.csv",
        "kvdrift ingest 'runs/**/*.csv.gz' --store stores/other --documents documents.csv --horizon 128",
        "kvdrift ingest drop/ --store stores/other --documents documents.csv --watch --horizon 128",
    ),
    "derive": ("kvdrift derive stores/quickstart", "kvdrift derive stores/quickstart --watch"),
    "analyze": ("kvdrift analyze stores/quickstart",),
    "report": (
        "kvdrift report stores/quickstart",
        "kvdrift report stores/quickstart -o pages --format latex",
        "kvdrift report stores/one stores/other -o compared",
        "kvdrift report stores/quickstart --side-by-side",
        "kvdrift report stores/quickstart --prune 90d",
    ),
    "gate": (
        "kvdrift gate stores/quickstart --quantity mismatch --action snapkv-half --baseline recent-half --margin 0.02",
    ),
    "show": ("kvdrift show stores/quickstart needle-384-00000 snapkv-half 0",),
    "compact": ("kvdrift compact stores/quickstart", "kvdrift compact stores/quickstart --vacuum"),
    "drop": ("kvdrift drop stores/my-study --action recent-quarter",),
    "forget": ("kvdrift forget stores/my-study --document p17 --yes",),
    "confirm": ("kvdrift confirm my-study.toml --action recent-quarter",),
    "check": (
        "kvdrift check snapkv",
        "kvdrift check my_module:MySelector --parameter sign=-1",
        "kvdrift check h2o --kind policy",
        "kvdrift check llama.cpp --weights model.gguf",
        "kvdrift check servers.toml",
    ),
    "list": ("kvdrift list selectors", "kvdrift list policies", "kvdrift list views"),
}


def epilog(command: str) -> str | None:
    r"""Return the examples below a command's help; the mark ``\b`` has typer keep the lines as they are."""
    lines = EXAMPLES.get(command)
    return None if lines is None else "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])
