"""A decoder with its optimizer over Megatron's ranks: passes in, a gradient summed, one step out.

Invariants:
- *one gradient*: the step is that of the sum of all passes' losses over all replicas, divided once by a number that
  the caller gives, however the passes were cut and dealt;
- *finite or untouched*: a gradient that is not finite is refused before any weight changes;
- *float32 where it adds up*: gradients are summed, and bfloat16 weights kept, in float32;
- *kept busy*: a call returns when a GPU begins with its last pass, and no copy and no number is waited for before. The
  caller makes the next passes meanwhile, and what it measures is right to within one pass.

Each method is a collective of a replica, or (`step`, `zero`) of all ranks. This module must not know about groups,
rewards or steps' numbers, and must not be imported before `seam.open_seam`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from gyre.config.sections import MegatronSettings, OptimSettings
from gyre.models.architecture import Architecture
from gyre.models.safetensors_folder import TensorSource
from gyre.workloads.learner.errors import NotFinite
from gyre.workloads.learner.packing import Pass
from gyre.workloads.megatron.model.config import recompute_layers, transformer_config
from gyre.workloads.megatron.model.gpt import SegmentParams, build_model
from gyre.workloads.megatron.model.hugging_face import import_weights
from gyre.workloads.megatron.model.parallel import MegatronRanks
from gyre.workloads.megatron.steps.logprobs import vocab_parallel_logprobs

Loss = Callable[[Pass, Tensor, Tensor], tuple[Tensor, Any]]
"""From a pass, its log-probs and entropies `[n]`: a summed loss, and whatever is to be returned with it."""

ValueLoss = Callable[[Pass, Tensor], tuple[Tensor, Any]]
"""The same of a pass and its values `[n]`."""


class MegatronPolicy:
    """`module` is the bare GPTModel of this rank. Its weights are `source`'s; without one they are undefined until
    `load`. Unless it `trains` it has no optimizer and no room for gradients, and `logprobs` is all that it does. With
    `values` it has a value head instead of an output layer: `backward_values` and `token_values` are then what it does,
    and its embedding must not be tied."""

    def __init__(
        self,
        architecture: Architecture,
        settings: MegatronSettings,
        optim: OptimSettings,
        ranks: MegatronRanks,
        source: TensorSource | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
        seam: Callable[[], AbstractContextManager[Any]],
        trains: bool = True,
        values: bool = False,
    ) -> None:
        self.architecture = architecture
        self.settings = settings
        self.optim = optim
        self.ranks = ranks
        self.device = device
        self.dtype = dtype
        self.values = values
        self._last_begun: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        """When a GPU begins with the last of the passes that it was given."""
        self.config = transformer_config(architecture, settings, device=device, dtype=dtype)
        with seam():
            self.module: GPTModel = build_model(
                architecture,
                self.config,
                first_stage=ranks.first_stage,
                last_stage=ranks.last_stage,
                device=device,
                values=values,
            )
            if source is not None:
                import_weights(self.module, architecture, ranks, source, values=values)
            self._inner: Any = (
                self.module if dtype == torch.float32 else Float16Module(self.config, self.module)
            )
            if trains:
                self._wrap()
        self._seam = seam

    def _wrap(self) -> None:
        self.ddp = DistributedDataParallel(
            self.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=False,  # nobody knows which micro-batch will be the last
                use_distributed_optimizer=self.settings.distributed_optimizer,
            ),
            self._inner,
        )
        self.ddp.train()
        self._inner = self.ddp
        optim = self.optim
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=optim.rate,
                min_lr=0.0,
                weight_decay=optim.weight_decay,
                adam_beta1=optim.beta1,
                adam_beta2=optim.beta2,
                adam_eps=optim.eps,
                clip_grad=optim.clip_norm,
                params_dtype=self.dtype,
                bf16=self.dtype == torch.bfloat16,
                use_distributed_optimizer=self.settings.distributed_optimizer,
            ),
            [self.ddp],
        )
        for group in self.optimizer.param_groups:
            if "foreach" in group:  # torch's AdamW, where there is no Transformer Engine
                group["fused"] = True

    def load(self, source: TensorSource) -> None:
        """Take other weights. What the optimizer knows of the old ones stays."""
        with self._seam():
            import_weights(self.module, self.architecture, self.ranks, source, values=self.values)
            if hasattr(self, "optimizer"):
                self.optimizer.reload_model_params()

    def recompute(self, *, on: bool) -> None:
        """Whether each layer's activations are computed again in the backward pass, from the next pass on."""
        recompute_layers(self.config, on=on)

    # -- one optimizer step ---------------------------------------------------------------------------

    def zero(self) -> None:
        """Forget every gradient."""
        with self._seam():
            self.ddp.zero_grad_buffer()
            self.optimizer.zero_grad()

    def backward(
        self,
        passes: Sequence[Pass],
        loss: Loss,
        *,
        temperature: float,
        entropy_gradient: bool = False,
    ) -> list[Any]:
        """Add the gradient of the passes' losses. Returns what `loss` returned beside each, on the last stage's ranks;
        nothing on others. A GPU may still be at the last pass: see *kept busy*."""
        read = self._log_probs(temperature, entropy_gradient)

        def of_logits(part: Pass, logits: Tensor) -> tuple[Tensor, Any]:
            return loss(part, *read(part, logits))

        return self._run(passes, of_logits, forward_only=False)

    def logprobs(self, passes: Sequence[Pass], *, temperature: float) -> list[tuple[Tensor, Tensor]]:
        """Log-probs and entropies `[n]` of each pass, on the last stage's ranks; nothing on others."""
        read = self._log_probs(temperature, entropy_gradient=False)

        def keep(part: Pass, logits: Tensor) -> tuple[Tensor, Any]:
            found = read(part, logits)
            return found[0].sum(), found

        return self._run(passes, keep, forward_only=True)

    def backward_values(self, passes: Sequence[Pass], loss: ValueLoss) -> list[Any]:
        """See `backward`; the loss is over values."""

        def of_output(part: Pass, output: Tensor) -> tuple[Tensor, Any]:
            return loss(part, _token_values(part, output))

        return self._run(passes, of_output, forward_only=False)

    def token_values(self, passes: Sequence[Pass]) -> list[Tensor]:
        """The values float32 `[n]` before each predicted token of each pass, on the last stage's ranks; nothing on
        others."""

        def keep(part: Pass, output: Tensor) -> tuple[Tensor, Any]:
            found = _token_values(part, output)
            return found.sum(), found

        return self._run(passes, keep, forward_only=True)

    def _log_probs(
        self, temperature: float, entropy_gradient: bool
    ) -> Callable[[Pass, Tensor], tuple[Tensor, Tensor]]:
        def read(part: Pass, logits: Tensor) -> tuple[Tensor, Tensor]:
            return vocab_parallel_logprobs(
                logits,
                part.targets,
                vocab=self.architecture.vocab,
                temperature=temperature,
                group=self.ranks.tensor_group,
                rows=part.columns,
                entropy_gradient=entropy_gradient,
            )

        return read

    def _run(
        self,
        passes: Sequence[Pass],
        of_output: Callable[[Pass, Tensor], tuple[Tensor, Any]],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """`of_output(pass, the last stage's output [width, …])` gives a loss and what is to be returned."""
        if not passes:
            return []

        def forward(queue: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
            part: Pass = next(queue).to(self.device)
            if self._last_begun is not None:
                self._last_begun.record()
            self.module.rotary_pos_emb.positions = part.positions
            options = {} if self.dtype == torch.float32 else {"fp32_output": False}
            out: Tensor = model(
                part.tokens[None],
                part.positions[None],
                None,
                packed_seq_params=SegmentParams.of(part.lengths, self.device, part.parents),
                **options,
            )

            def judged(output: Tensor) -> tuple[Tensor, Tensor, Any]:
                total, told = of_output(part, output[0])
                return total, _NO_TOKENS, told

            return out, judged

        with self._seam(), torch.set_grad_enabled(not forward_only):
            told: list[Any] = get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(passes),
                model=[self._inner],
                num_microbatches=len(passes),
                seq_length=max(
                    len(part.tokens) for part in passes
                ),  # a hint: lengths are told with the tensors
                micro_batch_size=1,
                forward_only=forward_only,
            )
        if self._last_begun is not None:
            self._last_begun.synchronize()
        return told

    def close(self) -> None:
        """Cut the tie that keeps a model that trains in memory, and with it the groups of its ranks: autograd's nodes
        hold hooks that hold the model, which holds the nodes, and Python's collector does not see through autograd.
        Call nothing afterwards."""
        if hasattr(self, "ddp"):  # of a model that trains
            self.ddp.grad_accs.clear()

    def step(self, *, count: float, lr: float) -> float:
        """Divide the gradient by `count`, clip it and step; its norm before the clip. All gradients are zero then.

        Raises NotFinite on all ranks together. The gradient is then of no more use: call `zero`.
        """
        with self._seam():
            finalize_model_grads([self.ddp])
            self.ddp.scale_gradients(1.0 / max(count, 1.0))
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())
            if not math.isfinite(norm):
                raise NotFinite(f"the gradient has norm {norm}.", hint="Lower optim.lr.")
            for one in self.optimizer.chained_optimizers:
                clip_grad_by_total_norm_fp32(one.get_parameters(), self.optim.clip_norm, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
                group["weight_decay"] = self.optim.weight_decay * group["wd_mult"]
            self.optimizer.step_with_ready_grads()
        self.zero()
        return norm


def _token_values(part: Pass, output: Tensor) -> Tensor:
    return output[:, 0].float().index_select(0, part.columns)


_NO_TOKENS = torch.tensor(0, dtype=torch.int)
"""Megatron asks each micro-batch for what to divide by; here the mini-batch knows."""
