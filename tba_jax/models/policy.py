"""What of a policy is trained and published, and what stays frozen: everything and nothing, or adapters and the model."""

import dataclasses

import jax
from jax.sharding import Mesh

from tba_jax.models import decoder, parameters, quantize
from tba_jax.models import lora as lora_lib
from tba_jax.models.parameters import Params, Specs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """A decoder, and LoRA adapters on it or None. `base` below is the reference policy that a run starts from."""

    model: decoder.DecoderConfig
    lora: lora_lib.LoraConfig | None = None

    @property
    def model_specs(self) -> Specs:
        return decoder.param_specs(self.model)

    @property
    def trained_specs(self) -> Specs:
        """Of what the optimiser, the gradients and published snapshots hold."""
        return self.model_specs if self.lora is None else lora_lib.adapter_specs(self.model_specs, self.lora)

    @property
    def snapshot_dtype(self) -> str:
        """In which samplers load snapshots: whole policies as they compute with them, adapters as they were trained."""
        return self.model.compute_dtype if self.lora is None else "float32"

    def model_shardings(self, mesh: Mesh) -> Params:
        return parameters.shardings(self.model_specs, mesh)

    def trained_shardings(self, mesh: Mesh) -> Params:
        return parameters.shardings(self.trained_specs, mesh)

    def initial(self, base: Params, key: jax.Array) -> Params:
        """The trained part of a run that starts from `base`: the policy is then what `base` is."""
        return base if self.lora is None else parameters.init(key, self.trained_specs)

    def for_training(self, trained: Params, frozen: Params) -> Params:
        """What the decoder is called with, differentiable in `trained`. frozen: base, in the compute dtype; {} without LoRA."""
        return trained if self.lora is None else lora_lib.attach(frozen, trained, self.lora)

    def for_sampling(self, trained: Params, base: Params, weights: str) -> Params:
        """Plain weights of the policy in the compute dtype: adapters merged, then quantised if `weights` is "int8"."""
        merged = trained if self.lora is None else lora_lib.merge(base, trained, self.lora)
        if weights not in ("full", "int8"):
            raise ValueError(f"weights={weights!r} is neither 'full' nor 'int8'")
        if weights == "int8":
            merged = quantize.quantize(merged, self.model_specs)
        return decoder.cast(merged, self.model)
