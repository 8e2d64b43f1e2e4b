"""Layer rules: one file a family of layers, one function a rule, and the registry that finds them."""

from gradbatch.rules import (
    activation as activation,
    convolution as convolution,
    embedding as embedding,
    linear as linear,
    normalisation as normalisation,
    recurrent as recurrent,
)
from gradbatch.rules.call import (
    Call as Call,
    Layout as Layout,
    RowLayout as RowLayout,
    SampleLayout as SampleLayout,
)
from gradbatch.rules.registry import (
    LayerRule as LayerRule,
    RuleFunction as RuleFunction,
    layer_rule as layer_rule,
    rule_for as rule_for,
    taught_types as taught_types,
    why_no_rule as why_no_rule,
)
