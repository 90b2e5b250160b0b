"""``kvdrift init``: write a new study file, with a comment to each key."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from kvdrift import completion
from kvdrift.schema.errors import InputError


def init(
    study: Annotated[
        Path | None,
        typer.Argument(metavar="STUDY.toml", help="The file to write; by default my-study.toml or EXAMPLE.toml."),
    ] = None,
    example: Annotated[
        str | None,
        typer.Option(
            metavar="EXAMPLE",
            help="Write a shipped study unchanged (see kvdrift list examples).",
            autocompletion=completion.examples,
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="ID",
            help="The model: a folder, a Hugging Face id or a GGUF file, which llama.cpp decodes; by default the "
            "embedded model.",
        ),
    ] = "kvdrift/tiny",
    documents: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Your own prompts: a JSON Lines file with id and prompt.")
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="A task for prompts (see kvdrift list tasks); repeat the option for several."
        ),
    ] = None,
    length: Annotated[int | None, typer.Option(metavar="TOKENS", min=1, help="The most tokens of a prompt.")] = None,
    action: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SELECTOR:KEEP",
            help="An action, as in half=snapkv:1/2; repeat the option for several, the baseline first.",
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SELECTOR:KEEP,...",
            help="One action for each retention, as in snapkv:3/4,1/2,1/4; repeat the option for several, the "
            "baseline first.",
        ),
    ] = None,
    horizon: Annotated[
        int | None, typer.Option(metavar="H", min=1, help="The number of tokens to compare; by default 64.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="NAME", help="The engine that decodes in place of kvdrift: llama.cpp.")
    ] = None,
    gguf: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A GGUF file for llama.cpp; means the same as --model FILE.")
    ] = None,
    cache_types: Annotated[
        str | None,
        typer.Option(metavar="TYPES", help="One action for each cache type, as in q8_0,q4_0 or q8_0/q4_0 (K/V)."),
    ] = None,
    weights: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="The weights of one more action; repeat the option for several."),
    ] = None,
    vllm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]URL",
            help="A vLLM with kvdrift's processor: first the reference's URL, then each action's NAME=URL.",
        ),
    ] = None,
) -> None:
    """Write a study file with a comment to each key, ready to run; an existing file is never replaced.

    Without options the study compares two actions of the embedded model, which needs no download.

    Examples:
        kvdrift init
        kvdrift init --example quickstart
        kvdrift init mine.toml --model Qwen/Qwen2.5-0.5B-Instruct --documents prompts.jsonl
        kvdrift init mine.toml --model model.gguf --cache-types q8_0,q8_0/q4_0,q4_0
        kvdrift init mine.toml --model OWNER/NAME --vllm http://127.0.0.1:8001 --vllm fp8=http://127.0.0.1:8002
        kvdrift init mine.toml --task needle --action half=snapkv:1/2 --action few=recent:128 --horizon 32
        kvdrift init mine.toml --sweep snapkv:3/4,1/2,1/4 --sweep recent:3/4,1/2,1/4
    """
    from kvdrift.console import ConsoleProgress
    from kvdrift.study_files.examples import check_absent, example_files, write_files

    if example is not None:
        others = (documents, task, length, action, sweep, horizon, engine, gguf, cache_types, weights, vllm)
        if model != "kvdrift/tiny" or any(value for value in others):
            raise InputError("--example: writes a shipped study as it is; give no other option")
        files = example_files(example, study or Path(f"{example}.toml"))
        check_absent(files)
        write_files(files)
        _say_written([*files][-1])
        return
    study = study or Path("my-study.toml")
    with ConsoleProgress() as console:
        console.doing("reading the model's tokenizer and the prompts")  # importing transformers takes seconds
        from kvdrift.study_files import new_study as made_by

        check_absent([study])
        actions = [*map(made_by.named_action, action or []), *map(made_by.swept_action, sweep or [])]
        if vllm and (engine, gguf, cache_types, weights) != (None, None, None, None):
            raise InputError("--vllm: names another engine than --engine, --gguf, --cache-types and --weights")
        folder = study.absolute().parent
        if vllm:
            decoder: made_by.Decoder | None = made_by.served_decoder(model, vllm, folder)
        else:
            decoder = made_by.llama_cpp_decoder(model, engine, gguf, cache_types, weights or [], folder)
        if decoder is not None and actions:
            raise InputError("--action: not for an engine; with llama.cpp use --cache-types and --weights, else --vllm")
        decoder = decoder or made_by.own_decoder(model, actions, folder)
        text, prompts = made_by.new_study(study, decoder, documents, task or [], length, horizon)
        made_by.write_study(study, text, prompts)
    _say_written(study, prompts.remark)


def _say_written(study: Path, remark: str = "") -> None:
    named = shlex.quote(str(study))
    typer.echo(f"wrote {study}")
    if remark:
        typer.echo(remark)
    typer.echo(f"to forecast the study: kvdrift run {named} --dry-run")
    typer.echo(f"to run the study:      kvdrift run {named}")
