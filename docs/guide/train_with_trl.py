"""GRPO by TRL with vLLM as its generator: every rank of the training sends its weights into the engine, by vLLM's door.

The engine, with asyncfabric in its environment, and then the training:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "asyncfabric"}'
    torchrun --nproc-per-node 2 train_with_trl.py MODEL http://127.0.0.1:8000

TRL's own client of vLLM gathers each parameter at rank 0 and broadcasts it by NCCL. Here TRL's `rollout_func` sends the
weights in its place, after each step of the optimizer, and asks the engine for completions. The reward is the share of
digits in an answer. Needs vLLM in the environment of the training too, of which nothing is computed there.
"""

from __future__ import annotations

import argparse
from typing import Any

import requests
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, ModuleSource

from asyncfabric.integrations.vllm_weights import SendingEngine, TrainerInit

PATIENCE_S = 600.0


class Rollouts:
    """TRL's `rollout_func`: brings the engine up to date, and has it answer the prompts of this rank."""

    def __init__(self, model: str, url: str, host: str) -> None:
        """Keep what the engine calls its model, its address, and this host's address as the engine reaches it."""
        self._model, self._url, self._host = model, url, host
        self._sending: SendingEngine | None = None
        self._sent = -1

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        """Return a completion for each prompt, of the weights as they are now."""
        self.send(trainer)
        tokens = trainer.processing_class(prompts)["input_ids"]
        asked = {
            "model": self._model,
            "prompt": tokens,
            "max_tokens": trainer.args.max_completion_length,
            "temperature": trainer.args.temperature,
            "logprobs": 0,  # of the tokens that were chosen alone
            "return_token_ids": True,
        }
        choices = sorted(self._post("v1/completions", asked).json()["choices"], key=lambda one: one["index"])
        return {
            "prompt_ids": tokens,
            "completion_ids": [one["token_ids"] for one in choices],
            "logprobs": [one["logprobs"]["token_logprobs"] for one in choices],
        }

    def send(self, trainer: GRPOTrainer) -> None:
        """Send the weights unless the engine has those of this step; all ranks of the training do so together."""
        step, here = trainer.state.global_step, trainer.accelerator
        if step == self._sent:
            return
        if self._sending is None:
            self._sending = SendingEngine.trainer_init(
                init_info=TrainerInit(rank=here.process_index, ranks=here.num_processes, host=self._host),
                client=HTTPVLLMWeightSyncClient(self._url),
                source=ModuleSource(here.unwrap_model(trainer.model)),
            )
        self._sending.send_weights()
        if here.is_main_process:
            self._post("reset_prefix_cache", {})  # its keys and values are of the weights before
        here.wait_for_everyone()
        self._sent = step

    def _post(self, path: str, body: dict[str, Any]) -> requests.Response:
        answer = requests.post(f"{self._url}/{path}", json=body, timeout=PATIENCE_S)
        answer.raise_for_status()
        return answer


def share_of_digits(completions: list[str], **more: Any) -> list[float]:
    """Return the reward of each answer."""
    return [sum(letter.isdigit() for letter in text) / max(1, len(text)) for text in completions]


def main() -> None:
    """Train, and save what was trained."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a name or a folder, as the engine was given it")
    parser.add_argument("engine", help="where it serves: http://HOST:PORT")
    parser.add_argument("--host", default="127.0.0.1", help="of rank 0, as the engine reaches it")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=32, help="of a completion, at most")
    parser.add_argument("--output", default="trained", help="folder for the trained model")
    arguments = parser.parse_args()
    rollouts = Rollouts(arguments.model, arguments.engine, arguments.host)
    trainer = GRPOTrainer(
        model=arguments.model,
        reward_funcs=share_of_digits,
        rollout_func=rollouts,
        train_dataset=Dataset.from_list([{"prompt": f"The number after {number} is"} for number in range(200)]),
        args=GRPOConfig(
            output_dir=arguments.output,
            max_steps=arguments.steps,
            num_generations=4,
            per_device_train_batch_size=4,
            max_completion_length=arguments.tokens,
            learning_rate=1e-4,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
        ),
    )
    trainer.train()
    rollouts.send(trainer)  # the engine serves what was trained
    trainer.save_model(arguments.output)


if __name__ == "__main__":
    main()
