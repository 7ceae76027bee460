"""A run's configuration: a YAML file and `key=value` overrides, checked as a whole.

Nothing heavy is imported, so that `python -m jaxckpt config` answers at once.
"""

from jaxckpt.config.load import load_config as load_config
from jaxckpt.config.load import to_yaml as to_yaml
from jaxckpt.config.optimizers import SGD as SGD
from jaxckpt.config.optimizers import Adafactor as Adafactor
from jaxckpt.config.optimizers import AdamW as AdamW
from jaxckpt.config.optimizers import ImportOptimizer as ImportOptimizer
from jaxckpt.config.optimizers import Lion as Lion
from jaxckpt.config.optimizers import Muon as Muon
from jaxckpt.config.optimizers import Optimizer as Optimizer
from jaxckpt.config.optimizers import Schedule as Schedule
from jaxckpt.config.resume import ABSENT as ABSENT
from jaxckpt.config.resume import Difference as Difference
from jaxckpt.config.resume import check_resumable as check_resumable
from jaxckpt.config.resume import differences as differences
from jaxckpt.config.resume import resolve as resolve
from jaxckpt.config.sections import Budget as Budget
from jaxckpt.config.sections import Distributed as Distributed
from jaxckpt.config.sections import Evaluation as Evaluation
from jaxckpt.config.sections import ImportData as ImportData
from jaxckpt.config.sections import ImportModel as ImportModel
from jaxckpt.config.sections import Llama as Llama
from jaxckpt.config.sections import Mesh as Mesh
from jaxckpt.config.sections import Placement as Placement
from jaxckpt.config.sections import RopeScaling as RopeScaling
from jaxckpt.config.sections import RunConfig as RunConfig
from jaxckpt.config.sections import Snapshots as Snapshots
from jaxckpt.config.sections import StoreData as StoreData
from jaxckpt.config.sections import TextData as TextData
from jaxckpt.config.sections import to_dict as to_dict
from jaxckpt.config.table import Row as Row
from jaxckpt.config.table import describe as describe
from jaxckpt.config.table import format_table as format_table
