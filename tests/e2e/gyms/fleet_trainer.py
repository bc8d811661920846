"""A trainer that is not Gyre's, over a Gyre fleet: environments, rollouts and the client are those of `verifiers`, the
model is one of transformers, and a fleet's door draws the tokens and takes the weights. Run it in the environment of
`make gyms`:

    python fleet_trainer.py begin FOLDER           a model that has seen a forgetful pupil, in FOLDER/0
    python fleet_trainer.py train FOLDER URL       trains it by the fleet at URL; the key is in GYRE_FLEET_KEY

`train` prints a line of JSON for the evaluation before, for each step, and for the evaluation after.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
import verifiers as vf
from calculator_env import load_environment
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from verifiers.legacy.clients.renderer_client import RendererClient

from gyre.agents.calculator import CalculatorTask

STEPS, PROMPTS, SAMPLES, HELD_OUT = 8, 32, 8, 128
PUPIL_STEPS, PUPIL_BATCH, PUPIL_LR, FORGETS = 120, 128, 4e-3, 0.6
LR = 1e-3
WITHIN_S = 120.0
"""For a version to be served, and for the door to be back after its manager's death."""

TASK = CalculatorTask({"seed": 0})
CHARACTERS = TASK.tokenizer
CLOSE = int(CHARACTERS.encode("]")[0])
TEMPLATE = (
    "{% for m in messages %}{% if loop.first %}<b>{{ m.content }}"
    "{% elif m.role == 'assistant' %}{{ m.content }}{% if not m.content.endswith(']') %}<e>{% endif %}"
    "{% else %}:{{ m.content }}:{% endif %}{% endfor %}"
)
"""The frame of `gyre.chat.plain`, as a model's folder has it."""


# -- the model, and what a pupil showed it -----------------------------------------------------------------


def tokenizer() -> PreTrainedTokenizerFast:
    """Each character is a token, with the ids of the task's own tokenizer."""
    ids = {one: int(CHARACTERS.encode(one)[0]) for one in CHARACTERS.alphabet}
    ids |= {"<b>": CHARACTERS.bos_id, "<e>": CHARACTERS.eos_id}
    ids |= {f"<{at}>": at for at in set(range(max(ids.values()) + 1)) - set(ids.values())}
    made = Tokenizer(models.WordLevel(ids, unk_token="<b>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<b>", eos_token="<e>", chat_template=TEMPLATE
    )


def new_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=CHARACTERS.vocab_size,
            hidden_size=64,
            intermediate_size=168,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=128,
            tie_word_embeddings=False,
            eos_token_id=[CHARACTERS.eos_id, CLOSE],
            bos_token_id=CHARACTERS.bos_id,
            pad_token_id=None,
        )
    )


def logprobs_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """float32 `[rows, t - 1]`: of each token behind the first one, given those before it."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def padded(rows: list[Any], fill: float, kind: torch.dtype) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows], dtype=kind)


def begin(folder: Path) -> None:
    model, words = new_model(), tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PUPIL_LR)
    for step in range(PUPIL_STEPS):
        shown = TASK.demonstrations(step * PUPIL_BATCH, PUPIL_BATCH, FORGETS)
        ids = padded([[*one.prompt_ids, *one.token_ids] for one in shown], 0, torch.long)
        mask = padded([[*np.zeros(len(one.prompt_ids)), *one.mask] for one in shown], 0.0, torch.float32)[
            :, 1:
        ]
        for group in optimizer.param_groups:
            group["lr"] = PUPIL_LR * (1.0 - step / PUPIL_STEPS)
        loss = -(logprobs_of(model, ids) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save(model, words, folder / "0")


def save(model: Any, words: PreTrainedTokenizerFast, folder: Path) -> None:
    model.save_pretrained(folder)
    words.save_pretrained(folder)


# -- rollouts, by verifiers over the door ------------------------------------------------------------------


@dataclass
class Row:
    """What is trained of a rollout: ids, which of them the policy drew, and their log-probs as the fleet told them."""

    ids: list[int] = field(default_factory=list)
    drawn: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Rollout:
    """A turn that does not begin with all tokens of the turn before begins a row: such as one after a `<b>` that the
    policy drew, which is no text, and so is not in what the client renders next."""

    reward: float
    rows: list[Row]


def rollout_of(output: Any) -> Rollout:
    """An empty answer ends a rollout by an error, and has no tokens to train; its reward is what the rubric says."""
    error = output.get("error")
    if error and error["error"] != "EmptyModelResponseError":
        raise RuntimeError(f"a rollout failed: {error}")
    rows = [Row()]
    for step in output["trajectory"]:
        prompt, drawn = list(step["tokens"]["prompt_ids"]), step["tokens"]["completion_ids"]
        if prompt[: len(rows[-1].ids)] != rows[-1].ids:
            rows.append(Row())
        row = rows[-1]
        added = len(prompt) - len(row.ids)
        row.ids = [*prompt, *drawn]
        row.drawn += [False] * added + [True] * len(drawn)
        row.logprobs += [0.0] * added + list(step["tokens"]["completion_logprobs"])
    return Rollout(float(output["reward"]), [row for row in rows if row.ids])


class Rollouts:
    """The environment, played over a fleet."""

    def __init__(self, url: str, words: Path) -> None:
        self.environment = load_environment("turns", held_out=HELD_OUT)
        self.client = RendererClient(
            vf.ClientConfig(
                client_type="renderer",
                renderer_model_name=str(words),
                api_base_url=f"{url}/v1",
                api_key_var="GYRE_FLEET_KEY",
                extra_headers_from_state={"X-Session-ID": "trajectory_id"},
            )
        )

    async def groups(self, rows: list[Any], samples: int) -> list[list[Rollout]]:
        outputs = await asyncio.gather(*(self._group(row, samples) for row in rows))
        return [[rollout_of(one) for one in group] for group in outputs]

    async def _group(self, row: Any, samples: int) -> Any:
        sampling = {"temperature": 1.0, "max_tokens": 12}
        return await self.environment.run_group(
            [dict(row) for _ in range(samples)], self.client, "policy", sampling, state_columns=["trajectory"]
        )

    async def success(self) -> float:
        groups = await self.groups(list(self.environment.get_eval_dataset()), 1)
        return float(np.mean([one.reward for group in groups for one in group]))


# -- training ----------------------------------------------------------------------------------------------


def update(model: Any, optimizer: Any, groups: list[list[Rollout]]) -> dict[str, float]:
    """A step of GRPO on policy. Tells the mean reward, and how far the fleet's log-probs are from the trainer's."""
    rewards = np.array([[one.reward for one in group] for group in groups])
    spread = rewards.std(axis=1, keepdims=True)
    scaled = ((rewards - rewards.mean(axis=1, keepdims=True)) / (spread + 1e-6)).reshape(-1)
    rollouts = [one for group in groups for one in group]
    rows = [row for one in rollouts for row in one.rows]
    advantages = np.repeat(scaled, [len(one.rows) for one in rollouts])
    ids = padded([row.ids for row in rows], 0, torch.long)
    mask = padded([row.drawn for row in rows], 0.0, torch.float32)[:, 1:]
    told = padded([row.logprobs for row in rows], 0.0, torch.float32)[:, 1:]
    own = logprobs_of(model, ids)
    apart = ((own.detach() - told) * mask).abs().max()
    loss = -(own * mask * torch.tensor(advantages, dtype=torch.float32)[:, None]).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return {"reward": float(rewards.mean()), "rows": len(rows), "logprobs_apart": float(apart)}


async def door(http: httpx.AsyncClient, method: str, path: str, body: Any = None) -> Any:
    """What the door answers, asked again while its manager is being replaced."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            try:
                reply = await http.request(method, path, json=body)
                if reply.status_code < 500:
                    return reply.raise_for_status().json()
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)


async def publish(http: httpx.AsyncClient, version: int, folder: Path) -> None:
    """Until the fleet serves it: `/inference/v1/generate` has no key that could ask for a version."""
    await door(http, "POST", "/v1/policies", {"version": version, "path": str(folder)})
    async with asyncio.timeout(WITHIN_S):
        while (await door(http, "GET", f"/v1/policies/{version}"))["state"] != "served":  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)


async def train(folder: Path, url: str) -> None:
    model, words = Qwen3ForCausalLM.from_pretrained(folder / "0", dtype=torch.float32), tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    rollouts = Rollouts(url, folder / "0")
    rows = rollouts.environment.get_dataset()
    key = os.environ["GYRE_FLEET_KEY"]
    async with httpx.AsyncClient(
        base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=30.0
    ) as http:
        say(success=await rollouts.success())
        for step in range(1, STEPS + 1):
            asked = [rows[at] for at in range((step - 1) * PROMPTS, step * PROMPTS)]
            say(step=step, **update(model, optimizer, await rollouts.groups(asked, SAMPLES)))
            save(model, words, folder / str(step))
            await publish(http, step, folder / str(step))
        say(success=await rollouts.success())


def say(**told: Any) -> None:
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the model is so small that threads cost more than they bring
    place = Path(sys.argv[2])
    if sys.argv[1] == "begin":
        begin(place)
    else:
        asyncio.run(train(place, sys.argv[3]))
