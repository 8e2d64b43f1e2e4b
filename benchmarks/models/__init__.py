"""The models that are timed: ordinary modules, written so that every peer can take as many of them as possible.

No parameter is used outside a layer, none is tied, nothing is changed in place, attention is made of linear layers, ids
of positions lie one after another in memory. A model as people write it would be refused by most peers, and there would
be nothing to compare with.
"""
