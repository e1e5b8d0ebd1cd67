"""What torch's wrappers hold becomes placements, and replicas filled by plans equal those that torch loads.

In one process: each rank is played in turn by a process group that sends nothing, since wrappers cut parameters
without speaking.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

torch = pytest.importorskip("torch", reason="NOT COMPARED WITH TORCH: it is not installed")
pytest.importorskip("transformers", reason="NO CAUSAL MODELS: transformers is not installed")
fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg", reason="this torch has no fake group")

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor  # noqa: E402
from trained import PROMPTS, Filled, config_of, model_of  # noqa: E402
from transformers import GemmaConfig, GraniteConfig, LlamaConfig, MistralConfig, MistralForCausalLM  # noqa: E402

from asyncfabric.weights import ReplicaLayout  # noqa: E402
from asyncfabric.weights.plan.causal import card_of, causal_moves  # noqa: E402
from asyncfabric.weights.plan.holdings import (  # noqa: E402
    Holding,
    LocalTensor,
    held_by,
)
from asyncfabric.weights.tensors import arrays_of, holdings, placement_of, stored, tensor_over  # noqa: E402
from asyncfabric_services.rollout.fused_model import FusedModel  # noqa: E402
from asyncfabric_services.rollout.usual import load_usual, quantise  # noqa: E402
from asyncfabric_services.trainer.checkpoints import load_version, restore, save_version  # noqa: E402
from asyncfabric_services.trainer.training import Training  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning:torch")]
BF16, FP8 = False, True


@contextmanager
def acting(rank: int, ranks: int) -> Iterator[None]:
    """Be one rank of a world whose other ranks send nothing."""
    dist.init_process_group("fake", store=fake.FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def held(kind: str, how: str, ranks: int, tp: int = 1, dtype: Any = None) -> tuple[Any, Any, Any]:
    """Return (what each rank reports, its arrays, the whole state) of a model that is spread."""
    reported, arrays = [], []
    for rank in range(ranks):
        with acting(rank, ranks):
            training = Training(model_of(kind).to(dtype or torch.float32), how, tp)
            reported.append(training.holdings())
            arrays.append({name: array.copy() for name, array in training.arrays().items()})
    whole = {name: tensor.detach() for name, tensor in model_of(kind).to(dtype or torch.float32).named_parameters()}
    return reported, arrays, whole


@pytest.mark.parametrize(
    ("kind", "how", "ranks", "tp", "layouts"),
    [
        ("llama", "fsdp", 4, 1, [(1, 1, BF16)]),
        ("llama", "tp", 4, 2, [(2, 2, FP8)]),
        ("qwen", "ep", 2, 1, [(4, 2, FP8)]),
        ("qwen", "ep", 4, 1, [(2, 1, BF16)]),
        ("mixtral", "fsdp", 3, 1, [(2, 1, BF16)]),
        ("tied", "fsdp", 2, 1, [(2, 2, FP8)]),
    ],
)
def test_a_filled_replica_equals_one_that_was_loaded(kind: str, how: str, ranks: int, tp: int, layouts: Any) -> None:
    reported, arrays, whole = held(kind, how, ranks, tp)
    for layout in layouts:
        Filled(kind, reported, ReplicaLayout(ranks=layout[0], tp=layout[1], fp8=layout[2])).check(arrays, whole)


def test_dealt_experts_go_over_a_fabric(tmp_path: Path) -> None:
    reported, arrays, whole = held("qwen", "ep", 2)
    for number, layout in enumerate((ReplicaLayout(ranks=2, fp8=True), ReplicaLayout(ranks=4, tp=2))):
        trio.run(Filled("qwen", reported, layout).over_fabric, [(arrays, whole)], tmp_path / f"log-{number}")


def test_parameters_in_bfloat16_go_bit_by_bit() -> None:
    reported, arrays, whole = held("llama", "fsdp", 2, dtype=torch.bfloat16)
    assert {one.dtype for each in reported for one in each} == {"bfloat16"}
    Filled("llama", reported, ReplicaLayout(ranks=2, tp=2)).check(arrays, whole)


def test_experts_that_are_parameters_of_their_own_are_stacked() -> None:
    """As transformers 4 and most trainers name them; each rank keeps some of the experts whole."""
    whole = {name: tensor.detach() for name, tensor in model_of("qwen").named_parameters()}
    apart = {}
    for name, tensor in whole.items():
        root, _, last = name.rpartition(".")
        if last not in ("gate_up_proj", "down_proj"):
            apart[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            names = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
            for one, part in zip(names, matrix.chunk(len(names)), strict=True):
                apart[f"{root}.{expert}.{one}.weight"] = part

    def mine(name: str, rank: int) -> bool:
        return "experts." not in name or int(name.split("experts.")[1].split(".")[0]) // 4 == rank

    states = [{name: tensor for name, tensor in apart.items() if mine(name, rank)} for rank in range(2)]
    reported = [holdings(state, rank) for rank, state in enumerate(states)]
    arrays = [arrays_of(state, rank) for rank, state in enumerate(states)]
    Filled("qwen", reported, ReplicaLayout(ranks=2, tp=1, fp8=True)).check(arrays, whole)


def test_a_checkpoint_of_a_tied_model_goes_back_into_it(tmp_path: Path) -> None:
    made, other = model_of("tied", seed=1), model_of("tied", seed=2)
    save_version(tmp_path, 1, {name: tensor.detach() for name, tensor in made.named_parameters()})
    restore(other, load_version(tmp_path, 1))
    assert all(torch.equal(one, two) for one, two in zip(made.parameters(), other.parameters(), strict=True))
    assert other.lm_head.weight is other.model.embed_tokens.weight
    with pytest.raises(ValueError, match=r"another model: only one of the two has lm_head\.weight"):
        restore(model_of("llama"), load_version(tmp_path, 1))


@pytest.mark.parametrize("kind", ["llama", "qwen", "mixtral", "tied"])
def test_the_fused_model_computes_what_transformers_does(kind: str) -> None:
    """In float32, where only the order of sums differs; so the fused model is a model, not just equal to itself."""
    model = model_of(kind).eval()
    whole = {name: tensor.detach() for name, tensor in model.named_parameters()}
    with torch.no_grad():
        expected = model(input_ids=PROMPTS, use_cache=False).logits
    for ranks, tp in ((1, 1), (2, 2), (4, 2)):
        layout = ReplicaLayout(ranks=ranks, tp=tp)
        wide = [
            {name: tensor.double().float() for name, tensor in rank.items()} for rank in loaded(whole, kind, layout)
        ]
        got = FusedModel(config_of(kind), layout).logits(wide, PROMPTS)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_models_that_are_computed_otherwise_are_refused() -> None:
    """Their parameters have the names of the others, so nothing but their answers would have shown it."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 1}
    for config, text in [
        (GemmaConfig(**sizes), "do not compute models of type 'gemma'"),
        (GraniteConfig(**sizes), "do not compute models of type 'granite'"),
        (LlamaConfig(**sizes, hidden_act="gelu"), "silu between the matrices of a layer, not 'gelu'"),
    ]:
        with pytest.raises(ValueError, match=text):
            FusedModel(config, ReplicaLayout())
    narrow = MistralConfig(**sizes, num_key_value_heads=2, vocab_size=256, sliding_window=8)
    whole = {name: tensor.detach() for name, tensor in MistralForCausalLM(narrow).named_parameters()}
    tensors = load_usual(whole, card_of(narrow), ReplicaLayout())
    model = FusedModel(narrow, ReplicaLayout())
    assert model.logits(tensors, PROMPTS[:, :8]).shape == (4, 8, 256)
    with pytest.raises(ValueError, match="9 tokens are more than the window of 8"):
        model.logits(tensors, PROMPTS[:, :9])


def loaded(whole: Any, kind: str, layout: ReplicaLayout) -> Any:
    """As `load_usual`, but float32 stays float32."""
    as_double = {name: tensor.double() for name, tensor in whole.items()}
    return load_usual(as_double, card_of(config_of(kind)), layout)


def test_eight_bits_are_near_the_model() -> None:
    whole = {name: tensor.detach() for name, tensor in model_of("llama").named_parameters()}
    layout, card = ReplicaLayout(fp8=True), card_of(config_of("llama"))
    model = FusedModel(config_of("llama"), layout)
    exact = model.logits(load_usual(whole, card, ReplicaLayout()), PROMPTS)
    eight = model.logits(load_usual(whole, card, layout), PROMPTS)
    assert 0 < float((eight - exact).norm() / exact.norm()) < 0.2


def test_a_zero_block_and_a_ragged_edge_quantise() -> None:
    weight = torch.zeros(130, 200)
    weight[129, 199] = 3.0
    eight, scales = quantise(weight)
    assert scales.shape == (2, 2) and bool((scales > 0).all())
    assert (
        float(eight.float()[129, 199] * scales[1, 1]) == pytest.approx(3.0) and float(eight.float().abs().sum()) == 448
    )


def test_boxes_of_meshes_are_read_from_tensors() -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    cases = [([Shard(0), Shard(1)], False), ([Replicate(), Shard(0)], False), ([Shard(0), Shard(0)], False)]
    for how, _ in cases:
        boxes = {}
        for rank in range(4):
            with acting(rank, 4):
                tensor = distribute_tensor(whole, init_device_mesh("cpu", (2, 2)), how, src_data_rank=None)
                placement = placement_of(tensor)
                row = placement.row_of(rank)
                start, size = placement.starts[row], placement.sizes[row]
                part = whole[start[0] : start[0] + size[0], start[1] : start[1] + size[1]]
                assert np.array_equal(stored(tensor), part.numpy()), (how, rank)
                boxes[rank] = placement.digest
        assert len(set(boxes.values())) == 1, "each rank reports the same of all"


def test_what_cannot_be_reported_is_refused() -> None:
    with acting(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        partial = torch.distributed.tensor.DTensor.from_local(torch.zeros(4), mesh, [Partial()], run_check=False)
        with pytest.raises(ValueError, match="shards and copies only"):
            placement_of(partial)
        shape, stride = torch.Size([6]), (1,)
        odd = torch.distributed.tensor.DTensor.from_local(
            torch.zeros(5), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
        )
        with pytest.raises(ValueError, match=r"rank 0 holds \(5,\).*which should be \(3,\)"):
            placement_of(odd)
    with pytest.raises(ValueError, match="weights are of"):
        stored(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="not contiguous"):
        arrays_of({"x": torch.zeros(4, 4).t()[:, :2]}, 0)
    with pytest.raises(ValueError, match="needs 8 bytes, got 7"):
        tensor_over(np.zeros(7, np.uint8), LocalTensor("bfloat16", (4,)))


def test_no_copy_is_made() -> None:
    weight = torch.ones(4, 6, dtype=torch.bfloat16)
    array = stored(weight)
    assert array.ctypes.data == weight.data_ptr() and array.dtype == np.dtype("<u2")
    memory = np.zeros(48, np.uint8)
    tensor = tensor_over(memory, LocalTensor("bfloat16", (4, 6)))
    tensor.copy_(weight)
    assert memory.tobytes() == array.tobytes()


def test_holdings_that_contradict_each_other_are_refused() -> None:
    one = Holding("w", "float32", (4, 4), (0, 0), (2, 4))
    other = Holding("w", "float32", (4, 8), (2, 0), (2, 8))
    with pytest.raises(ValueError, match="w: rank 1 has"):
        held_by([[one], [other]])
    with pytest.raises(ValueError, match="rank 0 reports it twice"):
        held_by([[one, one]])
    with pytest.raises(ValueError, match=r"model\.layers\.0\.strange\.weight: no known parameter"):
        causal_moves(
            held_by([[Holding("model.layers.0.strange.weight", "float32", (4,), (0,), (4,))]]),
            card_of(config_of("llama")),
            ReplicaLayout(),
        )
