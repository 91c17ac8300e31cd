"""Every key of config.json that transformers' GPT2Config and LlamaConfig know, with defaults.

    python tests/peers/config_keys.py > tests/golden/config_keys.json

The test `every_key_of_transformers_has_a_treatment_which_is_kept` reads them. It needs transformers.
"""
import dataclasses
import inspect
import json
import re

import transformers
from transformers import GPT2Config, LlamaConfig
from transformers.configuration_utils import PreTrainedConfig

# What these take out of the other keys of config.json.
READERS = [PreTrainedConfig.__post_init__, PreTrainedConfig.convert_rope_params_to_dict]


def keys(config):
    fields = {field.name: None if field.default is dataclasses.MISSING else field.default for field in dataclasses.fields(config)}
    read = "".join(inspect.getsource(reader) for reader in READERS)
    others = set(re.findall(r'kwargs\.(?:pop|get)\("(\w+)"', read)) | set(config.attribute_map)
    return {"fields": fields, "others": sorted(others - set(fields))}


classes = {"GPT2LMHeadModel": GPT2Config, "LlamaForCausalLM": LlamaConfig}
print(json.dumps({"transformers": transformers.__version__, **{name: keys(config) for name, config in classes.items()}}, indent=1))
