"""Small tokenizers with each kind of decoder: real ones of the `tokenizers` library, each a few hundred pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from gyre.chat.token_text import REPLACEMENT

LETTERS = "abcdenst é.,!?'"
SPECIAL = ("<s>", "</s>")
END = "<|im_end|>"


def byte_level() -> Tokenizer:
    """GPT-2's kind: each token is some bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "a"), ("Ã", "©"), ("ð", "Ł"), ("ä", "½")]
    pieces = [*alphabet, *(left + right for left, right in merges)]
    found = Tokenizer(models.BPE(vocab={one: at for at, one in enumerate(pieces)}, merges=merges))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    return found


def _falls_back(strips: bool) -> Tokenizer:
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *LETTERS.replace(" ", ""),
        "▁a",
        "ab",
    ]
    pieces += [REPLACEMENT, "日"]
    found = Tokenizer(
        models.BPE(
            vocab={one: at for at, one in enumerate(pieces)},
            merges=[("▁", "a"), ("a", "b")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    found.normalizer = normalizers.Replace(" ", "▁")
    if strips:
        found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps.append(decoders.Strip(" ", 1, 0))
    found.decoder = decoders.Sequence(steps)
    return found


def llama_2() -> Tokenizer:
    return _falls_back(strips=True)


def gemma() -> Tokenizer:
    return _falls_back(strips=False)


def word_piece() -> Tokenizer:
    words = [
        "[UNK]",
        *"abnst.,'!?é",
        *(f"##{one}" for one in "abst"),
        "do",
        "not",
        "n't",
        "'s",
        "'ve",
        "##'m",
    ]
    found = Tokenizer(models.WordPiece({one: at for at, one in enumerate(words)}, unk_token="[UNK]"))
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    found.decoder = decoders.WordPiece(cleanup=True)
    return found


def unigram() -> Tokenizer:
    pieces = [("<unk>", 0.0), ("▁", -1.0), *((one, -2.0) for one in "abcdé日"), ("▁a", -1.0)]
    found = Tokenizer(models.Unigram(pieces, unk_id=0))
    found.pre_tokenizer = pre_tokenizers.Metaspace()
    found.decoder = decoders.Metaspace()
    return found


def suffixes() -> Tokenizer:
    """GPT-1's kind: the end of a word is marked."""
    words = [*"abc", "a</w>", "b</w>", "c</w>", "é</w>"]
    found = Tokenizer(models.BPE({one: at for at, one in enumerate(words)}, [], end_of_word_suffix="</w>"))
    found.decoder = decoders.BPEDecoder(suffix="</w>")
    return found


def across_tokens() -> Tokenizer:
    """Its decoder replaces what may lie across tokens."""
    found = byte_level()
    found.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("ab", "c")])
    return found


def by_pattern() -> Tokenizer:
    found = byte_level()
    found.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace(Regex(" +"), " ")])
    return found


def no_decoder() -> Tokenizer:
    return Tokenizer(models.WordLevel({one: at for at, one in enumerate(("[UNK]", "a", "b", "é"))}, "[UNK]"))


KINDS: tuple[Callable[[], Tokenizer], ...] = (
    *(byte_level, llama_2, gemma, word_piece, unigram, suffixes, across_tokens, by_pattern, no_decoder),
)


def with_special(kind: Callable[[], Tokenizer]) -> Tokenizer:
    """With two special tokens, and an end token that it does not call special."""
    built = kind()
    built.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in SPECIAL])
    built.add_tokens([AddedToken(END, special=False, normalized=False)])
    return built
