"""Every layer that has a rule, with every option that changes its gradients; add a line here with every new rule."""

from tests.rules import convolutions, dense_layers, embeddings, norms, recurrent_layers
from tests.rules.case import Case

CASES: list[Case] = [
    case
    for family in (dense_layers, convolutions, embeddings, norms, recurrent_layers)
    for case in family.cases()
]
