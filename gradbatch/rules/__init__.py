"""Layer rules: one file a family of layers, one function a rule, and the registry that finds them."""

from gradbatch.rules import activation as activation
from gradbatch.rules import convolution as convolution
from gradbatch.rules import embedding as embedding
from gradbatch.rules import linear as linear
from gradbatch.rules import normalisation as normalisation
from gradbatch.rules.call import Call as Call
from gradbatch.rules.call import SampleLayout as SampleLayout
from gradbatch.rules.registry import LayerRule as LayerRule
from gradbatch.rules.registry import RuleFunction as RuleFunction
from gradbatch.rules.registry import layer_rule as layer_rule
from gradbatch.rules.registry import rule_for as rule_for
from gradbatch.rules.registry import taught_types as taught_types
from gradbatch.rules.registry import why_no_rule as why_no_rule
