"""Every model type that the runner accepts, against `generate` of transformers and in company; the others are refused.

Checkpoints are tiny and random, windows are of 24 tokens, and most prompts are longer than one.
"""

from __future__ import annotations

from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runner needs torch")
pytest.importorskip("transformers", reason="the runner needs transformers")

from runner_cases import prompt_of, table_of  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from transformers import (  # noqa: E402
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from transformers.utils import logging  # noqa: E402

from asyncfabric_services.nodes.router_service import card_of  # noqa: E402
from asyncfabric_services.router.local_service import load_named  # noqa: E402
from asyncfabric_services.router.server import StartError  # noqa: E402
from asyncfabric_services.runner.batch import TokenSpan  # noqa: E402
from asyncfabric_services.runner.model import LoadedModel, ModelChoice, load_model  # noqa: E402
from asyncfabric_services.runner.runner import Runner  # noqa: E402
from asyncfabric_services.runner.supported import (  # noqa: E402
    TYPES,
    WINDOWED,
    WITHOUT_EFFECT,
    refuse_arguments,
    refuse_unsupported,
)
from asyncfabric_services.settings.schema import ModelSection, Settings  # noqa: E402

pytestmark = pytest.mark.slow
WINDOW = 24  # longer than a tile and no multiple of one
LENGTHS = (5, 30, 75)
ANSWER = 8
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SPARSE = {"mixtral": EXPERTS, "qwen3_moe": EXPERTS, "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 24}}
OWN_WINDOW = {"sliding_window": WINDOW}
SWITCHED_WINDOW = OWN_WINDOW | {"use_sliding_window": True}
WINDOWS: dict[str, dict[str, Any]] = {
    "qwen2": SWITCHED_WINDOW | {"max_window_layers": 1},
    "qwen3": SWITCHED_WINDOW | {"max_window_layers": 1},
    "qwen3_moe": SWITCHED_WINDOW,
    "smollm3": SWITCHED_WINDOW | {"no_rope_layers": [1, 0]},
}
CASES = [(kind, False) for kind in sorted(TYPES)] + [(kind, True) for kind in sorted(WINDOWED)]


def config_of(kind: str, *, windowed: bool) -> Any:
    window = WINDOWS.get(kind, OWN_WINDOW) if windowed else {"sliding_window": None} if kind in WINDOWED else {}
    return AutoConfig.for_model(kind, **(SIZES | SPARSE.get(kind, {}) | window))


def save_checkpoint(folder: Path, config: Any) -> Any:
    """Save a model whose answers depend on the whole prompt; return it."""
    logging.disable_progress_bar()
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    vocabulary = {f"<{token}>": token for token in range(256)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return model


def runner_over(loaded: LoadedModel) -> Runner:
    memory = torch.full((loaded.shape.pool_bytes(64),), 255, dtype=torch.uint8)
    return Runner(loaded, loaded.shape.view(memory, 64))


def answer(runner: Runner, prompt: list[int]) -> list[int]:
    table = table_of(len(prompt) + ANSWER, 16, pages=64)
    stated = [int(runner.prefill(prompt, table, chunk_tokens=20).argmax())]
    while len(stated) < ANSWER:
        stated.append(int(runner.step([TokenSpan(stated[-1:], len(prompt) + len(stated) - 1, table)])[0].argmax()))
    return stated


@pytest.mark.parametrize(("kind", "windowed"), CASES)
def test_each_type_answers_as_transformers_does_alone_and_in_company(kind: str, windowed: bool, tmp_path: Path) -> None:
    plain = save_checkpoint(tmp_path, config_of(kind, windowed=windowed))
    runner = runner_over(load_model(ModelChoice(path=tmp_path), page_tokens=16))
    answers = set()
    for length in LENGTHS:
        prompt = prompt_of(length)
        expected = plain.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=ANSWER)[0, length:].tolist()
        assert answer(runner, prompt) == expected
        answers.add(tuple(expected))
    assert len(answers) == len(LENGTHS), "the answers do not depend on the prompt: nothing was compared"
    prompt, table = prompt_of(75), list(range(10))
    whole = runner.prefill(prompt, table, chunk_tokens=100)
    assert torch.equal(runner.prefill(prompt, table, chunk_tokens=7), whole)
    last = TokenSpan(prompt[-1:], len(prompt) - 1, table)
    assert torch.equal(runner.step([last])[0], whole)
    assert torch.equal(runner.step([TokenSpan([3], 0, [20]), last, TokenSpan(prompt[:33], 0, [21, 22, 23])])[1], whole)


def test_a_window_changes_the_answers_of_these_models() -> None:
    """Or the cases with a window would prove nothing."""
    config = config_of("mistral", windowed=True)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).eval()
    prompt = torch.tensor([prompt_of(75)])
    with torch.inference_mode():
        narrow = model(prompt).logits[0, -1]
        model.config.sliding_window = None
        assert not torch.allclose(model(prompt).logits[0, -1], narrow, atol=1e-3)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (AutoConfig.for_model("deepseek_v3"), "models of type 'deepseek_v3', only gemma"),
        (AutoConfig.for_model("bloom"), "models of type 'bloom'"),
        (AutoConfig.for_model("gpt_oss"), "models of type 'gpt_oss'"),
        (AutoConfig.for_model("gemma2"), "models of type 'gemma2'"),
        (AutoConfig.for_model("llama4"), "models of type 'llama4'"),
        (LlamaConfig(sliding_window=128), "the sliding window of models of type 'llama'"),
        (
            AutoConfig.for_model("qwen2_moe", use_sliding_window=True),
            "the sliding window of models of type 'qwen2_moe'",
        ),
        (Qwen2Config(num_hidden_layers=1, layer_types=["chunked_attention"]), "layers of chunked_attention"),
        (LlamaConfig(quantization_config={"quant_method": "fp8"}), "quantized checkpoints"),
        (
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
            "rope type 'dynamic'",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_every_other_checkpoint_is_refused_by_name_with_what_to_do(config: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        refuse_unsupported(config)
    assert "serve this one with an engine that computes it" in str(caught.value)


def test_a_checkpoint_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    folder = save_config(tmp_path, AutoConfig.for_model("deepseek_v3"))  # there are no weights in it
    with pytest.raises(ValueError, match="type 'deepseek_v3'"):
        load_model(ModelChoice(path=folder), page_tokens=16)


def test_an_argument_that_attention_does_not_compute_is_refused_by_name() -> None:
    refuse_arguments(dict.fromkeys(WITHOUT_EFFECT, 1) | {"s_aux": None})
    with pytest.raises(ValueError, match="attention does not compute s_aux, softcap"):
        refuse_arguments({"softcap": 30.0, "s_aux": torch.zeros(2), "dropout": 0.0})


def test_a_runner_is_refused_for_a_model_with_such_an_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later transformers may give attention one argument more: a token is computed at start, before a client asks."""
    save_checkpoint(tmp_path, config_of("llama", windowed=False))
    loaded = load_model(ModelChoice(path=tmp_path), page_tokens=16)
    attention = type(loaded.model.model.layers[0].self_attn)
    monkeypatch.setattr(attention, "forward", partialmethod(attention.forward, s_aux=torch.zeros(4)))
    with pytest.raises(ValueError, match="does not compute s_aux"):
        runner_over(loaded)


@pytest.mark.parametrize("start", ["serve local, prefill, decode", "serve router"])
def test_a_node_does_not_start_with_such_a_checkpoint(start: str, tmp_path: Path) -> None:
    section = ModelSection(path=save_config(tmp_path, AutoConfig.for_model("deepseek_v3")))
    with pytest.raises(
        StartError, match="the model cannot be loaded: the runner does not compute models of type 'deep"
    ):
        card_of(section) if start == "serve router" else load_named(Settings(model=section))


def save_config(folder: Path, config: Any) -> Path:
    config.save_pretrained(folder)
    return folder
