"""What the training is fed: an infinite sequence of examples, whose position is one number."""

from jaxckpt.data.batches import GlobalBatches as GlobalBatches
from jaxckpt.data.batches import local_rows as local_rows
from jaxckpt.data.guards import hashed_seed as hashed_seed
from jaxckpt.data.mixture import Mixture as Mixture
from jaxckpt.data.randomized import Randomized as Randomized
from jaxckpt.data.reproducible import check_reproducible as check_reproducible
from jaxckpt.data.rows import CutRows as CutRows
from jaxckpt.data.rows import PieceRows as PieceRows
from jaxckpt.data.shuffle import ShuffledEpochs as ShuffledEpochs
from jaxckpt.data.store import TokenStore as TokenStore
from jaxckpt.data.stores import StoreDatasets as StoreDatasets
from jaxckpt.data.stores import make_store_datasets as make_store_datasets
from jaxckpt.data.stream import BatchStream as BatchStream
from jaxckpt.data.tokens import TokenDatasets as TokenDatasets
from jaxckpt.data.tokens import Tokenizer as Tokenizer
from jaxckpt.data.tokens import load_text as load_text
from jaxckpt.data.tokens import load_tokenizer as load_tokenizer
from jaxckpt.data.tokens import make_token_datasets as make_token_datasets
