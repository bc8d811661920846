"""A small tokenizer with a chat template, and small data sets in the layouts that people have."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATE = """\
{%- if messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- if message.role not in ['user', 'assistant'] %}
        {{- raise_exception('no role ' + message.role) }}
    {%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

QUESTIONS = [
    ("Natalia sold clips to 48 friends. How many?", "She sold 48.\n#### 48"),
    ("A robe takes 2 bolts of blue and half that much white. How many bolts?", "2+1=3\n#### 3"),
    ("What is 500 plus 500?", "#### 1,000"),
    ("How many?", "nobody knows"),
]


def write_tokenizer(folder: Path) -> Path:
    """Byte-level BPE of 300 tokens and three special ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([question for question, _ in QUESTIONS] * 4, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"},
                "pad_token": "<|endoftext|>",
                "chat_template": TEMPLATE,
            }
        )
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    return folder


def gsm8k_rows() -> list[dict[str, str]]:
    return [{"question": question, "answer": answer} for question, answer in QUESTIONS]


def openr1_rows() -> list[dict[str, object]]:
    return [
        {
            "problem": f"Find $x$ in $x+{n}=0$.",
            "solution": "…",
            "answer": f"-{n}" if n != 2 else None,
            "problem_type": "Algebra",
            "source": "olympiads",
            "uuid": f"u{n}",
            "generations": ["a", "b"],
            "correctness_math_verify": [True, False],
            "messages": [{"role": "user", "content": "…"}],
        }
        for n in range(4)
    ]


def write_lines(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
