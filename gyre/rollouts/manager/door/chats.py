"""Chats at the door of a fleet: which request one is, its prompt in tokens, and what it is answered.

A client sends no id, so one is made of what it sends. Where it names a session, by the path `/s/NAME` or the header
`X-Session-ID`, the requests of the session are the turns of a conversation: history that comes back is recognised, and
never put into tokens again. Without one, each request is rendered whole.

Invariants:
- *asked again is the same*: see `gyre.chat.retries`. Without a session only a client that counts its retries is
  recognised, for equal requests at once may be meant: who wants several answers to one prompt asks several times. Of
  several such clients each finds another one's request only where there are not enough that nobody waits for;
- *a function of the ledger*: a new manager gives the same bytes.

This module must not know about sockets, or when a request is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre.chat.messages import Message
from gyre.chat.renderer import Renderer
from gyre.chat.requests import ChatRequest, FinishedTurn
from gyre.chat.retries import Repeats
from gyre.chat.stop_texts import Stop
from gyre.rollouts.manager.door.words import ModelWords
from gyre.rollouts.manager.sessions.conversations import Conversations, unknown_answer
from gyre.rollouts.plane.door_ledger import Asked, AskedTurn, DoorLedger, DoorRequest
from gyre.rollouts.plane.session_tree import ROOT, LedgerSession, LedgerTurn

LONGEST_DEFAULT = 4096
"""Tokens of an answer where neither the client nor the model's length says how many."""

_DRAWING: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "stop_token_ids": [],
    "ignore_eos": False,
}


class Chats:
    def __init__(self, ledger: DoorLedger, renderer: Renderer | None) -> None:
        self._ledger = ledger
        self._conversations = Conversations(renderer)
        self._repeats: dict[tuple[str, str], Repeats] = {}
        """By key and session."""
        self._left: dict[str, None] = {}
        """Requests without a session whose answers have left."""
        self._asking: dict[str, list[Callable[[], bool]]] = defaultdict(list)
        """By the id of the request that they ask for, whether each client is still there."""

    # -- which request it is ------------------------------------------------------------------------

    def id_of(self, owner: str, session: str, path: str, body: bytes, retries: int) -> str:
        """The request's id, for a client that sends none."""
        if not session:
            return self._alone(owner, path, body, retries)
        named = owner, session
        repeats = self._repeats.get(named)
        if repeats is None:
            self._repeats = {one: kept for one, kept in self._repeats.items() if self._ledger.turns(*one)}
            known = [one.id.rpartition("/")[2] for one in self._ledger.turns(owner, session).values()]
            repeats = self._repeats[named] = Repeats(known)
        return f"{_digest(owner, session)}/{repeats.key(path, body, retries)}"

    def _alone(self, owner: str, path: str, body: bytes, retries: int) -> str:
        """A new request, or for a client that asks again an equal one that nobody has the answer of: if it can be, one
        that nobody waits for. Of these one that goes on was heard by nobody; of those that are over an earlier manager
        may have sent the older ones."""
        stem, known = f"{_digest(owner, path, body)}-", list[str]()
        while (found := f"{stem}{len(known)}") in self._ledger.requests() or found in self._asking:
            known.append(found)
        if not retries or not known:
            return found
        unheard = [one for one in known if one not in self._left]
        left_alone = [one for one in unheard if not any(is_there() for is_there in self._asking.get(one, ()))]
        running = [one for one in left_alone if not self._is_over(one)]
        return next(iter((*running, *reversed(left_alone), *unheard, known[-1])))

    def _is_over(self, request_id: str) -> bool:
        known = self._ledger.requests().get(request_id)
        return known is not None and known.is_over

    @contextlib.contextmanager
    def asking(self, request_id: str, is_there: Callable[[], bool]) -> Iterator[None]:
        """A block in which a client asks for the request and is answered."""
        self._asking[request_id].append(is_there)
        try:
            yield
        finally:
            self._asking[request_id].remove(is_there)
            if not self._asking[request_id]:
                del self._asking[request_id]

    def left(self, known: DoorRequest) -> None:
        """The whole answer was sent to a client that was there."""
        if not known.session:
            self._left = {one: None for one in (*self._left, known.id) if one in self._ledger.requests()}
        elif (repeats := self._repeats.get((known.owner, known.session))) is not None:
            repeats.left(known.id.rpartition("/")[2])

    # -- prompt and answer --------------------------------------------------------------------------

    async def asked(
        self, owner: str, session: str, request_id: str, chat: ChatRequest, words: ModelWords
    ) -> Asked:
        """What the client asks for, in tokens. Raises RequestRefused."""
        conversation = self._conversation(owner, session, is_named=bool(chat.after))
        if chat.prompt_ids is not None:
            prompt = chat.prompt_ids
            parent, note = conversation.parent_of(prompt), b""
        else:
            before = next((one for one in conversation.turns if one.key == chat.after), None)
            if chat.after and before is None:
                raise unknown_answer(chat.after)
            parent, prompt, note, _ = await self._conversations.prompt_of(conversation, chat, before)
        number = conversation.turns[parent].request.number if parent != ROOT else ROOT
        drawing = {**_DRAWING, **chat.sampling, **self._conversations.stops(chat.sampling)}
        drawing.setdefault("max_new_tokens", _longest(prompt, words))
        turn = AskedTurn(session, number, note)
        return Asked(request_id, prompt, 1, drawing, stops=words.stops, turn=turn)

    def _conversation(self, owner: str, session: str, *, is_named: bool) -> LedgerSession:
        """The turns that are kept of it, numbered from 0. Unless a client names the turn that it goes on from
        (`is_named`), without those of whose conversation something is forgotten: nobody can tell what a client left out
        of that."""
        known: list[DoorRequest] = []
        whole = {ROOT}
        for one in self._ledger.turns(owner, session).values() if session else ():
            if one.request.samples and (is_named or one.parent in whole):
                known.append(one)
                whole.add(one.request.number)
        places = {one.request.number: at for at, one in enumerate(known)}
        turns = [
            LedgerTurn(
                at,
                places.get(one.parent, ROOT),
                one.id,
                one.request,
                len(one.request.group.prompt_ids),
                one.note,
            )
            for at, one in enumerate(known)
        ]
        return LedgerSession(session, "", 0, 0, 0, turns=turns)

    def reply(self, known: DoorRequest, chat: ChatRequest, model: str) -> FinishedTurn:
        """The answer of a request that is over."""
        view = known.view()[0]
        ids = view.token_ids.tolist()
        return FinishedTurn(
            id=known.id,
            created=int(known.at),
            model=model,
            message=self._message(known, chat),
            finish="stop" if view.finish == "stop" else "length",
            prompt_length=len(known.request.group.prompt_ids),
            prompt_ids=known.request.group.prompt_ids.tolist() if chat.wants_prompt else (),
            token_ids=ids,
            logprobs=view.logprobs.tolist(),
            token_texts=self._conversations.texts(ids) if chat.logprobs else (),
            versions=[[run.version, run.start, run.end] for run in view.versions],
            stopped_by=stop.text if (stop := self._stop(known)) is not None else "",
        )

    def _message(self, known: DoorRequest, chat: ChatRequest) -> Message:
        if chat.prompt_ids is not None or not known.request.samples:
            return Message("assistant")
        session = LedgerSession(known.session or known.id, "", 0, 0, 0)
        return self._conversations.message_of(session, _turn_of(known))

    def _stop(self, known: DoorRequest) -> Stop | None:
        return self._conversations.stop_of(_turn_of(known)) if known.request.samples else None


def _turn_of(known: DoorRequest) -> LedgerTurn:
    prompt = len(known.request.group.prompt_ids)
    return LedgerTurn(known.request.number, ROOT, known.id, known.request, prompt, known.note)


def _longest(prompt: NDArray[np.int32], words: ModelWords) -> int:
    return LONGEST_DEFAULT if words.positions is None else max(1, words.positions - len(prompt))


def _digest(*parts: str | bytes) -> str:
    """32 hexadecimal digits of the parts together."""
    told = b"\0".join(part if isinstance(part, bytes) else part.encode() for part in parts)
    return hashlib.blake2b(told, digest_size=16).hexdigest()
