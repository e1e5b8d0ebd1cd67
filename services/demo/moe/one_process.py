"""The right answers: the same model in one process, with all experts and without some. Blocking."""

from __future__ import annotations

from pathlib import Path

import torch

from asyncfabric.integrations.sparse_blocks import config_for
from asyncfabric_services.demo.moe.scenario import NODES, VICTIM, prompts_of
from asyncfabric_services.demo.settings import DemoSettings
from asyncfabric_services.experts.sparse_model import greedy, load_sparse, mask_experts
from asyncfabric_services.settings.schema import ModelSection


def right_answers(settings: DemoSettings) -> tuple[list[list[int]], list[list[int]]]:
    """Return the answers with all experts, and those without the experts of the node that is killed."""
    torch.set_num_threads(settings.threads)
    path = Path(settings.model) if settings.model else None
    section = ModelSection(path=path, layers=settings.layers, hidden=settings.hidden, seed=settings.seed)
    model, prompts = load_sparse(section), prompts_of()
    whole = [greedy(model, prompt, settings.new_tokens) for prompt in prompts]
    mask_experts(model, config_for(model, ranks=NODES, max_tokens=1).experts_of(VICTIM))
    return whole, [greedy(model, prompt, settings.new_tokens) for prompt in prompts]
