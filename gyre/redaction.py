"""What a secret looks like, which values are secret here, and what is shown in their place. Everything that leaves a
process, for whoever may look at a job or gets its archive, goes through here: what the REST interface says, what the
page shows of it, lines of logs, errors, events, the archive of `gyre debug`.

A secret is known in three ways:
- *by its name*: the value of a key, an option, a header or a variable that is called like one (`api_key`, `--token`);
- *by its shape*: tokens with their makers' marks, private keys, passwords in URLs, addresses of webhooks;
- *by its value*: what the job's configuration and this process's environment hold under such names, wherever it stands,
  also as JSON, a URL or base64 writes it, or broken over lines.

Detectors made for repositories (detect-secrets) look for what might be one and leave it to people to judge, line by
line of a source file. Here nobody judges, and what is no secret has to stay readable: so names and shapes are a list.

Invariant *the rest stays*: digests, ids, folders, names of models and numbers are shown as they are.

This module must not know jobs, logs or HTTP: texts and plain data are all it looks at.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote, quote_plus, unquote

HIDDEN = "***"
"""What stands for a value that may be secret; SQLAlchemy writes the same for a password."""

LEAST_VALUE = 6
"""A shorter value is a number or a switch, and would blacken words that say nothing."""
LEAST_NAMED = 4
"""The same of a value whose name says that it is secret: it is hidden where it is a word of its own."""
LONG_VALUE = 12
"""From here on a value is looked for in base64 and broken over lines too: a shorter one would be found by chance."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


HARMLESS = _words(
    "true false none null yes warning warn info debug error offline online disabled enabled auto default unset bearer "
    "basic required missing empty string bytes str token secret password"
)
"""Values that are words of a configuration or a sentence, whatever their key is called."""

_SECRET_WORDS = _words(
    "password passwd passphrase pwd pass pin secret secrets token credential credentials apikey accesskey secretkey "
    "authkey privatekey authorization auth cookie webhook dsn sig jwt bearer sas passcode otp authtoken accesstoken"
)
_SECRET_KEYS = _words(
    "api access secret private account signing encryption license auth subscription storage master shared app weights "
    "service admin deploy ssh hmac client consumer session"
)
"""Words before `key`."""
_SECRET_PAIRS = frozenset((("connection", "string"), ("amz", "signature")))
_PLAIN_TOKENS = _words(
    "pad eos bos unk sep cls mask image stop begin start end first last next new audio video per each special one a "
    "the extra boi eoi fim prefix suffix of sequence think drawn"
)
"""Words before `token` that make it one of a vocabulary."""
_PLAIN_BEFORE = {
    "pass": frozenset({"by", "forward", "backward", "one", "per", "first", "second", "a", "max"})
}

_HEADERS = frozenset({"headers", "header", "metadata_headers"})
_PLAIN_HEADERS = frozenset(
    {"content-type", "accept", "user-agent", "host", "accept-encoding", "content-length"}
)

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


@lru_cache(1 << 14)
def is_secret_name(name: str) -> bool:
    """Whether a value of this key, option, variable or header is secret."""
    words = [one.lower() for one in _WORD.findall(name)]
    while words and words[-1].isdigit():
        words.pop()
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last == "token" and before in _PLAIN_TOKENS:
        return False
    if before in _PLAIN_BEFORE.get(last, ()):
        return False
    if last == "key" and before in _SECRET_KEYS:
        return True
    return last in _SECRET_WORDS or (before, last) in _SECRET_PAIRS or _ends_with_pair(words)


def _ends_with_pair(words: list[str]) -> bool:
    """`AWS_SECRET_ACCESS_KEY`, `webhook_url`, `token_value`."""
    return (
        len(words) > 1
        and words[-1] in ("value", "url", "uri")
        and words[-2] in (_SECRET_WORDS - {"auth", "pass"})
    )


_PATH = re.compile(r"~?/(?:[\w.+-]+/)*[\w.+-]*|[\w./~-]+\.(?:pem|crt|key|json|yaml|txt)")
"""A path of a file that holds a secret is none."""


def _is_harmless(value: str) -> bool:
    return (
        not value
        or value == HIDDEN
        or value.lower() in HARMLESS
        or value.startswith("$")
        or re.fullmatch(r"/(?:[\w.+-]+/)*[\w.+-]*|~?(?:/[\w.+-]+)+|.*\.(?:pem|crt|key|json|yaml|txt)", value)
        is not None
    )


# -- shapes ---------------------------------------------------------------------------------------------

_SHAPES = "|".join(
    (
        r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}",  # AWS
        r"AIza[\w-]{30,}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}|1//0[\w-]{30,}",  # Google
        r"hf_[A-Za-z0-9]{10,}|api_org_[A-Za-z0-9]{20,}",  # Hugging Face
        r"gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{20,}|gl(?:pat|dt|rt|ptt|cbt|agent)-[\w.-]{16,}",
        r"xox[abeoprs]-[\w-]{10,}|xapp-[\w-]{10,}",  # Slack
        r"sk-[A-Za-z0-9][\w-]{15,}|sess-[A-Za-z0-9]{20,}",  # OpenAI, Anthropic, OpenRouter, DeepSeek
        r"wandb_v\d_\w{20,}|local-[0-9a-f]{40}",  # Weights & Biases
        r"nvapi-[\w-]{20,}|gsk_[A-Za-z0-9]{20,}|xai-[A-Za-z0-9]{20,}|pplx-[A-Za-z0-9]{20,}|r8_[A-Za-z0-9]{20,}",
        r"dapi[0-9a-f]{32}|dop_v1_[0-9a-f]{40,}|dckr_pat_[\w-]{20,}|tskey-[\w-]{16,}|hv[sbr]\.[\w-]{20,}",
        r"npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|SG\.[\w-]{16,}\.[\w-]{16,}|SK[0-9a-f]{32}|key-[0-9a-f]{32}",
        r"[sr]k_(?:live|test)_[A-Za-z0-9]{16,}|whsec_[A-Za-z0-9+/=]{16,}|shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}",
        r"gl(?:sa|c)_[\w=]{20,}|NRAK-[A-Z0-9]{20,}|sntry[su]_[\w=+/-]{20,}|lin_api_\w{20,}|ntn_\w{20,}",
        r"AGE-SECRET-KEY-1[A-Z0-9]{20,}|PMAK-[\w-]{20,}|CFPAT-[\w-]{20,}|atlasv1\.[\w=-]{20,}",
        r"eyJ[\w-]{8,}\.eyJ[\w-]{8,}(?:\.[\w-]+)?|eyJhcGlf[\w+/=-]{20,}",  # JWT, Neptune
        r"\d{8,10}:AA[\w-]{32,34}",  # Telegram
    )
)
_SHAPE = re.compile(rf"(?<![A-Za-z0-9])(?:{_SHAPES})(?![A-Za-z0-9])")
_PEM = re.compile(
    r"(-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----)"
    r"(?:(?!-----END)[\w+/=\s\\:,.()*-])*(-----END [A-Z0-9 ]*-----)?"
)
_PASSWORD_OF_URL = re.compile(r"([A-Za-z][\w+.-]{0,20}://)([^\s/@:\"'<>?#]*)(:[^\s/@\"'<>]*)?@(?=[\w\[])")
_WEBHOOK = re.compile(
    r"(https?://(?:[\w.-]*hooks?\.[\w.-]+|[\w.-]+\.webhook\.office\.com|[\w.-]*logic\.azure\.com)(?::\d+)?/)[^\s\"'<>\\,)\]}]+"
    r"|(https?://[\w.-]+(?::\d+)?/(?:[\w.-]+/)*?(?:webhooks?|hooks?|hook/v\d|bot(?=\d+:))/?)[^\s\"'<>\\,)\]}]+",
    re.IGNORECASE,
)
_SIGNATURE = re.compile(r"([?&]Signature=)[^&\s\"'<>]+", re.IGNORECASE)
_AFTER_SCHEME = re.compile(r"(\b(?:[Bb]earer|[Bb]asic|BEARER|Token)\s+)([\w.~+/=-]{8,})")
_OPTION = re.compile(
    r"(?P<lead>(?<![\w-])--?(?P<name>[A-Za-z][\w-]{1,60})(?:=|[\"']?\s*,\s*[\"']|\s+)[\"']?)(?P<value>[^\s\"',;\]})]+)"
)
_ASSIGNMENT = re.compile(
    r"(?P<lead>(?<![\w$-])(?P<name>[A-Za-z][\w.-]{1,80})(?P<close>\\*[\"'])?\s{0,3}(?P<sign>=>?|:)(?!//)\s{0,3}"
    r"(?P<open>\\*[\"'])?)(?P<value>(?(open)[^\"'\\\r\n]+|[^\s\"',;&\\\])}]+))"
)
_VARIABLE_LINE = re.compile(
    r"(?P<lead>\b(?P<name>[A-Za-z][\w-]{1,60})\s+(?:is|was)\s+[\"']?)(?P<value>[^\s\"',;]{8,})"
)


def shaped(text: str) -> str:
    """The text without what looks like a secret, by name or by shape."""
    if len(text) < LEAST_VALUE or text.isalpha():
        return text
    if "PRIVATE KEY" in text:
        text = _PEM.sub(lambda found: f"{found[1]}{HIDDEN}{found[2] or ''}", text)
    if "://" in text:
        text = _WEBHOOK.sub(lambda found: f"{found[1] or found[2]}{HIDDEN}", text)
        text = _PASSWORD_OF_URL.sub(_without_password, text)
        text = _SIGNATURE.sub(rf"\g<1>{HIDDEN}", text)
    text = _AFTER_SCHEME.sub(_without_credentials, text)
    if "-" in text:
        text = _OPTION.sub(_without_value, text)
    if "=" in text or ":" in text:
        text = _ASSIGNMENT.sub(_without_value, text)
    if " is " in text or " was " in text:
        text = _VARIABLE_LINE.sub(_without_value, text)
    return _SHAPE.sub(HIDDEN, text)


def _without_password(found: re.Match[str]) -> str:
    scheme, user, password = found[1], found[2], found[3]
    if password is not None:
        return f"{scheme}{user if not _looks_random(user) else HIDDEN}:{HIDDEN}@"
    if (scheme.startswith(("http", "git+http")) and user not in ("git", "")) or _looks_random(user):
        return f"{scheme}{HIDDEN}@"
    return found[0]


def _looks_random(text: str) -> bool:
    """Whether a word is none that people make up for a name."""
    return len(text) >= 16 and any(one.isdigit() for one in text) and any(one.isalpha() for one in text)


def _without_credentials(found: re.Match[str]) -> str:
    value = found[2]
    is_one = len(value) >= 16 or any(one.isdigit() or one.isupper() for one in value[1:])
    return f"{found[1]}{HIDDEN}" if is_one and "error=" not in value else found[0]


def _without_value(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"]
    if not is_secret_name(name) or _is_harmless(value.strip()) or HIDDEN in value:
        return found[0]
    groups = found.groupdict()
    quoted = bool(groups.get("open"))
    if not quoted and _says_nothing(name, value, is_prose=groups.get("sign") in (":", None)):
        return found[0]
    if _is_vocabulary(name) and value.isdigit():
        return found[0]
    return f"{found['lead']}{HIDDEN}"


def _is_vocabulary(name: str) -> bool:
    """Whether numbers under this name are counts or ids."""
    return name.lower().rstrip("0123456789").endswith(("token", "sig", "pass", "signature"))


def _says_nothing(name: str, value: str, *, is_prose: bool) -> bool:
    """Whether a value without quotes is a word of a sentence: `the token: expired`, `--token NAME`."""
    return (
        is_prose and value.strip(".…").isalpha() and (value.islower() or value.isupper()) and len(value) < 16
    )


# -- values ---------------------------------------------------------------------------------------------


def values_in(data: Any, *, named: bool = False) -> Iterator[tuple[str, bool]]:
    """The secret values of plain data, and whether their name says so: what stands under secret names, after secret
    options, in URLs."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            name = str(key)
            secret = (
                named or is_secret_name(name) or (name.lower() in _HEADERS and isinstance(value, Mapping))
            )
            yield from values_in(value, named=secret and name.lower() not in _PLAIN_HEADERS)
    elif isinstance(data, list | tuple):
        after = False
        for one in data:
            yield from values_in(one, named=named or after)
            after = isinstance(one, str) and _is_option(one)
    elif isinstance(data, str):
        if named and not _is_harmless(data):
            yield data, True
        yield from ((one, True) for one in _values_in_text(data))
    elif named and isinstance(data, int) and not isinstance(data, bool):
        yield str(data), True


def _is_option(text: str) -> bool:
    return text.startswith("-") and "=" not in text and is_secret_name(text)


def _values_in_text(text: str) -> Iterator[str]:
    """What `shaped` would hide, as far as it is one value."""
    for found in _PASSWORD_OF_URL.finditer(text):
        hidden = _without_password(found)
        for value in (found[3][1:] if found[3] else "", found[2]):
            if value and hidden != found[0] and value not in hidden:
                yield value
                yield unquote(value)
    for found in _PEM.finditer(text):
        body = found[0].removeprefix(found[1]).removesuffix(found[2] or "")
        yield from (line for line in re.split(r"\s|\\n", body) if len(line) >= LONG_VALUE)
    for found in _WEBHOOK.finditer(text):
        yield found[0][len(found[1] or found[2]) :]
    for pattern in (_OPTION, _ASSIGNMENT):
        for found in pattern.finditer(text):
            if _without_value(found) != found[0]:
                yield found["value"]
    for found in _SHAPE.finditer(text):
        yield found[0]


def values_of_environment(
    environment: Mapping[str, str], names: Iterable[str] = ()
) -> Iterator[tuple[str, bool]]:
    """The values of variables that are called like secrets or look like some, and of these `names`."""
    named = set(names)
    for name, value in environment.items():
        if name in named or (is_secret_name(name) and not _is_harmless(value)):
            yield value, True
            if path := value.partition("://")[2].partition("/")[2]:  # a log may have an address's path alone
                yield path, True
        yield from ((one, True) for one in _values_in_text(value))


class Secrets:
    """Values that must not leave, besides what looks like a secret. May be used by several threads."""

    def __init__(self, values: Iterable[tuple[str, bool]] = ()) -> None:
        self._lock = threading.Lock()
        self._values: set[str] = set()
        self._words: set[str] = set()
        self._forms: list[str] = []
        """Of the values, the longest first, so that no part of one is left."""
        self._short: re.Pattern[str] | None = None
        self._broken: list[tuple[str, re.Pattern[str]]] = []
        """How a value is found that is broken over lines, and how it begins."""
        self._cached = lru_cache(1 << 13)(self._text)
        self.learn(values)

    def learn(self, values: Iterable[tuple[str, bool]]) -> None:
        """These values are secret from now on; each with whether its name says so."""
        with self._lock:
            before = len(self._values) + len(self._words)
            for value, is_named in values:
                if value.strip().lower() in HARMLESS:
                    continue
                if len(value) >= LEAST_VALUE:
                    self._values.add(value)
                elif is_named and len(value) >= LEAST_NAMED:
                    self._words.add(value)
            if len(self._values) + len(self._words) == before:
                return
            forms = {form for value in self._values for form in _forms(value)}
            self._forms = sorted(forms, key=len, reverse=True)
            words = "|".join(map(re.escape, sorted(self._words, key=len, reverse=True)))
            self._short = re.compile(rf"(?<![\w.-])(?:{words})(?![\w.-])") if words else None
            self._broken = [(one[:4], _broken(one)) for one in self._values if _may_be_broken(one)]
            self._cached.cache_clear()

    @property
    def values(self) -> frozenset[str]:
        return frozenset(self._values)

    def text(self, text: str) -> str:
        """The text with `***` for each secret."""
        return self._cached(text) if len(text) <= 512 else self._text(text)

    def _text(self, text: str) -> str:
        for form in self._forms:
            if form in text:
                text = text.replace(form, HIDDEN)
        if self._short is not None:
            text = self._short.sub(HIDDEN, text)
        if "\n" in text or "\x1b" in text:
            for begin, broken in self._broken:
                if begin in text:
                    text = broken.sub(HIDDEN, text)
        return shaped(text)

    def data(self, data: Any, *, named: bool = False) -> Any:
        """Plain data with `***` for each secret: mappings keep their keys, lists their length."""
        if isinstance(data, str):
            return _named(data) if named and not _is_harmless(data) else self.text(data)
        if isinstance(data, Mapping):
            return {
                key: value
                if key == "token" and "instance" in data  # an instance's: the name of one
                else self._value(str(key), value, named)
                for key, value in data.items()
            }
        if isinstance(data, list | tuple):
            shown, after = [], False
            for one in data:
                shown.append(self.data(one, named=named or after))
                after = isinstance(one, str) and _is_option(one)
            return shown if isinstance(data, list) else tuple(shown)
        if named and isinstance(data, int) and not isinstance(data, bool):
            return HIDDEN
        return data

    def _value(self, name: str, value: Any, named: bool) -> Any:
        if named:
            return self.data(value, named=name.lower() not in _PLAIN_HEADERS)
        if name.lower() in _HEADERS and isinstance(value, Mapping):
            return {key: self._value(str(key), one, True) for key, one in value.items()}
        if not is_secret_name(name):
            return self.data(value)
        return value if isinstance(value, int) and _is_vocabulary(name) else self.data(value, named=True)


_ADDRESS = re.compile(r"(https?://)(?:[^/@\s]*@)?([\w.:\[\]-]+)(?:/.*)?")


def _named(value: str) -> str:
    """What is shown of a value whose name says that it is secret: of an address its host."""
    found = _ADDRESS.fullmatch(value)
    return f"{found[1]}{found[2]}/{HIDDEN}" if found else HIDDEN


def _forms(value: str) -> set[str]:
    """The value as it is, as JSON and URLs write it, and if it is long as base64 does."""
    plain = {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
    plain |= {quote(value), quote(value, safe=""), quote_plus(value)}
    return plain | set(_in_base64(value)) if len(value) >= LONG_VALUE else plain


def _may_be_broken(value: str) -> bool:
    return LONG_VALUE <= len(value) <= 512 and value.isprintable() and " " not in value


def _broken(value: str) -> re.Pattern[str]:
    return re.compile(r"(?:\x1b\[[0-9;]*[A-Za-z]|\\?\r?\n[ \t>|]*)*".join(map(re.escape, value)))


def _in_base64(value: str) -> Iterator[str]:
    """What stands in base64 wherever the value is within what was encoded."""
    data = value.encode()
    for shift in range(3):
        whole = base64.b64encode(b"\0" * shift + data).decode().rstrip("=")
        begin = (shift * 8 + 5) // 6
        end = (shift + len(data)) * 8 // 6
        for form in (whole[begin:end], whole[begin:end].replace("+", "-").replace("/", "_")):
            if len(form) >= LONG_VALUE:
                yield form


KNOWN = Secrets()
"""What is secret in this process: of the configurations that it read, and of its environment."""
