"""The shape of a Llama: its configuration, how its parameters are sharded, what it counts and costs."""

from dataclasses import dataclass

from jax.sharding import PartitionSpec as P

# The policies of `jax.checkpoint_policies` that take no arguments.
REMAT_POLICIES = ("everything_saveable", "nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable")
REMAT = ("none", "full", "offload", *REMAT_POLICIES)
# What remat="offload" moves to pinned host memory, [b, t, d] each: the rest of a layer is cheap to have again from
# these, or dearer to move than to compute (gate and up, [b, t, f]).
OFFLOADED = ("layer_input", "attn_output")

# (regex searched in a parameter's path, spec) on the mesh axes "data", "fsdp" and "tensor". Megatron's tensor
# parallelism (arXiv:1909.08053, section 3): heads and feed-forward width over "tensor", so that attention and MLP each
# end in one all-reduce; "fsdp" cuts the other large dimension. The layer axis stays whole, because `scan` slices it.
_LAYER_RULES: tuple[tuple[str, P], ...] = (
    (r"attn/w[qkv]$", P("fsdp", "tensor")),
    (r"attn/wo$", P("tensor", "fsdp")),
    (r"attn/[qkv]_bias$", P("tensor")),
    (r"mlp/(gate|up)$", P("fsdp", "tensor")),
    (r"mlp/down$", P("tensor", "fsdp")),
)
SHARDING_RULES: tuple[tuple[str, P], ...] = (
    *((rf"layers/\d+/{pattern}", spec) for pattern, spec in _LAYER_RULES),
    *((rf"layers/{pattern}", P(None, *spec)) for pattern, spec in _LAYER_RULES),
    (r"embed/embedding$", P("tensor", "fsdp")),
    (r"norm/scale$", P()),
    (r"lm_head/kernel$", P("fsdp", "tensor")),
)


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's stretching of the slow rotary frequencies, with the names of `rope_scaling` in its config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The shape of a model. Raises ValueError with every problem, a line each.

    `head_dim=None` means d_model // num_heads. `sliding_window=w` lets a token see itself and the w - 1 tokens before.
    `dropout` acts on what attention and MLP add to the residual stream. `scan_layers=False` makes `layers` a list of
    Layer, traced and compiled one after the other. `remat` is one of REMAT, and says what the backward pass keeps of each
    layer; "offload" keeps it in pinned host memory.
    """

    vocab_size: int
    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    d_ff: int
    head_dim: int | None = None
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    dropout: float = 0.0
    scan_layers: bool = True
    remat: str = "none"

    def __post_init__(self) -> None:
        widths = ("d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff")
        sizes = {name: getattr(self, name) for name in ("vocab_size", "num_layers", *widths, "sliding_window")}
        problems = [f"{name} is {n}, expected at least 1" for name, n in sizes.items() if n is not None and n < 1]
        if not problems:
            n, k = self.num_heads, self.num_kv_heads
            if n % k:
                problems.append(f"num_heads is {n}, expected a multiple of num_kv_heads {k}")
            if self.head_dim is None and self.d_model % n:
                problems.append(f"d_model is {self.d_model}, expected a multiple of num_heads {n}, or set head_dim")
            if self.head_width % 2:
                problems.append(f"head_dim is {self.head_width}, expected an even number: RoPE turns pairs")
        if not 0.0 <= self.dropout < 1.0:
            problems.append(f"dropout is {self.dropout}, expected 0 <= dropout < 1")
        if self.remat not in REMAT:
            problems.append(f"remat is {self.remat!r}, expected one of {', '.join(REMAT)}")
        if self.remat == "offload" and self.scan_layers:
            # Wrong gradients without a word on GPU, when scan slices what lies in host memory: openxla/xla 46231.
            problems.append("remat is 'offload', which XLA may miscompile under scan: set scan_layers to False")
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def head_width(self) -> int:
        return self.head_dim if self.head_dim is not None else self.d_model // self.num_heads


def _matmul_params(config: LlamaConfig) -> int:
    """Weights that multiply every token: all matrices of the layers, and the output head."""
    d, h = config.d_model, config.head_width
    attn = 2 * d * config.num_heads * h + 2 * d * config.num_kv_heads * h
    return config.num_layers * (attn + 3 * d * config.d_ff) + d * config.vocab_size


def num_params(config: LlamaConfig) -> int:
    d, h = config.d_model, config.head_width
    layer_vectors = 2 * d + config.qkv_bias * (config.num_heads + 2 * config.num_kv_heads) * h + config.qk_norm * 2 * h
    embedding = 0 if config.tie_embeddings else d * config.vocab_size
    return _matmul_params(config) + embedding + config.num_layers * layer_vectors + d


def flops_per_token(config: LlamaConfig, seq_len: int) -> float:
    """Model FLOPs of forward and backward a token, 6 N + 12 L n h s: PaLM (arXiv:2204.02311), appendix B.

    N counts the matrices with the output head and without the embedding's lookup. As in PaLM causality is not deducted,
    so s = seq_len; with a sliding window s = min(seq_len, window). Recomputation by `remat` is not counted.
    """
    seen = seq_len if config.sliding_window is None else min(seq_len, config.sliding_window)
    return 6.0 * _matmul_params(config) + 12.0 * config.num_layers * config.num_heads * config.head_width * seen


def check_tensor_axis(config: LlamaConfig, tensor: int) -> list[str]:
    """A line for each size that a "tensor" mesh axis of this length does not divide; empty when SHARDING_RULES fit."""
    if tensor < 1:
        return [f"the tensor axis is {tensor}, expected at least 1"]
    return [
        f"{name} is {size}, which a tensor axis of {tensor} does not divide"
        for name in ("num_heads", "num_kv_heads", "d_ff", "vocab_size")
        if (size := getattr(config, name)) % tensor
    ]
