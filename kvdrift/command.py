"""The ``kvdrift`` command: studies, ad hoc SQL, derivation, estimates and reports over a store."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

import kvdrift
from schema.errors import InputError, KvdriftError

app = typer.Typer(
    name="kvdrift",
    help="When, and for how long, KV-cache eviction makes a language model diverge from itself.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

StoreArgument = Annotated[str, typer.Argument(metavar="STORE", help="Folder or object-store URL of a store.")]
StoreOption = Annotated[
    str | None, typer.Option("--store", metavar="DIR", help="Folder or URL of the store; stores/NAME by default.")
]
TokenOption = Annotated[
    Path | None, typer.Option("--token-file", metavar="FILE", help="File with the token that callers must present.")
]


def _version(value: bool) -> None:
    if value:
        typer.echo(f"kvdrift {kvdrift.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    pass


@app.command()
def run(
    study: Annotated[Path, typer.Argument(metavar="STUDY.toml", help="The study file.")],
    store: StoreOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what it would do and take; write nothing.")] = False,
    endpoint: Annotated[
        list[str] | None,
        typer.Option("--endpoint", metavar="URI", help="grpc://HOST:PORT of a kvdrift serve; as often as there are."),
    ] = None,
    token_file: TokenOption = None,
    tls_root_certs: Annotated[
        Path | None,
        typer.Option("--tls-root-certs", metavar="FILE", help="PEM that vouches for endpoints; the system's else."),
    ] = None,
    endpoint_timeout: Annotated[
        float, typer.Option("--endpoint-timeout", min=5, help="Seconds of silence after which an endpoint hangs.")
    ] = 60.0,
) -> None:
    """Run a study from its documents to its report; goes on where it stopped.

    Without --endpoint, this process generates the events; they are the same either way.
    """
    from kvdrift.commands.run import default_location, run_studies
    from kvdrift.console import ConsoleProgress
    from schema.study import load_studies

    loaded = load_studies(study)
    if dry_run:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # what is not on this machine is not fetched
        from kvdrift.commands.dry_run import describe_study

        for one in loaded:
            for line in describe_study(one, store or default_location(one)):
                typer.echo(line)
        return
    from kvdrift.commands.serve import endpoints_of
    from schema.progress import listening

    endpoints = endpoints_of(endpoint or [], token_file, tls_root_certs, endpoint_timeout)
    with ConsoleProgress() as console, listening(console):
        outcome = run_studies(loaded, store, endpoints)
    if not outcome.did_something:
        typer.echo(f"study '{loaded[0].name}' is finished: nothing to do")
    typer.echo(f"store:  {outcome.location}")
    for page in outcome.reports:
        typer.echo(f"report: {page}")


@app.command()
def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="What model.id in a study file is.")],
    host: Annotated[str, typer.Option("--host", help="Address; any but this machine's own needs token and TLS.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 is any free one.")] = 8815,
    token_file: TokenOption = None,
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", metavar="FILE", help="PEM of the service's certificate chain.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option("--tls-key", metavar="FILE", help="PEM of the certificate's private key.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="As in [model]: cpu, cuda, cuda:1, …")] = "cpu",
    dtype: Annotated[str, typer.Option("--dtype", help="As in [model].")] = "float32",
    revision: Annotated[str | None, typer.Option("--revision", help="As in [model].")] = None,
    device_map: Annotated[
        str | None, typer.Option("--device-map", help="As in [model]: auto, all GPUs in place of one device.")
    ] = None,
    max_request_bytes: Annotated[
        int, typer.Option("--max-request-bytes", min=1024, help="Longest request that is looked at.")
    ] = 2**24,
) -> None:
    """Serve a model as generator to studies run with --endpoint, until interrupted."""
    from kvdrift.commands.serve import serve_model

    serve_model(
        model,
        host=host,
        port=port,
        device=device,
        dtype=dtype,
        revision=revision,
        device_map=device_map,
        token_file=token_file,
        tls_cert=tls_cert,
        tls_key=tls_key,
        max_request_bytes=max_request_bytes,
    )


@app.command()
def status(store: StoreArgument) -> None:
    """Show what a store holds and what is left to derive and to estimate."""
    from kvdrift.commands.status import store_status
    from schema.store.store import Store

    typer.echo(store_status(Store.open(store)))


@app.command()
def verify(store: StoreArgument) -> None:
    """Read everything in a store and hold it against the log and what it was made from; changes nothing."""
    from kvdrift.commands.verify import verify_store

    raise typer.Exit(verify_store(store))


@app.command()
def sql(
    store: StoreArgument,
    query: Annotated[str | None, typer.Argument(metavar="QUERY", help="A select; without it, a prompt.")] = None,
    output_format: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="table, csv, json, parquet or latex.")
    ] = "table",
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write to FILE.")] = None,
) -> None:
    """Answer SQL over a store's tables and views, also while a study is running."""
    from kvdrift.commands.sql import FORMATS, answer, prompt
    from schema.errors import nearest

    if output_format not in FORMATS:
        raise InputError(f"--format {output_format}: {nearest(output_format, FORMATS)}")
    with kvdrift.open(store) as views:
        if query is None:
            prompt(views)
        else:
            answer(views, query, output_format, output)


@app.command()
def ingest(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILES...", help="Parquet or Arrow IPC files of events, or folders of them.")
    ],
    store: Annotated[str, typer.Option("--store", metavar="DIR", help="Folder or URL of the store; made if missing.")],
    documents: Annotated[
        Path | None,
        typer.Option(
            "--documents", metavar="FILE", help="CSV, JSONL or Parquet: doc, stratum, split, and what is known."
        ),
    ] = None,
) -> None:
    """Append events that another generator made, after checking every one of them."""
    from kvdrift.commands.ingest import ingest_files

    raise typer.Exit(ingest_files(files, store, documents))


@app.command()
def derive(
    store: StoreArgument,
    runner: Annotated[str, typer.Option("--runner", help="Beam runner: FnApiRunner, DaskRunner, …")] = "FnApiRunner",
    watch: Annotated[bool, typer.Option("--watch", help="Go on deriving as events arrive, until interrupted.")] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.05, help="Seconds between looks with --watch.")] = 1.0,
) -> None:
    """Derive trajectories and steps of all events that lack them."""
    from kvdrift.commands.derive import derive_once, derive_watching

    typer.echo(derive_watching(store, interval) if watch else derive_once(store, runner))


@app.command()
def analyze(store: StoreArgument) -> None:
    """Bootstrap every study of a store whose estimates are not up to date; without a frozen plan, as exploratory."""
    from flows.stages import analyze_stored
    from kvdrift.console import ConsoleProgress
    from schema.progress import listening
    from schema.store.store import Store

    opened = Store.open(store)
    studies = {(row["study"], row["model"]) for row in opened.read("documents", columns=["study", "model"]).to_pylist()}
    if not studies:
        raise InputError(f"{opened.location}: the store holds no study yet")
    with ConsoleProgress() as console, listening(console):
        for study, model in sorted(studies):
            count = analyze_stored(opened, study, model)
            typer.echo(f"{study}, {model}: " + (f"{count} estimates" if count else "estimates are up to date"))


@app.command()
def report(
    store: StoreArgument,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Folder; STORE/report/NAME by default.")
    ] = None,
    study: Annotated[str | None, typer.Option("--study", metavar="NAME", help="Only this study.")] = None,
    output_format: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="html, or latex: every table as a .tex file too.")
    ] = "html",
) -> None:
    """Write the report of a store's studies: one page each, with figures and tables as files."""
    # A report shows tokens as text where the tokenizer is on this machine; it does not go and look for one.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from kvdrift.commands.report import report_store

    for page in report_store(store, output, study, output_format):
        typer.echo(f"report: {page}")


@app.command(name="list")
def list_(
    what: Annotated[str, typer.Argument(metavar="selectors|tasks|views|models", help="What to list.")],
) -> None:
    """List what can be named in a study file or a query."""
    from kvdrift.commands.list import listing

    typer.echo(listing(what))


def main(arguments: list[str] | None = None) -> None:
    """Run the command and exit: 0, 1 for a failure, 2 for the user's mistake, 130 when interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # --debug may stand anywhere: whoever adds it to a failing command adds it at the end.
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        from kvdrift.shadowing import check_not_shadowed

        check_not_shadowed()
        code: Any = app(arguments, prog_name="kvdrift", standalone_mode=False)
    except KvdriftError as error:
        _fail(str(error), error.exit_code, debug=debug)
    except (typer.Abort, KeyboardInterrupt):
        _fail("interrupted; run the same command again to go on", 130, debug=False)
    except TyperException as error:
        _fail(f"{error.format_message()} (kvdrift --help lists commands and options)", 2, debug=False)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except Exception as error:  # noqa: BLE001 - the last line of defence: one line, no traceback
        line = " ".join(f"{type(error).__name__}: {error}".split())
        _fail(f"unexpected failure: {line} (--debug shows where)", 1, debug=debug)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(line: str, code: int, *, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    typer.echo(f"kvdrift: {line}", err=True)
    sys.exit(code)
