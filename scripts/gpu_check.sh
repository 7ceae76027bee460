#!/usr/bin/env bash
# Checks everything that only a GPU can show, on a machine with one GPU, Python 3.12, jax 0.11 or later and no network.
#   scripts/gpu_check.sh pack       where there is a network: fetches what that machine lacks into build/gpu_check
#   scripts/gpu_check.sh [OUT]      on that machine: installs it beside its own jax, runs, writes OUT (gpu_check.json)
#   scripts/gpu_check.sh --dry      the same parts, tiny, on CPU, in this environment
# The check itself ends within 8 minutes; see benchmarks/gpu_check.py.
set -euo pipefail
cd "$(dirname "$0")/.."
packed=build/gpu_check
python=${PYTHON:-python3}

case ${1:-} in
pack)
  rm -rf "$packed" && mkdir -p "$packed"
  "$python" -m pip download -q --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 --platform manylinux_2_5_x86_64 --platform linux_x86_64 \
    -d "$packed" "flax>=0.12.8,<0.13" "optax>=0.2.8,<0.3" "orbax-checkpoint>=0.12.8,<0.13" "tensorstore>=0.1.86" \
    "grain>=0.2.18,<0.3" "pydantic>=2.9,<3" "omegaconf>=2.3,<3" "typer>=0.15" "rich>=13.9" "tokenizers>=0.21" \
    "psutil>=6.0" "crc32c>=2.7" "etils[epath]>=1.9" "antlr4-python3-runtime>=4.9" || {
    echo "some have no wheel for Python 3.12; with a Python 3.12 of your own: $python -m pip wheel -w $packed ." >&2
    exit 1
  }
  # The machine's own jax, built for its GPU, stays; and so does what that jax was built with.
  rm -f "$packed"/jax-* "$packed"/jaxlib-* "$packed"/numpy-* "$packed"/scipy-* "$packed"/ml_dtypes-*
  du -sh "$packed"
  ;;
--dry)
  exec "$python" benchmarks/gpu_check.py --dry --out "${2:-gpu_check_dry.json}"
  ;;
*)
  out=${1:-gpu_check.json}
  if [ -d "$packed" ]; then
    "$python" -m pip install -q --no-index --no-deps --target "$packed/site" "$packed"/*.whl
    export PYTHONPATH="$PWD:$PWD/$packed/site"
  else
    export PYTHONPATH="$PWD"
  fi
  "$python" -c 'import jax; assert jax.default_backend() == "gpu", f"jax finds no GPU here, only {jax.devices()}"'
  exec "$python" benchmarks/gpu_check.py --out "$out"
  ;;
esac
