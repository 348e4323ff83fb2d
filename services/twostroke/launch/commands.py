"""The commands of the launcher, from flags to exit code."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from twostroke.config import RouterSettings, WorkerSettings, child_environment, run_dir
from twostroke.errors import ConfigError
from twostroke.flags import read
from twostroke.launch import ask, cluster, devices, model, plan, ports, timeline
from twostroke.launch import down as ending
from twostroke.launch import logs as logging
from twostroke.launch import status as viewing
from twostroke.launch import top as topping
from twostroke.launch import up as launching
from twostroke.launch.board import Board, say
from twostroke.launch.state import RunDir
from twostroke.v1.cluster_pb2 import ExplainRequest
from twostroke.v1.inference_pb2 import GenerateRequest
from twostroke.v1.worker_pb2 import ROLE_BOTH, ROLE_DECODE, ROLE_PREFILL

_STATUS_TIMEOUT_S = 5.0
_ROLES = {"prefill": ROLE_PREFILL, "decode": ROLE_DECODE, "both": ROLE_BOTH}
_SENT = {"prefill": "prompts", "decode": "answers to write", "both": "prompts, and answers to write"}
_QUESTION_TOKENS = 48
_REFERENCE_PROMPT = range(1, 33)


@dataclass(frozen=True, slots=True)
class UpFlags:
    """The flags of `up`. None is: as the environment says, else the default."""

    model: str
    engine: str | None
    prefill: int
    decode: int
    host: str | None
    http_port: int | None
    grpc_port: int | None
    detach: bool
    question: str | None
    """None asks nothing."""
    dtype: str | None
    served_model_name: str | None
    cores_per_worker: int
    worker_args: str
    router_args: str
    ready_timeout_s: float
    grace_s: float


def up(flags: UpFlags) -> int:
    """Starts and watches over a cluster; see `launch.up.run`. Raises ConfigError for what cannot work."""
    console = Console()
    options = _options(flags)
    environment = child_environment()
    found = devices.detect(environment)
    folder = RunDir(run_dir())
    with folder.claim():
        # Planned a first time only to find mistakes before the model is fetched.
        draft = plan.make(options, found, environment)
        listening = [("--http-port", options.http_port)] if draft.http else []
        ports.require_free(options.host, [*listening, ("--grpc-port", options.grpc_port)])
        if options.engine == "vllm":
            if not devices.has_vllm():
                raise ConfigError(
                    "vLLM is not installed: install twostroke[cpu] or twostroke[gpu], or --engine reference"
                )
            options = replace(options, model=_obtain(options.model, console))
        made = plan.make(options, found, environment)
        question, shown = (None, "") if flags.question is None else _question(flags.question, bool(made.http))
        manner = launching.Manner(
            question=question,
            question_text=shown,
            detach=flags.detach,
            ready_timeout_s=flags.ready_timeout_s,
            grace_s=flags.grace_s,
        )
        return asyncio.run(launching.run(made, folder, manner, console))


def _options(flags: UpFlags) -> plan.UpOptions:
    given = {
        "--host": flags.host,
        "--http-port": flags.http_port,
        "--grpc-port": flags.grpc_port,
        "--model": flags.model or None,
        "--served-model-name": flags.served_model_name,
    }
    router = read(RouterSettings, [f"{flag}={value}" for flag, value in given.items() if value is not None])
    chosen = {"--engine": flags.engine, "--dtype": flags.dtype}
    worker = read(WorkerSettings, [f"{flag}={value}" for flag, value in chosen.items() if value is not None])
    return plan.UpOptions(
        engine=worker.engine,
        model=router.model,
        served_model_name=router.served_model_name,
        prefill=flags.prefill,
        decode=flags.decode,
        host=router.host,
        http_port=router.http_port,
        grpc_port=router.grpc_port,
        dtype=worker.dtype if "dtype" in worker.model_fields_set else "",
        cores_per_worker=flags.cores_per_worker,
        worker_args=_split("--worker-args", flags.worker_args),
        router_args=_split("--router-args", flags.router_args),
    )


def _split(flag: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{flag}: {str(error).lower()} in {text!r}") from error


def _obtain(name: str, console: Console) -> str:
    with Board(console, ["model"]) as board:
        found = model.obtain(name, lambda step: board.show("model", f"{name or model.BUNDLED}: {step}"))
    say(console, f"Model {found}")
    return found


def _question(text: str, reads_text: bool) -> tuple[GenerateRequest, str]:
    if reads_text:
        return ask.chat(text, _QUESTION_TOKENS), text
    shown = f"the token ids {_REFERENCE_PROMPT[0]} to {_REFERENCE_PROMPT[-1]} (this front end reads no text)"
    return ask.tokens(_REFERENCE_PROMPT, _QUESTION_TOKENS), shown


def down(grace_s: float) -> int:
    """Ends what `up` started; nothing running is no error."""
    console = Console()
    names, killed = asyncio.run(ending.down(RunDir(run_dir()), grace_s))
    say(console, f"Ended {', '.join(names)}." if names else f"Nothing runs from {run_dir()}.")
    if killed:
        say(console, f"Had to kill {', '.join(killed)}.", "red")
    return 0


def logs(name: str, follow: bool, lines: int) -> int:
    """Prints logs; with `follow` until interrupted."""
    chosen = logging.choose(RunDir(run_dir()), name)

    def show(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    if follow:
        logging.follow(chosen, lines, show)
    for line in logging.recent(chosen, lines):
        show(line)
    return 0


def status(router: str, as_json: bool) -> int:
    """Prints a router's view of its cluster. Raises UnavailableError when it does not answer."""
    folder = RunDir(run_dir())
    local = None if router else folder.load()
    target = router_address(router)
    view = asyncio.run(cluster.fetch(target, _STATUS_TIMEOUT_S))
    if as_json:
        sys.stdout.write(viewing.as_json(target, view, local) + "\n")
    else:
        viewing.show(Console(), target, view, local)
    return 0


def top(router: str, interval_s: float, limit: int, once: bool) -> int:
    """Shows a router's cluster and requests until interrupted. Raises UnavailableError when it does not answer."""
    asyncio.run(topping.run(Console(), router_address(router), interval_s, limit, once))
    return 0


def certs(folder: str, names: list[str], days: int) -> int:
    """Makes certificates and says how to use them."""
    from twostroke.launch import certs as making

    made = Path(folder).absolute()
    for path in making.make(made, names, days):
        sys.stdout.write(f"{path}\n")
    for holder in ("router", "worker", "client"):
        values = {"tls_ca": "ca.pem", "tls_cert": f"{holder}.pem", "tls_key": f"{holder}-key.pem"}
        group = {name: str(made / file) for name, file in values.items()} | {"tls_server_name": making.SERVER_NAME}
        sys.stdout.write(f"{holder}: TWOSTROKE_RPC='{json.dumps(group)}'\n")
    return 0


def drain(worker: str, router: str) -> int:
    """Lets a worker leave, and says so. Raises what the router raised."""
    requests = asyncio.run(cluster.drain(router_address(router), worker, _STATUS_TIMEOUT_S))
    sys.stdout.write(f"{worker} takes no new requests; {requests} run, and then its process ends\n")
    return 0


def role(worker: str, new_role: str, router: str) -> int:
    """Changes what a worker is sent, and says so. Raises ConfigError for a role that there is not."""
    if new_role not in _ROLES:
        raise ConfigError(f"there is no role {new_role!r}; choose one of {', '.join(_ROLES)}")
    before = asyncio.run(cluster.set_role(router_address(router), worker, _ROLES[new_role], _STATUS_TIMEOUT_S))
    was = next(name for name, value in _ROLES.items() if value == before)
    sys.stdout.write(f"{worker} is sent {_SENT[new_role]} now; its role was {was}\n")
    return 0


def generate(
    prompt: str, router: str, max_tokens: int, raw: bool, tokens: bool, show_timeline: bool, timeout_s: float
) -> int:
    """Streams one answer to stdout. Raises what the router raised."""
    if tokens:
        request = ask.tokens(_token_ids(prompt), max_tokens)
    else:
        request = ask.text(prompt, max_tokens) if raw else ask.chat(prompt, max_tokens)

    def show(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    last = asyncio.run(ask.stream(router_address(router), request, timeout_s, show))
    sys.stdout.write("\n")
    if show_timeline:
        sys.stdout.write("\n".join(["", *timeline.render(last.timeline, last.usage), ""]))
    return 0


def explain(
    prompt: str,
    router: str,
    tokens: bool,
    length: int,
    max_tokens: int | None,
    slo: str,
    priority: int,
    deadline_s: float,
) -> int:
    """Prints where a request would go and why. Raises ConfigError for no prompt, and what the router raised."""
    if bool(prompt) == bool(length):
        raise ConfigError("give a prompt, or --length N for one of N tokens")
    request = ExplainRequest(max_tokens=max_tokens, slo=slo, priority=priority, deadline_ms=round(deadline_s * 1000))
    if length:
        request.prompt_tokens = length
    elif tokens:
        request.tokens.token_ids.extend(_token_ids(prompt))
    else:
        request.text = prompt
    sys.stdout.write(asyncio.run(cluster.explain(router_address(router), request, _STATUS_TIMEOUT_S)).text + "\n")
    return 0


def model_fetch(name: str) -> int:
    """Obtains a model and prints its folder, alone on stdout."""
    router = read(RouterSettings, [f"--model={name}"] if name else [])
    sys.stdout.write(_obtain(router.model, Console(stderr=True)) + "\n")
    return 0


def router_address(router: str) -> str:
    """The named router, else the one that `up` started here, else the one of the settings."""
    if router:
        host, _, port = router.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"--router {router}: write host:port, its gRPC port (50051 unless set)")
        return router
    state = RunDir(run_dir()).load()
    if state is not None:
        return state.grpc
    settings = read(RouterSettings, [])
    return f"{settings.host}:{settings.grpc_port}"


def _token_ids(text: str) -> list[int]:
    try:
        ids = [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise ConfigError(f"--tokens wants numbers separated by commas, not {text!r}") from error
    if not ids or min(ids) < 0:
        raise ConfigError("--tokens wants at least one number, none below 0")
    return ids
