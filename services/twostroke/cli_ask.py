"""The commands of `twostroke` that ask a router something about a prompt."""

from __future__ import annotations

from typing import Annotated, NoReturn

import typer

Router = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="gRPC address of the router; the one that `up` started when empty.")
]


def end(code: int) -> NoReturn:
    """Ends a command with this exit code."""
    raise typer.Exit(code)


def generate(
    prompt: Annotated[str, typer.Argument(help="A question to a chat model.")],
    router: Router = "",
    max_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Longest answer.")] = 128,
    raw: Annotated[bool, typer.Option("--raw", help="Go on with the prompt as it is; no chat template.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="The prompt is token ids, such as '1,2,3'.")] = False,
    timeline: Annotated[bool, typer.Option("--timeline", help="Show where the time went.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=0.1, metavar="SECONDS", help="Deadline.")] = 300,
) -> None:
    """Asks a router and prints the answer as it arrives."""
    from twostroke.launch import commands

    end(commands.generate(prompt, router, max_tokens, raw, tokens, timeline, timeout_s))


def explain(
    prompt: Annotated[str, typer.Argument(help="The prompt, as plain text.")] = "",
    router: Router = "",
    tokens: Annotated[bool, typer.Option("--tokens", help="The prompt is token ids, such as '1,2,3'.")] = False,
    length: Annotated[
        int, typer.Option(min=0, metavar="N", help="No prompt, but how many tokens it would have, none of them cached.")
    ] = 0,
    max_tokens: Annotated[int | None, typer.Option(min=1, metavar="N", help="Longest answer.")] = None,
    slo: Annotated[str, typer.Option(metavar="CLASS", help="A class of the router's --slo.")] = "",
    priority: Annotated[int, typer.Option(metavar="N", help="Lower runs earlier.")] = 0,
    deadline_s: Annotated[
        float, typer.Option("--deadline-s", min=0, metavar="SECONDS", help="For the answer; 0 is the router's own.")
    ] = 0,
) -> None:
    """Shows where a request would go now, and what every way would cost. Nothing is placed."""
    from twostroke.launch import commands

    end(commands.explain(prompt, router, tokens, length, max_tokens, slo, priority, deadline_s))
