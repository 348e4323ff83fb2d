"""LoRA adapters, and reasoning, on both pools, against a plain vLLM engine that has the same."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.conftest import MAX_MODEL_LEN_TOKENS, Engines, started
from twostroke.bench.parity.adapter import RANK, write_adapter
from twostroke.bench.parity.row import MODEL, completion, story, tokens_of
from twostroke.bench.parity.run import Outcome, ask, ask_all
from twostroke.bench.parity.systems import with_adapters_and_reasoning
from twostroke.bench.parity.table import second_rows
from twostroke.bench.parity.table_lora import ADAPTERS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

ROWS = second_rows(MAX_MODEL_LEN_TOKENS)


@dataclass(frozen=True)
class Lora:
    """Engines that serve the adapters "a" and "b", and the folders of those."""

    engines: Engines
    folders: dict[str, Path]


@pytest.fixture(scope="module")
def lora(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lora]:
    folder = tmp_path_factory.mktemp("lora")
    folders = {name: write_adapter(folder / name, Path(model), seed) for seed, name in enumerate(ADAPTERS)}
    with started(model, folder, with_adapters_and_reasoning(folders)) as engines:
        yield Lora(engines, folders)


@pytest.fixture(scope="module")
def outcomes(lora: Lora) -> dict[str, Outcome]:
    found = asyncio.run(ask_all(ROWS, lora.engines.one, lora.engines.two, print))
    return {outcome.row.name: outcome for outcome in found}


@pytest.mark.parametrize("name", [row.name for row in ROWS])
def test_adapters_answer_as_one_engine_and_share_no_kv(name: str, outcomes: dict[str, Outcome]) -> None:
    """O-12: the rows say how many cached tokens each answer may have. O-21, O-24: and reasoning is parsed alike."""
    assert outcomes[name].problems == []


def test_adapters_change_the_answer(outcomes: dict[str, Outcome]) -> None:
    answers = [tuple(tokens_of(outcomes[name].two)) for name in ("model alone", "adapter a", "adapter b")]
    assert len(set(answers)) == 3


def test_adapters_are_listed_as_models(lora: Lora, outcomes: dict[str, Outcome]) -> None:
    listed = httpx.get(_url(lora, "/v1/models")).json()["data"]
    assert {"a", "b", MODEL} <= {model["id"] for model in listed}
    assert next(model for model in listed if model["id"] == "a")["root"] == str(lora.folders["a"])


def test_an_adapter_that_is_replaced_in_place_hits_nothing_of_its_predecessor(
    lora: Lora, outcomes: dict[str, Outcome], tmp_path: Path
) -> None:
    """O-13: same name, same folder, other weights; asked twice before and twice after."""
    place = tmp_path / "x"
    shutil.copytree(lora.folders["a"], place)
    assert _post(lora, "/v1/load_lora_adapter", lora_name="x", lora_path=str(place)).status_code == 200
    before = [_answer(lora, "x") for _ in range(2)]
    shutil.copytree(lora.folders["b"], place, dirs_exist_ok=True)
    again = _post(lora, "/v1/load_lora_adapter", lora_name="x", lora_path=str(place), load_inplace=True)
    assert again.status_code == 200, again.text
    after = [_answer(lora, "x") for _ in range(2)]
    a, b = (tokens_of(outcomes[f"adapter {name}"].one) for name in ADAPTERS)
    assert [tokens_of(answer) for answer in before + after] == [a, a, b, b]
    hits = [answer["usage"]["prompt_tokens_details"] for answer in before + after]
    assert [(found or {}).get("cached_tokens") or 0 for found in hits] == [0, 256, 0, 256]
    assert _post(lora, "/v1/unload_lora_adapter", lora_name="x").status_code == 200
    assert _answer(lora, "x")["http_status"] == 404


def test_an_adapter_that_is_not_there_is_a_404(lora: Lora) -> None:
    refused = _post(lora, "/v1/load_lora_adapter", lora_name="nothing", lora_path="/nowhere")
    assert refused.status_code == 404, refused.text
    assert "nothing" in refused.text


def test_an_adapter_of_too_high_a_rank_is_refused_and_hurts_nobody(lora: Lora, model: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "big", Path(model), 9)
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"r": 16 * RANK}))
    assert _post(lora, "/v1/load_lora_adapter", lora_name="big", lora_path=str(folder)).status_code == 200
    refused = _answer(lora, "big")
    assert refused["http_status"] == 400
    assert "rank" in refused["error"]["message"]
    assert _answer(lora, "a")["http_status"] == 200


def test_files_that_changed_without_being_loaded_again_are_refused(lora: Lora, tmp_path: Path) -> None:
    """The router's version and the worker's must be one."""
    place = tmp_path / "y"
    shutil.copytree(lora.folders["a"], place)
    assert _post(lora, "/v1/load_lora_adapter", lora_name="y", lora_path=str(place)).status_code == 200
    shutil.copytree(lora.folders["b"], place, dirs_exist_ok=True)
    refused = _answer(lora, "y")
    assert refused["http_status"] == 503
    assert "load it again" in refused["error"]["message"]


def _answer(lora: Lora, adapter: str) -> dict[str, Any]:
    row = completion(adapter, story(300, 30), model=adapter, max_tokens=8)
    return asyncio.run(ask(lora.engines.two, row))


def _url(lora: Lora, path: str) -> str:
    host, port = lora.engines.two
    return f"http://{host}:{port}{path}"


def _post(lora: Lora, path: str, **body: Any) -> httpx.Response:
    return httpx.post(_url(lora, path), json=body, timeout=60)
