"""Adapters of peft on small models, unmerged, the model itself frozen: https://huggingface.co/docs/peft."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from tests.zoo.entry import Call, Entry, settled, token_ids
from tests.zoo.transformers_config import SMALL, VOCABULARY, from_config, padding_mask
from tests.zoo.transformers_text import TASKS

# The model, the adapter's configuration in peft, and its arguments.
ADAPTERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama, LoRA": ("llama", "LoraConfig", {"target_modules": ["q_proj", "v_proj"]}),
    "llama, LoRA of all linear layers": ("llama", "LoraConfig", {"target_modules": "all-linear"}),
    "llama, LoRA of the embedding": ("llama", "LoraConfig", {"target_modules": ["embed_tokens", "q_proj"]}),
    "llama, DoRA": ("llama", "LoraConfig", {"target_modules": ["q_proj", "v_proj"], "use_dora": True}),
    "llama, VeRA": ("llama", "VeraConfig", {"target_modules": ["q_proj"]}),
    "llama, IA3": (
        "llama",
        "IA3Config",
        {"target_modules": ["v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
    "gpt2, LoRA": ("gpt2", "LoraConfig", {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
    "bert, LoRA": ("bert", "LoraConfig", {"target_modules": ["query", "value"], "use_rslora": True}),
    "bert, LoRA with trained biases": ("bert", "LoraConfig", {"target_modules": ["query"], "bias": "all"}),
    "t5, LoRA": ("t5", "LoraConfig", {"target_modules": ["q", "v", "wo"]}),
    "bart, DoRA": ("bart", "LoraConfig", {"target_modules": ["fc1", "fc2"], "use_dora": True}),
    "qwen2, LoHa": ("qwen2", "LoHaConfig", {"target_modules": ["q_proj", "up_proj"]}),
    "qwen2, LoKr": ("qwen2", "LoKrConfig", {"target_modules": ["q_proj", "up_proj"]}),
}


def entries() -> Iterator[Entry]:
    for name, (base, kind, arguments) in ADAPTERS.items():
        yield Entry(name, "peft", partial(_adapted, base, kind, arguments))


def _adapted(base: str, kind: str, arguments: dict[str, Any]) -> tuple[nn.Module, Call]:
    (task, sizes), *_ = ((task, models[base]) for task, models in TASKS.items() if base in models)
    model = from_config(task, base, SMALL | sizes)
    import peft

    rank = {} if kind == "IA3Config" else {"r": 2}
    model = peft.get_peft_model(model, getattr(peft, kind)(**rank, **arguments))
    inputs = {"input_ids": token_ids(VOCABULARY), "attention_mask": padding_mask()}
    if task == "AutoModelForSeq2SeqLM":
        inputs["decoder_input_ids"] = token_ids(VOCABULARY, 5)
    return settled(model, partial(model, **inputs))
