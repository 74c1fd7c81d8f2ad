"""Names of lmms_stream.rl for type checkers; at run time it is another name of doors/relax."""

from .doors.relax.arguments import add_data_arguments as add_data_arguments
from .doors.relax.base import BaseDataset as BaseDataset
from .doors.relax.cursor import IndexManager as IndexManager
from .doors.relax.data_source import RolloutDataSource as RolloutDataSource
from .doors.relax.data_source import RolloutDataSourceWithBuffer as RolloutDataSourceWithBuffer
from .doors.relax.data_source import pop_first as pop_first
from .doors.relax.dataset import Dataset as Dataset
from .doors.relax.prompts import MultimodalConfig as MultimodalConfig
from .doors.relax.rollouts import RolloutManager as RolloutManager
from .doors.relax.sample import Sample as Sample
from .doors.relax.streaming import SampleBuffer as SampleBuffer
from .doors.relax.streaming import StreamingDataset as StreamingDataset
