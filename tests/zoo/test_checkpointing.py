"""Models of transformers with gradient checkpointing switched on, reentrant and not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradbatch
from tests.capture.reentrant import one_by_one, seeded
from tests.capture.reference import WAYS
from tests.oracle import assert_right
from tests.zoo.check import as_its_library_expects
from tests.zoo.entry import SAMPLES
from tests.zoo.test_zoo import require
from tests.zoo.transformers_config import SMALL, VOCABULARY, from_config
from tests.zoo.transformers_text import T5

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("AutoModelForCausalLM", SMALL | {"n_embd": 16, "n_layer": 2, "n_head": 2}),
    "t5": ("T5ForConditionalGeneration", SMALL | T5),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::gradbatch.SlowPathWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_checkpointed_models_are_right_both_ways_in_training(name: str, reentrant: bool) -> None:
    require("transformers")
    task, sizes = MODELS[name]
    with as_its_library_expects():
        model = gradbatch.extend(from_config(task, name, sizes).double().train())
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        ids = torch.randint(VOCABULARY, (SAMPLES, 7), generator=torch.Generator().manual_seed(0))
        inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if name == "t5" else {})
        losses = lambda: model(**inputs).logits.square().sum((1, 2))  # noqa: E731
        right = one_by_one(model, losses)
        for way, run in WAYS.items():
            found = run(model, seeded(losses))[gradbatch.BatchGrad]
            for parameter, gradient in right.items():
                # Norms and positions are computed in float32.
                assert_right(found[parameter], gradient, 1e-5, f"{parameter}, {way}")
