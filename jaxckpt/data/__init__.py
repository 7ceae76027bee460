"""What the training is fed: an infinite sequence of examples, whose position is one number."""

from jaxckpt.data.batches import BatchStream as BatchStream
from jaxckpt.data.batches import GlobalBatches as GlobalBatches
from jaxckpt.data.batches import check_reproducible as check_reproducible
from jaxckpt.data.batches import local_rows as local_rows
from jaxckpt.data.tokens import TokenDatasets as TokenDatasets
from jaxckpt.data.tokens import Tokenizer as Tokenizer
from jaxckpt.data.tokens import load_text as load_text
from jaxckpt.data.tokens import load_tokenizer as load_tokenizer
from jaxckpt.data.tokens import make_token_datasets as make_token_datasets
