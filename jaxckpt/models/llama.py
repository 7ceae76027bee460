"""A Llama-family decoder in plain Flax NNX; Llama 2/3, Mistral, Qwen2/2.5 and Qwen3 are configurations of it.

The weights of all layers are stacked on a leading axis and run under one `jax.lax.scan`, so tracing and compiling take
the same time for 2 layers and for 80; or, with `scan_layers=False`, they stand in a list, one array a layer, so that each
layer can be fetched, updated and offloaded by itself. `Layer` is a function of (its weights, x) that can also be called
on its own.

Shape letters: b batch, t token, L layers, d model width, n query heads, k key/value heads, h head width,
f feed-forward width, v vocabulary.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxckpt.models.layers import Layers, rounded
from jaxckpt.models.llama_config import OFFLOADED as OFFLOADED
from jaxckpt.models.llama_config import REMAT_POLICIES as REMAT_POLICIES
from jaxckpt.models.llama_config import SHARDING_RULES as SHARDING_RULES
from jaxckpt.models.llama_config import LlamaConfig as LlamaConfig
from jaxckpt.models.llama_config import RopeScaling as RopeScaling
from jaxckpt.models.llama_config import check_tensor_axis as check_tensor_axis
from jaxckpt.models.llama_config import flops_per_token as flops_per_token
from jaxckpt.models.llama_config import num_params as num_params


# Standard deviation 0.02 is `initializer_range` of Hugging Face's LlamaConfig; the two projections of a layer that
# write into the residual stream are scaled by 1/sqrt(2L), as in GPT-2 (Radford et al. 2019, section 2.3).
def _normal(*shape: int, rngs: nnx.Rngs, residual_layers: int | None = None) -> nnx.Param[jax.Array]:
    stddev = 0.02 if residual_layers is None else 0.02 / math.sqrt(2 * residual_layers)
    return nnx.Param(stddev * jax.random.normal(rngs.params(), shape, jnp.float32))


class RMSNorm(nnx.Module):
    """Scales the last axis to unit root mean square, in float32, and returns the dtype of its input."""

    def __init__(self, width: int, *, eps: float):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(width, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(jax.lax.square(y), axis=-1, keepdims=True) + self.eps)
        return (y * jnp.broadcast_to(self.scale[...].astype(jnp.float32), y.shape)).astype(x.dtype)


def rope_angles(config: LlamaConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Float32 (cos, sin) [b, t, 1, h/2] of RoPE (arXiv:2104.09864), with Llama 3.1's scaling where configured."""
    # In Python's float64, so that the frequencies are the same bits on every backend.
    frequencies = [config.rope_theta ** (-i / config.head_width) for i in range(0, config.head_width, 2)]
    if (s := config.rope_scaling) is not None:
        # `apply_scaling` of Meta's llama-models, with its three cases as one clamped ramp: fast waves stay, slow waves
        # are divided by `factor`.
        turns = [s.original_max_position_embeddings * f / (2 * math.pi) for f in frequencies]
        kept = [(n - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor) for n in turns]
        kept = [min(max(r, 0.0), 1.0) for r in kept]
        frequencies = [f * (r + (1 - r) / s.factor) for f, r in zip(frequencies, kept, strict=True)]
    # As literals of the program: an array made here would look like state that a snapshot has to keep.
    scale = jnp.stack([jnp.full((), f, jnp.float32) for f in frequencies])
    angles = positions.astype(jnp.float32)[:, :, None, None] * scale[None, None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """RoPE on x [b, t, n, h], in float32; the pair of entry i is entry i + h/2, which is Hugging Face's layout."""
    cos, sin = rope
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


Context = tuple[tuple[jax.Array, jax.Array], jax.Array | None]
"""what every layer is given besides x: (cos, sin) of `rope_angles`, and int32 segment ids [b, t] or None"""


class Attention(nnx.Module):
    """Causal grouped-query attention [b, t, d] -> [b, t, d]; wq [d, n*h], wk and wv [d, k*h], wo [n*h, d]."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        d, q_width, kv_width = (
            config.d_model,
            config.num_heads * config.head_width,
            config.num_kv_heads * config.head_width,
        )
        self.wq = _normal(d, q_width, rngs=rngs)
        self.wk = _normal(d, kv_width, rngs=rngs)
        self.wv = _normal(d, kv_width, rngs=rngs)
        self.wo = _normal(q_width, d, rngs=rngs, residual_layers=config.num_layers)
        if config.qkv_bias:
            self.q_bias = nnx.Param(jnp.zeros(q_width, jnp.float32))
            self.k_bias = nnx.Param(jnp.zeros(kv_width, jnp.float32))
            self.v_bias = nnx.Param(jnp.zeros(kv_width, jnp.float32))
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_width, eps=config.norm_eps)
            self.k_norm = RMSNorm(config.head_width, eps=config.norm_eps)

    def __call__(self, x: jax.Array, rope: tuple[jax.Array, jax.Array], segment_ids: jax.Array | None) -> jax.Array:
        c, (b, t, _) = self.config, x.shape
        q, k, v = x @ self.wq[...], x @ self.wk[...], x @ self.wv[...]
        if c.qkv_bias:
            q = q + jnp.broadcast_to(self.q_bias[...], q.shape)
            k = k + jnp.broadcast_to(self.k_bias[...], k.shape)
            v = v + jnp.broadcast_to(self.v_bias[...], v.shape)
        q = q.reshape(b, t, c.num_heads, c.head_width)
        k = k.reshape(b, t, c.num_kv_heads, c.head_width)
        v = v.reshape(b, t, c.num_kv_heads, c.head_width)
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        y = jax.nn.dot_product_attention(
            _rotate(q, rope),
            _rotate(k, rope),
            v,
            mask=None if segment_ids is None else (segment_ids[:, None, :, None] == segment_ids[:, None, None, :]),
            is_causal=True,
            local_window_size=None if c.sliding_window is None else (c.sliding_window - 1, 0),
        )
        return checkpoint_name(y.reshape(b, t, -1), "attn_output") @ self.wo[...]


class MLP(nnx.Module):
    """SwiGLU (arXiv:2002.05202) [b, t, d] -> [b, t, d]; gate and up [d, f], down [f, d]."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.gate = _normal(config.d_model, config.d_ff, rngs=rngs)
        self.up = _normal(config.d_model, config.d_ff, rngs=rngs)
        self.down = _normal(config.d_ff, config.d_model, rngs=rngs, residual_layers=config.num_layers)

    def __call__(self, x: jax.Array) -> jax.Array:
        return (jax.nn.silu(x @ self.gate[...]) * (x @ self.up[...])) @ self.down[...]


class Layer(nnx.Module):
    """One decoder layer [b, t, d] -> [b, t, d]; `rope` comes from `rope_angles`, `segment_ids` is int32 [b, t] or None.

    Its only state besides the weights is the dropout's random stream, which exists when `config.dropout > 0`.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.attn_norm = RMSNorm(config.d_model, eps=config.norm_eps)
        self.attn = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.d_model, eps=config.norm_eps)
        self.mlp = MLP(config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs if config.dropout else None)

    def __call__(self, x: jax.Array, rope: tuple[jax.Array, jax.Array], segment_ids: jax.Array | None) -> jax.Array:
        x = checkpoint_name(x, "layer_input")
        x = x + self.dropout(self.attn(self.attn_norm(x), rope, segment_ids))
        return rounded(x + self.dropout(self.mlp(self.mlp_norm(x))))


class Llama(nnx.Module):
    """The decoder. Its weights are float32 and may all be cast to another dtype, in which it then computes.

    Norms, softmax, RoPE and logits are float32 always. Dropout is active after `train()`, and off after `eval()`. Every
    variable under `layers` has a leading axis [L], the dropout's keys and counts too; with `scan_layers=False` there is
    an nnx.List of L layers instead, and the same `rngs` give the same weights.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        normal = jax.nn.initializers.normal(0.02)
        self.embed = nnx.Embed(config.vocab_size, config.d_model, embedding_init=normal, rngs=rngs)
        keys = jax.random.split(rngs.params(), config.num_layers)
        if config.scan_layers:
            self.layers = nnx.merge(*jax.vmap(lambda key: nnx.split(Layer(config, rngs=nnx.Rngs(key))))(keys))
        else:
            self.layers = nnx.List([Layer(config, rngs=nnx.Rngs(key)) for key in keys])
        self.final_norm = RMSNorm(config.d_model, eps=config.norm_eps)
        if not config.tie_embeddings:
            self.lm_head = nnx.Linear(config.d_model, config.vocab_size, use_bias=False, kernel_init=normal, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, *, positions: jax.Array | None = None, segment_ids: jax.Array | None = None
    ) -> jax.Array:
        """Float32 logits [b, t, v] of int32 tokens [b, t].

        Tokens of different `segment_ids` [b, t] do not see each other. `positions` [b, t] count from 0 in every segment
        unless given. A token outside the vocabulary gives NaN.
        """
        x, (rope, segment_ids) = self._enter(tokens, positions, segment_ids)
        return self._logits(self._run_layers(x, rope, segment_ids))

    def _enter(
        self, tokens: jax.Array, positions: jax.Array | None, segment_ids: jax.Array | None
    ) -> tuple[jax.Array, Context]:
        """x [b, t, d] of the first layer, and what every layer is given besides."""
        # `take` fills with NaN where plain indexing would silently use the last row.
        x = _split_batch(jnp.take(_gathered(self.embed.embedding[...]), tokens, axis=0))
        rope = rope_angles(self.config, _positions(tokens, segment_ids) if positions is None else positions)
        return x, (rope, segment_ids)

    def _logits(self, x: jax.Array) -> jax.Array:
        """Float32 [b, t, v] of the last layer's x [b, t, d]."""
        x = self.final_norm(x)
        weights, axis = (self.embed.embedding[...], 1) if self.config.tie_embeddings else (self.lm_head.kernel[...], 0)
        # The backward pass multiplies float32 cotangents with bfloat16 weights: a float32 matmul without the algorithm.
        precision = jax.lax.DotAlgorithmPreset.BF16_BF16_F32 if x.dtype == weights.dtype == jnp.bfloat16 else None
        return jax.lax.dot_general(
            x, weights, (((2,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )

    def _run_layers(self, x: jax.Array, rope: tuple[jax.Array, jax.Array], segment_ids: jax.Array | None) -> jax.Array:
        # Only where dropout drew numbers, so that a model in eval mode may be closed over by a user's jit.
        is_drawing = lambda layer: self.config.dropout and not layer.dropout.deterministic
        if not self.config.scan_layers:
            for layer in cast(Iterable[Layer], self.layers):
                x, counts = self._layer_body(layer, (rope, segment_ids))(x, nnx.state(layer))
                if is_drawing(layer):
                    nnx.update(layer, counts)
            return x
        # Not nnx.scan, which would split and merge the module again at each of its boundaries: that costs trace time.
        stacked = cast(Layer, self.layers)
        x, counts = jax.lax.scan(self._layer_body(stacked, (rope, segment_ids)), x, nnx.state(stacked))
        if is_drawing(stacked):
            nnx.update(stacked, counts)
        return x

    def _layer_body(self, layer: Layer, context: Context) -> Callable[[jax.Array, Any], tuple[jax.Array, Any]]:
        """(x, state of a layer like `layer`) -> (x, the dropout's counts), rematerialised as the configuration says."""
        graphdef = nnx.graphdef(layer)

        def body(x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
            layer = nnx.merge(graphdef, state)
            return _split_batch(layer(x, *context)), nnx.state(layer, nnx.RngCount)

        remat, policies = self.config.remat, jax.checkpoint_policies
        if remat == "none":
            return body
        policy = None if remat in ("full", "offload") else getattr(policies, remat)
        if remat == "offload":
            policy = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=list(OFFLOADED),
                offload_src="device",
                offload_dst="pinned_host",
            )
        # The loops of scan keep forward and recomputation apart already, a barrier would only stop fusions.
        return jax.checkpoint(body, policy=policy, prevent_cse=not self.config.scan_layers)


def _split_batch(x: jax.Array) -> jax.Array:
    """x [b, t, d] with b over "data" and "fsdp" of the mesh in context (jax.set_mesh); x itself where there is none.

    Left alone, XLA follows the weights: it cuts d over "fsdp", and every device of that axis computes the whole batch.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(axis for axis in ("data", "fsdp") if axis in mesh.axis_names)
    if not axes or x.shape[0] % math.prod(mesh.shape[axis] for axis in axes):
        return x
    return jax.lax.with_sharding_constraint(x, P(axes, None, None))


def _gathered(table: jax.Array) -> jax.Array:
    """The embedding [v, d] with d whole: rows looked up in a table cut along d would have to change hands."""
    axes = jax.sharding.get_abstract_mesh().axis_names
    if "fsdp" not in axes:
        return table
    return jax.lax.with_sharding_constraint(table, P("tensor" if "tensor" in axes else None, None))


def _positions(tokens: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """int32 [1 or b, t], counting from 0 at every place where the segment id changes."""
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    if segment_ids is None:
        return index
    is_start = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    index = jnp.broadcast_to(index, is_start.shape)
    return index - jax.lax.cummax(jnp.where(is_start, index, 0), axis=1)


def loss(model: Llama, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """(float32 sum of the cross-entropy over target tokens in nats, int32 number of target tokens).

    `batch` holds "tokens" int32 [b, t+1], and may hold "segment_ids", "positions" and "loss_mask", each [b, t+1]. Token
    i+1 is the target of input i; it counts where its own loss_mask is not 0 and its segment is that of its input.
    """
    return _cross_entropy(model(**_inputs(batch)), batch)


def _inputs(batch: Mapping[str, jax.Array]) -> dict[str, Any]:
    """The arguments of `Llama.__call__`, [b, t] each: the last token is only a target."""
    optional = {name: batch.get(name) for name in ("positions", "segment_ids")}
    return {name: None if x is None else x[:, :-1] for name, x in {"tokens": batch["tokens"], **optional}.items()}


def _cross_entropy(logits: jax.Array, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    targets, segment_ids = batch["tokens"][:, 1:], batch.get("segment_ids")
    is_target = jnp.ones(targets.shape, bool)
    if segment_ids is not None:
        is_target &= segment_ids[:, 1:] == segment_ids[:, :-1]
    if (loss_mask := batch.get("loss_mask")) is not None:
        is_target &= loss_mask[:, 1:] != 0
    target_logits = jnp.take_along_axis(logits, targets[:, :, None], axis=-1)[:, :, 0]
    entropy = jax.nn.logsumexp(logits, axis=-1) - target_logits
    return jnp.sum(jnp.where(is_target, entropy, 0.0)), jnp.sum(is_target, dtype=jnp.int32)


LAYERS = Layers(
    embed=lambda model, batch: model._enter(**_inputs(batch)),
    layer=lambda layer, x, context: _split_batch(layer(x, *context)),
    head=lambda model, x, batch: _cross_entropy(model._logits(x), batch),
)
"""A Llama with `scan_layers=False` in parts; as a loss it is `loss` without rematerialisation."""
