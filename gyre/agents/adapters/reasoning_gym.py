"""Problems of `reasoning-gym` (0.1): made by a data set's name and a seed, and scored by it.

Members of a group have one seed, and so one problem. With `attempts` above 1 a wrong answer is told, and may be mended.

This module must not import reasoning_gym before a problem is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gyre.agents.environments import Messages

_WRONG = "This is not right. Try again."


class ReasoningGym:
    """Problems of the data set `dataset`, made with `options`. `system` is put before each; `tag` is that around the
    final answer, "" where the whole answer counts. The problem is number `task["index"]` of the data set where the row
    has one, and else that of the group's seed."""

    def __init__(
        self,
        dataset: str,
        options: Mapping[str, Any] | None = None,
        attempts: int = 1,
        tag: str = "answer",
        system: str = "",
    ) -> None:
        self._dataset, self._options = dataset, dict(options or {})
        self._left, self._tag, self._system = attempts, tag, system
        self._made: Any = None
        self._entry: dict[str, Any] = {}

    def reset(self, task: Mapping[str, Any], seed: int) -> Messages:
        import reasoning_gym

        index = task.get("index")
        own = {"seed": seed, "size": 1} if index is None else {"size": int(index) + 1}
        self._made = reasoning_gym.create_dataset(self._dataset, **{**own, **self._options})
        self._entry = self._made[0 if index is None else int(index)]
        first: Messages = [{"role": "system", "content": self._system}] if self._system else []
        return [*first, {"role": "user", "content": self._entry["question"]}]

    def step(self, message: Mapping[str, Any]) -> tuple[Any, float, bool]:
        self._left -= 1
        score = float(self._made.score_answer(self._answer(message.get("content") or ""), self._entry))
        if score >= 1.0 or self._left <= 0:
            return [], score, True
        return _WRONG, 0.0, False

    def _answer(self, text: str) -> str | None:
        if not self._tag:
            return text.strip()
        from reasoning_gym.utils import extract_answer

        found: str | None = extract_answer(text, tag_name=self._tag)
        return found
