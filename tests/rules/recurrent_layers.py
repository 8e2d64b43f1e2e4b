"""Cases of recurrent layers and cells; their options are tried one by one in ``test_recurrent.py``."""

from collections.abc import Iterator
from functools import partial

from torch import nn

from tests.rules.arrangements import Arrangement, each
from tests.rules.case import Case, floats

# vmap cannot run the kernels of whole layers.
ORACLES = ("one hot", "loop")
# The hidden states that come behind the output are not looked at.
SEQUENCES = Arrangement("sequences first", each(lambda x: x), lambda y, n: y[0])
STEPS = Arrangement("steps first", each(lambda x: x.movedim(0, 1)), lambda y, n: y[0].movedim(1, 0))
LAST_STATE = Arrangement("last state", each(lambda x: x), lambda y, n: y[1][-1])


def cases() -> Iterator[Case]:
    for kind in (nn.RNN, nn.GRU, nn.LSTM):
        build = partial(kind, 3, 4, batch_first=True)
        yield Case(f"{kind.__name__}", build, floats(5, 3), SEQUENCES, oracles=ORACLES)
        yield Case(f"{kind.__name__}, steps first", partial(kind, 3, 4), floats(4, 3), STEPS, oracles=ORACLES)
        deep = partial(kind, 3, 2, num_layers=2, bidirectional=True, batch_first=True)
        yield Case(f"{kind.__name__}, deep, both ways", deep, floats(3, 3), SEQUENCES, oracles=ORACLES)
    for kind in (nn.RNN, nn.GRU):
        build = partial(kind, 3, 4, batch_first=True)
        yield Case(f"{kind.__name__}, last state", build, floats(5, 3), LAST_STATE, oracles=ORACLES)
    yield Case("RNNCell", partial(nn.RNNCell, 3, 4), floats(3), oracles=ORACLES)
    yield Case("GRUCell", partial(nn.GRUCell, 3, 4), floats(3), oracles=ORACLES)
