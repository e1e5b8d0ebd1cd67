"""From what routers ask to vLLM's sampling parameters: names, seeds, forms, what is refused. vLLM is not needed."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest

from asyncfabric.actors import Identity, Reference
from asyncfabric_services.nodes.messages import Generate
from asyncfabric_services.nodes.vllm.arguments import read_arguments, transfer_config
from asyncfabric_services.nodes.vllm.translation import (
    KEEP,
    prefill_arguments,
    read_transfer,
    sampling_arguments,
    streamed_tokens,
    trace_headers,
)
from asyncfabric_services.runner.sampling import Sampling


def request(answered: int = 0, **fields: Any) -> Generate:
    packed = msgspec.json.encode(fields) if fields else b""
    reply = Reference(Identity("router", 1), "attempts", 0)
    return Generate("a/1", [1, 2, 3], 7, answered, Sampling(0.5, 0.9, 40), 9.0, [], reply, fields=packed)


def test_the_router_s_own_fields_and_the_transfer_become_sampling_parameters() -> None:
    assert sampling_arguments(request(), {"do_remote_prefill": True}) == {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 40,
        "max_tokens": 7,
        "detokenize": False,
        "extra_args": {"kv_transfer_params": {"do_remote_prefill": True}},
    }
    assert prefill_arguments()["extra_args"] == {"kv_transfer_params": KEEP}
    assert prefill_arguments()["max_tokens"] == 1


def test_an_answer_that_goes_on_draws_from_another_seed() -> None:
    assert sampling_arguments(request(answered=5), {})["seed"] == 45


def test_fields_that_vllm_has_pass_and_others_are_refused_by_name() -> None:
    passed = sampling_arguments(request(top_k=5, logit_bias={"7": -1}, presence_penalty=0.5), {})
    assert (passed["top_k"], passed["logit_bias"], passed["presence_penalty"]) == (5, {7: -1.0}, 0.5)
    with pytest.raises(ValueError, match=r"'flavour'.*min_p"):
        sampling_arguments(request(flavour=1), {})
    with pytest.raises(ValueError, match="'seed'"):
        sampling_arguments(request(seed=1), {})


def test_a_form_becomes_a_grammar_which_cannot_go_on_at_another_node() -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    assert sampling_arguments(request(response_format=schema), {})["structured_outputs"] == {
        "json": '{"type": "object"}'
    }
    assert "structured_outputs" not in sampling_arguments(request(response_format={"type": "text"}), {})
    with pytest.raises(ValueError, match="response_format"):
        sampling_arguments(request(response_format={"type": "verse"}), {})
    with pytest.raises(ValueError, match="cannot go on"):
        sampling_arguments(request(answered=1, response_format={"type": "json_object"}), {})


def test_a_trace_context_becomes_headers() -> None:
    assert trace_headers("") is None
    assert trace_headers("00-a-b-01") == {"traceparent": "00-a-b-01"}
    assert trace_headers("00-a-b-01 v=1,w=2") == {"traceparent": "00-a-b-01", "tracestate": "v=1,w=2"}


def test_the_token_that_ends_an_answer_is_none_of_it() -> None:
    assert streamed_tokens([4, 5, 2], "stop", None) == [4, 5]
    assert streamed_tokens([4, 5, 2], "stop", 2) == [4, 5]
    assert streamed_tokens([4, 5], "length", None) == [4, 5]
    assert streamed_tokens([4, 5], None, None) == [4, 5]


def test_engine_arguments_are_a_command_line_or_json() -> None:
    assert read_arguments("--max-model-len 4096 --enforce-eager") == ["--max-model-len", "4096", "--enforce-eager"]
    assert read_arguments('{"max_model_len": 4096}') == {"max_model_len": 4096}
    assert read_arguments("") == []
    with pytest.raises(ValueError, match="--model-path"):
        read_arguments('{"model": "x"}')
    with pytest.raises(ValueError, match="Expecting"):
        read_arguments("{")


def test_the_connector_is_ours_and_the_role_is_the_node_s() -> None:
    found = transfer_config("decode", "D1", {"kv_connector_extra_config": {"lease_s": 9}})
    assert found["kv_connector_module_path"] == "asyncfabric.integrations.vllm"
    more = {"lease_s": 9, "ends_with_pid": os.getpid()}
    assert (found["kv_role"], found["kv_connector_extra_config"]) == ("kv_consumer", more)
    assert transfer_config("prefill", "P1")["kv_role"] == "kv_producer"
    assert read_transfer(b'{"do_remote_prefill":true}') == {"do_remote_prefill": True}
    with pytest.raises(ValueError, match="cannot be read"):
        read_transfer(b"[]")
