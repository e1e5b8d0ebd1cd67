"""The paged cache against the cache of transformers: same bits for any page and chunk size, and no bug goes unseen."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the demo needs torch")
pytest.importorskip("transformers", reason="the demo needs transformers")

from transformers.cache_utils import DynamicCache  # noqa: E402

from asyncfabric_services.demo.pair.generation import decode, prefill  # noqa: E402
from asyncfabric_services.demo.pair.model import PairModel, load_model  # noqa: E402
from asyncfabric_services.demo.pair.node import poison  # noqa: E402
from asyncfabric_services.demo.pair.paged_cache import PairPagedCache  # noqa: E402
from asyncfabric_services.demo.pair.verdict import Continuation, compare  # noqa: E402
from asyncfabric_services.demo.settings import DemoSettings  # noqa: E402
from asyncfabric_services.runner.runner import chunks  # noqa: E402

NEW_TOKENS = 8
PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(70)]


def load(page_tokens: int) -> PairModel:
    return load_model(DemoSettings(layers=2, hidden=64, page_tokens=page_tokens))


def make_pool(loaded: PairModel, pages: int = 96) -> Any:
    """Return poisoned pages as the tensor of a KvPool has them."""
    layout = loaded.layout
    pool = torch.empty((layout.layers, pages, *layout.page_shape), dtype=getattr(torch, layout.dtype))
    poison(pool, range(pages))
    return pool


def lease(seed: int, count: int) -> list[int]:
    return random.Random(seed).sample(range(96), count)


def reference(loaded: PairModel, prompt: list[int], chunk: int) -> tuple[Continuation, Any]:
    cache = DynamicCache(config=loaded.model.config)
    logits = prefill(loaded.model, prompt, cache, chunk)
    return decode(loaded.model, cache, logits, NEW_TOKENS), cache


def move(source: Any, target: Any, ours: list[int], theirs: list[int]) -> None:
    """Do what the fabric does: copy whole pages from ids to other ids."""
    for mine, yours in zip(ours, theirs, strict=True):
        target[:, yours] = source[:, mine]


@pytest.mark.parametrize("page_tokens", [1, 7, 16])
@pytest.mark.parametrize("length", [1, 7, 48, 70])
@pytest.mark.parametrize("chunk", [0, 5, 32])
def test_prefill_in_one_pool_and_decode_in_another_give_the_same_bits(
    page_tokens: int, length: int, chunk: int
) -> None:
    loaded = load(page_tokens)
    layout, prompt = loaded.layout, PROMPT[:length]
    here, there = make_pool(loaded), make_pool(loaded)
    ours = lease(1, layout.pages_for(length))
    theirs = lease(2, layout.pages_for(length + NEW_TOKENS - 1))
    events: list[tuple[int, int, int]] = []
    written = PairPagedCache(here, ours, on_written=lambda *event: events.append(event))
    logits = prefill(loaded.model, prompt, written, chunk)
    spans = list(chunks(length, chunk or length))
    assert events == [(layer, start, end) for start, end in spans for layer in range(layout.layers)]
    move(here, there, ours, theirs[: len(ours)])
    cache = PairPagedCache(there, theirs, length=length)
    streamed = decode(loaded.model, cache, logits, NEW_TOKENS)
    expected, dynamic = reference(loaded, prompt, chunk)
    assert compare(streamed, expected, pages_equal=True).differences == ()
    for paged, plain in zip(cache.paged_layers, dynamic.layers, strict=True):
        keys, values = paged.gather(paged.length)
        assert torch.equal(keys, plain.keys)
        assert torch.equal(values, plain.values)


def test_one_missing_page_is_seen() -> None:
    loaded = load(16)
    prompt = PROMPT[:64]
    here, there = make_pool(loaded), make_pool(loaded)
    ours, theirs = lease(1, 4), lease(2, 5)
    logits = prefill(loaded.model, prompt, PairPagedCache(here, ours), 0)
    expected, _ = reference(loaded, prompt, 0)
    for missing in range(4):
        poison(there, theirs)
        kept = [index for index in range(4) if index != missing]
        move(here, there, [ours[i] for i in kept], [theirs[i] for i in kept])
        streamed = decode(loaded.model, PairPagedCache(there, theirs, length=64), logits, NEW_TOKENS)
        assert not compare(streamed, expected, pages_equal=True).identical


def test_two_swapped_pages_are_seen() -> None:
    loaded = load(16)
    prompt = PROMPT[:64]
    here, there = make_pool(loaded), make_pool(loaded)
    ours, theirs = lease(1, 4), lease(2, 5)
    logits = prefill(loaded.model, prompt, PairPagedCache(here, ours), 0)
    move(here, there, ours, [theirs[1], theirs[0], theirs[2], theirs[3]])
    streamed = decode(loaded.model, PairPagedCache(there, theirs, length=64), logits, NEW_TOKENS)
    expected, _ = reference(loaded, prompt, 0)
    assert not compare(streamed, expected, pages_equal=True).identical


def test_the_random_model_states_something_else_for_each_prompt() -> None:
    loaded = load(16)
    answers = {reference(loaded, PROMPT[:length], 0)[0].tokens for length in (1, 7, 48, 70)}
    assert len(answers) == 4
    assert all(len(set(tokens)) > 2 for tokens in answers)


def test_seeds_make_different_weights_and_name_them() -> None:
    ours, theirs = load(16).layout, load_model(DemoSettings(layers=2, hidden=64, seed=1)).layout
    assert (ours.difference(theirs) or "").startswith("model: ")


def test_tokens_beyond_the_lease_are_refused() -> None:
    loaded = load(16)
    pool = make_pool(loaded)
    cache = PairPagedCache(pool, lease(1, 1))
    with pytest.raises(ValueError, match="token 19 is beyond the 1 leased pages of 16 tokens"):
        prefill(loaded.model, PROMPT[:20], cache, 0)


def test_crop_forgets_the_last_tokens_and_reset_all() -> None:
    loaded = load(16)
    pool = make_pool(loaded)
    cache = PairPagedCache(pool, lease(1, 4))
    first = prefill(loaded.model, PROMPT[:20], cache, 0)
    prefill(loaded.model, PROMPT[20:30], cache, 0)
    cache.crop(-11)
    assert cache.get_seq_length() == 19
    again = prefill(loaded.model, PROMPT[19:20], cache, 0)
    assert torch.allclose(first, again, atol=1e-4)
    with pytest.raises(ValueError, match="tokens_to_remove"):
        cache.crop(-21)
    cache.reset()
    assert cache.get_seq_length() == 0
