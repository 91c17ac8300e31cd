"""Every key of config.json that the configurations of transformers' classes know, with defaults.

    python tests/peers/config_keys.py > tests/golden/config_keys.json

The test `every_key_of_transformers_has_a_treatment_which_is_kept` reads them. It needs transformers.
"""
import dataclasses
import inspect
import json
import re

import transformers
from transformers.configuration_utils import PreTrainedConfig

FAMILIES = ["GPT2", "Llama", "Qwen2", "Qwen3", "Mistral", "Ministral", "SmolLM3", "Olmo2", "Phi3", "Gemma2", "Gemma3"]


def keys(config):
    fields = {field.name: None if field.default is dataclasses.MISSING else field.default for field in dataclasses.fields(config)}
    # What these take out of the other keys of config.json.
    readers = {getattr(one, name) for one in [PreTrainedConfig, config] for name in ["__post_init__", "convert_rope_params_to_dict"]}
    read = "".join(sorted(inspect.getsource(reader) for reader in readers))
    others = set(re.findall(r'kwargs\.(?:pop|get)\("(\w+)"', read)) | set(config.attribute_map)
    return {"fields": fields, "others": sorted(others - set(fields))}


classes = {"GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM": getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config") for name in FAMILIES}
print(json.dumps({"transformers": transformers.__version__, **{name: keys(config) for name, config in classes.items()}}, indent=1))
