"""Tokens to text and back, and the choice of tokens: pure parts of the runner."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch", reason="the runner needs torch")
pytest.importorskip("transformers", reason="the runner needs transformers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from asyncfabric_services.runner.choice import Chooser  # noqa: E402
from asyncfabric_services.runner.sampling import Sampling  # noqa: E402
from asyncfabric_services.runner.tokenizer import ByteTokenizer, CheckpointTokenizer, TokenPieces  # noqa: E402

TEXT = "naïve €5 — 日本語 🙂 end"


def spoken(pieces: TokenPieces, tokens: list[int]) -> list[str]:
    return [*(pieces.feed(token) for token in tokens), pieces.finish()]


def byte_level() -> CheckpointTokenizer:
    """Return a byte-level BPE tokenizer without merges, as checkpoints have them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={sign: index for index, sign in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return CheckpointTokenizer(PreTrainedTokenizerFast(tokenizer_object=inner))


def test_pieces_of_bytes_joined_are_the_whole_text() -> None:
    draws = random.Random(2)
    for _ in range(200):
        tokens = [draws.choice([0xE2, 0x82, 0xAC, 0xFF, 0x41, 0xF0, 0x9F]) for _ in range(draws.randint(0, 12))]
        assert "".join(spoken(ByteTokenizer().pieces(), tokens)) == bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), byte_level()])
def test_no_piece_ends_within_a_character(tokenizer: ByteTokenizer | CheckpointTokenizer) -> None:
    parts = spoken(tokenizer.pieces(), tokenizer.encode(TEXT))
    assert "".join(parts) == TEXT
    assert not any("�" in part for part in parts)
    assert "" in parts, "nothing was held back, so nothing was tested"
    unfinished = tokenizer.encode("€")[:2]
    assert "".join(spoken(tokenizer.pieces(), unfinished)).startswith("�")


def test_the_longest_token_bounds_the_characters_of_a_text() -> None:
    assert ByteTokenizer().longest == 1
    vocabulary = {"a": 0, "aa": 1, "\u2581word": 2, "<|end of turn|>": 3}
    inner = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="a")))
    assert CheckpointTokenizer(inner).longest == len("<|end of turn|>")


def test_a_chat_without_a_template_is_written_in_lines() -> None:
    chat = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    expected = "system: be kind\nuser: hi\nassistant: "
    assert bytes(ByteTokenizer().encode_chat(chat)).decode() == expected
    plain = byte_level()
    assert plain.encode_chat(chat) == plain.encode(expected)


def test_a_chat_follows_the_template_of_its_checkpoint() -> None:
    tokenizer = byte_level()
    tokenizer._inner.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}]) == tokenizer.encode("<user>hi<assistant>")


def test_of_equal_logits_the_first_is_taken() -> None:
    assert Chooser(Sampling()).choose(torch.tensor([0.0, 3.0, 1.0, 3.0])) == 1


def test_draws_follow_the_probabilities_and_the_seed() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    chooser = Chooser(Sampling(temperature=1.0, seed=3))
    drawn = [chooser.choose(logits) for _ in range(4000)]
    shares = [drawn.count(token) / len(drawn) for token in range(4)]
    assert shares == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    again = Chooser(Sampling(temperature=1.0, seed=3))
    assert [again.choose(logits) for _ in range(50)] == drawn[:50]
    other = Chooser(Sampling(temperature=1.0, seed=4))
    assert [other.choose(logits) for _ in range(50)] != drawn[:50]


def test_top_p_draws_from_the_likely_ones_only() -> None:
    logits = torch.log(torch.tensor([0.05, 0.3, 0.5, 0.15]))
    chooser = Chooser(Sampling(temperature=1.0, top_p=0.7, seed=1))
    assert {chooser.choose(logits) for _ in range(400)} == {1, 2}
    chooser = Chooser(Sampling(temperature=1.0, top_p=0.01, seed=1))
    assert {chooser.choose(logits) for _ in range(50)} == {2}
    chooser = Chooser(Sampling(temperature=2.0, top_p=1.0, seed=1))
    assert {chooser.choose(logits) for _ in range(400)} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", -0.1), ("temperature", 2.1), ("top_p", 0), ("top_p", 1.1)]
)
def test_samplings_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        Sampling(**{field: value})  # type: ignore[arg-type]
