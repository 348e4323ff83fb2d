"""The `twostroke` command. Imports what a command needs when it runs, so that `--help` is instant."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from twostroke import cli_ask
from twostroke.cli_ask import Router, end
from twostroke.errors import ConfigError, TwostrokeError

_PROCESSES = {
    "router": ("twostroke.router.__main__", ()),
    "worker": ("twostroke.worker.__main__", ()),
    "prefill": ("twostroke.worker.__main__", ("--role", "prefill")),
    "decode": ("twostroke.worker.__main__", ("--role", "decode")),
}
_PASS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
_INTERRUPTED = 130
_QUESTION = "What is the capital of France?"

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serves an LLM in two strokes: prefill workers read the prompt, decode workers write the answer.\n\n"
    "`twostroke up` starts a router and workers on this machine; `router`, `prefill` and `decode` start one process "
    "each, for clusters of several machines. Every flag of those has an environment variable, see their --help.",
)
model_app = typer.Typer(help="Models on this machine.", no_args_is_help=True)
app.add_typer(model_app, name="model", rich_help_panel="On this machine")

ModelName = Annotated[
    str,
    typer.Option(metavar="NAME", help="Folder or hub name; the bundled SmolLM2-135M-Instruct when empty."),
]
Grace = Annotated[
    float, typer.Option("--grace-s", min=0, metavar="SECONDS", help="Time to end in before processes are killed.")
]


@app.command(rich_help_panel="On this machine")
def up(
    model: ModelName = "",
    engine: Annotated[str, typer.Option(metavar="ENGINE", help="vllm, or reference: deterministic, no model.")] = "",
    prefill: Annotated[int, typer.Option(metavar="N", help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(metavar="N", help="Decode workers.")] = 1,
    host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen on, 127.0.0.1 when empty.")] = "",
    http_port: Annotated[
        int | None, typer.Option(metavar="PORT", help="OpenAI API (default: 8000); 0 picks one.")
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option(metavar="PORT", help="gRPC API (default: 50051); 0 picks one.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Leave it running in the background.")] = False,
    ask: Annotated[str, typer.Option(metavar="TEXT", help="Question to ask when ready.")] = _QUESTION,
    no_ask: Annotated[bool, typer.Option("--no-ask", help="Ask nothing.")] = False,
    dtype: Annotated[
        str, typer.Option(metavar="TYPE", help="Element type; when empty float32 on CPUs, else the model's own.")
    ] = "",
    served_model_name: Annotated[
        str, typer.Option(metavar="NAME", help="Name that clients use; the model's own when empty.")
    ] = "",
    cores_per_worker: Annotated[int, typer.Option(metavar="N", help="CPU cores that each worker gets for itself.")] = 1,
    worker_args: Annotated[
        str, typer.Option(metavar="ARGS", help="Further flags of every worker, see `twostroke worker --help`.")
    ] = "",
    router_args: Annotated[
        str, typer.Option(metavar="ARGS", help="Further flags of the router, see `twostroke router --help`.")
    ] = "",
    ready_timeout_s: Annotated[
        float, typer.Option("--ready-timeout-s", min=1, metavar="SECONDS", help="Time to become ready in.")
    ] = 300,
    grace_s: Grace = 15,
) -> None:
    """Starts a router, prefill and decode workers here, asks a question, serves until Ctrl-C.

    Environment variables set what has no flag here: `twostroke router --help`, `twostroke worker --help`.
    """
    from twostroke.launch import commands

    end(
        commands.up(
            commands.UpFlags(
                model=model,
                engine=engine or None,
                prefill=prefill,
                decode=decode,
                host=host or None,
                http_port=http_port,
                grpc_port=grpc_port,
                detach=detach,
                question=None if no_ask else ask,
                dtype=dtype or None,
                served_model_name=served_model_name or None,
                cores_per_worker=cores_per_worker,
                worker_args=worker_args,
                router_args=router_args,
                ready_timeout_s=ready_timeout_s,
                grace_s=grace_s,
            )
        )
    )


@app.command(rich_help_panel="On this machine")
def down(grace_s: Grace = 15) -> None:
    """Ends what `up` started."""
    from twostroke.launch import commands

    end(commands.down(grace_s))


@app.command(rich_help_panel="On this machine")
def logs(
    name: Annotated[str, typer.Argument(help="Process, such as router or decode-0; all when absent.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, metavar="N", help="Last lines of each log.")] = 40,
) -> None:
    """Shows what the processes wrote."""
    from twostroke.launch import commands

    end(commands.logs(name, follow, lines))


@app.command(rich_help_panel="Any cluster")
def status(
    router: Router = "",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Shows a router's workers, what it waits for and its counters."""
    from twostroke.launch import commands

    end(commands.status(router, as_json))


@app.command(rich_help_panel="Any cluster")
def top(
    router: Router = "",
    interval_s: Annotated[float, typer.Option("--interval-s", min=0.1, metavar="SECONDS", help="Between looks.")] = 1,
    limit: Annotated[int, typer.Option("--requests", min=1, max=1000, metavar="N", help="Most requests to show.")] = 20,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
) -> None:
    """Shows the workers, the rates and where the time of every request goes, until Ctrl-C."""
    from twostroke.launch import commands

    end(commands.top(router, interval_s, limit, once))


@app.command(rich_help_panel="On this machine")
def certs(
    folder: Annotated[str, typer.Argument(help="Where to write them.")] = "certs",
    name: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Host name or address of a server; may be repeated.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, metavar="N", help="How long they are valid.")] = 365,
) -> None:
    """Makes a development CA and certificates for routers, workers and clients."""
    from twostroke.launch import commands

    end(commands.certs(folder, name or [], days))


@app.command(rich_help_panel="Any cluster")
def drain(
    worker: Annotated[str, typer.Argument(help="Its id, as `twostroke status` shows it, or its address.")],
    router: Router = "",
) -> None:
    """Lets a worker leave: no new requests; when those that run are over, or have moved, its process ends.

    Requests that still run after the worker's --drain-s go on elsewhere from the tokens that their clients have.
    """
    from twostroke.launch import commands

    end(commands.drain(worker, router))


@app.command(rich_help_panel="Any cluster")
def role(
    worker: Annotated[str, typer.Argument(help="Its id, as `twostroke status` shows it, or its address.")],
    new_role: Annotated[str, typer.Argument(metavar="ROLE", help="prefill, decode or both.")],
    router: Router = "",
) -> None:
    """Changes what a worker is sent from now on; what runs there goes on."""
    from twostroke.launch import commands

    end(commands.role(worker, new_role, router))


app.command(rich_help_panel="Any cluster")(cli_ask.generate)
app.command(rich_help_panel="Any cluster")(cli_ask.explain)


@model_app.command("fetch")
def model_fetch(model: ModelName = "") -> None:
    """Obtains a model and prints its folder."""
    from twostroke.launch import commands

    end(commands.model_fetch(model))


@app.command(context_settings=_PASS, rich_help_panel="One process", help="Starts a router; see its --help.")
def router(context: typer.Context) -> None:
    _process("router", context.args)


@app.command(context_settings=_PASS, rich_help_panel="One process", help="Starts a prefill worker.")
def prefill(context: typer.Context) -> None:
    _process("prefill", context.args)


@app.command(context_settings=_PASS, rich_help_panel="One process", help="Starts a decode worker.")
def decode(context: typer.Context) -> None:
    _process("decode", context.args)


@app.command(context_settings=_PASS, rich_help_panel="One process", help="Starts a worker for both strokes.")
def worker(context: typer.Context) -> None:
    _process("worker", context.args)


@app.command(context_settings=_PASS, rich_help_panel="Without a cluster", help="Simulates a fleet; see its --help.")
def sim(context: typer.Context) -> None:
    _tool("sim", context.args)


@app.command(
    context_settings=_PASS, rich_help_panel="Without a cluster", help="Finds the fleet for a load; see its --help."
)
def plan(context: typer.Context) -> None:
    _tool("plan", context.args)


@app.command(
    context_settings=_PASS, rich_help_panel="Any cluster", help="Measures a worker for sim and plan; see its --help."
)
def profile(context: typer.Context) -> None:
    _tool("profile", context.args)


@app.command(rich_help_panel="Without a cluster")
def claims(
    seconds: Annotated[float, typer.Option(min=30, metavar="SECONDS", help="Arrivals of each experiment.")] = 300,
) -> None:
    """Simulates the numbers that are told about two pools, each against one pool, untuned and tuned. Takes a minute."""
    from twostroke.sim.perf import claims_command

    claims_command.run(seconds)


def _tool(name: str, argv: Sequence[str]) -> NoReturn:
    from twostroke.sim import cli

    end(cli.run(name, argv))


def _process(name: str, argv: Sequence[str]) -> NoReturn:
    module, preset = _PROCESSES[name]
    sys.exit(importlib.import_module(module).main([*preset, *argv]))


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs one command and ends the process; a mistake is one line on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] and arguments[0] in _PROCESSES:
            # Not through typer: these have their own flags, and start faster without it.
            _process(arguments[0], arguments[1:])
        sys.exit(app(args=arguments or ["--help"], prog_name="twostroke", standalone_mode=False))
    except TwostrokeError as error:
        _fail(" ".join(["twostroke", *arguments[:1]]), error.message, 2 if isinstance(error, ConfigError) else 1)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(_INTERRUPTED)
    except Exception as error:
        # typer brings its own copy of click's errors or click's, by its version; both can word themselves.
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        prog = context.command_path if context is not None else "twostroke"
        message = error.format_message().rstrip(".")
        if not message:  # the help of a group has been printed
            sys.exit(2)
        _fail(prog, f"{message[:1].lower()}{message[1:]}; see {prog} --help", 2)


def _fail(prog: str, message: str, code: int) -> NoReturn:
    sys.stderr.write(f"{prog}: {message}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
