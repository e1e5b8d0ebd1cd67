"""The guide's program for TRL: GRPO on two ranks, whose weights reach vLLM's model classes after each step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from test_weight_transfer import Pair, Program
from tiny_models import random_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PROGRAM = Path(__file__).parents[3] / "docs" / "guide" / "train_with_trl.py"
FAMILY, STEPS, RANKS = "LlamaForCausalLM", 2, 2
LAUNCH = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]


def save_model(folder: Path) -> None:
    """Write a tiny model with random weights, and a tokenizer of single bytes."""
    model, _ = random_model(FAMILY)
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=bytes_alone, eos_token="<end>", pad_token="<pad>").save_pretrained(folder)


def test_the_engine_has_the_weights_of_each_step(tmp_path: Path) -> None:
    start, trained = tmp_path / f"{FAMILY}-1", tmp_path / f"{FAMILY}-2"
    save_model(start)
    with Program("engine_server.py", tmp_path, 1) as server:
        url = f"http://127.0.0.1:{server.answer()['port']}"
        ask = Pair([], url, tmp_path).engine
        ask("make", family=FAMILY, version=1)
        options = ["--steps", str(STEPS), "--tokens", "8", "--output", str(trained)]
        subprocess.run([*LAUNCH, str(PROGRAM), str(start), url, *options], check=True, timeout=240)
        calls = [one for one in ask("calls") if "start" not in one and "finish" not in one]
        update = ["update_weights", "reset_prefix_cache"]
        step = [*update, *["completions"] * RANKS]
        assert calls == ["make", "init_weight_transfer_engine", *step * STEPS, *update]
        assert not any(ask("differences", version=2)), "the engine has what was trained last"
        assert all(ask("differences", version=1)), "the training changed the weights"
