"""The dialects, in the order in which documents list them.

This module must not know what any of them speaks.
"""

from __future__ import annotations

from gyre.chat.dialects.dialect import Dialect
from gyre.chat.dialects.openai_chat import OpenaiChat

DIALECTS: tuple[Dialect, ...] = (OpenaiChat(),)
