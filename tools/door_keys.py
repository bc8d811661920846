"""docs/fleet-keys.md and docs/chat-dialects.md, from the tables by which the door and sessions read a request:
`python tools/door_keys.py` writes both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gyre.chat.dialects.keys import TABLES as CHAT_TABLES
from gyre.request_body import ANYTHING, Key, Keys, json_text
from gyre.rollouts.manager.door.keys import TABLES

_DOCS = Path(__file__).parent.parent / "docs"

_FLEET = """# Keys at the door

What becomes of each key of a request to a [fleet's door](fleet.md). Null is as if the key were left out. A key that
would change what is drawn or told, and that is not there, is refused by its name (`unsupported`), and so is one that no
table has. It passes at the values that change nothing, and at no other: `false` and `0` are values.
"""

_CHAT = """# Dialects of conversations

What clients of conversations ask, and what they get. An answer is a function of the request's bytes and of the turn in
the ledger, so whoever asks again gets the same bytes. A stream is that of the finished turn.

| route | clients that were run against it | calls of tools | tokens and log-probs |
| --- | --- | --- | --- |
| `/v1/chat/completions` | openai 2.54 and 3.57, openai-agents 0.20, smolagents 1.26 | `tool_calls`; results are messages of `role: tool` | `return_token_ids`: `prompt_token_ids` and `token_ids`; `logprobs` |
| `/v1/responses` | openai 2.54 and 3.57, openai-agents 0.20 | items `function_call` and `function_call_output` | log-probs by `include` |
| `/v1/messages`, `/v1/messages/count_tokens` | anthropic 2.14 | parts `tool_use` and `tool_result` | none |
| `/inference/v1/generate` | the client of renderers 0.1.12, by which verifiers trains | the client's own | always |
| `/v1/completions` | openai 2.54 and 3.57 | the client's own | `token_ids` always; `logprobs` |

- **A turn is found by what comes back.** Clients send the whole conversation. An assistant's message is known by the ids
  of its calls and by its text; what it thought, keys that a client does not know, blanks at its ends and how arguments
  are spaced do not matter. Who changes more, or leaves messages out, begins a branch: smolagents does so at each turn,
  for it writes calls and results as prose.
- **`stop` ends an answer with the token that completes the text**, whichever engine draws: the manager looks at tokens as
  they come, and tells the engine to stop. The answer is told up to where the text begins; what is trained on, and counted in
  `usage`, are all drawn tokens up to that one. What an engine drew after it is discarded as `after_stop`. Special tokens are
  no text: `stop_token_ids` ends at them.
- **A session refuses what it cannot hold a model to**: `tool_choice: required` or a tool by name, and a schema of the
  answer. No engine draws by a grammar here: they have no tokenizers, and a draw among the allowed tokens alone has other
  log-probs than the policy that is trained. With smolagents, `OpenAIModel(..., tool_choice="auto")`.
- **`previous_response_id` goes on from an answer of the session**, of whichever manager, and from that one though another says
  the same. As at OpenAI, `instructions` are of one request: the same ones again go on from the answer's tokens, others begin a
  branch. An answer of another session, or of a request with `store: false`, is not found (400). `conversation` is refused:
  nothing outlives its session.
- **A call that cannot be read is text.** Its arguments are told as the model wrote them, though they be no JSON; to
  Anthropic's clients, whose form wants an object, as `{"unparsed_arguments": "..."}`.
- **No text becomes a control token**, whoever wrote it: a literal of one in a message, a result or a schema is text.
- A stream has one event with all that was said. Who needs the tokens as they come asks a [fleet's door](fleet.md).
- **Tools are a part of the conversation.** A request with others than those that its path began with begins a branch, where
  the model's frame tells of tools.

Below, what becomes of each key. Null is as if the key were left out. A key that would change what is drawn or told, and
that is not there, is refused by its name (422 `unsupported`), and so is one that no table has. Keys of a client's
messages that are not known pass, for clients send back what they got.

## Frames of models

`config.chat` names a renderer of the package `renderers`. A session's tokens, as text, are what the model's own template makes
of the whole conversation: for the renderers below that is tested, with and without tools, over random conversations, and each
prompt begins with its parent's tokens, bit for bit. What a template drops of earlier turns is what was thought. A session keeps
it, so that such a conversation stays one path; who begins a branch has it dropped, as by the template.

| renderer | template of | tokenizer in the test | earlier thoughts in the template |
| --- | --- | --- | --- |
| `qwen3` | Qwen3 | the model's | dropped when the user speaks |
| `qwen3-vl` | Qwen3-VL | Qwen3's | none |
| `qwen3.5`, `qwen3.6` | Qwen3.5, Qwen3.6 | a small one | dropped when the user speaks |
| `qwen3.8` | Qwen3.8 | a small one | kept |
| `glm-4.5` | GLM-4.5 | a small one | dropped when the user speaks |
| `gemma4` | Gemma 4 | a small one | dropped when the user speaks |
| `nemotron-3.5` | Nemotron 3.5 | a small one | dropped when the user speaks |
| `llama-3` | Llama 3.1 | Llama 3's | none |
| `deepseek-v3` | DeepSeek V3, without tools | the model's | none |

A small tokenizer is one of bytes that has the family's own tokens. Others of the package are taken as they are. Where the package has
no place for a turn behind another, a branch begins, and `branches` counts it as `template`: after a stop within a thought, after
what was drawn behind an end (`ignore_eos`), and, by Gemma 4, after a whole call that was cut before its end.
`gpt-oss` is refused, for it encodes by another tokenizer than the model's folder has. `qwen3.5` and `nemotron-3.5` write
booleans in a call as `True`, which the package does not read: such a call is text. By `glm-4.5`, of several calls in one answer
that a branch writes again the package leaves out the newlines between them.
"""  # noqa: E501


def _page(head: str, tables: Sequence[Keys]) -> str:
    """A page of the tables as they are: keys of one fate, with the same to say of them, share a row."""
    parts = [head]
    for keys in tables:
        rows: dict[tuple[str, str], list[str]] = {}
        for key in keys.rows.values():
            rows.setdefault((_fate(key), key.says), []).append(f"`{key.name}`")
        parts.append(f"\n## In {keys.of}\n\n| keys | | |\n| --- | --- | --- |\n")
        parts += [f"| {', '.join(names)} | {fate} | {says} |\n" for (fate, says), names in rows.items()]
    return "".join(parts)


def pages() -> dict[Path, str]:
    """What each page should have."""
    return {
        _DOCS / "fleet-keys.md": _page(_FLEET, TABLES),
        _DOCS / "chat-dialects.md": _page(_CHAT, CHAT_TABLES),
    }


def _fate(key: Key) -> str:
    if key.is_taken:
        return "taken"
    if ANYTHING in key.passes:
        return "passes"
    if key.passes:
        return "passes at " + ", ".join(f"`{json_text(one)}`" for one in key.passes)
    return "refused"


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
