"""The right answer of a prompt, as its data set has it.

It is looked up in the `meta` that is kept with a sample, and kept nowhere else. Pure: it imports nothing of weight, for
the processes of a reward pool use it, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

GROUND_TRUTH = "ground_truth"
"""verl's name of it, in `reward_model` or by itself."""


def right_answer_in(meta: Mapping[str, Any]) -> Any:
    """`reward_model.ground_truth`, or else `ground_truth`, or else `answer`; None where there is none of them."""
    model = meta.get("reward_model")
    if isinstance(model, Mapping) and model.get(GROUND_TRUTH) is not None:
        return model[GROUND_TRUTH]
    found = meta.get(GROUND_TRUTH)
    return meta.get("answer") if found is None else found


def shown_right_answer(meta: Mapping[str, Any]) -> str | None:
    """The same as text: what is no text as JSON; None where there is none."""
    found = right_answer_in(meta)
    return found if found is None or isinstance(found, str) else json.dumps(found, ensure_ascii=False)
