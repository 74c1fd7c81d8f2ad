"""Charts with questions about them, a processor and a tiny Qwen2.5-VL with random weights, to try things on.

python examples/prepare_charts.py FOLDER writes FOLDER/charts (rows and images), FOLDER/processor and FOLDER/model.
"""

import sys
from pathlib import Path

from lmms_stream.tools.demo.vision import model_fields, save_processor, write_charts
from lmms_stream.train.model.build import ModelConfig

folder, num_charts = Path(sys.argv[1]), 60
rows = write_charts(folder / "charts", num_charts=num_charts)
processor = save_processor(folder / "processor", texts=[rows.read_text(encoding="utf-8")])
ModelConfig(config=model_fields(processor, positions=512)).build().save_pretrained(folder / "model")
sys.stdout.write(f"{num_charts} charts in {rows}\n")
