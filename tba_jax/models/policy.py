"""The policy: a decoder, its LoRA adapters (Hu et al., 2021; layers.Einsum), which alone are then trained, and scalar heads."""

import dataclasses
import fnmatch
import functools
import math
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tba_jax.models import decoder, hardware, kv_cache, parameters
from tba_jax.models.config import DecoderConfig
from tba_jax.models.decoder import Decoder
from tba_jax.models.experts import ExpertMaps
from tba_jax.models.layers import ScalarHead, linear_maps
from tba_jax.models.parameters import Definition, Params, Specs


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """rank; alpha: the update is scaled by alpha / rank; targets: patterns (`*`, `?`) of the names of linear maps, as
    "layers.attention.query" or "layers.*"."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def _adapt(model: nnx.Module, lora: LoraConfig, rngs: nnx.Rngs) -> None:
    """Adds adapters to the maps that lora.targets name. Raises ValueError: a pattern matches none, or the rank is too large."""
    linears = {name: linear for name, linear in linear_maps(model) if not isinstance(linear, ExpertMaps)}
    for pattern in lora.targets:
        if not any(fnmatch.fnmatchcase(name, str(pattern)) for name in linears):
            if any(fnmatch.fnmatchcase(name, str(pattern)) for name, _ in linear_maps(model)):
                raise ValueError(f"lora.targets: {pattern!r} names experts, which take no adapters; others: {sorted(linears)}")
            raise ValueError(
                f"lora.targets: {pattern!r} matches no linear map of the model; there are {sorted(linears)} "
                """(several are given as '("layers.attention.query", "layers.attention.value")')"""
            )
    for name, linear in sorted(linears.items()):
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in lora.targets):
            continue
        sizes = linear.sizes()
        fan_in, fan_out = (math.prod(sizes[letter] for letter in letters) for letters in (linear.inputs, linear.outputs))
        if lora.rank > min(fan_in, fan_out):
            told = f"lora.rank={lora.rank} is more than {name} can have, which maps {fan_in} to {fan_out} numbers"
            raise ValueError(f"{told}: lower it, or leave the map out of lora.targets")
        linear.adapt(lora.rank, lora.scale, rngs)


class PolicyWithHeads(nnx.Module):
    """The policy, adapters included, and the scalar heads that an objective asks for, which begin at 0.

    log_z_head: log Z(x) of scoring.mean_prompt_states. value_head: V of the state before each response token, from the hidden
    state that predicts the token.
    """

    log_z_head: Any = None
    value_head: Any = None

    def __init__(self, policy: Decoder, *, log_z_head: bool, value_head: bool, rngs: nnx.Rngs):
        self.policy = policy
        if log_z_head:
            self.log_z_head = ScalarHead(policy.config.width, bias=True, std=0.0, rngs=rngs)
        if value_head:
            self.value_head = ScalarHead(policy.config.width, bias=True, std=0.0, rngs=rngs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """A decoder, with or without LoRA adapters. An argument `base` is the reference policy that a run starts from."""

    model: DecoderConfig
    lora: LoraConfig | None = None

    def on_device(self, device: Any) -> "Policy":
        """The policy as a role computes it on devices of this kind, see hardware.on_device."""
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
            _adapt(model, lora, rngs)
            return model

        return parameters.define(make)

    def with_heads(self, *, log_z_head: bool, value_head: bool) -> Definition[PolicyWithHeads]:
        """The definition of the policy, adapters included, with the heads that are asked for."""

        def make(rngs: nnx.Rngs) -> PolicyWithHeads:
            return PolicyWithHeads(self.adapted.make(rngs), log_z_head=log_z_head, value_head=value_head, rngs=rngs)

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


def merge_lazily(base: Params, adapters: Params, lora: LoraConfig) -> Params:
    """`base` with weight + scale · A B, computed when it is read, in place of every weight that has an adapter.

    Args: base, adapters: arrays on the host or in storage.
    """
    merged, flat = parameters.flatten(base), parameters.flatten(adapters)
    for name in [name.removesuffix(".lora_a") for name in flat if name.endswith(".lora_a")]:
        weight = merged[f"{name}.weight"]
        merged[f"{name}.weight"] = _MergedWeight(weight, flat[f"{name}.lora_a"], flat[f"{name}.lora_b"], lora.scale)
    return parameters.unflatten(merged)


class _MergedWeight:
    """A weight with its adapter: one layer of a stack is merged as it is read, so that exports never hold the whole stack."""

    def __init__(self, weight: Any, lora_a: Any, lora_b: Any, scale: float):
        self._parts, self._scale = (weight, lora_a, lora_b), scale
        self.shape = weight.shape

    def __getitem__(self, layer: int) -> np.ndarray:
        weight, lora_a, lora_b = (part[layer] for part in self._parts)
        return np.asarray(_MergedWeight(weight, lora_a, lora_b, self._scale))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """weight + scale · A B in float32, of a weight that is not stacked."""
        weight, lora_a, lora_b = (np.asarray(part).astype(np.float32) for part in self._parts)
        return weight + self._scale * np.tensordot(lora_a, lora_b, axes=1)
