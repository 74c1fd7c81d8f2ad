"""Names of lmms_stream.datasets for type checkers; at run time it is another name of doors/lmms_engine/datasets."""

from .doors.lmms_engine.datasets import DatasetConfig as DatasetConfig
from .doors.lmms_engine.datasets import DistributedLengthGroupedSampler as DistributedLengthGroupedSampler
from .doors.lmms_engine.datasets import FinewebEduDataset as FinewebEduDataset
from .doors.lmms_engine.datasets import MultiModalDataset as MultiModalDataset
from .doors.lmms_engine.datasets import MultiModalIterableDataset as MultiModalIterableDataset
from .doors.lmms_engine.datasets import VisionAudioSFTDataset as VisionAudioSFTDataset
from .doors.lmms_engine.datasets import VisionSFTDataset as VisionSFTDataset
from .doors.lmms_engine.datasets import VisionSFTIterableDataset as VisionSFTIterableDataset
