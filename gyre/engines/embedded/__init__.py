"""The embedded engine: a torch rollout engine of Gyre's own that serves SGLang's HTTP dialect.

For small models, CPUs, tests and examples: whatever speaks to SGLang can speak to it. Run it with
`python -m gyre.engines.embedded --model-path DIR --port N`.

| module | what it holds |
| --- | --- |
| `errors` | what it refuses |
| `invariance` | why a row's bits do not depend on its neighbours in Gyre's decoder, and the check of it at start |
| `served_model` | what the core asks of a model: weights, and steps over slots |
| `model_choice` | who computes a folder's model |
| `decoder_model`, `batch_step` | Gyre's own decoder: one step over a flat batch, and the KV cache |
| `transformers_model`, `transformers_steps` | models that transformers computes; imported where a folder needs them |
| `token_sampling` | how the next token is drawn, and its log-prob |
| `core` | requests, slots, pauses and weight swaps: a state machine that is stepped |
| `engine_loop` | the thread that steps the core |
| `wire` | JSON bodies to requests, progress to JSON |
| `http_server` | the HTTP routes |

Importing this package imports nothing of weight.
"""

KEY_VARIABLE = "GYRE_ENGINE_API_KEY"
"""The variable in which an engine finds its API key: unlike its arguments, other users cannot read it."""
