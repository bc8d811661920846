"""The trained policy in verl's worker; what an actor does is `gyre.workloads.learner.policy`.

This module imports verl when it is set up, not before: naming the class costs little.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from gyre.config.sections import read_section
from gyre.errors import ConfigError
from gyre.workloads.learner.policy import PolicyLearner
from gyre_verl.backend.settings import VerlSettings

if TYPE_CHECKING:
    from gyre_verl.backend.backend import VerlBackend


class VerlActor(PolicyLearner):
    """The model is that of `config.model_path`, or the small decoder, whose `export_weights` has the decoder's own
    names, so that the plain torch roles go with it."""

    SECTIONS: ClassVar[dict[str, Any]] = {"verl": VerlSettings}

    backend: VerlBackend

    def make_backend(self) -> VerlBackend:
        """Raises ConfigError and ModelFolderError where verl cannot load the model, or its weights are others."""
        own = read_section(VerlSettings, self.config, "verl")
        if self.settings.lora is not None:
            raise ConfigError(
                "verl's workers train whole models under Gyre: config.lora is not taken.",
                hint="Remove config.lora, or use backend: fsdp.",
            )
        try:
            import verl  # noqa: F401 - to say in a sentence that it is not there
        except ImportError as error:
            raise ConfigError(
                f"backend: verl needs verl's environment: {error}.",
                hint="Run the job where gyre-verl[backend] is installed.",
            ) from error
        from gyre.workloads.fsdp.first_model import first_model
        from gyre_verl.backend.backend import VerlBackend

        self.trained_model = first_model(self.config, self.task)
        return VerlBackend(self.context, self.settings, self.optim, own, self.trained_model)
