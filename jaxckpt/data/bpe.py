"""A byte-level BPE, trained on the documents that it will encode."""

from collections.abc import Iterable

from jaxckpt.errors import DataError

END = "<|endoftext|>"
_LEAST, _MOST = 257, 1 << 20


def vocabulary(spec: str) -> int | None:
    """The size in "train:SIZE"; None where `spec` asks for no training."""
    if not spec.startswith("train:"):
        return None
    size = spec.removeprefix("train:")
    if not size.isdecimal() or not _LEAST <= int(size) <= _MOST:
        raise DataError(
            f"--tokenizer {spec}: expected train:SIZE with a vocabulary from {_LEAST} (each byte and {END}) to {_MOST}."
        )
    return int(size)


def train(texts: Iterable[str], vocab_size: int) -> bytes:
    """tokenizer.json of a byte-level BPE of at most `vocab_size` tokens: the same for the same texts.

    Splits words as GPT-2 does. Takes memory for the different words of the texts, not for the texts.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    model.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return model.to_str(pretty=True).encode()
