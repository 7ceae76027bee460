"""Token stores -> the endless sequence of rows that a run trains on, and the rows that it is evaluated on."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxckpt.data.fetch import local_store
from jaxckpt.data.mixture import Mixture, Weights
from jaxckpt.data.rows import CutRows, LongDocuments, PieceRows
from jaxckpt.data.shuffle import Epochs
from jaxckpt.data.store import TokenStore
from jaxckpt.errors import DataError

log = logging.getLogger("jaxckpt")

# Goes into every identity: raise it when the same stores would give other rows than before.
ALGORITHM_VERSION = 1

Rows = Literal["cut", "packed", "documents"]


@dataclass(frozen=True, eq=False)
class StoreDatasets:
    """What stores are made into; see `make_store_datasets`."""

    train: Epochs | Mixture
    held_out: CutRows | PieceRows | None
    identity: dict[str, Any]
    """by name, everything that decides which example has which number"""
    vocab_size: int
    """of the tokenizer that all of them share"""


def make_store_datasets(
    stores: Mapping[str, str],
    *,
    seq_len: int,
    seed: int,
    rows: Rows = "cut",
    long_documents: LongDocuments = "split",
    weights: Weights | None = None,
    schedule: Sequence[tuple[int, Weights]] = (),
    held_out: str | None = None,
) -> StoreDatasets:
    """Rows of seq_len + 1 tokens from `stores` ({name: directory, local or gs://}), each shuffled anew in every epoch of its own.

    `rows`: "cut" joins the documents and cuts; "packed" packs whole documents, which do not see each other; "documents"
    gives each a row, padded. `weights` are the stores' shares of the examples, by default the shares of their rows;
    `schedule`: [(first batch, weights)] that follow them. Raises one DataError with all that is wrong.
    """
    opened, problems = {}, []
    if not stores or "held_out" in stores:
        problems.append(f"name one or more stores, and none of them held_out; found {', '.join(stores) or 'none'}")
    for name, path in {**stores, **({"held_out": held_out} if held_out else {})}.items():
        try:
            opened[name] = TokenStore(local_store(path))
        except DataError as e:
            problems.append(f"{name}: {e}")
    if problems:
        raise DataError("\n  ".join(["the token stores cannot be used:", *problems]))
    _check_one_tokenizer(opened)
    # The data to evaluate on must not change what is trained on: its rows may have a mask where the others have none.
    has_mask = any(opened[name].loss_mask is not None for name in stores)

    def make_rows(name: str, store: TokenStore) -> CutRows | PieceRows:
        if rows == "cut":
            is_masked = has_mask or store.loss_mask is not None
            made = CutRows(store.tokens, seq_len=seq_len, loss_mask=store.loss_mask, has_mask=is_masked)
        else:
            made = PieceRows(
                store.tokens,
                store.offsets,
                seq_len=seq_len,
                is_packed=rows == "packed",
                loss_mask=store.loss_mask,
                long_documents=long_documents,
            )
        if len(made) == 0:
            is_cut = rows == "cut"
            way_out = "a shorter seq_len" if is_cut else "long_documents split or truncate" if store.tokens.size else ""
            problems.append(
                f"{name}: {store.header.tokens} tokens in {store.header.documents} documents make no row of "
                f"{'' if is_cut else 'at most '}seq_len + 1 = {seq_len + 1} tokens; give {way_out or 'documents'}, or more text"
            )
        elif isinstance(made, PieceRows):
            log.info("%s: %d rows of %d tokens, %.1f %% filled", name, len(made), seq_len + 1, 100 * made.fill)
        return made

    made = {name: make_rows(name, store) for name, store in opened.items()}
    if problems:
        raise DataError("\n  ".join(["the token stores cannot be used:", *problems]))
    held_out_rows = made.pop("held_out") if held_out else None
    first = weights if weights is not None else {name: float(len(r)) for name, r in made.items()}
    epochs = {name: Epochs(r, seed=f"{seed} {name}") for name, r in made.items()}
    train = Mixture(epochs, [(0, first), *schedule])
    identity = {"algorithm": ALGORITHM_VERSION, "rows": rows, "seq_len": seq_len, "seed": seed}
    if rows != "cut":
        identity["long_documents"] = long_documents
    for name in sorted(stores):
        identity.update({f"{name}.{key}": value for key, value in opened[name].identity.items()})
    vocab_size = max(store.header.vocab_size for store in opened.values())
    return StoreDatasets(train, held_out_rows, identity, vocab_size)


def _check_one_tokenizer(stores: Mapping[str, TokenStore]) -> None:
    hashes = {store.header.tokenizer_hash for store in stores.values()}
    if len(hashes) > 1:
        lines = [f"{n}: {s.header.tokenizer} ({s.header.tokenizer_hash[:16]})" for n, s in stores.items()]
        raise DataError(
            "\n  ".join(["the token stores were made with different tokenizers:", *lines])
            + "\nPrepare them again with one tokenizer."
        )
