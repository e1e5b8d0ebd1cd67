"""`bench coding`: what a real training run changes per step, and what the codings of weights make of it.

One process trains a causal model of transformers with AdamW on text; after each step the weights are rounded to
bfloat16, as they are sent, coded against those of the step before, decoded and compared. No fabric: the rates show on
which wires a coding would pay, and `choose` is what an update would ask.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

from asyncfabric.bench.measure import paired_ratio, significant
from asyncfabric.bench.rows import Point, rates
from asyncfabric.weights.coding.choice import GAIN, Coding, Costs, choose, measure
from asyncfabric.weights.coding.codings import apply_delta, decode_exponents, encode_delta, encode_exponents
from asyncfabric_services.bench.options import Options
from asyncfabric_services.bench.report.report import BenchReport

Bytes = NDArray[np.uint8]
ITEM_BYTES = 2
VOCABULARY, BATCH, CONTEXT = 256, 8, 128


@dataclass(frozen=True, slots=True)
class CodedTraining:
    """The run: a model of `layers` and `hidden`, whose AdamW takes steps of `learning_rate`."""

    layers: int = 8
    hidden: int = 512
    learning_rate: float = 1e-6


@dataclass
class Tally:
    """What one coding took, a figure for each step; bytes of weights are the same in all."""

    sent: list[int] = field(default_factory=list)
    encode_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)
    wrong: int = 0
    plain: int = 0


def run_coding(options: Options, report: BenchReport, training: CodedTraining) -> None:
    """Train for `options.repeats` steps after the first, and publish a row for each coding."""
    report.expect(options.repeats)
    tallies = {Coding.DELTA: Tally(), Coding.EXPONENT: Tally()}
    copies: list[float] = []
    versions = trained(training, options.seed)
    old = next(versions)
    held = [one.copy() for one in old]
    for number in range(options.repeats):
        report.step(f"step {number + 1}")
        new = next(versions)
        began = perf_counter()
        for memory, after in zip(held, new, strict=True):
            np.copyto(memory, after)
        copies.append(perf_counter() - began)
        for coding, tally in tallies.items():
            _step(coding, tally, old, new, held)
        before, old = old, new
    total = sum(one.size for one in old)
    biggest = max(range(len(old)), key=lambda index: old[index].size)
    costs = [measure(coding, old[biggest], ITEM_BYTES, before[biggest]) for coding in tallies]
    chosen = choose(costs, total / statistics.median(copies))  # what an update over memory would use
    for coding, tally in tallies.items():
        _publish(report, training, coding, tally, copies, total, chosen)


def trained(training: CodedTraining, seed: int) -> Iterator[list[Bytes]]:
    """Yield the weights as bfloat16, tensor by tensor: before the first step, and after each. Endless."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=training.hidden, intermediate_size=training.hidden * 3,
            num_hidden_layers=training.layers, num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=False,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.learning_rate)
    text = torch.frombuffer(bytearray(english()), dtype=torch.uint8).long()
    while True:
        yield [_bfloat16(parameter) for parameter in model.parameters()]
        starts = torch.randint(len(text) - CONTEXT, (BATCH,)).tolist()
        batch = torch.stack([text[start : start + CONTEXT] for start in starts])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def english() -> bytes:
    """Return the language reference that comes with Python: text that every machine has."""
    from pydoc_data.topics import topics

    return "\n".join(topics.values()).encode()


def _bfloat16(parameter: torch.Tensor) -> Bytes:
    return parameter.detach().to(torch.bfloat16).contiguous().view(torch.uint8).reshape(-1).numpy()


def _step(coding: Coding, tally: Tally, old: list[Bytes], new: list[Bytes], held: list[Bytes]) -> None:
    """Code all tensors, decode them into memory that holds the old version, and compare."""
    sent, encode_s, decode_s = 0, 0.0, 0.0
    for before, after, memory in zip(old, new, held, strict=True):
        np.copyto(memory, before)
        began = perf_counter()
        if coding is Coding.DELTA:
            message = encode_delta(before, after, ITEM_BYTES)
        else:
            message = encode_exponents(after, ITEM_BYTES)
        coded = perf_counter()
        if message is None:  # an update sends this tensor as it is
            np.copyto(memory, after)
        elif coding is Coding.DELTA:
            apply_delta(memory, message, ITEM_BYTES)
        else:
            decode_exponents(memory, message, ITEM_BYTES)
        decode_s += perf_counter() - coded
        encode_s += coded - began
        sent += after.size if message is None else len(message)
        tally.plain += message is None
        tally.wrong += not np.array_equal(memory, after)
    tally.sent.append(sent)
    tally.encode_s.append(encode_s)
    tally.decode_s.append(decode_s)


def _publish(
    report: BenchReport,
    training: CodedTraining,
    coding: Coding,
    tally: Tally,
    copies: list[float],
    total: int,
    chosen: Coding,
) -> None:
    gbytes_per_s, ops_per_s = rates(tally.encode_s, 1, total)
    share = statistics.median(tally.sent) / total
    costs = Costs(
        coding=coding,
        ratio=share,
        encode_bytes_per_s=total / statistics.median(tally.encode_s),
        decode_bytes_per_s=total / statistics.median(tally.decode_s),
    )
    below = GAIN * min(costs.encode_bytes_per_s, costs.decode_bytes_per_s) if share < GAIN else 0.0
    report.row(
        Point(
            bench="coding",
            figure=f"{coding.value}: {share:.2%} of the bytes, pays below {below / 1e9:.2f} GB/s",
            provider="none",
            bytes=total,
            processes=1,
            gbytes_per_s=gbytes_per_s,
            ops_per_s=ops_per_s,
            verified=report.check(coding.value, f"{tally.wrong} tensors differ" if tally.wrong else ""),
            limit="memcpy",
            ratio=paired_ratio(tally.encode_s, copies),
            detail={
                "coding": coding.value,
                "share": significant(share),
                "sent_bytes": tally.sent,
                "plain_tensors": tally.plain,
                "decode_gbytes_per_s": significant(costs.decode_bytes_per_s / 1e9),
                "pays_below_gbytes_per_s": significant(below / 1e9),
                "chosen_over_memory": chosen.value,
                "learning_rate": training.learning_rate,
                "steps": len(tally.sent),
            },
        )
    )
