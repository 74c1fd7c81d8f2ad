"""Names of lmms_stream.trl for type checkers; at run time it is another name of doors/trl."""

from .doors.trl import DPOTrainer as DPOTrainer
from .doors.trl import KTOTrainer as KTOTrainer
from .doors.trl import SFTTrainer as SFTTrainer
from .doors.trl import __getattr__ as __getattr__
