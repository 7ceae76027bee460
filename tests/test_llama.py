"""Llama against Hugging Face's models, and what a trainer relies on: layers, dropout streams, sums, shardings."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxckpt.models import llama
from jaxckpt.models.llama import Llama, LlamaConfig, RopeScaling

# Of the largest value compared. Float32 rounding is 6e-8 a term; sums of at most 64 terms in another order (torch,
# another batch shape, another mesh) through three layers stay below 100 times that, with a reserve of 3.
TOLERANCE = 2e-5
SMALL: dict[str, Any] = dict(vocab_size=64, num_layers=3, d_model=32, num_heads=4, num_kv_heads=2, d_ff=48)
ROPE_SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)


def config_of(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**{**SMALL, **changes})


def make_model(seed: int = 0, **changes) -> Llama:
    """A model whose weights are all random and large enough that attention is far from uniform."""
    model = Llama(config_of(**changes), rngs=nnx.Rngs(seed))
    rng = np.random.default_rng(seed)
    for path, shape in param_shapes(model).items():
        noise = rng.normal(0.0, 0.3, shape)
        set_param(model, path, 1.0 + noise if "norm" in path else noise)
    return model


def tokens_of(b: int, t: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, SMALL["vocab_size"], (b, t)), jnp.int32)


def flat(state) -> dict[str, jax.Array]:
    return {"/".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(state)}


def param_shapes(model: Llama) -> dict[str, tuple[int, ...]]:
    return {path: leaf.shape for path, leaf in flat(nnx.state(model, nnx.Param)).items()}


def variable_of(model: Llama, path: str) -> Any:
    return functools.reduce(getattr, path.split("/"), model)


def set_param(model: Llama, path: str, value: np.ndarray) -> None:
    variable = variable_of(model, path)
    assert variable.shape == value.shape, path
    variable[...] = jnp.asarray(value, variable.dtype)


# Compiled once a config and shape: eager calls would compile every operation, and the scan anew at each call.
forward = nnx.jit(lambda model, tokens, **kwargs: model(tokens, **kwargs))
loss = nnx.jit(llama.loss)


@functools.partial(jax.jit, static_argnums=0)
def _summed_grads(graphdef, params, rest, batch):
    def summed(params):
        return llama.loss(nnx.merge(graphdef, params, rest, copy=True), batch)[0]

    return jax.value_and_grad(summed)(params)


def summed_grads(model: Llama, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    value, grads = _summed_grads(*nnx.split(model, nnx.Param, ...), batch)
    return value, flat(grads)


# Ours, Hugging Face's, and whether the matrix is transposed.
LAYER_TABLE = (
    ("attn_norm/scale", "input_layernorm.weight", False),
    ("attn/wq", "self_attn.q_proj.weight", True),
    ("attn/wk", "self_attn.k_proj.weight", True),
    ("attn/wv", "self_attn.v_proj.weight", True),
    ("attn/wo", "self_attn.o_proj.weight", True),
    ("attn/q_bias", "self_attn.q_proj.bias", False),
    ("attn/k_bias", "self_attn.k_proj.bias", False),
    ("attn/v_bias", "self_attn.v_proj.bias", False),
    ("attn/q_norm/scale", "self_attn.q_norm.weight", False),
    ("attn/k_norm/scale", "self_attn.k_norm.weight", False),
    ("mlp_norm/scale", "post_attention_layernorm.weight", False),
    ("mlp/gate", "mlp.gate_proj.weight", True),
    ("mlp/up", "mlp.up_proj.weight", True),
    ("mlp/down", "mlp.down_proj.weight", True),
)
EDGE_TABLE = (
    ("embed/embedding", "model.embed_tokens.weight", False),
    ("final_norm/scale", "model.norm.weight", False),
    ("lm_head/kernel", "lm_head.weight", True),
)
HF_ROPE_SCALING = {"rope_type": "llama3", **{name: getattr(ROPE_SCALING, name) for name in vars(ROPE_SCALING)}}
HF_FAMILIES = {
    "llama3": ("Llama", {"rope_scaling": HF_ROPE_SCALING}, {"rope_scaling": ROPE_SCALING}),
    "llama_untied_heads": ("Llama", {"head_dim": 16}, {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": 5}, {"sliding_window": 5}),
    "qwen2": ("Qwen2", {}, {"qkv_bias": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}, {"qk_norm": True, "head_dim": 16}),
}


@pytest.mark.filterwarnings("ignore")  # torch and transformers warn about themselves
@pytest.mark.parametrize("tie_embeddings", [False, True])
@pytest.mark.parametrize("family", HF_FAMILIES)
def test_logits_equal_hugging_face(family, tie_embeddings):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    class_name, theirs, ours = HF_FAMILIES[family]
    # An epsilon as large as the mean square itself, so that ignoring it would show.
    eps, theta = 0.03, 500.0
    hf_config = getattr(transformers, f"{class_name}Config")(
        vocab_size=SMALL["vocab_size"],
        num_hidden_layers=SMALL["num_layers"],
        hidden_size=SMALL["d_model"],
        num_attention_heads=SMALL["num_heads"],
        num_key_value_heads=SMALL["num_kv_heads"],
        intermediate_size=SMALL["d_ff"],
        max_position_embeddings=256,
        rms_norm_eps=eps,
        rope_theta=theta,
        tie_word_embeddings=tie_embeddings,
        attn_implementation="eager",
        **theirs,
    )
    hf_model = getattr(transformers, f"{class_name}ForCausalLM")(hf_config).eval()
    model = make_model(rope_theta=theta, norm_eps=eps, tie_embeddings=tie_embeddings, **ours)

    hf_state = {name: np.zeros(0) for name, _ in hf_model.named_parameters()}
    for path, value in flat(nnx.state(model, nnx.Param)).items():
        layer_path = path.removeprefix("layers/")
        [(_, name, is_transposed)] = [row for row in LAYER_TABLE + EDGE_TABLE if row[0] == layer_path]
        value = np.asarray(value).swapaxes(-1, -2) if is_transposed else np.asarray(value)
        if path == layer_path:
            hf_state[name] = value
        else:
            hf_state.update({f"model.layers.{i}.{name}": value[i] for i in range(len(value))})
    with torch.no_grad():
        for name, parameter in hf_model.named_parameters():
            parameter.copy_(torch.from_numpy(np.array(hf_state.pop(name))))
    assert not hf_state

    tokens = tokens_of(2, 40)
    with torch.no_grad():
        expected = hf_model(torch.from_numpy(np.array(tokens, np.int64))).logits.numpy()
    logits = forward(model, tokens)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE * np.abs(expected).max(), rtol=0)


PACKED_LENGTHS = (5, 9, 2)


def packed_documents() -> tuple[list[jax.Array], dict[str, jax.Array]]:
    documents = [tokens_of(1, t, seed=t) for t in PACKED_LENGTHS]
    segment_ids = jnp.asarray(np.repeat([[4, 2, 9]], PACKED_LENGTHS, axis=1), jnp.int32)
    return documents, {"tokens": jnp.concatenate(documents, axis=1), "segment_ids": segment_ids}


@pytest.mark.parametrize("window", [None, 3])
def test_packed_documents_equal_documents_one_by_one(window):
    model = make_model(sliding_window=window)
    documents, batch = packed_documents()
    logits = forward(model, batch["tokens"], segment_ids=batch["segment_ids"])
    expected = jnp.concatenate([forward(model, document) for document in documents], axis=1)
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE * float(jnp.abs(expected).max()), rtol=0)

    restarted = jnp.concatenate([jnp.arange(t, dtype=jnp.int32) for t in PACKED_LENGTHS])[None]
    explicit = forward(model, batch["tokens"], segment_ids=batch["segment_ids"], positions=restarted)
    assert np.array_equal(logits, explicit)


def test_packed_loss_is_the_sum_of_the_documents_losses():
    model = make_model()
    documents, batch = packed_documents()
    value, count = loss(model, batch)
    expected = [loss(model, {"tokens": document}) for document in documents]
    assert int(count) == sum(int(n) for _, n in expected) == sum(PACKED_LENGTHS) - len(PACKED_LENGTHS)
    np.testing.assert_allclose(value, sum(float(s) for s, _ in expected), rtol=TOLERANCE)


@pytest.mark.parametrize("window", [None, 3])
def test_a_later_token_does_not_change_earlier_logits(window):
    model = make_model(sliding_window=window)
    tokens = tokens_of(2, 12)
    changed = forward(model, tokens.at[:, 7].add(1) % SMALL["vocab_size"])
    logits = forward(model, tokens)
    assert np.array_equal(logits[:, :7], changed[:, :7])
    assert not np.array_equal(logits[:, 7], changed[:, 7])
    if window:  # through 3 layers a token reaches 3 * (window - 1) tokens further and no more
        assert not np.array_equal(logits[:, 10], changed[:, 10])


def test_a_sliding_window_holds_the_token_itself_and_the_ones_before_it():
    model = make_model(num_layers=1, sliding_window=3)
    tokens = tokens_of(1, 8)
    is_changed = np.any(
        forward(model, tokens) != forward(model, tokens.at[:, 2].add(1) % SMALL["vocab_size"]), axis=(0, 2)
    )
    assert is_changed.tolist() == [False, False, True, True, True, False, False, False]


def test_loss_sums_the_cross_entropy_of_unmasked_targets():
    model = make_model()
    tokens = tokens_of(2, 9)
    loss_mask = jnp.asarray(np.random.default_rng(1).integers(0, 2, (2, 9)), jnp.int32)
    value, count = loss(model, {"tokens": tokens, "loss_mask": loss_mask})
    assert value.dtype == jnp.float32 and count.dtype == jnp.int32

    logits, expected, expected_count = np.asarray(forward(model, tokens[:, :-1]), np.float64), 0.0, 0
    for row in range(2):
        for i in range(8):
            if loss_mask[row, i + 1]:
                expected += np.log(np.exp(logits[row, i]).sum()) - logits[row, i, tokens[row, i + 1]]
                expected_count += 1
    assert 0 < expected_count < 16
    assert int(count) == expected_count
    np.testing.assert_allclose(value, expected, rtol=TOLERANCE)


def test_a_masked_target_does_not_change_the_loss():
    model = make_model()
    tokens = tokens_of(2, 9)
    loss_mask = jnp.ones((2, 9), bool).at[:, -1].set(False)
    value, count = loss(model, {"tokens": tokens, "loss_mask": loss_mask})
    other, _ = loss(model, {"tokens": tokens.at[:, -1].add(1) % 64, "loss_mask": loss_mask})
    assert np.array_equal(value, other)
    assert int(count) == 14


def test_a_token_outside_the_vocabulary_gives_nan():
    model = make_model()
    assert bool(jnp.isnan(loss(model, {"tokens": tokens_of(1, 6).at[0, 2].set(64)})[0]))


def stream_of(model: Llama) -> nnx.RngStream:
    assert model.layers.dropout.rngs is not None
    return model.layers.dropout.rngs


def set_keys(model: Llama, keys: jax.Array) -> None:
    """What the trainer does before every step: new keys, counts from 0."""
    stream_of(model).key[...] = keys
    stream_of(model).count[...] = jnp.zeros(keys.shape, jnp.uint32)


def test_dropout_differs_between_two_calls_and_is_off_in_eval_mode():
    model, plain = make_model(dropout=0.5), make_model()
    tokens = tokens_of(1, 6)
    model.train()
    keys = stream_of(model).key[...]
    first, second = forward(model, tokens), forward(model, tokens)
    assert not np.array_equal(first, second)
    set_keys(model, keys)
    assert np.array_equal(forward(model, tokens), first)

    @nnx.jit
    def twice(model, tokens):
        return model(tokens), model(tokens)

    one, two = twice(model, tokens)
    assert not np.array_equal(one, two)
    assert np.array_equal(stream_of(model).count[...], np.full(3, 6))  # two draws a layer and call

    model.eval()
    assert np.array_equal(forward(model, tokens), forward(plain, tokens))
    assert np.array_equal(stream_of(model).count[...], np.full(3, 6))
    closed_over = jax.jit(lambda tokens: model(tokens))(tokens)  # nothing is written in eval mode
    np.testing.assert_allclose(
        closed_over, forward(model, tokens), atol=TOLERANCE * float(jnp.abs(closed_over).max()), rtol=0
    )


def test_each_layer_draws_dropout_from_its_own_key():
    model = make_model(dropout=0.5, num_layers=2)
    tokens = tokens_of(1, 6)
    keys = stream_of(model).key[...]
    assert keys.shape == (2,)
    assert not np.array_equal(jax.random.key_data(keys[0]), jax.random.key_data(keys[1]))
    outputs = []
    for chosen in ([0, 1], [0, 0], [1, 1], [1, 0]):
        set_keys(model, keys[jnp.asarray(chosen)])
        outputs.append(np.asarray(forward(model, tokens)))
    assert all(not np.array_equal(outputs[i], outputs[j]) for i in range(4) for j in range(i))


def test_a_layer_can_be_called_on_its_own_weights():
    model = make_model()
    tokens = tokens_of(2, 7)
    graphdef, stacked = nnx.split(model.layers)
    x = model.embed.embedding[...][tokens]
    rope = llama.rope_angles(model.config, jnp.arange(7)[None])
    for i in range(3):
        x = nnx.merge(graphdef, jax.tree.map(lambda leaf, i=i: leaf[i], stacked))(x, rope, None)
    logits = model.final_norm(x) @ model.lm_head.kernel[...]
    np.testing.assert_allclose(forward(model, tokens), logits, atol=TOLERANCE * float(jnp.abs(logits).max()), rtol=0)


def test_the_traced_program_does_not_grow_with_the_layers():
    def lines(num_layers):
        model = make_model(num_layers=num_layers, remat="full")
        graphdef, state = nnx.split(model)
        step = jax.grad(lambda state, batch: llama.loss(nnx.merge(graphdef, state), batch)[0])
        return len(str(jax.make_jaxpr(step)(state, {"tokens": tokens_of(1, 5)})).splitlines())

    assert lines(2) == lines(6)


def test_remat_does_not_change_the_gradients():
    batch = {"tokens": tokens_of(2, 9)}
    _, expected = summed_grads(make_model(), batch)
    for remat in ("full", "dots_with_no_batch_dims_saveable"):
        _, grads = summed_grads(make_model(remat=remat), batch)
        for path, grad in grads.items():
            assert np.array_equal(grad, expected[path]), (remat, path)


def test_each_policy_computes_again_what_it_does_not_keep():
    def products(remat):
        graphdef, *rest = nnx.split(make_model(remat=remat), nnx.Param, ...)
        traced = jax.make_jaxpr(_summed_grads, static_argnums=0)(graphdef, *rest, {"tokens": tokens_of(1, 5)})
        return str(traced).count("dot_general")

    least = products("none")
    more = {remat: products(remat) - least for remat in ("full", *llama.REMAT_POLICIES)}
    assert more == {
        "full": 8,  # q, k, v, o, scores, values, gate and up; the output of down is only added
        "everything_saveable": 0,
        "nothing_saveable": 8,
        "dots_saveable": 0,
        "dots_with_no_batch_dims_saveable": 2,  # scores and values
    }


def unrolled(model: Llama, **changes: Any) -> Llama:
    """The same model with its layers in a list."""
    other = Llama(dataclasses.replace(model.config, scan_layers=False, **changes), rngs=nnx.Rngs(0))
    weights = flat(nnx.state(model, nnx.Param))
    for path in param_shapes(other):
        layer = re.match(r"layers/(\d+)/", path)
        value = weights[path.replace(layer[0], "layers/")][int(layer[1])] if layer else weights[path]
        variable = functools.reduce(
            lambda at, key: at[int(key)] if key.isdigit() else getattr(at, key), path.split("/"), other
        )
        variable[...] = value
    return other


def test_layers_in_a_list_begin_and_compute_like_stacked_ones():
    init = nnx.jit(lambda rngs, config: nnx.state(Llama(config, rngs=rngs), nnx.Param), static_argnums=1)
    stacked = flat(init(nnx.Rngs(5), config_of()))
    listed = flat(init(nnx.Rngs(5), config_of(scan_layers=False)))
    assert {path for path in listed if "/wq" in path} == {f"layers/{i}/attn/wq" for i in range(3)}
    for path, value in listed.items():
        layer = re.match(r"layers/(\d+)/", path)
        expected = stacked[path.replace(layer[0], "layers/")][int(layer[1])] if layer else stacked[path]
        assert np.array_equal(value, expected), path

    batch, model = {"tokens": tokens_of(2, 9)}, make_model(num_layers=2)
    value, expected = summed_grads(model, batch)
    other, grads = summed_grads(unrolled(model), batch)
    # Not bitwise: XLA fuses across the borders of layers where no loop keeps them apart.
    np.testing.assert_allclose(other, value, rtol=TOLERANCE)
    for path, grad in grads.items():
        layer = re.match(r"layers/(\d+)/", path)
        want = expected[path.replace(layer[0], "layers/")][int(layer[1])] if layer else expected[path]
        np.testing.assert_allclose(grad, want, atol=TOLERANCE * float(jnp.abs(want).max()), rtol=0, err_msg=path)


def test_offloaded_activations_are_the_ones_that_were_kept():
    batch = {"tokens": tokens_of(2, 9)}
    model = make_model(num_layers=2)
    _, expected = summed_grads(unrolled(model, remat="full"), batch)
    offloading = unrolled(model, remat="offload")
    _, grads = summed_grads(offloading, batch)
    for path, grad in grads.items():
        scale = float(jnp.abs(expected[path]).max())
        np.testing.assert_allclose(grad, expected[path], atol=TOLERANCE * scale, rtol=0, err_msg=path)
    text = str(jax.make_jaxpr(lambda *args: _summed_grads(*args))(*nnx.split(offloading, nnx.Param, ...), batch))
    # Two arrays a layer leave for pinned host memory and come back.
    assert text.count("device_put") == 2 * 2 * offloading.config.num_layers


def test_the_parts_are_the_whole():
    model = unrolled(make_model(num_layers=2, dropout=0.2, tie_embeddings=True))
    _, batch = packed_documents()
    assert np.array_equal(nnx.jit(llama.LAYERS)(nnx.clone(model), batch), loss(nnx.clone(model), batch))


def test_remat_recomputes_the_same_dropout():
    batch = {"tokens": tokens_of(2, 9)}
    _, expected = summed_grads(make_model(dropout=0.3), batch)
    _, grads = summed_grads(make_model(dropout=0.3, remat="full"), batch)
    for path, grad in grads.items():
        # Not bitwise: XLA fuses the recomputed masks differently.
        scale = float(jnp.abs(expected[path]).max())
        np.testing.assert_allclose(grad, expected[path], atol=TOLERANCE * scale, rtol=0, err_msg=path)


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True, "qkv_bias": True, "qk_norm": True, "dropout": 0.1}])
def test_bfloat16_weights_compute_in_bfloat16_and_give_float32_logits(changes):
    model = make_model(**changes)
    model.eval()
    expected = forward(model, tokens_of(2, 9))
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params))
    logits = forward(model, tokens_of(2, 9))
    assert logits.dtype == jnp.float32
    # Eight bits of mantissa, through three layers.
    np.testing.assert_allclose(logits, expected, atol=0.1 * float(jnp.abs(expected).max()), rtol=0)
    _, grads = summed_grads(model, {"tokens": tokens_of(2, 9)})
    assert {grad.dtype for grad in grads.values()} == {jnp.dtype(jnp.bfloat16)}
    assert all(bool(jnp.all(jnp.isfinite(grad))) for grad in grads.values())
    rope = llama.rope_angles(model.config, jnp.arange(9)[None])
    x = jnp.ones((1, 9, 32), jnp.bfloat16)
    graphdef, stacked = nnx.split(model.layers)
    assert nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[0], stacked))(x, rope, None).dtype == jnp.bfloat16


ALL_KINDS = (
    {},
    {"tie_embeddings": True},
    {"qkv_bias": True, "dropout": 0.1},
    {"qk_norm": True, "head_dim": 10, "num_kv_heads": 1},
)


@pytest.mark.parametrize("changes", ALL_KINDS)
def test_num_params_equals_the_real_count(changes):
    model = make_model(**changes)
    assert llama.num_params(model.config) == sum(math.prod(shape) for shape in param_shapes(model).values())


LLAMA2_7B = config_of(vocab_size=32000, num_layers=32, d_model=4096, num_heads=32, num_kv_heads=32, d_ff=11008)
LLAMA3_8B = config_of(vocab_size=128256, num_layers=32, d_model=4096, num_heads=32, num_kv_heads=8, d_ff=14336)
MISTRAL_7B = config_of(vocab_size=32000, num_layers=32, d_model=4096, num_heads=32, num_kv_heads=8, d_ff=14336)
QWEN25_05B = config_of(
    **dict(vocab_size=151936, num_layers=24, d_model=896, num_heads=14, num_kv_heads=2, d_ff=4864),
    **dict(qkv_bias=True, tie_embeddings=True),
)
QWEN3_06B = config_of(
    **dict(vocab_size=151936, num_layers=28, d_model=1024, num_heads=16, num_kv_heads=8, d_ff=3072, head_dim=128),
    **dict(qk_norm=True, tie_embeddings=True),
)


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (LLAMA2_7B, 6_738_415_616),
        (LLAMA3_8B, 8_030_261_248),
        (MISTRAL_7B, 7_241_732_096),
        (QWEN25_05B, 494_032_768),
        (QWEN3_06B, 596_049_920),
    ],
)
def test_num_params_equals_the_published_count(config, published):
    assert llama.num_params(config) == published


def test_flops_count_matrices_and_the_attention_that_the_window_leaves():
    matrices = 6_738_415_616 - 32000 * 4096 - 65 * 4096  # without the lookup and the norms
    assert llama.flops_per_token(LLAMA2_7B, 2048) == 6 * matrices + 12 * 32 * 4096 * 2048
    windowed = dataclasses.replace(LLAMA2_7B, sliding_window=512)
    assert llama.flops_per_token(windowed, 2048) == llama.flops_per_token(LLAMA2_7B, 512)


def test_all_problems_of_a_config_are_raised_at_once():
    with pytest.raises(ValueError) as error:
        config_of(num_kv_heads=3, head_dim=7, dropout=1.0, remat="offload_everything")
    lines = str(error.value).splitlines()
    assert [line.split()[0] for line in lines] == ["num_heads", "head_dim", "dropout", "remat"]
    with pytest.raises(ValueError, match="d_model is 30"):
        config_of(d_model=30)
    with pytest.raises(ValueError, match="num_layers is 0"):
        config_of(num_layers=0)
    with pytest.raises(ValueError, match="scan_layers"):
        config_of(remat="offload")
    with pytest.raises(ValueError, match="sliding_window is 0"):
        config_of(sliding_window=0)


def test_check_tensor_axis_names_what_it_cannot_divide():
    config = config_of()
    assert llama.check_tensor_axis(config, 1) == []
    assert llama.check_tensor_axis(config, 2) == []
    assert llama.check_tensor_axis(config, 4) == ["num_kv_heads is 2, which a tensor axis of 4 does not divide"]
    assert [line.split()[0] for line in llama.check_tensor_axis(config, 5)] == [
        "num_heads",
        "num_kv_heads",
        "d_ff",
        "vocab_size",
    ]
    assert len(llama.check_tensor_axis(config, 0)) == 1


def rule_of(path: str) -> str | None:
    return next((pattern for pattern, _ in llama.SHARDING_RULES if re.search(pattern, path)), None)


def test_every_rule_matches_a_parameter_and_every_matrix_has_a_rule():
    used = set()
    kinds = ({"qkv_bias": True, "qk_norm": True}, {"qkv_bias": True, "scan_layers": False}, {"tie_embeddings": True})
    for changes in kinds:
        model = Llama(config_of(**changes), rngs=nnx.Rngs(0))
        for path, shape in param_shapes(model).items():
            rule = rule_of(path)
            assert rule is not None or len(shape) < 2, path
            assert rule is None or len(dict(llama.SHARDING_RULES)[rule]) <= len(shape), (path, rule)
            assert rule_of(f"opt_state/0/mu/{path}") == rule
            used.add(rule)
    assert {pattern for pattern, _ in llama.SHARDING_RULES} <= used


def test_paths_say_what_weight_decay_leaves_out():
    paths = param_shapes(make_model(qkv_bias=True, qk_norm=True))
    excluded = {path.removeprefix("layers/") for path in paths if re.search("(norm|bias|scale)", path)}
    assert excluded == {
        *("attn_norm/scale", "mlp_norm/scale", "final_norm/scale", "attn/q_norm/scale", "attn/k_norm/scale"),
        *("attn/q_bias", "attn/k_bias", "attn/v_bias"),
    }


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True, "qkv_bias": True, "qk_norm": True, "remat": "full"}])
def test_a_sharded_model_equals_the_model_on_one_device(changes):
    model = make_model(**changes)
    batch = {"tokens": tokens_of(4, 9), "segment_ids": jnp.asarray(np.repeat([[1, 2]] * 4, [4, 5], axis=1), jnp.int32)}
    value, grads = summed_grads(model, batch)

    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    rules = dict(llama.SHARDING_RULES)
    for path in param_shapes(model):
        variable = variable_of(model, path)
        rule = rule_of(path)
        assert rule is not None
        variable[...] = jax.device_put(variable[...], NamedSharding(mesh, rules[rule]))
    assert model.layers.attn.wq[...].addressable_shards[0].data.shape == (3, 16, 16)
    batch = jax.device_put(batch, NamedSharding(mesh, P(("data", "fsdp"))))
    with jax.set_mesh(mesh):
        sharded_value, sharded_grads = summed_grads(model, batch)
    np.testing.assert_allclose(sharded_value, value, rtol=TOLERANCE)
    for path, grad in grads.items():
        np.testing.assert_allclose(
            sharded_grads[path], grad, atol=TOLERANCE * float(jnp.abs(grad).max()), rtol=0, err_msg=path
        )


def test_initial_weights_are_normal_and_projections_into_the_residual_stream_are_smaller():
    params = flat(nnx.state(Llama(config_of(), rngs=nnx.Rngs(0)), nnx.Param))
    for path, value in params.items():
        if "norm" in path:
            assert np.array_equal(value, np.ones(value.shape)), path
        else:
            expected = 0.02 / math.sqrt(6) if path.endswith(("wo", "down")) else 0.02
            # At least 2048 draws: the sample's deviation is within 5 of its own deviations, 1/sqrt(2 * 2048).
            assert abs(float(jnp.std(value)) / expected - 1) < 5 / math.sqrt(2 * value.size), path
    wq = params["layers/attn/wq"]
    assert not np.array_equal(wq[0], wq[1])
