"""One file a package; each says what it offers and hands back one step of a training loop."""

from benchmarks.contestants.backpack_extensions import BackPACK
from benchmarks.contestants.base import Contestant
from benchmarks.contestants.expanded_weights import ExpandedWeights
from benchmarks.contestants.of_gradbatch import GradBatch
from benchmarks.contestants.of_torch import Plain, Vmap
from benchmarks.contestants.opacus_modes import OpacusFunctorch, OpacusGhost, OpacusHooks

PLAIN: Contestant = Plain()
OURS: Contestant = GradBatch()
PEERS: dict[str, Contestant] = {
    peer.name: peer
    for peer in (Vmap(), OpacusHooks(), OpacusFunctorch(), OpacusGhost(), BackPACK(), ExpandedWeights())
}
