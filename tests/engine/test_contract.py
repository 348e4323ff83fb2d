"""What we rely on in vLLM. An upgrade that moves any of it fails here, and says what moved."""

import inspect

import msgspec
import pytest

pytest.importorskip("vllm", reason="the engine is not installed")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # what vLLM's imports warn of is not ours
]


def test_the_version_is_the_one_that_was_tested() -> None:
    import vllm

    assert vllm.__version__.split("+")[0] == "0.32.0"


def test_every_sampling_field_travels_or_is_refused_by_name() -> None:
    from vllm import SamplingParams

    from twostroke.engine.vllm import sampling

    tables = [
        *sampling.PLAIN_FIELDS,
        *sampling.LIST_FIELDS,
        *sampling.SPECIAL_FIELDS,
        *sampling.FRONT_END_FIELDS,
        *sampling.REFUSED_FIELDS,
    ]
    assert len(tables) == len(set(tables))
    assert {field.name for field in msgspec.structs.fields(SamplingParams)} == set(tables)


def test_every_request_field_travels_or_is_refused_by_name() -> None:
    from vllm.v1.engine import EngineCoreRequest

    from twostroke.router.vllm.cluster_core import _REFUSED

    travels = {
        *("request_id", "prompt_token_ids", "sampling_params", "cache_salt", "priority", "trace_headers"),
        *("reasoning_ended", "reasoning_parser_kwargs", "session_id", "lora_request"),
    }
    # Bookkeeping between vLLM's own processes.
    local = {
        *("arrival_time", "client_index", "current_wave", "external_req_id", "abort_immediately"),
        *("prompt_is_token_ids",),  # only with prompt_embeds, which are refused
    }
    fields = {field.name for field in msgspec.structs.fields(EngineCoreRequest)}
    assert fields == travels | local | set(_REFUSED)


def test_workers_are_given_tokens_and_never_text() -> None:
    """O-18: the router alone renders and tokenizes, so the two strokes cannot read different prompts."""
    from twostroke.v1.engine_pb2 import EngineRequest

    assert EngineRequest.DESCRIPTOR.fields_by_name["prompt_token_ids"].is_repeated
    assert not {"prompt", "text", "messages", "chat"} & set(EngineRequest.DESCRIPTOR.fields_by_name)


def test_sampling_survives_the_wire() -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

    from twostroke.engine.vllm.sampling import from_wire, to_wire

    params = SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        seed=-3,
        max_tokens=99,
        min_tokens=3,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        stop_token_ids=[5, 6],
        ignore_eos=True,
        logprobs=4,
        prompt_logprobs=2,
        logit_bias={7: -1.5},
        allowed_token_ids=[1, 2, 3],
        structured_outputs=StructuredOutputsParams(json={"type": "object"}, disable_any_whitespace=True),
        repetition_detection=RepetitionDetectionParams(3, 1, 4),
        watermarking=False,
    )
    params._eos_token_id = 2
    params._all_stop_token_ids = {2, 5, 6}
    params._bad_words_token_ids = [[8, 9], [10]]
    params.structured_outputs._backend = "xgrammar"
    again = from_wire(to_wire(params))
    ignored = {"detokenize", "structured_outputs", "bad_words", "stop"}
    for field in msgspec.structs.fields(SamplingParams):
        if field.name not in ignored:
            assert getattr(again, field.name) == getattr(params, field.name), field.name
    assert again.structured_outputs.json == '{"type": "object"}'
    assert again.structured_outputs.disable_any_whitespace
    assert again.structured_outputs._backend == "xgrammar"


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("extra_args", {"kv_transfer_params": {}}, "vllm_xargs"),
        ("trace_decode_token_ids", [1], "trace_decode_token_ids"),
        ("routed_experts_prompt_start", 3, "routed_experts_prompt_start"),
        ("prompt_logprob_start", 1, "prompt_logprob_start"),
    ],
)
def test_a_field_that_is_not_served_is_refused_by_name(field: str, value: object, named: str) -> None:
    from vllm import SamplingParams

    from twostroke.engine.vllm.sampling import to_wire
    from twostroke.errors import UnsupportedFieldError

    params = SamplingParams()
    setattr(params, field, value)
    with pytest.raises(UnsupportedFieldError, match=named):
        to_wire(params)


def test_an_empty_dictionary_asks_for_nothing() -> None:
    """As vLLM's responses route sets it."""
    from vllm import SamplingParams

    from twostroke.engine.vllm.sampling import to_wire

    assert to_wire(SamplingParams(extra_args={}, max_tokens=3)).max_tokens == 3


def test_the_core_client_has_the_methods_that_we_stand_in_for() -> None:
    from vllm.v1.engine.core_client import EngineCoreClient

    from twostroke.router.vllm.cluster_core import ClusterCore

    ours = {name for name, _ in inspect.getmembers(ClusterCore, inspect.isfunction) if name.endswith("_async")}
    theirs = {name for name, _ in inspect.getmembers(EngineCoreClient, inspect.isfunction)}
    assert ours - theirs <= {"is_scheduler_paused_async"}
    assert inspect.signature(EngineCoreClient.make_async_mp_client).parameters.keys() >= {"vllm_config", "renderer"}


def test_the_core_client_queues_its_outputs_where_we_add_to_them() -> None:
    from vllm.v1.engine.core_client import AsyncMPClient

    assert "self.outputs_queue = asyncio.Queue[" in inspect.getsource(AsyncMPClient.__init__)


def test_the_stock_connector_has_what_we_change_in_it() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

    source = inspect.getsource(base_worker)
    for name in ("_reqs_to_process", "_reqs_to_send", "nixl_agent_config(num_threads"):
        assert name in source
    assert list(inspect.signature(NixlPullConnector.get_transfer_results).parameters) == ["self", "finished_req_ids"]


def test_queues_are_made_with_the_condition_that_we_put_in_its_place() -> None:
    from vllm.distributed.device_communicators import shm_broadcast

    assert inspect.getsource(shm_broadcast.MessageQueue).count("SpinCondition(") == 2
    waits = inspect.getsource(shm_broadcast.SpinCondition.wait)
    assert "self.last_read + self.busy_loop_s" in waits
    assert list(inspect.signature(shm_broadcast.SpinCondition.wait).parameters) == ["self", "timeout_ms"]
    assert inspect.getsource(shm_broadcast.MessageQueue).count("_spin_condition.wait(timeout_ms=") == 1


def test_the_runner_takes_back_draws_where_we_keep_them_from_it() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    books = inspect.getsource(GPUModelRunner._bookkeeping_sync)
    assert "gen = self.input_batch.generators.get(int(i))" in books
    assert "gen.set_offset(" in books
    assert "self._bookkeeping_sync(" in inspect.getsource(GPUModelRunner.sample_tokens)
    assert "self._sample(" in inspect.getsource(GPUModelRunner.sample_tokens)


def test_forced_tokens_leave_one_choice_and_then_let_go() -> None:
    import torch
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

    from twostroke.engine.vllm.forced_tokens import FORCED_TOKENS_ARG, ForcedTokens

    processor = ForcedTokens(None, torch.device("cpu"), False)
    chosen: list[int] = []
    forced = SamplingParams(extra_args={FORCED_TOKENS_ARG: [3, 1]})
    processor.update_state(
        BatchUpdate(2, removed=[], added=[(0, SamplingParams(), None, []), (1, forced, None, chosen)], moved=[])
    )

    def choices(row: int) -> list[int]:
        logits = processor.apply(torch.tensor([[0.0, 1.0, 5.0, 2.0]] * 2))
        assert logits[1 - row].tolist() == [0.0, 1.0, 5.0, 2.0], "other rows are left alone"
        return torch.isfinite(logits[row]).nonzero().flatten().tolist()

    assert choices(1) == [3]
    chosen.append(3)
    processor.update_state(BatchUpdate(2, removed=[], added=[], moved=[(0, 1, MoveDirectionality.SWAP)]))
    assert choices(0) == [1]
    chosen.append(1)
    assert choices(0) == [0, 1, 2, 3]
    processor.update_state(BatchUpdate(2, removed=[0], added=[], moved=[]))
    assert choices(0) == [0, 1, 2, 3]
