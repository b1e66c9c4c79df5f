"""The trained and the frozen part of a policy. Without LoRA the whole model is trained; with LoRA the adapters are."""

import dataclasses
import functools
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from tba_jax.models import decoder, hardware, kv_cache, parameters
from tba_jax.models import lora as lora_lib
from tba_jax.models.config import DecoderConfig
from tba_jax.models.decoder import Decoder
from tba_jax.models.layers import linear_maps
from tba_jax.models.parameters import Definition, Params, Specs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """A decoder, with or without LoRA adapters. An argument `base` is the reference policy that a run starts from."""

    model: DecoderConfig
    lora: lora_lib.LoraConfig | None = None

    def on_device(self, device: Any) -> "Policy":
        """The policy as a role computes it on devices of this kind, see hardware.suited. Says what is not as it was asked for."""
        return dataclasses.replace(self, model=hardware.on_device(self.model, device, section="model"))

    @functools.cached_property
    def base(self) -> Definition[Decoder]:
        """The definition of the decoder without adapters. `base` and plain weights of the policy are its parameters."""
        return decoder.define(self.model)

    @functools.cached_property
    def adapted(self) -> Definition[Decoder]:
        """The definition of the decoder with its adapters."""
        lora = self.lora
        if lora is None:
            return self.base

        def make(rngs: nnx.Rngs) -> Decoder:
            model = Decoder(self.model, rngs=rngs)
            lora_lib.adapt(model, lora, rngs)
            return model

        return parameters.define(make)

    @property
    def model_specs(self) -> Specs:
        return self.base.specs

    @property
    def trained_specs(self) -> Specs:
        """The parameters that the optimiser, the gradients and published snapshots hold."""
        return self.model_specs if self.lora is None else parameters.select(lambda spec: spec.adapter, self.adapted.specs)

    @property
    def snapshot_dtype(self) -> str:
        """The dtype in which samplers load snapshots: a whole policy in the compute dtype, adapters in float32."""
        return self.model.compute_dtype if self.lora is None else "float32"

    def model_shardings(self, mesh: Mesh) -> Params:
        return parameters.shardings(self.model_specs, mesh)

    def trained_shardings(self, mesh: Mesh) -> Params:
        return parameters.shardings(self.trained_specs, mesh)

    def model_shapes(self, mesh: Mesh, *, dtype: str) -> Params:
        """The weights of `base` on a mesh as jax.ShapeDtypeStruct, as snapshots.load returns them in this dtype."""
        return parameters.sharded_shapes(self.model_specs, mesh, dtype=dtype)

    def snapshot_shapes(self, mesh: Mesh) -> Params:
        """A snapshot as samplers load it on a mesh, as jax.ShapeDtypeStruct."""
        return parameters.sharded_shapes(self.trained_specs, mesh, dtype=self.snapshot_dtype)

    def initial(self, base: Params, key: jax.Array) -> Params:
        """The trained part of a run that starts from `base`: the policy is then what `base` is."""
        if self.lora is None:
            return base
        drawn = parameters.flatten(self.adapted.init(key))
        return parameters.unflatten({name: drawn[name] for name in parameters.flatten(self.trained_specs)})

    def for_training(self, trained: Params, frozen: Params) -> Decoder:
        """The policy in a traced function, differentiable in `trained`. frozen: base, in the compute dtype; {} without LoRA."""
        return parameters.module(self.adapted.graphdef, parameters.merge(frozen, trained))

    def merged(self, trained: Params, base: Params) -> Params:
        """Plain weights of the policy. Adapters are merged in float32; weights without an adapter stay as they are."""
        model = self.for_training(trained, base if self.lora is not None else {})
        for _, linear in linear_maps(model):
            linear.merge()
        return parameters.pure(model)

    def for_sampling(self, trained: Params, base: Params, weights: str) -> Params:
        """Plain weights of the policy in the compute dtype: adapters merged, then rounded if `weights` is "int8"."""
        model = parameters.module(self.base.graphdef, self.merged(trained, base))
        if weights == "int8":
            kv_cache.quantize(model)
        return parameters.cast(parameters.pure(model), self.model.compute_dtype)
