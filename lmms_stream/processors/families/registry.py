"""A processor's folder, or a model's type -> its family; no other family is imported."""

from __future__ import annotations

from ...registry import Registry
from .family import FamilyMaker
from .files import ProcessorFiles

# Keys of a family: the `model_type` of each of its models, and the class of each of its processors.
FAMILIES = Registry[FamilyMaker](
    "families",
    {
        name: family if ":" in family else f"{family}:FAMILY"
        for family, names in {
            "plugins.families.gemma3": ("gemma3", "Gemma3Processor"),
            "plugins.families.described:IDEFICS3": ("idefics3", "smolvlm", "Idefics3Processor", "SmolVLMProcessor"),
            "plugins.families.internvl": ("internvl", "InternVLProcessor"),
            "plugins.families.described:LLAMA4": ("llama4", "Llama4Processor"),
            "plugins.families.llava_onevision": ("llava_onevision", "LlavaOnevisionProcessor"),
            "plugins.families.qwen2_5_omni": ("qwen2_5_omni_thinker", "qwen2_5_omni", "Qwen2_5OmniProcessor"),
            "processors.families.qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VLProcessor"),
            "plugins.families.qwen2_audio": ("qwen2_audio", "Qwen2AudioProcessor"),
            "processors.families.qwen_vl": ("qwen2_vl", "Qwen2VLProcessor"),
            "plugins.families.qwen3_omni": ("qwen3_omni_moe_thinker", "qwen3_omni_moe", "Qwen3OmniMoeProcessor"),
            "processors.families.qwen3_vl": ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "Qwen3VLProcessor"),
        }.items()
        for name in names
    },
    accepts=lambda family: hasattr(family, "model_types") and hasattr(family, "of"),
    expected="a FAMILY, with model_types and of",
)


def family_of(files: ProcessorFiles) -> FamilyMaker:
    """Return the family of the processor's class or, if the files name no class, of the model's type.

    Without such a family, return Described: its `of` runs the processor in a test (probe.py).
    """
    family = FAMILIES.get(files.processor_class or files.model_type)
    if family is not None:
        return family
    from .probe import Described

    return Described()


def family_of_model(model_type: str) -> FamilyMaker | None:
    """Return the family of models whose configs have this type; None for models without a family."""
    return FAMILIES.get(model_type)
