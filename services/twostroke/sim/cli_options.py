"""Options that several commands of cli.py share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TRAFFIC, WORKERS, LINKS, RUN = "Traffic", "Workers", "Links and failures", "Run"

Model = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="A model of the catalogue such as llama-3.1-70b, a folder with a config.json, or the .json of "
        "`twostroke profile`, which then stands for the hardware too.",
        rich_help_panel=WORKERS,
    ),
]
Gpu = Annotated[str, typer.Option(metavar="NAME", help="Hardware sheet, built in or a .json.", rich_help_panel=WORKERS)]
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Requests with times: Mooncake .jsonl, Azure .csv, a ServeGen folder, or a .csv or .jsonl with arrival_s, "
        "prompt_tokens, output_tokens.",
        rich_help_panel=TRAFFIC,
    ),
]
Lengths = Annotated[
    str,
    typer.Option(
        metavar="P/A[/CV]", help="Tokens of a prompt and an answer, made up: 8192/256.", rich_help_panel=TRAFFIC
    ),
]
Rate = Annotated[
    str,
    typer.Option(
        metavar="RATE",
        help="Requests per second: 3, or 1-24/600 for a sine with a period of 600 s. Rescales a trace.",
        rich_help_panel=TRAFFIC,
    ),
]
Cv = Annotated[float, typer.Option(help="Burstiness of arrivals; 1 is Poisson.", min=0.05, rich_help_panel=TRAFFIC)]
Seconds = Annotated[float, typer.Option(help="How long made-up traffic lasts.", min=1, rich_help_panel=TRAFFIC)]
Concurrency = Annotated[
    int,
    typer.Option(metavar="N", min=0, help="So many requests at any time, instead of a rate.", rich_help_panel=TRAFFIC),
]
Requests = Annotated[int, typer.Option(metavar="N", min=0, help="At most so many.", rich_help_panel=TRAFFIC)]
Scale = Annotated[float, typer.Option(min=0.001, help="Makes a trace so many times as fast.", rich_help_panel=TRAFFIC)]
Seed = Annotated[int, typer.Option(help="Of everything random.", rich_help_panel=TRAFFIC)]
SloText = Annotated[
    str,
    typer.Option(
        "--slo",
        metavar="LIMITS",
        help="What a good request meets: ttft=2s,itl=40ms,tpot=50ms, any of them.",
        rich_help_panel=RUN,
    ),
]
Precision = Annotated[str, typer.Option(help="bf16, fp8, nvfp4, mxfp4 or int4.", rich_help_panel=WORKERS)]
