"""What exports are called and made of."""

from __future__ import annotations

from typing import Literal

Dtype = Literal["float32", "bfloat16", "float16"]
ADAPTER_NAME = "adapter_config.json"  # peft's
BASE_CONFIGS = ("config.json", "generation_config.json")
