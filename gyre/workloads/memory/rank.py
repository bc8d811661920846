"""What a rank of a learner has on its device, part by part, at the moment of a step when it has most.

Three moments of a pass can be the one: when the loss's gradient goes through the output layer and all activations are
there; when it goes through the last layer; and when it comes to the embedding, whose gradient is large, and no
activation is left.

Invariant *of the code*: every term is one that the back end's code makes, with the dtype that it has there; nothing
is fitted to measurements but the constants, which say so.

This module must not import torch, nor know of jobs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gyre.config.sections import FsdpSettings, LoraSettings, MegatronSettings
from gyre.models.architecture import Architecture
from gyre.workloads.memory import activations
from gyre.workloads.memory.parameters import adapter_of, parameters_of

WORKSPACES = 96 << 20
"""Bytes that cuBLAS and cuBLASLt take of torch's allocator: 8 buffers of 4 MiB by `CUBLAS_WORKSPACE_CONFIG`, as kernels
that give the same bits want it, and 32 MiB for each of the two streams that compute."""

MULTIPROCESSORS = 132
"""Of an H100 and an H200. The kernel that gives the same bits each time keeps as many partial sums of the queries'
gradient as make it busy."""

LOGITS_BLOCK = 1 << 25
"""`_BLOCK_ELEMENTS` of `gyre.workloads.megatron.steps.logprobs`."""

LOGITS_PIECE = 1 << 27
"""`PIECE_ELEMENTS` of `gyre.workloads.fsdp.logprobs`."""

PATH_KEYS = 4
"""`PATH_KEYS` of `gyre.workloads.learner.packing`."""

FLOAT = activations.FLOAT


@dataclass(frozen=True, slots=True)
class PassSize:
    """`tokens` of a pass, in `sequences`; all of them may be predicted."""

    tokens: int
    sequences: int = 1

    @classmethod
    def of(cls, tokens: int, longest: int) -> PassSize:
        """Of sequences of `longest` tokens: where they are shorter, and more, attention takes no more."""
        return cls(tokens, max(1, tokens // max(1, longest)))


Parts = dict[str, int]
"""Bytes by what they are of."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """`static` is there from the first step on, whatever a pass is."""

    shape: Architecture
    width: int
    """Bytes of a number that the model computes with."""
    trains: bool
    values: bool
    deterministic: bool
    static: Parts = field(default_factory=dict)
    path_keys: int = 1
    """How many times as many keys as tokens a pass of several sequences has at most: those of its nodes' paths."""
    recompute: bool = False
    """Whether a layer's activations are computed again in the backward pass; where that is not decided, they are
    kept."""

    def peak(self, part: PassSize) -> Parts:
        """The parts at the moment when they are most together, largest first."""
        most = max(self._moments(part), key=lambda parts: sum(parts.values()))
        whole = {**self.static, **{name: int(size) for name, size in most.items() if size}}
        return dict(sorted(whole.items(), key=lambda item: -item[1]))

    def bytes_of(self, part: PassSize) -> int:
        return sum(self.peak(part).values())

    def held(self, tokens: int) -> int:
        """Bytes of activations that are there when the loss's gradient begins, beside logits."""
        raise NotImplementedError

    def _moments(self, part: PassSize) -> Iterable[Parts]:
        raise NotImplementedError

    def _along_paths(self, part: PassSize) -> int:
        """Keys that are gathered along paths; 0 where each sequence attends to itself."""
        return part.tokens * self.path_keys if self.path_keys > 1 and part.sequences > 1 else 0

    def _attention_back(self, part: PassSize, *, queries: int, heads: int, expanded: bool) -> int:
        """Bytes that attention's backward takes: gradients of queries, keys and values for every head of queries, and
        sums in float32. Keys and values of paths are gathered again, and then there are they and their gradients."""
        sums = 1
        if self.deterministic:
            sums = -(-MULTIPROCESSORS // (part.sequences * heads))
        gradients = self.width * queries * (4 if not expanded else 5)
        rows = part.tokens + 128 * part.sequences
        keys = self._along_paths(part)
        found = self.width * queries * (2 * part.tokens + 4 * keys) if keys else part.tokens * gradients
        return found + sums * rows * queries * FLOAT


@dataclass(frozen=True, slots=True)
class MegatronRank(RankMemory):
    """The first or the last rank of a pipeline, whichever has more, is not known here: see `megatron_ranks`."""

    tensor_parallel: int = 1
    sequence_parallel: bool = False
    first: bool = True
    last: bool = True
    layers: int = 0
    """Layers whose activations are there at once: of all passes that are in this stage's pipeline."""
    columns: int = 0
    """Of the logits here."""
    tied: bool = False

    def held(self, tokens: int) -> int:
        a, w = self.shape, self.width
        each = self.layers * (self._kept() if self.recompute else self._layer())
        each += 8 * self.first + activations.angles(a, width=w, whole=False)
        if self.recompute:
            each += FLOAT * a.head_dim  # the angles themselves go into each layer again
        if self.last:
            each += (2 * w * a.hidden + FLOAT) // self._sharded
        return tokens * each

    @property
    def _sharded(self) -> int:
        """Ranks over which norms are sharded."""
        return self.tensor_parallel if self.sequence_parallel else 1

    def _layer(self) -> int:
        return activations.megatron_layer(
            self.shape,
            width=self.width,
            tensor_parallel=self.tensor_parallel,
            sequence_parallel=self.sequence_parallel,
        )

    def _kept(self) -> int:
        return activations.kept_input(self.shape, width=self.width) // self._sharded

    def _moments(self, part: PassSize) -> Iterable[Parts]:
        a, tokens, share = self.shape, part.tokens, self.tensor_parallel
        layer = tokens * self._layer()
        if not self.trains:
            layer += self.width * 2 * a.heads * a.head_dim * self._along_paths(part)
            back = self.width * self.columns * tokens + _blocks(tokens, self.columns, 4) if self.last else 0
            yield {"activations": layer, "logits": 0}
            yield {"activations": self.width * 2 * a.hidden * tokens, "logits": back}
            return
        held = self.held(tokens)
        head_gradient = self.width * self.columns * a.hidden if self.columns else 0
        if self.last:
            logits = self.width * self.columns * tokens
            yield {"activations": held, "logits": 2 * logits + _blocks(tokens, self.columns, 3.5)}
            yield {"activations": held, "logits": logits, "gradients on their way": head_gradient}
        queries, inner = a.heads * a.head_dim // share, a.mlp // share
        residual = 2 * self.width * a.hidden * tokens
        # Of the MLP two gradients are there when what it kept goes; it is gone when attention's begins.
        mlp = 2 * self.width * inner * tokens
        attention = self._attention_back(part, queries=queries, heads=a.heads // share, expanded=False)
        attention -= 3 * self.width * inner * tokens
        on_their_way = 2 * self.width * inner * a.hidden + (head_gradient if self.tied and self.last else 0)
        yield {
            "activations": held + (layer if self.recompute else 0) + residual + max(mlp, attention),
            "gradients on their way": on_their_way,
        }
        if self.first:
            vocabulary = self.width * -(-a.vocab // share) * a.hidden
            yield {"gradients on their way": vocabulary * (2 if self.tied and self.last else 1)}


def _blocks(tokens: int, columns: int, count: float) -> int:
    """Of so many float32 copies of a block of logits."""
    return int(count * min(tokens * columns, LOGITS_BLOCK) * FLOAT)


def megatron_ranks(
    shape: Architecture,
    settings: MegatronSettings,
    *,
    ranks: int,
    width: int,
    trains: bool = True,
    values: bool = False,
) -> list[MegatronRank]:
    """The ranks of a gang of `ranks` that differ in what they have: the first and the last stage's."""
    share, stages = settings.tensor_parallel, settings.pipeline_parallel
    replicas = max(1, ranks // (share * stages))
    tied = shape.tied and not values
    found = []
    for stage in sorted({0, stages - 1}):
        first, last = stage == 0, stage == stages - 1
        own = parameters_of(
            shape,
            values=values,
            tensor_parallel=share,
            layers=shape.layers // stages,
            first=first,
            last=last,
            padded=True,
        )
        rows = own.embedding // shape.hidden if first else own.head // shape.hidden
        states = _megatron_states(own.total, settings, width=width, replicas=replicas) if trains else {}
        found.append(
            MegatronRank(
                shape=shape,
                width=width,
                trains=trains,
                values=values,
                deterministic=settings.deterministic,
                static={"weights": width * own.total, **states, "workspaces": WORKSPACES},
                tensor_parallel=share,
                sequence_parallel=settings.sequence_parallel,
                recompute=settings.recompute is True,
                first=first,
                last=last,
                layers=own.layers * (stages - stage),
                columns=0 if values or not last else rows,
                tied=tied,
            )
        )
    return found


def _megatron_states(numbers: int, settings: MegatronSettings, *, width: int, replicas: int) -> Parts:
    share = replicas if settings.distributed_optimizer else 1
    own = 2 * FLOAT if width == FLOAT else 3 * FLOAT  # float32 weights are the model's own
    return {"gradients": FLOAT * numbers, "optimizer": own * numbers // share}


@dataclass(frozen=True, slots=True)
class FsdpRank(RankMemory):
    lora: LoraSettings | None = None
    fused: bool = False
    layer: int = 0
    """Numbers of a layer, whole."""
    trained_layer: int = 0
    """Those of them that are trained."""
    outside: int = 0
    vocabulary: int = 0
    """Numbers of the output layer, if it is no value head."""
    ranks: int = 1

    def held(self, tokens: int) -> int:
        a, w = self.shape, self.width
        each = a.layers * (activations.kept_input(a, width=w) if self.recompute else self._layer())
        each += 8 + activations.angles(a, width=w, whole=True)
        norm = FLOAT + activations.normed(a.hidden, width=w, fused=self.fused, trained=self._whole)
        return tokens * (each + norm + w * a.hidden)

    @property
    def _whole(self) -> bool:
        return self.trains and self.lora is None

    def _layer(self) -> int:
        return activations.fsdp_layer(self.shape, width=self.width, fused=self.fused, lora=self.lora)

    def _moments(self, part: PassSize) -> Iterable[Parts]:
        a, tokens, w = self.shape, part.tokens, self.width
        layer = tokens * self._layer()
        gathered = w * (self.outside + 2 * self.layer)
        """What is outside of the layers stays. Of a layer there are its parameters, and the buffer that the next one's
        come in."""
        if not self.trains:
            yield from self._forward_moments(part, gathered)
            return
        held = self.held(tokens)
        head = self.vocabulary if self._whole else 0
        # Pieces of the logits come one after another; their sum is there from the second one on.
        several = tokens * a.vocab > LOGITS_PIECE
        yield {
            "activations": held,
            "logits": self._pieces(tokens, 5 * FLOAT),
            "gradients on their way": (FLOAT + w) * head if several else 0,
            "gathered": gathered,
        }
        yield {"activations": held, "gradients on their way": (FLOAT + 2 * w) * head, "gathered": gathered}
        queries = a.heads * a.head_dim
        residual = 2 * w * a.hidden * tokens
        # Of the MLP two gradients are there when what it kept goes; it is gone when attention's begins.
        mlp = 2 * w * a.mlp * tokens
        attention = self._attention_back(part, queries=queries, heads=a.heads, expanded=True) - 2 * mlp
        yield {
            "activations": held + (layer if self.recompute else 0) + residual + max(mlp, attention),
            "gradients on their way": w * (head + self.trained_layer),
            "gathered": gathered,
        }
        # At its end a layer's gradient goes to its owners, and its activations are gone.
        moving = (w + FLOAT) * self.trained_layer + FLOAT * self.trained_layer // self.ranks
        yield {
            "activations": held - (0 if self.recompute else layer) + residual,
            "gradients on their way": w * head + moving,
            "gathered": gathered,
        }
        if self._whole:
            # The output layer's gradient is there from the beginning, the embedding's comes last.
            tied = self.vocabulary and self.outside < 2 * self.vocabulary
            grown = w * (self.outside + (self.vocabulary if tied else 0))
            yield {
                "gradients on their way": grown + FLOAT * self.outside + FLOAT * self.outside // self.ranks,
                "gathered": w * self.outside,
            }

    def _forward_moments(self, part: PassSize, gathered: int) -> Iterable[Parts]:
        """Those of a rank that does not train. `gathered` are the bytes of parameters that are there whole."""
        a, tokens, w = self.shape, part.tokens, self.width
        forward = 2 * FLOAT * a.hidden * tokens + w * max(3 * a.mlp, 4 * a.heads * a.head_dim) * tokens
        forward += w * 2 * a.heads * a.head_dim * self._along_paths(part)
        yield {"activations": forward, "gathered": gathered}
        yield {
            "activations": w * 2 * a.hidden * tokens,
            "logits": self._pieces(tokens, 14),
            "gathered": gathered,
        }

    def _pieces(self, tokens: int, bytes_each: int) -> int:
        """Of a piece of the logits: in the model's dtype, in float32, and what their gradient takes."""
        return min(tokens * self.shape.vocab, LOGITS_PIECE) * bytes_each if self.vocabulary else 0


def fsdp_rank(
    shape: Architecture,
    settings: FsdpSettings,
    *,
    ranks: int,
    width: int,
    lora: LoraSettings | None = None,
    trains: bool = True,
    values: bool = False,
) -> FsdpRank:
    """Each rank of a gang of `ranks`."""
    lora = lora if trains and not values else None
    own = parameters_of(shape, values=values)
    adapter = adapter_of(shape, lora) if lora is not None else 0
    trained = shape.layers * adapter if lora is not None else own.total
    base = width * own.total if not trains or lora is not None else FLOAT * own.total
    static = {"weights": (base + FLOAT * shape.layers * adapter) // ranks}
    if trains:
        static |= {
            "gradients": FLOAT * trained // (1 if settings.whole_gradient else ranks),
            "optimizer": 2 * FLOAT * trained // ranks,
        }
    return FsdpRank(
        shape=shape,
        width=width,
        trains=trains,
        values=values,
        deterministic=settings.deterministic,
        static={**static, "workspaces": WORKSPACES},
        lora=lora,
        recompute=settings.recompute is True,
        fused=settings.fused_kernels,
        layer=own.layer + adapter,
        trained_layer=adapter if lora is not None else own.layer,
        outside=own.outside,
        vocabulary=0 if values else shape.vocab * shape.hidden,
        ranks=ranks,
    )
